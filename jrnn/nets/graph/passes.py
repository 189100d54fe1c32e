"""Passes over whole nets: remove dead ends, join two nets, compare two nets, share memory among blobs, remove reshapes.

Reshapes before fully connected layers go, which flatten their input by themselves.
"""

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from jrnn.nets.graph.rename import rename_blobs, rename_in_op
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
from jrnn.nets.graph.ssa import Flow, Versioned, live_ops, needed_ops
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
    if (
        workspace_of(op) is Workspace.STEP
        and len(nets) == 1
        and read.isdisjoint(workspace_outputs(op))
    ):
        return op.map_sub_nets(
            lambda net: _keep_live(net, (*net.external_outputs, *bound_names(op)))
        )
    return op.map_sub_nets(_clean_nested)


def _clean_nested(net: Net) -> Net:
    """Cleans the step nets inside the operators of `net`, and keeps all operators."""
    read = {name for op in net.ops for name in op.inputs}
    return replace(net, ops=tuple(_clean_sub_nets(op, read) for op in net.ops))


def on_device(op: Op, device_option: DeviceOption) -> Op:
    """Puts `op` and the operators of its sub-nets on a device."""
    op = op.map_sub_nets(
        lambda net: replace(net, ops=tuple(on_device(o, device_option) for o in net.ops))
    )
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
    ops = (
        other.ops
        if device_option is None
        else tuple(on_device(op, device_option) for op in other.ops)
    )
    return replace(
        net,
        ops=net.ops + ops,
        external_inputs=net.external_inputs
        + tuple(n for n in other.external_inputs if n not in known),
        external_outputs=net.external_outputs
        + tuple(n for n in other.external_outputs if n not in given),
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
        subs_a = list(a.sub_nets())
        subs_b = list(b.sub_nets())
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
    sizes = {
        name: prod(array.shape) * np.dtype(array.dtype).itemsize for name, array in known.items()
    }
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
    for i, op in enumerate(net.ops):
        if op.type == RESHAPE:
            data, *shape = ((name, flow.accesses[i].reads[name]) for name in op.inputs)
            groups.append([*(_chain(flow, data, shape[0]) if shape else []), i])
    return groups


def _chain(flow: Flow, source: Versioned, target: Versioned) -> list[int]:
    """Returns the operators on the paths from `source` to `target`, in order."""
    above = needed_ops([a.reads.items() for a in flow.accesses], flow.writer, [target], {source})
    below = {source}
    chain = []
    for i in above:
        if not below.isdisjoint(flow.accesses[i].reads.items()):
            below.update(flow.accesses[i].writes.items())
            chain.append(i)
    return chain


def remove_reshape_for_fc(
    predict_net: Net, params: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None = None
) -> tuple[Net, dict[str, Any]]:
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
        flattens = (
            u <= end and _flattens(predict_net.ops[u], data[0], result[0], shapes or {})
            for u in users
        )
        if users and data[1] != 0 and all(flattens) and _is_isolated(flow, group, data, result):
            removed.update(group)
            for u in users:
                renamed.setdefault(u, {})[result[0]] = data[0]
    ops = [
        rename_in_op(op, renamed.get(i, {}), {})
        for i, op in enumerate(predict_net.ops)
        if i not in removed
    ]
    net = replace(predict_net, ops=tuple(ops))
    needed = {*reads(net), *net.external_outputs}
    unused = {
        n for i in removed for n, v in flow.accesses[i].reads.items() if v == 0 and n in params
    } - needed
    inputs = tuple(n for n in net.external_inputs if n not in unused)
    return replace(net, external_inputs=inputs), {
        n: v for n, v in params.items() if n not in unused
    }


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
    written = {blob for i in group for blob in flow.accesses[i].writes.items()}
    needs = {blob for i in group for blob in flow.accesses[i].reads.items()} - written
    used = {
        blob
        for blob in written
        if blob in flow.external or not set(flow.readers.get(blob, ())) <= set(group)
    }
    return (
        all(blob == data or blob[1] == 0 for blob in needs)
        and used == {result}
        and result not in flow.external
    )
