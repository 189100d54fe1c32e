"""Groups of carries that read each other, in the order in which they can be computed.

Shapes: T time.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var
from jrnn.loops.ir import Loop, Results

Values = Sequence[Any]
Kind = Literal["overwritten", "affine", "opaque"]
Group = tuple[int, ...]  # the positions of carries that read each other

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

    carry: Group
    kind: Kind
    forms: tuple[Any, ...] = ()
    reads: Group = ()
    why: str = ""


class CarrySchedule:
    """The groups of carries of a loop that are still to be computed, and the stages of the others.

    Attributes:
        groups: the groups.
        between: the equations of each group.
        known: the variables that depend on no carry that is pending.
        stages: the stages of the other carries, in order.
    """

    def __init__(self, loop: Loop):
        components = jaxprs.carry_groups(loop.eqns, loop.carry, loop.carry_out)
        self.between = Between(loop)
        self.stages: list[CarryStage] = []
        self._loop = loop
        self._reach = components.reach
        self._cyclic = components.cyclic
        self._done = 0  # carries are bits, as in `jaxprs.Components`
        self._group_of: dict[int, Group] = {}
        self._pending = dict(zip(components.groups, itertools.count()))
        self._ready: list[Group] = []
        self._unknown: dict[int, int] = {}  # how many of its inputs are unknown
        self._readers: dict[Var, list[Eqn | Group]] = {}
        self.known = set(loop.inputs).difference(loop.carry)
        for eqn in loop.eqns:
            self._enter(eqn, jaxprs.inputs(eqn))
        for group in components.groups:
            self._group_of.update(dict.fromkeys(group, group))
            self._enter(group, self.between.of(group)[1])

    def _enter(self, reader: Eqn | Group, read: Iterable[Var]) -> None:
        """Notes what an equation or a group reads that is not known."""
        unknown = [v for v in read if v not in self.known]
        for v in unknown:
            self._readers.setdefault(v, []).append(reader)
        self._unknown[id(reader)] = len(unknown)
        if not unknown:
            self._can_compute(reader)

    def _can_compute(self, reader: Eqn | Group) -> list[Var]:
        """Marks results of an equation as known, or a group as ready. Returns the results."""
        if isinstance(reader, Eqn):
            self.known.update(reader.outvars)
            return reader.outvars
        if reader in self._pending:
            bisect.insort(self._ready, reader, key=self._pending.__getitem__)
        return []

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
        self,
        kind: Kind,
        carry: Sequence[int],
        forms: Values = (),
        why: str = "",
    ) -> None:
        """Adds a stage of carries, whose groups are no longer pending."""
        reads = _bits(carry)
        for i in carry:
            reads |= self._reach[i]
        stage = CarryStage(
            carry=tuple(carry),
            kind=kind,
            forms=tuple(forms),
            reads=tuple(jaxprs.nodes_of(reads)),
            why=why,
        )
        self.stages.append(stage)
        self._done |= _bits(carry)
        for group in set(jaxprs.take(self._group_of, carry)):
            del self._pending[group]
            if group in self._ready:
                self._ready.remove(group)
        self._add_known(jaxprs.take(self._loop.carry, carry))

    def _add_known(self, values: list[Var]) -> None:
        """Marks values and what follows from them as known, and groups that read no others as ready."""
        self.known = self.known.union(values)  # the set before may be in use
        while values:
            for reader in self._readers.get(values.pop(), ()):
                self._unknown[id(reader)] -= 1
                if not self._unknown[id(reader)]:
                    values += self._can_compute(reader)


def _bits(nodes: Iterable[int]) -> int:
    bits = 0
    for i in nodes:
        bits |= 1 << i
    return bits


class Between:
    """The equations between the old carries of a group and their new ones, found without reading other groups' equations."""

    def __init__(self, loop: Loop):
        self._loop = loop
        self._leading = jaxprs.Leading(loop.eqns)
        self._carries: dict[Var, int] = {}  # that a value depends on
        for i, v in enumerate(loop.carry):
            self._carries[v] = 1 << i
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
        outs = jaxprs.take(self._loop.carry_out, group)

        def is_outside(v: Var) -> bool:
            return not self._carries.get(v, 0) & bits

        return self._leading.to(outs, is_outside)

    def leading_to(self, outs: Iterable[Var], *available: Env) -> list[Eqn]:
        """Returns the equations that compute values from what is available."""
        eqns, _ = self._leading.to(outs, ChainMap(*available).__contains__)
        return eqns


