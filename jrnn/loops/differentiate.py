"""What happens to a tagged loop when JAX differentiates it. All that is decided then is decided here, from top to bottom.

Once a loop is differentiated, what its step reads is among the residuals. So a program that is cheaper to differentiate has
to replace the loop before that: `programs_instead` lists them in the order in which they are tried. If none applies, JAX's
own rule differentiates the loop, with a step that stores fewer residuals (`derivatives/residuals.py`). The loops that JAX
makes keep the tag, with what the lowering must know of them (`Provenance`).

`with_linearize` and `with_jvp` wrap JAX's rules for the reverse and the forward mode; `install.py` puts them in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import (
    LINEARIZATION_PARTS,
    ad,
    are_arrays,
    cached,
    current_metadata,
)
from jrnn.jaxprs.tangents import arguments_that_move, is_smooth
from jrnn.loops.costs.target import Target
from jrnn.loops.derivatives.checkpointed import PlanLoop, in_segments
from jrnn.loops.ir import Provenance, ScanParams, Tag, observers, planning, tag
from jrnn.loops.passes.canonical.constant_carries import eliminate_carries
from jrnn.loops.passes.canonical.invariants import hoist_invariants
from jrnn.loops.passes.canonical.lookups import hoist_lookups
from jrnn.loops.passes.canonical.shared_operands import join_products
from jrnn.loops.strategies.nodes import Steps, adapted
from jrnn.loops.strategies.plan_chunks import plan_to_differentiate

Rule = Callable[..., Any]  # of JAX, for scans
Program = Callable[..., Sequence[Any]]  # runs a loop from all arguments of its equation
# `(tag, loop, positions of the arguments with tangents) -> a program`, or None if it does not apply
FindProgram = Callable[[Tag, ScanParams, Sequence[int]], Program | None]
_WHERE = " where a loop is differentiated"


def with_linearize(jax_rule: Rule, programs: Sequence[FindProgram]) -> Rule:
    """Wraps JAX's rule for the reverse mode of a scan."""

    @functools.wraps(jax_rule)
    def linearize(is_vjp: bool, nonzeros: Sequence[bool], *primals: Any, **params: Any) -> Any:
        argnums = [i for i, nonzero in enumerate(nonzeros) if nonzero and is_smooth(primals[i])]

        def transform(run: Program, values: Sequence[Any]) -> Any:
            return jax.linearize(run, *values)

        results = _replaced(params, primals, argnums, transform, programs)
        if results is not None:
            return _linearization(results, primals, argnums)
        gradients = nonzeros if is_vjp else ()
        with planning.budget(params["jaxpr"]):
            changed = observers.attempt(_WHERE, _with_fewer_residuals, params, nonzeros, gradients)
        if changed is None:
            return jax_rule(is_vjp, nonzeros, *primals, **params)
        step, new_tag, moving = changed
        with tag.tagged(new_tag):
            result = jax_rule(is_vjp, moving, *primals, **{**params, "jaxpr": step})
        return _with_tagged_transpose(result, new_tag)

    return linearize


def with_jvp(jax_rule: Rule, programs: Sequence[FindProgram]) -> Rule:
    """Wraps JAX's rule for the forward mode of a scan."""

    @functools.wraps(jax_rule)
    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        argnums = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

        def transform(run: Program, values: Sequence[Any]) -> Any:
            return jax.jvp(run, values, [tangents[i] for i in argnums])

        results = _replaced(params, primals, argnums, transform, programs)
        if results is not None:
            outs, out_tangents = results
            return outs, [_tangent(out, t) for out, t in zip(outs, out_tangents)]
        with planning.budget(params["jaxpr"]):
            nonzeros = [type(t) is not ad.Zero for t in tangents]
            changed = observers.attempt(_WHERE, _with_fewer_residuals, params, nonzeros, ())
        if changed is None:
            return jax_rule(primals, tangents, **params)
        step, new_tag, moving = changed
        tangents = [ad.instantiate_zeros(t) if moves else t for t, moves in zip(tangents, moving)]
        with tag.tagged(new_tag):
            return jax_rule(primals, tangents, **{**params, "jaxpr": step})

    return jvp


# Programs that are differentiated instead of a loop ---------------------------------------------------------------------


def plain_carries(loop_tag: Tag, scan: ScanParams, argnums: Sequence[int]) -> Program | None:
    """Returns a loop without constants and counters in its carry, with lookups and invariant work before it, or None."""
    rewritten = _plain_carries(scan, _have_tangents(scan, argnums))
    if rewritten is None:
        return None
    run, constants = rewritten
    return _in_context(lambda: tag.tagged(loop_tag), scan.flat(run, constants))


