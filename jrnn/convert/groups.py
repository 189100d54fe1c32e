"""Groups of nodes that are one operator of Caffe2: FC, Softmax, LayerNorm, Gelu, LSTMUnit, GRUUnit.

Each group has reference functions, which are traced for the given shapes and searched for in the graph, and a rule for the
node that replaces a match.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.convert.emitter import FLOAT, Emitter, Value, rule
from jrnn.convert.match import ANY, Makers, find, is_view, maker_of, ordered, pattern
from jrnn.convert.rules.product_rules import fully_connected
from jrnn.convert.rules.shape_rules import join
from jrnn.jaxprs.flat import Atom, FlatEquation, Graph, Var
from jrnn.jaxprs.unit_formulas import interpolated, lstm
from jrnn.nets.ir import Shape

# The name of a group, its reference function, and the shapes of the function's arguments.
Candidate = tuple[str, Callable, tuple[Shape, ...]]


def recognize(graph: Graph) -> Graph:
    """Replaces groups by single nodes. Nodes of a group that others read are kept as well."""
    makers = graph.makers()
    replaced: dict[FlatEquation, FlatEquation] = {}
    for node in reversed(graph.nodes):
        for candidate in _candidates(node, makers):
            group = _group(candidate, node, makers)
            if group is None:
                continue
            own_makers = [makers[var] for var in group.outputs]
            if replaced.keys().isdisjoint(own_makers):
                replaced.update(dict.fromkeys(own_makers, group))
                break
    if not replaced:
        return graph
    nodes = dict.fromkeys(replaced.get(node, node) for node in graph.nodes)
    return replace(graph, nodes=ordered(list(nodes), graph.outputs))


def _group(candidate: Candidate, node: FlatEquation, makers: Makers) -> FlatEquation | None:
    """The node that replaces a group which ends in `node`; None if the candidate does not match."""
    name, reference, shapes = candidate
    sought = pattern(reference, shapes)
    match = find(sought, node.outputs[-1], makers)
    if match is None or not all(v in match for v in (*sought.inputs, *sought.outputs[:-1])):
        return None
    inputs = tuple(match[v] for v in sought.inputs)
    other_outputs = [match[v] for v in sought.outputs[:-1]]
    if _depends(inputs, other_outputs, makers):
        return None
    if name in _GATES_BEFORE:
        source = _whole(inputs[1:], makers, _GATES_BEFORE[name])
        if source is not None:
            inputs = (inputs[0], source)
    return FlatEquation(
        name=name,
        params={"number": match.get(ANY)},
        inputs=inputs,
        outputs=(*other_outputs, node.outputs[-1]),
        source=node.source,
        run=_runner(reference),
    )


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
    shape = node.shape
    if not shape or node.dtype != FLOAT:
        return
    if node.name == "div":
        yield "group_softmax", _softmax, (shape,)
        yield "group_softmax", _plain_softmax, (shape,)
        before = _before_views(node, makers)
        if before is not None:
            yield "group_softmax", _softmax_in_views(shape), (before,)
    if node.name == "add":
        yield from _products(node, makers)
        if len(shape) > 1:
            for norm in _NORMS:
                yield "group_layer_norm", norm, (shape, shape[-1:], shape[-1:])
        yield "group_gru_unit", _gru, (shape,) * 3
        yield "group_gru_unit", _gru_difference, (shape,) * 3
    if node.name == "mul":
        yield "group_fast_gelu", _fast_gelu, (shape,)
        yield "group_gelu", _gelu, (shape,)
        yield "group_gelu", _erf_gelu, (shape,)
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
    after = node.shape
    return before if before != after and before[-1:] == after[-1:] else None


@rule("group_softmax")
def _(e: Emitter, node: FlatEquation, x):
    shape = node.shape
    rows = shape if len(shape) > 1 else (1, *shape)
    axis = len(rows) - 1
    softmax = e.op("Softmax", [e.reshaped(x, rows)], rows, FLOAT, axis=None if axis == 1 else axis)
    return e.reshaped(softmax, shape)


_fast_gelu = partial(jax.nn.gelu, approximate=True)
_gelu = partial(jax.nn.gelu, approximate=False)


def _erf_gelu(x):
    return 0.5 * x * (1 + lax.erf(x / math.sqrt(2)))


@rule("group_fast_gelu", "group_gelu")
def _(e: Emitter, node: FlatEquation, x):
    fast = 1 if node.name == "group_fast_gelu" else None
    return e.op("Gelu", [x], x.shape, FLOAT, fast_gelu=fast)


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
        bias = (node.shape[-1],)
        (over_x, over_w), (batch, _) = maker.params["dimension_numbers"]
        if batch or tuple(over_x) != (len(x) - 1,) or len(over_w) != 1:
            continue
        if tuple(over_w) == (1,):
            yield "group_fc", _FC, (x, w, bias)
        else:
            yield "group_fc", _FC_TRANSPOSE, (x, w[::-1], bias)
            yield "group_fc_transposed", _FC_TRANSPOSED, (x, w, bias)


@rule("group_fc", "group_fc_transposed")
def _(e: Emitter, node: FlatEquation, x, w, b):
    return fully_connected(e, x, w, b, out_first=node.name == "group_fc")


# LayerNorm -------------------------------------------------------------------------------------------------------------


def _last(x, v):
    return v.reshape((1,) * (x.ndim - 1) + v.shape)


def _norm_of_squares(x, gamma, beta):
    mean = x.mean(-1)
    var = jnp.maximum(0.0, jnp.square(x).mean(-1) - jnp.square(mean))
    scale = lax.rsqrt(jnp.expand_dims(var, -1) + ANY) * _last(x, gamma)
    return (x - jnp.expand_dims(mean, -1)) * scale + _last(x, beta)


def _norm_by_sqrt(x, gamma, beta):
    mean = x.mean(-1, keepdims=True)
    var = x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + ANY) * _last(x, gamma) + _last(x, beta)


def _norm_by_rsqrt(x, gamma, beta):
    mean = x.mean(-1, keepdims=True)
    var = x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + ANY) * _last(x, gamma) + _last(x, beta)


_NORMS = (_norm_of_squares, _norm_by_sqrt, _norm_by_rsqrt)


@rule("group_layer_norm")
def _(e: Emitter, node: FlatEquation, x, gamma, beta):
    args = {"axis": len(x.shape) - 1, "epsilon": node.params["number"], "elementwise_affine": 1}
    return e.ops("LayerNorm", [x, gamma, beta], [(x.shape, FLOAT), None, None], **args)


# The units -------------------------------------------------------------------------------------------------------------


def _lstm(c, *gates):
    i, f, o, g = gates if len(gates) > 1 else jnp.split(gates[0], 4, axis=-1)
    h, c = lstm(i, f, o, g, c)
    return c, h


def _gru(h, u, o):
    return interpolated(jax.nn.sigmoid(u), jnp.tanh(o), h)


def _gru_difference(h, u, o):
    u = jax.nn.sigmoid(u)
    o = jnp.tanh(o)
    return o + u * (h - o)


# How many parts precede the gates in their source: GRUUnit does not read the reset gate, which was applied before.
_GATES_BEFORE = {"group_lstm_unit": 0, "group_gru_unit": 1}


def _whole(gates, makers: Makers, before: int) -> Var | None:
    """The variable whose last axis the gates cut into consecutive slices, after `before` slices of their size."""
    size = gates[0].shape[-1]
    sources = []
    for k, gate in enumerate(gates):
        part = _part(gate, makers)
        if part is None or part[1] != (before + k) * size:
            return None
        sources.append(part[0])
    source = sources[0]
    if source.shape[-1] != (before + len(gates)) * size:
        return None
    return source if all(other is source for other in sources) else None


def _part(v, makers: Makers) -> tuple[Var, int] | None:
    """The variable that `v` is a slice of, along the last axis alone, and the start of the slice."""
    node = maker_of(v, makers)
    if node is None or not isinstance(node.inputs[0], Var):
        return None
    source = node.inputs[0]
    p = node.params
    if node.name == "split" and p["axis"] == len(source.shape) - 1:
        return source, sum(p["sizes"][: node.outputs.index(v)])
    if node.name != "slice" or v.shape[:-1] != source.shape[:-1]:
        return None
    if set(p["strides"] or (1,)) != {1}:
        return None
    return source, p["start_indices"][-1]


def _rows(e: Emitter, x: Value) -> Value:
    """[..., D] as [1, N, D]."""
    return e.reshaped(x, (1, math.prod(x.shape[:-1]), x.shape[-1]))


@rule("group_lstm_unit")
def _(e: Emitter, node: FlatEquation, c, *gates):
    cell = e.blob(_rows(e, c))
    gates_of_unit = join(e, [_rows(e, x) for x in gates], 2)
    # LSTMUnit reads the hidden state only where sequences end, so any blob of that shape will do
    inputs = [cell, cell, gates_of_unit, np.zeros(1, np.int32)]
    h, new = e.ops("LSTMUnit", inputs, [(cell.shape, FLOAT)] * 2, sequence_lengths=0)
    return e.reshaped(new, c.shape), e.reshaped(h, c.shape)


@rule("group_gru_unit")
def _(e: Emitter, node: FlatEquation, h, *gates):
    hidden = _rows(e, h)
    parts = [_rows(e, x) for x in gates]
    # GRUUnit does not read the reset gate, so any numbers will do in its place
    gates_of_unit = join(e, [parts[0], *parts], 2) if len(parts) > 1 else parts[0]
    inputs = [hidden, gates_of_unit, np.zeros(1, np.int32)]
    unit = e.op("GRUUnit", inputs, hidden.shape, FLOAT, sequence_lengths=0)
    return e.reshaped(unit, h.shape)
