"""`scan`: a drop-in for `jax.lax.scan` that makes recurrent steps train faster.

It runs nothing itself. It wraps the step for `lengths` and `resets` (`masking.py`), cuts the loop into chunks for
checkpoints (`recompute.py`), and calls `jax.lax.scan` with a mark: XLA metadata on the loop's equation that holds its
`Options` (`mark.py`). The work is done when JAX differentiates or lowers the marked equation: `lowering.py` is read next.
The executor "associative" solves affine steps in parallel over time (`passes/associative.py`); "persistent" is one kernel
for the whole loop (`kernels/`); "cudnn" is a kernel for one layer (`cudnn.py`).

Shapes: T time, N batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from jrnn.errors import ScanError, near
from jrnn.executor import cudnn, lowering, mark
from jrnn.executor import recompute as recomputation
from jrnn.executor.mark import Options
from jrnn.executor.masking import with_lengths, with_resets
from jrnn.executor.passes import associative, split
from jrnn.executor.recompute import Recompute
from jrnn.executor.targets import tpu
from jrnn.ir import plain
from jrnn.jax_names import is_traced

EXECUTORS = ("auto", "scan", "associative", "persistent", "cudnn")
# Those that not every step suits, with the reason why they cannot run a loop.
_BY_NAME = {"associative": associative.refusal, "persistent": tpu.refusal}

source_info_util.register_exclusion(__file__)
assert lowering  # importing it installs the rules


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
) -> tuple[Any, Any]:
    """Runs `f` over the leading axis of `xs`, as `jax.lax.scan` does: it is `jax.lax.scan`, with a mark.

    When JAX lowers the loop, and the loop of its gradient, contractions that need no carry are done for all steps before
    or after the loop, the gradients of weights become one contraction after the reverse loop, and few values are stored
    for it. What cannot be rewritten runs as `jax.lax.scan` runs it. `explain_scan` prints what was done.

    Args:
        f: the step, `(carry, x) -> (carry, y)`.
        init: the initial carry, a pytree.
        xs: a pytree whose leaves are [T, ...], or None with `length`.
        length: T, needed only when xs is None.
        reverse: run from the last step to the first.
        unroll: as in `jax.lax.scan`.
        lengths: integers, usually [N]; after its length a sequence keeps its carry and its outputs are zero. Every leaf
            of the carry and of the outputs must begin with the shape of `lengths`.
        resets: booleans, usually [T, N]; where True, the carry goes back to `init` before that step. Every leaf of
            the carry must begin with the shape of `resets[0]`.
        recompute: what the reverse pass computes again instead of storing it. None: what is cheap to compute and large
            to store. "contractions": everything but the results of contractions. A list of names: also the values
            that the step names so with `jax.ad_checkpoint.checkpoint_name`, what leads to them, and what follows from
            them cheaply. A number: everything, from that many checkpoints of the carry; "sqrt": from sqrt(T) of them.
        executor: "scan"; "associative" (steps that are affine in the carry with a diagonal Jacobian, and whose
            carries stay finite); "persistent" (one kernel for TPUs, which keeps constants and state on the chip;
            elsewhere it is interpreted, which is slow); "cudnn" (an `LstmStep` in float32 on CUDA); or "auto", which
            never reassociates products that could overflow.
        strict: raise where the loop would be left as `jax.lax.scan` lowers it, for tests of speed.

    Returns:
        `(carry, ys)`: the last carry, and the outputs stacked to [T, ...].

    Raises:
        ScanError: lengths or resets that do not fit, an unknown executor or one that cannot run the step, an impossible
            `recompute`. All else is raised as by `jax.lax.scan`.

    >>> import jax.numpy as jnp
    >>> total, sums = scan(lambda c, x: (c + x, c + x), jnp.float32(0), jnp.arange(4.0))
    >>> print(total, sums)
    6.0 [0. 1. 3. 6.]
    """
    if not callable(f):
        raise TypeError("lax.scan: f argument should be a callable.")
    given = (length, reverse, unroll, recompute, strict)  # `lax.scan` says what is wrong with those that are traced
    length, reverse, unroll, recompute, strict = (v if is_traced(v) else plain(v) for v in given)
    if executor not in EXECUTORS:
        raise ScanError(
            f"scan: there is no executor {executor!r}; there are {', '.join(EXECUTORS)}{near(str(executor), EXECUTORS)}"
        )
    recomputation.check(recompute)
    if executor == "cudnn":
        return cudnn.scan(f, init, xs, reverse, lengths, resets)
    step, inputs = f, xs
    if lengths is not None or resets is not None:
        step, inputs = _masked(f, init, xs, length, lengths, resets)
    if recomputation.is_checkpoints(recompute):
        return _with_checkpoints(step, init, inputs, length, reverse, unroll, recompute, executor, strict)
    if isinstance(recompute, (list, tuple, set, frozenset)):
        recompute = tuple(sorted(recompute))
    options = Options(executor, recompute, strict)
    if options != Options():  # they hold for this loop, not for those in its step
        step = _unmarked(step)
    if executor in _BY_NAME or isinstance(recompute, tuple):
        _check(step, init, inputs, length, reverse, options)
    with mark.marked(options):
        return jax.lax.scan(step, init, inputs, length, reverse, unroll)


@contextmanager
def optimize_scans() -> Iterator[None]:
    """Marks every `jax.lax.scan` that is traced in this context, so that it is lowered as `scan` is.

    Loops of other libraries (flax, Haiku, Equinox) train faster this way without a change to them. It is a decorator too.
    The context must hold while JAX traces: put it inside of `jax.jit`, or around the first call.

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


