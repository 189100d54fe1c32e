"""A loop becomes work before it, a smaller loop, and work after it.

What depends on `xs` alone is computed for all steps before the loop. What only feeds outputs is computed for all steps
after it. A carry that only adds (`new = old + v`) becomes one sum over time after it. "For all steps" means `jax.vmap` over
time, which turns T small contractions into one large one.

Shapes: T time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, primitives
from jrnn.loops.ir import Loop, Results, strict_passes
from jrnn.loops.passes import sums
from jrnn.loops.passes.sums import Contract, dot_as_written
from jrnn.loops.passes.transposed_weights import transposed

Vars = Collection[Var]
Run = Callable[[Sequence[Any], Sequence[Any], Sequence[Any], Any], Results]


@dataclass(frozen=True)
class SplitLoop:
    """A loop split into parts.

    Attributes:
        loop: the whole loop.
        residual: the loop that remains; its inputs and ys are variables of `loop`.
        constant_eqns: equations of constants, evaluated once.
        hoisted_eqns: equations evaluated for all steps before the residual loop, to compute `hoisted_vars`.
        sunk_eqns: equations evaluated for all steps after the residual loop, to compute `sunk_vars`.
        accumulated: the positions of the carries that became sums, with the values that they add at each step.
        sum_eqns: equations of these values that are computed as sums over time, from stacks.
        contract: computes the contractions over time of these sums.
    """

    loop: Loop
    residual: Loop
    constant_eqns: tuple[Any, ...]
    hoisted_eqns: tuple[Any, ...]
    hoisted_vars: tuple[Var, ...]
    sunk_eqns: tuple[Any, ...]
    sunk_vars: tuple[Var, ...]
    accumulated: dict[int, tuple[Atom, ...]]
    sum_eqns: tuple[Any, ...]
    contract: Contract

    def run(
        self,
        consts: Sequence[Any],
        init: Sequence[Any],
        xs: Sequence[Any],
        length: Any,
        run_residual: Run | None = None,
    ) -> Results:
        """Runs `length` steps of the whole loop; `run_residual` runs the residual loop, by default with `jax.lax.scan`."""
        return self.run_with(self.constants(consts), init, xs, length, run_residual)

    def constants(self, consts: Sequence[Any]) -> Env:
        """Returns the values that are the same at all steps."""

        def rule(eqn: Eqn, *operands: Any) -> list[Any] | None:
            is_transpose = eqn.primitive.name == "transpose" and tuple(
                eqn.params["permutation"]
            ) == (1, 0)
            is_read_by_core = eqn.outvars[0] in self.residual.consts  # XLA folds others
            return [transposed(*operands)] if is_transpose and is_read_by_core else None

        return jaxprs.evaluate(self.constant_eqns, dict(zip(self.loop.consts, consts)), rule)

    def run_with(
        self,
        env: Env,
        init: Sequence[Any],
        xs: Sequence[Any],
        length: Any,
        run_residual: Run | None = None,
    ) -> Results:
        """Runs `length` steps with the values of `constants`, which some callers compute once for several runs."""
        loop = self.loop
        env = dict(env)
        stacked = dict(zip(loop.xs, xs))
        over_time(self.hoisted_eqns, self.hoisted_vars, env, stacked)

        positions = [i for i in range(len(loop.carry)) if i not in self.accumulated]
        core_init = [init[i] for i in positions]
        last, core_ys = (run_residual or self.residual.run)(
            [env[v] for v in self.residual.consts],
            core_init,
            [stacked[v] for v in self.residual.xs],
            length,
        )
        stacked.update(zip(self.residual.ys, core_ys))
        for v, out, first in zip(self.residual.carry, self.residual.carry_out, core_init):
            if v not in stacked and jaxprs.is_in(out, stacked):
                stacked[v] = jaxprs.shifted(stacked[out], first, loop.reverse)
        over_time(self.sunk_eqns, self.sunk_vars, env, stacked)

        carry = dict(zip(positions, last))
        producers = jaxprs.producers(loop.eqns) if self.accumulated else {}
        for i, values in self.accumulated.items():
            wide = sums.accumulator_dtype(loop.carry[i].aval.dtype)
            accumulator = jnp.asarray(init[i], wide)
            for v in values:
                accumulator = accumulator + sums.time_sum(
                    v, producers, stacked, env, length, wide, self.contract
                )
            carry[i] = accumulator.astype(loop.carry[i].aval.dtype)

        ys = [jaxprs.stack(atom, env, stacked, length) for atom in loop.ys]
        return [carry[i] for i in range(len(loop.carry))], ys


def over_time(eqns: Sequence[Eqn], outs: Sequence[Var], env: Env, stacked: Env) -> None:
    """Evaluates equations for all steps and adds `outs` to `stacked`, which holds [T, ...]; `env` holds constants."""
    stacked_here = dict(stacked)
    jaxprs.over_time(eqns, outs, dict(env), stacked_here)
    stacked.update({v: stacked_here[v] for v in outs if v in stacked_here})


def is_computation(eqn: Eqn) -> bool:
    """Returns True for all but views: what to hoist where coefficients are better computed for all steps."""
    return not primitives.is_view(eqn)


def is_slice(eqn: Eqn) -> bool:
    """Returns True for slices: XLA:CPU does not vectorize a loop that slices what it has just read from a stack."""
    return eqn.primitive.name == "slice"


@dataclass(frozen=True)
class Moves:
    """What may leave a loop. Contractions, lookups, solvers and draws are named by their first result.

    Attributes:
        hoist: those computed for all steps before the loop.
        sink: those computed for all steps after the loop.
        accumulate: the positions of the carries that become sums after the loop.
    """

    hoist: frozenset[Var] = frozenset()
    sink: frozenset[Var] = frozenset()
    accumulate: frozenset[int] = frozenset()

    def in_order(self, loop: Loop) -> list[tuple[str, Any]]:
        """Returns all moves, with their fields, in the order of the loop. The order of a set differs between processes."""
        results = [v for eqn in loop.eqns for v in eqn.outvars]
        moves: list[tuple[str, Any]] = [("accumulate", i) for i in sorted(self.accumulate)]
        moves += [("hoist", v) for v in results if v in self.hoist]
        moves += [("sink", v) for v in results if v in self.sink]
        return moves


class Dependences(NamedTuple):
    """What all splits of a loop have in common."""

    immovable: frozenset[Var]  # the results of equations that are not movable
    sequential: frozenset[
        Var
    ]  # depends on these or on the carry: it cannot be known before the loop
    varying: frozenset[Var]  # depends on any of these or on the inputs
    constant_eqns: tuple[Eqn, ...]  # the equations of constants
    known: frozenset[Var]  # the constants, and what is computed once
    heavy: tuple[
        tuple[Var, ...], ...
    ]  # the results of each contraction, lookup, solver and draw that varies
    producers: Mapping[Var, Eqn]
    added: Mapping[int, tuple[Atom, ...]]  # what carries that only add, add

    @staticmethod
    def of(loop: Loop) -> Dependences:
        eqns = loop.eqns
        immovable = frozenset(v for e in eqns if not primitives.is_movable(e) for v in e.outvars)
        sequential = frozenset(jaxprs.depends(eqns, (*loop.carry, *immovable)))
        varying = sequential | jaxprs.depends(eqns, (*loop.carry, *loop.xs))
        heavy = tuple(
            tuple(e.outvars) for e in eqns if primitives.is_heavy(e) and e.outvars[0] in varying
        )
        constant_eqns = tuple(_constant_eqns(loop, varying))
        known = frozenset((*loop.consts, *(v for e in constant_eqns for v in e.outvars)))
        return Dependences(
            immovable,
            sequential,
            varying,
            constant_eqns,
            known,
            heavy,
            jaxprs.producers(eqns),
            sums.added_to_carries(loop),
        )


def split(
    loop: Loop,
    also_hoist: Callable[[Any], bool] = lambda eqn: False,
    contract: Contract = dot_as_written,
    moves: Moves | None = None,
    parts: bool = False,
    facts: Dependences | None = None,
) -> SplitLoop:
    """Splits a loop. If it recomputes values, only the operands of contractions after it are stacked.

    Args:
        loop: the loop.
        also_hoist: selects equations of `xs` to hoist besides contractions, lookups, solvers and what follows from them.
        contract: computes contractions over time.
        moves: what may leave the loop; None for all that can.
        parts: `contract` takes a list of stacks for their concatenation along the last axis.
        facts: those of the loop, if it is split several times.
    """
    eqns = loop.eqns
    facts = facts or Dependences.of(loop)
    sequential = facts.sequential
    known = facts.known
    producers = facts.producers
    if (
        moves is not None
    ):  # what is heavy, and may not leave the loop, is not computed a second time for all steps
        may_move = moves.hoist | moves.sink
        stays = (results for results in facts.heavy if results[0] not in may_move)
        not_moved = list(itertools.chain.from_iterable(stays))
        sequential = sequential.union(jaxprs.depends(eqns, not_moved)) if not_moved else sequential
    hoisted_vars = (
        [] if loop.recomputes else _vars_to_hoist(loop, facts, sequential, also_hoist, moves)
    )
    free = {*known, *loop.xs, *hoisted_vars}

    accumulated = sums.accumulations(facts.added, producers, free)
    if moves is not None:
        accumulated = {i: values for i, values in accumulated.items() if i in moves.accumulate}
    if loop.recomputes:
        accumulated = sums.sums_without_new_stacks(
            accumulated, loop, {*free, *jaxprs.variables(loop.ys)}
        )
    positions = [i for i in range(len(loop.carry)) if i not in accumulated]
    carry = [loop.carry[i] for i in positions]
    carry_out = [loop.carry_out[i] for i in positions]
    targets = jaxprs.variables(loop.ys)
    common = sums.common_parts(loop) if parts and accumulated else sums.NO_PARTS
    targets += sums.sum_operands(
        [v for values in accumulated.values() for v in values],
        producers,
        free | set(targets),
        common,
    )
    targets = list(dict.fromkeys(targets))

    after = _vars_to_sink(loop, facts, sequential, free, carry_out, targets, moves)
    sunk_eqns, read_after = jaxprs.needed(eqns, targets, free | (sequential - after))
    new_carries = dict(zip(loop.carry, loop.carry_out))
    stacked = {*targets, *(v for v in read_after if v not in new_carries)}
    to_stack = [
        _stacked_instead(v, new_carries, known, stacked) for v in read_after if v in sequential
    ]
    ys = list(dict.fromkeys(v for v in to_stack if v not in free))
    body, _ = jaxprs.needed(eqns, [*carry_out, *ys], free | set(carry), effects=True)
    read = dict.fromkeys([*jaxprs.free_variables(body), *jaxprs.variables(carry_out)])
    core = replace(
        loop,
        eqns=tuple(body),
        consts=tuple(v for v in read if v in known),
        carry=tuple(carry),
        xs=tuple(v for v in read if v in free and v not in known),
        carry_out=tuple(carry_out),
        ys=tuple(ys),
    )
    if strict_passes.value:
        core.verify()
    read_hoisted = {*core.xs, *read_after}
    hoisted_vars = [v for v in hoisted_vars if v in read_hoisted]
    hoisted_eqns, _ = jaxprs.needed(eqns, hoisted_vars, known.union(loop.xs))
    computed_after = jaxprs.producers(sunk_eqns)
    sunk_vars = [v for v in targets if v not in free and v in computed_after]
    sum_eqns, _ = jaxprs.needed(
        eqns, [v for values in accumulated.values() for v in values], {*free, *loop.carry, *targets}
    )
    parts = (
        facts.constant_eqns,
        tuple(hoisted_eqns),
        tuple(hoisted_vars),
        tuple(sunk_eqns),
        tuple(sunk_vars),
    )
    return SplitLoop(loop, core, *parts, accumulated, tuple(sum_eqns), contract)


def movable(full_split: SplitLoop, floating_sums: bool) -> Moves:
    """Returns all that can leave a loop.

    Args:
        full_split: the split that moves everything.
        floating_sums: False to keep the order of floating-point sums; integers have none.
    """

    def heavy(eqns: tuple) -> frozenset:
        return frozenset(e.outvars[0] for e in eqns if primitives.is_heavy(e))

    carry = full_split.loop.carry
    accumulated = (
        i
        for i in full_split.accumulated
        if floating_sums or jnp.issubdtype(carry[i].aval.dtype, jnp.integer)
    )
    return Moves(
        heavy(full_split.hoisted_eqns), heavy(full_split.sunk_eqns), frozenset(accumulated)
    )


def _constant_eqns(loop: Loop, varying: Collection[Var]) -> list[Any]:
    """Returns the equations of constants, except those that only spread a value, which is cheaper where it is used."""
    constant = [e for e in loop.eqns if not any(v in varying for v in e.outvars)]
    outs = [
        v
        for e in constant
        if e.primitive.name not in ("broadcast_in_dim", "iota")
        for v in e.outvars
    ]
    outs += [a for a in jaxprs.variables(loop.outputs) if a not in varying]
    return jaxprs.needed(constant, outs, set(loop.consts))[0]


def _vars_to_hoist(
    loop: Loop,
    facts: Dependences,
    sequential: Vars,
    also_hoist: Callable[[Any], bool],
    moves: Moves | None,
) -> list[Var]:
    """Returns what to compute for all steps before the loop: contractions, and what follows without growing."""
    chosen: dict[Var, None] = {}
    for eqn in loop.eqns:
        if any(v in sequential or v in facts.known or v not in facts.varying for v in eqn.outvars):
            continue
        grows = sum(map(jaxprs.nbytes, eqn.outvars)) > sum(map(jaxprs.nbytes, jaxprs.inputs(eqn)))
        follows = (
            any(v in chosen for v in jaxprs.inputs(eqn))
            and not grows
            and not primitives.is_view(eqn)
        )
        heavy = primitives.is_heavy(eqn) and (moves is None or eqn.outvars[0] in moves.hoist)
        if heavy or follows or also_hoist(eqn):
            chosen.update(dict.fromkeys(eqn.outvars))
    return list(chosen)


def _vars_to_sink(
    loop: Loop,
    facts: Dependences,
    sequential: Vars,
    free: Vars,
    carry_out: Sequence[Atom],
    targets: Vars,
    moves: Moves | None,
) -> set[Var]:
    """Returns what to compute for all steps after the loop: contractions that feed only outputs, and their neighbors."""
    if moves is not None and not moves.sink:
        return set()
    base = {*free, *loop.carry}
    needed_by_carry = {
        v for e in jaxprs.needed(loop.eqns, carry_out, base, effects=True)[0] for v in e.outvars
    }
    live = [
        e
        for e in jaxprs.needed(loop.eqns, targets, base)[0]
        if any(v in sequential for v in e.outvars)
    ]
    users: dict[Var, list[Any]] = {}
    blocked: set[Var] = set()  # read by an equation that cannot move
    for eqn in reversed(live):
        for v in jaxprs.inputs(eqn):
            users.setdefault(v, []).append(eqn)
        if any(v in facts.immovable or v in blocked for v in eqn.outvars):
            blocked.update(jaxprs.inputs(eqn))

    def can_move(eqn: Eqn) -> bool:
        return not any(
            v in needed_by_carry or v in blocked or v in facts.immovable for v in eqn.outvars
        )

    after: set[Var] = set()
    for eqn in live:
        follows = any(v in after for v in jaxprs.inputs(eqn))
        heavy = primitives.is_heavy(eqn) and (moves is None or eqn.outvars[0] in moves.sink)
        if can_move(eqn) and (heavy or follows):
            after.update(eqn.outvars)
    # Then move what leads to them, as long as the loop does not have to stack more.
    feeding = [e for e in live if any(o in after for o in e.outvars)]
    stacked = {*base, *(v for e in feeding for v in jaxprs.inputs(e) if v not in after)}
    for eqn in reversed(live):
        eqn_users = [u for v in eqn.outvars for u in users.get(v, [])]
        # Discontinuous equations stay: their operands may be computed both in the loop and after it, rounded differently.
        if (
            not can_move(eqn)
            or any(v in after for v in eqn.outvars)
            or primitives.is_discontinuous(eqn)
        ):
            continue
        if eqn_users and all(any(o in after for o in u.outvars) for u in eqn_users):
            reads = {v for v in jaxprs.inputs(eqn) if v in sequential and v not in stacked}
            if sum(map(jaxprs.nbytes, reads)) <= sum(map(jaxprs.nbytes, eqn.outvars)):
                after.update(eqn.outvars)
                stacked.update(reads)
    return after


def _stacked_instead(
    v: Var, new_carries: Mapping[Var, Atom], known: Collection[Var], stacked: Collection[Var]
) -> Var:
    """Returns the new value of a carry `v` if that is stacked: shifted by one step, that stack is the stack of `v`."""
    out = new_carries.get(v)
    if out is None or not jaxprs.is_in(out, stacked):
        return v
    return v if out in known or out in new_carries else out
