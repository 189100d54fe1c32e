"""Rules for primitives that hold jaxprs, as Scan, Loop and If, and for layers of `jrnn.nn`, as RNN, GRU and LSTM.

Shapes: T time, N batch, D input, H hidden, K directions, G gates.
"""

from collections.abc import Sequence

import numpy as np

from jrnn.jaxprs import scan_parts
from jrnn.jaxprs.flat import flatten
from jrnn.nn.conventions import convention, reorder
from jrnn.nn.units import RNN_RELU
from jrnn.onnx.attention_loops import OPSET, as_attention
from jrnn.onnx.emit import Fill, GraphEmitter, Ref, Value, known, rule


def _types(values: Sequence) -> list[tuple]:
    return [(v.shape, v.dtype) for v in values]


def _no_rows(e: GraphEmitter, outputs: Sequence) -> list[Value]:
    """Outputs of every step of a loop of no steps, for which onnxruntime raises or returns anything."""
    return [e.expand(np.zeros((), v.dtype), v.shape) for v in outputs]


@rule("scan")
def _(e: GraphEmitter, node, *values):
    constants, carried, sequences = scan_parts(node.params, values)
    count = len(carried)
    if node.params["length"] == 0:
        return (*carried, *_no_rows(e, node.outputs[count:]))
    if e.root.opset >= OPSET and (written := as_attention(e, node, values)) is not None:
        return tuple(written)
    p = node.params
    body = flatten(node.params["jaxpr"])
    inner = _types(body.inputs[len(constants) :])
    if not sequences:  # Scan needs one, of as many steps
        sequences = [e.expand(np.zeros((1,), np.int32), (p["length"],))]
        inner.append(((), np.int32))

    def step(e: GraphEmitter, refs):
        return e.run(body, [*constants, *refs[: len(body.inputs) - len(constants)]])

    graph, outputs = e.inner("step", inner, step)
    if p["reverse"]:
        way = {"scan_input_directions": [1] * len(sequences)}
    else:
        way = {}
    if p["reverse"] and len(outputs) > count:
        way["scan_output_directions"] = [1] * (len(outputs) - count)
    return e.ops(
        "Scan",
        [*carried, *sequences],
        _types(node.outputs),
        body=graph,
        num_scan_inputs=len(sequences),
        **way,
    )


@rule("while")
def _(e: GraphEmitter, node, *values):
    p = node.params
    go = flatten(p["cond_jaxpr"])
    step = flatten(p["body_jaxpr"])
    a = p["cond_nconsts"]
    b = p["cond_nconsts"] + p["body_nconsts"]
    start = list(values[b:])

    def body(e: GraphEmitter, refs):
        new = e.run(step, [*values[a:b], *refs[2:]])
        return [*e.run(go, [*values[:a], *new]), *new]

    graph, _ = e.inner("body", [((), np.int64), ((), np.bool_), *_types(node.outputs)], body)
    (first,) = e.run(go, [*values[:a], *start])
    return e.ops("Loop", [None, first, *start], _types(node.outputs), body=graph)


@rule("cond")
def _(e: GraphEmitter, node, index, *values):
    branches = list(map(flatten, node.params["branches"]))

    def choose(e: GraphEmitter, k: int) -> Sequence[Value]:
        """Branch k or one after it."""
        if k == len(branches) - 1:
            return e.run(branches[k], values)
        here = e.op("LessOrEqual", [e.cast(index, np.int32), np.asarray(k, np.int32)], (), np.bool_)
        then, _ = e.inner("branch", [], lambda e, _: e.run(branches[k], values))
        other, _ = e.inner("branch", [], lambda e, _: choose(e, k + 1))
        return e.ops("If", [here], _types(node.outputs), then_branch=then, else_branch=other)

    return tuple(choose(e, 0))


@rule("recurrent_layer")
def recurrent_layer_rule(e: GraphEmitter, node, x, *rest):
    """y [T, N, K H] and the last states, by one node for all directions."""
    unit = node.params["unit"]
    directions = node.params["directions"]
    steps, batch, _ = x.shape
    count = directions * unit.states
    per = 4 if node.params["bias"] else 2
    first = rest[:count]
    if isinstance(steps, int) and steps == 0:
        return (*_no_rows(e, node.outputs[:1]), *first)
    weights = rest[count : count + directions * per]
    lengths = rest[-1] if node.params["lengths"] else None
    hidden = first[0].shape[-1]
    gates = (convention(system, unit.name).order for system in ("pytorch", "onnx"))
    order = reorder(np.arange(unit.gates * hidden), *gates).astype(np.int64)

    def packed(name: str, *kinds: int) -> Value:
        """A parameter of all directions, in ONNX's order of gates, [K, ...]."""
        per_direction = []
        for k in range(directions):
            rows = []
            for kind in kinds:
                x = weights[k * per + kind]
                if known(x):
                    rows.append(x[order])
                else:
                    rows.append(e.op("Gather", [x, order], x.shape, x.dtype, axis=0))
            per_direction.append(e.concat(rows, 0))
        return e.hinted(e.stack(per_direction, 0), f"{unit.name}_{name}")

    initial = [first[s :: unit.states] for s in range(unit.states)]
    zero = not any(
        isinstance(s, Ref) or np.any(s.value if isinstance(s, Fill) else s) for s in first
    )
    if lengths is not None:
        lengths = e.clip(lengths, np.zeros((), lengths.dtype), e.cast(e.size(steps), lengths.dtype))
    attributes = {
        "direction": "bidirectional" if directions == 2 else "forward",
        "hidden_size": hidden,
    }
    attributes |= {"linear_before_reset": 1} if unit.name == "GRU" else {}
    attributes |= {"activations": ["Relu"] * directions} if unit is RNN_RELU else {}
    shape = (directions, batch, hidden)
    inputs = [x, packed("W", 0), packed("R", 1), packed("B", 2, 3) if per == 4 else None, lengths]
    if zero:
        start = [np.zeros((), x.dtype)] * unit.states
    else:
        start = [e.stack(s, 0) for s in initial]
    inputs += [] if zero else start
    while inputs[-1] is None:
        inputs.pop()
    types = [((steps, directions, batch, hidden), x.dtype)] + [(shape, x.dtype)] * unit.states
    y, *last = e.ops(unit.name, inputs, types, **attributes)
    # The last state of a sequence of no steps is the first; runtimes may return anything.
    if lengths is not None:
        some = e.reshape(
            e.op("Greater", [lengths, np.zeros((), lengths.dtype)], (batch,), np.bool_),
            (1, batch, 1),
        )
        for s, first_state in enumerate(start):
            last[s] = e.op("Where", [some, last[s], first_state], shape, x.dtype)
    y = e.reshape(e.transpose(y, (0, 2, 1, 3)), (steps, batch, directions * hidden))
    outputs = [y]
    for k in range(directions):
        for state in last:
            direction = [state, np.asarray(k, np.int64)]
            outputs.append(e.op("Gather", direction, shape[1:], x.dtype, axis=0))
    return tuple(outputs)
