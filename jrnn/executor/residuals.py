"""The two loops of a gradient: a forward loop that stores what a reverse loop needs, chosen by a minimum cut.

One step and its vjp are traced together. What the vjp reads of the step is then either stored (stacked over time), or
computed again from what is stored; a minimum cut weighted with bytes chooses, contractions being always stored.

Shapes: T time.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.executor import jaxprs, rewrite, sums
from jrnn.executor.fission import Fission, computation, shifted, split
from jrnn.executor.jaxprs import Atom, Var
from jrnn.executor.loop import Loop
from jrnn.executor.mincut import INFINITE, min_cut
from jrnn.executor.recompute import Forbidden


@dataclass(frozen=True)
class Perturbed:
    """Which inputs and outputs of a loop have tangents; a carry has one when its start or any step gives it one."""

    consts: tuple[bool, ...]
    init: tuple[bool, ...]
    xs: tuple[bool, ...]
    carry: tuple[bool, ...]
    ys: tuple[bool, ...]

    @property
    def inputs(self) -> tuple[bool, ...]:
        return (*self.consts, *self.init, *self.xs)

    @property
    def outputs(self) -> tuple[bool, ...]:
        return (*self.carry, *self.ys)

    @staticmethod
    def of(loop: Loop, given: Sequence[bool]) -> Perturbed:
        """Follows the tangents of the inputs `given` (consts, init, xs) through the loop."""
        at = len(loop.consts), len(loop.consts) + len(loop.carry)
        consts, init, xs = tuple(given[: at[0]]), tuple(given[at[0] : at[1]]), tuple(given[at[1] :])
        carry = init
        while True:
            roots = [v for v, p in zip(loop.inputs, (*consts, *carry, *xs)) if p and is_smooth(v)]
            reached = jaxprs.depends(loop.eqns, roots)
            outs = [not jaxprs.is_literal(a) and a in reached and is_smooth(a) for a in loop.outputs]
            grown = tuple(p or q for p, q in zip(carry, outs[: len(carry)]))
            if grown == carry:
                return Perturbed(consts, init, xs, carry, tuple(outs[len(carry) :]))
            carry = grown


def is_smooth(atom: Atom) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


class SideEffects(Exception):
    """A step whose derivative rules have side effects."""


@dataclass(frozen=True)
class Gradient:
    """The two loops of a loop's gradient.

    Attributes:
        loop: the loop.
        perturbed: what has tangents.
        forward: the loop again; its ys are the loop's own, then `stored`.
        backward: the reverse loop. Its consts are the loop's; its carry is the cotangents of the perturbed carries,
            then one sum for each perturbed const; its xs are the loop's xs, `stacks`, and the cotangents of the
            perturbed ys; its ys are the cotangents of the perturbed xs.
        stored: variables of `forward` that are stacked beside the loop's own ys.
        stacks: variables of `forward` that the reverse loop reads at each step.
        again: the equations of the step that are done again for the reverse loop.
        saves: whether memory was asked to be saved: what is done again is then done step by step.
    """

    loop: Loop
    perturbed: Perturbed
    forward: Loop
    backward: Loop
    stored: tuple[Var, ...]
    stacks: tuple[Var, ...]
    again: tuple[Any, ...]
    saves: bool

    @functools.cached_property
    def fission(self) -> Fission:
        """The reverse loop taken apart: its coefficients are computed before it, for all steps at once.

        They stay in the loop where that would activate slices again: XLA:CPU does not vectorize that in bulk.
        """
        if self.saves:
            return split(self.backward, frugal=True)
        if rewrite.activates_slices(self.again):
            return split(self.backward)
        return split(rewrite.folded(self.backward), computation)

    def reverse(
        self,
        consts: Sequence[Any],
        init: Sequence[Any],
        xs: Sequence[Any],
        ys: Sequence[Any],
        cts: Sequence[Any],
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Runs the reverse loop: the cotangents of the perturbed consts, carries and xs.

        Args:
            consts, init, xs: what the loop was given.
            ys: what the forward loop put out.
            cts: cotangents of the perturbed carries and ys.
        """
        n_carry = sum(self.perturbed.carry)
        stacked = {v: y for v, y in zip(self.forward.ys, ys) if not jaxprs.is_literal(v)}
        stacked.update(zip(self.forward.xs, xs))
        for v, out, first in zip(self.forward.carry, self.forward.carry_out, init):
            if v in self.stacks and v not in stacked:
                stacked[v] = shifted(stacked[out], first, self.loop.reverse)
        moving = [value for value, p in zip(consts, self.perturbed.consts) if p]
        zeros = [jnp.zeros_like(value, v.aval.dtype) for value, v in zip(moving, self.backward.carry[n_carry:])]
        carry, ct_xs = self.fission.run(
            consts, [*cts[:n_carry], *zeros], [*xs, *(stacked[v] for v in self.stacks), *cts[n_carry:]]
        )
        return [total.astype(value.dtype) for total, value in zip(carry[n_carry:], moving)], carry[:n_carry], ct_xs


