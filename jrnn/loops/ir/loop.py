"""A loop as data: what is constant, carried, read and written at each step.

Passes are functions from `Loop` to `Loop`. Variables, atoms (variables or literals) and equations are JAX's own.
`jaxprs.evaluate` runs equations on an environment (variable -> value). `jaxprs.read` returns an atom's value in it, and
`jaxprs.value` returns it as an array. A pass replaces some equations (`Loop.rewrite`), or traces a new step
(`Loop.traced`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import LOWERED_CALLS, Atom, Env, Eqn, Names, Program, Var, named, primitives
from jrnn.jaxprs.jax_internals import are_arrays, bind_scan

Values = Sequence[Any]  # arrays
Length = Any  # an integer, or a symbolic dimension of `jax.export`
Results = tuple[list[Array], list[Array]]  # the last carry, and the stacked ys
# From constants, initial carries, inputs and the length.
RunLoop = Callable[[Values, Values, Values, Length], Results]
# Runs a loop that a pass rewrote, from the original one's arguments: the first argument runs the rewritten loop.
Adapter = Callable[[RunLoop, Values, Values, Values, Length], Results]

# Tests set this to verify every loop that a pass returns, and to raise errors inside passes.
strict_passes = jax.make_user_context(False)

# True to compare the loop after each pass of the canonical form with the loop before it, on numbers: which pass is wrong?
checked_passes = jax.make_user_context(False)


@dataclass(frozen=True)
class Loop:
    """Computes `carry_out, ys = eqns(consts, carry, xs)` at each of `length` steps. All inputs are explicit."""

    eqns: tuple[Eqn, ...]
    consts: tuple[Var, ...]
    carry: tuple[Var, ...]
    xs: tuple[Var, ...]
    carry_out: tuple[Atom, ...]
    ys: tuple[Atom, ...]
    length: Length
    reverse: bool
    unroll: int
    # Its step computes values again, because the caller's `recompute` asks for it.
    recomputes: bool = False

    @property
    def inputs(self) -> tuple[Var, ...]:
        return (*self.consts, *self.carry, *self.xs)

    @property
    def outputs(self) -> tuple[Atom, ...]:
        return (*self.carry_out, *self.ys)

    @functools.cached_property
    def producers(self) -> dict[Var, Eqn]:
        """The equation that computes each variable of the step."""
        return jaxprs.producers(self.eqns)

    # What a value depends on decides where it may be computed: const < per_step < on_carry (`passes/split_loop.py`).

    @functools.cached_property
    def on_carry(self) -> frozenset[Var]:
        """The values that depend on the carry."""
        return frozenset(jaxprs.depends(self.eqns, self.carry))

    @functools.cached_property
    def varying(self) -> frozenset[Var]:
        """The values that depend on the carry or on this step's inputs. All others are constants."""
        return frozenset(jaxprs.depends(self.eqns, (*self.carry, *self.xs)))

    @functools.cached_property
    def per_step(self) -> frozenset[Var]:
        """The values that may be computed for all steps before the loop, and differ between steps."""
        return self.varying - self.sequential

    @functools.cached_property
    def sequential(self) -> frozenset[Var]:
        """The values that no split moves: `on_carry`, results of immovable equations, and what depends on these."""
        fixed = jaxprs.results(e for e in self.eqns if not primitives.is_movable(e))
        return self.on_carry.union(jaxprs.depends(self.eqns, fixed) if fixed else ())

    def verify(self) -> Loop:
        """Returns the loop; raises an AssertionError if it is inconsistent."""
        defined = set(self.inputs)
        assert len(defined) == len(self.inputs), "an input is named twice"
        for eqn in self.eqns:
            unknown = [v for v in jaxprs.inputs(eqn) if v not in defined]
            assert not unknown, f"{eqn.primitive} reads {unknown}, which nothing defines before it"
            is_new = defined.isdisjoint(eqn.outvars)
            assert is_new, f"{eqn.primitive} defines a variable a second time"
            defined.update(eqn.outvars)
        assert defined.issuperset(jaxprs.variables(self.outputs)), "an output is not defined"
        assert len(self.carry) == len(self.carry_out)
        for old, new in zip(self.carry, self.carry_out):
            old_type = jaxprs.type_of(old)
            new_type = jaxprs.type_of(new)
            assert old_type == new_type, f"a carry changes from {old_type} to {new_type}"
        return self

    def step(self, *args: Array) -> list[Array]:
        """Returns the outputs of one step for these inputs."""
        env = jaxprs.evaluate(self.eqns, dict(zip(self.inputs, args)))
        return [jaxprs.value(env, a) for a in self.outputs]

    def closed(self) -> Any:
        """Returns the step as a closed jaxpr, from `inputs` to `outputs`."""
        return Program((), (), self.inputs, self.eqns, self.outputs).closed()

    def run(self, consts: Values, init: Values, xs: Values, length: Length) -> Results:
        """Runs `length` steps as `jax.lax.scan` does."""
        outs = bind_scan(
            self.closed(),
            consts,
            init,
            xs,
            length=length,
            reverse=self.reverse,
            unroll=self.unroll,
        )
        return outs[: len(init)], outs[len(init) :]

    def rewrite(self, rule: Callable[[Eqn, Env], Values | None]) -> Loop:
        """Replaces some equations, and traces only the new ones.

        Args:
            rule: `(eqn, env)` returns new values for an equation's results, or None to keep it.
        """
        every = (*self.inputs, *jaxprs.producers(self.eqns))
        variables = [v for v in every if are_arrays([v.aval])]
        changed: list[Eqn] = []

        def values(*args: Array) -> list[Array]:
            env = dict(zip(variables, args))
            new = []
            for eqn in self.eqns:
                results = rule(eqn, env)
                if results is not None:
                    changed.append(eqn)
                    env.update(zip(eqn.outvars, results))
                    new += [env[v] for v in eqn.outvars]
            return new

        program = jaxprs.trace(values, [v.aval for v in variables], LOWERED_CALLS)
        assert not program.constvars, "a rewrite may not add constants"
        names: Names = dict(zip(program.invars, variables))
        results = jaxprs.producers(changed)
        names.update(zip(results, [named(names, a) for a in program.outvars]))
        sources = jaxprs.producers(program.eqns)
        eqns = {}

        def add(eqn: Eqn) -> None:
            if id(eqn) not in eqns:
                add_producers(eqn.invars)
                eqns[id(eqn)] = jaxprs.with_operands(eqn, [named(names, a) for a in eqn.invars])

        def add_producers(atoms: Sequence[Atom]) -> None:
            for v in jaxprs.variables(atoms):
                if v in sources:
                    add(sources[v])

        replaced_ids = set(map(id, changed))
        for eqn in self.eqns:
            if id(eqn) in replaced_ids:
                add_producers([named(names, v) for v in eqn.outvars])
            else:
                add(eqn)
        return self.with_eqns([*eqns.values()], [named(names, a) for a in self.outputs])

    def part(
        self,
        carries: Iterable[int],
        eqns: Iterable[Eqn],
        ys: Iterable[Atom],
        read: Iterable[Var],
        consts: Collection[Var],
        xs: Collection[Var],
    ) -> Loop:
        """Returns the loop of some carries. What it reads of other values become its constants and inputs.

        Args:
            carries: the positions of the carries.
            eqns: the equations that compute them, and `ys`.
            ys: the outputs.
            read: the values that these read, each once.
            consts: the values that are constants of the part.
            xs: other values, which are inputs of the part.
        """
        carries = list(carries)
        carry = [self.carry[i] for i in carries]
        others = [v for v in read if v not in carry]
        return replace(
            self,
            eqns=tuple(eqns),
            consts=tuple([v for v in others if v in consts]),
            carry=tuple(carry),
            xs=tuple([v for v in others if v in xs and v not in consts]),
            carry_out=tuple([self.carry_out[i] for i in carries]),
            ys=tuple(ys),
        )

    def with_eqns(self, eqns: Sequence[Eqn], outputs: Sequence[Atom]) -> Loop:
        """Returns the loop with other equations and outputs, without what is dead."""
        eqns, _ = jaxprs.needed(eqns, outputs, set(self.inputs), effects=True)
        n_carry = len(self.carry)
        changed = replace(
            self,
            eqns=tuple(eqns),
            carry_out=tuple(outputs[:n_carry]),
            ys=tuple(outputs[n_carry:]),
        )
        return changed.verify() if strict_passes.value else changed

    def traced(self, step: Callable[..., Values], avals: Sequence[Any], n_carry: int) -> Loop:
        """Returns a loop with the same constants and length, and a step that is traced from a function.

        Args:
            step: takes constants, carries and inputs; returns new carries and outputs.
            avals: the types of the arguments.
            n_carry: the number of carries.
        """
        program = jaxprs.trace(step, avals, LOWERED_CALLS)
        assert not program.constvars, "a rewrite may not add constants"
        eqns, _ = jaxprs.needed(program.eqns, program.outvars, set(program.invars), effects=True)
        n_consts = len(self.consts)
        first_x = len(self.consts) + n_carry
        traced = replace(
            self,
            eqns=tuple(eqns),
            consts=program.invars[:n_consts],
            carry=program.invars[n_consts:first_x],
            xs=program.invars[first_x:],
            carry_out=program.outvars[:n_carry],
            ys=program.outvars[n_carry:],
        )
        return traced.verify() if strict_passes.value else traced
