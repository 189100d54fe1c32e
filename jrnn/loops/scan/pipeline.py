"""What `scan` does with a call: stages in order, and at the end the tag on JAX's own loop.

A stage gets the call and the rest of the pipeline. It changes the call and passes it on, or runs the loop in pieces, each
by the rest of the pipeline. `STAGES` is the order.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import ScanError
from jrnn.loops.ir import Options, Tag, observers, tag
from jrnn.loops.rules import check, lowering, tracing
from jrnn.loops.strategies import associative, table
from jrnn.loops.wrappers import early_exit, programs
from jrnn.loops.wrappers import recompute as recomputation
from jrnn.loops.wrappers.call import NextStage, Results, ScanCall
from jrnn.loops.wrappers.masking import checked_masks, masked


def run(call: ScanCall, number: int = 0) -> Results:
    """Runs a loop by the stages from a number on."""
    if number == len(STAGES):
        return _by_jax(call)
    return STAGES[number](call, lambda call: run(call, number + 1))


def _compiled_once(call: ScanCall, rest: NextStage) -> Results:
    """Compiles a call outside of `jax.jit` once, where a wrapped step would be a new one in each call."""
    if call.shard is not None or not all(map(jnp.ndim, jax.tree.leaves(call.xs))):
        return rest(call)  # `jax.lax.scan` reports inputs without steps
    newton, guess = (None, None) if call.newton is None else call.newton.apart()
    functions = [call.step] if call.until is None else [call.step, call.until]
    masks = checked_masks(call.lengths, call.resets, call.mask, call.steps)
    without: dict[str, Any] = dict.fromkeys(
        ("step", "init", "xs", "lengths", "resets", "reset_state", "mask", "until")
    )
    recompute = recomputation.hashable(call.recompute)
    options = call._replace(**without, strategy=call.executor, newton=newton, recompute=recompute)
    arrays = call.init, call.xs, masks, call.reset_state, guess
    results: Results = programs.compiled_once(_run_parts, functions, options, arrays)
    return results


def _run_parts(functions: Sequence[Callable[..., Any]], options: ScanCall, arrays: Any) -> Results:
    """Runs a call from its functions, options and arrays."""
    init, xs, (lengths, resets, mask), reset_state, guess = arrays
    step = functions[0]
    until = next(iter(functions[1:]), None)
    newton = None if options.newton is None else options.newton.starting_from(guess)
    masks = dict(lengths=lengths, resets=resets, reset_state=reset_state, mask=mask, until=until)
    strategy = table.find(options.strategy)
    return run(
        options._replace(step=step, init=init, xs=xs, strategy=strategy, newton=newton, **masks), 1
    )


def _masked(call: ScanCall, rest: NextStage) -> Results:
    """Puts `lengths`, `resets` and `mask` into the step."""
    lengths = call.lengths if call.shard is None else call.shard.lengths(call.lengths, call.steps)
    if lengths is None and call.resets is None and call.mask is None:
        return rest(call)
    first = call.init if call.reset_state is None else call.reset_state
    step, xs = masked(call.step, first, call.xs, call.steps, lengths, call.resets, call.mask)
    return rest(
        call._replace(step=step, xs=xs, lengths=None, resets=None, reset_state=None, mask=None)
    )


def _over_devices(call: ScanCall, rest: NextStage) -> Results:
    """Divides time among devices; each runs its segment."""
    if call.shard is None:
        return rest(call)
    from jrnn.loops import segments

    if call.newton is not None and call.shard.is_checked:
        why = "executor 'newton' needs jax.shard_map(..., check_vma=False)"
        if call.strict:
            raise ScanError(f"scan: strict=True, but {why}")
        observers.notify(f"{why}: each device runs its segment as a loop")
        call = call._replace(strategy=None, newton=None)

    def on_one_device(
        step: Any, carry: Any, xs: Any, steps: int, linear: bool = False, same: bool = False
    ) -> Any:
        own = call._replace(step=step, init=carry, xs=xs, length=steps, shard=None)
        if linear:  # the loop that makes the transition of a segment
            strategy = call.strategy if same and call.executor == associative.NAME else None
            own = own._replace(
                strategy=strategy, newton=None, recompute=None, strict=False, unroll=1
            )
        return rest(own)

    return segments.scan(
        on_one_device, call.step, call.init, call.xs, call.length, call.shard, call.strict
    )


def _at_tracing(call: ScanCall, rest: NextStage) -> Results:
    """Runs the strategies that replace a loop when it is traced."""
    if call.strategy is None or call.strategy.trace is None or tag.plain.value:
        return rest(call)
    results: Results = call.strategy.trace(call)
    return results


def _by_jax(call: ScanCall) -> Results:
    """Calls `jax.lax.scan`, with the tag."""
    names = recomputation.hashable(call.recompute)
    arguments = call.init, call.xs, call.length, call.reverse, call.unroll, call.split_transpose
    if tag.plain.value:
        _check(call, call.step, names)
        return jax.lax.scan(call.step, *arguments)
    check()
    if call.strict and not tag.rules_available:
        raise ScanError(
            f"scan: strict=True, but jrnn does not know this version of JAX ({jax.__version__})"
        )
    step = tracing.untagged_step(
        call.step
    )  # the tag is for this loop only, not for loops inside the step
    with tag.tagged(Tag(Options(call.executor, names, call.strict, call.memory))):
        _check(call, step, names)  # in the context of the loop, so that JAX traces the step once
        return jax.lax.scan(step, *arguments)


def _check(call: ScanCall, step: Callable[..., Any], recompute: Any) -> None:
    """Raises a ScanError if the executor cannot run the step, or if the step has no value of a given name."""
    refusable = call.strategy is not None and call.strategy.refusal is not None
    if not refusable and not isinstance(recompute, tuple):
        return

    def loop(init: Any, xs: Any) -> Results:
        return jax.lax.scan(step, init, xs, call.length, call.reverse)

    for each in lowering.steps_of(loop, call.init, call.xs):
        if isinstance(recompute, tuple):
            recomputation.check_names(recompute, each.eqns)
        if refusable:
            call.strategy.check(each)


STAGES = (
    _compiled_once,
    _masked,
    _over_devices,
    _at_tracing,
    early_exit.stopped,
    recomputation.with_checkpoints,
)