def _masked(f: Callable, init: Any, xs: Any, length: int | None, lengths: Any, resets: Any) -> tuple[Callable, Any]:
    """The step and inputs with lengths and resets."""
    steps = next((jnp.shape(leaf)[0] for leaf in jax.tree.leaves(xs) if jnp.ndim(leaf)), length)
    if steps is None:
        return f, xs  # `jax.lax.scan` says what is wrong with it
    if resets is not None:
        f, xs = with_resets(f, init, _checked(resets, "resets", bool, "booleans"), steps, xs)
    if lengths is not None:
        f, xs = with_lengths(f, _checked(lengths, "lengths", int, "integers"), xs), (jnp.arange(steps), xs)
    return f, xs


def _checked(values: Any, name: str, kind: type, kinds: str) -> Any:
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.bool_ if kind is bool else jnp.integer):
        raise ScanError(f"scan: {name} must be {kinds}, but are {values.dtype}; give {name}.astype({kind.__name__})")
    return values


def _with_checkpoints(
    step: Callable,
    init: Any,
    xs: Any,
    length: int | None,
    reverse: bool,
    unroll: int | bool,
    recompute: Recompute,
    executor: str,
    strict: bool,
) -> tuple[Any, Any]:
    if executor == "associative":
        raise ScanError("scan: executor 'associative' keeps all states, which recompute forbids; use 'auto' or 'scan'")
    sizes = [jnp.shape(leaf)[0] for leaf in jax.tree.leaves(xs) if jnp.ndim(leaf)]
    steps = sizes[0] if sizes else length
    size = None if steps is None else recomputation.chunk_length(recompute, steps)

    def run(carry: Any, xs: Any, steps: int | None) -> tuple[Any, Any]:
        return scan(step, carry, xs, steps, reverse, unroll, executor=executor, strict=strict)

    if size is None or jax.config.jax_disable_jit:
        return run(init, xs, length)
    # A step that does not fit raises as in `jax.lax.scan`. One with side effects or Refs must not be run a second time.
    if jax.make_jaxpr(lambda: run(init, xs, length))().effects:
        return run(init, xs, length)
    return recomputation.with_checkpoints(run, init, xs, steps, size, reverse)


def _check(step: Callable, init: Any, xs: Any, length: Any, reverse: bool, options: Options) -> None:
    """Raises a ScanError where the step cannot be what the options ask for."""
    if options.executor == "associative" and options.recompute is not None:
        raise ScanError("scan: executor 'associative' keeps all states, which recompute forbids; use 'auto' or 'scan'")
    loops = lowering.steps_of(lambda init, xs: jax.lax.scan(step, init, xs, length, reverse), init, xs)
    for loop in loops:
        if isinstance(options.recompute, tuple):
            recomputation.check_names(options.recompute, loop.eqns)
        why = _BY_NAME[options.executor](split(loop).core) if options.executor in _BY_NAME else None
        if why is not None:
            raise ScanError(f"scan: executor {options.executor!r} cannot run this step ({why}); use 'auto' or 'scan'")


def _unmarked(step: Callable) -> Callable:
    @functools.wraps(step)
    def unmarked_step(carry: Any, x: Any) -> Any:
        with mark.unmarked():
            return step(carry, x)

    return unmarked_step
