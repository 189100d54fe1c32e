"""The stacked GRU of Arraymancer's `nnp_gru`, with its layout of weights and a gradient written by hand.

Shapes: T time, N batch, D input, H hidden, L layers. Gates are in the order r, z, n.

    r, z = sigmoid(W_{r,z} x + bW + U_{r,z} h + bU)
    Uh   = U_n h + bU_n
    n    = tanh(W_n x + bW_n + r Uh)
    h'   = (1 - z) n + z h

`StackWeights` has the weights. A cell takes one layer of them: W3 [3H, D or H], U3 [3H, H], bW3 [1, 3H], bU3 [1, 3H].
The layers of `jrnn.nn.GRU` compute the same; `jrnn.interop.from_arraymancer` converts the weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jrnn.errors import LayerError
from jrnn.jaxprs.unit_formulas import GruGates as Gates
from jrnn.jaxprs.unit_formulas import gru_gates
from jrnn.loops import scan
from jrnn.nn.params import Params, Shapes


class StackWeights(NamedTuple):
    """A stack's weights, or their gradients.

    Attributes:
        W3s0: [3H, D], the input weights of the first layer.
        W3sN: [L - 1, 3H, H], the input weights of the other layers.
        U3s: [L, 3H, H].
        bW3s: [L, 1, 3H].
        bU3s: [L, 1, 3H].
    """

    W3s0: Any
    W3sN: Any
    U3s: Any
    bW3s: Any
    bU3s: Any

    def layer(self, k: int) -> tuple[Array, Array, Array, Array]:
        """W3, U3, bW3, bU3 of layer k."""
        return (self.W3s0 if k == 0 else self.W3sN[k - 1]), self.U3s[k], self.bW3s[k], self.bU3s[k]


class CellGradients(NamedTuple):
    """The gradients of one step with respect to its inputs."""

    dx: Array
    dh: Array
    dW3: Array
    dU3: Array
    dbW3: Array
    dbU3: Array


class Cache(NamedTuple):
    """What `gru_forward` saves for `gru_backward`, as tuples with one item for each layer.

    Attributes:
        inputs: [T, N, D], or [T, N, H] after the first layer.
        hiddens: [T, N, H], the hidden state before each step.
        gates: Gates of arrays [T, N, H].
    """

    inputs: tuple[Array, ...]
    hiddens: tuple[Array, ...]
    gates: tuple[Gates, ...]


def gru_cell_inference(
    x: Array, W3: Array, U3: Array, bW3: Array, bU3: Array, hidden: Array
) -> Array:
    """One step, x [N, D], hidden [N, H] -> the new hidden [N, H]."""
    return gru_cell_forward(x, W3, U3, bW3, bU3, hidden)[0]


def gru_cell_forward(
    x: Array, W3: Array, U3: Array, bW3: Array, bU3: Array, hidden: Array
) -> tuple[Array, Gates]:
    """One step, x [N, D], hidden [N, H] -> the new hidden [N, H], and r, z, n, Uh for the gradient.

    >>> W3, U3, bias = jnp.zeros((12, 3)), jnp.zeros((12, 4)), jnp.zeros((1, 12))
    >>> new, gates = gru_cell_forward(jnp.ones((2, 3)), W3, U3, bias, bias, jnp.ones((2, 4)))
    >>> float(new[0, 0]), float(gates.z[0, 0])
    (0.5, 0.5)
    """
    _check_cell(x, hidden, W3=W3, U3=U3, bW3=bW3, bU3=bU3)
    return _advance(x @ W3.T + bW3, U3, bU3, hidden)


def _advance(wx: Array, U3: Array, bU3: Array, hidden: Array) -> tuple[Array, Gates]:
    gates = gru_gates(wx, hidden @ U3.T + bU3)
    return gates.new_hidden(hidden), gates


def gru_cell_backward(
    dnext: Array, x: Array, h: Array, W3: Array, U3: Array, gates: Gates
) -> CellGradients:
    """The gradient of one step.

    Args:
        dnext: [N, H], the gradient of the new hidden state.
        x: [N, D], the input.
        h: [N, H], the old hidden state.
        W3, U3: the weights.
        gates: from `gru_cell_forward`.
    """
    _check_cell(x, h, dnext=dnext, W3=W3, U3=U3)
    dh, dwx, duh = _retreat(dnext, h, U3, gates)
    return CellGradients(
        dx=dwx @ W3,
        dh=dh,
        dW3=dwx.T @ x,
        dU3=duh.T @ h,
        dbW3=jnp.sum(dwx, axis=0, keepdims=True),
        dbU3=jnp.sum(duh, axis=0, keepdims=True),
    )


def _retreat(dnext: Array, h: Array, U3: Array, gates: Gates) -> tuple[Array, Array, Array]:
    """The gradients of the old hidden state [N, H], and of W x + bW and U h + bU [N, 3H]."""
    r, z, n, Uh = gates
    dn = dnext * (1 - z) * (1 - n * n)
    dz = dnext * (h - n) * z * (1 - z)
    dr = dn * Uh * r * (1 - r)
    dwx = jnp.concatenate([dr, dz, dn], axis=-1)
    duh = jnp.concatenate([dr, dz, dn * r], axis=-1)
    return dnext * z + duh @ U3, dwx, duh


def gru_inference(x: Array, weights: StackWeights, hidden: Array) -> tuple[Array, Array]:
    """Runs a stack over a sequence, x [T, N, D], hidden [L, N, H] -> output [T, N, H] and the last hidden [L, N, H]."""
    output, last, _ = gru_forward(x, weights, hidden)
    return output, last


def gru_forward(x: Array, weights: StackWeights, hidden: Array) -> tuple[Array, Array, Cache]:
    """As `gru_inference`, but also returns what `gru_backward` needs.

    Raises:
        LayerError: if the shapes of weights, x and hidden do not fit together.
    """
    _check(x, weights, hidden)
    inputs = []
    hiddens = []
    gates_of_layers = []
    last = []
    for k, start in enumerate(hidden):
        W3, U3, bW3, bU3 = weights.layer(k)

        def step(h: Array, wx: Array, U3=U3, bU3=bU3) -> tuple[Array, tuple]:
            new, gates = _advance(wx, U3, bU3, h)
            return new, (new, h, gates)

        inputs.append(x)
        end, (x, before, gates) = scan(step, start, x @ W3.T + bW3[None])
        hiddens.append(before)
        gates_of_layers.append(gates)
        last.append(end)
    return x, jnp.stack(last), Cache(tuple(inputs), tuple(hiddens), tuple(gates_of_layers))


def gru_backward(
    d_output: Array, d_hidden: Array, weights: StackWeights, cache: Cache
) -> tuple[Array, Array, StackWeights]:
    """The gradient of a stack over a sequence.

    Args:
        d_output: [T, N, H], the gradient of the output.
        d_hidden: [L, N, H], the gradient of the last hidden states.
        weights: the stack's weights.
        cache: from `gru_forward`.

    Returns:
        `(d_x [T, N, D], d_hidden [L, N, H], d_weights)`; d_hidden is the gradient of the initial hidden states.

    Raises:
        LayerError: if the shapes of gradients and weights do not fit the cache.
    """
    steps, batch, size = cache.hiddens[-1].shape
    layers = len(cache.hiddens)
    _check_shapes(
        {"d_output": d_output, "d_hidden": d_hidden},
        {"d_output": (steps, batch, size), "d_hidden": (layers, batch, size)},
        f"the cache is of {layers} layers with hidden [{steps}, {batch}, {size}]",
    )
    _check(cache.inputs[0], weights, d_hidden)
    grads = []
    starts = []
    for k in reversed(range(len(cache.inputs))):
        W3, U3, _, _ = weights.layer(k)

        def step(dh: Array, step_values: tuple, U3=U3) -> tuple[Array, tuple]:
            dy, h, gates = step_values
            dh, dwx, duh = _retreat(dh + dy, h, U3, gates)
            return dh, (dwx, duh)

        start, (dwx, duh) = scan(
            step, d_hidden[k], (d_output, cache.hiddens[k], cache.gates[k]), reverse=True
        )
        # The weights' gradients do not depend on the order of steps: each is one product over T N rows.
        dW3 = jnp.tensordot(dwx, cache.inputs[k], axes=((0, 1), (0, 1)))
        dU3 = jnp.tensordot(duh, cache.hiddens[k], axes=((0, 1), (0, 1)))
        grads.append((dW3, dU3, jnp.sum(dwx, axis=(0, 1))[None], jnp.sum(duh, axis=(0, 1))[None]))
        starts.append(start)
        d_output = dwx @ W3
    dW3s, dU3s, dbW3s, dbU3s = zip(*reversed(grads), strict=True)
    d_weights = StackWeights(
        W3s0=dW3s[0],
        W3sN=jnp.stack(dW3s[1:]) if len(dW3s) > 1 else jnp.zeros_like(weights.W3sN),
        U3s=jnp.stack(dU3s),
        bW3s=jnp.stack(dbW3s),
        bU3s=jnp.stack(dbU3s),
    )
    return d_output, jnp.stack(starts[::-1]), d_weights


def _check(x: Array, weights: StackWeights, hidden: Array) -> None:
    sizes = f"x is {list(jnp.shape(x))} and hidden {list(jnp.shape(hidden))}"
    if jnp.ndim(x) != 3 or jnp.ndim(hidden) != 3:
        raise LayerError(f"stacked_gru: {sizes}; they must be [T, N, D] and [L, N, H]")
    _, batch, features = x.shape
    layers, _, size = hidden.shape
    rows = 3 * size
    bias = (layers, 1, 3 * size)
    wanted = StackWeights(
        (rows, features), (layers - 1, rows, size), (layers, rows, size), bias, bias
    )
    arrays = weights._asdict() | {"hidden": hidden}
    shapes = wanted._asdict() | {"hidden": (layers, batch, size)}
    _check_shapes(arrays, shapes, sizes)


def _check_cell(x: Array, hidden: Array, **others: Array) -> None:
    sizes = f"x is {list(jnp.shape(x))} and hidden {list(jnp.shape(hidden))}"
    if jnp.ndim(x) != 2 or jnp.ndim(hidden) != 2 or len(x) != len(hidden):
        raise LayerError(f"stacked_gru: {sizes}; they must be [N, D] and [N, H]")
    _, features = x.shape
    _, size = hidden.shape
    rows = 3 * size
    bias = (1, 3 * size)
    wanted = {
        "W3": (rows, features),
        "U3": (rows, size),
        "bW3": bias,
        "bU3": bias,
        "dnext": hidden.shape,
    }
    _check_shapes(others, wanted, sizes)


def _check_shapes(arrays: Params, wanted: Shapes, because: str) -> None:
    for name, array in arrays.items():
        if jnp.shape(array) != wanted[name]:
            raise LayerError(
                f"stacked_gru: {name} is {list(jnp.shape(array))} but must be {list(wanted[name])}, as {because}"
            )
