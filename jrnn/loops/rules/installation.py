"""Installation: puts the rules for tagged loops in the place of JAX's own, which they call for loops without a tag."""

from __future__ import annotations

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from jrnn.jaxprs import TAG, jax_internals
from jrnn.jaxprs.jax_internals import LoopRules
from jrnn.loops.ir import Options, Tag, observers, strict_passes, tag
from jrnn.loops.rules import differentiation, lowering, pieces, programs, replacement
from jrnn.loops.strategies.plan import PLATFORMS


def install() -> None:
    """Installs the rules, and warns once of all names that this version of JAX lacks."""
    of_jax = jax_internals.loop_rules()
    if of_jax is None:
        tag.rules_available = False
    else:
        jvp, linearize = (
            differentiation.with_residual_policy(rule) for rule in (of_jax.jvp, of_jax.linearize)
        )
        for program in (
            pieces.checkpointed_in_pieces,
            programs.by_strategy,
            programs.rewritten,
        ):  # the last one first
            jvp = replacement.jvp(jvp, program)
            linearize = replacement.linearize(linearize, program)
        jax_internals.leave_out_of_programs(TAG)
        rules = LoopRules(of_jax.lower_scan, lowering.repeating(of_jax.lower_while), jvp, linearize)
        lower = functools.partial(lowering.lower, of_jax.lower_scan)
        jax_internals.replace_rules(rules, {p: functools.partial(lower, p) for p in PLATFORMS})
        jax_internals.fix_rules(
            differentiation.with_zeros_of_a_step,
            differentiation.with_inputs_as_residuals,
            differentiation.in_context_of_loop,
        )
    if jax_internals.missing:
        lacks = "; ".join(
            f"{name} (without it, {without})" for name, without in jax_internals.missing.items()
        )
        _warn(f"which lacks names that jrnn needs: {lacks}")


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
        _warn(
            f"with which the loops of jrnn are those of jax.lax.scan: {type(error).__name__}: {error}"
        )


def _check() -> None:
    """Marks, differentiates and lowers a loop of three steps, which takes 20 ms. Raises if it is not planned."""

    def loss(carry: jax.Array) -> jax.Array:
        with tag.tagged(Tag(Options(recompute=()))):
            return jax.lax.scan(lambda c, _: (jnp.sin(jnp.sin(c)), None), carry, None, length=3)[0]

    with observers.collected() as plans, strict_passes(True):
        jax.jit(jax.grad(loss)).trace(1.0).lower(lowering_platforms=("cpu",))
    loops = [plan.loop for plan in plans if plan.choice is not None]
    assert [loop.reverse for loop in loops] == [False, True], (
        "it does not call jrnn's rules for loops"
    )
    assert any(map(jax_internals.is_recomputed, loops[1].eqns)), (
        "what jax.checkpoint computes again has no scope"
    )


def _warn(text: str) -> None:
    warnings.warn(
        f"jrnn does not know this version of JAX ({jax.__version__}), {text}. Values are right, and loops may be slow. "
        "Install a supported version: see pyproject.toml.",
        stacklevel=3,
    )