def gradient(loop: Loop, perturbed: Perturbed, forbidden: Forbidden | None = None) -> Gradient:
    """Builds both loops.

    Args:
        loop: the loop.
        perturbed: what has tangents.
        forbidden: see `recompute.forbidden`.

    Raises:
        SideEffects: derivative rules of the user's own have some, so that each must be run once, and in order.
    """
    joint = _joint(loop, perturbed)
    at = len(loop.consts), len(loop.consts) + len(loop.carry), len(loop.inputs)
    consts, carry, xs = joint.invars[: at[0]], joint.invars[at[0] : at[1]], joint.invars[at[1] : at[2]]
    cotangents, outs, made = (
        joint.invars[at[2] :],
        joint.outvars[: len(loop.outputs)],
        joint.outvars[len(loop.outputs) :],
    )
    carry_out, ys = outs[: len(carry)], outs[len(carry) :]

    later = jaxprs.depends(joint.eqns, cotangents)
    step_eqns = [e for e in joint.eqns if e.outvars[0] not in later]
    reverse_eqns = [e for e in jaxprs.needed(joint.eqns, made, set(joint.invars))[0] if e.outvars[0] in later]
    wanted = [v for v in jaxprs.free_variables(reverse_eqns) if v not in later]
    wanted += [a for a in made if not jaxprs.is_literal(a) and a not in later]

    varying = jaxprs.depends(step_eqns, (*carry, *xs))
    # A carry is stored as what each step leaves in it: that stack is both the new carry and, shifted, the old one.
    source = {v: out for v, out in zip(carry, carry_out) if not jaxprs.is_literal(out) and out in varying}
    source = {v: out for v, out in source.items() if out not in carry}
    had = {a for a in (*consts, *xs, *ys) if not jaxprs.is_literal(a)}
    had |= {v for v, out in source.items() if out in had}
    chosen = _choose(step_eqns, [v for v in wanted if v in varying], had, carry, varying, forbidden)
    stored = list(dict.fromkeys(v for v in (source.get(c, c) for c in chosen) if v not in had))
    had |= {*stored, *(v for v, out in source.items() if out in stored)}

    again, read = jaxprs.needed(step_eqns, wanted, had)
    body = [*again, *reverse_eqns]
    stacks = [v for v in read if v not in consts and v not in xs]
    forward_eqns, _ = jaxprs.needed(step_eqns, [*outs, *stored], set(joint.invars))
    forward = replace(
        loop,
        eqns=tuple(forward_eqns),
        consts=consts,
        carry=carry,
        xs=xs,
        carry_out=carry_out,
        ys=(*ys, *stored),
    )
    n_carry, n_ys, n_consts = sum(perturbed.carry), sum(perturbed.ys), sum(perturbed.consts)
    backward = replace(
        loop,
        eqns=tuple(body),
        consts=consts,
        carry=(*cotangents[:n_carry], *cotangents[n_carry + n_ys :]),
        xs=(*xs, *stacks, *cotangents[n_carry : n_carry + n_ys]),
        carry_out=made[: n_carry + n_consts],
        ys=made[n_carry + n_consts :],
        reverse=not loop.reverse,
    )
    backward = rewrite.tidy(backward)
    saves = forbidden is not None
    return Gradient(loop, perturbed, forward, backward, tuple(stored), tuple(stacks), tuple(again), saves)


def _joint(loop: Loop, perturbed: Perturbed) -> jaxprs.Program:
    """One step and its vjp.

    Inputs: consts, carry, xs; cotangents of the perturbed carries and ys; a sum for each perturbed const, in float32 where
    the const is narrower. Outputs: carry_out, ys; cotangents of the perturbed carries; the sums, grown; cotangents of
    the perturbed xs.
    """
    n = len(loop.inputs)
    moving = [i for i, p in enumerate((*perturbed.consts, *perturbed.carry, *perturbed.xs)) if p]
    n_consts, n_carry = sum(perturbed.consts), sum(perturbed.carry)
    avals = [v.aval for v in loop.inputs]
    cotangents = [a.aval for a, p in zip(loop.outputs, perturbed.outputs) if p]
    moving_consts = [v.aval for v, p in zip(loop.consts, perturbed.consts) if p]
    totals = [a.update(dtype=sums.accumulator(a.dtype)) for a in moving_consts]

    def fn(*args: Any) -> list[Any]:
        given, cts, totals = args[:n], args[n : n + len(cotangents)], args[n + len(cotangents) :]

        def step(diff: list[Any]) -> tuple[list[Any], list[Any]]:
            values = list(given)
            for i, v in zip(moving, diff):
                values[i] = v
            env = jaxprs.evaluate(loop.eqns, dict(zip(loop.inputs, values)))
            outs = [jaxprs.value(env, a) for a in loop.outputs]
            return [o for o, p in zip(outs, perturbed.outputs) if p], outs

        _, pull, outs = jax.vjp(step, [given[i] for i in moving], has_aux=True)
        (made,) = pull(list(cts))
        grown = [jax.lax.add(total, ct.astype(total.dtype)) for total, ct in zip(totals, made[:n_consts])]
        return [*outs, *made[n_consts : n_consts + n_carry], *grown, *made[n_consts + n_carry :]]

    program = jaxprs.trace(fn, [*avals, *cotangents, *totals])
    if program.effects:
        raise SideEffects
    assert not program.constvars, "a step's constants are its explicit inputs"
    return program


def _choose(
    eqns: Sequence[Any],
    wanted: Sequence[Var],
    had: Collection[Var],
    carry: Sequence[Var],
    varying: Collection[Var],
    forbidden: Forbidden | None,
) -> list[Var]:
    """The variables to store so that all wanted ones can be had."""
    never = forbidden(eqns, had) if forbidden else set()
    eqns, _ = jaxprs.needed(eqns, wanted, had)
    costs = {v: 0 for v in had if v in varying}
    costs.update({v: 0 if v in had else jaxprs.nbytes(v) for v in carry})
    edges, sources = [], list(costs)
    for eqn in eqns:
        remade = eqn.primitive.name in jaxprs.CHEAP or any(v in never for v in eqn.outvars)
        for v in eqn.outvars:
            if v not in varying or v in had:
                continue
            costs[v] = INFINITE if v in never else jaxprs.nbytes(v)
            if remade:
                edges += [(u, v) for u in jaxprs.inputs(eqn) if u in varying]
            else:
                sources.append(v)
    return [v for v in min_cut(costs, edges, sources, wanted) if v not in had]
