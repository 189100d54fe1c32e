"""Reshapes before fully connected layers, which flatten their input by themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jrnn.nets.graph.rename import rename_in_op
from jrnn.nets.graph.scope import reads
from jrnn.nets.graph.ssa import Flow, Versioned, needed_ops
from jrnn.nets.ir import Net, Op

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
        op, access = predict_net.ops[group[-1]], flow.accesses[group[-1]]
        data = op.inputs[0], access.reads[op.inputs[0]]
        result = op.outputs[0], access.writes[op.outputs[0]]
        users = flow.readers.get(result, [])
        end = flow.overwritten(data, group)
        flattens = (u <= end and _flattens(predict_net.ops[u], data[0], result[0], shapes or {}) for u in users)
        if users and data[1] != 0 and all(flattens) and _is_isolated(flow, group, data, result):
            removed.update(group)
            for u in users:
                renamed.setdefault(u, {})[result[0]] = data[0]
    ops = [rename_in_op(op, renamed.get(i, {}), {}) for i, op in enumerate(predict_net.ops) if i not in removed]
    net = replace(predict_net, ops=tuple(ops))
    needed = {*reads(net), *net.external_outputs}
    unused = {n for i in removed for n, v in flow.accesses[i].reads.items() if v == 0 and n in params} - needed
    inputs = tuple(n for n in net.external_inputs if n not in unused)
    return replace(net, external_inputs=inputs), {n: v for n, v in params.items() if n not in unused}


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
    used = {blob for blob in written if blob in flow.external or not set(flow.readers.get(blob, ())) <= set(group)}
    return all(blob == data or blob[1] == 0 for blob in needs) and used == {result} and result not in flow.external
