"""Steps over lanes: all values have one shape, no element reads another one, and each carry is affine in itself.

Returns and advantages of many environments, averages of columns, resets, and the reverse loops of their gradients have such
steps. A carry may read carries that are computed before it, in any way. What carries only add, such as the gradient of a
discount that all lanes share, is summed over steps for each lane.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var, primitives
from jrnn.loops.costs.constants import LANES
from jrnn.loops.ir import Loop, Unsupported
from jrnn.loops.kernels.native.affine_program import Instruction, Key, key_of, operation_of
from jrnn.loops.kernels.native.affine_step import Added, Equations, Variables, is_read
from jrnn.loops.passes.sums import added_to_carries

OLD = "the old carry"
_MINUS = repr(-1.0)


@dataclass
class Recurrence:
    """One carry of a step, and the operations that make its next value of it, in this order. None is for what is not there.

    Nothing is multiplied out, so that NaN and infinities are those of the step.

    Attributes:
        position: of the carry.
        shifted: the new carry, if it does not read the old one.
        added: what is added to the carry.
        reset: a condition, whether it resets where it is true, and the value to which it resets.
        coefficient, offset: a product with that, and a sum, which may be one with the old carry (`OLD`).
        choice: a condition, whether it chooses where it is true, and the value that it chooses, or None for the old carry.
        negations: instructions that negate operands of the above.
    """

    position: int
    shifted: Atom | None = None
    added: Key = None
    reset: tuple[Key, bool, Key] | None = None
    coefficient: Key = None
    offset: Key = None
    choice: tuple[Key, bool, Key] | None = None
    negations: list[Instruction] = field(default_factory=list)

    def read(self) -> list[Key]:
        """Returns what it reads, other than the carry and results of negations."""
        if self.shifted is not None:
            return [key_of(self.shifted)]
        keys = [self.added, self.coefficient, self.offset]
        for condition in (self.reset, self.choice):
            if condition is not None:
                keys += condition[::2]
        for negation in self.negations:
            keys += negation.operands
        own = [negation.out for negation in self.negations]
        return [key for key in keys if key not in (None, OLD, *own)]

    def apply(self, eqn: Eqn, now: Var, old: Var) -> None:
        """Adds an equation that reads `now`, to which the carry came; raises Unsupported if it has no place."""
        name = eqn.primitive.name
        is_last = self.choice is not None
        place = [atom is now for atom in eqn.invars].index(True)
        others = [atom for atom in eqn.invars if atom is not now]
        if primitives.is_retyping(eqn):
            return
        if name == "select_n" and place > 0 and len(others) == 2 and not is_last:
            self._select(eqn, place, old)
            return
        if len(others) + 1 != len(eqn.invars) or is_last or self.offset is not None:
            raise Unsupported(f"a carry is not affine in an order that the kernel has: {name}", eqn)
        if any(atom is old for atom in others):
            if name not in ("add", "add_any"):
                raise Unsupported("a carry is not affine lane by lane", eqn)
            self.offset = OLD
            return
        other = key_of(others[0]) if others else None
        is_first = self.coefficient is None and self.reset is None and self.added is None
        if name in ("add", "add_any"):
            self._add(other)
        elif name == "sub" and place == 0:
            self._add(self._negative(other))
        elif name == "mul" and self.coefficient in (None, _MINUS):
            self.coefficient = other if self.coefficient is None else self._negative(other)
        elif name == "sub" and is_first:  # x - c is -(c - x), and may be multiplied yet
            self.added = self._negative(other)
            self.coefficient = _MINUS
        elif name == "neg" or name == "sub":
            is_one = self.coefficient is None
            self.coefficient = _MINUS if is_one else self._negative(self.coefficient)
            self.offset = other
        else:
            raise Unsupported(f"a carry is not affine in an order that the kernel has: {name}", eqn)

    def _add(self, other: Key) -> None:
        if self.coefficient is None and self.reset is None and self.added is None:
            self.added = other
        else:
            self.offset = other

    def _select(self, eqn: Eqn, place: int, old: Var) -> None:
        condition, *branches = eqn.invars
        chosen = branches[2 - place]
        selected = (key_of(condition), place == 1, None if chosen is old else key_of(chosen))
        is_early = self.coefficient is None and self.offset is None and self.reset is None
        if is_early and chosen is not old:
            self.reset = selected
        else:
            self.choice = selected

    def _negative(self, key: Key) -> Key:
        out = object()
        self.negations.append(Instruction("neg", out, (key,)))
        return out


@dataclass(frozen=True)
class LaneStep:
    """A step over lanes.

    Attributes:
        loop: the loop.
        recurrences: of the carries, each one after those that it reads.
        sums: the positions of carries of other shapes that only add, with the values that they add.
        known: the equations that the kernel can compute for a tile of steps.
        shape: of the lanes.
        dtype: of the carries.
    """

    loop: Loop
    recurrences: tuple[Recurrence, ...]
    sums: Added
    known: Equations
    shape: tuple[int, ...]
    dtype: Any

    @property
    def numbers(self) -> set[Var]:
        """What the kernel can store: carries, and results of equations, of the carries' type."""
        values = {self.loop.carry[r.position] for r in self.recurrences}
        values.update(v for v in jaxprs.results(self.known) if v.aval.dtype == self.dtype)
        return values

    def sums_by_lane(self) -> tuple[Variables, Equations, Variables]:
        """Returns what is summed for each lane, the linear equations from these sums to others, and what is left."""
        producers = jaxprs.producers(self.loop.eqns)
        varying = self.loop.varying
        numbers = self.numbers
        sources = dict[Var, None]()
        through = set[int]()
        others = []
        for v in jaxprs.variables([a for atoms in self.sums.values() for a in atoms]):
            ends: list[Var] = []
            eqns: list[Eqn] = []
            if _reach(v, producers, numbers, varying, ends, eqns):
                sources.update(dict.fromkeys(ends))
                through.update(map(id, eqns))
            else:
                others.append(v)
        linear = [e for e in self.loop.eqns if id(e) in through]
        return tuple(sources), tuple(linear), tuple(others)


