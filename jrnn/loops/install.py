"""The patches of JAX, in the order in which they run: linearization and jvp of a tagged loop, then its lowering.

`jrnn.scan` is `jax.lax.scan` with a tag (`ir/tag.py`). JAX calls these rules instead of its own; an untagged loop goes
to JAX's own rule, unchanged. JAX's private names are in `jaxprs/jax_internals`. If one is missing, jrnn warns once, and
`jrnn.scan` is `jax.lax.scan`. If a rule raises what it should not, JAX's own runs, and the log `jrnn.loops` has a warning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from jrnn.errors import ScanError
from jrnn.jaxprs import TAG, jax_fixes, jax_internals
from jrnn.jaxprs.jax_internals import (
    LoopRules,
    is_threefry_loop,
    lower_or_undo,
    lowered_for,
    lowered_metadata,
    mlir,
)
from jrnn.loops.compile import SCAN, compile_loop
from jrnn.loops.costs.target import PLATFORMS, Target
from jrnn.loops.differentiate import programs_instead, with_jvp, with_linearize
from jrnn.loops.ir import AUTO, Options, ScanParams, Tag, observers, self_check, tag
from jrnn.loops.plan import Plan, left_after_error

Rule = Callable[..., Any]
_is_repeated = ContextVar("is_repeated", default=False)  # the body of a loop is lowered


def install() -> None:
    """Installs the rules, and warns once of all names that this version of JAX lacks."""
    of_jax = jax_internals.loop_rules()
    if of_jax is None:
        tag.rules_available = False
    else:
        # 1. A tagged loop is differentiated.
        programs = programs_instead(compile_loop)
        linearize = with_linearize(of_jax.linearize, programs)
        jvp = with_jvp(of_jax.jvp, programs)
        # 2. It is lowered, and so are the loops that differentiation made of it.
        lower_while = repeating(of_jax.lower_while)
        lower_by_platform = {
            platform: functools.partial(lower, of_jax.lower_scan, platform)
            for platform in PLATFORMS
        }
        jax_internals.omit_metadata_when_lowering(TAG)
        rules = LoopRules(of_jax.lower_scan, lower_while, jvp, linearize)
        jax_internals.replace_rules(rules, lower_by_platform)
        jax_internals.fix_rules(
            jax_fixes.with_zeros_of_a_step,
            jax_fixes.with_inputs_as_residuals,
            jax_fixes.in_context_of_loop,
        )
    if jax_internals.missing:
        missing = jax_internals.missing.items()
        lacks = "; ".join(f"{name} (without it, {without})" for name, without in missing)
        self_check.warn(f"which lacks names that jrnn needs: {lacks}")


def lower(jax_rule: Rule, platform: str, ctx: Any, *args: Any, **params: Any) -> Any:
    """The lowering rule of scans on one platform: a tagged loop is planned, and its plan is lowered."""
    jax_rule = repeating(jax_rule)
    tagged = observers.attempt(" where a loop is lowered", _tagged, platform, ctx, params)
    if tagged is None:
        return jax_rule(ctx, *args, **params)
    (options, provenance), scan, target = tagged
    with tag.untagged():  # a loop in the step has the tag with which it was traced
        plan = compile_loop(scan, target, options, provenance)
    lowered = None
    if plan.node is not None:
        try:
            with tag.untagged():
                run = scan.flat(plan.node.run, plan.constants)
                rule = repeating(mlir.lower_fun(run, multiple_results=True))
                lowered = lower_or_undo(rule, ctx, *args)
        except Exception as error:
            plan = left_after_error(error, plan.target, plan.loop)
    observers.notify_plan(plan)
    if options.strict:
        _check_strict(plan, options)
    if plan.node is not None:
        return lowered
    with tag.untagged():
        return jax_rule(ctx, *args, **params)


def _tagged(
    platform: str, ctx: Any, params: dict[str, Any]
) -> tuple[Tag, ScanParams, Target] | None:
    """Returns the tag of a loop, the loop, and what it is lowered for; None if it has no tag, or is JAX's own."""
    loop_tag = tag.tag_in(lowered_metadata(ctx)) if tag.rules_available else None
    types = [(str(a.dtype), a.shape) for a in params["jaxpr"].in_avals]
    if loop_tag is None or is_threefry_loop(params["length"], types):
        return None
    devices, exported = lowered_for(ctx)
    target = Target.on(platform, devices, exported, _is_repeated.get())
    return loop_tag, ScanParams.of(params), target


def _check_strict(plan: Plan, options: Options) -> None:
    """Raises a ScanError if the caller asked for more than the plan does."""
    executor = options.executor
    if plan.node is not None:
        if executor not in (AUTO, plan.strategy):
            raise ScanError(
                f"scan: strict=True, but executor {executor!r} cannot run the loop: {plan.notes[0]}"
            )
    elif plan.chosen is None or executor not in (AUTO, SCAN):
        raise ScanError(
            f"scan: strict=True, but the loop is left as jax.lax.scan lowers it: {plan.notes[0]}"
        )


def repeating(lower_loop: Rule) -> Rule:
    """Returns the lowering rule of a loop. Those of loops in its body know then that they run many times."""

    @functools.wraps(lower_loop)
    def rule(*args: Any, **params: Any) -> Any:
        token = _is_repeated.set(True)
        try:
            return lower_loop(*args, **params)
        finally:
            _is_repeated.reset(token)

    return rule