@cached(256)
def _plain_carries(
    scan: ScanParams, tangents: Sequence[bool]
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    body = jaxprs.jaxpr_of(scan.jaxpr)
    if body.effects or not are_arrays([v.aval for v in body.invars]):
        return None
    loop, constants = scan.inlined()
    moving = {v for v, moves in zip(loop.inputs[len(constants) :], tangents) if moves}
    loop, eliminated = eliminate_carries(loop)
    loop, lookups = hoist_lookups(loop, moving.intersection(loop.consts))
    loop, invariants = hoist_invariants(join_products(loop))
    if lookups is None and invariants is None:
        return None
    adapters = [a for a in (eliminated, lookups, invariants) if a is not None]
    return adapted(Steps(loop), adapters).run, constants


def in_chunks(loop_tag: Tag, scan: ScanParams, argnums: Sequence[int]) -> Program | None:
    """Returns a loop over matrix states in chunks, where JAX would store every state, if that is estimated to pay."""
    if isinstance(loop_tag.options.recompute, tuple):
        return None
    tangents = _have_tangents(scan, argnums)
    plan = plan_to_differentiate(scan, Target.here(), loop_tag.options, tangents)
    if plan is None:
        return None
    if plan.node is None:
        for note in plan.notes:
            observers.notify(note)
        return None
    observers.notify_plan(plan)
    return _in_context(tag.untagged, scan.flat(plan.node.run, plan.constants))


def programs_instead(plan_loop: PlanLoop) -> Sequence[FindProgram]:
    """Returns the functions that find a program to replace a loop, in the order in which they are tried."""
    return plain_carries, in_chunks, functools.partial(in_segments, plan_loop=plan_loop)


def _replaced(
    params: dict[str, Any],
    primals: Sequence[Any],
    argnums: Sequence[int],
    transform: Callable[[Program, Sequence[Any]], Any],
    programs: Sequence[FindProgram],
) -> Any:
    """Returns what a transformation makes of the first program that applies, or None to leave the scan to JAX's rule.

    Args:
        params: the equation's parameters.
        primals: its arguments.
        argnums: the positions of the arguments that have tangents.
        transform: of a function of these arguments, and their values.
        programs: find programs to replace the loop.
    """
    loop_tag = tag.tag_in(current_metadata())
    if loop_tag is None or not argnums:
        return None
    scan = ScanParams.of(params)
    values = [primals[i] for i in argnums]
    for program in programs:
        with planning.budget(scan.jaxpr):
            run = observers.attempt(_WHERE, program, loop_tag, scan, argnums)
        if run is None:
            continue

        def of_moving(*moving: Any, run: Program = run) -> Sequence[Any]:
            return run(*jaxprs.replaced(primals, argnums, moving))

        try:
            return transform(of_moving, values)
        except Exception as error:
            observers.notify(f"differentiated as it is: {observers.report_unexpected(error)}")
    return None


def _in_context(context: Callable[[], Any], run: Program) -> Program:
    def program(*args: Any) -> Sequence[Any]:
        with context():
            return run(*args)

    return program


def _have_tangents(scan: ScanParams, argnums: Sequence[int]) -> tuple[bool, ...]:
    return tuple(i in argnums for i in range(len(jaxprs.jaxpr_of(scan.jaxpr).invars)))


def _linearization(results: Any, primals: Sequence[Any], argnums: Sequence[int]) -> Any:
    """Returns what JAX expects of a rule for linearization, from what `jax.linearize` returns."""
    outs, linear = results

    def linearized(*args: Any) -> list[Any]:
        tangents = args[-len(primals) :]  # after the residuals, which `linear` holds
        out_tangents = linear(*(ad.instantiate_zeros(tangents[i]) for i in argnums))
        return [_tangent(out, t) for out, t in zip(outs, out_tangents)]

    others = [None] * (LINEARIZATION_PARTS - 4)  # what newer versions of JAX return in addition
    return outs, list(map(is_smooth, outs)), jax.tree.leaves(linear), *others, linearized


def _tangent(out: Any, tangent: Any) -> Any:
    return tangent if is_smooth(out) else ad.Zero(jax.typeof(out).to_tangent_aval())


# A step with fewer residuals, for JAX's own rule --------------------------------------------------------------------------


def _with_fewer_residuals(
    params: dict[str, Any], nonzeros: Sequence[bool], gradients_of: Sequence[bool]
) -> tuple[Any, Tag, list[bool]] | None:
    """Returns the step for JAX's rule, the tag of its loops, and which arguments have tangents; None without a tag.

    Args:
        params: the equation's parameters.
        nonzeros: which arguments have tangents at the first step.
        gradients_of: which arguments there will be gradients of. Only the rule for linearization is told.
    """
    old_tag = tag.tag_in(current_metadata())
    if old_tag is None:
        return None
    from jrnn.loops.derivatives.residuals import Stacks, step_with_fewer_residuals

    scan = ScanParams.of(params)
    stacks = Stacks.of(Target.here().platform, scan.length)
    alone = replace(scan, length=None, reverse=False)
    options, provenance = old_tag
    step = step_with_fewer_residuals(alone, stacks, options.recompute, options.verify)
    if not provenance.is_differentiated:
        consts, _, xs = scan.partition(jaxprs.jaxpr_of(scan.jaxpr).invars)
        with_gradients = [v for v, nonzero in zip(consts, gradients_of) if nonzero]
        provenance = Provenance(
            written_reverse=scan.reverse,
            xs_bytes=sum(map(jaxprs.nbytes, xs)) * jaxprs.extent(scan.length),
            gradient_bytes=sum(map(jaxprs.nbytes, with_gradients)),
        )
    new_tag = Tag(options, provenance._replace(stores_less=step is not scan.jaxpr))
    return step, new_tag, arguments_that_move(params, nonzeros)


def _with_tagged_transpose(result: Any, new_tag: Tag) -> Any:
    """Wraps the function that a rule for linearization returns, so that the loop that it makes has the tag."""
    if not (isinstance(result, tuple) and result and callable(result[-1])):
        return result
    if len(result) != LINEARIZATION_PARTS:
        returns = f"a rule of JAX for linearization returns {len(result)} values"
        observers.report_unexpected(TypeError(returns))

    @functools.wraps(result[-1])
    def linear(*args: Any) -> Any:
        with tag.tagged(new_tag):
            return result[-1](*args)

    return (*result[:-1], linear)
