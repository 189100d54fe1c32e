"""Checks once that a version of JAX that is newer than all tested ones calls the rules that `install.py` gave it."""

from __future__ import annotations

import functools
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from jrnn.jaxprs import jax_internals
from jrnn.loops.ir import observers, tag
from jrnn.loops.ir.loop import strict_passes


@functools.cache
def check() -> None:
    """Differentiates and lowers a loop. If it is not planned, it warns, and `scan` is JAX's own from then on."""
    if not tag.rules_available or not jax_internals.is_untested:
        return
    try:
        with ThreadPoolExecutor(1) as thread:  # without the contexts of this one, such as a mesh
            thread.submit(_check).result()
    except Exception as error:
        tag.rules_available = False
        why = f"{type(error).__name__}: {error}"
        warn(f"so that the loops of jrnn run as jax.lax.scan: {why}")


def _check() -> None:
    """Tags, differentiates and lowers a loop of three steps, which takes 20 ms. Raises if it is not planned."""

    def loss(carry: jax.Array) -> jax.Array:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.sin(jnp.sin(carry)), None

        with tag.tagged(tag.Tag(tag.Options(recompute=()))):
            return jax.lax.scan(step, carry, None, length=3)[0]

    with observers.collected() as plans, strict_passes(True):
        jax.jit(jax.grad(loss)).trace(1.0).lower(lowering_platforms=("cpu",))
    loops = [plan.loop for plan in plans if plan.chosen is not None]
    directions = [loop.reverse for loop in loops]
    assert directions == [False, True], "it does not call jrnn's rules for loops"
    assert any(map(jax_internals.is_recomputed, loops[1].eqns)), (
        "what jax.checkpoint computes again has no scope"
    )


def warn(text: str) -> None:
    """Warns that this version of JAX is not known."""
    warnings.warn(
        f"jrnn does not know this version of JAX ({jax.__version__}), {text}. Values are right, and loops may be slow. "
        "Install a supported version: see pyproject.toml.",
        stacklevel=3,
    )