def part_of(
    loop: Loop,
    carries: Sequence[int],
    ys: Sequence[Atom],
    known: Env,
    stacked: Env,
    read: Sequence[Var] = (),
) -> Loop:
    """Returns the loop of some carries, with these outputs. Its constants are `known`, and its inputs are `stacked`.

    Its equations compute what is `read`, too.
    """
    carry = jaxprs.take(loop.carry, carries)
    new = jaxprs.take(loop.carry_out, carries)
    available = ChainMap(known, stacked, dict.fromkeys(carry))
    eqns, used = jaxprs.Leading(loop.eqns).to([*ys, *new, *read], available.__contains__)
    return loop.part(carries, eqns, ys, used, known, stacked)


# Solving groups of carries for all steps -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GroupFunction:
    """The part of a step that makes the new carries of a group; what does not need the old ones is computed.

    Attributes:
        eqns: the equations that depend on the old carries.
        carry: the old carries.
        new: the new ones.
        constant: the variables that equations read and that are the same at every step.
        stacked: the variables that differ.
        consts: the values of `constant`.
        stacks: the values of `stacked` at all steps, [T, ...].
    """

    eqns: Sequence[Eqn]
    carry: Sequence[Var]
    new: Sequence[Atom]
    constant: list[Var]
    stacked: list[Var]
    consts: Values
    stacks: Values

    @staticmethod
    def of(
        loop: Loop,
        group: Group,
        between: Between,
        known: Env,
        stacked: Env,
    ) -> GroupFunction:
        eqns, read = between.of(group)
        jaxprs.over_time(between.leading_to(read, known, stacked), read, known, stacked)
        varying = list(filter(stacked.__contains__, read))
        constant = list(itertools.filterfalse(stacked.__contains__, read))
        return GroupFunction(
            eqns=eqns,
            carry=jaxprs.take(loop.carry, group),
            new=jaxprs.take(loop.carry_out, group),
            constant=constant,
            stacked=varying,
            consts=jaxprs.take(known, constant),
            stacks=jaxprs.take(stacked, varying),
        )

    def inputs(self, consts: Values, stack: Values) -> Env:
        """Returns the values that equations read at one step, by their variables."""
        return dict(zip((*self.constant, *self.stacked), (*consts, *stack)))

    def fn(
        self,
        consts: Values,
        stack: Values,
        old: Values,
    ) -> list[Any]:
        """Returns the new carries from constants, inputs at one step, and old carries."""
        env = self.inputs(consts, stack)
        env.update(zip(self.carry, old))
        jaxprs.evaluate(self.eqns, env)
        return list(map(functools.partial(jaxprs.value, env), self.new))


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
        groups: each after the groups that it reads.
        solve: from the number of a group, its part of the step and its first carries, to the carries after every step.
        consts, init, xs, length: as in `Loop.run`.
    """
    known = dict(zip(loop.consts, consts))
    stacked = dict(zip(loop.xs, xs))
    states: dict[int, Any] = {}
    between = Between(loop)
    for number, group in enumerate(groups):
        part = GroupFunction.of(loop, group, between, known, stacked)
        first = jaxprs.take(init, group)
        for i, state in zip(group, solve(number, part, first)):
            states[i] = state
            out = loop.carry_out[i]
            if not jaxprs.is_literal(out) and out not in known:
                stacked.setdefault(out, state)
            stacked[loop.carry[i]] = jaxprs.shifted(state, init[i], loop.reverse)
    ys = jaxprs.stacks(loop.eqns, loop.ys, known, stacked, length)
    ordered = jaxprs.take(states, range(len(init)))
    at_end = 0 if loop.reverse else -1
    last = [state[at_end] for state in ordered]
    return (last, ys), ordered
