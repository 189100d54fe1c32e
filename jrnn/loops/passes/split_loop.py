"""Splits a loop into work before it, a residual loop, and work after it.

The problem. XLA runs a loop step by step: an LSTM multiplies each input [N, D] with W in a product of its own, and its
reverse loop adds `x[t]^T dz[t]` to the gradient of W at each step. T small products take longer than one large product, and
neither of these products has to be in the loop. XLA hoists what does not change from step to step, and nothing else.

    for t:                                      a = xs @ W                   # hoisted: one product of [T * N, D]
        z = x[t] @ W + h @ U                    for t:                       # the residual loop
        h = tanh(z)                 becomes         h = tanh(a[t] + h @ U)
        y[t] = h @ V                                hs[t] = h
        s = s + g(h, x[t])                      ys = hs @ V                  # sunk: one product of [T * N, H]
                                                s = s + sum over t of g      # accumulated: one sum over time

What an equation depends on decides where it may run:

    const       constants alone                         once, before the loop
    per_step    constants and this step's inputs        for all steps before the loop (hoist)
    on_carry    the carry, or a result that must be     in the loop; for all steps after it, if only outputs
                computed in its place                   and sums read the result (sink, accumulate)

"For all steps" means `jax.vmap` over time. An equation that moves makes others worth moving: what follows from it without
growing, and what leads to it, as long as the loop does not have to stack more.

The limits. A value that crosses the border of the residual loop is stacked, [T, ...]: it costs memory, and time to write
and to read. The costs decide whether a move pays (`strategies/try_split.py`); this module only makes the split.
Discontinuous equations are not computed a second time, because a value that is rounded differently could take the other
branch. A reverse loop that recomputes values (`Loop.recomputes`) stacks the operands of contractions alone: the caller
asked for less memory.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, primitives
from jrnn.loops.ir import Loop, Results, RunLoop, strict_passes
from jrnn.loops.passes import sums
from jrnn.loops.passes.sums import Contract, dot_as_written
from jrnn.loops.passes.transposed_weights import transposed

Vars = Collection[Var]
Length = int | Array  # T


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
        sum_eqns: equations of these values that are computed as sums over time, from stacked arrays.
        contract: computes the contractions over time of these sums.
    """

    loop: Loop
    residual: Loop
    constant_eqns: tuple[Eqn, ...]
    hoisted_eqns: tuple[Eqn, ...]
    hoisted_vars: tuple[Var, ...]
    sunk_eqns: tuple[Eqn, ...]
    sunk_vars: tuple[Var, ...]
    accumulated: dict[int, tuple[Atom, ...]]
    sum_eqns: tuple[Eqn, ...]
    contract: Contract

    def run(
        self,
        consts: Sequence[Array],
        init: Sequence[Array],
        xs: Sequence[Array],
        length: Length,
        run_residual: RunLoop | None = None,
    ) -> Results:
        """Runs `length` steps of the whole loop. `run_residual` runs the residual loop, by default with `jax.lax.scan`."""
        return self.run_with(self.constants(consts), init, xs, length, run_residual)

    def constants(self, consts: Sequence[Array]) -> Env:
        """Computes the values that are the same at all steps."""

        def transpose_for_loop(eqn: Eqn, *operands: Array) -> list[Array] | None:
            if eqn.primitive.name != "transpose" or tuple(eqn.params["permutation"]) != (1, 0):
                return None
            if eqn.outvars[0] not in self.residual.consts:  # XLA folds others
                return None
            return [transposed(*operands)]

        env = dict(zip(self.loop.consts, consts))
        return jaxprs.evaluate(self.constant_eqns, env, transpose_for_loop)

    def run_with(
        self,
        env: Env,
        init: Sequence[Array],
        xs: Sequence[Array],
        length: Length,
        run_residual: RunLoop | None = None,
    ) -> Results:
        """Runs `length` steps with the values of `constants`, which some callers compute once for several runs."""
        loop = self.loop
        env = dict(env)
        stacked = dict(zip(loop.xs, xs))
        over_time(self.hoisted_eqns, self.hoisted_vars, env, stacked)

        # The residual loop.
        run_residual = run_residual or self.residual.run
        positions = _others(loop, self.accumulated)
        residual_init = [init[i] for i in positions]
        last, residual_ys = run_residual(
            [env[v] for v in self.residual.consts],
            residual_init,
            [stacked[v] for v in self.residual.xs],
            length,
        )
        stacked.update(zip(self.residual.ys, residual_ys))
        carries = zip(self.residual.carry, self.residual.carry_out, residual_init)
        for v, out, first in carries:
            if v not in stacked and jaxprs.is_in(out, stacked):
                stacked[v] = jaxprs.shifted(stacked[out], first, loop.reverse)

        # What follows it.
        over_time(self.sunk_eqns, self.sunk_vars, env, stacked)
        carry = dict(zip(positions, last))
        producers = jaxprs.producers(loop.eqns) if self.accumulated else {}
        for i, values in self.accumulated.items():
            dtype = loop.carry[i].aval.dtype
            wide = sums.accumulator_dtype(dtype)
            accumulator = jnp.asarray(init[i], wide)
            for v in values:
                accumulator = accumulator + sums.time_sum(
                    v, producers, stacked, env, length, wide, self.contract
                )
            carry[i] = accumulator.astype(dtype)

        ys = [jaxprs.stack(atom, env, stacked, length) for atom in loop.ys]
        return [carry[i] for i in range(len(loop.carry))], ys


