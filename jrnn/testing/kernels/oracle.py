"""What the step gives: its loop as one compiled program, for all lengths, resets and padding, in any type.

A trial is put into arrays of the largest sizes that are tried, so that one program serves all of them: steps behind its
end, and rows and heads that it lacks, change no result.

Shapes: T time, N batch, H heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.testing.invariance import floats
from jrnn.testing.subjects import PyTree

Sizes = tuple[int, int, int]  # T, N, H


class Results(NamedTuple):
    """Of a call: outputs, the last state, and gradients with respect to params, inputs and the first state."""

    y: Any
    last: Any
    params: Any = None
    x: Any = None
    state: Any = None


class Inputs(NamedTuple):
    """Arrays [T, N, H, ...] and [N, H, ...] to run a step on; resets and valid are bool [T, N]."""

    params: Any
    x: Any
    state: Any
    start: Any
    resets: np.ndarray
    valid: np.ndarray
    dy: Any
    dlast: Any


@functools.lru_cache(maxsize=32)
def _program(step: Callable, with_params: bool) -> Callable[[Inputs], Results]:
    """Returns the compiled loop of a step, with its gradients."""

    def loop(params: PyTree, x: PyTree, state: PyTree, inputs: Inputs) -> Any:
        def one(carry: PyTree, x: PyTree) -> Any:
            return step(params, carry, x) if with_params else step(carry, x)

        def body(carry: PyTree, now: Any) -> Any:
            x, reset, valid = now
            carry = _where(reset, inputs.start, carry)
            new, y = jax.vmap(jax.vmap(one))(carry, x)
            new = jax.tree.map(lambda value, old: value.astype(old.dtype), new, carry)
            return _where(valid, new, carry), y

        last, y = jax.lax.scan(body, state, (x, inputs.resets, inputs.valid))
        return y, last

    def run(inputs: Inputs) -> Results:
        smooth, join = floats((inputs.params, inputs.x, inputs.state))
        results, back = jax.vjp(lambda values: loop(*join(values), inputs), smooth)
        seeds = jax.tree.map(
            lambda seed, value: seed.astype(value.dtype), (inputs.dy, inputs.dlast), results
        )
        return Results(*results, *join(back(seeds)[0]))

    return jax.jit(run)


def _where(flags: Any, value: PyTree, other: PyTree) -> Any:
    """Chooses by flags [N] between arrays [N, ...]."""

    def choose(a: Any, b: Any) -> Any:
        return jnp.where(flags.reshape(flags.shape + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(choose, value, other)


@functools.lru_cache(maxsize=32)
def _of_one_token(step: Callable, with_params: bool) -> Any:
    """A step with params, compiled so that its trace is kept."""
    return jax.jit(step if with_params else lambda params, carry, x: step(carry, x))


def one_token(step: Callable, params: PyTree, x: PyTree, state: PyTree) -> Any:
    """The shapes of what a step gives for one token of inputs [T, N, H, ...]: the state and the output."""
    x = jax.tree.map(lambda leaf: leaf[0, 0, 0], x)
    state = jax.tree.map(lambda leaf: leaf[0, 0], state)
    return _of_one_token(step, params is not None).eval_shape(params, state, x)


def results_of_step(step: Callable, inputs: Inputs, room: Sizes, dtype: Any) -> Results:
    """The results of a step's loop, as numpy arrays of float64.

    Args:
        room: T, N and H of the arrays that the program runs on, at least those of the inputs.
        dtype: the type in which the step computes; states that are wider stay so. float64 gives the results that others are
            compared with.
    """
    sizes = sizes_of(inputs.x)
    wide = Inputs(
        params=in_type(inputs.params, dtype),
        x=_widened(in_type(inputs.x, dtype), room),
        state=_widened(in_type(inputs.state, dtype), room[1:]),
        start=_widened(in_type(inputs.start, dtype), room[1:]),
        resets=_with_zeros(inputs.resets, room[:2]),
        valid=_with_zeros(inputs.valid, room[:2]),
        dy=jax.tree.map(lambda leaf: _with_zeros(leaf, room), inputs.dy),
        dlast=jax.tree.map(lambda leaf: _with_zeros(leaf, room[1:]), inputs.dlast),
    )
    with jax.enable_x64(dtype == np.float64):
        results = _program(step, inputs.params is not None)(wide)
    results = jax.tree.map(plain, results)
    return Results(
        y=_narrowed(results.y, sizes),
        last=_narrowed(results.last, sizes[1:]),
        params=results.params,
        x=_narrowed(results.x, sizes),
        state=_narrowed(results.state, sizes[1:]),
    )


def sizes_of(x: PyTree) -> Sizes:
    """T, N and H of inputs."""
    return np.shape(jax.tree.leaves(x)[0])[:3]  # type: ignore[return-value]


def is_float(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def in_type(tree: PyTree, dtype: Any) -> Any:
    """A tree with its floating-point arrays in a type."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if is_float(leaf) else leaf, tree)


def plain(array: Any) -> Any:
    """An array of numpy, of float64 where it holds floating-point numbers of any kind."""
    array = np.asarray(array)
    return array.astype(np.float64) if is_float(array) else array


def _widened(tree: PyTree, room: tuple[int, ...]) -> Any:
    """Repeats the last step, row and head up to the sizes in `room`."""

    def widened(leaf: np.ndarray) -> np.ndarray:
        for axis, size in enumerate(room):
            places = np.minimum(np.arange(size), leaf.shape[axis] - 1)
            leaf = np.take(leaf, places, axis)
        return leaf

    return jax.tree.map(widened, tree)


def _with_zeros(array: np.ndarray, room: tuple[int, ...]) -> np.ndarray:
    wide = np.zeros((*room, *array.shape[len(room) :]), array.dtype)
    wide[tuple(map(slice, array.shape[: len(room)]))] = array
    return wide


def _narrowed(tree: PyTree, sizes: tuple[int, ...]) -> Any:
    return jax.tree.map(lambda leaf: leaf[tuple(map(slice, sizes))], tree)
