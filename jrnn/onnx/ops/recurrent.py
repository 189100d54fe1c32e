"""RNN, GRU and LSTM, on `jrnn.scan`.

Shapes: T time, N batch, D input, H hidden, K directions, G gates.

    RNN   h' = f(x W + h R + b)
    GRU   z, r = f(...);  n = g(x Wh + (r h) Rh + b), or with linear_before_reset g(x Wh + r (h Rh + Rbh) + Wbh);
          h' = (1 - z) n + z h
    LSTM  i, f = f(... + p c);  g = g(...);  c' = f c + i g;  o = f(... + po c');  h' = o h(c')
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import ConversionError, near
from jrnn.loops import scan
from jrnn.nn.layers import contract
from jrnn.onnx.graph import op
from jrnn.onnx.ops.elementwise import ACTIVATIONS

_DEFAULTS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}

Activation = Callable[[jax.Array], jax.Array]


def _activations(node, directions: int) -> list[list[Activation]]:
    """The functions of each direction. Those that have an alpha or beta take the next one of the list."""
    defaults = _DEFAULTS[node.type]
    names = node.get("activations") or list(defaults) * directions
    if len(names) != directions * len(defaults):
        raise ConversionError(f"{node}: {len(names)} activations are given; it has {directions * len(defaults)}")
    lists = {"alpha": list(node.get("activation_alpha", [])), "beta": list(node.get("activation_beta", []))}
    known = {name.lower(): name for name in ACTIVATIONS}
    found = []
    for name in names:
        if name.lower() not in known:
            raise ConversionError(f"{node}: no activation is called {name!r}{near(name, ACTIVATIONS)}")
        function, *values = ACTIVATIONS[known[name.lower()]]
        for k, which in enumerate(("alpha", "beta")):
            if values[k] is not None and lists[which]:
                values[k] = lists[which].pop(0)
        found.append(lambda x, function=function, values=values: function(x, *values))
    return [found[k * len(defaults) : (k + 1) * len(defaults)] for k in range(directions)]


def _step(node, functions: Sequence[Activation], w, r, wb, rb, p) -> Callable:
    """The step `(state, x) -> (state, h)` of one direction; states are (h,) or (h, c)."""
    bound = node.get("clip")
    hidden, dtype = r.shape[-1], r.dtype

    def clip(z):
        return z if bound is None else jnp.clip(z, -jnp.asarray(bound, z.dtype), jnp.asarray(bound, z.dtype))

    def gates(z):
        return [z[:, k * hidden : (k + 1) * hidden] for k in range(_GATES[node.type])]

    def rnn(state, x):
        z = contract(x, w, dtype) + contract(state[0], r, dtype) + (wb + rb)[None]
        h = functions[0](clip(z))
        return (h,), h

    def gru(state, x):
        (h,) = state
        f, g = functions
        last = 2 * hidden
        zx = gates(contract(x, w, dtype) + wb[None])
        zh = contract(h, r[:last], dtype) + rb[None, :last]
        z = f(clip(zx[0] + zh[:, :hidden]))
        reset = f(clip(zx[1] + zh[:, hidden:]))
        if node.get("linear_before_reset", 0):
            n = g(clip(zx[2] + reset * (contract(h, r[last:], dtype) + rb[None, last:])))
        else:
            n = g(clip(zx[2] + contract(reset * h, r[last:], dtype) + rb[None, last:]))
        new = (1 - z) * n + z * h
        return (new,), new

    def lstm(state, x):
        h, c = state
        f, g, last = functions
        zi, zo, zf, zg = gates(contract(x, w, dtype) + contract(h, r, dtype) + (wb + rb)[None])
        pi, po, pf = (None,) * 3 if p is None else p.reshape(3, 1, hidden)
        i = f(clip(zi if p is None else zi + pi * c))
        forget = 1 - i if node.get("input_forget", 0) else f(clip(zf if p is None else zf + pf * c))
        c = forget * c + i * g(clip(zg))
        h = f(clip(zo if p is None else zo + po * c)) * last(c)
        return (h, c), h

    return {"RNN": rnn, "GRU": gru, "LSTM": lstm}[node.type]


@op("RNN", "GRU", "LSTM")
def _(node, x, w, r, b=None, lengths=None, h=None, c=None, p=None):
    direction = node.get("direction", "forward")
    if direction not in _DIRECTIONS:
        raise ConversionError(f"{node}: direction is {direction!r}{near(direction, _DIRECTIONS)}")
    reverses = _DIRECTIONS[direction]
    x, w, r = jnp.asarray(x), jnp.asarray(w), jnp.asarray(r)
    directions, gates, hidden = len(reverses), _GATES[node.type], r.shape[-1]
    batch_first = bool(node.get("layout", 0))
    if batch_first:
        x = jnp.swapaxes(x, 0, 1)
        h, c = (None if s is None else jnp.swapaxes(s, 0, 1) for s in (h, c))
    steps, batch, size = x.shape
    wanted = {"W": (directions, gates * hidden, size), "R": (directions, gates * hidden, hidden)}
    wanted |= {"B": (directions, 2 * gates * hidden), "sequence_lens": (batch,), "P": (directions, 3 * hidden)}
    wanted |= {"initial_h": (directions, batch, hidden), "initial_c": (directions, batch, hidden)}
    for name, value in zip(wanted, (w, r, b, lengths, p, h, c), strict=True):
        if value is not None and value.shape != wanted[name]:
            raise ConversionError(f"{node}: {name} is {list(value.shape)} but must be {list(wanted[name])}")
    states: list[Any] = [h] if node.type != "LSTM" else [h, c]
    states = [jnp.zeros((directions, batch, hidden), x.dtype) if s is None else jnp.asarray(s) for s in states]
    biases = jnp.zeros((directions, 2 * gates * hidden), x.dtype) if b is None else jnp.asarray(b)
    lengths = None if lengths is None else jnp.asarray(lengths)
    outputs, last = [], []
    for k, (reverse, functions) in enumerate(zip(reverses, _activations(node, directions), strict=True)):
        wb, rb = jnp.split(biases[k], 2)
        step = _step(node, functions, w[k], r[k], wb, rb, None if p is None else jnp.asarray(p)[k])
        state, y = scan(step, tuple(s[k] for s in states), x, reverse=reverse, lengths=lengths)
        outputs.append(y)
        last.append(state)
    found = (jnp.stack(outputs, 1), *(jnp.stack(leaves) for leaves in zip(*last, strict=True)))
    if not batch_first:
        return found
    return (jnp.transpose(found[0], (2, 0, 1, 3)), *(jnp.swapaxes(s, 0, 1) for s in found[1:]))
