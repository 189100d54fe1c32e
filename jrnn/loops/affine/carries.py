"""Groups of carries that read each other, in the order in which they can be computed.

Shapes: T time.
"""

from __future__ import annotations

import bisect
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, primitives
from jrnn.jaxprs.tangents import is_smooth
from jrnn.loops.ir import Loop, Results, Unsupported

Values = Sequence[Any]
Kind = Literal["overwritten", "affine", "opaque"]
Group = tuple[int, ...]  # the positions of carries that read each other

MOST_TOGETHER = 4  # two steps of K carries compose with K^3 products


# What a user can do where a step is not affine in its carry.
ON_INPUTS = "apply it to inputs, or to a carry of its own"
DECAYS_ALONE = "update them by decays and outer products of inputs alone"


@dataclass(frozen=True)
class CarryStage:
    """Carries that are computed together.

    Attributes:
        carry: their positions.
        kind: overwritten, if new values do not read the old ones; affine; or opaque, if the step is known only as a whole.
        forms: of affine carries.
        reads: the positions of the carries that they read, with their own.
        why: why they are opaque.
    """

    carry: tuple[int, ...]
    kind: Kind
    forms: tuple[Any, ...] = ()
    reads: tuple[int, ...] = ()
    why: str = ""


class CarrySchedule:
    """The groups of carries of a loop that are still to be computed, and the stages of the others.

    Attributes:
        groups: the groups.
        between: the equations of each group.
        known: the variables that depend on no carry that is pending.
        stages: those of the other carries, in order.
    """

    def __init__(self, loop: Loop):
        components = jaxprs.carry_groups(loop.eqns, loop.carry, loop.carry_out)
        self.between = Between(loop)
        self.stages: list[CarryStage] = []
        self._loop = loop
        self._reach = components.reach
        self._cyclic = components.cyclic
        self._done = 0  # carries are bits, as in `jaxprs.Components`
        self._unknown: dict[int, int] = {}  # how many operands of an equation are not known
        self._readers: dict[Var, list[Eqn]] = {}
        carry = set(loop.carry)
        self.known = {v for v in loop.inputs if v not in carry}
        for eqn in loop.eqns:
            unknown = [v for v in jaxprs.inputs(eqn) if v not in self.known]
            for v in unknown:
                self._readers.setdefault(v, []).append(eqn)
            self._unknown[id(eqn)] = len(unknown)
            if not unknown:
                self.known.update(eqn.outvars)
        self._rank = {group: i for i, group in enumerate(components.groups)}
        self._group_of = {i: group for group in components.groups for i in group}
        self._pending = dict(self._rank)
        self._ready: list[Group] = []
        self._unknown_of: dict[Group, int] = {}  # how many values that a group reads are not known
        self._groups_of: dict[Var, list[Group]] = {}
        for group in components.groups:
            unknown = [v for v in self.between.of(group)[1] if v not in self.known]
            for v in unknown:
                self._groups_of.setdefault(v, []).append(group)
            self._unknown_of[group] = len(unknown)
            if not unknown:
                self._ready.append(group)

    @property
    def groups(self) -> list[Group]:
        return list(self._pending)

    @property
    def ready(self) -> list[Group]:
        """The groups that read no other group that is pending."""
        return list(self._ready)

    def can_follow(self, group: Group) -> bool:
        available = self._done | _bits(group)
        return all(not self._reach[i] & ~available for i in group)

    def is_overwritten(self, group: Group) -> bool:
        """Returns True for a carry whose new value does not read the old one."""
        return not _bits(group) & self._cyclic

    def add(
        self, kind: Kind, carry: Sequence[int], forms: Sequence[Any] = (), why: str = ""
    ) -> None:
        """Adds a stage of carries, whose groups are no longer pending."""
        reads = _bits(carry)
        for i in carry:
            reads |= self._reach[i]
        stage = CarryStage(tuple(carry), kind, tuple(forms), tuple(jaxprs.nodes_of(reads)), why)
        self.stages.append(stage)
        self._done |= _bits(carry)
        for group in dict.fromkeys(self._group_of[i] for i in carry):
            del self._pending[group]
            if group in self._ready:
                self._ready.remove(group)
        self._add_known([self._loop.carry[i] for i in carry])

    def _add_known(self, values: list[Var]) -> None:
        """Adds values to those that are known, with what follows from them, and groups that read no others to the ready."""
        self.known = self.known.union(values)  # the set before may be in use
        while values:
            v = values.pop()
            for eqn in self._readers.get(v, ()):
                self._unknown[id(eqn)] -= 1
                if not self._unknown[id(eqn)]:
                    self.known.update(eqn.outvars)
                    values += eqn.outvars
            for group in self._groups_of.get(v, ()):
                self._unknown_of[group] -= 1
                if not self._unknown_of[group] and group in self._pending:
                    bisect.insort(self._ready, group, key=self._rank.__getitem__)


