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
    inputs = []
    for k, name in enumerate(definition.inputs):
        is_needed = k < definition.min_inputs or name.startswith("*")
        inputs.append(name if is_needed else f"[{name}]")
    least, most = definition.outputs
    if least == most:
        outputs = str(least)
    elif most is None:
        outputs = f"{least} or more"
    else:
        outputs = f"{least} to {most}"
    if registry.gradient_maker(definition.type):
        gradient = "yes"
    else:
        gradient = "stops" if definition.gradient == "stops" else "none"
    notes = [name for name in ("random", "dynamic", "frees") if getattr(definition, name)]
    notes += [f"in place: output {o} over input {i}" for o, i in definition.inplace.items()]
    return Entry(
        type=definition.type,
        inputs=", ".join(inputs),
        outputs=outputs,
        arguments=", ".join(map(_argument, definition.args)),
        gradient=gradient,
        notes=", ".join(notes),
    )


def entries() -> list[Entry]:
    """Every registered operator, by name."""
    return list(map(entry, registry.registered()))


def _argument(spec: ArgSpec) -> str:
    words = f"{spec.name}: {_kind(spec.annotation)}"
    if spec.required:
        return words
    value = spec.default
    if isinstance(value, tuple):
        value = list(value)
    elif isinstance(value, bool):
        value = int(value)
    return f"{words} = {value!r}"


def _kind(annotation: Any) -> str:
    """An annotation in the terms of nets: `ints` for a tuple of ints."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_kind(k) for k in typing.get_args(annotation) if k is not type(None))
    if typing.get_origin(annotation) is tuple:
        return _kind(typing.get_args(annotation)[0]) + "s"
    name = str(annotation.__name__)
    return {"str": "string", "ndarray": "numbers"}.get(name, name.lower())