def over_time(eqns: Sequence[Eqn], outs: Sequence[Var], env: Env, stacked: Env) -> None:
    """Evaluates equations for all steps and adds `outs` to `stacked`, which holds [T, ...]; `env` holds constants."""
    stacked_here = dict(stacked)
    jaxprs.over_time(eqns, outs, dict(env), stacked_here)
    for v in outs:
        if v in stacked_here:
            stacked[v] = stacked_here[v]


def is_computation(eqn: Eqn) -> bool:
    """Returns True for all but views: what to hoist where coefficients are better computed for all steps."""
    return not primitives.is_view(eqn)


def is_slice(eqn: Eqn) -> bool:
    """Returns True for slices: XLA:CPU does not vectorize a loop that slices what it has just read from a stacked array."""
    return eqn.primitive.name == "slice"


def _nothing(eqn: Eqn) -> bool:
    """Selects no equation."""
    return False


@dataclass(frozen=True)
class Moves:
    """What may leave a loop. Contractions, lookups, solvers and draws are named by their first result.

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


class Dependences(NamedTuple):
    """What the values of a step depend on: the same for all splits of a loop.

    Attributes:
        immovable: the results of equations that are not movable.
        on_carry: depends on the carry or on an immovable result, and so cannot be computed before the loop.
        varying: depends on the carry, an immovable result or this step's inputs. Without `on_carry`: per step.
        constant_eqns: the equations of constants that are evaluated once.
        const: the constants, and the results of `constant_eqns`.
        heavy: the results of each contraction, lookup, solver and draw that varies.
        producers: the equation of each variable.
        added: the values that carries that only add, add at each step.
    """

    immovable: frozenset[Var]
    on_carry: frozenset[Var]
    varying: frozenset[Var]
    constant_eqns: tuple[Eqn, ...]
    const: frozenset[Var]
    heavy: tuple[tuple[Var, ...], ...]
    producers: Mapping[Var, Eqn]
    added: Mapping[int, tuple[Atom, ...]]

    @staticmethod
    def of(loop: Loop) -> Dependences:
        eqns = loop.eqns
        fixed_eqns = [e for e in eqns if not primitives.is_movable(e)]
        immovable = frozenset(jaxprs.results(fixed_eqns))
        on_carry = frozenset(jaxprs.depends(eqns, (*loop.carry, *immovable)))
        varying = on_carry | jaxprs.depends(eqns, (*loop.carry, *loop.xs))
        heavy_eqns = filter(primitives.is_heavy, eqns)
        constant_eqns = tuple(_constant_eqns(loop, varying))
        return Dependences(
            immovable=immovable,
            on_carry=on_carry,
            varying=varying,
            constant_eqns=constant_eqns,
            const=frozenset((*loop.consts, *jaxprs.results(constant_eqns))),
            heavy=tuple(tuple(e.outvars) for e in heavy_eqns if e.outvars[0] in varying),
            producers=jaxprs.producers(eqns),
            added=sums.added_to_carries(loop),
        )


def split(
    loop: Loop,
    also_hoist: Callable[[Eqn], bool] = _nothing,
    contract: Contract = dot_as_written,
    moves: Moves | None = None,
    joins_parts: bool = False,
    dependences: Dependences | None = None,
) -> SplitLoop:
    """Splits a loop. If it recomputes values, only the operands of contractions after it are stacked.

    Args:
        loop: the loop.
        also_hoist: selects equations of `xs` to hoist besides contractions, lookups, solvers and what follows from them.
        contract: computes contractions over time.
        moves: what may leave the loop; None for all that can.
        joins_parts: whether `contract` also takes a list of stacked parts, for their concatenation along the last axis.
        dependences: what the values depend on, if the loop is split several times.
    """
    eqns = loop.eqns
    facts = dependences or Dependences.of(loop)
    on_carry = facts.on_carry
    if moves is not None:
        # Heavy equations that may not leave the loop are not computed a second time for all steps.
        remaining = _remaining_heavy(facts, moves)
        on_carry = on_carry.union(jaxprs.depends(eqns, remaining)) if remaining else on_carry

    # Before the loop.
    hoisted_vars: list[Var] = []
    if not loop.recomputes:
        hoisted_vars = _vars_to_hoist(loop, facts, on_carry, also_hoist, moves)
    available = {*facts.const, *loop.xs, *hoisted_vars}

    # What sums and outputs read after the loop, and what of it is computed there.
    accumulated = _accumulated(loop, facts, available, moves)
    positions = _others(loop, accumulated)
    carry = [loop.carry[i] for i in positions]
    carry_out = [loop.carry_out[i] for i in positions]
    added_values = [v for values in accumulated.values() for v in values]
    targets = jaxprs.variables(loop.ys)
    common = sums.common_parts(loop) if joins_parts and accumulated else sums.NO_PARTS
    targets += sums.sum_operands(added_values, facts.producers, available | set(targets), common)
    targets = list(dict.fromkeys(targets))
    sunk = _vars_to_sink(loop, facts, on_carry, available, carry_out, targets, moves)
    sunk_eqns, read_after = jaxprs.needed(eqns, targets, available | (on_carry - sunk))

    # The residual loop stacks what is read after it.
    new_carries = dict(zip(loop.carry, loop.carry_out))
    stacked = {*targets, *(v for v in read_after if v not in new_carries)}
    ys: dict[Var, None] = {}
    for v in read_after:
        if v in on_carry:
            v = _stacked_instead(v, new_carries, facts.const, stacked)
            if v not in available:
                ys[v] = None
    body, _ = jaxprs.needed(eqns, [*carry_out, *ys], available | set(carry), effects=True)
    read = dict.fromkeys([*jaxprs.free_variables(body), *jaxprs.variables(carry_out)])
    residual = replace(
        loop,
        eqns=tuple(body),
        consts=tuple(v for v in read if v in facts.const),
        carry=tuple(carry),
        xs=tuple(v for v in read if v in available and v not in facts.const),
        carry_out=tuple(carry_out),
        ys=tuple(ys),
    )
    if strict_passes.value:
        residual.verify()

    # The equations of the other parts.
    read_hoisted = {*residual.xs, *read_after}
    hoisted_vars = [v for v in hoisted_vars if v in read_hoisted]
    hoisted_eqns, _ = jaxprs.needed(eqns, hoisted_vars, facts.const.union(loop.xs))
    computed_after = jaxprs.producers(sunk_eqns)
    sunk_vars = tuple(v for v in targets if v not in available and v in computed_after)
    sum_eqns, _ = jaxprs.needed(eqns, added_values, {*available, *loop.carry, *targets})
    return SplitLoop(
        loop=loop,
        residual=residual,
        constant_eqns=facts.constant_eqns,
        hoisted_eqns=tuple(hoisted_eqns),
        hoisted_vars=tuple(hoisted_vars),
        sunk_eqns=tuple(sunk_eqns),
        sunk_vars=sunk_vars,
        accumulated=accumulated,
        sum_eqns=tuple(sum_eqns),
        contract=contract,
    )


def movable(full_split: SplitLoop, floating_sums: bool) -> Moves:
    """Returns all that can leave a loop.

    Args:
        full_split: the split that moves everything.
        floating_sums: False to keep the order of floating-point sums; integers have none.
    """
    accumulated = set()
    for i in full_split.accumulated:
        dtype = full_split.loop.carry[i].aval.dtype
        if floating_sums or jnp.issubdtype(dtype, jnp.integer):
            accumulated.add(i)
    return Moves(
        hoist=_first_results(full_split.hoisted_eqns),
        sink=_first_results(full_split.sunk_eqns),
        accumulate=frozenset(accumulated),
    )


def _first_results(eqns: Sequence[Eqn]) -> frozenset[Var]:
    """The names of the heavy equations in `Moves`."""
    return frozenset(e.outvars[0] for e in eqns if primitives.is_heavy(e))


def _others(loop: Loop, accumulated: Mapping[int, tuple[Atom, ...]]) -> list[int]:
    """The positions of the carries that stay in the loop."""
    return [i for i in range(len(loop.carry)) if i not in accumulated]


def _constant_eqns(loop: Loop, varying: Vars) -> list[Eqn]:
    """Returns the equations of constants, except those that only spread a value, which is cheaper where it is used."""
    constant = [e for e in loop.eqns if not jaxprs.any_in(e.outvars, varying)]
    computed = [e for e in constant if e.primitive.name not in ("broadcast_in_dim", "iota")]
    outs = jaxprs.results(computed)
    outs += [a for a in jaxprs.variables(loop.outputs) if a not in varying]
    return jaxprs.needed(constant, outs, set(loop.consts))[0]


def _remaining_heavy(facts: Dependences, moves: Moves) -> list[Var]:
    """The results of heavy equations that may not leave the loop."""
    remaining: list[Var] = []
    for results in facts.heavy:
        if results[0] not in moves.hoist and results[0] not in moves.sink:
            remaining += results
    return remaining


def _accumulated(
    loop: Loop, facts: Dependences, available: set[Var], moves: Moves | None
) -> dict[int, tuple[Atom, ...]]:
    """Returns the carries that become sums after the loop, with the values that they add."""
    accumulated = sums.accumulations(facts.added, facts.producers, available)
    if moves is not None:
        accumulated = {i: values for i, values in accumulated.items() if i in moves.accumulate}
    if loop.recomputes:
        stacked = {*available, *jaxprs.variables(loop.ys)}
        accumulated = sums.sums_without_new_stacks(accumulated, loop, stacked)
    return accumulated


def _vars_to_hoist(
    loop: Loop,
    facts: Dependences,
    on_carry: Vars,
    also_hoist: Callable[[Eqn], bool],
    moves: Moves | None,
) -> list[Var]:
    """Returns what to compute for all steps before the loop: contractions, and what follows without growing."""
    chosen: dict[Var, None] = {}
    for eqn in loop.eqns:
        if any(v in on_carry or v in facts.const or v not in facts.varying for v in eqn.outvars):
            continue
        operands = jaxprs.inputs(eqn)
        may_hoist = primitives.is_heavy(eqn) and (moves is None or eqn.outvars[0] in moves.hoist)
        follows = (
            jaxprs.any_in(operands, chosen)
            and _bytes(eqn.outvars) <= _bytes(operands)
            and not primitives.is_view(eqn)
        )
        if may_hoist or follows or also_hoist(eqn):
            chosen.update(dict.fromkeys(eqn.outvars))
    return list(chosen)


def _bytes(variables: Vars) -> int:
    return sum(map(jaxprs.nbytes, variables))


def _vars_to_sink(
    loop: Loop,
    facts: Dependences,
    on_carry: Vars,
    available: Vars,
    carry_out: Sequence[Atom],
    targets: Vars,
    moves: Moves | None,
) -> set[Var]:
    """Returns what to compute for all steps after the loop: contractions that feed only outputs, and their neighbors."""
    if moves is not None and not moves.sink:
        return set()
    base = {*available, *loop.carry}
    needed_by_carry, _ = jaxprs.needed(loop.eqns, carry_out, base, effects=True)
    fixed = {*facts.immovable, *jaxprs.results(needed_by_carry)}
    needed_by_targets, _ = jaxprs.needed(loop.eqns, targets, base)
    live = [e for e in needed_by_targets if jaxprs.any_in(e.outvars, on_carry)]

    # What an equation that cannot move reads cannot move, nor what that reads.
    users: dict[Var, list[Eqn]] = {}
    blocked: set[Var] = set()
    for eqn in reversed(live):
        for v in jaxprs.inputs(eqn):
            users.setdefault(v, []).append(eqn)
        if jaxprs.any_in(eqn.outvars, facts.immovable) or jaxprs.any_in(eqn.outvars, blocked):
            blocked.update(jaxprs.inputs(eqn))
    fixed |= blocked

    # Contractions, and what follows from them.
    sunk: set[Var] = set()
    for eqn in live:
        if jaxprs.any_in(eqn.outvars, fixed):
            continue
        may_sink = primitives.is_heavy(eqn) and (moves is None or eqn.outvars[0] in moves.sink)
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
        # Discontinuous equations stay: their operands may be computed both in the loop and after it, rounded differently.
        if primitives.is_discontinuous(eqn):
            continue
        if not _is_read_only_after(eqn, users, sunk):
            continue
        new = {v for v in jaxprs.inputs(eqn) if v in on_carry and v not in stacked}
        if _bytes(new) <= _bytes(eqn.outvars):
            sunk.update(eqn.outvars)
            stacked.update(new)
    return sunk


def _is_read_only_after(eqn: Eqn, users: Mapping[Var, list[Eqn]], sunk: Vars) -> bool:
    """Whether equations read the results, and all of them are computed after the loop."""
    readers: list[Eqn] = []
    for v in eqn.outvars:
        readers += users.get(v, [])
    return bool(readers) and all(jaxprs.any_in(reader.outvars, sunk) for reader in readers)


def _stacked_instead(v: Var, new_carries: Mapping[Var, Atom], const: Vars, stacked: Vars) -> Var:
    """Returns the new value of a carry `v` if that is stacked: shifted by one step, that stack is the stack of `v`."""
    out = new_carries.get(v)
    if out is None or not jaxprs.is_in(out, stacked):
        return v
    return v if out in const or out in new_carries else out