def _bits(nodes: Iterable[int]) -> int:
    bits = 0
    for i in nodes:
        bits |= 1 << i
    return bits


class Between:
    """The equations between the old carries of a group and their new ones, found without reading those of other groups."""

    def __init__(self, loop: Loop):
        self._loop = loop
        self._leading = jaxprs.Leading(loop.eqns)
        self._carries = {v: 1 << i for i, v in enumerate(loop.carry)}  # that a value depends on
        for eqn in loop.eqns:
            bits = 0
            for v in jaxprs.inputs(eqn):
                bits |= self._carries.get(v, 0)
            if bits:
                self._carries.update(dict.fromkeys(eqn.outvars, bits))

    def carries_of(self, atom: Atom) -> int:
        """Returns the carries that a value depends on, as bits."""
        return 0 if jaxprs.is_literal(atom) else self._carries.get(atom, 0)

    def of(self, group: Group) -> tuple[list[Eqn], list[Var]]:
        """Returns the equations, and what else they and the new carries read."""
        bits = _bits(group)
        outs = [self._loop.carry_out[i] for i in group]
        return self._leading.to(outs, lambda v: not self._carries.get(v, 0) & bits)


def check_diagonal(loop: Loop, group: Group, between: Between | None = None) -> None:
    """Raises Unsupported, with the reason, if carries that read each other are not affine with a diagonal Jacobian.

    Args:
        loop: the loop.
        group: the positions of the carries. What the others are does not matter.
        between: that of the loop, if several groups are checked.
    """
    if len(group) > MOST_TOGETHER:
        raise Unsupported(f"more than {MOST_TOGETHER} carries read each other", remedy=DECAYS_ALONE)
    carry = [loop.carry[i] for i in group]
    for v in carry:
        if not is_smooth(v.aval):
            raise Unsupported(f"a carry is {v.aval.dtype}")
    body, _ = (between or Between(loop)).of(group)
    moving = jaxprs.depends(body, carry)
    for eqn in body:
        _check_diagonal_equation(eqn, [jaxprs.is_in(a, moving) for a in eqn.invars])


def _check_diagonal_equation(eqn: Eqn, moves: Sequence[bool]) -> None:
    """Raises Unsupported if an equation is not affine in each element of what moves with the carry."""
    name = eqn.primitive.name
    shape = eqn.outvars[0].aval.shape
    is_sum = primitives.is_sum(eqn) or primitives.is_retyping(eqn)
    is_fixed = {  # of other affine operations: the factor, the divisor, or the condition
        "mul": not all(moves),
        "div": not moves[-1],
        "select_n": not moves[0],
    }
    changes_shape = any(m and a.aval.shape != shape for a, m in zip(eqn.invars, moves))
    if changes_shape and (is_sum or name in is_fixed):
        raise Unsupported(f"{name} of the carry changes its shape")
    if not is_sum and not is_fixed.get(name):
        reason = f"{name} of the carry is not affine with a diagonal Jacobian"
        raise Unsupported(reason, remedy=ON_INPUTS)


