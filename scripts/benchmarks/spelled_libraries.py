"""Cells of libraries as spellings (`spellings.py`): nets of this package, and cells of flax, Equinox, Haiku and Keras.

Each is a function of a size and a scan that returns `(weights, x [T, N, D]) -> outputs`. The other libraries but flax are
optional. Keras, with `KERAS_BACKEND=jax`, runs its layers by `jax.lax.scan`. It is measured with `optimize_scans` in the
place of `jrnn.scan`.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from spelled_cells import Weights

from jrnn.bench.sizes import Size
from jrnn.loops import optimize_scans
from jrnn.nets.builder import NetBuilder
from jrnn.nets.cells import GRUCell, LSTMCell
from jrnn.nets.cells.base import run_cell
from jrnn.nets.lowering import to_jax

Run = Callable[[Weights, Any], Any]
Scan = Callable[..., Any]

AS_A_NET = "a net"


def _net(cell: Any, names: Callable[[Weights], Weights]) -> Run:
    b = NetBuilder("spelled")
    run = run_cell(cell, b, b.input("x"), None, None, scope="cell")
    fn = to_jax(b.build(outputs=[run.output]), [run.output])

    def of(p: Weights, x: Any) -> Any:
        given = {f"cell/{name}": value for name, value in names(p).items()}
        return fn({**given, "x": x})[run.output]

    return of


def _lstm_net(size: Size, scan: Scan) -> Run:
    def names(p: Weights) -> Weights:
        zeros = jnp.zeros(size.hidden)
        weights = {
            "i2h_w": p["wx"].T,
            "i2h_b": p["b"],
            "gates_t_w": p["wh"].T,
            "gates_t_b": jnp.zeros_like(p["b"]),
        }
        return {**weights, "initial_hidden_state": zeros, "initial_cell_state": zeros}

    return _net(LSTMCell(size.features, size.hidden), names)


def _gru_net(size: Size, scan: Scan) -> Run:
    def names(p: Weights) -> Weights:
        zeros = jnp.zeros(size.hidden)
        (r, u), n = jnp.split(p["wh"].T, 2), p["whn"].T
        weights = {"reset_gate_t_w": r, "update_gate_t_w": u, "output_gate_t_w": n}
        biases = dict.fromkeys(("reset_gate_t_b", "update_gate_t_b", "output_gate_t_b"), zeros)
        of_input = {
            "i2h_w": jnp.concatenate([p["wx"], p["wxn"]], 1).T,
            "i2h_b": jnp.concatenate([p["b"], p["bn"]]),
        }
        return {**weights, **biases, **of_input, "initial_hidden_state": zeros}

    return _net(GRUCell(size.features, size.hidden), names)


def _flax(size: Size, scan: Scan) -> Run:
    def run(p: Weights, x: Any) -> Any:
        cell = nnx.LSTMCell(size.features, size.hidden, rngs=nnx.Rngs(0))
        parts = (jnp.split(p[name], 4, -1) for name in ("wx", "wh", "b"))
        for gate, wx, wh, b in zip("ifog", *parts):
            getattr(cell, "if_" if gate == "f" else f"i{gate}").kernel[...] = wx
            of_state = getattr(cell, f"h{gate}")
            of_state.kernel[...], of_state.bias[...] = wh, b
        zeros = jnp.zeros((x.shape[1], size.hidden))
        return scan(lambda carry, x: cell(carry, x), (zeros, zeros), x)[1]  # its carry is (c, h)

    return run


def _in_order(weights: Any, order: str) -> Any:
    """Returns the columns of the gates of an LSTM in another order than "ifog"."""
    gates = dict(zip("ifog", jnp.split(weights, 4, -1)))
    return jnp.concatenate([gates[gate] for gate in order], -1)


def _haiku(size: Size, scan: Scan) -> Run:
    import haiku

    cell = haiku.without_apply_rng(
        haiku.transform(lambda x, state: haiku.LSTM(size.hidden)(x, state))
    )

    def run(p: Weights, x: Any) -> Any:
        forget = jnp.repeat(
            jnp.array([0.0, 0.0, 1.0, 0.0]), size.hidden
        )  # a bias that it adds to the gate
        weights = {
            "w": _in_order(jnp.concatenate([p["wx"], p["wh"]]), "igfo"),
            "b": _in_order(p["b"], "igfo") - forget,
        }
        zeros = jnp.zeros((x.shape[1], size.hidden))

        def step(state: Any, x: Any) -> tuple[Any, Any]:
            out, state = cell.apply({"lstm/linear": weights}, x, state)
            return state, out

        return scan(step, haiku.LSTMState(zeros, zeros), x)[1]

    return run


def _keras(size: Size, scan: Scan) -> Run:
    import keras

    layer = keras.layers.LSTM(size.hidden, return_sequences=True)
    with jax.numpy_rank_promotion("allow"):
        layer.build((None, None, size.features))

    def run(p: Weights, x: Any) -> Any:
        weights = [_in_order(p[name], "ifgo") for name in ("wx", "wh", "b")]
        optimized = contextlib.nullcontext() if scan is jax.lax.scan else optimize_scans()
        with optimized, jax.numpy_rank_promotion("allow"):
            ys, _ = layer.stateless_call(
                weights, layer.non_trainable_variables, jnp.swapaxes(x, 0, 1)
            )
        return jnp.swapaxes(ys, 0, 1)

    return run


def _equinox(size: Size, scan: Scan) -> Run:
    import equinox

    def run(p: Weights, x: Any) -> Any:
        cell = equinox.nn.LSTMCell(size.features, size.hidden, key=jax.random.key(0))
        where = lambda cell: (cell.weight_ih, cell.weight_hh, cell.bias)  # noqa: E731
        cell = equinox.tree_at(
            where, cell, [_in_order(p[name], "ifgo").T for name in ("wx", "wh", "b")]
        )
        zeros = jnp.zeros((x.shape[1], size.hidden))
        return scan(
            lambda carry, x: ((new := jax.vmap(cell)(x, carry)), new[0]), (zeros, zeros), x
        )[1]

    return run


LIBRARIES: dict[str, dict[str, Callable[[Size, Scan], Run]]] = {
    "lstm": {
        AS_A_NET: _lstm_net,
        "a cell of flax": _flax,
        **({"a cell of Equinox": _equinox} if find_spec("equinox") else {}),
        **({"a cell of Haiku": _haiku} if find_spec("haiku") else {}),
        **({"a layer of Keras": _keras} if os.environ.get("KERAS_BACKEND") == "jax" else {}),
    },
    "gru": {AS_A_NET: _gru_net},
}
