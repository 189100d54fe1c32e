"""Passes over whole nets: remove dead ends, join two nets, compare two nets, share memory among blobs, remove reshapes.

Reshapes before fully connected layers go, which flatten their input by themselves.
"""

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod
from typing import Any

import numpy as np

from jrnn.nets.graph.rename import rename_blobs, rename_in_op
from jrnn.nets.graph.scope import (
    Workspace,
    all_names,
    all_reads,
    bound_names,
    has_sub_nets,
    keeps_outputs,
    outer_names,
    reads,
    workspace_of,
    workspace_outputs,
)
from jrnn.nets.graph.ssa import Flow, Versioned, with_live_ops
from jrnn.nets.ir import (
    Blobs,
    DeviceOption,
    Net,
    Op,
    Values,
    inputs_of,
    map_ops,
    nets_of,
    written_by,
)


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
    """Keeps what `outputs` depend on, and cleans the step nets of these operators."""
    return _clean_nested(with_live_ops(net, outputs))


def _clean_sub_nets(op: Op, read: Collection[str]) -> Op:
    """Cleans the sub-nets of an operator; `read` are the inputs of all operators around it."""

    def keep_results(net: Net) -> Net:
        return _keep_live(net, (*net.external_outputs, *bound_names(op)))

    nets = nets_of(op)
    is_step_net = len(nets) == 1 and workspace_of(op) is Workspace.STEP
    if is_step_net and not any(name in read for name in workspace_outputs(op)):
        return op.map_sub_nets(keep_results)
    return op.map_sub_nets(_clean_nested)


def _clean_nested(net: Net) -> Net:
    """Cleans the step nets inside the operators of `net`, and keeps all operators."""
    read = inputs_of(net.ops)
    return map_ops(net, lambda op: _clean_sub_nets(op, read))


def on_device(op: Op, device_option: DeviceOption) -> Op:
    """Puts `op` and the operators of its sub-nets on a device."""

    def put(inner: Op) -> Op:
        return on_device(inner, device_option)

    op = op.map_sub_nets(lambda net: map_ops(net, put))
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
    ops = other.ops
    if device_option is not None:
        ops = tuple(on_device(op, device_option) for op in ops)
    known = {*net.external_inputs, *written_by(net.ops)}
    inputs = [name for name in other.external_inputs if name not in known]
    outputs = [name for name in other.external_outputs if name not in net.external_outputs]
    return replace(
        net,
        ops=net.ops + ops,
        external_inputs=(*net.external_inputs, *inputs),
        external_outputs=(*net.external_outputs, *outputs),
    )


def _origins(net: Net) -> list[list[tuple[int, int]]]:
    """Returns the origin of each operator's inputs: (operator, output), or (-1, k) for the k-th blob from outside."""
    origin: dict[str, tuple[int, int]] = {}
    outside = 0
    origins = []
    for i, op in enumerate(net.ops):
        read = all_reads(op)
        for name in read:
            if name not in origin:
                origin[name] = (-1, outside)
                outside += 1
        origins.append([origin[name] for name in read])
        for k, name in enumerate(op.outputs):
            origin[name] = (i, k)
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
        for sub_a, sub_b in zip_longest(a.sub_nets(), b.sub_nets()):
            if sub_a is None or sub_b is None or sub_a[0] != sub_b[0]:
                return False
            if not verify_graph_equality(sub_a[1], sub_b[1]):
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
    net: Net, shapes: Blobs, static_blobs: Collection[str] = ()
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
    fixed = _fixed_names(net) | set(static_blobs)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, op in enumerate(net.ops):
        for name in op.outputs:
            first.setdefault(name, i)
        last.update(dict.fromkeys((*op.inputs, *op.outputs), i))

    # The sizes of blobs that may share memory, and the operator after which each is free.
    sizes: dict[str, int] = {}
    ends: dict[int, list[str]] = {}
    for name in first:
        array: Any = shapes.get(name)
        if name not in fixed and hasattr(array, "dtype"):
            sizes[name] = prod(array.shape) * np.dtype(array.dtype).itemsize
            ends.setdefault(last[name], []).append(name)

    slot_of: dict[str, str] = {}
    slot_sizes: dict[str, int] = {}
    free: list[tuple[int, int, str]] = []  # size, age, name; sorted
    for i, op in enumerate(net.ops):
        for name in op.outputs:
            if name not in sizes or name in slot_of:
                continue
            slot = name
            if free:
                # The smallest that is large enough, else the largest, which grows.
                position = min(bisect.bisect_left(free, (sizes[name],)), len(free) - 1)
                slot = free.pop(position)[2]
            slot_of[name] = slot
            slot_sizes[slot] = max(slot_sizes.get(slot, 0), sizes[name])
        for name in ends.get(i, ()):
            slot = slot_of[name]
            bisect.insort(free, (slot_sizes[slot], first[slot], slot))
    report = MemoryReport(
        baseline_bytes=sum(sizes.values()),
        optimized_bytes=sum(slot_sizes.values()),
        assignments={name: slot for name, slot in slot_of.items() if slot != name},
    )
    return rename_blobs(net, report.assignments), report


def _fixed_names(net: Net) -> set[str]:
    """Returns the blobs that must keep their names: the net's own, and blobs of recurrent networks and in sub-nets."""
    fixed = {*net.external_inputs, *net.external_outputs, *reads(net)}
    for op in net.ops:
        fixed.update(outer_names(op))
        for sub_net in nets_of(op):
            fixed.update(all_names(sub_net))
        is_step = has_sub_nets(op) and workspace_of(op) is Workspace.STEP
        if is_step or keeps_outputs(op):
            fixed.update(op.inputs, op.outputs)
    return fixed


