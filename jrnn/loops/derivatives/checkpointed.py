"""A loop whose step is in a `jax.checkpoint`, differentiated in segments.

JAX stores the carry of each step, and computes each step again. Segments store the carry between them, and what the reverse
pass reads of the last segment, or of the one that it works on. Where that fits the bound of memory, it saves a part of the
second computation, and the rest runs by the forward loop's plan. One segment computes nothing again.

Shapes: T time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import (
    XLA_KEEPS_BARRIERS,
    ClosedJaxpr,
    are_arrays,
    cached,
    metadata_of,
    scan_p,
)
from jrnn.jaxprs.tangents import is_smooth
from jrnn.loops.costs.bounds import MIN_GAIN, allowed_bytes, memory_bound
from jrnn.loops.costs.constants import BRIEF_SECONDS
from jrnn.loops.costs.target import Target
from jrnn.loops.ir import (
    Options,
    Provenance,
    Results,
    ScanParams,
    Tag,
    observers,
    scan_in_segments,
    tag,
)

_MAX_SEGMENTS = 4  # each adds loops to the program
_MIN_STEPS = 4  # of a segment

Run = Callable[..., Sequence[Any]]
# `(loop, target, options, provenance) -> a Plan`, as `compile.compile_loop`, which stands above this file
PlanLoop = Callable[[ScanParams, Target, Options, Provenance], Any]


class TrainStep(NamedTuple):
    """The plans of a forward loop and of its reverse loop.

    Attributes:
        forward, reverse: the plans, which have the estimates of what is chosen and of the loops as JAX lowers them.
        stored_bytes: what the reverse loop reads that is not among the inputs of the forward loop.
    """

    forward: Any
    reverse: Any
    stored_bytes: int

    @property
    def seconds(self) -> float:
        estimates = (self.forward.chosen.estimate, self.reverse.chosen.estimate)
        return float(sum(estimate.seconds for estimate in estimates))

    @property
    def baseline_seconds(self) -> float:
        return float(self.forward.baseline.seconds + self.reverse.baseline.seconds)


def in_segments(
    loop_tag: Tag, scan: ScanParams, argnums: Sequence[int], plan_loop: PlanLoop
) -> Run | None:
    """Returns the loop in segments, without the checkpoint in its step; or None to leave it to JAX.

    Args:
        loop_tag: the tag of the loop.
        scan: the loop.
        argnums: the positions of its arguments that have tangents.
        plan_loop: plans the loops of a training step, for their estimates.
    """
    target = Target.here()
    if loop_tag.options.recompute is not None or not target.is_estimated:
        return None
    if not _is_checkpointed(scan):
        return None
    count = _count_segments(loop_tag, scan, tuple(argnums), target, plan_loop)
    if count is None:
        return None
    how = f"in {count} segments" if count > 1 else "and not computed again"
    observers.notify(
        f"a step in a jax.checkpoint is differentiated {how}: that needs as little memory"
    )
    return _tagged(loop_tag, scan, count)


def _is_checkpointed(scan: ScanParams) -> bool:
    """Returns True for a step of arrays with a checkpoint that has no policy.

    With a policy the user decides what is stored and what is computed again.
    """
    body = jaxprs.jaxpr_of(scan.jaxpr)
    eqns = jaxprs.all_equations(body)
    policies = [eqn.params["policy"] for eqn in eqns if eqn.primitive.name in jaxprs.CHECKPOINTS]
    if not policies or policies.count(None) < len(policies):
        return False
    has_steps = jaxprs.is_known(scan.length) and scan.length > 1
    return has_steps and are_arrays([v.aval for v in body.invars])


def _tagged(loop_tag: Tag, scan: ScanParams, count: int) -> Run:
    """Returns the loop in segments, each of them a tagged loop, without the checkpoint in its step."""
    stored = {**scan.equation, "jaxpr": _without_checkpoints(scan)}

    def run(consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: int) -> Results:
        def run_segment(carry: Any, xs: Any, steps: int) -> Results:
            with tag.tagged(loop_tag):
                outs = scan_p.bind(*consts, *carry, *xs, **{**stored, "length": steps})
            return outs[: len(carry)], outs[len(carry) :]

        size = math.ceil(length / count)
        return scan_in_segments(run_segment, list(init), list(xs), length, size, scan.reverse)

    return scan.flat(run)


@cached(256)
def _without_checkpoints(scan: ScanParams) -> ClosedJaxpr:
    """Returns the step, which is one jaxpr for all segments and layers, so that JAX differentiates it once."""
    return jaxprs.inlined(scan.jaxpr, jaxprs.CALLS_AND_CHECKPOINTS).closed()


@cached(256)
def _count_segments(
    loop_tag: Tag,
    scan: ScanParams,
    argnums: tuple[int, ...],
    target: Target,
    plan_loop: PlanLoop,
) -> int | None:
    """Returns the fewest segments that fit the bound of memory, if they are faster than the loop with its checkpoint."""
    from jrnn.loops.derivatives.residuals import is_plain

    loop, _ = scan.inlined(jaxprs.CALLS_AND_CHECKPOINTS)
    if not is_plain(loop.closed()):
        return None
    consts, _, xs = scan.partition(loop.inputs)
    smooth_ys = [v for v in jaxprs.variables(loop.ys) if is_smooth(v.aval)]
    with_gradients = [v for i, v in enumerate(consts) if i in argnums]
    xs_bytes = scan.length * sum(map(jaxprs.nbytes, xs))
    ys_bytes = scan.length * sum(map(jaxprs.nbytes, smooth_ys))
    options = loop_tag.options
    provenance = Provenance(
        written_reverse=scan.reverse,
        xs_bytes=xs_bytes,
        gradient_bytes=sum(map(jaxprs.nbytes, with_gradients)),
    )
    default = Tag(options, provenance)
    with observers.collected():
        train_step = functools.partial(
            _train_step,
            scan=scan,
            argnums=argnums,
            target=target,
            default=default,
            plan_loop=plan_loop,
        )
        stored = train_step(_tagged(loop_tag, scan, 1))
        with tag.untagged():
            as_written = {**scan.equation, "jaxpr": scan.jaxpr}
            by_jax = train_step(functools.partial(scan_p.bind, **as_written))
    if stored is None or by_jax is None:
        return None
    # The outputs and their cotangents are there when the reverse pass begins; later, what its loop makes at a step.
    memory_now = by_jax.stored_bytes + max(ys_bytes, by_jax.reverse.baseline.memory)
    copied_bytes = xs_bytes + 2 * ys_bytes  # of the segments
    copying = target.machine.reading(copied_bytes, copied_bytes)
    copying += target.machine.writing(copied_bytes, copied_bytes)
    # With more segments than that, each would be left to `jax.lax.scan`, which the loop is not, unless the number is 0.
    planned = int(by_jax.forward.baseline.seconds / BRIEF_SECONDS) or _MAX_SEGMENTS
    most = max(1, min(_MAX_SEGMENTS, planned, scan.length // _MIN_STEPS))
    for count in range(1, most + 1):
        if not XLA_KEEPS_BARRIERS and scan.length % count:
            continue
        seconds = stored.seconds
        if count > 1:
            computed_again = 1 - 1 / count if XLA_KEEPS_BARRIERS else 1
            seconds += by_jax.forward.chosen.estimate.seconds * computed_again + copying
        of_segment = (
            stored.stored_bytes - ys_bytes + stored.reverse.chosen.estimate.memory
        ) / count
        bound = memory_bound(
            options.memory, memory_now, seconds / by_jax.baseline_seconds, allowed_bytes(loop)
        )
        if ys_bytes + of_segment <= bound and seconds < (1 - MIN_GAIN) * by_jax.seconds:
            return count
    return None


def _train_step(
    run: Run,
    scan: ScanParams,
    argnums: Sequence[int],
    target: Target,
    default: Tag,
    plan_loop: PlanLoop,
) -> TrainStep | None:
    """Returns the plans of a loop and its reverse loop, or None if there are not two loops that are compared with others.

    Args:
        run: the loop, from all its arguments.
        scan: its parameters.
        argnums: the positions of the arguments that have tangents.
        target: what it is lowered for.
        default: of loops that have no tag.
        plan_loop: plans each of the two.
    """

    def train(args: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def smooth(*moving: Any) -> list[Any]:
            return list(filter(is_smooth, run(*jaxprs.replaced(args, argnums, moving))))

        outs, transposed = jax.vjp(smooth, *(args[i] for i in argnums))
        return outs, transposed(list(cotangents))

    body = jaxprs.jaxpr_of(scan.jaxpr)
    args = _types_of(scan, body.invars, scan.n_consts + scan.n_carry)
    outs = _types_of(scan, body.outvars, scan.n_carry)
    jaxpr = jax.make_jaxpr(train)(args, list(filter(is_smooth, outs))).jaxpr
    loops = [eqn for eqn in jaxprs.all_equations(jaxpr) if eqn.primitive is scan_p]
    if [eqn.params["reverse"] for eqn in loops] != [scan.reverse, not scan.reverse]:
        return None
    plans = []
    for eqn in loops:
        loop_tag = tag.tag_in(metadata_of(eqn)) or default
        plans.append(plan_loop(ScanParams.of(eqn.params), target, *loop_tag))
    if any(plan.chosen is None or plan.baseline is None for plan in plans):
        return None
    forward, reverse = plans
    read_bytes = scan.length * sum(map(jaxprs.nbytes, reverse.loop.xs))
    return TrainStep(forward, reverse, max(read_bytes - default.provenance.xs_bytes, 0))


def _types_of(scan: ScanParams, variables: Sequence[Any], fixed: int) -> list[Any]:
    """Returns the types of values; after the first `fixed` values they are stacked over all steps."""
    avals = [v.aval for v in variables]

    def stack(*one: Any) -> list[Any]:
        return [jax.lax.broadcast(v, (scan.length,)) for v in one]

    stacked = jax.make_jaxpr(stack)(*avals[fixed:])
    return [*avals[:fixed], *stacked.out_avals]
