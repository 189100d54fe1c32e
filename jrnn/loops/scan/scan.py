"""`scan`: a drop-in for `jax.lax.scan` that makes recurrent steps train faster.

`scan` checks its options. Then seven functions follow each other; each calls the next one by its name:

1. `_scan`: a call outside of `jax.jit` is compiled once (`wrappers/compiled_calls.py`);
2. `_scan_masked`: `lengths`, `resets` and `mask` become a part of the step (`wrappers/masking.py`);
3. `_scan_over_devices`: with `axis_name`, each device of a mesh runs its segment of time (`segments/`);
4. `_scan_at_once`: the executor "newton" solves all steps at once (`newton/`);
5. `_scan_until`: the loop stops where `until` says so (`wrappers/early_exit.py`);
6. `_scan_in_segments`: `recompute` divides the loop by checkpoints (`wrappers/recompute.py`);
7. `_tagged_scan`: `jax.lax.scan` is called with a tag, XLA metadata that hold the loop's `Options` (`ir/tag.py`).

The rewriting happens when JAX differentiates (`differentiate.py`) or lowers (`compile.py`) the tagged equation.

Shapes: T time, N batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import ScanError
from jrnn.files import plain
from jrnn.jaxprs.jax_internals import is_traced
from jrnn.loops.ir import Options, Tag, observers, scan_in_segments, self_check, tag
from jrnn.loops.newton import Newton, options_of
from jrnn.loops.scan import executors
from jrnn.loops.wrappers import compiled_calls, early_exit, tracing
from jrnn.loops.wrappers import recompute as recomputation
from jrnn.loops.wrappers.masking import checked_masks, checked_reset_state, masked
from jrnn.loops.wrappers.recompute import Recompute

Results = tuple[Any, Any]


class ScanCall(NamedTuple):
    """A call of `scan` after the checks: a loop and its options.

    Attributes:
        executor: the name of what the caller asked for.
        newton: the options of the executor "newton", or None for other executors.
        shard: where this device's segment stands in time, if time is divided among devices.
    """

    step: Any
    init: Any
    xs: Any
    length: Any
    reverse: Any
    unroll: Any
    executor: str
    newton: Any = None
    lengths: Any = None
    resets: Any = None
    reset_state: Any = None
    mask: Any = None
    until: Callable[..., Any] | None = None
    recompute: Any = None
    strict: bool = False
    memory: float | None = None
    shard: Any = None
    split_transpose: bool = False

    @property
    def steps(self) -> Any:
        """T, or None if it is unknown, which `jax.lax.scan` reports."""
        leaves = jax.tree.leaves(self.xs)
        return next((jnp.shape(leaf)[0] for leaf in leaves if jnp.ndim(leaf)), self.length)


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
            its outputs are zero. The shape of every leaf of the carry and of the outputs must begin with the shape of
            the booleans, usually a scalar's. When all sequences have stopped, also under `jax.vmap`, the work stops.
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
            `resets` and `mask` belong to this device's segment, and so do the outputs; segments are equally long, in
            the order of the devices. `init` is the carry before the whole sequence, the same on every device, and `lengths`
            count the steps of the whole sequence. The last carry belongs to the whole sequence, on every device. Affine and
            matrix carries are computed on all devices at the same time; other carries are handed from device to device.

    Returns:
        `(carry, ys)`: the last carry, and the outputs stacked to [T, ...].

    Raises:
        ScanError: if lengths, resets, mask or until do not fit, the executor is unknown or cannot run the step, or
            `recompute` or `memory` is invalid; if `axis_name` is no axis here, or the step has side effects or communicates
            over it. Other errors come from `jax.lax.scan`.

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
    name = executors.name_of(executor)
    recomputation.check(recompute)
    recomputation.check_memory(memory)
    for option, flag in {"reverse": reverse, "strict": strict}.items():
        if not isinstance(flag, bool) and not (option == "reverse" and is_traced(flag)):
            raise ScanError(f"scan: {option} must be True or False, but is {flag!r}")
    if until is not None and not callable(until):
        raise ScanError(
            f"scan: until must be a function of the carry that returns booleans, but is {until!r}"
        )
    executors.check_options(name, recompute, until)
    shard = None
    if axis_name is not None:
        from jrnn.loops import segments

        shard = segments.TimeShard.here(axis_name, reverse)
        if until is not None:
            raise ScanError("scan: until cannot be given with axis_name; leave one of them out")
    if reset_state is not None:
        reset_state = checked_reset_state(reset_state, init, resets)
    call = ScanCall(
        step=f,
        init=init,
        xs=xs,
        length=length,
        reverse=reverse,
        unroll=unroll,
        executor=name,
        newton=options_of(executor),
        lengths=lengths,
        resets=resets,
        reset_state=reset_state,
        mask=mask,
        until=until,
        recompute=recompute,
        strict=strict,
        memory=memory,
        shard=shard,
        split_transpose=_split_transpose,
    )
    return _scan(call)


def _scan(call: ScanCall) -> Results:
    """1. Compiles a call outside of `jax.jit` once, where a wrapped step would be a new one in each call."""
    if call.shard is not None or not all(map(jnp.ndim, jax.tree.leaves(call.xs))):
        return _scan_masked(call)  # `jax.lax.scan` reports inputs without steps
    options_of_newton = None
    guess = None
    if call.newton is not None:
        options_of_newton, guess = call.newton.separate_guess()
    functions = [call.step]
    if call.until is not None:
        functions.append(call.until)
    masks = checked_masks(call.lengths, call.resets, call.mask, call.steps)
    options = call._replace(
        step=None,
        init=None,
        xs=None,
        newton=options_of_newton,
        lengths=None,
        resets=None,
        reset_state=None,
        mask=None,
        until=None,
        recompute=recomputation.hashable(call.recompute),
    )
    arrays = (call.init, call.xs, masks, call.reset_state, guess)
    results: Results = compiled_calls.compiled_once(_scan_parts, functions, options, arrays)
    return results


def _scan_parts(functions: Sequence[Callable[..., Any]], options: ScanCall, arrays: Any) -> Results:
    """Runs a call from its functions, options and arrays, as `compiled_once` compiles it."""
    init, xs, (lengths, resets, mask), reset_state, guess = arrays
    call = options._replace(
        step=functions[0],
        until=functions[1] if len(functions) > 1 else None,
        init=init,
        xs=xs,
        lengths=lengths,
        resets=resets,
        reset_state=reset_state,
        mask=mask,
        newton=None if options.newton is None else options.newton.with_guess(guess),
    )
    return _scan_masked(call)


def _scan_masked(call: ScanCall) -> Results:
    """2. Puts `lengths`, `resets` and `mask` into the step."""
    lengths = call.lengths
    if call.shard is not None:
        lengths = call.shard.lengths(lengths, call.steps)
    if lengths is None and call.resets is None and call.mask is None:
        return _scan_over_devices(call)
    first = call.init if call.reset_state is None else call.reset_state
    step, xs = masked(call.step, first, call.xs, call.steps, lengths, call.resets, call.mask)
    without_masks = call._replace(
        step=step, xs=xs, lengths=None, resets=None, reset_state=None, mask=None
    )
    return _scan_over_devices(without_masks)


def _scan_over_devices(call: ScanCall) -> Results:
    """3. Divides time among devices; each runs its segment."""
    if call.shard is None:
        return _scan_at_once(call)
    from jrnn.loops import segments

    if call.newton is not None and call.shard.is_checked:
        why = "executor 'newton' needs jax.shard_map(..., check_vma=False)"
        if call.strict:
            raise ScanError(f"scan: strict=True, but {why}")
        observers.notify(f"{why}: each device runs its segment as a loop")
        call = call._replace(executor=executors.AUTO, newton=None)

    def on_one_device(
        step: Any,
        carry: Any,
        xs: Any,
        steps: int,
        linear: bool = False,
        elementwise: bool = False,
    ) -> Any:
        segment = call._replace(step=step, init=carry, xs=xs, length=steps, shard=None)
        if linear:  # the loop that makes the transition of a segment
            is_solved = elementwise and call.executor == executors.ASSOCIATIVE
            segment = segment._replace(
                executor=call.executor if is_solved else executors.AUTO,
                newton=None,
                recompute=None,
                strict=False,
                unroll=1,
            )
        return _scan_at_once(segment)

    return segments.scan(
        on_one_device, call.step, call.init, call.xs, call.length, call.shard, call.strict
    )


def _scan_at_once(call: ScanCall) -> Results:
    """4. Solves all steps at once by Newton's method, if that is asked for."""
    if call.newton is None or tag.plain.value:
        return _scan_until(call)
    from jrnn.loops.newton.api import solve

    observers.notify(
        "newton: all steps at once, so there is no loop to explain; scan_statistics reports what it does"
    )
    results, _ = solve(call.step, call.init, call.xs, call.length, call.reverse, call.newton)
    return results


