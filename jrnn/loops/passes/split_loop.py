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

"For all steps" means `jax.vmap` over time. `Loop.on_carry`, `Loop.per_step` and `Loop.varying` are this analysis, made once
for a loop. An equation that moves makes others worth moving: what follows from it without growing, and what leads to it, as
long as the loop does not have to stack more (`moves.py`).

There is one way to divide a loop (`divide`), which makes the residual loop by `Loop.part`, and one way to run the parts
(`SplitLoop.run`). What moves is chosen by three callers:

- `split`: what pays, which the strategies compare by costs (`strategies/try_split.py`);
- `split_around_carry`: all but what is between the old and the new carry, for the chunks of accelerators;
- the kernel for CPUs: what it cannot run (`kernels/native/program.py`).

Others need the analysis or `Loop.part` alone. `canonical/invariants.py` and `canonical/lookups.py` rewrite a loop that JAX
differentiates, and must keep its outputs; `canonical/random_keys.py` makes two loops; groups of carries that are solved one
after the other add to one set of stacked values (`affine/carries.py`); the kernel for affine loops computes a part of the
step itself, for tiles of steps (`kernels/native/affine_call.py`).

The limits. A value that crosses the border of the residual loop is stacked, [T, ...]: it costs memory, and time to write
and to read. A reverse loop that recomputes values (`Loop.recomputes`) stacks the operands of contractions alone: the caller
asked for less memory.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, primitives
from jrnn.loops.ir import Length, Loop, Results, RunLoop, Values, strict_passes
from jrnn.loops.passes import sums
from jrnn.loops.passes.moves import (
    Dependences,
    Moves,
    Selects,
    Vars,
    accumulated,
    is_spread,
    vars_to_hoist,
    vars_to_sink,
)
from jrnn.loops.passes.sums import Contract, dot_as_written
from jrnn.loops.passes.transposed_weights import transposed


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
        shifted: carries that are read after the loop, as the stacked new carries, shifted by one step.
    """

    loop: Loop
    residual: Loop
    constant_eqns: tuple[Eqn, ...]
    hoisted_eqns: tuple[Eqn, ...]
    hoisted_vars: tuple[Var, ...]
    sunk_eqns: tuple[Eqn, ...]
    sunk_vars: tuple[Var, ...]
    accumulated: dict[int, tuple[Atom, ...]] = field(default_factory=dict)
    sum_eqns: tuple[Eqn, ...] = ()
    contract: Contract = dot_as_written
    shifted: tuple[Var, ...] = ()

    def run(
        self,
        consts: Values,
        init: Values,
        xs: Values,
        length: Length,
        run_residual: RunLoop | None = None,
    ) -> Results:
        """Runs `length` steps of the whole loop. `run_residual` runs the residual loop, by default with `jax.lax.scan`."""
        return self.run_with(self.constants(consts), init, xs, length, run_residual)

    def constants(self, consts: Values) -> Env:
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
        init: Values,
        xs: Values,
        length: Length,
        run_residual: RunLoop | None = None,
    ) -> Results:
        """Runs `length` steps with the values of `constants`, which some callers compute once for several runs."""
        loop = self.loop
        env = dict(env)
        stacked = dict(zip(loop.xs, xs))
        _over_time(self.hoisted_eqns, self.hoisted_vars, env, stacked)

        # The residual loop.
        positions = _others(loop, self.accumulated)
        residual = self.residual
        residual_init = jaxprs.take(init, positions)
        run_residual = run_residual or residual.run
        last, residual_ys = run_residual(
            jaxprs.take(env, residual.consts),
            residual_init,
            jaxprs.take(stacked, residual.xs),
            length,
        )
        stacked.update(zip(residual.ys, residual_ys))
        for v, out, first in zip(residual.carry, residual.carry_out, residual_init):
            if v in self.shifted:
                stacked[v] = jaxprs.shifted(stacked[out], first, loop.reverse)

        # What follows it.
        _over_time(self.sunk_eqns, self.sunk_vars, env, stacked)
        carry = dict(zip(positions, last))
        time_sums = sums.TimeSums(loop.producers, stacked, env, length, self.contract)
        for i, values in self.accumulated.items():
            dtype = loop.carry[i].aval.dtype
            wide = sums.accumulator_dtype(dtype)
            accumulator = jnp.asarray(init[i], wide)
            for v in values:
                accumulator = accumulator + time_sums.sum_of(v, wide)
            carry[i] = accumulator.astype(dtype)

        ys = [jaxprs.stack(atom, env, stacked, length) for atom in loop.ys]
        return jaxprs.take(carry, range(len(loop.carry))), ys


def _over_time(
    eqns: Sequence[Eqn],
    outs: Sequence[Var],
    env: Env,
    stacked: Env,
) -> None:
    """Evaluates equations for all steps and adds `outs` to `stacked`, which holds [T, ...]; `env` holds constants."""
    stacked_here = dict(stacked)
    jaxprs.over_time(eqns, outs, dict(env), stacked_here)
    for v in outs:
        if v in stacked_here:
            stacked[v] = stacked_here[v]


def split(
    loop: Loop,
    also_hoist: Selects | None = None,
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
    facts = (dependences or Dependences.of(loop)).allowing(loop, moves)
    hoisted = [] if loop.recomputes else vars_to_hoist(loop, facts, also_hoist, moves)
    available = {*facts.const, *loop.xs, *hoisted}

    # What sums and outputs read after the loop.
    added = accumulated(loop, facts, available, moves)
    added_values = [v for values in added.values() for v in values]
    targets = jaxprs.variables(loop.ys)
    common = sums.common_parts(loop) if joins_parts and added else sums.NO_PARTS
    targets += sums.sum_operands(added_values, loop.producers, available | set(targets), common)
    targets = list(dict.fromkeys(targets))

    # What of it is computed there.
    carry_out = jaxprs.take(loop.carry_out, _others(loop, added))
    sunk = vars_to_sink(loop, facts, available, carry_out, targets, moves)
    parts = divide(
        loop,
        constant_eqns=facts.constant_eqns,
        hoisted=hoisted,
        inside=facts.on_carry - sunk,
        targets=targets,
        accumulated=added,
    )
    return replace(parts, contract=contract)


def split_around_carry(loop: Loop) -> SplitLoop:
    """Returns the split that leaves in the loop only what is between the old and the new carry.

    All equations must be ones that `jax.vmap` evaluates for all steps, also those that the table of primitives does not
    know as movable, such as control flow.
    """
    early = [
        e for e in loop.eqns if not is_spread(e) and not jaxprs.any_in(e.outvars, loop.on_carry)
    ]
    constant = [v for v in jaxprs.results(early) if v not in loop.varying]
    constant_eqns, _ = jaxprs.needed(loop.eqns, constant, set(loop.consts))
    hoisted = [v for v in jaxprs.results(early) if v in loop.varying]
    base = {*loop.inputs, *constant, *hoisted}
    body, _ = jaxprs.needed(loop.eqns, loop.carry_out, base)
    inside = {*loop.carry, *jaxprs.results(body)}
    return divide(loop, constant_eqns, hoisted, inside, jaxprs.variables(loop.ys))


def divide(
    loop: Loop,
    constant_eqns: Sequence[Eqn],
    hoisted: Sequence[Var],
    inside: Vars,
    targets: Sequence[Var],
    accumulated: dict[int, tuple[Atom, ...]] | None = None,
) -> SplitLoop:
    """Divides a loop where it is told to.

    Args:
        loop: the loop.
        constant_eqns: the equations to evaluate once.
        hoisted: the values to compute for all steps before the loop.
        inside: the values that are stacked if they are read after the loop, and not computed again.
        targets: the values of all steps that are wanted after the loop.
        accumulated: the positions of the carries that become sums, with the values that they add.
    """
    eqns = loop.eqns
    accumulated = accumulated or {}
    positions = _others(loop, accumulated)
    const = {*loop.consts, *jaxprs.results(constant_eqns)}
    available = {*const, *loop.xs, *hoisted}
    sunk_eqns, read_after = jaxprs.needed(eqns, targets, available.union(inside))

    # The residual loop stacks what is read after it.
    new_carries = dict(zip(loop.carry, loop.carry_out))
    stacked = {*targets, *(v for v in read_after if v not in new_carries)}
    ys: dict[Var, None] = {}
    shifted = []
    for v in read_after:
        if v in inside:
            out = _stacked_instead(v, new_carries, const, stacked)
            if out is not v:
                shifted.append(v)
            if out not in available:
                ys[out] = None
    carry = jaxprs.take(loop.carry, positions)
    carry_out = jaxprs.take(loop.carry_out, positions)
    body, _ = jaxprs.needed(eqns, [*carry_out, *ys], available.union(carry), effects=True)
    read = dict.fromkeys([*jaxprs.free_variables(body), *jaxprs.variables(carry_out)])
    residual = loop.part(positions, body, ys, read, const, available)
    if strict_passes.value:
        residual.verify()

    # The equations of the other parts.
    read_hoisted = {*residual.xs, *read_after}
    hoisted_vars = [v for v in hoisted if v in read_hoisted]
    hoisted_eqns, _ = jaxprs.needed(eqns, hoisted_vars, const.union(loop.xs))
    computed_after = jaxprs.producers(sunk_eqns)
    added_values = [v for values in accumulated.values() for v in values]
    sum_eqns, _ = jaxprs.needed(eqns, added_values, {*available, *loop.carry, *targets})
    return SplitLoop(
        loop=loop,
        residual=residual,
        constant_eqns=tuple(constant_eqns),
        hoisted_eqns=tuple(hoisted_eqns),
        hoisted_vars=tuple(hoisted_vars),
        sunk_eqns=tuple(sunk_eqns),
        sunk_vars=tuple(v for v in targets if v not in available and v in computed_after),
        accumulated=accumulated,
        sum_eqns=tuple(sum_eqns),
        shifted=tuple(shifted),
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


def _others(loop: Loop, accumulated: Collection[int]) -> list[int]:
    """The positions of the carries that stay in the loop."""
    return [i for i in range(len(loop.carry)) if i not in accumulated]


def _stacked_instead(
    v: Var,
    new_carries: Mapping[Var, Atom],
    const: Vars,
    stacked: Vars,
) -> Var:
    """Returns the new value of a carry `v` if that is stacked: shifted by one step, that stack is the stack of `v`."""
    out = new_carries.get(v)
    if out is None or not jaxprs.is_in(out, stacked):
        return v
    return v if out in const or out in new_carries else out
