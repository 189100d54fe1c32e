"""The executor "newton" for pytrees, and `scan_statistics`, which also returns what it did."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.jaxprs.names import jaxpr_as_fun
from jrnn.loops.loop import derived, mark, recorder
from jrnn.loops.newton.options import Newton, ScanStatistics, options_of
from jrnn.loops.newton.solver import run
from jrnn.loops.wrappers import early_exit
from jrnn.loops.wrappers.masking import masked

source_info_util.register_exclusion(__file__)

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
    skip: Any = None,
    executor: Newton | str = "newton",
    verify: bool = True,
) -> tuple[tuple[Any, Any], ScanStatistics]:
    """Runs `scan` with the executor "newton", and returns what the executor did too.

    Args:
        f, init, xs, length, reverse, lengths, resets, skip, verify: as in `scan`.
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
    return solve(f, init, xs, length, bool(reverse), options, verify)


def solve(
    f: Callable, init: Any, xs: Any, length: Any, reverse: bool, options: Newton, verify: bool
) -> tuple[tuple[Any, Any], ScanStatistics]:
    """Runs a scan of pytrees: `((carry, ys), statistics)`."""
    last, ys = jax.eval_shape(lambda init, xs: jax.lax.scan(f, init, xs, length, reverse), init, xs)  # JAX's errors
    init = early_exit.promoted(init, last)
    leaves, tree = jax.tree.flatten(init)
    stacks, of_x = jax.tree.flatten(jax.tree.map(jnp.asarray, xs))
    steps = stacks[0].shape[0] if stacks else length
    if not jaxprs.is_known(steps):
        raise ScanError(f"scan: executor 'newton' needs a number of steps, but it is symbolic ({steps}); use 'auto'")
    if not isinstance(options.guess, str):
        options = replace(options, guess=_guess(options.guess, init, tree, steps))

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        with mark.unmarked():
            new, y = f(jax.tree.unflatten(tree, carry), jax.tree.unflatten(of_x, x))
        typed = [jnp.asarray(v, h.dtype) for v, h in zip(jax.tree.leaves(new), leaves)]
        return [*typed, *jax.tree.leaves(y)]

    def by_loop() -> tuple[tuple[Any, Any], Any]:
        """Returns the results, and the carries after every step."""

        def kept(h: Any, x: Any) -> tuple[Any, Any]:
            new, y = f(h, x)
            return new, (y, jax.tree.map(lambda v, h: jnp.asarray(v, h.dtype), new, h))

        with mark.unmarked():
            last, (ys, states) = jax.lax.scan(kept, init, xs, length, reverse)
        return (last, ys), states

    if not steps or (verify and not _agrees(step, leaves, stacks)):
        results, states = by_loop()
        zero = jnp.zeros(())
        return results, ScanStatistics(jnp.int32(0), zero, zero, jnp.int32(steps), states)
    solution = run(step, leaves, stacks, int(steps), reverse, options)
    iterations, residual, error, certified = (jnp.stack(part) for part in zip(*solution.reports))
    failed = early_exit.some(
        ~jnp.all(certified)
    )  # of any example under `vmap`: a condition of each would run both ways
    solved = jax.tree.unflatten(tree, solution.carry), jax.tree.unflatten(jax.tree.structure(ys), solution.ys)
    by_newton = solved, jax.tree.unflatten(tree, solution.states)
    results, states = jax.lax.cond(failed, lambda _: by_loop(), lambda solution: solution, by_newton)
    sequential = jnp.where(failed, jnp.int32(steps), 0)
    error = jnp.where(failed, 0, error.max())
    statistics = ScanStatistics(iterations.max(), residual.max(), error, sequential, states)
    return results, jax.tree.map(jax.lax.stop_gradient, statistics)


def _agrees(step: Callable, carry: Sequence[Any], stacks: Sequence[Any]) -> bool:
    """Returns whether the derivatives of a loop by blocks of Jacobians are those of the loop, on random numbers."""
    closed = jax.make_jaxpr(step)(list(carry), [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in stacks])
    lifted, n_consts = derived.lifted(jaxprs.opened(closed))

    def by_blocks(step: Any, n_consts: int, n_carry: int, length: int, reverse: bool) -> Callable[..., list[Any]]:
        end = n_consts + n_carry

        def of(*args: Any) -> list[Any]:
            own = functools.partial(jaxpr_as_fun(step), *args[:n_consts])
            solution = run(
                lambda h, x: own(*h, *x), args[n_consts:end], args[end:], length, reverse, Newton(), by_steps=True
            )
            return [*solution.carry, *solution.ys]

        return of

    agrees, why = derived.verdict(lifted, n_consts, len(carry), _COMPARED, False, "newton", by_blocks)
    if why:
        recorder.note(f"newton: {why}")
    return agrees


def _guess(guess: Any, init: Any, tree: Any, steps: int) -> list[Any]:
    wanted = [(steps, *h.shape) for h in jax.tree.leaves(init)]
    given = [jnp.shape(g) for g in jax.tree.leaves(guess)]
    if jax.tree.structure(guess) != tree or given != wanted:
        raise ScanError(
            f"Newton: guess must be the carries after every step, of shapes {[list(s) for s in wanted]}, but has the shapes "
            f"{[list(s) for s in given]}; ScanStatistics.states has them"
        )
    return [jax.lax.stop_gradient(g) for g in jax.tree.leaves(guess)]