RESHAPE = "Reshape"
FULLY_CONNECTED = "FC"


def identify_reshape_sub_graph(net: Net) -> list[list[int]]:
    """Returns the operators that compute the shape of each Reshape from its own data, and the Reshape itself, in order.

    These are the operators on the paths from the data to the shape, such as `Shape -> Slice -> Concat`. Caffe2's tools look
    only at 15 operators around, and lose paths near the start of a net; here the whole net counts. A Reshape whose shape is
    an argument, or does not depend on its data, is alone in its list.

    >>> ops = (Op.of("Relu", ["x"], ["d"]), Op.of("Shape", ["d"], ["s"]), Op.of("Reshape", ["d", "s"], ["r", "old"]))
    >>> identify_reshape_sub_graph(Net("n", ops, ("x",), ("r",)))
    [[1, 2]]
    """
    return _reshape_groups(net, Flow.of(net))


def _reshape_groups(net: Net, flow: Flow) -> list[list[int]]:
    groups = []
    for index, op in enumerate(net.ops):
        if op.type == RESHAPE:
            data, *shape = ((name, flow.accesses[index].reads[name]) for name in op.inputs)
            group = _path(flow, data, shape[0]) if shape else []
            groups.append([*group, index])
    return groups


def _path(flow: Flow, source: Versioned, target: Versioned) -> list[int]:
    """Returns the operators on the paths from `source` to `target`, in order."""
    below = {source}
    path = []
    for index in flow.needed_ops([target], {source}):
        access = flow.accesses[index]
        if not below.isdisjoint(access.reads.items()):
            below.update(access.writes.items())
            path.append(index)
    return path


def remove_reshape_for_fc(
    predict_net: Net, params: Blobs, shapes: Mapping[str, Sequence[int]] | None = None
) -> tuple[Net, Values]:
    """Removes the Reshapes that only feed FC operators; returns the net and the parameters that it still needs.

    A Reshape is removed, with the operators that compute its shape, if FC operators are its only readers, and these
    operators read only its data, which an operator makes, and parameters. FC flattens its input itself, so a Reshape that
    keeps the dimensions before FC's `axis` changes nothing.

    Caffe2's tools also remove a Reshape that has no reader, gives an external output, is the weight of an FC, or is read
    after its data is overwritten; and they drop parameters that others still read. Here these Reshapes and parameters stay.

    Args:
        params: the parameters, by name. Those that only removed operators read are left out of the result and of the net's
            external inputs.
        shapes: known shapes of the Reshapes' inputs and outputs, by name. Without them, every Reshape is assumed to keep
            the first dimension, as in Caffe2's tools.

    >>> ops = (Op.of("Relu", ["x"], ["d"]), Op.of("Reshape", ["d", "s"], ["r", "old"]), Op.of("FC", ["r", "w", "b"], ["y"]))
    >>> net, params = remove_reshape_for_fc(Net("n", ops, ("x", "s", "w", "b"), ("y",)), {"s": 1, "w": 2, "b": 3})
    >>> [op.type for op in net.ops], net.ops[-1].inputs, params
    (['Relu', 'FC'], ('d', 'w', 'b'), {'w': 2, 'b': 3})
    """
    flow = Flow.of(predict_net)
    removed: set[int] = set()
    renamed: dict[int, dict[str, str]] = {}
    for group in _reshape_groups(predict_net, flow):
        op = predict_net.ops[group[-1]]
        access = flow.accesses[group[-1]]
        data = op.inputs[0], access.reads[op.inputs[0]]
        result = op.outputs[0], access.writes[op.outputs[0]]
        users = flow.readers.get(result, [])
        end = flow.overwritten(data, group)

        if not users or data[1] == 0 or max(users) > end:
            continue
        readers = [predict_net.ops[user] for user in users]
        is_flattened = all(_flattens(op, data[0], result[0], shapes or {}) for op in readers)
        if is_flattened and _is_isolated(flow, group, data, result):
            removed.update(group)
            for user in users:
                renamed.setdefault(user, {})[result[0]] = data[0]

    ops = []
    for index, op in enumerate(predict_net.ops):
        if index not in removed:
            ops.append(rename_in_op(op, renamed.get(index, {}), {}))
    net = replace(predict_net, ops=tuple(ops))

    # Parameters that only removed operators read go too.
    needed = {*reads(net), *net.external_outputs}
    unused = set()
    for name, version in flow.read_by(removed):
        if version == 0 and name in params and name not in needed:
            unused.add(name)
    inputs = tuple(name for name in net.external_inputs if name not in unused)
    used = {name: value for name, value in params.items() if name not in unused}
    return replace(net, external_inputs=inputs), used


def _flattens(op: Op, data: str, result: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Returns whether `op` is an FC that gives the same for `data` as for `result`, a reshaped `data`."""
    if op.type != FULLY_CONNECTED or op.inputs[0] != result or result in op.inputs[1:]:
        return False
    axis = op.arg("axis", 1)
    if data not in shapes or result not in shapes:
        return bool(axis == 1)
    axis %= len(shapes[result])
    return tuple(shapes[data][:axis]) == tuple(shapes[result][:axis])


def _is_isolated(flow: Flow, group: list[int], data: Versioned, result: Versioned) -> bool:
    """Returns whether `group` reads only `data` and parameters, and gives other operators only `result`."""
    written = flow.written_by(group)
    for blob in flow.read_by(group):
        if blob not in written and blob != data and blob[1] != 0:
            return False
    for blob in written:
        has_other_readers = not set(group).issuperset(flow.readers.get(blob, ()))
        if blob in flow.external or has_other_readers != (blob == result):
            return False
    return True
