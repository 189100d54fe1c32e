"""A report as one HTML page: the verdict, the net colored by agreement, and the worst blobs."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable
from html import escape

import jax

from jrnn.gradcheck.report import Fault, GradientReport
from jrnn.graph.svg import to_svg
from jrnn.ir import Net

_WORST = 20  # blobs in the list
_GOOD, _NEAR, _BAD = "#b7e1b0", "#f6e3a1", "#f2a6a0"
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


def page(report: GradientReport, net: Net) -> str:
    """The page, as HTML. Blobs are green where they agree, yellow within a factor of ten of a tolerance, red beyond it."""
    verdict = "the gradients agree" if report.agrees else "the gradients DISAGREE"
    name = escape(report.name or "net")
    parts = [
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}: {verdict}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>Gradients of {name}</h1>",
        f'<p class="verdict {"agrees" if report.agrees else "disagrees"}" id="verdict">{verdict}</p>',
        *_fault(report.fault),
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
    """For each blob that was compared its color in the picture, and its greatest error in units of the tolerance."""
    strains = {name: e / report.tolerance if math.isfinite(e) else math.inf for name, e in report.inner.items()}
    strains |= {b.name: report.strain(b) for b in report.blobs}
    colors = {"agrees": _GOOD, "near": _NEAR, "disagrees": _BAD}
    return {n: (colors[_class(s)], f"{_class(s)}, {s:.1e} of the tolerance") for n, s in strains.items()}


def _class(strain: float) -> str:
    return "agrees" if strain <= 0.1 else "near" if strain <= 1 else "disagrees"


def _fault(fault: Fault | str | None) -> Iterable[str]:
    if fault is not None:
        yield f'<p id="fault">First fault: {"<br>inside: ".join(map(escape, str(fault).split("inside: ")))}</p>'


def _how(report: GradientReport) -> str:
    of = f"the loss {report.loss:.10g}" if report.loss is not None else f"outputs {', '.join(report.outputs)}"
    return escape(
        f"Of {of}, in float64: JAX's gradient, that of the generated backward net, and central differences. Errors are the "
        "largest absolute ones, relative to the gradient's largest element where that is above 1. Tolerances: "
        f"{report.tolerance:g} between the first two, {report.difference_tolerance:g} from differences."
    )


def _table(report: GradientReport) -> str:
    heads, rows = report.table()
    lines = [f"<tr>{''.join(f'<th>{h}</th>' for h in heads)}</tr>"]
    for b, row in zip(report.worst[:_WORST], rows):
        lines.append(f'<tr class="{_class(report.strain(b))}">{"".join(f"<td>{escape(c)}</td>" for c in row)}</tr>')
    return f'<table id="worst">{"".join(lines)}</table>'