def _scan_until(call: ScanCall) -> Results:
    """5. Stops the loop where `until` says so."""
    if call.until is None or not call.steps:
        return _scan_in_segments(call)

    # JAX keeps the rule of the derivative for later calls: in it are no tracers of this call.
    options: ScanCall = call._replace(step=None, init=None, xs=None, until=None)

    def bounded(step: Callable[..., Any], carry: Any, xs: Any) -> Results:
        return _scan_in_segments(options._replace(step=step, init=carry, xs=xs))

    return early_exit.run_until(
        until=call.until,
        step=call.step,
        init=call.init,
        xs=call.xs,
        length=call.length,
        steps=call.steps,
        reverse=call.reverse,
        bounded=bounded,
    )


def _scan_in_segments(call: ScanCall) -> Results:
    """6. Runs the loop in segments, if `recompute` is a number of checkpoints. The carries between them are residuals, and
    what the last segment stores."""
    recompute = call.recompute
    if recompute != "sqrt" and not isinstance(recompute, (int, np.integer)):
        return _tagged_scan(call)

    def run(carry: Any, xs: Any, steps: Any) -> Results:
        return _tagged_scan(call._replace(init=carry, xs=xs, length=steps, recompute=None))

    size = recomputation.segment_size(recompute, call.steps)
    # Tracing raises the errors of `jax.lax.scan`, and finds side effects and Refs: such a step must not run a second time.
    if size is None or jax.make_jaxpr(lambda: run(call.init, call.xs, call.length))().effects:
        return run(call.init, call.xs, call.length)
    return scan_in_segments(run, call.init, call.xs, call.steps, size, call.reverse)


