"""Descriptions of the registered operators: the rows of `jrnn ops`, and of docs/operators.md (`docs/operator_tables.py`)."""

import types
import typing
from dataclasses import dataclass
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
