"""RNN, GRU and LSTM, on `jrnn.scan`.

Shapes: T time, N batch, D input, H hidden, K directions, G gates.

    RNN   h' = f(x W + h R + b)
    GRU   z, r = f(...);  n = g(x Wh + (r h) Rh + b), or with linear_before_reset g(x Wh + r (h Rh + Rbh) + Wbh);
          h' = (1 - z) n + z h
    LSTM  i, f = f(... + p c);  g = g(...);  c' = f c + i g;  o = f(... + po c');  h' = o h(c')
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
from jax import Array

from jrnn.errors import ConversionError, check_known, near
from jrnn.jaxprs.unit_formulas import interpolated
from jrnn.loops import scan
from jrnn.nn.layers import contract
from jrnn.nn.span import along_last
from jrnn.onnx.graph import op
from jrnn.onnx.ops.elementwise_nodes import ACTIVATIONS, settings_of
from jrnn.onnx.ops.quantized import centered, dynamic

_DEFAULTS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}

Activation = Callable[[Array], Array]
Projection = Callable[..., Array]  # `(x, rows=slice(None)) -> x W^T` of these rows of W


def _activations(node, kind: str, directions: int) -> list[list[Activation]]:
    """The functions of each direction. Those that have an alpha or beta take the next one of the list."""
    defaults = _DEFAULTS[kind]
    names = node.get("activations") or list(defaults) * directions
    if len(names) != directions * len(defaults):
        raise ConversionError(
            f"{node}: {len(names)} activations are given; it has {directions * len(defaults)}"
        )
    lists = {
        "alpha": list(node.get("activation_alpha", [])),
        "beta": list(node.get("activation_beta", [])),
    }
    known = {name.lower(): name for name in ACTIVATIONS}
    functions = []
    for name in names:
        if name.lower() not in known:
            raise ConversionError(
                f"{node}: no activation is called {name!r}{near(name, ACTIVATIONS)}"
            )
        function = ACTIVATIONS[known[name.lower()]]
        settings = {}
        for attribute in settings_of(function):
            if lists[attribute]:
                settings[attribute] = lists[attribute].pop(0)
        functions.append(partial(function, **settings))
    return [functions[k * len(defaults) : (k + 1) * len(defaults)] for k in range(directions)]


def _step(
    node,
    kind: str,
    functions: Sequence[Activation],
    into: Projection,
    back: Projection,
    wb,
    rb,
    p,
) -> Callable:
    """The step `(state, x) -> (state, h)` of one direction; states are (h,) or (h, c).

    Args:
        into, back: the products with W and R, or with some of their rows.
        wb, rb: the biases, [G H].
        p: the peepholes, [3 H], or None.
    """
    bound = node.get("clip")
    hidden = len(rb) // _GATES[kind]

    def clip(z):
        if bound is None:
            return z
        return jnp.clip(z, -jnp.asarray(bound, z.dtype), jnp.asarray(bound, z.dtype))

    def gates(z):
        return [z[:, k * hidden : (k + 1) * hidden] for k in range(_GATES[kind])]

    def rnn(state, x):
        z = into(x) + back(state[0]) + (wb + rb)[None]
        h = functions[0](clip(z))
        return (h,), h

    def gru(state, x):
        (h,) = state
        f, g = functions
        last = 2 * hidden
        zx = gates(into(x) + wb[None])
        zh = back(h, slice(last)) + rb[None, :last]
        z = f(clip(zx[0] + zh[:, :hidden]))
        reset = f(clip(zx[1] + zh[:, hidden:]))
        if node.get("linear_before_reset", 0):
            n = g(clip(zx[2] + reset * (back(h, slice(last, None)) + rb[None, last:])))
        else:
            n = g(clip(zx[2] + back(reset * h, slice(last, None)) + rb[None, last:]))
        new = interpolated(z, n, h)
        return (new,), new

    def lstm(state, x):
        h, c = state
        f, g, last = functions
        zi, zo, zf, zg = gates(into(x) + back(h) + (wb + rb)[None])
        if p is None:
            pi, po, pf = (None,) * 3
        else:
            pi, po, pf = p.reshape(3, 1, hidden)
        i = f(clip(zi if p is None else zi + pi * c))
        if node.get("input_forget", 0):
            forget = 1 - i
        else:
            forget = f(clip(zf if p is None else zf + pf * c))
        c = forget * c + i * g(clip(zg))
        h = f(clip(zo if p is None else zo + po * c)) * last(c)
        return (h, c), h

    return {"RNN": rnn, "GRU": gru, "LSTM": lstm}[kind]


def _layer(
    node,
    kind: str,
    x,
    w,
    r,
    b,
    lengths,
    h,
    c,
    p,
    project: Callable,
) -> tuple[Array, ...]:
    """All directions. `project(k, x)` returns the input of the scan and the two projections of direction k."""
    direction = node.get("direction", "forward")
    check_known(direction, _DIRECTIONS, ConversionError, f"{node}: direction is {direction!r}")
    reverses = _DIRECTIONS[direction]
    directions = len(reverses)
    gates = _GATES[kind]
    hidden = r.shape[-1]
    batch_first = bool(node.get("layout", 0))
    if batch_first:
        x = jnp.swapaxes(x, 0, 1)
        if h is not None:
            h = jnp.swapaxes(h, 0, 1)
        if c is not None:
            c = jnp.swapaxes(c, 0, 1)
    batch, size = x.shape[1:]
    wanted = {
        "W": (directions, gates * hidden, size),
        "R": (directions, gates * hidden, hidden),
        "B": (directions, 2 * gates * hidden),
        "sequence_lens": (batch,),
        "P": (directions, 3 * hidden),
        "initial_h": (directions, batch, hidden),
        "initial_c": (directions, batch, hidden),
    }
    for name, value in zip(wanted, (w, r, b, lengths, p, h, c), strict=True):
        if value is not None and value.shape != wanted[name]:
            raise ConversionError(
                f"{node}: {name} is {list(value.shape)} but must be {list(wanted[name])}"
            )
    if node.get("hidden_size", hidden) != hidden:
        raise ConversionError(
            f"{node}: hidden_size is {node.get('hidden_size')}, and R is {list(r.shape)}"
        )
    zeros = jnp.zeros((directions, batch, hidden), x.dtype)
    states = []
    for state in (h, c) if kind == "LSTM" else (h,):
        states.append(zeros if state is None else jnp.asarray(state))
    if b is None:
        biases = jnp.zeros(wanted["B"], x.dtype)
    else:
        biases = jnp.asarray(b)
    if lengths is not None:
        lengths = jnp.asarray(lengths)
    outputs = []
    last = []
    for k, (reverse, functions) in enumerate(
        zip(reverses, _activations(node, kind, directions), strict=True)
    ):
        xs, into, back = project(k, x)
        step = _step(
            node,
            kind,
            functions,
            into,
            back,
            *jnp.split(biases[k], 2),
            None if p is None else jnp.asarray(p)[k],
        )
        state, y = scan(step, tuple(s[k] for s in states), xs, reverse=reverse, lengths=lengths)
        outputs.append(y)
        last.append(state)
    stacked = (jnp.stack(outputs, 1), *map(jnp.stack, zip(*last, strict=True)))
    if not batch_first:
        return stacked
    return (jnp.transpose(stacked[0], (2, 0, 1, 3)), *(jnp.swapaxes(s, 0, 1) for s in stacked[1:]))


def _product(weight) -> Projection:
    return lambda x, rows=slice(None): contract(x, weight[rows], weight.dtype)


@op("RNN", "GRU", "LSTM")
def _(
    node,
    x,
    w,
    r,
    b=None,
    lengths=None,
    h=None,
    c=None,
    p=None,
):
    x = jnp.asarray(x)
    w = jnp.asarray(w)
    r = jnp.asarray(r)
    return _layer(
        node,
        node.type,
        x,
        w,
        r,
        b,
        lengths,
        h,
        c,
        p,
        lambda k, x: (x, _product(w[k]), _product(r[k])),
    )


@op("com.microsoft.DynamicQuantizeLSTM")
def _(
    node,
    x,
    w,
    r,
    b=None,
    lengths=None,
    h=None,
    c=None,
    p=None,
    w_scale=None,
    w_zero=None,
    r_scale=None,
    r_zero=None,
):
    """An LSTM of onnxruntime with quantized weights, [K, D, 4 H]: x is quantized over all steps, h at each step."""
    w = jnp.swapaxes(jnp.asarray(w), 1, 2)
    r = jnp.swapaxes(jnp.asarray(r), 1, 2)

    def quantized(weight, scale, zero, k: int) -> Projection:
        right = centered(weight[k].T, None if zero is None else jnp.asarray(zero)[k])

        def product(x, rows=slice(None)):
            small, x_scale, x_zero = dynamic(x)
            total = jnp.matmul(centered(small, x_zero), right).astype(x.dtype)
            factor = x_scale * jnp.asarray(scale)[k].reshape(-1)
            return total * along_last(factor, x)

        return product

    def project(k, x):
        return quantized(w, w_scale, w_zero, k)(x), lambda z: z, quantized(r, r_scale, r_zero, k)

    return _layer(node, "LSTM", jnp.asarray(x), w, r, b, lengths, h, c, p, project)
