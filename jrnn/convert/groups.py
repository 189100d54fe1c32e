"""Groups of nodes that are one operator of Caffe2: FC, Softmax, LayerNorm, Gelu, LSTMUnit, GRUUnit.

Each group has reference functions, which are traced for the given shapes and searched for in the graph, and a rule for the
node that replaces a match.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.convert.emitter import FLOAT, Emitter, Value, rule
from jrnn.convert.match import ANY, find, is_view, maker_of, ordered, pattern
from jrnn.convert.rules.product_rules import fully_connected
from jrnn.convert.rules.shape_rules import join
from jrnn.jaxprs.flat import Atom, FlatEquation, Graph, Var

Shape = tuple[int, ...]
Candidate = tuple[
    str, Callable, tuple[Shape, ...]
]  # name of the group, reference, shapes of its arguments
Makers = Mapping[Var, FlatEquation]


def recognize(graph: Graph) -> Graph:
    """Replaces groups by single nodes. Nodes of a group that others read are kept as well."""
    makers = graph.makers()
    replaced: dict[FlatEquation, FlatEquation] = {}
    for node in reversed(graph.nodes):
        for name, reference, shapes in _candidates(node, makers):
            sought = pattern(reference, shapes)
            match = find(sought, node.outputs[-1], makers)
            if match is None or not all(v in match for v in (*sought.inputs, *sought.outputs[:-1])):
                continue
            inputs = tuple(match[v] for v in sought.inputs)
            outputs = (*(match[v] for v in sought.outputs[:-1]), node.outputs[-1])
            if any(makers[v] in replaced for v in outputs) or _depends(
                inputs, outputs[:-1], makers
            ):
                continue
            before = _GATES_BEFORE.get(name)
            if before is not None and (source := _whole(inputs[1:], makers, before)) is not None:
                inputs = (inputs[0], source)
            group = FlatEquation(
                name, {"number": match.get(ANY)}, inputs, outputs, node.source, _runner(reference)
            )
            replaced.update((makers[v], group) for v in outputs)
            break
    if not replaced:
        return graph
    nodes = dict.fromkeys(replaced.get(node, node) for node in graph.nodes)
    return replace(graph, nodes=ordered(list(nodes), graph.outputs))


def _depends(inputs: Iterable[Atom], outputs: Sequence[Var], makers: Makers) -> bool:
    """Whether an input is computed from one of the outputs, as the output gate of a peephole LSTM is from its cell."""
    stack = list(inputs) if outputs else []
    seen = set(outputs)
    while stack:
        atom = stack.pop()
        if not isinstance(atom, Var):
            continue
        if atom in outputs:
            return True
        node = makers.get(atom)
        if node is not None and atom not in seen:
            seen.update(node.outputs)
            stack += node.inputs
    return False


def _runner(reference: Callable) -> Callable:
    def run(*args):
        outs = reference(*args)
        return outs if isinstance(outs, tuple) else [outs]

    return run


def _candidates(node: FlatEquation, makers: Makers) -> Iterator[Candidate]:
    shape = node.outputs[0].shape
    if not shape or node.outputs[0].dtype != FLOAT:
        return
    if node.name == "div":
        yield from (("group_softmax", fn, (shape,)) for fn in (_softmax, _plain_softmax))
        if (before := _before_views(node, makers)) is not None:
            yield "group_softmax", _softmax_in_views(shape), (before,)
    if node.name == "add":
        yield from _products(node, makers)
        if len(shape) > 1:
            yield from (("group_layer_norm", fn, (shape, shape[-1:], shape[-1:])) for fn in _NORMS)
        yield from (("group_gru_unit", fn, (shape,) * 3) for fn in (_gru, _gru_difference))
    if node.name == "mul":
        yield "group_fast_gelu", _fast_gelu, (shape,)
        yield from (("group_gelu", fn, (shape,)) for fn in (_gelu, _erf_gelu))
        yield "group_lstm_unit", _lstm, (shape,) * 5


# Softmax and Gelu ------------------------------------------------------------------------------------------------------


_softmax = partial(jax.nn.softmax, axis=-1)


def _plain_softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@cache
def _softmax_in_views(shape: Shape) -> Callable:
    """A softmax whose argument is reshaped after its maxima are taken, as `vmap` leaves it."""

    def softmax(x):
        greatest = lax.reshape(x.max(-1), (*shape[:-1], 1))
        e = jnp.exp(lax.reshape(x, shape) - lax.stop_gradient(greatest))
        return e / e.sum(-1, keepdims=True)

    return softmax


def _before_views(node: FlatEquation, makers: Makers) -> Shape | None:
    """The shape of x, where a quotient is exp(view of x - ...) / ... and the view changes the shape."""
    atom = node.inputs[0]
    for name in ("exp", "sub"):
        maker = maker_of(atom, makers)
        if maker is None or maker.name != name:
            return None
        atom = maker.inputs[0]
    maker = maker_of(atom, makers)
    if maker is None or not is_view(maker):
        return None
    before = tuple(maker.inputs[0].shape)
    after = node.outputs[0].shape
    return before if before != after and before[-1:] == after[-1:] else None


@rule("group_softmax")
def _(e: Emitter, node: FlatEquation, x):
    shape = node.outputs[0].shape
    rows = shape if len(shape) > 1 else (1, *shape)
    axis = len(rows) - 1
    softmax = e.op("Softmax", [e.reshaped(x, rows)], rows, FLOAT, axis=None if axis == 1 else axis)
    return e.reshaped(softmax, shape)


_fast_gelu, _gelu = (partial(jax.nn.gelu, approximate=approximate) for approximate in (True, False))


def _erf_gelu(x):
    return 0.5 * x * (1 + lax.erf(x / math.sqrt(2)))


@rule("group_fast_gelu", "group_gelu")
def _(e: Emitter, node: FlatEquation, x):
    return e.op(
        "Gelu", [x], x.shape, FLOAT, fast_gelu=1 if node.name == "group_fast_gelu" else None
    )


# FC --------------------------------------------------------------------------------------------------------------------


def _contract(axis_of_w: int, transposed: bool) -> Callable:
    def product(x, w, b):
        numbers = (((x.ndim - 1,), (axis_of_w,)), ((), ()))
        y = lax.dot_general(x, w.T if transposed else w, numbers)
        return y + b.reshape((1,) * (y.ndim - 1) + b.shape)

    return product


_FC = _contract(1, False)
_FC_TRANSPOSE = _contract(0, True)
_FC_TRANSPOSED = _contract(0, False)


def _products(node: FlatEquation, makers: Makers) -> Iterator[Candidate]:
    for atom in node.inputs:
        maker = maker_of(atom, makers)
        if maker is None or maker.name != "dot_general" or len(maker.inputs[1].shape) != 2:
            continue
        x, w = (tuple(v.shape) for v in maker.inputs)
        bias = (node.outputs[0].shape[-1],)
        (over_x, over_w), (batch, _) = maker.params["dimension_numbers"]
        if batch or tuple(over_x) != (len(x) - 1,) or len(over_w) != 1:
            continue
        if tuple(over_w) == (1,):
            yield "group_fc", _FC, (x, w, bias)
        else:
            yield "group_fc", _FC_TRANSPOSE, (x, w[::-1], bias)
            yield "group_fc_transposed", _FC_TRANSPOSED, (x, w, bias)


rule("group_fc")(lambda e, node, x, w, b: fully_connected(e, x, w, b, out_first=True))
rule("group_fc_transposed")(lambda e, node, x, w, b: fully_connected(e, x, w, b, out_first=False))


# LayerNorm -------------------------------------------------------------------------------------------------------------


def _last(x, v):
    return v.reshape((1,) * (x.ndim - 1) + v.shape)


def _norm_of_squares(x, gamma, beta):
    mean = x.mean(-1)
    var = jnp.maximum(0.0, jnp.square(x).mean(-1) - jnp.square(mean))
    scale = lax.rsqrt(jnp.expand_dims(var, -1) + ANY) * _last(x, gamma)
    return (x - jnp.expand_dims(mean, -1)) * scale + _last(x, beta)


def _norm_by(scaled: Callable) -> Callable:
    def norm(x, gamma, beta):
        mean = x.mean(-1, keepdims=True)
        var = x.var(-1, keepdims=True)
        return scaled(x - mean, var + ANY) * _last(x, gamma) + _last(x, beta)

    return norm


_NORMS = (
    _norm_of_squares,
    _norm_by(lambda d, v: d / jnp.sqrt(v)),
    _norm_by(lambda d, v: d * lax.rsqrt(v)),
)


@rule("group_layer_norm")
def _(e: Emitter, node: FlatEquation, x, gamma, beta):
    args = {"axis": len(x.shape) - 1, "epsilon": node.params["number"], "elementwise_affine": 1}
    return e.ops("LayerNorm", [x, gamma, beta], [(x.shape, FLOAT), None, None], **args)


# The units -------------------------------------------------------------------------------------------------------------


def _lstm(c, *gates):
    i, f, o, g = gates if len(gates) > 1 else jnp.split(gates[0], 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return c, jax.nn.sigmoid(o) * jnp.tanh(c)


def _gru(h, u, o):
    u = jax.nn.sigmoid(u)
    return (1.0 - u) * jnp.tanh(o) + u * h


def _gru_difference(h, u, o):
    u = jax.nn.sigmoid(u)
    o = jnp.tanh(o)
    return o + u * (h - o)


# How many parts precede the gates in their source: GRUUnit does not read the reset gate, which was applied before.
_GATES_BEFORE = {"group_lstm_unit": 0, "group_gru_unit": 1}


def _whole(gates, makers: Makers, before: int) -> Var | None:
    """The variable of which the gates are consecutive slices of its last axis, after `before` slices of their size."""
    size = gates[0].shape[-1]
    parts = [part for v in gates if (part := _part(v, makers)) is not None]
    if [start for _, start in parts] != [(before + k) * size for k in range(len(gates))]:
        return None
    source = parts[0][0]
    whole = all(s is source for s, _ in parts) and source.shape[-1] == (before + len(gates)) * size
    return source if whole else None


def _part(v, makers: Makers) -> tuple[Var, int] | None:
    """The variable that `v` is a slice of, along the last axis alone, and the start of the slice."""
    node = maker_of(v, makers)
    if node is None or not isinstance(node.inputs[0], Var):
        return None
    source = node.inputs[0]
    p = node.params
    if node.name == "split" and p["axis"] == len(source.shape) - 1:
        return source, sum(p["sizes"][: node.outputs.index(v)])
    if (
        node.name == "slice"
        and set(p["strides"] or (1,)) == {1}
        and v.shape[:-1] == source.shape[:-1]
    ):
        return source, p["start_indices"][-1]
    return None


def _rows(e: Emitter, x: Value) -> Value:
    """[..., D] as [1, N, D]."""
    return e.reshaped(x, (1, math.prod(x.shape[:-1]), x.shape[-1]))


@rule("group_lstm_unit")
def _(e: Emitter, node: FlatEquation, c, *gates):
    cell = e.blob(_rows(e, c))
    joined = join(e, [_rows(e, x) for x in gates], 2)
    # LSTMUnit reads the hidden state only where sequences end, so any blob of that shape will do
    inputs = [cell, cell, joined, np.zeros(1, np.int32)]
    h, new = e.ops("LSTMUnit", inputs, [(cell.shape, FLOAT)] * 2, sequence_lengths=0)
    return e.reshaped(new, c.shape), e.reshaped(h, c.shape)


@rule("group_gru_unit")
def _(e: Emitter, node: FlatEquation, h, *gates):
    hidden = _rows(e, h)
    parts = [_rows(e, x) for x in gates]
    # GRUUnit does not read the reset gate, so any numbers will do in its place
    joined = join(e, [parts[0], *parts], 2) if len(parts) > 1 else parts[0]
    unit = e.op(
        "GRUUnit", [hidden, joined, np.zeros(1, np.int32)], hidden.shape, FLOAT, sequence_lengths=0
    )
    return e.reshaped(unit, h.shape)
