"""The executor "newton" for pytrees, and `scan_statistics`, which also returns what it did."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.jaxprs.jax_internals import jaxpr_as_fun
from jrnn.loops.ir import FlatScan, StepFn, Tree, derived, observers, tag
from jrnn.loops.newton.options import Newton, ScanStatistics, options_of
from jrnn.loops.newton.solver import run
from jrnn.loops.wrappers.branches import any_under_vmap
from jrnn.loops.wrappers.compiled_calls import compiled_once
from jrnn.loops.wrappers.masking import checked_masks, masked

_VALIDATED_STEPS = 3  # derivatives are compared with the loop's for this number of steps


def scan_statistics(
    f: StepFn,
    init: Tree,
    xs: Tree = None,
    length: int | None = None,
    reverse: bool = False,
    *,
    lengths: Array | None = None,
    resets: Array | None = None,
    mask: Array | None = None,
    executor: Newton | str = "newton",
) -> tuple[tuple[Tree, Tree], ScanStatistics]:
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
    masks = checked_masks(lengths, resets, mask, _steps(xs, length))
    options, guess = options.separate_guess()
    return compiled_once(
        _statistics, [f], (length, bool(reverse), options), (init, xs, masks, guess)
    )


def _steps(xs: Tree, length: int | None) -> int | None:
    """Returns the number of steps, as the first of the inputs has it."""
    for leaf in jax.tree.leaves(xs):
        if jnp.ndim(leaf):
            return jnp.shape(leaf)[0]
    return length


def _statistics(
    functions: Sequence[StepFn], options: tuple[int | None, bool, Newton], arrays: Sequence[Tree]
) -> tuple[tuple[Tree, Tree], ScanStatistics]:
    """Runs a call of `scan_statistics`, from what `compiled_once` passes on."""
    (step,) = functions
    length, reverse, newton = options
    init, xs, masks, guess = arrays
    if any(mask is not None for mask in masks):
        step, xs = masked(step, init, xs, _steps(xs, length), *masks)
    return solve(step, init, xs, length, reverse, newton.with_guess(guess))


def solve(
    f: StepFn, init: Tree, xs: Tree, length: int | None, reverse: bool, options: Newton
) -> tuple[tuple[Tree, Tree], ScanStatistics]:
    """Runs a scan of pytrees: `((carry, ys), statistics)`."""
    flat = FlatScan.of(f, init, xs, length, reverse)
    steps = flat.length
    if not jaxprs.is_known(steps):
        raise ScanError(
            f"scan: executor 'newton' needs a number of steps, but it is symbolic ({steps}); use 'auto'"
        )
    if not isinstance(options.guess, str):
        options = replace(options, guess=_checked_guess(options.guess, flat))

    if not steps or (tag.verified.value and not _agrees(flat)):
        results = _by_loop(flat, reverse)
        iterations = jnp.int32(0)
        residual = jnp.zeros(())
        error = jnp.zeros(())
        sequential_steps = jnp.int32(steps)
    else:
        solution = run(flat.step, flat.init, flat.xs, int(steps), reverse, options)
        iterations, residual, error, certified = map(jnp.stack, zip(*solution.reports))
        # Of any example under `vmap`: a condition of each would run both ways.
        failed = any_under_vmap(~jnp.all(certified))
        by_newton = solution.carry, solution.ys, solution.states
        results = jax.lax.cond(
            failed, lambda _: _by_loop(flat, reverse), lambda solution: solution, by_newton
        )
        iterations = iterations.max()
        residual = residual.max()
        error = jnp.where(failed, 0, error.max())
        sequential_steps = jnp.where(failed, jnp.int32(steps), 0)

    last, ys, states = map(jax.tree.unflatten, (flat.carry, flat.ys, flat.carry), results)
    statistics = ScanStatistics(iterations, residual, error, sequential_steps, states)
    return (last, ys), jax.tree.map(jax.lax.stop_gradient, statistics)


def _by_loop(flat: FlatScan, reverse: bool) -> tuple[list[Array], list[Array], list[Array]]:
    """Returns the last carry, the outputs, and the carries after every step."""
    n_carry = len(flat.init)

    def step_with_carry(carry, x):
        outs = flat.step(carry, x)
        return outs[:n_carry], outs

    with tag.untagged():
        last, outs = jax.lax.scan(step_with_carry, flat.init, flat.xs, flat.length, reverse)
    return last, outs[n_carry:], outs[:n_carry]


def _agrees(flat: FlatScan) -> bool:
    """Returns whether the derivatives by blocks of Jacobians are the loop's, on random numbers."""

    def by_blocks(scan):
        def run_by_blocks(consts, init, xs):
            step = functools.partial(jaxpr_as_fun(scan.jaxpr), *consts)

            def flat_step(h, x):
                return step(*h, *x)

            solution = run(flat_step, init, xs, scan.length, scan.reverse, Newton(), by_steps=True)
            return solution.carry, solution.ys

        return run_by_blocks

    step = jaxprs.inlined(flat.closed())
    loop = derived.lifted(step, len(flat.init), _VALIDATED_STEPS, False)
    agrees, note = derived.validate(loop, "newton", by_blocks)
    if note:
        observers.notify(f"newton: {note}")
    return agrees


def _checked_guess(guess: Tree, flat: FlatScan) -> list[Array]:
    """Returns the carries to start from, as a flat list."""
    leaves = jax.tree.leaves(guess)
    expected = [(flat.length, *h.shape) for h in flat.init]
    shapes = list(map(jnp.shape, leaves))
    if jax.tree.structure(guess) != flat.carry or shapes != expected:
        raise ScanError(
            f"Newton: guess must be the carries after every step, of shapes {list(map(list, expected))}, but has "
            f"the shapes {list(map(list, shapes))}; ScanStatistics.states has them"
        )
    return list(map(jax.lax.stop_gradient, leaves))
