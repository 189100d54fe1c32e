"""A loop as data: what is constant, carried, read and written at each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

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
        turned = self._turned(consts)

        def step(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            env = dict(zip(self.inputs, (*consts, *carry, *x)))
            for eqn in self.eqns:
                if eqn in turned:
                    with jaxprs.in_scope(eqn):
                        env[eqn.outvars[0]] = _by_columns(eqn, jaxprs.read(env, eqn.invars[0]), turned[eqn])
                else:
                    jaxprs.evaluate([eqn], env)
            return [jaxprs.value(env, a) for a in self.carry_out], [jaxprs.value(env, a) for a in self.ys]

        return jax.lax.scan(
            step,
            list(init),
            list(xs),
            length=None if xs else self.length,  # what `jax.export` leaves open may not be given
            reverse=self.reverse,
            unroll=self.unroll,
        )

    def _turned(self, consts: Sequence[Any]) -> dict[Any, Any]:
        """Matrices of the contractions that read them row by row, transposed before the loop.

        XLA:CPU's product of small matrices, `x W^T` at every step, is up to half as slow again as `x W`.
        """
        values = dict(zip(self.consts, consts))
        found = {}
        for eqn in self.eqns:
            if eqn.primitive.name == "dot_general" and not jaxprs.is_literal(eqn.invars[1]) and eqn.invars[1] in values:
                dims = eqn.params["dimension_numbers"]
                if (
                    eqn.invars[1].aval.ndim == 2
                    and eqn.invars[0] not in values
                    and (dims[0][1], dims[1][1]) == ((1,), ())
                ):
                    found[eqn] = jnp.transpose(values[eqn.invars[1]])
        return found

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


def _by_columns(eqn: Any, x: Any, matrix: Any) -> Any:
    """The contraction `eqn` of x with a matrix that is given transposed."""
    (of_x, _), batch = eqn.params["dimension_numbers"]
    params = eqn.primitive.get_bind_params(eqn.params)
    return eqn.primitive.bind(x, matrix, **{**params, "dimension_numbers": ((of_x, (0,)), batch)})
