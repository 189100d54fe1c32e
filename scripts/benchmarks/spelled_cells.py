"""Cells over operations that a spelling chooses, so that each is written once (`spellings.py`).

Shapes: T time, N batch, D input, H hidden, K side of a matrix state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.bench.sizes import Size

Weights = dict[str, Any]
States = tuple[Any, ...]


class Operations(NamedTuple):
    """How a cell computes with weights.

    Attributes:
        product: `(x, w) -> x w` along the axis of features.
        axis: of features, from the end; the last of several.
        layout: an operand of `jnp.einsum`, with its features in the place of {}.
        apart: each gate has products of its own.
        joined: the input and the state have one product.
    """

    product: Callable[[Any, Any], Any] = jnp.matmul
    axis: int = -1
    layout: str = "...{}"
    apart: bool = False
    joined: bool = False

    def of_input(self, x: Any, w: Any, b: Any, count: int) -> Any:
        """Returns what the input adds to some gates: `x w + b`, or that of each gate, or what that is computed from."""
        if self.joined:
            return x, w, b
        if self.apart:
            whole = self._replace(apart=False)
            return [
                whole.of_input(x, *parts, 1)
                for parts in zip(jnp.split(w, count, -1), jnp.split(b, count))
            ]
        z = self.product(x, w)
        return z + self.of_features(b, z)

    def parts(self, z: Any, count: int) -> Sequence[Any]:
        """Returns what `of_input` returns for each of some gates."""
        return z if self.apart else jnp.split(z, count, self.axis)

    def gates(self, z: Any, h: Any, w: Any, count: int) -> Sequence[Any]:
        """Returns the gates `z + h w`, for the sums `z` of `of_input`."""
        if self.joined:
            x, of_x, b = z
            z = self.product(jnp.concatenate([x, h], self.axis), jnp.concatenate([of_x, w]))
            return jnp.split(z + self.of_features(b, z), count, self.axis)
        if self.apart:
            return [of_x + self.product(h, part) for of_x, part in zip(z, jnp.split(w, count, -1))]
        return jnp.split(z + self.product(h, w), count, self.axis)

    def mixed(self, spec: str, *operands: Any) -> Any:
        """Returns `jnp.einsum` over the features of operands. Those with "=" in front have no rows."""
        given, out = spec.split("->")
        terms = [t[1:] if t.startswith("=") else self.layout.format(t) for t in given.split(",")]
        return jnp.einsum(",".join(terms) + "->" + self.layout.format(out), *operands)

    def of_features(self, value: Any, like: Any) -> Any:
        """Returns an array of features with axes of size 1 for the rows of another one."""
        behind = -self.axis - 1
        return value.reshape((1,) * (like.ndim - value.ndim - behind) + value.shape + (1,) * behind)

    def inverse(self, matrix: Any) -> Any:
        """Returns the inverses of small matrices of features."""
        axes = (self.axis - 1, self.axis), (-2, -1)
        return jnp.moveaxis(jnp.linalg.inv(jnp.moveaxis(matrix, *axes)), *axes[::-1])


class SpelledCell(NamedTuple):
    """A cell.

    Attributes:
        inputs: `(operations, weights, x) -> what the input adds to the gates`.
        step: `(operations, weights, states, these) -> (states, output)`.
        shapes: the shapes of the weights for D and H.
        states: the shapes of the features of each state, for the weights.
        adds_products: a gate adds products of the input and of a state.
    """

    inputs: Callable[[Operations, Weights, Any], Any]
    step: Callable[[Operations, Weights, States, Any], tuple[States, Any]]
    shapes: Callable[[int, int], dict[str, tuple[int, ...]]]
    states: Callable[[Weights], list[tuple[int, ...]]]
    adds_products: bool = False

    def start(self, o: Operations, p: Weights, inward: Callable[[Any], Any], x: Any) -> list[Any]:
        """Returns the first states for x [T, ..., D]."""
        states = []
        for shape in self.states(p):
            flat = inward(jnp.zeros((*x.shape[1:-1], math.prod(shape)), x.dtype))
            axis = flat.ndim + o.axis
            states.append(flat.reshape((*flat.shape[:axis], *shape, *flat.shape[axis + 1 :])))
        return states


def _of_gates(count: int) -> Callable[[Operations, Weights, Any], Any]:
    return lambda o, p, x: o.of_input(x, p["wx"], p["b"], count)


def lstm(o: Operations, p: Weights, state: States, z: Any) -> tuple[States, Any]:
    """Gates in Caffe2's order: input, forget, output, update."""
    h, c = state
    i, f, out, g = o.gates(z, h, p["wh"], 4)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(out) * jnp.tanh(c)
    return (h, c), h


def gru(o: Operations, p: Weights, state: States, z: Any) -> tuple[States, Any]:
    """Caffe2's: the reset gate is applied before the product."""
    (h,), (gates, candidate) = state, z
    r, u = o.gates(gates, h, p["wh"], 2)
    (n,) = o.gates(candidate, jax.nn.sigmoid(r) * h, p["whn"], 1)
    u = jax.nn.sigmoid(u)
    h = u * h + (1 - u) * jnp.tanh(n)
    return (h,), h


