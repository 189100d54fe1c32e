"""Caffe2's nets and plans as frozen records, which compare by content. This file knows neither protobuf nor JAX.

A `Net` (Caffe2's NetDef message) is a list of `Op`s (OperatorDef), which read and write blobs: named values. An `Op` has
`Arg`s (Argument). A sub-net (a recurrent network's step net, a branch of an If) is a `Net` that is the value of an `Arg`.
Fields have the names of the messages' fields. `extra` holds the serialized fields that jrnn does not interpret, so that
reading and writing a net loses nothing. "The wire" is the protobuf format, which `proto/` reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

import numpy as np

from jrnn.errors import NetError
from jrnn.files import plain

Blobs = Mapping[str, Any]  # values by the names of their blobs
Values = dict[str, Any]  # the same, to be filled; or the arguments of an operator
Names = tuple[str, ...]
Shape = tuple[int, ...]
Ints = tuple[int, ...]
NameSet = dict[str, None]  # names, each once, in order
Renames = Mapping[str, str]  # the new names of blobs


class Numbers(Sequence[Any]):
    """An immutable list of int64 or float32 numbers, stored as a numpy array because it may hold a model's weights.

    >>> Numbers([1, 2], np.int64) == (1, 2)
    True
    """

    __slots__ = ("_values",)

    def __init__(self, values: Iterable[float], dtype: Any):
        if not isinstance(values, np.ndarray):
            values = list(values)
        self._values = np.array(values, dtype=dtype).reshape(-1)
        self._values.flags.writeable = False

    def __len__(self) -> int:
        return self._values.size

    def __getitem__(self, index: Any) -> Any:
        numbers = self._values[index]
        if isinstance(index, slice):
            return tuple(numbers.tolist())
        return numbers.item()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if dtype is None:
            return self._values
        return self._values.astype(dtype)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Numbers):
            return (
                self._values.dtype == other._values.dtype
                and self._values.tobytes() == other._values.tobytes()
            )
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))  # the tuple's hash, because a Numbers may equal a tuple

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:8]))
        if len(self) > 8:
            shown += f", ... {len(self)} in all"
        return f"({shown})"


@dataclass(frozen=True, slots=True)
class Message:
    """A serialized protobuf message that jrnn does not interpret, such as the TensorProto of an argument."""

    type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class DeviceOption:
    """Where an operator runs. None: the field is absent on the wire."""

    device_type: int | None = None
    device_id: int | None = None
    random_seed: int | None = None
    node_name: str | None = None
    numa_node_id: int | None = None
    extra_info: Names = ()
    extra: bytes = field(default=b"", repr=False)


ArgValue = Union[float, int, bytes, "Net", Message, Numbers, tuple[Any, ...]]

# The fields of an Argument message that may hold its value, in the order in which `proto/netdef.py` looks for them.
ARG_KINDS = ("f", "i", "s", "n", "t", "floats", "ints", "strings", "nets", "tensors", "qtensors")


@dataclass(frozen=True, slots=True)
class Arg:
    """A named argument. `kind` is the field that holds the value on the wire, or "" for an empty list.

    A Net of kind "s" is written as text, like the step nets of old recurrent networks.
    """

    name: str
    value: ArgValue
    kind: str
    extra: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, name: str, value: Any) -> Arg:
        """The argument that holds a Python value. Its type selects the field, as in Caffe2.

        >>> Arg.of("axis", 2).kind, Arg.of("dims", [0, 1]).kind, Arg.of("order", "NCHW").value
        ('i', 'ints', b'NCHW')
        """
        kind, encoded = _encode(name, value)
        return cls(name, encoded, kind)

    def names(self) -> Names:
        """The strings that it holds, as names of blobs. Like Caffe2, returns none if the value has another type.

        Raises:
            NetError: if a name is not UTF-8.
        """
        values = self.value if isinstance(self.value, tuple) else (self.value,)
        try:
            return tuple(v.decode() for v in values if isinstance(v, bytes))
        except UnicodeDecodeError as e:
            raise NetError(
                f"argument {self.name!r} holds a blob name that is not UTF-8: {e.object[:40]!r}"
            ) from None


def _encode(name: str, value: Any) -> tuple[str, ArgValue]:
    value = plain(value)
    match value:
        case bool() | int():
            return "i", int(value)
        case float():
            return "f", float(np.float32(value))
        case str():
            return "s", value.encode()
        case bytes():
            return "s", value
        case Net():
            return "n", value
        case Message():
            return "t", value
        case np.ndarray() if value.size and value.dtype.kind == "f":
            return "floats", Numbers(value, np.float32)
        case np.ndarray() if value.size and value.dtype.kind in "iub":
            return "ints", Numbers(value, np.int64)
    items = list(map(plain, value)) if isinstance(value, Iterable) else [value]
    if not items:
        return "", ()

    def holds(*types: type) -> bool:
        return all(isinstance(item, types) for item in items)

    if holds(int):
        return "ints", Numbers(items, np.int64)
    if holds(int, float):
        return "floats", Numbers(items, np.float32)
    if holds(str, bytes):
        return "strings", tuple(v.encode() if isinstance(v, str) else v for v in items)
    if holds(Net):
        return "nets", tuple(items)
    if holds(Message):
        return "tensors", tuple(items)
    raise TypeError(f"argument {name!r}: cannot hold a {type(value).__name__}: {value!r}")


def _find(args: Sequence[Arg], name: str) -> Arg | None:
    """The first argument of a name, as in Caffe2."""
    for arg in args:
        if arg.name == name:
            return arg
    return None


@dataclass(frozen=True)
class Op:
    """One operator: reads blobs `inputs`, writes blobs `outputs`."""

    type: str
    inputs: Names = ()
    outputs: Names = ()
    args: tuple[Arg, ...] = ()
    name: str = ""
    engine: str = ""
    device_option: DeviceOption | None = None
    control_inputs: Names = ()
    is_gradient: bool = False
    extra: bytes = field(default=b"", repr=False)

    @classmethod
    def of(
        cls, type: str, inputs: Iterable[str] = (), outputs: Iterable[str] = (), /, **args: Any
    ) -> Op:
        """An operator from Python values. Arguments that are None are omitted.

        >>> Op.of("FC", ["x", "w", "b"], ["y"], axis=2).arg("axis")
        2
        """
        present = tuple(Arg.of(name, value) for name, value in args.items() if value is not None)
        return cls(type, tuple(inputs), tuple(outputs), present)

    def arg(self, name: str, default: Any = None) -> Any:
        """The value of an argument, or `default` if it is absent. Strings are bytes, as on the wire."""
        arg = _find(self.args, name)
        return default if arg is None else arg.value

    def names(self, name: str) -> Names:
        """The names of blobs in an argument, or none if it is absent; see `Arg.names`."""
        arg = _find(self.args, name)
        return () if arg is None else arg.names()

    def integers(self, name: str) -> Ints:
        """The integers in an argument. Like Caffe2, returns none if it is absent or not a list of integers."""
        arg = _find(self.args, name)
        if arg is None or arg.kind != "ints" or not isinstance(arg.value, (Numbers, tuple)):
            return ()
        return tuple(arg.value)

    def with_args(self, changes: Mapping[str, Any]) -> Op:
        """The same operator with arguments replaced in place or appended. Arguments whose new value is None are removed."""
        new: dict[str, Arg] = {}
        for name, value in changes.items():
            if value is not None:
                new[name] = value if isinstance(value, Arg) else Arg.of(name, value)

        args = []
        for arg in self.args:
            if arg.name in new:
                args.append(new.pop(arg.name))
            elif arg.name not in changes:
                args.append(arg)
        return replace(self, args=(*args, *new.values()))

    def sub_nets(self) -> Iterator[tuple[str, Net]]:
        """Every net in an argument, with the argument's name."""
        for arg in self.args:
            values = arg.value if isinstance(arg.value, tuple) else (arg.value,)
            for value in values:
                if isinstance(value, Net):
                    yield arg.name, value

    def map_sub_nets(self, change: Callable[[Net], Net]) -> Op:
        """The same operator with every sub-net replaced by `change(net)`."""

        def mapped(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(mapped, value))
            if isinstance(value, Net):
                return change(value)
            return value

        if not nets_of(self):
            return self
        return replace(self, args=tuple(replace(a, value=mapped(a.value)) for a in self.args))


