"""`scan`: a drop-in for `jax.lax.scan` that makes recurrent steps train faster.

It checks the options. `pipeline.py` wraps the step for `lengths`, `resets` and `mask` (`wrappers/masking.py`) and `until`
(`wrappers/early_exit.py`), cuts the loop for checkpoints (`wrappers/recompute.py`), and calls `jax.lax.scan` with a tag:
XLA metadata on the loop's equation that holds its `Options` (`ir/tag.py`). The rewriting happens when JAX differentiates
or lowers the tagged equation (`rules/`).

The executor "associative" solves affine steps in parallel over time (`affine/associative.py`). "native" is one call of a
compiled kernel for CPUs (`kernels/native/`). "newton" solves all steps of a nonlinear loop at once (`newton/`).

With `axis_name` the devices of a mesh share the steps (`segments/`).

Shapes: T time, N batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jrnn.errors import ScanError
from jrnn.files import plain
from jrnn.jaxprs.jax_internals import is_traced
from jrnn.loops import newton
from jrnn.loops.newton import Newton
from jrnn.loops.rules import tracing
from jrnn.loops.scan import pipeline
from jrnn.loops.strategies import table
from jrnn.loops.wrappers import recompute as recomputation
from jrnn.loops.wrappers.call import ScanCall
from jrnn.loops.wrappers.masking import checked_reset_state
from jrnn.loops.wrappers.recompute import Recompute


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
    reset_state: Any = None,
    mask: Any = None,
    until: Callable[[Any], Any] | None = None,
    recompute: Recompute = None,
    executor: str | Newton = "auto",
    strict: bool = False,
    memory: float | None = None,
    axis_name: Any = None,
) -> tuple[Any, Any]:
    """Runs `f` over the leading axis of `xs`, as `jax.lax.scan` does, with faster loops.

    When JAX lowers the loop and the loop of its gradient, contractions that do not need the carry move out of the loop, the
    gradients of weights become one contraction after the reverse loop, and few values are stored for it. What cannot be
    rewritten runs as in `jax.lax.scan`. `explain` shows what was done.

    Args:
        f: the step, `(carry, x) -> (carry, y)`.
        init: the initial carry, a pytree.
        xs: a pytree with leaves [T, ...], or None with `length`.
        length: T, needed only if xs is None.
        reverse: run from the last step to the first.
        unroll, _split_transpose: as in `jax.lax.scan`.
        lengths: integers, usually [N]. After its length a sequence keeps its carry, and its outputs are zero. The shape of
            every leaf of the carry and of the outputs must begin with the shape of `lengths`. They lie between 0 and T;
            inside jit, where they are not known, one below 0 counts as 0, and one above T as T.
        resets: booleans, usually [T, N]. Where True, the carry goes back to `reset_state` before that step. The shape of
            every leaf of the carry that goes back must begin with the shape of `resets[0]`.
        reset_state: the carry after resets, a pytree as `init` whose leaves are broadcast to its shapes. A leaf may be None:
            this part of the carry, such as a counter or a key, is left alone. None: `init`, as a step has no empty state
            of its own. Layers have one, zeros, and go back to it.
        mask: booleans, usually [T, N], True where the step counts. Where False, the carry stays, and the outputs are zero. A
            reset at a step that does not count still acts. The shape of every leaf of the carry and of the outputs must
            begin with the shape of `mask[0]`.
        until: carry -> booleans, evaluated before each step. Where True, the sequence has stopped: it keeps its carry, and
            its outputs are zero. The shape of every leaf of the carry and of the outputs must begin with that of the
            booleans, usually that of a scalar. When all sequences have stopped, also those of `jax.vmap`, the work stops.
        recompute: what the reverse pass computes again instead of storing it. None: what is cheap to compute and large
            to store; if the step names values with `jax.ad_checkpoint.checkpoint_name`, JAX chooses, or the policy of a
            `jax.checkpoint` around the loop. "contractions": everything except the results of contractions, but
            never more than None. A list of
            names: also the values with these names, what leads to them, and what follows from them cheaply. A number:
            everything, from that many checkpoints of the carry. "sqrt": everything, from sqrt(T) checkpoints.
        executor: the name of a strategy. "scan"; "associative" (for steps that are affine in the carry with a diagonal
            Jacobian, and whose carries stay finite); "native" (one call of a compiled kernel on a CPU, if it was built, for
            steps of products with constants, elementwise operations and reductions); "arithmetic" (small linear algebra
            written as arithmetic, on a CPU); "chunks" (matrix states in chunks of steps, when the loop is differentiated);
            "newton" (experimental), or an object of `Newton` with its options (all steps at once by Newton's method, for
            steps with floating-point carries; it falls back to the loop where it does not converge, and ignores `unroll`);
            or "auto", which may run all of these but "newton", and never reassociates products that could overflow.
        strict: raise if the loop cannot be planned and would fall back to `jax.lax.scan`, for tests of speed.
        memory: on a CPU, how many times the temporary memory of `jax.lax.scan` a faster loop may need, plus 1 MB. None:
            1.1 times, or 1.4 times for a loop that is estimated to be much faster.
        axis_name: (experimental) inside `jax.shard_map`, the mesh axis among whose devices time is divided. `xs`, `length`,
            `resets` and `mask` are those of this device's segment, and so are the outputs; segments are equally long, in
            the order of the devices. `init` is the carry before the whole sequence, the same on every device, and `lengths`
            count the steps of the whole sequence. The last carry is that of the whole sequence, on every device. Affine and
            matrix carries are computed on all devices at the same time; other carries are handed from device to device.

    Returns:
        `(carry, ys)`: the last carry, and the outputs stacked to [T, ...].

    Raises:
        ScanError: if lengths, resets, mask or until do not fit, the executor is unknown or cannot run the step, or
            `recompute` or `memory` is invalid; if `axis_name` is no axis here, or the step has side effects or communicates
            over it. Other errors are those of `jax.lax.scan`.

    >>> import jax.numpy as jnp
    >>> total, sums = scan(lambda c, x: (c + x, c + x), jnp.float32(0), jnp.arange(4.0))
    >>> print(total, sums)
    6.0 [0. 1. 3. 6.]
    """
    if not callable(f):
        raise TypeError("lax.scan: f argument should be a callable.")
    # `jax.lax.scan` reports an option that is traced.
    static_options: tuple[Any, ...] = length, reverse, unroll, recompute, strict, memory
    length, reverse, unroll, recompute, strict, memory = (
        v if is_traced(v) else plain(v) for v in static_options
    )
    strategy = table.find(executor)
    recomputation.check(recompute)
    recomputation.check_memory(memory)
    for name, flag in {"reverse": reverse, "strict": strict}.items():
        if not isinstance(flag, bool) and not (name == "reverse" and is_traced(flag)):
            raise ScanError(f"scan: {name} must be True or False, but is {flag!r}")
    if until is not None and not callable(until):
        raise ScanError(
            f"scan: until must be a function of the carry that returns booleans, but is {until!r}"
        )
    if strategy is not None:
        strategy.check_options(dict(recompute=recompute, until=until))
    shard = None
    if axis_name is not None:
        from jrnn.loops import segments

        shard = segments.TimeShard.here(axis_name, reverse)
        if until is not None:
            raise ScanError("scan: until cannot be given with axis_name; leave one of them out")
    if reset_state is not None:
        reset_state = checked_reset_state(reset_state, init, resets)
    masks: dict[str, Any] = dict(
        lengths=lengths, resets=resets, reset_state=reset_state, mask=mask, until=until
    )
    options: dict[str, Any] = dict(recompute=recompute, strict=strict, memory=memory, shard=shard)
    options["split_transpose"] = _split_transpose
    call = ScanCall(
        f,
        init,
        xs,
        length,
        reverse,
        unroll,
        strategy,
        newton.options_of(executor),
        **masks,
        **options,
    )
    return pipeline.run(call)
