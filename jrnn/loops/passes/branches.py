"""Products that a branch of a `cond` computes, such as the gradient of a weight in a loop that stops early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Program, Var
from jrnn.jaxprs.jax_internals import ClosedJaxpr
from jrnn.loops.ir import Loop

# A product is computed after the branches if it has more than 6 times the bytes of its operands. With 4 times, in a product
# of (32, 256) by (32, 256), a loop of 64 steps gains nothing, and one that stops after 16 takes 1.3 times as long.
_MIN_BYTES_RATIO = 6


def products_after_branches(loop: Loop) -> Loop:
    """Computes products that one branch returns, and the others as zeros, after the branches, from their operands.

    A branch writes a product to a new array, which the loop then adds to a carry. After the branches it is added in place,
    or leaves the loop with the sum. The other branches return zeros as its operands.

    Invariant: every value is unchanged, except for the sign of zero.
    """
    rewritten: dict[int, _Branches] = {}
    for eqn in loop.eqns:
        if eqn.primitive.name == "cond":
            branches = _Branches.of(eqn)
            if branches.products:
                rewritten[id(eqn)] = branches
    if not rewritten:
        return loop

    def rule(eqn: Eqn, env: Env) -> list[Array] | None:
        return rewritten[id(eqn)].run(eqn, env) if id(eqn) in rewritten else None

    return loop.rewrite(rule)


@dataclass(frozen=True)
class _Branches:
    """The branches of a `cond`.

    Attributes:
        programs: one for each branch.
        products: results that one branch computes by these equations, a product and perhaps its transposition, and the
            others as zeros, with the number of this branch.
    """

    programs: list[Program]
    products: dict[int, tuple[int, list[Eqn]]]

    @staticmethod
    def of(eqn: Eqn) -> _Branches:
        """Reads a `cond`. Branches with constants of their own are left as they are."""
        programs = [*map(jaxprs.inlined, eqn.params["branches"])]
        nonzero: dict[int, list[int]] = {}  # the branches that do not return a result as zeros
        products = {}
        producers = []
        for branch, program in enumerate(programs):
            if program.constvars:
                return _Branches(programs, {})
            producers.append(jaxprs.producers(program.eqns))
            for k, atom in enumerate(program.outvars):
                if not jaxprs.is_zero(atom, producers[branch]):
                    nonzero.setdefault(k, []).append(branch)
        for k, branches in sorted(nonzero.items()):
            if len(branches) == 1:
                (branch,) = branches
                eqns = _large_product(programs[branch].outvars[k], producers[branch])
                if eqns:
                    products[k] = branch, eqns
        return _Branches(programs, products)

    def run(self, eqn: Eqn, env: Env) -> list[Array]:
        """Returns the results of the `cond`."""
        others = [k for k in range(len(eqn.outvars)) if k not in self.products]
        operands: dict[tuple[int, Atom], None] = {}  # with the numbers of their branches
        for branch, (product, *_) in self.products.values():
            for a in product.invars:
                operands[branch, a] = None
        branches = []
        for branch, program in enumerate(self.programs):
            branches.append(_with_operands(program, branch, others, [*operands]))
        arguments = [jaxprs.value(env, a) for a in eqn.invars]
        with jaxprs.in_scope(eqn):
            values = jaxprs.bind(eqn, *arguments, branches=tuple(branches))
        results = dict(zip(others, values))
        read = dict(zip(operands, values[len(others) :]))
        for k, (i, eqns) in self.products.items():
            env_of_product = {a: read[i, a] for a in eqns[0].invars}
            results[k] = jaxprs.evaluate(eqns, env_of_product)[eqns[-1].outvars[0]]
        return [results[k] for k in range(len(eqn.outvars))]


def _with_operands(
    program: Program,
    branch: int,
    others: Sequence[int],
    operands: Sequence[tuple[int, Atom]],
) -> ClosedJaxpr:
    """Returns a branch that returns some of its results, and then the operands of the products of all branches."""
    outs = jaxprs.take(program.outvars, others)
    read = [*outs, *(a for i, a in operands if i == branch)]
    eqns, _ = jaxprs.needed(program.eqns, read, set(program.invars), effects=True)

    def run(*args: Array) -> list[Array]:
        env = jaxprs.evaluate(eqns, dict(zip(program.invars, args)))
        values = [jaxprs.value(env, a) for a in outs]
        for i, a in operands:
            if i == branch:
                values.append(jaxprs.value(env, a))
            else:
                values.append(jaxprs.zeros_of_shape(a.aval.shape, a.aval))
        return values

    avals = [v.aval for v in program.invars]
    return jax.make_jaxpr(run)(*avals)


def _large_product(atom: Atom, producers: Mapping[Var, Eqn]) -> list[Eqn]:
    """Returns the product that computes a value, and its transposition, or nothing. It is large next to its operands."""
    eqns: list[Eqn] = []
    while jaxprs.is_in(atom, producers):
        eqn = producers[atom]
        eqns.insert(0, eqn)
        if eqn.primitive.name == "dot_general":
            operand_bytes = sum(map(jaxprs.nbytes, eqn.invars))
            is_large = jaxprs.nbytes(eqn.outvars[0]) > _MIN_BYTES_RATIO * operand_bytes
            return eqns if is_large and not any(map(jaxprs.is_literal, eqn.invars)) else []
        if eqn.primitive.name != "transpose":
            break
        atom = eqn.invars[0]
    return []
