"""A report as a table for terminals."""

from __future__ import annotations

from rich.table import Table

from jrnn.gradcheck.report import GradientReport


def table_of(report: GradientReport) -> Table:
    """One row a blob, the worst first."""
    table = Table(title=f"gradients of {report.name}", title_justify="left")
    errors = {"jax - net": "net_error", "jax - diff": "difference_error"}
    more = {"along": "direction_error", "second": "second_error"}
    errors |= {head: name for head, name in more.items() if any(getattr(b, name) is not None for b in report.blobs)}
    for head in ("blob", "shape"):
        table.add_column(head, overflow="fold")
    for head in (*errors, "jax", "net", "difference"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("at", overflow="fold")
    if not report.agrees:
        table.add_column("verdict")
    for b in report.worst:
        cells = [b.name, str(list(b.shape))]
        cells += ["-" if e is None else f"{e:.1e}" for e in (getattr(b, name) for name in errors.values())]
        cells += [f"{v:.6g}" for v in b.values]
        cells.append(f"{b.of} by {list(b.worst)}" if b.of else str(list(b.worst)))
        if not report.agrees:
            cells.append("agrees" if b.agrees else "DISAGREES")
        table.add_row(*cells, style=None if b.agrees else "red")
    return table
