"""Gradients of a subject in three ways: JAX's, the generated net's, and central differences; and second derivatives in two.

Shapes: S gradients that arrive at the outputs; a gradient of a blob is [S, *its shape]. All of it is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jrnn.autodiff import add_gradients
from jrnn.errors import GradientError
from jrnn.gradcheck.subject import Subject, free_name
from jrnn.gradient_maker import GradientSlice
from jrnn.graph.scope import all_names
from jrnn.lowering import to_jax

STEP = 6e-6  # about the cube root of float64's epsilon, where rounding and truncation of a central difference meet

Gradients = dict[str, Any]


def by_jax(s: Subject) -> Gradients:
    """JAX's gradient of each blob."""

    def run(point: Mapping[str, Any]) -> Gradients:
        _, pull = jax.vjp(lambda p: {y: s.function(p)[y] for y in s.seeds}, point)
        return _each(lambda arriving: pull(arriving)[0], s.seeds)

    return jax.jit(run)(s.point)


def by_net(s: Subject) -> Gradients:
    """The gradient of each blob by the operators that `add_gradients` appends; zeros where they give none."""
    taken = set(all_names(s.net))
    arriving = {y: free_name(f"{y}_arriving", taken) for y in s.seeds}
    full, found = add_gradients(s.net, arriving)
    reached = {n: found[n] for n in s.wrt if n in found}
    blobs = [b for g in reached.values() for b in (g if isinstance(g, GradientSlice) else (g,))]
    wanted = dict.fromkeys(b for b in blobs if b not in arriving.values())  # one may be passed through
    fn = to_jax(full, wanted, wide=True)

    def run(point: Mapping[str, Any]) -> Gradients:
        def one(seeds: Mapping[str, Any]) -> Gradients:
            given = {arriving[y]: seed for y, seed in seeds.items()}
            got = given | fn({**s.blobs, **point, **given}, key=s.key)
            return {n: _dense(n, reached.get(n), got, point[n]) for n in s.wrt}

        return _each(one, s.seeds)

    return jax.jit(run)(s.point)


def without_gradient(s: Subject) -> list[str]:
    """The blobs that the backward net has no gradient of."""
    _, found = add_gradients(s.net, dict.fromkeys(s.seeds))
    return [n for n in s.wrt if n not in found]


def _each(gradients: Callable[[Mapping[str, Any]], Gradients], seeds: Mapping[str, Any]) -> Gradients:
    """The gradients of each row of the seeds, one after the other."""
    arriving = {y: jnp.asarray(v) for y, v in seeds.items()}
    if len(next(iter(seeds.values()))) > 1:
        return jax.lax.map(gradients, arriving)
    return jax.tree.map(lambda g: g[None], gradients({y: v[0] for y, v in arriving.items()}))


def _dense(name: str, gradient: Any, blobs: Mapping[str, Any], like: Any) -> Any:
    if gradient is None:
        return jnp.zeros(like.shape)
    if isinstance(gradient, GradientSlice):
        rows = jnp.reshape(blobs[gradient.values], (-1, *like.shape[1:]))
        return jnp.zeros(like.shape).at[jnp.reshape(blobs[gradient.indices], -1)].add(rows)
    found = jnp.asarray(blobs[gradient])
    if found.shape != like.shape:
        raise GradientError(f"gradient of {name!r}: JAX's is {list(like.shape)}, the net's {list(found.shape)}")
    return found


def weighted(s: Subject) -> Callable[[Mapping[str, Any]], Any]:
    """The function of the point whose gradients are looked for: the outputs, times what arrives, summed: [S]."""

    def value(point: Mapping[str, Any]) -> Any:
        outputs = s.function(point)
        return sum(jnp.sum((seeds * outputs[y][None]).reshape(len(seeds), -1), axis=1) for y, seeds in s.seeds.items())

    return value


