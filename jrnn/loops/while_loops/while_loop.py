"""`while_loop`: `jax.lax.while_loop` with a bound, and with derivatives in reverse mode.

The derivative is that of nested scans with early exit (`wrappers/early_exit.py`): a loop over 16 segments of 16 segments of
... 16 steps. Each segment is a `jax.checkpoint`, and is skipped after the stop."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrnn.errors import ScanError
from jrnn.files import plain
from jrnn.jaxprs.names import is_traced
from jrnn.loops.rules import tracing
from jrnn.loops.wrappers import early_exit

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
    last = jax.eval_shape(lambda state: lax.while_loop(cond, body, state), init)  # raises JAX's errors
    state = early_exit.promoted(init, last)
    goes, of_cond = early_exit.without_closure(cond, state)
    runs, of_body = early_exit.without_closure(body, state)

    def prepared(of_cond: Any, of_body: Any) -> tuple[Callable, Callable]:
        return (lambda s: goes(of_cond, s)), (lambda s, _: (runs(of_body, s), None))

    @jax.custom_jvp
    def run(of_cond: Any, of_body: Any, state: Any) -> Any:
        return early_exit.run_while(*prepared(of_cond, of_body), state, None, None, steps, False)[0]

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        def bounded(of_cond: Any, of_body: Any, state: Any) -> Any:
            return _bounded(*prepared(of_cond, of_body), state, steps, checkpoints)

        return jax.jvp(bounded, primals, tangents)

    return run(of_cond, of_body, state)


def _count(name: str, value: Any) -> int:
    value = value if is_traced(value) else plain(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        rule = "must be a positive integer below 2^31 that is known when JAX traces"
        raise ScanError(f"while_loop: {name} {rule}, but is {value!r:.80}")
    return value


def _bounded(keeps_on: Callable, body: Callable, state: Any, steps: int, checkpoints: int | None) -> Any:
    """Runs the loop as nested scans: `steps` steps at most."""

    def counted(carried: Any) -> Any:
        k, state = carried
        return keeps_on(state) & (k < steps)

    step = early_exit.stopping(counted, lambda s, x: ((s[0] + 1, body(s[1], x)[0]), None), None)

    def segment(size: int, pieces: list[int], carried: Any) -> Any:
        """Runs `size` steps: a scan, or a scan over segments of the next size in `pieces`."""
        if not pieces:
            return lax.scan(step, carried, None, length=size)[0]
        inner = jax.checkpoint(functools.partial(segment, pieces[0], pieces[1:]), prevent_cse=False)

        def one(carried: Any, _: Any) -> tuple[Any, None]:
            return lax.cond(early_exit.some(carried[0]), inner, lambda carried: carried, carried), None

        return lax.scan(one, carried, None, length=-(-size // pieces[0]))[0]

    if checkpoints is not None:
        pieces = [-(-steps // min(checkpoints, steps))]
    else:
        sizes = itertools.takewhile(lambda size: size < steps, (_BASE**k for k in itertools.count(1)))
        pieces = list(sizes)[::-1]
    first = (jnp.int32(0), state)
    return segment(steps, pieces, (counted(first), first, (first, None)))[1][1]
