"""Which masked steps run in a branch instead of before a selection: those with effects, or with carries updated in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var

# A branch takes about as long as selecting so many bytes: 2 microseconds.
_BYTES = 1 << 16
_SLICES = {"dynamic_update_slice"}  # XLA selects the slice alone
_OTHERS = {"scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "while", "cond", "scan"}


class Traced(NamedTuple):
    """A step, traced with the types of a carry and an x.

    Attributes:
        closed: its jaxpr.
        out: the types of what it returns.
    """

    closed: Any
    out: Any

    @classmethod
    def of(cls, step: Callable, carry: Any, x: Any) -> Traced | None:
        """Returns None if the step raises, which `jax.lax.scan` reports."""
        try:
            return cls(*jax.make_jaxpr(step, return_shape=True)(carry, x))
        except Exception:
            return None

    @property
    def has_effects(self) -> bool:
        return bool(self.closed.effects)

    def updates_in_place(self, carry: Any, primitives: set[str]) -> bool:
        """Returns whether a large leaf of the carry is updated in place, by one of these primitives among others."""
        program = jaxprs.opened(self.closed)
        producers = jaxprs.producers(program.eqns)
        pairs = zip(jax.tree.leaves(carry), program.outvars, program.invars)
        return any(_is_large(leaf) and primitives & _updates(new, old, producers) for leaf, new, old in pairs)


def runs_in_branch(traced: Traced, mask: Any, carry: Any) -> bool:
    """Returns whether a mask decides in a branch whether the step runs. Then nothing moves out of the loop."""
    if traced.has_effects:
        return True
    return (
        not jnp.ndim(mask) and any(map(_is_large, jax.tree.leaves(carry))) and traced.updates_in_place(carry, _OTHERS)
    )


def resets_in_branch(step: Callable, mask: Any, carry: Any, x: Any) -> bool:
    """Returns whether a mask decides in a branch what carry the step gets."""
    if jnp.ndim(mask) or not any(map(_is_large, jax.tree.leaves(carry))):
        return False
    traced = Traced.of(step, carry, x)
    return traced is not None and traced.updates_in_place(carry, _SLICES | _OTHERS)


def _is_large(leaf: Any) -> bool:
    return jnp.size(leaf) * jnp.result_type(leaf).itemsize >= _BYTES


def _updates(new: Any, old: Var, producers: dict[Var, Eqn]) -> set[str]:
    """Returns the primitives that make a new carry from the old one in place; none if something else does."""
    names = set()
    while new is not old:
        eqn = None if jaxprs.is_literal(new) else producers.get(new)
        if eqn is None or eqn.primitive.name not in _SLICES | _OTHERS:
            return set()
        names.add(eqn.primitive.name)
        if eqn.primitive.name in ("while", "cond", "scan"):
            return names if any(v is old for v in eqn.invars) else set()
        new = eqn.invars[0]
    return names
