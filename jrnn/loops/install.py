"""The patches of JAX, in the order in which they run: linearization and jvp of a tagged loop, then its lowering.

`jrnn.scan` is `jax.lax.scan` with a tag (`ir/tag.py`). JAX calls these rules in the place of its own; an untagged loop goes
to JAX's own rule, unchanged. JAX's private names are in `jaxprs/jax_internals.py`. If one is missing, jrnn warns once, and
`jrnn.scan` is `jax.lax.scan`. If a rule raises what it should not, JAX's own runs, and the log `jrnn.loops` has a warning.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import ScanError
from jrnn.jaxprs import TAG, jax_internals
from jrnn.jaxprs.jax_internals import (
    LoopRules,
    is_threefry_loop,
    lower_or_undo,
    lowered_for,
    lowered_metadata,
    mlir,
)
from jrnn.loops.compile import AUTO, SCAN, compile_loop, left_after_error
from jrnn.loops.costs import machines
from jrnn.loops.derivatives import jax_fixes
from jrnn.loops.differentiate import with_jvp, with_linearize
from jrnn.loops.ir import Options, ScanParams, Tag, observers, strict_passes, tag
from jrnn.loops.plan import PLATFORMS, Plan, Target

Rule = Callable[..., Any]
_is_repeated = ContextVar("is_repeated", default=False)  # the body of a loop is lowered


def install() -> None:
    """Installs the rules, and warns once of all names that this version of JAX lacks."""
    of_jax = jax_internals.loop_rules()
    if of_jax is None:
        tag.rules_available = False
    else:
        # 1. A tagged loop is differentiated.
        linearize = with_linearize(of_jax.linearize)
        jvp = with_jvp(of_jax.jvp)
        # 2. It is lowered, and so are the loops that differentiation made of it.
        lower_while = repeating(of_jax.lower_while)
        lower_by_platform = {
            platform: functools.partial(lower, of_jax.lower_scan, platform)
            for platform in PLATFORMS
        }
        jax_internals.leave_out_of_programs(TAG)
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
        _warn(f"which lacks names that jrnn needs: {lacks}")


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
    target = Target(
        platform=platform,
        devices=devices,
        exported=exported,
        machine=machines.of(platform),
        repeated=_is_repeated.get(),
    )
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


@functools.cache
def check() -> None:
    """Checks once that a version of JAX that is newer than all tested ones calls the rules. If not, `scan` is JAX's own."""
    if not tag.rules_available or not jax_internals.is_untested:
        return
    try:
        with ThreadPoolExecutor(1) as thread:  # without the contexts of this one, such as a mesh
            thread.submit(_check).result()
    except Exception as error:
        tag.rules_available = False
        why = f"{type(error).__name__}: {error}"
        _warn(f"with which the loops of jrnn are those of jax.lax.scan: {why}")


def _check() -> None:
    """Marks, differentiates and lowers a loop of three steps, which takes 20 ms. Raises if it is not planned."""

    def loss(carry: jax.Array) -> jax.Array:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.sin(jnp.sin(carry)), None

        with tag.tagged(Tag(Options(recompute=()))):
            return jax.lax.scan(step, carry, None, length=3)[0]

    with observers.collected() as plans, strict_passes(True):
        jax.jit(jax.grad(loss)).trace(1.0).lower(lowering_platforms=("cpu",))
    loops = [plan.loop for plan in plans if plan.chosen is not None]
    directions = [loop.reverse for loop in loops]
    assert directions == [False, True], "it does not call jrnn's rules for loops"
    assert any(map(jax_internals.is_recomputed, loops[1].eqns)), (
        "what jax.checkpoint computes again has no scope"
    )


def _warn(text: str) -> None:
    warnings.warn(
        f"jrnn does not know this version of JAX ({jax.__version__}), {text}. Values are right, and loops may be slow. "
        "Install a supported version: see pyproject.toml.",
        stacklevel=3,
    )
