"""The executor "newton" for pytrees, and `scan_statistics`, which also returns what it did."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.jaxprs.jax_internals import jaxpr_as_fun
from jrnn.loops.ir import FlatScan, ScanParams, derived, observers, tag
from jrnn.loops.newton.options import Newton, ScanStatistics, options_of
from jrnn.loops.newton.solver import run
from jrnn.loops.wrappers.branches import any_under_vmap
from jrnn.loops.wrappers.masking import checked_masks, masked
from jrnn.loops.wrappers.programs import compiled_once

_COMPARED = 3  # steps for which derivatives are compared with those of the loop


def scan_statistics(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    *,
    lengths: Any = None,
    resets: Any = None,
    mask: Any = None,
    executor: Newton | str = "newton",
) -> tuple[tuple[Any, Any], ScanStatistics]:
    """Runs `scan` with the executor "newton", and returns what the executor did too.

    Args:
        f, init, xs, length, reverse, lengths, resets, mask: as in `scan`.
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
        raise ScanError(
            f"scan_statistics: the executor must be 'newton' or an object of Newton, but is {executor!r}"
        )
    steps = next((jnp.shape(leaf)[0] for leaf in jax.tree.leaves(xs) if jnp.ndim(leaf)), length)
    masks = checked_masks(lengths, resets, mask, steps)
    options, guess = options.apart()
    return compiled_once(
        _statistics, [f], (length, bool(reverse), options), (init, xs, masks, guess)
    )


def _statistics(
    functions: Sequence[Callable], options: Any, arrays: Any
) -> tuple[tuple[Any, Any], ScanStatistics]:
    (step,), (length, reverse, newton), (init, xs, masks, guess) = functions, options, arrays
    if any(mask is not None for mask in masks):
        steps = next((jnp.shape(leaf)[0] for leaf in jax.tree.leaves(xs) if jnp.ndim(leaf)), length)
        step, xs = masked(step, init, xs, steps, *masks)
    return solve(step, init, xs, length, reverse, newton.starting_from(guess))


def solve(
    f: Callable, init: Any, xs: Any, length: Any, reverse: bool, options: Newton
) -> tuple[tuple[Any, Any], ScanStatistics]:
    """Runs a scan of pytrees: `((carry, ys), statistics)`."""
    flat = FlatScan.of(f, init, xs, length, reverse)
    steps = flat.length
    count = len(flat.init)
    if not jaxprs.is_known(steps):
        raise ScanError(
            f"scan: executor 'newton' needs a number of steps, but it is symbolic ({steps}); use 'auto'"
        )
    if not isinstance(options.guess, str):
        options = replace(options, guess=_guess(options.guess, flat))

    def by_loop() -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the last carry, the outputs, and the carries after every step."""

        def step_with_carry(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = flat.step(carry, x)
            return outs[:count], outs

        with tag.untagged():
            last, outs = jax.lax.scan(step_with_carry, flat.init, flat.xs, steps, reverse)
        return last, outs[count:], outs[:count]

    if not steps or (tag.verified.value and not _agrees(flat)):
        results = by_loop()
        zero = jnp.zeros(())
        iterations = jnp.int32(0)
        residual = zero
        error = zero
        sequential = jnp.int32(steps)
    else:
        solution = run(flat.step, flat.init, flat.xs, int(steps), reverse, options)
        iterations, residual, error, certified = (
            jnp.stack(part) for part in zip(*solution.reports)
        )
        # Of any example under `vmap`: a condition of each would run both ways.
        failed = any_under_vmap(~jnp.all(certified))
        by_newton = solution.carry, solution.ys, solution.states
        results = jax.lax.cond(failed, lambda _: by_loop(), lambda solution: solution, by_newton)
        iterations = iterations.max()
        residual = residual.max()
        error = jnp.where(failed, 0, error.max())
        sequential = jnp.where(failed, jnp.int32(steps), 0)
    last, ys, states = map(jax.tree.unflatten, (flat.carry, flat.ys, flat.carry), results)
    statistics = ScanStatistics(iterations, residual, error, sequential, states)
    return (last, ys), jax.tree.map(jax.lax.stop_gradient, statistics)


def _agrees(flat: FlatScan) -> bool:
    """Returns whether the derivatives of a loop by blocks of Jacobians are those of the loop, on random numbers."""

    def by_blocks(scan: ScanParams) -> derived.Run:
        def of(
            consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]
        ) -> tuple[list[Any], list[Any]]:
            own = functools.partial(jaxpr_as_fun(scan.jaxpr), *consts)
            solution = run(
                lambda h, x: own(*h, *x),
                init,
                xs,
                scan.length,
                scan.reverse,
                Newton(),
                by_steps=True,
            )
            return solution.carry, solution.ys

        return of

    few = derived.lifted(jaxprs.inlined(flat.closed()), len(flat.init), _COMPARED, False)
    agrees, why = derived.validate(few, "newton", by_blocks)
    if why:
        observers.notify(f"newton: {why}")
    return agrees


def _guess(guess: Any, flat: FlatScan) -> list[Any]:
    expected = [(flat.length, *h.shape) for h in flat.init]
    shapes = [jnp.shape(g) for g in jax.tree.leaves(guess)]
    if jax.tree.structure(guess) != flat.carry or shapes != expected:
        raise ScanError(
            f"Newton: guess must be the carries after every step, of shapes {[list(s) for s in expected]}, but has "
            f"the shapes {[list(s) for s in shapes]}; ScanStatistics.states has them"
        )
    return [jax.lax.stop_gradient(g) for g in jax.tree.leaves(guess)]
