"""`while_loop`: `jax.lax.while_loop` with a bound, and with derivatives in reverse mode.

The derivative is that of nested scans with early exit (`wrappers/early_exit.py`): a loop over 16 segments of 16 segments of
... 16 steps. Each segment is a `jax.checkpoint`, and is skipped after the stop."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrnn.errors import ScanError
from jrnn.files import plain
from jrnn.jaxprs.jax_internals import is_traced
from jrnn.loops.ir import promoted
from jrnn.loops.wrappers import early_exit, tracing
from jrnn.loops.wrappers.branches import any_of_all
from jrnn.loops.wrappers.programs import compiled_once

_BASE = 16  # the number of segments of a segment, and of steps of the shortest


@tracing.api_boundary
def while_loop(
    cond: Callable[[Any], Any],
    body: Callable[[Any], Any],
    init: Any,
    *,
    max_steps: int,
    checkpoints: int | None = None,
) -> Any:
    """Runs `state = body(state)` while `cond(state)`, at most `max_steps` times, with a reverse-mode gradient.

    Without a gradient this is one `jax.lax.while_loop`. Its derivatives, of every order and in both modes, are those of
    the steps that were run. Under `vmap` it runs until every example has stopped, and an example that has stopped keeps
    its state.

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
        ScanError: if `max_steps` or `checkpoints` is not a positive integer. Other errors are those of
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


def _run(functions: Sequence[Callable], options: tuple[int, int | None], init: Any) -> Any:
    (cond, body), (steps, checkpoints) = functions, options
    last = jax.eval_shape(
        lambda state: lax.while_loop(cond, body, state), init
    )  # raises JAX's errors
    bounded = functools.partial(_bounded, steps, checkpoints)
    state = promoted(init, last)
    return early_exit.run(
        cond, lambda state, _: (body(state), None), state, None, None, steps, False, bounded
    )[0]


def _count(name: str, value: Any) -> int:
    value = value if is_traced(value) else plain(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        rule = "must be a positive integer below 2^31 that is known when JAX traces"
        raise ScanError(f"while_loop: {name} {rule}, but is {value!r:.80}")
    return value


def _bounded(
    steps: int, checkpoints: int | None, step: Callable, carried: Any, xs: None
) -> tuple[Any, None]:
    """Runs a step of `early_exit.stopping` as nested scans: `steps` steps at most."""

    def counting(counted: Any, _: Any) -> tuple[Any, None]:
        k, carried = counted
        (alive, *rest), _ = step(carried, None)
        return (k + 1, (alive & (k + 1 < steps), *rest)), None

    def segment(size: int, pieces: list[int], counted: Any) -> Any:
        """Runs `size` steps: a scan, or a scan over segments of the next size in `pieces`."""
        if not pieces:
            return lax.scan(counting, counted, None, length=size)[0]
        inner = jax.checkpoint(functools.partial(segment, pieces[0], pieces[1:]), prevent_cse=False)

        def one(counted: Any, _: Any) -> tuple[Any, None]:
            return lax.cond(
                any_of_all(counted[1][0]), inner, lambda counted: counted, counted
            ), None

        return lax.scan(one, counted, None, length=-(-size // pieces[0]))[0]

    if checkpoints is not None:
        pieces = [-(-steps // min(checkpoints, steps))]
    else:
        sizes = itertools.takewhile(
            lambda size: size < steps, (_BASE**k for k in itertools.count(1))
        )
        pieces = list(sizes)[::-1]
    return segment(steps, pieces, (jnp.int32(0), carried))[1], None
