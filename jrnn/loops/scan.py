"""`scan`: a drop-in for `jax.lax.scan` that makes recurrent steps train faster.

It wraps the step for `lengths` and `resets` (`masking.py`), cuts the loop into chunks for checkpoints (`recompute.py`), and
calls `jax.lax.scan` with a mark: XLA metadata on the loop's equation that holds its `Options` (`mark.py`). The rewriting
happens when JAX differentiates or lowers the marked equation (`rules/`).

The executor "associative" solves affine steps in parallel over time (`passes/associative.py`). "persistent" is one kernel
for the whole loop (`kernels/`). "cudnn" is NVIDIA's kernel for LSTM layers (`cudnn.py`).

Shapes: T time, N batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from jrnn.errors import ScanError, near
from jrnn.loops import cudnn, mark
from jrnn.loops import recompute as recomputation
from jrnn.loops.jax_names import is_traced
from jrnn.loops.mark import Options
from jrnn.loops.masking import masked
from jrnn.loops.passes import associative, split
from jrnn.loops.recompute import Recompute
from jrnn.loops.rules import lowering, tracing
from jrnn.loops.targets import tpu
from jrnn.scalars import plain

EXECUTORS = ("auto", "scan", "associative", "persistent", "cudnn")
# For executors that cannot run every loop: functions of a `Loop` that return the reason why it cannot be run, or None.
_REFUSALS = {"associative": associative.refusal, "persistent": tpu.refusal}

source_info_util.register_exclusion(__file__)  # plans show the user's lines instead


@tracing.api_boundary
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    _split_transpose: bool = False,
    *,
    lengths: Any = None,
    resets: Any = None,
    recompute: Recompute = None,
    executor: str = "auto",
    strict: bool = False,
    memory: int | float | None = None,
) -> tuple[Any, Any]:
    """Runs `f` over the leading axis of `xs`, as `jax.lax.scan` does, with faster loops.

    When JAX lowers the loop and the loop of its gradient, contractions that do not need the carry move out of the loop, the
    gradients of weights become one contraction after the reverse loop, and few values are stored for it. What cannot be
    rewritten runs as in `jax.lax.scan`. `explain_scan` shows what was done.

    Args:
        f: the step, `(carry, x) -> (carry, y)`.
        init: the initial carry, a pytree.
        xs: a pytree with leaves [T, ...], or None with `length`.
        length: T, needed only if xs is None.
        reverse: run from the last step to the first.
        unroll: as in `jax.lax.scan`.
        lengths: integers, usually [N]. After its length a sequence keeps its carry, and its outputs are zero. The shape of
            every leaf of the carry and of the outputs must begin with the shape of `lengths`.
        resets: booleans, usually [T, N]. Where True, the carry goes back to `init` before that step. The shape of every leaf
            of the carry must begin with the shape of `resets[0]`.
        recompute: what the reverse pass computes again instead of storing it. None: what is cheap to compute and large
            to store; if the step names values with `jax.ad_checkpoint.checkpoint_name`, JAX chooses, or the policy of a
            `jax.checkpoint` around the loop. "contractions": everything except the results of contractions. A list of
            names: also the values with these names, what leads to them, and what follows from them cheaply. A number:
            everything, from that many checkpoints of the carry. "sqrt": everything, from sqrt(T) checkpoints.
        executor: "scan"; "associative" (for steps that are affine in the carry with a diagonal Jacobian, and whose
            carries stay finite); "persistent" (one kernel for TPUs, which keeps constants and state on the chip; it is
            interpreted on other platforms, which is slow); "cudnn" (for an `LstmStep` in float32 on CUDA); or "auto",
            which never reassociates products that could overflow.
        strict: raise if the loop cannot be planned and would fall back to `jax.lax.scan`, for tests of speed.
        memory: on a CPU, the most bytes of temporary arrays that a faster loop may use, or, as a float, the most times the
            memory of `jax.lax.scan`, plus 1 MB. None: 1.1 times, or 1.4 times for a loop that is estimated to be much
            faster.

    Returns:
        `(carry, ys)`: the last carry, and the outputs stacked to [T, ...].

    Raises:
        ScanError: if lengths or resets do not fit, the executor is unknown or cannot run the step, or `recompute` is
            invalid. Other errors are those of `jax.lax.scan`.

    >>> import jax.numpy as jnp
    >>> total, sums = scan(lambda c, x: (c + x, c + x), jnp.float32(0), jnp.arange(4.0))
    >>> print(total, sums)
    6.0 [0. 1. 3. 6.]
    """
    if not callable(f):
        raise TypeError("lax.scan: f argument should be a callable.")
    given = (length, reverse, unroll, recompute, strict, memory)  # `jax.lax.scan` reports an option that is traced
    length, reverse, unroll, recompute, strict, memory = (v if is_traced(v) else plain(v) for v in given)
    if executor not in EXECUTORS:
        raise ScanError(
            f"scan: there is no executor {executor!r}; there are {', '.join(EXECUTORS)}{near(str(executor), EXECUTORS)}"
        )
    recomputation.check(recompute)
    _check_memory(memory)
    if executor == "associative" and recompute is not None:
        raise ScanError("scan: executor 'associative' keeps all states, which recompute forbids; use 'auto' or 'scan'")
    if executor == "cudnn":
        return cudnn.scan(f, init, xs, reverse, lengths, resets)
    step, inputs = f, xs
    if lengths is not None or resets is not None:
        step, inputs = masked(f, init, xs, _steps(xs, length), lengths, resets)
    if recomputation.is_checkpoints(recompute):

        def run(carry: Any, xs: Any, steps: int | None) -> tuple[Any, Any]:
            return scan(step, carry, xs, steps, reverse, unroll, executor=executor, strict=strict, memory=memory)

        return recomputation.with_checkpoints(run, init, inputs, length, _steps(inputs, length), reverse, recompute)
    if isinstance(recompute, (list, tuple, set, frozenset)):
        recompute = tuple(sorted(recompute))
    options = Options(executor, recompute, strict, memory)
    unmarked = tracing.unmarked_step(step)  # the mark is for this loop only, not for loops inside the step
    if executor in _REFUSALS or isinstance(recompute, tuple):
        _check(unmarked, init, inputs, length, reverse, options)
    with mark.marked(options):
        return jax.lax.scan(unmarked, init, inputs, length, reverse, unroll)


@contextmanager
def optimize_scans() -> Iterator[None]:
    """Marks every `jax.lax.scan` that is traced in this context, so that it is lowered as `scan` is.

    With it, loops of other libraries (flax, Haiku, Equinox) train faster unchanged. It is also a decorator.
    The context must be active while JAX traces: put it inside `jax.jit`, or around the first call.

    >>> import jax, jax.numpy as jnp
    >>> @jax.jit
    ... @optimize_scans()
    ... def total(xs):
    ...     return jax.lax.scan(lambda c, x: (c + x, None), 0.0, xs)[0]
    >>> print(total(jnp.arange(4.0)))
    6.0
    """
    with mark.marked(Options()):
        yield


def _check_memory(memory: Any) -> None:
    number = isinstance(memory, (int, float, np.integer)) and not isinstance(memory, bool)
    if memory is not None and not (number and memory >= 0):
        raise ScanError(f"scan: memory must be a number of bytes, a factor such as 1.5, or None, but is {memory!r}")


def _steps(xs: Any, length: int | None) -> Any:
    return next((jnp.shape(leaf)[0] for leaf in jax.tree.leaves(xs) if jnp.ndim(leaf)), length)


def _check(step: Callable, init: Any, xs: Any, length: Any, reverse: bool, options: Options) -> None:
    """Raises a ScanError if the executor cannot run the step, or if the step has no value of a given name."""
    loops = lowering.steps_of(lambda init, xs: jax.lax.scan(step, init, xs, length, reverse), init, xs)
    for loop in loops:
        if isinstance(options.recompute, tuple):
            recomputation.check_names(options.recompute, loop.eqns)
        refusal = _REFUSALS.get(options.executor)
        why = refusal(split(loop).core) if refusal else None  # the core: what stays when contractions have moved out
        if why is not None:
            raise ScanError(f"scan: executor {options.executor!r} cannot run this step ({why}); use 'auto' or 'scan'")
