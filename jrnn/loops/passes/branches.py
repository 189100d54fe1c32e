"""Products that a branch of a `cond` computes, such as the gradient of a weight in a loop that stops early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Program
from jrnn.loops.ir import Loop

# A product is computed after the branches if it has more than so many times the bytes of its operands. With 4 times, of
# (32, 256) by (32, 256), a loop of 64 steps gains nothing, and one that stops after 16 takes 1.3 times as long.
_MIN_BYTES_RATIO = 6


def products_after_branches(loop: Loop) -> Loop:
    """Computes products that one branch returns, and the others as zeros, after the branches, from their operands.

    A branch writes a product to a new array, which the loop then adds to a carry. After the branches it is added in place,
    or leaves the loop with the sum. The other branches return zeros as its operands.

    Invariant: every value is unchanged, except for the sign of zero.
    """
    branches_of = {id(eqn): _Branches.of(eqn) for eqn in loop.eqns if eqn.primitive.name == "cond"}
    rewritten = {key: branches for key, branches in branches_of.items() if branches.products}
    if not rewritten:
        return loop
    return loop.rewrite(
        lambda eqn, env: rewritten[id(eqn)].run(eqn, env) if id(eqn) in rewritten else None
    )


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
        programs = [*map(jaxprs.inlined, eqn.params["branches"])]
        products = {}
        producers = [jaxprs.producers(program.eqns) for program in programs]
        for k, atoms in enumerate(zip(*(program.outvars for program in programs))):
            nonzero = [i for i, atom in enumerate(atoms) if not jaxprs.is_zero(atom, producers[i])]
            eqns = (
                _large_product(atoms[nonzero[0]], producers[nonzero[0]])
                if len(nonzero) == 1
                else []
            )
            if eqns and not any(program.constvars for program in programs):
                products[k] = nonzero[0], eqns
        return _Branches(programs, products)

    def run(self, eqn: Eqn, env: Env) -> list[Any]:
        """Returns the results of the `cond`."""
        others = [k for k in range(len(eqn.outvars)) if k not in self.products]
        operands = dict.fromkeys(
            (i, a) for i, (product, *_) in self.products.values() for a in product.invars
        )
        branches = tuple(
            self._without_products(i, others, [*operands]) for i in range(len(self.programs))
        )
        with jaxprs.in_scope(eqn):
            values = jaxprs.bind(
                eqn, *(jaxprs.value(env, a) for a in eqn.invars), branches=branches
            )
        results = dict(zip(others, values))
        read = dict(zip(operands, values[len(others) :]))
        for k, (i, eqns) in self.products.items():
            env_of_product = {a: read[i, a] for a in eqns[0].invars}
            results[k] = jaxprs.evaluate(eqns, env_of_product)[eqns[-1].outvars[0]]
        return [results[k] for k in range(len(eqn.outvars))]

    def _without_products(
        self, branch: int, others: Sequence[int], operands: Sequence[tuple[int, Atom]]
    ) -> Any:
        """Returns a branch that returns some of its results, and then the operands of the products of all branches."""
        program = self.programs[branch]
        outs = [program.outvars[k] for k in others]
        read = [*outs, *(a for i, a in operands if i == branch)]
        eqns, _ = jaxprs.needed(program.eqns, read, set(program.invars), effects=True)

        def run(*args: Any) -> list[Any]:
            env = jaxprs.evaluate(eqns, dict(zip(program.invars, args)))
            of_products = [
                jaxprs.value(env, a) if i == branch else jaxprs.zeros_of_shape(a.aval.shape, a.aval)
                for i, a in operands
            ]
            return [*(jaxprs.value(env, a) for a in outs), *of_products]

        return jax.make_jaxpr(run)(*(v.aval for v in program.invars))


def _large_product(atom: Atom, producers: Any) -> list[Eqn]:
    """Returns the product that computes a value, and its transposition, or nothing. It is large next to its operands."""
    eqns: list[Eqn] = []
    while jaxprs.is_in(atom, producers) and producers[atom].primitive.name in (
        "transpose",
        "dot_general",
    ):
        eqns.insert(0, producers[atom])
        if eqns[0].primitive.name == "dot_general":
            is_large = jaxprs.nbytes(eqns[0].outvars[0]) > _MIN_BYTES_RATIO * sum(
                map(jaxprs.nbytes, eqns[0].invars)
            )
            return eqns if is_large and not any(map(jaxprs.is_literal, eqns[0].invars)) else []
        atom = eqns[0].invars[0]
    return []
