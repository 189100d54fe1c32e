"""The tables of operators of docs/operators.md."""

import sys
from dataclasses import replace

from jrnn.nets import registry
from jrnn.nets.ops.catalog import entry


def render():
    """A table for each family, as docs/operators.md has them: those of images and optimizers last."""
    families = {}
    for definition in registry.registered():
        families.setdefault(definition.forward.__module__, []).append(definition)
    parts = []
    for module in sorted(families, key=lambda m: (m.count("."), m)):
        summary = (sys.modules[module].__doc__ or "").splitlines()[0]
        parts.append(f"## {module.removeprefix('jrnn.nets.ops.')}\n\n{summary}\n")
        parts.append(_table(_rows(families[module])))
    total = sum(map(len, families.values()))
    return "\n".join([*parts, f"{total} operators.\n"])


def _rows(family):
    """The entries of a family. A gradient operator stands in the row of its operator."""
    known = {d.type: entry(d) for d in family}
    of = {f"{e.type}Gradient": e for e in known.values() if e.gradient == "yes"}
    for e in known.values():
        gradient = known.get(f"{e.type}Gradient") if e.gradient == "yes" else None
        if e.type not in of:
            yield e if gradient is None else replace(e, gradient=_code(f"({gradient.inputs})"))


def _table(rows):
    lines = [
        "| Operator | Inputs | Outputs | Arguments | Gradient | Notes |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    alike = {}
    for e in rows:
        alike.setdefault(replace(e, type=""), []).append(e.type)
    for e, names in alike.items():
        cells = (
            ", ".join(names),
            _code(e.inputs),
            e.outputs,
            _code(e.arguments),
            e.gradient,
            e.notes,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _code(text):
    return f"`{text}`" if text else ""
