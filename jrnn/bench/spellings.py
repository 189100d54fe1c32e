"""The ways to write one computation: a table of spellings, for tests and for `jrnn bench --suite spellings`.

A cell is written once, over `Operations`. A spelling says where features and rows are, how products are written, how states
are carried, and how the loop is called. All spellings of a cell compute the same function of the same arrays.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.bench.sizes import Size
from jrnn.nets.builder import NetBuilder
from jrnn.nets.cells import GRUCell, LSTMCell
from jrnn.nets.cells.base import run_cell
from jrnn.nets.lowering import to_jax

Weights = dict[str, Any]
States = tuple[Any, ...]
Scan = Callable[..., Any]


class Operations(NamedTuple):
    """How a cell computes with weights.

    Attributes:
        product: `(x, w) -> x w` along the axis of features.
        axis: of features, from the end.
        apart: each gate has products of its own.
    """

    product: Callable[[Any, Any], Any] = jnp.matmul
    axis: int = -1
    apart: bool = False

    def of_input(self, x: Any, w: Any, b: Any, count: int) -> Any:
        """Returns what the input adds to some gates: `x w + b`, or that of each gate."""
        if self.apart:
            whole = self._replace(apart=False)
            return [whole.of_input(x, *parts, 1) for parts in zip(jnp.split(w, count, -1), jnp.split(b, count))]
        z = self.product(x, w)
        shape = [1] * z.ndim
        shape[self.axis] = len(b)
        return z + b.reshape(shape)

    def gates(self, z: Any, h: Any, w: Any, count: int) -> Sequence[Any]:
        """Returns the gates `z + h w`, for the sums `z` of `of_input`."""
        if self.apart:
            return [of_x + self.product(h, part) for of_x, part in zip(z, jnp.split(w, count, -1))]
        return jnp.split(z + self.product(h, w), count, self.axis)


# Cells ----------------------------------------------------------------------------------------------------------------


class SpelledCell(NamedTuple):
    """A cell of `states` states, of which the first is the output.

    Attributes:
        inputs: `(operations, weights, x) -> what the input adds to the gates`.
        step: `(operations, weights, states, these) -> states`.
        shapes: the shapes of the weights for D and H.
        states: their number.
    """

    inputs: Callable[[Operations, Weights, Any], Any]
    step: Callable[[Operations, Weights, States, Any], States]
    shapes: Callable[[int, int], dict[str, tuple[int, ...]]]
    states: int


def lstm(o: Operations, p: Weights, state: States, z: Any) -> States:
    """Gates in Caffe2's order: input, forget, output, update."""
    h, c = state
    i, f, out, g = o.gates(z, h, p["wh"], 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(out) * jnp.tanh(c), c


def gru(o: Operations, p: Weights, state: States, z: Any) -> States:
    """Caffe2's: the reset gate is applied before the product."""
    (h,), (gates, candidate) = state, z
    r, u = o.gates(gates, h, p["wh"], 2)
    (n,) = o.gates(candidate, jax.nn.sigmoid(r) * h, p["whn"], 1)
    u = jax.nn.sigmoid(u)
    return (u * h + (1 - u) * jnp.tanh(n),)


def gated(o: Operations, p: Weights, state: States, z: Any) -> States:
    """A gated unit without a product of the state."""
    (h,) = state
    f, n = z if o.apart else jnp.split(z, 2, o.axis)
    f = jax.nn.sigmoid(f + h)
    return (f * h + (1 - f) * jnp.tanh(n),)


def _of_gates(count: int) -> Callable[[Operations, Weights, Any], Any]:
    return lambda o, p, x: o.of_input(x, p["wx"], p["b"], count)


CELLS = {
    "lstm": SpelledCell(_of_gates(4), lstm, lambda d, h: {"wx": (d, 4 * h), "wh": (h, 4 * h), "b": (4 * h,)}, 2),
    "gru": SpelledCell(
        lambda o, p, x: (_of_gates(2)(o, p, x), o.of_input(x, p["wxn"], p["bn"], 1)),
        gru,
        lambda d, h: {
            **{"wx": (d, 2 * h), "wh": (h, 2 * h), "b": (2 * h,)},
            **{"wxn": (d, h), "whn": (h, h), "bn": (h,)},
        },
        1,
    ),
    "gated": SpelledCell(_of_gates(2), gated, lambda d, h: {"wx": (d, 2 * h), "b": (2 * h,)}, 1),
}


def problem(cell: str, size: Size) -> tuple[Weights, Any]:
    """Returns random weights, and x [T, N, D]."""
    rng = np.random.default_rng(0)
    shapes = CELLS[cell].shapes(size.features, size.hidden)
    scale = size.hidden**-0.5
    weights = {name: jnp.asarray(scale * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    return weights, jnp.asarray(rng.normal(size=(size.steps, size.batch, size.features)), jnp.float32)


# Spellings ------------------------------------------------------------------------------------------------------------


def _same(value: Any) -> Any:
    return value


class Spelling(NamedTuple):
    """A way to write a loop.

    Attributes:
        operations: how the cell computes.
        inward, outward: from [..., N, features] to the arrays of the step, and back.
        weights: from the weights to those of the step.
        pack, unpack: from a tuple of states to the carry, and back.
        around: makes another loop `(weights, x) -> outputs` of one, or None.
        step: makes another step `(carry, x) -> (carry, y)` of one.
        reverse: the loop runs backward over reversed inputs.
        looped: the loop, if it is not `_loop`.
    """

    operations: Operations = Operations()
    inward: Callable[[Any], Any] = _same
    outward: Callable[[Any], Any] = _same
    weights: Callable[[Weights], Weights] = _same
    pack: Callable[[States], Any] = _same
    unpack: Callable[[Any], States] = tuple
    around: Callable[[Callable[[Weights, Any], Any]], Callable[[Weights, Any], Any]] = _same
    step: Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]] = _same
    reverse: bool = False
    looped: Callable[..., Any] | None = None

    def states(self, cell: SpelledCell, p: Weights, state: States, x: Any) -> States:
        """Returns the new states of a step."""
        return cell.step(self.operations, p, state, cell.inputs(self.operations, p, x))

    def run(self, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
        """Returns the outputs of all steps, [T, N, H], for x [T, N, D]."""
        return self.around(functools.partial(self.looped or _loop, self, cell, scan))(self.weights(p), x)

    def start(self, cell: SpelledCell, p: Weights, x: Any) -> list[Any]:
        """Returns the first states."""
        hidden = p["b"].shape[0] // (4 if cell is CELLS["lstm"] else 2)
        return [self.inward(jnp.zeros((*x.shape[1:-1], hidden), x.dtype))] * cell.states


def _loop(s: Spelling, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        new = s.states(cell, p, s.unpack(carry), x)
        return s.pack(new), new[0]

    xs = jnp.flip(x, 0) if s.reverse else x
    init = s.pack(tuple(s.start(cell, p, x)))
    ys = s.outward(scan(s.step(step), init, s.inward(xs), reverse=s.reverse)[1])
    return jnp.flip(ys, 0) if s.reverse else ys


def _inputs_first(s: Spelling, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
    """What the inputs add to the gates is computed for all steps before the loop."""

    def step(state: States, z: Any) -> tuple[States, Any]:
        new = cell.step(s.operations, p, state, z)
        return new, new[0]

    return scan(step, tuple(s.start(cell, p, x)), cell.inputs(s.operations, p, x))[1]


def _counting(s: Spelling, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
    """The loop reads its inputs at a counter that it carries."""

    def step(carry: Any, _: None) -> tuple[Any, Any]:
        t, state = carry
        new = s.states(cell, p, state, x[t])
        return (t + 1, new), new[0]

    return scan(step, (jnp.int32(0), tuple(s.start(cell, p, x))), None, length=len(x))[1]


def _carrying_weights(s: Spelling, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        p, state = carry
        new = s.states(cell, p, state, x)
        return (p, new), new[0]

    return scan(step, (p, tuple(s.start(cell, p, x))), x)[1]


def _by_index(s: Spelling, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
    def step(state: Any, t: Any) -> tuple[Any, Any]:
        new = s.states(cell, p, state, x[t])
        return new, new[0]

    return scan(step, tuple(s.start(cell, p, x)), jnp.arange(len(x)))[1]


def _in_a_dict(state: States) -> dict[str, Any]:
    return {f"state{k}": v for k, v in enumerate(state)}


def _mapped(parts: int) -> Callable:
    """Makes a loop over [parts, T, N / parts, D] of one over [T, N, D], by `jax.vmap`."""

    def around(loop: Callable) -> Callable:
        def run(p: Weights, x: Any) -> Any:
            apart = x.reshape(x.shape[0], parts, -1, *x.shape[2:])
            ys = jax.vmap(lambda x: loop(p, x), 1, 1)(apart)
            return ys.reshape(*x.shape[:2], -1)

        return run

    return around


def _each_row(loop: Callable) -> Callable:
    return lambda p, x: jax.vmap(lambda x: loop(p, x), 1, 1)(x)


def _transposed(p: Weights) -> Weights:
    return {name: w.T if w.ndim == 2 else w for name, w in p.items()}


_COLUMNS = Operations(lambda x, w: w.T @ x, -2)
_LAST = Operations(lambda x, w: jnp.einsum("...du,dh->...hu", x, w), -2)
_FIRST = Operations(lambda x, w: jnp.einsum("...dnu,dh->...hnu", x, w), -3)

SPELLINGS: dict[str, Spelling] = {
    "plain": Spelling(),
    "unit axis first": Spelling(inward=lambda a: a[..., None, :, :], outward=lambda a: a[..., 0, :, :]),
    "unit axis in the middle": Spelling(inward=lambda a: a[..., None, :], outward=lambda a: a[..., 0, :]),
    "unit axis last": Spelling(_LAST, lambda a: a[..., None], lambda a: a[..., 0]),
    "two unit axes": Spelling(inward=lambda a: a[..., None, :, None, :], outward=lambda a: a[..., 0, :, 0, :]),
    "rows last": Spelling(_COLUMNS, lambda a: jnp.swapaxes(a, -1, -2), lambda a: jnp.swapaxes(a, -1, -2)),
    "rows in the middle": Spelling(
        _FIRST, lambda a: jnp.swapaxes(a, -1, -2)[..., None], lambda a: jnp.swapaxes(a[..., 0], -1, -2)
    ),
    "one vmap": Spelling(around=_mapped(2)),
    "two vmaps": Spelling(around=lambda loop: _mapped(2)(_mapped(2)(loop))),
    "a vmap over rows": Spelling(around=_each_row),
    "stacked states": Spelling(pack=jnp.stack),
    "joined states": Spelling(pack=lambda s: jnp.concatenate(s, -1), unpack=lambda c: tuple(jnp.split(c, 2, -1))),
    "states in a dict": Spelling(pack=_in_a_dict, unpack=lambda c: tuple(c[name] for name in sorted(c))),
    "a counter in the carry": Spelling(looped=_counting),
    "weights in the carry": Spelling(looped=_carrying_weights),
    "indices": Spelling(looped=_by_index),
    "inputs multiplied first": Spelling(looped=_inputs_first),
    "a product for each gate": Spelling(Operations(apart=True)),
    "einsum": Spelling(Operations(lambda x, w: jnp.einsum("...d,dh->...h", x, w))),
    "tensordot": Spelling(Operations(lambda x, w: jnp.tensordot(x, w, 1))),
    "transposed weights": Spelling(Operations(lambda x, w: x @ w.T), weights=_transposed),
    "a jitted step": Spelling(step=jax.jit),
    "a checkpointed step": Spelling(step=jax.checkpoint),
    "reverse": Spelling(reverse=True),
}


def spellings(cell: str) -> dict[str, Spelling]:
    """Returns the spellings of a cell."""
    one = CELLS[cell].states == 1  # joined with itself
    return {name: s for name, s in SPELLINGS.items() if not (one and name == "joined states")}


# Nets -----------------------------------------------------------------------------------------------------------------


def _net(cell: Any, names: Callable[[Weights], Weights]) -> Callable[[Weights, Any], Any]:
    b = NetBuilder("spelled")
    run = run_cell(cell, b, b.input("x"), None, None, scope="cell")
    fn = to_jax(b.build(outputs=[run.output]), [run.output])

    def of(p: Weights, x: Any) -> Any:
        given = {f"cell/{name}": value for name, value in names(p).items()}
        return fn({**given, "x": x})[run.output]

    return of


def _lstm_net(size: Size) -> Callable[[Weights, Any], Any]:
    def names(p: Weights) -> Weights:
        zeros = jnp.zeros(size.hidden)
        weights = {"i2h_w": p["wx"].T, "i2h_b": p["b"], "gates_t_w": p["wh"].T, "gates_t_b": jnp.zeros_like(p["b"])}
        return {**weights, "initial_hidden_state": zeros, "initial_cell_state": zeros}

    return _net(LSTMCell(size.features, size.hidden), names)


def _gru_net(size: Size) -> Callable[[Weights, Any], Any]:
    def names(p: Weights) -> Weights:
        zeros = jnp.zeros(size.hidden)
        (r, u), n = jnp.split(p["wh"].T, 2), p["whn"].T
        weights = {"reset_gate_t_w": r, "update_gate_t_w": u, "output_gate_t_w": n}
        biases = dict.fromkeys(("reset_gate_t_b", "update_gate_t_b", "output_gate_t_b"), zeros)
        of_input = {"i2h_w": jnp.concatenate([p["wx"], p["wxn"]], 1).T, "i2h_b": jnp.concatenate([p["b"], p["bn"]])}
        return {**weights, **biases, **of_input, "initial_hidden_state": zeros}

    return _net(GRUCell(size.features, size.hidden), names)


NETS = {"lstm": _lstm_net, "gru": _gru_net}


def programs(cell: str, size: Size, scan: Scan) -> dict[str, Callable[[Weights, Any], Any]]:
    """Returns each spelling of a cell as a function `(weights, x) -> outputs`. Nets use `jrnn.scan` whatever is given."""
    by_name: dict[str, Callable[[Weights, Any], Any]] = {
        name: functools.partial(s.run, CELLS[cell], scan) for name, s in spellings(cell).items()
    }
    return by_name | ({"a net": NETS[cell](size)} if cell in NETS else {})