@dataclass(frozen=True)
class Net:
    """A list of operators, which run in order, and the declared external inputs and outputs."""

    name: str = ""
    ops: tuple[Op, ...] = ()
    external_inputs: Names = ()
    external_outputs: Names = ()
    type: str = ""
    args: tuple[Arg, ...] = ()
    device_option: DeviceOption | None = None
    extra: bytes = field(default=b"", repr=False)

    def arg(self, name: str, default: Any = None) -> Any:
        """The value of an argument of the net, or `default` if it is absent."""
        arg = _find(self.args, name)
        return default if arg is None else arg.value


def map_ops(net: Net, change: Callable[[Op], Op]) -> Net:
    """The same net with every operator replaced by `change(op)`."""
    return replace(net, ops=tuple(map(change, net.ops)))


def nets_of(op: Op) -> list[Net]:
    """The nets in the arguments of an operator."""
    return [net for _, net in op.sub_nets()]


def written_by(ops: Iterable[Op]) -> NameSet:
    """The blobs that operators write, each once, in order of appearance: a dict serves as the ordered set."""
    written: NameSet = {}
    for op in ops:
        written.update(dict.fromkeys(op.outputs))
    return written


def makers_of(ops: Iterable[Op]) -> dict[str, Op]:
    """The operator that writes each blob last."""
    makers: dict[str, Op] = {}
    for op in ops:
        makers.update(dict.fromkeys(op.outputs, op))
    return makers


