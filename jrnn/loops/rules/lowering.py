"""Lowering of a tagged loop, forward or reverse: it is planned for the platform, and the plan is lowered.

The chooser (`strategies/chooser.py`) reads the equation as a `Loop` (`ir/loop.py`) and makes its `LoopPlan`
(`strategies/plan.py`). The plan's node is traced in place of the loop. A plan without a node leaves the loop to JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.jaxprs.jax_internals import (
    is_threefry_loop,
    lower_or_undo,
    lowered_for,
    lowered_metadata,
    metadata_of,
    mlir,
    scan_p,
)
from jrnn.loops.costs import machines
from jrnn.loops.ir import Loop, ScanParams, Tag, observers, tag
from jrnn.loops.strategies import LoopPlan, Target, chooser

_repeated = ContextVar("repeated", default=False)  # the body of a loop is lowered


def repeating(lower: Callable) -> Callable:
    """Returns the lowering rule of a loop. Those of loops in its body know then that they run many times."""

    @functools.wraps(lower)
    def rule(*args: Any, **params: Any) -> Any:
        token = _repeated.set(True)
        try:
            return lower(*args, **params)
        finally:
            _repeated.reset(token)

    return rule


def lower(default: Callable, platform: str, ctx: Any, *args: Any, **params: Any) -> Any:
    """The lowering rule of scans on one platform."""
    default = repeating(default)
    tagged = observers.attempt(" where a loop is lowered", _tagged, platform, ctx, params)
    if tagged is None:
        return default(ctx, *args, **params)
    (options, provenance), scan, target = tagged
    with tag.untagged():  # a loop in the step has the tag with which it was traced
        plan = chooser.lowered(scan, target, options, provenance)
    if plan.node is not None:
        try:
            with tag.untagged():
                run = scan.flat(plan.node.run, plan.constants)
                rule = repeating(mlir.lower_fun(run, multiple_results=True))
                lowered = lower_or_undo(rule, ctx, *args)
        except Exception as error:
            plan = chooser.fallback_after(error, plan.target, plan.loop)
    chooser.report(plan)
    if plan.node is not None:
        if options.strict and options.executor not in ("auto", plan.strategy):
            raise ScanError(
                f"scan: strict=True, but executor {options.executor!r} cannot run the loop: {plan.notes[0]}"
            )
        return lowered
    if options.strict and (plan.choice is None or options.executor not in ("auto", "scan")):
        raise ScanError(
            f"scan: strict=True, but the loop is left as jax.lax.scan lowers it: {plan.notes[0]}"
        )
    with tag.untagged():
        return default(ctx, *args, **params)


def _tagged(
    platform: str, ctx: Any, params: dict[str, Any]
) -> tuple[Tag, ScanParams, Target] | None:
    """Returns the tag of a loop, the loop, and what it is lowered for; None if it has no tag, or is JAX's own."""
    loop_tag = tag.tag_in(lowered_metadata(ctx)) if tag.rules_available else None
    types = [(str(a.dtype), a.shape) for a in params["jaxpr"].in_avals]
    if loop_tag is None or is_threefry_loop(params["length"], types):
        return None
    devices, exported = lowered_for(ctx)
    return (
        loop_tag,
        ScanParams.of(params),
        Target(platform, devices, exported, machines.of(platform), _repeated.get()),
    )


def steps_of(fn: Callable, *args: Any) -> list[Loop]:
    """Returns the loops of the scans that a function calls, in their order. Nothing is lowered."""
    scans = [
        ScanParams.of(e.params)
        for e in jax.make_jaxpr(fn)(*args).jaxpr.eqns
        if e.primitive is scan_p
    ]
    return [scan.loop(jaxprs.inlined(scan.jaxpr, jaxprs.LOWERED_CALLS)) for scan in scans]


def plans_in(jaxpr: Any, target: Target) -> list[LoopPlan]:
    """Returns the plans of the tagged loops in a jaxpr, without lowering it."""
    scans = [eqn for eqn in jaxprs.all_equations(jaxpr) if eqn.primitive is scan_p]
    tagged = [(ScanParams.of(e.params), tag.tag_in(metadata_of(e))) for e in scans]
    return [
        chooser.lowered(scan, target, *loop_tag)
        for scan, loop_tag in tagged
        if loop_tag is not None
    ]