def gated(o: Operations, p: Weights, state: States, z: Any) -> tuple[States, Any]:
    """A gated unit without a product of the state."""
    (h,) = state
    f, n = o.parts(z, 2)
    f = jax.nn.sigmoid(f + h)
    h = f * h + (1 - f) * jnp.tanh(n)
    return (h,), h


def delta(o: Operations, p: Weights, state: States, these: Any) -> tuple[States, Any]:
    """A delta rule: a matrix is corrected by what it returns for a key."""
    (s,), (z, beta) = state, these
    k, v, q = o.parts(z, 3)
    k = k * jax.lax.rsqrt(jnp.sum(k * k, o.axis, keepdims=True) + 1e-3)
    (beta,) = o.parts(beta, 1)
    s = s + o.mixed("k,v->kv", k, jax.nn.sigmoid(beta) * (v - o.mixed("kv,k->v", s, k)))
    return (s,), o.mixed("kv,k->v", s, q)


def kalman(o: Operations, p: Weights, state: States, z: Any) -> tuple[States, Any]:
    """A Kalman filter of four states and two observations."""
    (mean, cov), (y,) = state, o.parts(z, 1)
    f = 0.9 * jnp.eye(4) + p["f"]
    c = p["c"]
    mean = o.mixed("a,=ab->b", mean, f)
    cov = o.mixed("cb,=bd->cd", o.mixed("ab,=ac->cb", cov, f), f)
    cov = cov + 0.01 * o.of_features(jnp.eye(4), cov)
    seen = o.mixed("ab,=bm->am", cov, c)
    noisy = o.mixed("am,=an->mn", seen, c)
    gain = o.mixed("am,mn->an", seen, o.inverse(noisy + 0.1 * o.of_features(jnp.eye(2), noisy)))
    mean = mean + o.mixed("an,n->a", gain, y - o.mixed("a,=am->m", mean, c))
    return (mean, cov - o.mixed("an,bn->ab", gain, seen)), mean


def odd(o: Operations, p: Weights, state: States, z: Any) -> tuple[States, Any]:
    """A cell that nobody else has: a normalized unit, and the level of its recent maxima, which damps it."""
    h, level = state
    (z,) = o.gates(z, h, p["wh"], 1)
    z = z * jax.lax.rsqrt(jnp.mean(z * z, o.axis, keepdims=True) + 1e-2)
    level = jnp.maximum(0.9 * level, jnp.max(jnp.abs(h), o.axis, keepdims=True))
    h = 0.5 * h + jnp.sin(jnp.where(z > 0, z, 0.1 * z)) * jnp.exp(-level)
    return (h, level), h


def _side(hidden: int) -> int:
    return max(2, hidden // 8)


CELLS = {
    "lstm": SpelledCell(
        _of_gates(4),
        lstm,
        lambda d, h: {"wx": (d, 4 * h), "wh": (h, 4 * h), "b": (4 * h,)},
        lambda p: [(len(p["b"]) // 4,)] * 2,
        True,
    ),
    "gru": SpelledCell(
        lambda o, p, x: (_of_gates(2)(o, p, x), o.of_input(x, p["wxn"], p["bn"], 1)),
        gru,
        lambda d, h: {
            **{"wx": (d, 2 * h), "wh": (h, 2 * h), "b": (2 * h,)},
            **{"wxn": (d, h), "whn": (h, h), "bn": (h,)},
        },
        lambda p: [(len(p["bn"]),)],
        True,
    ),
    "gated": SpelledCell(
        _of_gates(2),
        gated,
        lambda d, h: {"wx": (d, 2 * h), "b": (2 * h,)},
        lambda p: [(len(p["b"]) // 2,)],
    ),
    "delta": SpelledCell(
        lambda o, p, x: (_of_gates(3)(o, p, x), o.of_input(x, p["wbeta"], p["bbeta"], 1)),
        delta,
        lambda d, h: {
            "wx": (d, 3 * _side(h)),
            "b": (3 * _side(h),),
            "wbeta": (d, 1),
            "bbeta": (1,),
        },
        lambda p: [(len(p["b"]) // 3,) * 2],
    ),
    "kalman": SpelledCell(
        _of_gates(1),
        kalman,
        lambda d, h: {"wx": (d, 2), "b": (2,), "f": (4, 4), "c": (4, 2)},
        lambda p: [(4,), (4, 4)],
    ),
    "odd": SpelledCell(
        _of_gates(1),
        odd,
        lambda d, h: {"wx": (d, h), "wh": (h, h), "b": (h,)},
        lambda p: [(len(p["b"]),), (1,)],
        True,
    ),
}


def problem(cell: str, size: Size) -> tuple[Weights, Any]:
    """Returns random weights, and x [T, N, D]."""
    rng = np.random.default_rng(0)
    shapes = CELLS[cell].shapes(size.features, size.hidden)
    scale = size.hidden**-0.5
    weights = {
        name: jnp.asarray(scale * rng.normal(size=shape), jnp.float32)
        for name, shape in shapes.items()
    }
    return weights, jnp.asarray(
        rng.normal(size=(size.steps, size.batch, size.features)), jnp.float32
    )
