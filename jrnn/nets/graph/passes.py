"""Passes over whole nets: remove dead ends, join two nets, compare two nets, share memory among blobs."""

import bisect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from jrnn.nets.graph.rename import rename_blobs
from jrnn.nets.graph.scope import (
    Workspace,
    all_names,
    bound_names,
    free_names,
    has_sub_nets,
    keeps_outputs,
    outer_names,
    reads,
    workspace_of,
    workspace_outputs,
)
from jrnn.nets.graph.ssa import live_ops
from jrnn.nets.ir import DeviceOption, Net, Op


def remove_dead_end_ops(net: Net) -> Net:
    """Removes the operators that no external output depends on; idempotent.

    As in Caffe2's tools, a net without external outputs keeps no operators, and operators without outputs are removed.
    Unlike there, a blob stays as long as it has one reader left. Blobs that sub-nets read count as read. Step nets are
    cleaned too, unless their operator also has a backward step net or another operator reads their workspaces. External
    inputs stay declared.

    >>> net = Net("n", (Op.of("Relu", ["x"], ["y"]), Op.of("Tanh", ["x"], ["z"])), ("x",), ("y",))
    >>> [op.type for op in remove_dead_end_ops(net).ops]
    ['Relu']
    """
    return _keep_live(net, net.external_outputs)


def _keep_live(net: Net, outputs: Iterable[str]) -> Net:
    ops = [net.ops[i] for i in live_ops(net, outputs)]
    read = {name for op in ops for name in op.inputs}
    return replace(net, ops=tuple(_clean_sub_nets(op, read) for op in ops))


def _clean_sub_nets(op: Op, read: set[str]) -> Op:
    if not has_sub_nets(op):
        return op
    nets = [net for _, net in op.sub_nets()]
    if workspace_of(op) is Workspace.STEP and len(nets) == 1 and read.isdisjoint(workspace_outputs(op)):
        return op.map_sub_nets(lambda net: _keep_live(net, (*net.external_outputs, *bound_names(op))))
    return op.map_sub_nets(_clean_nested)


def _clean_nested(net: Net) -> Net:
    """Cleans the step nets inside the operators of `net`, and keeps all operators."""
    read = {name for op in net.ops for name in op.inputs}
    return replace(net, ops=tuple(_clean_sub_nets(op, read) for op in net.ops))


def on_device(op: Op, device_option: DeviceOption) -> Op:
    """Puts `op` and the operators of its sub-nets on a device."""
    op = op.map_sub_nets(lambda net: replace(net, ops=tuple(on_device(o, device_option) for o in net.ops)))
    return replace(op, device_option=device_option)


def append_net(net: Net, other: Net, device_option: DeviceOption | None = None) -> Net:
    """Returns `net` with the operators of `other` appended.

    External inputs of `other` are declared unless `net` declares or writes them; external outputs are united.

    Args:
        device_option: the device of the appended operators and all their sub-nets; by default their own. Caffe2 changes
            step nets but no other sub-nets.

    >>> first = Net("a", (Op.of("Relu", ["x"], ["y"]),), ("x",), ("y",))
    >>> both = append_net(first, Net("b", (Op.of("Add", ["y", "c"], ["z"]),), ("y", "c"), ("z",)))
    >>> both.name, both.external_inputs, both.external_outputs
    ('a', ('x', 'c'), ('y', 'z'))
    """
    known = {*net.external_inputs, *(o for op in net.ops for o in op.outputs)}
    given = set(net.external_outputs)
    ops = other.ops if device_option is None else tuple(on_device(op, device_option) for op in other.ops)
    return replace(
        net,
        ops=net.ops + ops,
        external_inputs=net.external_inputs + tuple(n for n in other.external_inputs if n not in known),
        external_outputs=net.external_outputs + tuple(n for n in other.external_outputs if n not in given),
    )


def _origins(net: Net) -> list[list[tuple[int, int]]]:
    """Returns the origin of each operator's inputs: (operator, output), or (-1, k) for the k-th blob from outside."""
    origin: dict[str, tuple[int, int]] = {}
    outside = 0
    origins = []
    for i, op in enumerate(net.ops):
        read = (*op.inputs, *free_names(op))
        for name in read:
            if name not in origin:
                origin[name] = (-1, outside)
                outside += 1
        origins.append([origin[name] for name in read])
        origin.update((name, (i, k)) for k, name in enumerate(op.outputs))
    return origins


