"""The most bytes of temporary arrays that equations need at one time, as XLA:CPU allocates them in a program of its own.

The problem: which results become arrays, and from when to when each of them lives. For example, with a product as the only
call,

    a = tanh(x)        fused into b: no array
    b = a * y          read by the product: an array        b lives   |==|
    c = b @ W          a call: an array                     c lives      |===|
    d = c + x          the result of the step

so that the peak is the bytes of b and c together. Kernels run in XLA's order, which is breadth first: all kernels that only
read inputs run before kernels that read their results. A kernel reads what all values read that are fused into it.

They are more arrays than those whose time the cost model counts. XLA writes the slice of a stack that a call reads to an
array of its own, copies a carry that is read after the new one is written, and computes a function once that several kernels
read. For many steps together, an elementwise result is written over an operand that nothing else reads.

What XLA allocates was found by comparison with `compiled.memory_analysis()` (tests/loops/test_memory_claims.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import compress
from typing import NamedTuple, Protocol

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.jaxprs.jax_internals import XLA_MAKES_ONE_KERNEL
from jrnn.loops.costs.equation_costs import is_library_reduction, is_outer
from jrnn.loops.costs.sources import Arrays, Sources
from jrnn.loops.ir import Loop


class Estimator(Protocol):
    """What is read of `jrnn.loops.costs.estimates.Estimator`."""

    loop: Loop
    carried: set[Var]
    size: Callable[[Var], int]

    def inner_bytes(self, eqn: Eqn) -> int: ...


class EquationFacts(NamedTuple):
    """What is known of an equation. It keeps the equation alive, whose id is its key in `Estimator`.

    Attributes:
        eqn: the equation.
        inputs: the variables that it reads.
        outs: its results.
        out_bytes: the bytes of its results.
        is_call: whether it is a kernel of its own, such as a product, or one that a library runs.
        reduces: whether it is a reduction.
        is_function: whether it is a function of elements, such as tanh.
        seconds: its time at one step, without the call.
        all_steps_seconds: the same for one of many steps together, for a call.
        call_seconds: the time of calling it at one step.
        all_steps_call_seconds: the time of calling it for many steps together.
        packing_seconds: the time of copying its large constant operands into another order.
        in_place: whether it is an update that XLA writes over its operand, or over what it is added to.
    """

    eqn: Eqn
    inputs: Sequence[Var]
    outs: Sequence[Var]
    out_bytes: int
    is_call: bool
    reduces: bool
    is_function: bool
    seconds: float = 0.0
    all_steps_seconds: float = 0.0
    call_seconds: float = 0.0
    all_steps_call_seconds: float = 0.0
    packing_seconds: float = 0.0
    in_place: bool = False


def peak_bytes(
    estimator: Estimator,
    facts: Sequence[EquationFacts],
    arrays: AbstractSet[Var],
    outputs: AbstractSet[Var],
    all_steps: bool,
) -> int:
    """Returns the bytes of the temporary arrays at the peak, without the results.

    Args:
        estimator: the `Estimator` of the loop.
        facts: what is known of the equations.
        arrays: their results that are written to memory.
        outputs: their results that are read elsewhere.
        all_steps: the equations are evaluated for many steps together.
    """
    producers = jaxprs.producers([fact.eqn for fact in facts])
    arrays = {v for v in arrays if v in outputs or not _is_fused(v, producers)}
    uses = Counter[Var]()
    for fact in facts:
        uses.update(fact.inputs)

    # Operands and results that XLA:CPU does not fuse with their neighbors are arrays, too.
    separate = read_by_libraries(facts, arrays, _is_separate)
    for fact in facts:
        if fact.is_call or fact.eqn.primitive.name == "concatenate":
            separate.update(fact.inputs)
            if not fact.in_place:
                separate.update(fact.outs)
        elif fact.is_function:
            separate.update(v for v in fact.outs if uses[v] + (v in outputs) > 1)
    arrays |= {v for v in separate if v in producers and not _is_fused(v, producers)}
    body = _Body(estimator, facts, arrays)

    # Which arrays are temporary: results are not.
    if all_steps:
        temporary = arrays - outputs
        temporary -= body.reused(temporary)
        copied_bytes = 0
    else:
        # A result that other kernels read is copied to its stack; a carry is written in its place, except by a call.
        in_place = {*jaxprs.variables(estimator.loop.carry_out)}
        library_reads = 0
        for fact, read in zip(facts, body.reads):
            if fact.is_call:
                in_place.difference_update(fact.outs)
            if fact.is_call or (fact.reduces and is_library_reduction(fact.eqn)):
                library_reads |= read
        read_by_library = body.sources.listed(library_reads)
        separate.update(read_by_library)
        temporary = arrays - (outputs - (separate - in_place))
        temporary |= _slices(estimator, producers, read_by_library)
        copied_bytes = body.copied_carry_bytes(outputs)

    # The peak over the kernels in their order.
    order = body.in_order()
    changes = body.changes_of_bytes(temporary, order)
    live_bytes = copied_bytes
    peak = copied_bytes
    for at, i in enumerate(order):
        live_bytes += changes[at]
        inner_bytes = 0
        if facts[i].is_call:
            inner_bytes = _inner_bytes(estimator, facts[i].eqn, all_steps)
        peak = max(peak, live_bytes + inner_bytes)
    return peak


class _Body:
    """Equations, as XLA's kernels.

    Attributes:
        estimator: the `Estimator` of the loop.
        facts: what is known of the equations.
        arrays: results that are written to memory.
        sources: numbers the arrays and inputs that the equations read.
        reads: the arrays and inputs that each equation reads, through the values that are no arrays, as bits (`Sources`).
        kernels: for each equation whether it is a call, or writes an array.
    """

    def __init__(
        self,
        estimator: Estimator,
        facts: Sequence[EquationFacts],
        arrays: AbstractSet[Var],
    ):
        self.estimator = estimator
        self.facts = facts
        self.arrays = arrays
        self.kernels = [f.is_call or not arrays.isdisjoint(f.outs) for f in facts]
        self.sources = Sources()
        self.reads: list[Arrays] = []
        for fact in facts:
            read = self.sources.read(fact.inputs)
            self.reads.append(read)
            for v in fact.outs:
                if v not in arrays:
                    self.sources.of[v] = read

    def in_order(self) -> list[int]:
        """Returns the positions of the kernels in XLA:CPU's order.

        It is breadth first: all kernels that only read inputs run before kernels that read their results. A value that is no
        array is there when what it is computed from is.
        """
        missing = Counter[int]()  # operands that are not there yet
        readers: dict[Var, list[int]] = {}
        for i, fact in enumerate(self.facts):
            for v in fact.inputs:
                if v in readers:
                    missing[i] += 1
                    readers[v].append(i)
            for v in fact.outs:
                readers[v] = []

        def ready(equations: list[int]) -> list[int]:
            """Returns the kernels among equations with known operands, and among the equations that follow from them."""
            kernels = []
            for i in equations:  # which grows
                if self.kernels[i]:
                    kernels.append(i)
                for v in self.facts[i].outs:
                    if v not in self.arrays:
                        equations += read_last(v)
            return sorted(kernels)

        def read_last(v: Var) -> list[int]:
            """Returns the equations of whose operands this value is the last that was not there."""
            complete = []
            for i in readers[v]:
                missing[i] -= 1
                if not missing[i]:
                    complete.append(i)
            return complete

        order = ready([i for i in range(len(self.facts)) if not missing[i]])
        for i in order:  # which grows
            following = []
            for v in self.facts[i].outs:
                if v in self.arrays:
                    following += read_last(v)
            order += ready(following)
        return order

    def changes_of_bytes(self, temporary: AbstractSet[Var], order: Sequence[int]) -> Counter[int]:
        """Returns the change of the bytes of temporary arrays at each kernel, by its place in an order."""
        places = list(enumerate(order))
        last_read_at = self._first_read(temporary, places[::-1])
        written_at = self._first_read(temporary, places)
        for at, i in places:
            for v in self.facts[i].outs:
                if v in temporary:
                    written_at[v] = min(at, written_at.get(v, at))
                    last_read_at[v] = max(at, last_read_at.get(v, at))
        changes = Counter[int]()
        for v, at in written_at.items():
            changes[at] += self.estimator.size(v)
            changes[last_read_at[v] + 1] -= self.estimator.size(v)
        return changes

    def _first_read(
        self, arrays: AbstractSet[Var], kernels: Sequence[tuple[int, int]]
    ) -> dict[Var, int]:
        """Returns the place of the first kernel that reads each of some arrays, from pairs of places and kernels."""
        places: dict[Var, int] = {}
        others = self.sources.bits(arrays)
        for place, i in kernels:
            places.update(dict.fromkeys(self.sources.listed(self.reads[i] & others), place))
            others &= ~self.reads[i]
        return places

    def reused(self, temporary: AbstractSet[Var]) -> set[Var]:
        """Returns the arrays over which results are written. Nothing else reads them: XLA may run other readers later."""
        once = 0
        several = 0
        for read in compress(self.reads, self.kernels):
            several |= once & read
            once |= read
        free = once & ~several & self.sources.bits(temporary)
        reused: set[Var] = set()
        for fact, read in zip(self.facts, self.reads):
            (v, *_) = fact.outs
            if fact.is_call or fact.reduces or v not in self.arrays or v in temporary:
                continue
            candidates = []
            for u in self.sources.listed(read & free):
                if jaxprs.type_of(u) == jaxprs.type_of(v):
                    candidates.append(u)
            reused.update(candidates[:1])
            free &= ~self.sources.bits(candidates[:1])
        return reused

    def copied_carry_bytes(self, outputs: AbstractSet[Var]) -> int:
        """Returns the bytes of carries that XLA copies: carries that are stacked, or read after the new carry is written."""
        loop = self.estimator.loop
        written_at: dict[Var, int] = {}
        kernels = []
        for i, fact in enumerate(self.facts):
            written_at.update(dict.fromkeys(fact.outs, i))
            if self.kernels[i]:
                kernels.append((i, i))
        last_read_at = self._first_read(set(loop.carry), kernels[::-1])
        copied_bytes = 0
        for old, new in zip(loop.carry, loop.carry_out):
            is_stacked = old in outputs and new is not old
            is_written = jaxprs.is_in(new, written_at)
            if is_stacked or (is_written and last_read_at.get(old, -1) > written_at[new]):
                copied_bytes += self.estimator.size(old)
        return copied_bytes


def _is_fused(v: Var, producers: Mapping[Var, Eqn]) -> bool:
    """Returns True for zeros, also with one slice set, which XLA computes where they are read."""
    eqn = producers.get(v)
    if eqn is not None and eqn.primitive.name == "dynamic_update_slice":
        return jaxprs.is_zero(eqn.invars[0], producers)
    return jaxprs.is_zero(v, producers)


def read_by_libraries(
    facts: Sequence[EquationFacts],
    arrays: AbstractSet[Var],
    is_separate: Callable[[Eqn], bool],
) -> set[Var]:
    """Returns the operands of reductions in a library that XLA computes before it calls the library.

    Args:
        facts: what is known of the equations.
        arrays: results that are written to memory.
        is_separate: which equations a library does not compute.
    """
    separate: set[Var] = set()
    operands: set[Var] = set()
    reductions = [fact for fact in facts if fact.reduces]
    for fact in facts if reductions else ():
        if fact.reduces and is_library_reduction(fact.eqn):
            operands.update(separate.intersection(fact.inputs))
        elif not fact.is_call and (is_separate(fact.eqn) or not separate.isdisjoint(fact.inputs)):
            separate.update(v for v in fact.outs if v not in arrays)
    return operands


def _is_separate(eqn: Eqn) -> bool:
    """Returns True for what XLA writes before a library reduces what follows from it.

    These are broadcasts of arrays, and before jaxlib 0.12 functions.
    """
    if primitives.row_of(eqn).cost and not XLA_MAKES_ONE_KERNEL:
        return True
    if eqn.primitive.name != "broadcast_in_dim" and not primitives.is_kind(eqn, "elementwise"):
        return False
    whole = eqn.outvars[0].aval.shape
    for a in eqn.invars:
        shape = a.aval.shape
        if shape not in ((), whole) and 1 < jaxprs.elements(shape) < jaxprs.elements(whole):
            return True
    return False


def _slices(
    estimator: Estimator,
    producers: Mapping[Var, Eqn],
    read: Iterable[Var],
) -> set[Var]:
    """Returns the inputs of a step that calls read: XLA copies each from its stack."""
    not_inputs = producers.keys() | estimator.carried
    return {v for v in read if v in estimator.loop.varying and v not in not_inputs}


def _inner_bytes(estimator: Estimator, eqn: Eqn, all_steps: bool) -> int:
    """Returns the bytes of the arrays that an equation needs while it runs, next to its operands and results.

    An inner loop or a branch has arrays of its own. A draw has the words that its rounds turn into others, which an inner
    loop copies. For many steps together, XLA transposes stacked operands of a product that are not contracted over the last
    axis.
    """
    if primitives.is_kind(eqn, "draw"):
        return (2 if all_steps else 5) * sum(map(jaxprs.nbytes, eqn.outvars))
    if any(jaxprs.sub_jaxprs(eqn)):
        return int(estimator.inner_bytes(eqn))
    if not all_steps or eqn.primitive.name != "dot_general" or is_outer(eqn):
        return 0
    contracted, _ = eqn.params["dimension_numbers"]
    transposed_bytes = 0
    for atom, axes in zip(eqn.invars, contracted):
        is_last_axis = tuple(axes) == (atom.aval.ndim - 1,)
        if jaxprs.is_in(atom, estimator.loop.varying) and not is_last_axis:
            transposed_bytes += estimator.size(atom)
    return transposed_bytes
