"""The formulas of LSTM and GRU, once for all rooms: from what the gates are computed of to the new states.

Layers of `jrnn.nn`, Arraymancer's GRU, Caffe2's LSTMUnit and GRUUnit, the patterns that conversion searches for, and the
cells of the benchmark differ in how they multiply and in the order in which their weights hold the gates.
`onnx/ops/recurrent.py` has the general form, with peepholes, clips and other activations.

Shapes: N batch, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.nn import sigmoid


def lstm(i: Array, f: Array, o: Array, g: Array, c: Array) -> tuple[Array, Array]:
    """h' = sigmoid(o) tanh(c') and c' = sigmoid(f) c + sigmoid(i) tanh(g)."""
    c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
    return sigmoid(o) * jnp.tanh(c), c


def interpolated(z: Array, n: Array, h: Array) -> Array:
    """h' = (1 - z) n + z h, the new hidden state of a GRU."""
    return (1 - z) * n + z * h


class GruGates(NamedTuple):
    """The values of a GRU's gates in one step, each [N, H]; `Uh` is what the reset gate scales."""

    r: Array
    z: Array
    n: Array
    Uh: Array

    def new_hidden(self, h: Array) -> Array:
        return interpolated(self.z, self.n, h)


def gru_gates(zx: Array, zh: Array, late: Array | None = None) -> GruGates:
    """n = tanh(xn + sigmoid(r) (hn + late)). The reset gate acts after the product with W_hn."""
    xr, xz, xn = jnp.split(zx, 3, axis=-1)
    hr, hz, hn = jnp.split(zh, 3, axis=-1)
    if late is not None:
        hn = hn + late
    r = sigmoid(xr + hr)
    n = jnp.tanh(xn + r * hn)
    z = sigmoid(xz + hz)
    return GruGates(r, z, n, hn)