def element_differences(s: Subject, where: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """(f(x + h) - f(x - h)) / 2h at flat indices of each blob, all from one compiled function: [S, elements]."""
    value = weighted(s)
    flat, unflatten = ravel_pytree(s.point)
    names = sorted(s.wrt)  # the order in which ravel_pytree puts the leaves of a dict
    starts = dict(zip(names, np.cumsum([0, *(np.size(s.blobs[n]) for n in names)])))
    at = np.concatenate([starts[n] + where[n] for n in names]) if names else np.zeros(0, np.int64)
    steps = STEP * np.maximum(1.0, np.abs(np.asarray(flat)[at]))

    # one element after the other, eight at a time: a whole batch would hold the net's blobs once for every element
    moves = np.concatenate([steps, -steps])
    spare = -len(moves) % 8  # else the function is compiled a second time for the rest
    every = np.pad(np.tile(at, 2), (0, spare)), np.pad(moves, (0, spare))
    values = jax.jit(
        lambda w, h: jax.lax.map(lambda a: value(unflatten(flat.at[a[0]].add(a[1]))), (w, h), batch_size=8)
    )(*every)
    ahead, behind = np.split(np.asarray(values)[: len(moves)], 2)
    found = (ahead - behind) / (2 * steps[:, None])
    ends = np.cumsum([len(where[n]) for n in names])[:-1]
    return dict(zip(names, np.split(found.T, ends, axis=1)))


def direction_errors(s: Subject, gradients: Gradients, names: list[str], count: int, seed: int = 0) -> dict[str, float]:
    """How far slopes along `count` random directions, each in all elements of one blob, are from differences along them.

    The directions have length 1: a slope is of the size of the gradient's norm over the root of the number of elements,
    and the error is relative to it where it is above that.
    """
    value = jax.jit(weighted(s))
    rng = np.random.default_rng(seed)
    point = s.point
    found = {}
    for n in names:
        errors = [0.0]
        for _ in range(count):
            d = rng.standard_normal(point[n].shape)
            d /= np.linalg.norm(d)
            slope = np.asarray(gradients[n]).reshape(s.rows, -1) @ d.reshape(-1)
            ahead, behind = (np.asarray(value({**point, n: point[n] + h * d})) for h in (STEP, -STEP))
            size = max(1.0, float(np.linalg.norm(gradients[n])) / np.sqrt(d.size))
            errors.append(float(np.max(np.abs((ahead - behind) / (2 * STEP) - slope))) / size)
        found[n] = float(np.max(errors))
    return found


def second_errors(s: Subject, seed: int = 0) -> dict[str, float]:
    """JAX's second derivative along one random direction in all blobs, against differences of its gradient along it.

    Raises whatever JAX raises where a function has no second derivative.
    """
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal(s.rows)
    value = weighted(s)
    point = s.point
    towards = {n: rng.standard_normal(v.shape) for n, v in point.items()}
    length = np.sqrt(sum(np.sum(d * d) for d in towards.values()))
    towards = {n: d * min(1.0, 10.0 / max(length, 1e-300)) for n, d in towards.items()}
    slope = jax.grad(lambda p: jnp.sum(value(p) * rows))

    def along(p: Mapping[str, Any]) -> tuple[Any, Any]:
        found = slope(p)
        return sum(jnp.sum(found[n] * towards[n]) for n in found), found

    both = jax.jit(jax.grad(along, has_aux=True))  # one program gives the second derivative and the gradient
    second, _ = both(point)
    (_, ahead), (_, behind) = (both({n: v + h * towards[n] for n, v in point.items()}) for h in (STEP, -STEP))
    errors = {}
    for n, by_jax in second.items():
        difference = (np.asarray(ahead[n]) - np.asarray(behind[n])) / (2 * STEP)
        scale = max(1.0, float(np.max(np.abs(by_jax), initial=0.0)))
        errors[n] = float(np.max(np.abs(difference - np.asarray(by_jax)), initial=0.0)) / scale
    return errors
