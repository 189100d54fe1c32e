"""A loop as data: what is constant, carried, read and written at each step.

Passes are functions from `Loop` to `Loop`. Variables and equations are JAX's own; `jaxprs.evaluate` runs equations on an
environment (variable -> value), and `jaxprs.retrace` traces such a run into new equations, which is how a pass rewrites.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.executor import jaxprs
from jrnn.executor.jaxprs import Atom, Var

# Tests set this: every loop that a pass makes is verified, and an error inside a pass is raised.
strict_passes = jax.make_user_context(False)


@dataclass(frozen=True)
class Loop:
    """`carry_out, ys = eqns(consts, carry, xs)` at each of `length` steps; all inputs are explicit."""

    eqns: tuple[Any, ...]
    consts: tuple[Var, ...]
    carry: tuple[Var, ...]
    xs: tuple[Var, ...]
    carry_out: tuple[Atom, ...]
    ys: tuple[Atom, ...]
    length: Any  # an integer, or a symbolic dimension of `jax.export`
    reverse: bool
    unroll: int
    recomputes: bool = False  # the caller asked for values to be computed again, and this loop does that

    @property
    def inputs(self) -> tuple[Var, ...]:
        return (*self.consts, *self.carry, *self.xs)

    @property
    def outputs(self) -> tuple[Atom, ...]:
        return (*self.carry_out, *self.ys)

    def verify(self) -> Loop:
        """Raises an AssertionError where the record is not a loop; returns it otherwise."""
        defined = set(self.inputs)
        assert len(defined) == len(self.inputs), "an input is named twice"
        for eqn in self.eqns:
            unknown = [v for v in jaxprs.inputs(eqn) if v not in defined]
            assert not unknown, f"{eqn.primitive} reads {unknown}, which nothing defines before it"
            assert not defined.intersection(eqn.outvars), f"{eqn.primitive} defines a variable a second time"
            defined.update(eqn.outvars)
        assert all(jaxprs.is_literal(a) or a in defined for a in self.outputs), "an output is not defined"
        assert len(self.carry) == len(self.carry_out)
        for old, new in zip(self.carry, self.carry_out):
            types = [(a.aval.shape, a.aval.dtype) for a in (old, new)]
            assert types[0] == types[1], f"a carry changes from {types[0]} to {types[1]}"
        return self

    def run(self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """All steps by `jax.lax.scan`: `(last carry, stacked ys)`, flat."""

        open_length = not xs and not jaxprs.is_known(self.length)  # which `jax.lax.scan` takes from xs only

        def step(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            env = jaxprs.evaluate(self.eqns, dict(zip(self.inputs, (*consts, *carry, *x))))
            return [jaxprs.value(env, a) for a in self.carry_out], [jaxprs.value(env, a) for a in self.ys]

        given = [jnp.arange(self.length)] if open_length else list(xs)
        length = None if given else self.length  # a symbolic length may not be given
        return jax.lax.scan(step, list(init), given, length, reverse=self.reverse, unroll=self.unroll)

    def with_length(self, length: Any) -> Loop:
        """The same for another number of steps."""
        return replace(self, length=length)

    def rewritten(self, evaluation: Callable[[jaxprs.Env], jaxprs.Env], avals: Sequence[Any] | None = None) -> Loop:
        """The same loop with its equations traced anew from an evaluation, and dead equations dropped.

        Args:
            evaluation: defines the outputs in an environment of the inputs.
            avals: new types of the inputs, where they change.
        """
        return self._of(jaxprs.retrace(evaluation, self.inputs, self.outputs, avals), len(self.carry))

    def traced(self, step: Callable[..., Sequence[Any]], avals: Sequence[Any], n_carry: int) -> Loop:
        """A loop of the same constants and length whose step is traced from a function.

        Args:
            step: of the constants, the carries and the inputs; it returns the new carries and the outputs.
            avals: their types.
            n_carry: how many carries there are.
        """
        return self._of(jaxprs.trace(step, avals), n_carry)

    def _of(self, program: jaxprs.Program, n_carry: int) -> Loop:
        assert not program.constvars, "a rewrite may not add constants"
        eqns, _ = jaxprs.needed(program.eqns, program.outvars, set(program.invars), effects=True)
        at = len(self.consts), len(self.consts) + n_carry
        made = replace(
            self,
            eqns=tuple(eqns),
            consts=program.invars[: at[0]],
            carry=program.invars[at[0] : at[1]],
            xs=program.invars[at[1] :],
            carry_out=program.outvars[:n_carry],
            ys=program.outvars[n_carry:],
        )
        return made.verify() if strict_passes.value else made

    def rewritten_by(self, rule: Callable[[Loop, jaxprs.Env], jaxprs.Env]) -> Loop:
        """`rewritten` with an evaluation that also gets the loop."""
        return self.rewritten(lambda env: rule(self, env))
