"""The executor "newton" for pytrees, and `scan_statistics`, which also returns what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.loops import early_exit, mark
from jrnn.loops.masking import masked
from jrnn.loops.newton.options import Newton, ScanStatistics, options_of
from jrnn.loops.newton.solver import run

source_info_util.register_exclusion(__file__)


def scan_statistics(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    *,
    lengths: Any = None,
    resets: Any = None,
    skip: Any = None,
    executor: Newton | str = "newton",
) -> tuple[tuple[Any, Any], ScanStatistics]:
    """Runs `scan` with the executor "newton", and returns what the executor did too.

    Args:
        f, init, xs, length, reverse, lengths, resets, skip: as in `scan`.
        executor: "newton", or an object of `Newton`.

    Returns:
        `((carry, ys), statistics)`, see `ScanStatistics`.

    Raises:
        ScanError: as `scan`.

    >>> import jax.numpy as jnp
    >>> step = lambda h, x: ((h := 0.5 * jnp.tanh(h) + x), h)
    >>> (last, hs), statistics = scan_statistics(step, jnp.zeros(3), jnp.ones((100, 3)))
    >>> bool(statistics.iterations < 10), int(statistics.sequential_steps), statistics.states.shape
    (True, 0, (100, 3))
    """
    options = options_of(executor)
    if options is None:
        raise ScanError(f"scan_statistics: the executor must be 'newton' or an object of Newton, but is {executor!r}")
    steps = next((jnp.shape(leaf)[0] for leaf in jax.tree.leaves(xs) if jnp.ndim(leaf)), length)
    if lengths is not None or resets is not None or skip is not None:
        f, xs = masked(f, init, xs, steps, lengths, resets, skip)
    return solve(f, init, xs, length, bool(reverse), options)


def solve(
    f: Callable, init: Any, xs: Any, length: Any, reverse: bool, options: Newton
) -> tuple[tuple[Any, Any], ScanStatistics]:
    """Runs a scan of pytrees: `((carry, ys), statistics)`."""
    last, ys = jax.eval_shape(lambda init, xs: jax.lax.scan(f, init, xs, length, reverse), init, xs)  # JAX's errors
    init = early_exit.promoted(init, last)
    leaves, tree = jax.tree.flatten(init)
    stacks, of_x = jax.tree.flatten(jax.tree.map(jnp.asarray, xs))
    steps = stacks[0].shape[0] if stacks else length
    if not jaxprs.is_known(steps):
        raise ScanError(f"scan: executor 'newton' needs a number of steps, but it is symbolic ({steps}); use 'auto'")
    if not steps:
        nothing = jax.tree.map(lambda h: jnp.zeros((0, *h.shape), h.dtype), init)
        zero = jnp.zeros(())
        return jax.lax.scan(f, init, xs, length, reverse), ScanStatistics(
            jnp.int32(0), zero, zero, jnp.int32(0), nothing
        )
    if not isinstance(options.guess, str):
        options = replace(options, guess=_guess(options.guess, init, tree, steps))

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        with mark.unmarked():
            new, y = f(jax.tree.unflatten(tree, carry), jax.tree.unflatten(of_x, x))
        typed = [jnp.asarray(v, h.dtype) for v, h in zip(jax.tree.leaves(new), leaves)]
        return [*typed, *jax.tree.leaves(y)]

    found = run(step, leaves, stacks, int(steps), reverse, options)
    iterations, residual, error, sequential = (jnp.stack(part).max() for part in zip(*found.reports))
    statistics = ScanStatistics(iterations, residual, error, sequential, jax.tree.unflatten(tree, found.states))
    results = jax.tree.unflatten(tree, found.carry), jax.tree.unflatten(jax.tree.structure(ys), found.ys)
    return results, jax.tree.map(jax.lax.stop_gradient, statistics)


def _guess(guess: Any, init: Any, tree: Any, steps: int) -> list[Any]:
    wanted = [(steps, *h.shape) for h in jax.tree.leaves(init)]
    given = [jnp.shape(g) for g in jax.tree.leaves(guess)]
    if jax.tree.structure(guess) != tree or given != wanted:
        raise ScanError(
            f"Newton: guess must be the carries after every step, of shapes {[list(s) for s in wanted]}, but has the shapes "
            f"{[list(s) for s in given]}; ScanStatistics.states has them"
        )
    return [jax.lax.stop_gradient(g) for g in jax.tree.leaves(guess)]