def inputs_of(ops: Iterable[Op]) -> NameSet:
    """The inputs of operators, each once, in order of appearance, as in `written_by`."""
    read: NameSet = {}
    for op in ops:
        read.update(dict.fromkeys(op.inputs))
    return read


@dataclass(frozen=True)
class ExecutionStep:
    """Runs `networks` (by name, in order) or `substeps`: `num_iter` times, or until `should_stop_blob` is True.

    None: the field is absent on the wire. On the wire, `substeps` and `networks` are `substep` and `network`; the other
    fields have the same names.

    Attributes:
        should_stop_blob: is read after each net and substep; True ends the step immediately.
        only_once: the step ends after one iteration even if `should_stop_blob` is False.
        concurrent_substeps: the substeps may run concurrently; `should_stop_blob` is read when all have ended.
        num_concurrent_instances: how many copies of the substeps run concurrently.
        create_workspace: when the step ends, blobs that it created are dropped.
        report_net: a net that Caffe2 runs every `report_interval` milliseconds during the step, and once at its end.
        run_every_ms: Caffe2 runs this substep at such intervals during the others.
        criteria_network: Caffe2 ignores it.
    """

    name: str = ""
    substeps: tuple[ExecutionStep, ...] = ()
    networks: Names = ()
    num_iter: int | None = None
    criteria_network: str | None = None
    concurrent_substeps: bool | None = None
    report_net: str | None = None
    report_interval: int | None = None
    should_stop_blob: str | None = None
    only_once: bool | None = None
    run_every_ms: int | None = None
    create_workspace: bool | None = None
    num_concurrent_instances: int | None = None

    @property
    def side_by_side(self) -> bool:
        """Whether the substeps may run concurrently."""
        return (self.num_concurrent_instances or 1) > 1 or (
            bool(self.concurrent_substeps) and len(self.substeps) > 1
        )

    def network_names(self) -> Iterator[str]:
        """The names of the nets that the step and its substeps run, in order, with duplicates."""
        yield from self.networks
        if self.report_net:
            yield self.report_net
        for substep in self.substeps:
            yield from substep.network_names()


@dataclass(frozen=True)
class Plan:
    """Nets, and the steps that run them, one after the other."""

    name: str = ""
    networks: tuple[Net, ...] = ()
    steps: tuple[ExecutionStep, ...] = ()
