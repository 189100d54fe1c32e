"""`while_loop`: `jax.lax.while_loop` with a bound, and with derivatives in reverse mode.

It is differentiated as nested scans with early exit (`wrappers/early_exit.py`): a loop over 16 segments of 16 segments of
... 16 steps. Each segment is a `jax.checkpoint`, and is skipped after the stop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jrnn.errors import ScanError
from jrnn.files import plain
from jrnn.jaxprs.jax_internals import is_traced
from jrnn.loops.ir import StepFn, Tree, promoted, recomputed, scan_in_chunks
from jrnn.loops.wrappers import early_exit, tracing
from jrnn.loops.wrappers.branches import any_of_all
from jrnn.loops.wrappers.compiled_calls import compiled_once
from jrnn.loops.wrappers.early_exit import Predicate

SEGMENTS = 16  # the number of segments of a segment, and of steps of the shortest

# `state -> state`
Body = Callable[[Tree], Tree]


@tracing.api_boundary
def while_loop(
    cond: Predicate,
    body: Body,
    init: Tree,
    *,
    max_steps: int,
    checkpoints: int | None = None,
) -> Tree:
    """Runs `state = body(state)` while `cond(state)`, at most `max_steps` times, with a reverse-mode gradient.

    Without a gradient this is one `jax.lax.while_loop`. Its derivatives, of every order and in both modes, go
    through the steps that were run. Under `vmap` it runs until every example has stopped, and an example that has
    stopped keeps its state.

    Args:
        cond: state -> a boolean scalar.
        body: state -> a state of the same structure, shapes and dtypes.
        init: the initial state, a pytree of arrays. Leaves that are not floating point have no gradient.
        max_steps: the largest number of steps. A loop that reaches it returns the state that it has; evaluate `cond` on
            the result to find out.
        checkpoints: the number of states that a gradient keeps. Between two of them the steps are run a second time, with
            all their intermediate values. None keeps 16 states a level of nested segments: about 16 log16(max_steps) states
            and the intermediate values of 16 steps, for log16(max_steps) more evaluations of each step.

    Returns:
        The last state.

    Raises:
        ScanError: if `max_steps` or `checkpoints` is not a positive integer. Other errors come from
            `jax.lax.while_loop`.

    >>> import jax
    >>> def double_until(x):
    ...     return while_loop(lambda s: s < 100.0, lambda s: 2 * s, x, max_steps=1000)
    >>> float(double_until(3.0)), float(jax.grad(double_until)(3.0))
    (192.0, 64.0)
    """
    steps = _count("max_steps", max_steps)
    if checkpoints is not None:
        checkpoints = _count("checkpoints", checkpoints)
    return compiled_once(_run, [cond, body], (steps, checkpoints), init)


def _run(functions: Sequence[Body], options: tuple[int, int | None], init: Tree) -> Tree:
    """Runs a call of `while_loop`, from what `compiled_once` passes on."""
    cond, body = functions
    steps, checkpoints = options

    def loop(state):
        return lax.while_loop(cond, body, state)

    def step(state, _):
        return body(state), None

    last = jax.eval_shape(loop, init)  # raises JAX's errors
    state, _ = early_exit.run(
        cond,
        step,
        promoted(init, last),
        xs=None,
        ys=None,
        steps=steps,
        reverse=False,
        bounded=functools.partial(_bounded, steps, checkpoints),
    )
    return state


def _count(name: str, value: object) -> int:
    """Returns a number of steps; raises a ScanError if it is not a positive integer."""
    value = value if is_traced(value) else plain(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        rule = "must be a positive integer below 2^31 that is known when JAX traces"
        raise ScanError(f"while_loop: {name} {rule}, but is {value!r:.80}")
    return value


def _bounded(
    steps: int, checkpoints: int | None, step: StepFn, carried: Tree, xs: None
) -> tuple[Tree, None]:
    """Runs a step of `early_exit.stopping` as nested scans: `steps` steps at most."""

    def counting(counted, _):
        k, carried = counted
        (alive, *rest), _ = step(carried, None)
        return (k + 1, (alive & (k + 1 < steps), *rest)), None

    def skip(counted):
        return counted, None

    def run(inner_sizes, counted, xs, length):
        """Runs `length` steps: a scan, or a scan over segments of the first of `inner_sizes`."""
        if not inner_sizes:
            return lax.scan(counting, counted, xs, length=length)
        size, *rest = inner_sizes
        run_inner = recomputed(functools.partial(run, rest))

        def run_segment(counted, xs, size):
            def inner(counted):
                return run_inner(counted, xs, size)

            _, (alive, *_) = counted
            return lax.cond(any_of_all(alive), inner, skip, counted)

        whole = -(-length // size) * size  # `counting` ends the last segment
        return scan_in_chunks(run_segment, counted, xs, whole, size, reverse=False)

    first = (jnp.int32(0), carried)
    (_, carried), _ = run(_segment_sizes(steps, checkpoints), first, xs, steps)
    return carried, None


def _segment_sizes(steps: int, checkpoints: int | None) -> list[int]:
    """Returns the steps of segments, from the outermost to the innermost."""
    if checkpoints is not None:
        return [-(-steps // min(checkpoints, steps))]
    sizes = []
    size = SEGMENTS
    while size < steps:
        sizes.append(size)
        size *= SEGMENTS
    return sizes[::-1]