def _reach(
    atom: Atom,
    producers: Any,
    numbers: Collection[Var],
    varying: Collection[Var],
    ends: list[Var],
    eqns: list[Eqn],
) -> bool:
    """Follows linear equations from a value to numbers of the kernel, and returns whether all of them end there."""
    if jaxprs.is_in(atom, numbers):
        ends.append(atom)
        return True
    eqn = producers.get(atom) if jaxprs.is_in(atom, varying) else None
    if eqn is None:
        return False
    operands = list(eqn.invars)
    if eqn.primitive.name == "mul":
        operands = [a for a in operands if jaxprs.is_in(a, varying)]
        if len(operands) != 1:
            return False
    elif eqn.primitive.name not in ("reduce_sum", "neg", "add_any"):
        return False
    eqns.append(eqn)
    return all(_reach(a, producers, numbers, varying, ends, eqns) for a in operands)


def lane_step(loop: Loop) -> LaneStep:
    """Returns a step over lanes; raises Unsupported, with the reason, if it is none."""
    added = added_to_carries(loop)
    only_added = {i: values for i, values in added.items() if not is_read(loop, i)}
    first = [v for i, v in enumerate(loop.carry) if i not in only_added]
    arrays = [v.aval for v in (first or loop.carry) if v.aval.shape]
    if not arrays:
        raise Unsupported("no array is carried")
    shape = arrays[0].shape
    dtype = arrays[0].dtype
    lanes = jaxprs.elements(shape)
    if dtype not in (jnp.float32, jnp.float64) or not 1 < lanes <= LANES.max_lanes:
        raise Unsupported(
            f"a carry is {arrays[0].str_short()}, not up to {LANES.max_lanes} numbers"
        )

    sums = {}
    for i, v in enumerate(loop.carry):
        is_lane = v.aval.shape == shape and v.aval.dtype == dtype
        if not is_lane and i not in only_added:
            raise Unsupported(f"carries are {v.aval.str_short()} and {arrays[0].str_short()}")
        if not is_lane:
            sums[i] = only_added[i]
            if jnp.issubdtype(v.aval.dtype, jnp.inexact) and v.aval.dtype != dtype:
                raise Unsupported(f"a sum is in {v.aval.dtype}")

    recurrences = []
    for group in jaxprs.carry_groups(loop.eqns, loop.carry, loop.carry_out).groups:
        if len(group) > 1:
            raise Unsupported(f"{len(group)} carries read each other")
        if group[0] not in sums:
            recurrences.append(_recurrence(loop, group[0]))
    step = LaneStep(loop, tuple(recurrences), sums, (), shape, dtype)
    known = _known(step)
    results = {*loop.carry, *jaxprs.results(known)}
    for r in recurrences:
        for v in r.read():
            if isinstance(v, Var) and v in loop.on_carry and v not in results:
                raise Unsupported("a carry reads what is not computed lane by lane")
            if isinstance(v, Var) and v.aval.shape not in (shape, ()):
                raise Unsupported(f"a carry reads {v.aval.str_short()}")
    return LaneStep(loop, tuple(recurrences), sums, tuple(known), shape, dtype)


def _recurrence(loop: Loop, i: int) -> Recurrence:
    old = loop.carry[i]
    new = loop.carry_out[i]
    if new is old:
        raise Unsupported("a carry does not change")
    on_old = jaxprs.depends(loop.eqns, [old])
    if not jaxprs.is_in(new, on_old):
        return Recurrence(i, shifted=new)
    others = {*loop.inputs, *jaxprs.results(loop.eqns)}.difference(on_old)
    eqns, _ = jaxprs.needed(loop.eqns, [new], {*others, old})
    recurrence = Recurrence(i)
    now = old
    for eqn in eqns:
        reads = on_old.intersection(jaxprs.inputs(eqn))
        is_elementwise = is_lane_operation(eqn, old.aval.shape, old.aval.dtype)
        if not is_elementwise or now not in reads or not reads <= {now, old}:
            raise Unsupported("a carry is not affine lane by lane", eqn)
        recurrence.apply(eqn, now, old)
        now = eqn.outvars[0]
    return recurrence


def _known(step: LaneStep) -> Sequence[Eqn]:
    """Returns the equations of a step that the kernel can compute for a tile, once it has the carries."""
    loop = step.loop
    results = {loop.carry[r.position] for r in step.recurrences}
    on_carry = loop.on_carry
    eqns = []
    for eqn in loop.eqns:
        reads = [v for v in jaxprs.inputs(eqn) if v in on_carry]
        if results.issuperset(reads) and is_lane_operation(eqn, step.shape, step.dtype):
            results.update(eqn.outvars)
            eqns.append(eqn)
    return eqns


def is_lane_operation(eqn: Eqn, shape: tuple[int, ...], dtype: Any) -> bool:
    """Returns True for an operation of the kernel on arrays of one shape and on numbers, and on booleans as 0 and 1."""
    if operation_of(eqn) is None or len(eqn.outvars) != 1 or eqn.outvars[0].aval.shape != shape:
        return False
    for v in (*eqn.invars, *eqn.outvars):
        if v.aval.shape not in (shape, ()) or v.aval.dtype not in (dtype, jnp.bool_):
            return False
    return True