def verify_graph_equality(net_a: Net, net_b: Net) -> bool:
    """Returns whether two nets are equal up to the names of their blobs.

    The operators must have equal types, devices and engines in the same order, read the same outputs of the same operators
    and the same blobs from outside, and have equal sub-nets. Caffe2 compares only the operators that are read from, so two
    nets that differ in the order of a Split's outputs, or of the net's inputs, are equal there.

    >>> a = Net("a", (Op.of("Relu", ["x"], ["y"]), Op.of("Tanh", ["y"], ["z"])))
    >>> verify_graph_equality(a, Net("b", (Op.of("Relu", ["p"], ["p"]), Op.of("Tanh", ["p"], ["p"]))))
    True
    """
    if len(net_a.ops) != len(net_b.ops):
        return False
    for a, b in zip(net_a.ops, net_b.ops):
        if (a.type, a.device_option, a.engine) != (b.type, b.device_option, b.engine):
            return False
        subs_a, subs_b = list(a.sub_nets()), list(b.sub_nets())
        if [name for name, _ in subs_a] != [name for name, _ in subs_b]:
            return False
        if not all(verify_graph_equality(x, y) for (_, x), (_, y) in zip(subs_a, subs_b)):
            return False
    return _origins(net_a) == _origins(net_b)


@dataclass(frozen=True)
class MemoryReport:
    """The memory that sharing among blobs saves.

    `assignments` maps each blob to the one whose memory it uses. The blobs take `baseline_bytes` without sharing, and
    `optimized_bytes` with it.
    """

    baseline_bytes: int
    optimized_bytes: int
    assignments: dict[str, str]

    @property
    def saved_bytes(self) -> int:
        return self.baseline_bytes - self.optimized_bytes


def optimize_memory(
    net: Net, shapes: Mapping[str, Any], static_blobs: Collection[str] = ()
) -> tuple[Net, MemoryReport]:
    """Gives one name to blobs that are never needed at the same time; returns the net and what that saves.

    Operators keep their order, and none becomes in-place. These blobs keep their names: external inputs and outputs, other
    blobs that the net reads from outside, `static_blobs`, blobs of unknown shape, blobs of recurrent networks, and blobs
    that sub-nets see by name. The nets inside operators do not change. Idempotent.

    Args:
        shapes: arrays, or anything with `.shape` and `.dtype`, by blob, such as `jrnn.nets.infer_shapes` gives. A blob that
            is not an array has no known shape.
        static_blobs: further blobs that keep their names.

    >>> from jrnn.nets.ir import Op
    >>> relu = lambda a, b: Op.of("Relu", [a], [b])
    >>> net = Net("n", (relu("x", "a"), relu("a", "b"), relu("b", "c"), relu("c", "y")), ("x",), ("y",))
    >>> optimized, report = optimize_memory(net, dict.fromkeys("abc", np.zeros([2, 5], np.float32)))
    >>> [op.outputs[0] for op in optimized.ops], report.saved_bytes, report.assignments
    (['a', 'b', 'a', 'y'], 40, {'c': 'a'})
    """
    fixed = {*net.external_inputs, *net.external_outputs, *static_blobs, *reads(net)}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, op in enumerate(net.ops):
        fixed.update(outer_names(op))
        if has_sub_nets(op):
            fixed.update(name for _, sub in op.sub_nets() for name in all_names(sub))
            if workspace_of(op) is Workspace.STEP or keeps_outputs(op):
                fixed.update(op.inputs, op.outputs)
        for name in op.outputs:
            first.setdefault(name, i)
        last.update((name, i) for name in (*op.inputs, *op.outputs))
    known = {name: shapes[name] for name in first if hasattr(shapes.get(name), "dtype")}
    sizes = {name: prod(array.shape) * np.dtype(array.dtype).itemsize for name, array in known.items()}
    ends: dict[int, list[str]] = {}
    for name in sizes:
        if name not in fixed:
            ends.setdefault(last[name], []).append(name)

    slot_of: dict[str, str] = {}
    slot_sizes: dict[str, int] = {}
    free: list[tuple[int, int, str]] = []  # size, age, name; sorted
    for i, op in enumerate(net.ops):
        for name in op.outputs:
            if name in sizes and name not in fixed and name not in slot_of:
                slot = name
                if free:
                    # The smallest that is large enough, else the largest, which grows.
                    slot = free.pop(min(bisect.bisect_left(free, (sizes[name],)), len(free) - 1))[2]
                slot_of[name] = slot
                slot_sizes[slot] = max(slot_sizes.get(slot, 0), sizes[name])
        for name in ends.get(i, ()):
            slot = slot_of[name]
            bisect.insort(free, (slot_sizes[slot], first[slot], slot))
    report = MemoryReport(
        baseline_bytes=sum(sizes[name] for name in slot_of),
        optimized_bytes=sum(slot_sizes.values()),
        assignments={name: slot for name, slot in slot_of.items() if slot != name},
    )
    return rename_blobs(net, report.assignments), report
