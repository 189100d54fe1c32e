"""Passes over whole nets: remove what is not needed, join two nets, compare two nets."""

from collections.abc import Iterable
from dataclasses import replace

from jrnn.graph.scope import Workspace, bound_names, free_names, has_sub_nets, workspace_of, workspace_outputs
from jrnn.graph.ssa import live_ops
from jrnn.ir import DeviceOption, Net, Op


def remove_dead_end_ops(net: Net) -> Net:
    """Removes the operators that no external output depends on; idempotent.

    A net that declares no external output is left without operators, and an operator without outputs goes, as in Caffe2's
    tools. Unlike there, a blob with one removed reader stays as long as another reader does. Blobs that sub-nets read
    count as read. Step nets are cleaned too where all that they compute is told by their operator: not beside a backward
    step net, nor where another operator looks into their workspaces. External inputs stay declared.

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
    """`net` with all its operators, and the step nets inside them cleaned."""
    read = {name for op in net.ops for name in op.inputs}
    return replace(net, ops=tuple(_clean_sub_nets(op, read) for op in net.ops))


def on_device(op: Op, device_option: DeviceOption) -> Op:
    """`op` and the operators of its sub-nets on a device."""
    op = op.map_sub_nets(lambda net: replace(net, ops=tuple(on_device(o, device_option) for o in net.ops)))
    return replace(op, device_option=device_option)


def append_net(net: Net, other: Net, device_option: DeviceOption | None = None) -> Net:
    """Returns `net` with the operators of `other` appended.

    External inputs of `other` are declared unless `net` declares or writes them; external outputs are united.

    Args:
        device_option: where given, the appended operators run there. Caffe2 sets the operators of step nets with them but
            of no other sub-net; here all follow.

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
    """Where each operator's inputs come from: (operator, output), or (-1, k) for the k-th blob read from outside."""
    origin: dict[str, tuple[int, int]] = {}
    outside = 0
    found = []
    for i, op in enumerate(net.ops):
        read = (*op.inputs, *free_names(op))
        for name in read:
            if name not in origin:
                origin[name] = (-1, outside)
                outside += 1
        found.append([origin[name] for name in read])
        origin.update((name, (i, k)) for k, name in enumerate(op.outputs))
    return found


def verify_graph_equality(net_a: Net, net_b: Net) -> bool:
    """Returns whether two nets are equal up to the names of their blobs.

    The operators must have equal types, devices and engines in the same order, read the same outputs of the same operators
    and the same blobs from outside, and have equal sub-nets. Caffe2 compares only which operators are read from, so that a
    net which swaps two outputs of a Split, or two inputs of the net, passes there.

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
