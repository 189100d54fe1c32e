"""Descriptions of the registered operators: the rows of `jrnn ops`, and of docs/operators.md."""

import sys
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from jrnn.nets import registry
from jrnn.nets.registry import ArgSpec, OpDef


@dataclass(frozen=True)
class Entry:
    """One operator, in words."""

    type: str
    inputs: str
    outputs: str
    arguments: str
    gradient: str
    notes: str


def entry(definition: OpDef) -> Entry:
    """The entry of an operator.

    >>> entry(registry.lookup("Softmax"))
    Entry(type='Softmax', inputs='x', outputs='1', arguments='axis: int = 1', gradient='yes', notes='')
    """
    inputs = [
        name if k < definition.min_inputs or name.startswith("*") else f"[{name}]"
        for k, name in enumerate(definition.inputs)
    ]
    least, most = definition.outputs
    several = f"{least} or more" if most is None else f"{least} to {most}"
    stops = "stops" if definition.gradient == "stops" else "none"
    notes = [name for name in ("random", "dynamic", "frees") if getattr(definition, name)]
    notes += [f"in place: output {o} over input {i}" for o, i in definition.inplace.items()]
    return Entry(
        type=definition.type,
        inputs=", ".join(inputs),
        outputs=str(least) if least == most else several,
        arguments=", ".join(_argument(spec) for spec in definition.args),
        gradient="yes" if registry.gradient_maker(definition.type) else stops,
        notes=", ".join(notes),
    )


def entries() -> list[Entry]:
    """Every registered operator, by name."""
    return [entry(d) for d in registry.registered()]


def _argument(spec: ArgSpec) -> str:
    value = spec.default
    if isinstance(value, tuple | bool):
        value = list(value) if isinstance(value, tuple) else int(value)
    return f"{spec.name}: {_kind(spec.annotation)}" + ("" if spec.required else f" = {value!r}")


def _kind(annotation: Any) -> str:
    """An annotation in the terms of nets: `ints` for a tuple of ints."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_kind(k) for k in typing.get_args(annotation) if k is not type(None))
    if typing.get_origin(annotation) is tuple:
        return _kind(typing.get_args(annotation)[0]) + "s"
    name = str(annotation.__name__)
    return {"str": "string", "ndarray": "numbers"}.get(name, name.lower())


def render() -> str:
    """A table for each family, contrib's last, as docs/operators.md includes them."""
    families: dict[str, list[OpDef]] = {}
    for definition in registry.registered():
        families.setdefault(definition.forward.__module__, []).append(definition)
    parts = []
    for module in sorted(families, key=lambda m: (".contrib." in m, m)):
        summary = (sys.modules[module].__doc__ or "").splitlines()[0]
        parts.append(f"## {module.removeprefix('jrnn.nets.ops.')}\n\n{summary}\n")
        parts.append(_table(_rows(families[module])))
    total = sum(map(len, families.values()))
    return "\n".join([*parts, f"{total} operators.\n"])


def _rows(family: list[OpDef]) -> Iterable[Entry]:
    """The entries of a family. A gradient operator stands in the row of its operator."""
    known = {d.type: entry(d) for d in family}
    of = {f"{e.type}Gradient": e for e in known.values() if e.gradient == "yes"}
    for e in known.values():
        gradient = known.get(f"{e.type}Gradient") if e.gradient == "yes" else None
        if e.type not in of:
            yield e if gradient is None else replace(e, gradient=_code(f"({gradient.inputs})"))


def _table(rows: Iterable[Entry]) -> str:
    lines = ["| Operator | Inputs | Outputs | Arguments | Gradient | Notes |", "| --- | --- | --- | --- | --- | --- |"]
    alike: dict[Entry, list[str]] = {}
    for e in rows:
        alike.setdefault(replace(e, type=""), []).append(e.type)
    for e, names in alike.items():
        cells = (", ".join(names), _code(e.inputs), e.outputs, _code(e.arguments), e.gradient, e.notes)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
