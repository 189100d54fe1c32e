"""What may leave a loop, and what does: the choices from which `split_loop.py` makes the parts. Read that file first.

Contractions, lookups, solvers and draws, the "heavy" equations, are worth moving. `Moves` names the movable ones. Others
follow:

- before the loop, what is computed from a hoisted value without growing: `tanh(x W)` is no larger than `x W`;
- after the loop, what is computed from a sunk value, and what leads to it, as long as the loop does not have to stack more.

Discontinuous equations do not lead to sunk ones: they would be computed a second time, and a value that is rounded
differently could take the other branch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var, primitives
from jrnn.loops.ir import Loop
from jrnn.loops.passes import sums

Vars = Collection[Var]
Selects = Callable[[Eqn], bool]


def is_computation(eqn: Eqn) -> bool:
    """Returns True for all but views: what to hoist where coefficients are better computed for all steps."""
    return not primitives.is_view(eqn)


def is_slice(eqn: Eqn) -> bool:
    """Returns True for slices: XLA:CPU does not vectorize a loop that slices what it has just read from a stacked array."""
    return eqn.primitive.name == "slice"


def is_spread(eqn: Eqn) -> bool:
    """Returns True for an equation that only spreads a value, which is better done where the result is read."""
    return eqn.primitive.name == "broadcast_in_dim"


@dataclass(frozen=True)
class Moves:
    """What may leave a loop. Contractions, lookups, solvers and draws are named by their first result.

    Nothing leaves a loop with `NOTHING_MOVES`. Functions that take `Moves | None` move all that they can for None.

    Attributes:
        hoist: the results that are computed for all steps before the loop.
        sink: the results that are computed for all steps after the loop.
        accumulate: the positions of the carries that become sums after the loop.
    """

    hoist: frozenset[Var] = frozenset()
    sink: frozenset[Var] = frozenset()
    accumulate: frozenset[int] = frozenset()

    def in_order(self, loop: Loop) -> list[tuple[str, Any]]:
        """Returns all moves, with their fields, in the order of the loop. The order of a set differs between processes."""
        results = jaxprs.results(loop.eqns)
        moves: list[tuple[str, Any]] = [("accumulate", i) for i in sorted(self.accumulate)]
        moves += [("hoist", v) for v in results if v in self.hoist]
        moves += [("sink", v) for v in results if v in self.sink]
        return moves


NOTHING_MOVES = Moves()


class Dependences(NamedTuple):
    """What all splits of a loop have in common: what its values depend on, and which equations pay to move.

    Attributes:
        on_carry: `Loop.sequential`: what cannot be computed before the loop.
        constant_eqns: the equations of constants that are evaluated once.
        const: the constants, and the results of `constant_eqns`.
        heavy: the results of each contraction, lookup, solver and draw that varies, by the first one.
        added: the values that carries that only add, add at each step.
    """

    on_carry: frozenset[Var]
    constant_eqns: tuple[Eqn, ...]
    const: frozenset[Var]
    heavy: Mapping[Var, Sequence[Var]]
    added: Mapping[int, tuple[Atom, ...]]

    @staticmethod
    def of(loop: Loop) -> Dependences:
        varying = loop.sequential | loop.varying
        constant_eqns = _constant_eqns(loop, varying)
        heavy = {e.outvars[0]: e.outvars for e in loop.eqns if primitives.is_heavy(e)}
        return Dependences(
            on_carry=loop.sequential,
            constant_eqns=tuple(constant_eqns),
            const=frozenset((*loop.consts, *jaxprs.results(constant_eqns))),
            heavy={first: results for first, results in heavy.items() if first in varying},
            added=sums.added_to_carries(loop),
        )

    def allowing(self, loop: Loop, moves: Moves | None) -> Dependences:
        """Returns the dependences where heavy equations stay, unless a move names them. They are not computed twice."""
        if moves is None:
            return self
        remaining: list[Var] = []
        for first, results in self.heavy.items():
            if first not in moves.hoist and first not in moves.sink:
                remaining += results
        if not remaining:
            return self
        return self._replace(on_carry=self.on_carry.union(jaxprs.depends(loop.eqns, remaining)))


def _constant_eqns(loop: Loop, varying: Vars) -> list[Eqn]:
    """Returns the equations of constants, except those that only spread a value, which is cheaper where it is used."""
    constant = [e for e in loop.eqns if not jaxprs.any_in(e.outvars, varying)]
    computed = [e for e in constant if e.primitive.name not in ("broadcast_in_dim", "iota")]
    outs = jaxprs.results(computed)
    outs += [a for a in jaxprs.variables(loop.outputs) if a not in varying]
    return jaxprs.needed(constant, outs, set(loop.consts))[0]


def accumulated(
    loop: Loop,
    facts: Dependences,
    available: set[Var],
    moves: Moves | None,
) -> dict[int, tuple[Atom, ...]]:
    """Returns the carries that become sums after the loop, with the values that they add."""
    added = sums.accumulations(facts.added, loop.producers, available)
    if moves is not None:
        added = {i: values for i, values in added.items() if i in moves.accumulate}
    if loop.recomputes:
        stacked = {*available, *jaxprs.variables(loop.ys)}
        added = sums.sums_without_new_stacks(added, loop, stacked)
    return added


def vars_to_hoist(
    loop: Loop,
    facts: Dependences,
    also_hoist: Selects | None,
    moves: Moves | None,
) -> list[Var]:
    """Returns what to compute for all steps before the loop: contractions, and what follows without growing."""
    chosen: dict[Var, None] = {}
    for eqn in loop.eqns:
        first = eqn.outvars[0] if eqn.outvars else None
        if first not in loop.varying or first in facts.on_carry or first in facts.const:
            continue
        operands = jaxprs.inputs(eqn)
        may_hoist = first in facts.heavy and (moves is None or first in moves.hoist)
        follows = (
            jaxprs.any_in(operands, chosen)
            and _bytes(eqn.outvars) <= _bytes(operands)
            and not primitives.is_view(eqn)
        )
        if may_hoist or follows or (also_hoist is not None and also_hoist(eqn)):
            chosen.update(dict.fromkeys(eqn.outvars))
    return list(chosen)


def _bytes(variables: Vars) -> int:
    return sum(map(jaxprs.nbytes, variables))


def vars_to_sink(
    loop: Loop,
    facts: Dependences,
    available: Vars,
    carry_out: Sequence[Atom],
    targets: Vars,
    moves: Moves | None,
) -> set[Var]:
    """Returns what to compute for all steps after the loop: contractions that feed only outputs, and their neighbors."""
    if moves is not None and not moves.sink:
        return set()
    on_carry = facts.on_carry
    base = {*available, *loop.carry}
    needed_by_carry, _ = jaxprs.needed(loop.eqns, carry_out, base, effects=True)
    fixed = set(jaxprs.results(needed_by_carry))
    needed_by_targets, _ = jaxprs.needed(loop.eqns, targets, base)
    live = [e for e in needed_by_targets if jaxprs.any_in(e.outvars, on_carry)]

    # What an equation that cannot move reads cannot move, nor what that reads.
    users = jaxprs.readers(live)
    blocked: set[Var] = set()
    for eqn in reversed(live):
        is_movable = primitives.is_movable(eqn)
        if not is_movable:
            fixed.update(eqn.outvars)
        if not is_movable or jaxprs.any_in(eqn.outvars, blocked):
            blocked.update(jaxprs.inputs(eqn))
    fixed |= blocked

    # Contractions, and what follows from them.
    sunk: set[Var] = set()
    for eqn in live:
        if jaxprs.any_in(eqn.outvars, fixed):
            continue
        first = eqn.outvars[0]
        may_sink = first in facts.heavy and (moves is None or first in moves.sink)
        if may_sink or jaxprs.any_in(jaxprs.inputs(eqn), sunk):
            sunk.update(eqn.outvars)

    # Then what leads to them, as long as the loop does not have to stack more.
    stacked = set(base)
    for eqn in live:
        if jaxprs.any_in(eqn.outvars, sunk):
            stacked.update(v for v in jaxprs.inputs(eqn) if v not in sunk)
    for eqn in reversed(live):
        if jaxprs.any_in(eqn.outvars, fixed) or jaxprs.any_in(eqn.outvars, sunk):
            continue
        if primitives.is_discontinuous(eqn) or not _is_read_only_after(eqn, users, sunk):
            continue
        new = {v for v in jaxprs.inputs(eqn) if v in on_carry and v not in stacked}
        if _bytes(new) <= _bytes(eqn.outvars):
            sunk.update(eqn.outvars)
            stacked.update(new)
    return sunk


def _is_read_only_after(
    eqn: Eqn,
    users: Mapping[Var, list[Eqn]],
    sunk: Vars,
) -> bool:
    """Whether equations read the results, and all of them are computed after the loop."""
    readers: list[Eqn] = []
    for v in eqn.outvars:
        readers += users.get(v, [])
    return bool(readers) and all(jaxprs.any_in(reader.outvars, sunk) for reader in readers)
