"""The result of a check of gradients: the agreement of each blob, the operator at fault, and an HTML page of both."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
from rich.table import Table
from rich.text import Text

from jrnn.errors import printable
from jrnn.nets.graph.svg import escape, to_svg
from jrnn.nets.ir import Ints, Names, Net

_WORST = 20  # blobs in the list
_GOOD = "#b7e1b0"
_NEAR = "#f6e3a1"
_BAD = "#f2a6a0"
_STYLE = f"""
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; color: #222 }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.15rem; margin-top: 2rem }}
table {{ border-collapse: collapse; font-size: .9rem; white-space: nowrap }}
th, td {{ padding: .25rem .6rem; text-align: right }}
th {{ border-bottom: 2px solid #999 }} td {{ border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums }}
th:first-child, td:first-child {{ text-align: left; font-family: ui-monospace, monospace }}
.scroll {{ overflow: auto; max-height: 60rem; border: 1px solid #ddd }}
.verdict {{ padding: .6rem 1rem; border-radius: .4rem }}
.agrees {{ background: {_GOOD} }} .near {{ background: {_NEAR} }} .disagrees {{ background: {_BAD} }}
.key span {{ padding: .1rem .6rem; border-radius: .7rem; margin-right: .6rem }}
"""


Blobs = Mapping[str, Any]  # arrays by name


@dataclass(frozen=True)
class BlobAgreement:
    """How well the gradients of one blob agree.

    Every error is the largest absolute difference, divided by the gradient's largest element if that is above 1.

    Attributes:
        net_error: between JAX's and the generated net's gradient, over all elements; None if there is no net.
        difference_error: between JAX's gradient and central differences, over the `checked` elements.
        direction_error: between JAX's slope along random directions, which change every element of the blob, and central
            differences; None if all elements were checked one by one.
        second_error: between JAX's second derivative along a random direction and central differences of its gradient;
            None if it was not requested or does not exist.
        worst: the index where the net or differences are farthest from JAX. `values` are the three gradients there. `of`
            names the element of an output that is differentiated, if the whole Jacobian was compared.
        is_zero: whether JAX's gradient is zero for all elements.
        file_error: between JAX's gradient and the gradient operators in the file; None if there are none.
        file_value: the file's gradient at `worst`.
    """

    name: str
    shape: Ints
    net_error: float | None
    difference_error: float
    checked: int
    worst: Ints
    values: tuple[float, float | None, float]
    agrees: bool
    of: str = ""
    direction_error: float | None = None
    second_error: float | None = None
    is_zero: bool = False
    file_error: float | None = None
    file_value: float | None = None


_UNSAFE = "JAX's is not finite: give the branch that jnp.where does not take a safe argument"


def within(errors: Iterable[float | None], tolerance: float) -> bool:
    """Whether no error is above the tolerance, or NaN; None is an error that was not computed."""
    for error in errors:
        if error is not None and not error <= tolerance:
            return False
    return True


def _near(a: float | None, b: float | None, among: tuple[float | None, ...]) -> bool:
    """Whether two gradients are equal, up to the precision of differences."""
    scale = max(1.0, *(abs(v) for v in among if v is not None and math.isfinite(v)))
    return a is not None and b is not None and abs(a - b) <= 1e-5 * scale


@dataclass(frozen=True)
class WrittenFault:
    """The first wrong gradient operator of a training net, or of a backward step net.

    Attributes:
        operator: describes the operator.
        blob: the output that is wrong.
        values: its value at `index`, and the right one; None where it has no such value.
        reason: why, if the value does not say it.
        position: of the operator among the gradient operators.
        inside: the fault inside its backward step net.
    """

    operator: str
    type: str
    blob: str
    index: Ints
    values: tuple[float, float] | None
    reason: str = ""
    position: int = 0
    inside: WrittenFault | str | None = None

    def __str__(self) -> str:
        text = f"{self.operator}: this gradient operator is wrong"
        if self.values is not None:
            value, right = self.values
            at = f" at {list(self.index)}" if self.index else ""
            text = f"{text}: {self.blob!r}{at} is {value:.10g}, and {right:.10g} is right"
        if self.reason:
            text = f"{text}; {self.reason}"
        return text if self.inside is None else f"{text}\n  inside: {self.inside}"


@dataclass(frozen=True)
class Fault:
    """The first operator of the backward pass at which gradients differ.

    Attributes:
        operator: describes the operator, or an equation of a JAX function, which has no gradient by the net.
        blob: the input whose gradient is wrong, while the gradients of the outputs are right.
        values: JAX's gradient, the net's, and the central difference at `index`.
        inside: the fault inside its step net.
        cut: which gradients the operator stops, because its arguments say so.
        written: the operator of the backward step net that is wrong.
    """

    operator: str
    type: str
    blob: str
    index: Ints
    values: tuple[float, float | None, float]
    inside: Fault | str | None = None
    cut: str | None = None
    written: WrittenFault | None = None

    def __str__(self) -> str:
        by_jax, by_net, difference = self.values
        at = f" at {list(self.index)}" if self.index else ""
        net = "" if by_net is None else f"{by_net:.10g} by the net, "
        text = (
            f"{self.operator}: the gradient of its input {self.blob!r}{at} is {by_jax:.10g} by JAX, {net}"
            f"{difference:.10g} by central differences; {self.odd_one()}"
        )
        parts = [text]
        if self.inside is not None:
            parts.append(f"inside: {self.inside}")
        if self.written is not None:
            parts.append(f"inside: {self.written}")
        return "\n  ".join(parts)

    def odd_one(self) -> str:
        """Which of the three gradients differs from the other two."""
        by_jax, by_net, difference = self.values
        if by_net is None:
            if not math.isfinite(by_jax) and math.isfinite(difference):
                return _UNSAFE
            return (
                "a custom gradient is wrong, or the function is not differentiable near this point"
            )
        if not math.isfinite(by_jax) and math.isfinite(difference):
            return _UNSAFE
        jax_agrees = _near(by_jax, difference, self.values)
        net_agrees = _near(by_net, difference, self.values)
        if jax_agrees != net_agrees:
            return "the net's is wrong" if jax_agrees else "JAX's is wrong"
        if not _near(by_jax, by_net, self.values):
            return "all three differ"
        if self.cut:
            return f"differences stand alone, because {self.cut}"
        return "differences stand alone: a custom gradient is wrong, or the function is not differentiable near this point"


@dataclass(frozen=True)
class GradientReport:
    """The result of a gradient check: the agreement of each blob, and the fault if they disagree.

    Attributes:
        loss: the loss, or None where the Jacobian of several outputs was compared.
        inner: the agreement of JAX's and the net's gradient at blobs within the net, by name, where asked for.
        fault: where gradients differ, if they do.
        notes: what could not be checked, and why.
        stopped: the blobs whose differences change if the values that `stop_gradient` stops are not held.
        stops: the lines at which it does so; if `stopped` is empty, all lines at which it is called.
    """

    loss: float | None
    blobs: tuple[BlobAgreement, ...]
    tolerance: float
    difference_tolerance: float
    name: str = ""
    outputs: Names = ()
    inner: Mapping[str, float] = field(default_factory=dict)
    fault: Fault | WrittenFault | None = None
    notes: Names = ()
    stopped: Names = ()
    stops: Names = ()

    @property
    def agrees(self) -> bool:
        return all(b.agrees for b in self.blobs) and self.fault is None

    @property
    def worst(self) -> tuple[BlobAgreement, ...]:
        """The blobs, sorted by their errors relative to their tolerances, the largest first."""
        return tuple(sorted(self.blobs, key=self.strain, reverse=True))

    def strain(self, b: BlobAgreement) -> float:
        """The largest error of a blob relative to its tolerance; above 1 it disagrees."""
        errors = (b.difference_error, b.direction_error, b.second_error)
        shares = [e / self.difference_tolerance for e in errors if e is not None]
        shares += [e / self.tolerance for e in (b.net_error, b.file_error) if e is not None]
        return math.inf if any(map(math.isnan, shares)) else max(shares)

    def to_dict(self) -> dict[str, Any]:
        """The report as values of JSON; numbers that are not finite become text."""
        fields = {
            **asdict(self),
            "agrees": self.agrees,
            "verdict": self.verdict(),
            "conclusion": self.conclusion(),
        }
        return _plain(fields)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The heads of the columns, and a row of cells for each blob, the worst first; see `docs/checking.md`."""
        errors = {"|JAX - net|": "net_error", "|JAX - differences|": "difference_error"}
        more = {
            "|JAX - file|": "file_error",
            "directional": "direction_error",
            "2nd derivative": "second_error",
        }
        for head, name in more.items():
            if any(getattr(b, name) is not None for b in self.blobs):
                errors[head] = name
        is_written = any(b.file_error is not None for b in self.blobs)
        heads = [
            "blob",
            "shape",
            *errors,
            "jax",
            "net",
            "difference",
            *(["file"] if is_written else []),
            "at",
            *([] if self.agrees else ["verdict"]),
        ]
        rows = []
        for b in self.worst:
            numbers = [getattr(b, name) for name in errors.values()]
            at = f"{b.of} by {list(b.worst)}" if b.of else str(list(b.worst))
            row = [b.name, str(list(b.shape)), *_cells(numbers, ".1e")]
            values = (*b.values, b.file_value) if is_written else b.values
            row += [*_cells(values, ".6g"), at, "agrees" if b.agrees else "DISAGREES"]
            rows.append(row[: len(heads)])
        return heads, rows

    def conclusion(self) -> str:
        """Whether the gradients agree, and if so, what `cautions` says."""
        if not self.agrees:
            return "the gradients DISAGREE"
        cautions = self.cautions()
        if cautions:
            return f"the gradients agree, but {', and '.join(cautions)}"
        return "the gradients agree"

    def cautions(self) -> list[str]:
        """Which gradients `stop_gradient` cuts off or changes, and which others are zero for all elements."""
        zero = [b.name for b in self.blobs if b.is_zero]
        cut = ", ".join(n for n in zero if n in self.stopped)
        changed = ", ".join(n for n in self.stopped if n not in zero)
        alone = ", ".join(n for n in zero if n not in self.stopped)
        at = f"stop_gradient ({', '.join(self.stops) or 'in a library'})"
        said = [f"cuts off the gradient of {cut}"] * bool(cut) + [
            f"changes the gradient of {changed}"
        ] * bool(changed)
        cautions = [f"{at} {' and '.join(said)}"] * bool(said)
        if alone:
            if self.stops and not said:
                there = f" (stop_gradient is called at {', '.join(self.stops)})"
            else:
                there = ""
            cautions.append(f"the gradient of {alone} is zero for all elements{there}")
        return cautions

    def verdict(self) -> str:
        """Which of the gradients agree, as in `JAX's gradient and the net's agree; central differences do not`."""
        errors = [b.file_error for b in self.blobs if b.file_error is not None]
        if not errors and not isinstance(self.fault, WrittenFault):
            return self._of_three()
        agrees = within(errors, self.tolerance)
        if agrees and not isinstance(self.fault, WrittenFault):
            return f"{self._of_three()}; so do the gradient operators in the file"
        return f"{self._of_three()}; the gradient operators in the file do not"

    def _of_three(self) -> str:
        """Which of JAX's gradient, the net's and central differences agree."""
        if not self.blobs:
            return "no gradient was compared"
        errors = []
        for b in self.blobs:
            errors += [b.difference_error, b.direction_error, b.second_error]
        differences = within(errors, self.difference_tolerance)
        net_errors = [b.net_error for b in self.blobs]
        if net_errors.count(None) == len(net_errors):
            return f"JAX's gradient and central differences {'' if differences else 'dis'}agree; there is no net"
        net = None not in net_errors and within(net_errors, self.tolerance)
        if net and differences:
            return "JAX's gradient, the net's and central differences agree"
        if net:
            return "JAX's gradient and the net's agree; central differences do not"
        if differences:
            return "JAX's gradient and central differences agree; the net's does not"
        for b in self.blobs:
            if not b.agrees and not _near(b.values[1], b.values[2], b.values):
                return "no two gradients agree"
        return "the net's gradient and central differences agree; JAX's does not"

    def __str__(self) -> str:
        heads, rows = self.table()
        widths = [max(map(len, column)) for column in zip(heads, *rows)]
        lines = []
        for row in (heads, *rows):
            cells = map(str.ljust, row, widths)
            lines.append("  ".join(cells).rstrip())
        fault = [] if self.fault is None else [f"first fault: {self.fault}"]
        return "\n".join([self.conclusion(), *lines, *self.notes, self.verdict(), *fault])


def _cells(numbers: Iterable[float | None], digits: str) -> list[str]:
    """Numbers as text, "-" where there is none."""
    return ["-" if number is None else format(number, digits) for number in numbers]


def table_of(report: GradientReport) -> Table:
    """A report as a table for terminals."""
    heads, rows = report.table()
    table = Table(title=Text(printable(f"gradients of {report.name}")), title_justify="left")
    for head in heads:
        if head in ("blob", "shape", "at", "verdict"):
            table.add_column(head, overflow="fold")
        else:
            table.add_column(head, justify="right", no_wrap=True)
    for b, row in zip(report.worst, rows):
        table.add_row(*(Text(printable(c)) for c in row), style=None if b.agrees else "red")
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_plain, value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# The page --------------------------------------------------------------------------------------------------------------


def page(report: GradientReport, net: Net) -> str:
    """The page, as HTML. Blobs are green if they agree, yellow within a factor of ten of a tolerance, red beyond it."""
    verdict = "the gradients agree" if report.agrees else "the gradients DISAGREE"
    name = escape(report.name or "net")
    fault = []
    if report.fault is not None:
        text = "<br>inside: ".join(map(escape, str(report.fault).split("inside: ")))
        fault = [f'<p id="fault">First fault: {text}</p>']
    parts = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}: {verdict}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>Gradients of {name}</h1>",
        f'<p class="verdict {"agrees" if report.agrees else "disagrees"}" id="verdict">{escape(report.conclusion())}</p>',
        *fault,
        f"<p>{escape(report.verdict())}</p>",
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        f"<p>{_how(report)}</p>",
        "<h2>The net</h2>",
        '<p class="key"><span class="agrees">agrees</span><span class="near">within a factor of ten of a tolerance</span>'
        '<span class="disagrees">disagrees</span><span>no gradient was compared</span></p>',
        f'<div class="scroll">{to_svg(net, marks(report))}</div>',
        f"<h2>The worst {min(_WORST, len(report.blobs))} of {len(report.blobs)} blobs</h2>",
        f'<div class="scroll">{_table(report)}</div>',
        f"<p>jax {jax.__version__}, Python {platform.python_version()}, {platform.platform()}</p>",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def marks(report: GradientReport) -> dict[str, tuple[str, str]]:
    """For each blob that was compared, its color in the picture and its largest error relative to the tolerance."""
    strains = {}
    for name, e in report.inner.items():
        strains[name] = e / report.tolerance if math.isfinite(e) else math.inf
    for b in report.blobs:
        strains[b.name] = report.strain(b)
    colors = {"agrees": _GOOD, "near": _NEAR, "disagrees": _BAD}
    marked = {}
    for name, strain in strains.items():
        verdict = _class(strain)
        marked[name] = (colors[verdict], f"{verdict}, {strain:.1e} of the tolerance")
    return marked


def _class(strain: float) -> str:
    if strain <= 0.1:
        return "agrees"
    return "near" if strain <= 1 else "disagrees"


def _how(report: GradientReport) -> str:
    if report.loss is not None:
        of = f"the loss {report.loss:.10g}"
    else:
        of = f"outputs {', '.join(report.outputs)}"
    return escape(
        f"Of {of}, in float64: JAX's gradient, the generated backward net's, and central differences. Errors are the "
        "largest absolute ones, relative to the gradient's largest element if that is above 1. Tolerances: "
        f"{report.tolerance:g} between the first two, {report.difference_tolerance:g} from differences."
    )


def _html_cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)


def _table(report: GradientReport) -> str:
    heads, rows = report.table()
    lines = [f"<tr>{_html_cells('th', heads)}</tr>"]
    for b, row in zip(report.worst[:_WORST], rows):
        lines.append(f'<tr class="{_class(report.strain(b))}">{_html_cells("td", row)}</tr>')
    return f'<table id="worst">{"".join(lines)}</table>'
