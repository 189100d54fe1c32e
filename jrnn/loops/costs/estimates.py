"""Estimates of loops: from equations and their shapes to time and temporary memory (`machines.py` has the constants).

The problem: a plan chooses among ways to run a loop before anything is compiled. A loop of T steps, whose step has products
and other calls p, and other equations, which XLA fuses into kernels k, takes about

    T * ( trip  +  sum over p of (call + max(operations / product_rate, bytes / read_rate))
                +  sum over k of (kernel + max(time of its elements, bytes / read_rate)) )
    + bytes of xs and ys / rates of memory

What moves out of the loop is computed for all steps together: its calls and kernels count once and not T times, its products
are large, and its results are arrays of all steps, which may no longer fit a cache.

           one step                                           all steps
    call   T * (call + operations / product_rate)             call + T * operations / product_rate
    bytes  T * bytes / cache_rate                             T * bytes / (cache_rate, or read_rate if T * bytes is large)

So `Costs` counts what equations cost without saying how often, and `Costs.terms` makes times of it. The model knows few
things. Products run at one rate, or at the rate at which their operands are read. Elementwise equations are fused: only what
a product, a reduction or the loop itself reads becomes an array. Arrays that fit a cache are read and written faster than
others. XLA:CPU makes one kernel of a small loop in which nothing is called: then kernels cost nothing.

A time is a sum of terms (`UNCERTAINTIES`), because some are known better than others: what one choice saves must exceed what
its terms may be off. Doubts: functions that XLA does not vectorize are known for few sizes alone, and copies that XLA makes
of carries are counted from comparison with its programs, not from its rules.

Invariant: an estimate of a loop split into parts and one of the whole loop count the same equations in the same way, so that
their difference is what the split changes.

Shapes: T time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var, primitives
from jrnn.loops.costs.constants import EQUATIONS, TINY_LOOP
from jrnn.loops.costs.equation_costs import (
    call_seconds,
    element_seconds,
    indexing_seconds,
    is_call,
    is_outer,
    operation_seconds,
    packing_seconds,
    product_seconds,
    selects,
)
from jrnn.loops.costs.machines import CPU, Machine, quiet
from jrnn.loops.costs.peaks import EquationFacts, peak_bytes, read_by_libraries
from jrnn.loops.costs.sources import Sources
from jrnn.loops.costs.times import Estimate, Terms, estimate, total
from jrnn.loops.ir import Loop

# What XLA:CPU counts of a trip, next to its kernels: a pointer for each value, and the counter and its comparison. With 160,
# loops of 16 to 26 scalars with jax 0.10.2 are one kernel where they are estimated to be.
_POINTER_BYTES = 8
_CONTROL_BYTES = 160
_WHILE_TRIPS = 10  # of a `while` loop, whose number nobody knows


class Costs(NamedTuple):
    """What equations cost, evaluated once for some steps together.

    Attributes:
        products: seconds of products, lookups and solvers.
        elements: seconds of elementwise operations and reductions.
        read_bytes, written_bytes: of arrays that are read and written by kernels that are not products.
        calls: seconds of calling products, lookups and solvers.
        packing: seconds in which products copy their large constant operands into another order.
        kernels: the number of other kernels.
        touched_bytes: what these kernels access, where a slice that is no array is read in place of its operand.
        peak_bytes: of the arrays that are written, at the most at one time, without the results.
        total_bytes: of all arrays that are written.
    """

    products: float = 0.0
    elements: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    calls: float = 0.0
    packing: float = 0.0
    kernels: int = 0
    touched_bytes: int = 0
    peak_bytes: int = 0
    total_bytes: int = 0

    def is_small(self, machine: Machine) -> bool:
        """Returns True if XLA makes one kernel of a loop of these equations, and none is a call."""
        return 2 * (self.read_bytes + self.written_bytes) < machine.one_kernel_bytes

    def terms(
        self,
        machine: Machine,
        steps: int,
        size: float,
        times: int,
    ) -> Terms:
        """Returns the time for arrays of `steps` steps, `size` bytes in all, which are computed `times` times."""
        moved = machine.reading(self.read_bytes, size) + machine.writing(self.written_bytes, size)
        calls = times * (self.calls + self.kernels * machine.kernel)
        elements = steps * max(self.elements, moved)
        return {
            "products": steps * self.products,
            "elements": elements,
            "calls": calls,
            "weight copies": times * self.packing,
        }


class _Sizes(dict[Var, int]):
    """The bytes of variables, each counted once."""

    def __missing__(self, v: Var) -> int:
        size = self[v] = jaxprs.nbytes(v)
        return size


class Estimator:
    """Estimates the candidates of a loop. What its equations cost is computed once.

    Args:
        loop: the loop after its passes.
        machine: the constants.
        is_fused: returns True for an inner loop without calls. It is one kernel then, if it is small, and random words are
            computed in registers. By default, inner loops have kernels.
        planned_bytes: returns the temporary bytes of an inner loop that runs as it is planned, or None for another equation.

    Attributes:
        size: returns the bytes of a variable.
        updates: scatters into zeros. XLA adds their updates in place to what they are added to.
        free: zeros and additions of these updates, which cost nothing.
    """

    def __init__(
        self,
        loop: Loop,
        machine: Machine = CPU,
        is_fused: Callable[[Eqn], bool] | None = None,
        planned_bytes: Callable[[Eqn], int | None] | None = None,
    ):
        self.loop = loop
        self.machine = machine
        self.carried = {*loop.carry}
        self.size = _Sizes().__getitem__
        self.updates: set[Var] = set()
        self.free: set[Var] = set()
        self._is_fused = is_fused
        self._planned_bytes = planned_bytes
        for eqn in loop.eqns:
            if eqn.primitive.name == "scatter-add":
                if jaxprs.is_zero(eqn.invars[0], loop.producers):
                    self.updates.update(eqn.outvars)
                    self.free.add(eqn.invars[0])
            elif primitives.is_addition(eqn) and jaxprs.any_in(jaxprs.inputs(eqn), self.updates):
                self.free.update(eqn.outvars)

        # What equations cost, by their identities. Facts keep their equations alive, and the jaxprs in these.
        self._facts: dict[int, EquationFacts] = {}
        self._inside: dict[int, Costs] = {}
        self._parts: dict[tuple[Hashable, ...], Costs] = {}

    def whole(self, loop: Loop | None = None, copied_bytes: int = 0) -> Estimate:
        """Returns the time and the memory of a loop that runs step by step.

        Args:
            loop: the loop, or a part of it that is a loop; by default the loop itself.
            copied_bytes: of carries that XLA copies at each step.
        """
        loop = loop or self.loop
        inside = self.part(loop.eqns, loop.outputs)
        moved = self.machine.moving(copied_bytes, copied_bytes)
        copies = {"carry copies": jaxprs.extent(loop.length) * moved}
        return estimate(total(self.trips(loop, inside), copies), inside.peak_bytes + copied_bytes)

    def sizes(self, variables: Iterable[Var]) -> int:
        return sum(map(self.size, variables))

    def part(
        self,
        eqns: Sequence[Eqn],
        outs: Iterable[Atom],
        all_steps: bool = False,
    ) -> Costs:
        """Returns what equations cost, evaluated for one step, or for many steps together.

        Args:
            eqns: the equations.
            outs: what is read of their results.
            all_steps: for many steps. Constant operands of products are then read once for all, which costs nothing.
        """
        read = jaxprs.variables(outs)
        key = (*map(id, eqns), all_steps, *read)
        if key not in self._parts:
            self._parts[key] = self._part(eqns, set(read), all_steps)
        return self._parts[key]

    def _part(
        self,
        eqns: Sequence[Eqn],
        outputs: set[Var],
        all_steps: bool,
    ) -> Costs:
        facts = self._facts_of(eqns)
        arrays = self._arrays(facts, outputs, set(jaxprs.results(eqns)))
        sources = Sources()
        is_slice = [eqn.primitive.name == "slice" for eqn in eqns]
        views = Sources() if any(is_slice) else sources  # the same, or slices of them
        products = 0.0
        elements = 0.0
        calls = 0.0
        packing = 0.0
        read_bytes = 0
        written_bytes = 0
        kernels = 0
        touched_bytes = 0
        total_bytes = 0
        for fact, slices in zip(facts, is_slice):
            union = sources.read(fact.inputs)
            viewed = union if views is sources else views.read(fact.inputs)
            writes = not arrays.isdisjoint(fact.outs)
            if fact.is_call:
                products += fact.all_steps_seconds if all_steps else fact.seconds
                calls += fact.all_steps_call_seconds if all_steps else fact.call_seconds
                packing += fact.packing_seconds
            elif all_steps or fact.outs[0] not in self.free:
                elements += fact.seconds
                if writes:
                    kernels += 1
                    written_bytes += fact.out_bytes
                    kernel_bytes = sum(map(self.size, sources.listed(union)))
                    read_bytes += kernel_bytes
                    if views is not sources:
                        kernel_bytes = self.sizes(views.listed(viewed))
                    touched_bytes += fact.out_bytes + kernel_bytes
            for v in fact.outs:
                if v in arrays:
                    total_bytes += self.size(v)
                else:
                    sources.of[v] = union
                    views.of[v] = views.bit(v) if slices else viewed
        peak = peak_bytes(self, facts, arrays, outputs, all_steps)
        return Costs(
            products=products,
            elements=elements,
            read_bytes=read_bytes,
            written_bytes=written_bytes,
            calls=calls,
            packing=packing,
            kernels=kernels,
            touched_bytes=touched_bytes,
            peak_bytes=peak,
            total_bytes=total_bytes,
        )

    def _arrays(
        self,
        facts: Sequence[EquationFacts],
        outputs: set[Var],
        computed: set[Var],
    ) -> set[Var]:
        """Returns the results of equations that are written to memory."""
        arrays = outputs & computed
        has_calls = False
        for fact in facts:
            if fact.is_call:
                has_calls = True
                arrays.update(fact.outs, computed.intersection(fact.inputs))
            elif fact.reduces:
                arrays.update(fact.outs)

        # XLA:CPU writes the parts of an array that it joins, each by a kernel.
        for fact in facts if has_calls else ():
            if fact.eqn.primitive.name == "concatenate" and fact.outs[0] in arrays:
                parts = [v for v in fact.inputs if v in computed]
                if len(parts) > 1:
                    arrays.update(parts)
        arrays |= read_by_libraries(facts, arrays, selects)

        # Where an equation only renames an array, its operand is the array.
        for fact in reversed(facts):
            is_inside = not arrays.isdisjoint(fact.outs) and outputs.isdisjoint(fact.outs)
            if is_inside and primitives.is_renaming(fact.eqn):
                arrays.discard(fact.outs[0])
                arrays.update(computed.intersection(fact.inputs))
        return arrays

    def _facts_of(self, eqns: Sequence[Eqn]) -> list[EquationFacts]:
        """Returns what is known of equations. It is found out once for each."""
        known = self._facts
        for eqn in eqns:
            if id(eqn) not in known:
                known[id(eqn)] = self._read(eqn)
        return [known[id(eqn)] for eqn in eqns]

    def _read(self, eqn: Eqn) -> EquationFacts:
        """Finds out what is known of an equation."""
        facts = EquationFacts(
            eqn=eqn,
            inputs=jaxprs.inputs(eqn),
            outs=eqn.outvars,
            out_bytes=sum(map(self.size, eqn.outvars)),
            is_call=is_call(eqn),
            reduces=primitives.is_kind(eqn, "reduction"),
            is_function=bool(primitives.row_of(eqn).cost),
        )
        if facts.is_call:
            in_place = primitives.is_kind(eqn, "update") and (
                jaxprs.is_in(eqn.invars[0], self.carried) or eqn.outvars[0] in self.updates
            )
            facts = facts._replace(
                in_place=in_place,
                seconds=self._call_seconds(eqn, False, in_place),
                all_steps_seconds=self._call_seconds(eqn, True, False),
                call_seconds=call_seconds(eqn, self.machine),
                all_steps_call_seconds=call_seconds(eqn, self.machine, True),
                packing_seconds=packing_seconds(eqn, self.loop.varying, self.loop.xs, self.machine),
            )
        else:
            facts = facts._replace(seconds=element_seconds(eqn, self.machine))
        # Random words stay in registers inside of a kernel.
        if self._is_fused and any(v.aval.dtype == np.uint32 for v in eqn.outvars):
            facts = facts._replace(seconds=EQUATIONS.word_operations * facts.seconds)
        return facts

    def _call_seconds(
        self,
        eqn: Eqn,
        all_steps: bool,
        in_place: bool,
    ) -> float:
        """Returns the time of what is not fused, at one step, or for one of many steps together."""
        if primitives.is_kind(eqn, "lookup", "update"):
            return indexing_seconds(eqn, all_steps, in_place, self.machine)
        if any(jaxprs.sub_jaxprs(eqn)):
            return self._inner_seconds(eqn)
        return product_seconds(eqn, self.loop.varying if all_steps else None, self.machine)

    def inside(self, jaxpr: Any) -> Costs:
        """Returns what the equations of an inner loop or branch cost, once."""
        if id(jaxpr) not in self._inside:
            self._inside[id(jaxpr)] = self.part(jaxpr.eqns, jaxpr.outvars)
        return self._inside[id(jaxpr)]

    def inner_bytes(self, eqn: Eqn) -> int:
        """Returns the bytes of the temporary arrays of an inner loop or of the largest branch."""
        planned = None if self._planned_bytes is None else self._planned_bytes(eqn)
        if planned is not None:
            return planned
        inner = map(self.inside, jaxprs.run_jaxprs(eqn))
        return max([costs.peak_bytes for costs in inner], default=0)

    def _inner_seconds(self, eqn: Eqn) -> float:
        """Returns the time of a call, an inner loop, or the longest branch."""
        name = eqn.primitive.name
        machine = self.machine
        bodies = list(map(self.inside, jaxprs.run_jaxprs(eqn)))
        if self._is_fused and all(body.is_small(machine) for body in bodies):
            machine = quiet(machine) if self._is_fused(eqn) else machine
        times = [0.0]
        for body in bodies:
            times.append(sum(body.terms(machine, 1, body.total_bytes, 1).values()))
        if name == "cond":
            return max(times)
        trips = 1
        if name == "scan":
            trips = jaxprs.extent(eqn.params["length"])
        elif name == "while":
            trips = _WHILE_TRIPS
        return trips * (sum(times) + machine.elementwise_trip)

    def is_small(self, loop: Loop, inside: Costs) -> bool:
        """Returns True if XLA makes one kernel of a loop without calls, whose equations cost `inside`.

        Next to what its kernels access it counts the values that go from trip to trip, which a plan that hoists adds to, and
        copies of carries that two equations read, if one may run after the new carry is written.
        """
        if self.machine.one_kernel_bytes == math.inf:
            return True
        readers = Counter[Var]()
        for eqn in loop.eqns:
            readers.update(set(jaxprs.inputs(eqn)))
        copies = 2 * self.sizes(v for v in loop.carry if readers[v] > 1)
        values = len({*loop.inputs, *jaxprs.variables(loop.ys)})
        accessed = inside.touched_bytes + copies + _POINTER_BYTES * values + _CONTROL_BYTES
        return accessed < self.machine.one_kernel_bytes

    def trips(self, loop: Loop, inside: Costs) -> Terms:
        """Returns the time of all steps of a loop whose equations cost `inside`."""
        machine = self.machine
        steps = jaxprs.extent(loop.length)
        ys = jaxprs.variables(loop.ys)
        several_kernels = inside.calls or not self.is_small(loop, inside)
        work = inside.terms(machine, steps, inside.total_bytes, steps if several_kernels else 0)
        trips = steps * (machine.trip if several_kernels else machine.elementwise_trip)
        if loop.unroll > 1:
            further = loop.unroll - 1  # steps of an iteration
            trips *= 1 - EQUATIONS.trip_of_iteration * further / loop.unroll
            if not inside.calls and not inside.products:
                work["elements"] *= 1 + EQUATIONS.repeated_by_unrolling * further
        # What a product or a branch makes is copied into its stack, and so is what the loop reads.
        copied: set[Var] = set()
        copies_all = several_kernels and ys
        for fact in self._facts_of(loop.eqns):
            if fact.call_seconds:
                copied.update(fact.outs)
            if copies_all:
                copied.update(fact.inputs)
        if copies_all:
            copied.update(jaxprs.variables(loop.carry_out))
        trips += steps * machine.kernel * sum(map(copied.__contains__, ys))
        stacks = self.stack_seconds(loop)
        if not several_kernels:
            scalars = [v for v in ys if jaxprs.elements(v.aval.shape) == 1]
            stacks += steps * len(scalars) * TINY_LOOP.stored * TINY_LOOP.seconds
        return total(work, dict(calls=trips, stacks=stacks))

    def stack_seconds(self, loop: Loop) -> float:
        """Returns the time to read the inputs of all steps of a loop, and to write their outputs."""
        steps = jaxprs.extent(loop.length)
        read_bytes = steps * self.sizes(loop.xs)
        written_bytes = steps * self.sizes(jaxprs.variables(loop.ys))
        reading = self.machine.reading(read_bytes, read_bytes)
        return reading + self.machine.writing(written_bytes, written_bytes)

    def sums(self, eqns: Sequence[Eqn]) -> Costs:
        """Returns what the sums after a loop cost. The result of a contraction over time is written once for all steps."""
        dots = 0.0
        others = 0.0
        reductions = 0.0
        calls = 0.0
        most_copied = 0
        for fact in self._facts_of(eqns):
            eqn = fact.eqn
            calls += fact.all_steps_call_seconds
            if fact.reduces:
                reductions += fact.seconds
            if fact.is_call and len(fact.inputs) > 1:
                # XLA copies the first operand of a product over time, transposed; the smaller one is put first.
                most_copied = max(most_copied, min(map(self.size, fact.inputs)))
            if eqn.primitive.name != "dot_general":
                others += fact.seconds if fact.is_call else 0.0
                continue
            dots += operation_seconds(eqn, self.machine)
            if not is_outer(eqn):
                # It also copies operands that are contracted over other axes than the first ones.
                contracted, _ = eqn.params["dimension_numbers"]
                copied = 0
                for atom, axes in zip(eqn.invars, contracted):
                    if sorted(axes) != [*range(len(axes))]:
                        copied += self.sizes(jaxprs.variables([atom]))
                most_copied = max(most_copied, copied)
        return Costs(
            products=dots + others,
            elements=reductions,
            calls=calls,
            kernels=len(eqns),
            peak_bytes=most_copied,
        )
