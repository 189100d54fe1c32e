"""A loop as data: what is constant, carried, read and written at each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jrnn.executor import jaxprs
from jrnn.executor.jaxprs import Atom, Var


@dataclass(frozen=True)
class Loop:
    """`carry_out, ys = eqns(consts, carry, xs)` at each of `length` steps; all inputs are explicit."""

    eqns: tuple[Any, ...]
    consts: tuple[Var, ...]
    carry: tuple[Var, ...]
    xs: tuple[Var, ...]
    carry_out: tuple[Atom, ...]
    ys: tuple[Atom, ...]
    length: int
    reverse: bool
    unroll: int | bool

    @property
    def inputs(self) -> tuple[Var, ...]:
        return (*self.consts, *self.carry, *self.xs)

    @property
    def outputs(self) -> tuple[Atom, ...]:
        return (*self.carry_out, *self.ys)

    def step(self, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """One step: `(carry_out, ys)`."""
        env = jaxprs.evaluate(self.eqns, dict(zip(self.inputs, (*consts, *carry, *xs))))
        return [jaxprs.value(env, a) for a in self.carry_out], [jaxprs.value(env, a) for a in self.ys]

    def run(self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """All steps by `jax.lax.scan`: `(last carry, stacked ys)`, flat."""
        return jax.lax.scan(
            lambda carry, x: self.step(consts, carry, x),
            list(init),
            list(xs),
            length=self.length,
            reverse=self.reverse,
            unroll=self.unroll,
        )

    def rewritten(self, evaluation: Callable[[jaxprs.Env], jaxprs.Env]) -> Loop:
        """The same loop with its equations traced anew from an evaluation, and dead equations dropped."""
        program = jaxprs.retrace(evaluation, self.inputs, self.outputs)
        assert not program.constvars, "a rewrite may not add constants"
        eqns, _ = jaxprs.needed(program.eqns, program.outvars, set(program.invars))
        at = len(self.consts), len(self.consts) + len(self.carry)
        return replace(
            self,
            eqns=tuple(eqns),
            consts=program.invars[: at[0]],
            carry=program.invars[at[0] : at[1]],
            xs=program.invars[at[1] :],
            carry_out=program.outvars[: len(self.carry)],
            ys=program.outvars[len(self.carry) :],
        )

    def rewritten_by(self, rule: Callable[[Loop, jaxprs.Env], jaxprs.Env]) -> Loop:
        """`rewritten` with an evaluation that is told the loop."""
        return self.rewritten(lambda env: rule(self, env))