def _tagged_scan(call: ScanCall) -> Results:
    """7. Calls `jax.lax.scan`, with the tag."""
    names = recomputation.hashable(call.recompute)
    arguments = (
        call.init,
        call.xs,
        call.length,
        call.reverse,
        call.unroll,
        call.split_transpose,
    )
    if tag.plain.value:
        _check_step(call, call.step, names)
        return jax.lax.scan(call.step, *arguments)
    self_check.check()
    if call.strict and not tag.rules_available:
        raise ScanError(
            f"scan: strict=True, but jrnn does not know this version of JAX ({jax.__version__})"
        )
    # The tag is for this loop only, not for loops inside the step.
    step = tracing.untagged_step(call.step)
    options = Options(
        executor=call.executor, recompute=names, strict=call.strict, memory=call.memory
    )
    with tag.tagged(Tag(options)):
        _check_step(call, step, names)  # in the context of the loop, so that JAX traces it once
        return jax.lax.scan(step, *arguments)


def _check_step(call: ScanCall, step: Callable[..., Any], recompute: Any) -> None:
    """Raises a ScanError if the executor cannot run the step, or if the step has no value of a given name."""

    def loop(init: Any, xs: Any) -> Results:
        return jax.lax.scan(step, init, xs, call.length, call.reverse)

    executors.check_step(call.executor, recompute, loop, call.init, call.xs)