def part_of(
    loop: Loop,
    carries: Sequence[int],
    ys: Sequence[Atom],
    known: Env,
    stacked: Env,
    read: Sequence[Var] = (),
    leading: jaxprs.Leading | None = None,
) -> Loop:
    """Returns the loop of some carries, with these outputs. Its constants are `known`, and its inputs are `stacked`.

    Its equations compute what is `read`, too. `leading` is that of the loop's equations, if there are several parts.
    """
    carry = [loop.carry[i] for i in carries]
    new = [loop.carry_out[i] for i in carries]
    available = ChainMap(known, stacked, dict.fromkeys(carry))
    leading = leading or jaxprs.Leading(loop.eqns)
    eqns, used = leading.to([*ys, *new, *read], available.__contains__)
    consts, xs = (
        [v for v in used if v in values and v not in carry] for values in (known, stacked)
    )
    parts = {"eqns": eqns, "consts": consts, "carry": carry, "xs": xs, "carry_out": new, "ys": ys}
    return replace(loop, **{name: tuple(part) for name, part in parts.items()})


# Solving groups of carries for all steps -------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupFunction:
    """The part of a step that makes the new carries of a group; what does not need the old ones is computed.

    Attributes:
        fn: `(consts, stack at one step, old carries) -> new carries`.
        consts: values of all steps.
        stacks: values of each step, [T, ...].
        stacked: the variables of the loop that `stacks` are the values of.
    """

    fn: Callable[[Values, Values, Values], list[Any]]
    consts: list[Any]
    stacks: list[Any]
    stacked: list[Var]

    @staticmethod
    def of(
        loop: Loop,
        group: Group,
        known: Env,
        stacked: Env,
        leading: jaxprs.Leading | None = None,
    ) -> GroupFunction:
        part = part_of(loop, group, (), known, stacked, leading=leading)
        carry = part.carry
        outs = part.carry_out
        body = part.eqns
        moving = jaxprs.depends(body, carry)
        inner = [eqn for eqn in body if jaxprs.any_in(eqn.outvars, moving)]
        read = dict.fromkeys(
            v for v in [*jaxprs.free_variables(inner), *jaxprs.variables(outs)] if v not in moving
        )
        jaxprs.over_time(body, read, known, stacked)
        fixed, varying = ([v for v in read if (v in stacked) == moves] for moves in (False, True))

        def fn(consts: Values, stack: Values, old: Values) -> list[Any]:
            env = jaxprs.evaluate(
                inner, dict(zip((*fixed, *varying, *carry), (*consts, *stack, *old)))
            )
            return [jaxprs.value(env, a) for a in outs]

        return GroupFunction(fn, [known[v] for v in fixed], [stacked[v] for v in varying], varying)


Solve = Callable[[int, GroupFunction, list[Any]], Values]


def solve_in_order(
    loop: Loop,
    groups: Sequence[Group],
    solve: Solve,
    consts: Values,
    init: Values,
    xs: Values,
    length: Any,
) -> tuple[Results, list[Any]]:
    """Solves groups of carries one after the other: the results of a loop, and the carries after every step.

    Args:
        loop: the loop, whose equations may be evaluated for all steps at once.
        groups: each after those that it reads.
        solve: from the number of a group, its part of the step and its first carries, to the carries after every step.
        consts, init, xs, length: as those of `Loop.run`.
    """
    known = dict(zip(loop.consts, consts))
    stacked = dict(zip(loop.xs, xs))
    states: dict[int, Any] = {}
    leading = jaxprs.Leading(loop.eqns)
    for number, group in enumerate(groups):
        part = GroupFunction.of(loop, group, known, stacked, leading)
        for i, state in zip(group, solve(number, part, [init[i] for i in group])):
            states[i], out = state, loop.carry_out[i]
            if not jaxprs.is_literal(out) and out not in known:
                stacked.setdefault(out, state)
            stacked[loop.carry[i]] = jaxprs.shifted(state, init[i], loop.reverse)
    ys = jaxprs.stacks(loop.eqns, loop.ys, known, stacked, length)
    ordered = [states[i] for i in range(len(init))]
    return ([state[0 if loop.reverse else -1] for state in ordered], ys), ordered
