"""What a check of gradients found: how well those of each blob agree, and the operator at fault where they do not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class BlobAgreement:
    """How well the gradients of one blob agree.

    Every error is a largest absolute difference, divided by the gradient's own largest element where that is above 1.

    Attributes:
        net_error: between JAX's and the generated net's gradient, over all elements.
        difference_error: between JAX's gradient and central differences, over the `checked` elements.
        direction_error: between JAX's slope along random directions and central differences along them, each of which
            moves every element of the blob; None where all elements were checked one by one.
        second_error: between JAX's second derivative along a random direction and central differences of its gradient;
            None where it was not asked for or does not exist.
        worst: the index where net or differences are farthest from JAX; `values` are the three gradients there, and `of`
            names the element of an output that is differentiated, where the whole Jacobian was compared.
    """

    name: str
    shape: tuple[int, ...]
    net_error: float
    difference_error: float
    checked: int
    worst: tuple[int, ...]
    values: tuple[float, float, float]
    agrees: bool
    of: str = ""
    direction_error: float | None = None
    second_error: float | None = None


@dataclass(frozen=True)
class Fault:
    """The first operator of the backward pass at which gradients part.

    `operator` names it, `blob` is the input whose gradient is wrong while those of the outputs are right, and `values`
    are JAX's gradient, the net's and the central difference at `index`. `inside` is the operator of its step net. Where a
    JAX function is at fault, `operator` is an equation of it, and there is no net's gradient. `cut` says which gradients the
    operator stops because its arguments ask for that.
    """

    operator: str
    type: str
    blob: str
    index: tuple[int, ...]
    values: tuple[float, float | None, float]
    inside: Fault | str | None = None
    cut: str | None = None

    def __str__(self) -> str:
        jax, net, difference = self.values
        at = f" at {list(self.index)}" if self.index else ""
        by_net = "" if net is None else f"{net:.10g} by the net, "
        text = (
            f"{self.operator}: the gradient of its input {self.blob!r}{at} is {jax:.10g} by JAX, {by_net}"
            f"{difference:.10g} by central differences; {self.odd_one()}"
        )
        return text if self.inside is None else f"{text}\n  inside: {self.inside}"

    def odd_one(self) -> str:
        """Which of the three stands alone."""
        jax, net, difference = self.values
        if net is None:
            return "a derivative rule that is not the derivative, or a kink within a step of here"
        near = 1e-5 * max(1.0, *(abs(v) for v in (jax, net, difference) if math.isfinite(v)))
        by_jax, by_net = abs(jax - difference) <= near, abs(net - difference) <= near
        if by_jax and not by_net:
            return "the net's is wrong"
        if by_net and not by_jax:
            return "JAX's is wrong"
        if abs(jax - net) <= near:
            if self.cut:
                return f"differences stand alone, because {self.cut}"
            return (
                "differences stand alone: a gradient rule that is not the derivative, or a kink within a step of here"
            )
        return "all three differ"


@dataclass(frozen=True)
class GradientReport:
    """The result of a gradient check: one agreement for each blob, and the fault where there is one.

    Attributes:
        loss: the loss, or None where the Jacobian of several outputs was compared.
        inner: the agreement of JAX's and the net's gradient at blobs within the net, by name, where asked for.
        fault: where gradients part, if they do.
        notes: what could not be checked, and why.
    """

    loss: float | None
    blobs: tuple[BlobAgreement, ...]
    tolerance: float
    difference_tolerance: float
    name: str = ""
    outputs: tuple[str, ...] = ()
    inner: Mapping[str, float] = field(default_factory=dict)
    fault: Fault | None = None
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        return all(b.agrees for b in self.blobs)

    @property
    def worst(self) -> tuple[BlobAgreement, ...]:
        """The blobs, those that are nearest to their tolerance or beyond it first."""
        return tuple(sorted(self.blobs, key=self.strain, reverse=True))

    def strain(self, b: BlobAgreement) -> float:
        """The greatest error of a blob in units of its tolerance: above 1 it disagrees."""
        errors = (b.difference_error, b.direction_error, b.second_error)
        found = [b.net_error / self.tolerance, *(e / self.difference_tolerance for e in errors if e is not None)]
        return math.inf if any(math.isnan(e) for e in found) else max(found)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON holds it; numbers that are not finite become text."""
        found = _plain({**asdict(self), "agrees": self.agrees})
        assert isinstance(found, dict)
        return found

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The heads of the columns, and a row of cells for each blob, the worst first; see `docs/checking.md`."""
        errors = {"jax - net": "net_error", "jax - diff": "difference_error"}
        more = {"along": "direction_error", "second": "second_error"}
        errors |= {head: name for head, name in more.items() if any(getattr(b, name) is not None for b in self.blobs)}
        rows = []
        for b in self.worst:
            found = [getattr(b, name) for name in errors.values()]
            at = f"{b.of} by {list(b.worst)}" if b.of else str(list(b.worst))
            row = [b.name, str(list(b.shape)), *("-" if e is None else f"{e:.1e}" for e in found)]
            rows.append(
                [*row, *(f"{v:.6g}" for v in b.values), at, *self._verdict("agrees" if b.agrees else "DISAGREES")]
            )
        return ["blob", "shape", *errors, "jax", "net", "difference", "at", *self._verdict("verdict")], rows

    def _verdict(self, text: str) -> list[str]:
        """The cell of a column that is there only where something disagrees."""
        return [] if self.agrees else [text]

    def __str__(self) -> str:
        heads, rows = self.table()
        widths = [max(map(len, column)) for column in zip(heads, *rows)]
        lines = ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths)).rstrip() for row in (heads, *rows)]
        fault = [] if self.fault is None else [f"first fault: {self.fault}"]
        return "\n".join([*lines, *self.notes, *fault])


def table_of(report: GradientReport) -> Table:
    """A report as a table for terminals."""
    heads, rows = report.table()
    table = Table(title=f"gradients of {report.name}", title_justify="left")
    for head in heads:
        if head in ("blob", "shape", "at", "verdict"):
            table.add_column(head, overflow="fold")
        else:
            table.add_column(head, justify="right", no_wrap=True)
    for b, row in zip(report.worst, rows):
        table.add_row(*row, style=None if b.agrees else "red")
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
