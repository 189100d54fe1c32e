"""A loop whose step is in a `jax.checkpoint`, differentiated in pieces.

JAX stores the carry of each step, and computes each step again. Pieces store the carry between them, and what the reverse
pass reads of the last piece, or of the one that it works on. Where that fits the bound of memory, it saves a part of the
second computation, and the rest runs by the forward loop's plan. One piece computes nothing again.

Shapes: T time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import XLA_KEEPS_BARRIERS, are_arrays, cached, metadata_of, scan_p
from jrnn.jaxprs.tangents import is_smooth
from jrnn.loops.ir import Provenance, Results, ScanParams, Tag, observers, scan_in_pieces, tag
from jrnn.loops.strategies import Steps, Target, chooser
from jrnn.loops.strategies.candidates import MIN_GAIN, Choice, memory_bound
from jrnn.loops.strategies.chooser import BRIEF
from jrnn.loops.strategies.problem import allowance

_MOST_PIECES = 4  # each adds loops to the program
_FEWEST_STEPS = 4  # of a piece

Run = Callable[..., Sequence[Any]]


class TrainStep(NamedTuple):
    """What a forward loop and its reverse loop cost.

    Attributes:
        forward, reverse: the choices of their plans.
        stored_bytes: what the reverse loop reads that is not among the inputs of the forward loop.
    """

    forward: Choice
    reverse: Choice
    stored_bytes: int

    def seconds(self, estimate_of: Callable[[Choice], Any]) -> float:
        """Returns the time of both loops by one of the estimates of each choice."""
        return sum(estimate_of(choice).seconds for choice in (self.forward, self.reverse))


def checkpointed_in_pieces(loop_tag: Tag, scan: ScanParams, argnums: Sequence[int]) -> Run | None:
    """Returns the loop in pieces, without the checkpoint in its step; or None to leave it to JAX."""
    target = Target.here()
    if (
        loop_tag.options.recompute is not None
        or not target.is_estimated
        or not _is_checkpointed(scan)
    ):
        return None
    pieces = _count_pieces(loop_tag, scan, tuple(argnums), target)
    if pieces is None:
        return None
    how = f"in {pieces} pieces" if pieces > 1 else "and not computed again"
    observers.notify(
        f"a step in a jax.checkpoint is differentiated {how}: that needs as little memory"
    )
    return _tagged(loop_tag, scan, pieces)


def _is_checkpointed(scan: ScanParams) -> bool:
    """Returns True for a step of arrays with a checkpoint that has no policy.

    With a policy the user decides what is stored and what is computed again.
    """
    body = jaxprs.jaxpr_of(scan.jaxpr)
    policies = [
        e.params["policy"]
        for e in jaxprs.all_equations(body)
        if e.primitive.name in jaxprs.CHECKPOINTS
    ]
    if not policies or any(policy is not None for policy in policies):
        return False
    return (
        jaxprs.is_known(scan.length)
        and scan.length > 1
        and are_arrays([v.aval for v in body.invars])
    )


def _tagged(loop_tag: Tag, scan: ScanParams, pieces: int) -> Run:
    """Returns the loop in pieces, each of them a tagged loop, without the checkpoint in its step."""
    program = jaxprs.inlined(scan.jaxpr, jaxprs.CALLS_AND_CHECKPOINTS)
    loop = scan.loop(program)

    def run(consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: int) -> Results:
        def run_piece(carry: Any, xs: Any, steps: int) -> Results:
            with tag.tagged(loop_tag):
                return loop.run(consts, carry, xs, steps)

        return scan_in_pieces(
            run_piece, list(init), list(xs), length, math.ceil(length / pieces), loop.reverse
        )

    return scan.flat(run, program.consts)


@cached(256)
def _count_pieces(
    loop_tag: Tag, scan: ScanParams, argnums: tuple[int, ...], target: Target
) -> int | None:
    """Returns the fewest pieces that fit the bound of memory, if they are faster than the loop with its checkpoint."""
    from jrnn.loops.rules.residuals import is_plain

    loop = scan.loop(jaxprs.inlined(scan.jaxpr, jaxprs.CALLS_AND_CHECKPOINTS))
    if not is_plain(loop.closed()):
        return None
    consts, _, xs = scan.partition(loop.inputs)
    xs_bytes = scan.length * sum(map(jaxprs.nbytes, xs))
    ys_bytes = scan.length * sum(
        jaxprs.nbytes(v) for v in jaxprs.variables(loop.ys) if is_smooth(v.aval)
    )
    gradient_bytes = sum(jaxprs.nbytes(v) for i, v in enumerate(consts) if i in argnums)
    options = loop_tag.options
    provenance = Provenance(scan.reverse, xs_bytes=xs_bytes, gradient_bytes=gradient_bytes)
    with observers.collected():
        in_pieces = _train_step(
            _tagged(loop_tag, scan, 1), scan, argnums, target, Tag(options, provenance)
        )
        with tag.untagged():
            as_written = scan.flat(Steps(scan.loop(jaxprs.inlined(scan.jaxpr))).run)
            by_jax = _train_step(as_written, scan, argnums, target, Tag(options, provenance))
    if in_pieces is None or by_jax is None:
        return None
    again, forward, reverse = (
        c.chosen.estimate for c in (by_jax.forward, in_pieces.forward, in_pieces.reverse)
    )
    seconds_now = by_jax.seconds(lambda choice: choice.chosen.estimate)
    reference_seconds = by_jax.seconds(lambda choice: choice.reference)
    # The outputs and their cotangents are there when the reverse pass begins; later, what its loop makes at a step.
    memory_now = by_jax.stored_bytes + max(ys_bytes, by_jax.reverse.reference.memory)
    copied = xs_bytes + 2 * ys_bytes  # of the pieces
    copying = target.machine.reading(copied, copied) + target.machine.writing(copied, copied)
    # With more pieces than that, each would be left to `jax.lax.scan`, which the loop is not, unless the number is 0.
    planned = int(by_jax.forward.reference.seconds / BRIEF) or _MOST_PIECES
    counts = range(1, max(1, min(_MOST_PIECES, planned, scan.length // _FEWEST_STEPS)) + 1)
    for pieces in counts if XLA_KEEPS_BARRIERS else (n for n in counts if scan.length % n == 0):
        recomputing = again.seconds * (1 - 1 / pieces if XLA_KEEPS_BARRIERS else 1) + copying
        seconds = forward.seconds + reverse.seconds + recomputing * (pieces > 1)
        needed = ys_bytes + (in_pieces.stored_bytes - ys_bytes + reverse.memory) / pieces
        bound = memory_bound(
            options.memory, memory_now, seconds / reference_seconds, allowance(loop)
        )
        if needed <= bound and seconds < (1 - MIN_GAIN) * seconds_now:
            return pieces
    return None


def _train_step(
    run: Run, scan: ScanParams, argnums: Sequence[int], target: Target, default: Tag
) -> TrainStep | None:
    """Returns what a loop and its reverse loop cost, or None if there are not two loops that are compared with others.

    Args:
        run: the loop, from all its arguments.
        scan: its parameters.
        argnums: the positions of the arguments that have tangents.
        target: what it is lowered for.
        default: of loops that have no tag.
    """

    def train(args: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def smooth(*moving):
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
    tags = [tag.tag_in(metadata_of(eqn)) or default for eqn in loops]
    plans = [
        chooser.lowered(ScanParams.of(e.params), target, *loop_tag)
        for e, loop_tag in zip(loops, tags)
    ]
    if any(plan.choice is None or plan.choice.reference is None for plan in plans):
        return None
    xs_bytes = default.provenance.xs_bytes
    stored = scan.length * sum(map(jaxprs.nbytes, plans[1].loop.xs)) - xs_bytes
    return TrainStep(plans[0].choice, plans[1].choice, max(stored, 0))


def _types_of(scan: ScanParams, variables: Sequence[Any], fixed: int) -> list[Any]:
    """Returns the types of values, of which those after the first `fixed` ones are of all steps."""
    avals = [v.aval for v in variables]
    stacked = jax.make_jaxpr(lambda *one: [jax.lax.broadcast(v, (scan.length,)) for v in one])(
        *avals[fixed:]
    )
    return [*avals[:fixed], *stacked.out_avals]
