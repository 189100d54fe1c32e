"""Estimates of loops: from equations and their shapes to time and temporary memory (`machines.py` has the constants).

Invariant: an estimate of a loop split into parts and one of the whole loop count the same equations in the same way, so that
their difference is what the split changes.

Shapes: T time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from jrnn.loops import jaxprs, primitives
from jrnn.loops.costs import Estimate
from jrnn.loops.jaxprs import Atom, Eqn, Var
from jrnn.loops.loop import Loop
from jrnn.loops.machines import CPU, Machine
from jrnn.loops.passes.fission import Fission

# Times of functions, compared with one such as tanh.
_FUNCTIONS = {
    **dict.fromkeys((*primitives.ACTIVATIONS, "log", "log2", "exp2", "cbrt"), 1.0),
    **dict.fromkeys(("sin", "cos"), 3.5),
    **dict.fromkeys(("atan2", "acos", "asin", "lgamma", "digamma"), 16.0),
    **dict.fromkeys(("div", "sqrt", "rsqrt"), 0.3),
    **{"erf_inv": 4.0, "pow": 8.0, "tan": 7.0},
}
# Times of one element of these, compared with a function, measured on a CPU: `sort` for each doubling of the length.
_SORTING, _SELECTING, _DRAWING, _RUNNING = 8, 7, 8, 7
_PLACING = 0.5
_ROW, _ROW_FOR_ALL = 3, 30  # of one index, at one step and for all steps together, which XLA:CPU does not vectorize
_DRAWS = frozenset(("random_bits", "threefry2x32"))
_RUNNING_RESULTS = frozenset(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"))
_LOOKUPS = frozenset(("dynamic_slice", "gather"))
_UPDATES = frozenset((
    "dynamic_update_slice", "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul",
))  # fmt: skip
_WHILE = 10  # trips of a `while` loop, whose number nobody knows
_SAME = frozenset(("copy", "copy_p", "name", "stop_gradient", "reshape", "squeeze", "expand_dims"))
_REDUCTIONS = frozenset((
    "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum", "reduce_xor",
))  # fmt: skip
_TOUCHING = 0.5  # the first time that new memory is written takes so many times the time of writing it
_LEAST = 24  # arrays with fewer elements cost as much as with so many
_SOLVERS = frozenset(("cholesky", "eig", "eigh", "lu", "qr", "svd", "triangular_solve"))
_SOLVING = 30  # an operation of a solver on small matrices takes so many times the time of one in a product
Terms = tuple[tuple[str, float], ...]

_BY_ROWS = 1.25  # a product x W^T in a loop takes so many times the time of x W
_BATCHED = 10  # many triangular systems at once, which JAX does not give to LAPACK, take so many times the time of one


@dataclass(frozen=True)
class Part:
    """What equations cost, evaluated once for some steps together.

    Attributes:
        products: seconds of products, lookups and solvers.
        elements: seconds of elementwise operations and reductions.
        read, written: bytes of arrays that are read and written by kernels that are not products.
        calls: seconds of calling products, lookups and solvers.
        kernels: the number of other kernels.
        peak: bytes of the arrays made, at the most at one time, without the results.
        total: bytes of all arrays made.
    """

    products: float = 0.0
    elements: float = 0.0
    read: int = 0
    written: int = 0
    calls: float = 0.0
    kernels: int = 0
    peak: int = 0
    total: int = 0

    def seconds(self, machine: Machine, steps: int, size: float) -> float:
        """Returns the time without calls and kernels, for arrays of `steps` steps, `size` bytes in all."""
        moved = machine.reading(self.read, size) + machine.writing(self.written, size)
        return steps * (self.products + max(self.elements, moved))

    def overhead(self, machine: Machine) -> float:
        return self.calls + self.kernels * machine.kernel


class Estimator:
    """Estimates the ways to run a loop. What its equations cost is computed once.

    Args:
        loop: the loop after its passes.
        machine: the constants.
    """

    def __init__(self, loop: Loop, machine: Machine = CPU):
        self.loop, self.machine = loop, machine
        self.moving = jaxprs.depends(loop.eqns, (*loop.carry, *loop.xs))
        self.carried = {*loop.carry}
        # XLA adds updates of zeros to what they are added to, in place.
        made = jaxprs.producers(loop.eqns)
        self.updates = {
            e.outvars[0]: e.invars[0]
            for e in loop.eqns
            if e.primitive.name == "scatter-add" and jaxprs.is_zero(e.invars[0], made)
        }
        added = [e for e in loop.eqns if e.primitive.name in primitives.ADDITIONS]
        self.free = {
            *self.updates.values(),
            *(e.outvars[0] for e in added if not self.updates.keys().isdisjoint(jaxprs.inputs(e))),
        }
        self._facts: dict[int, _Facts] = {}
        self._size: dict[Var, int] = {}

    def whole(self) -> Estimate:
        """Returns the estimate of the loop as it is."""
        inside = self.part(self.loop.eqns, self.loop.outputs)
        seconds, terms = self.trips(self.loop, inside)
        return Estimate(seconds, inside.peak, terms)

    def split(self, fission: Fission) -> Split:
        """Returns the costs of the loop in parts."""
        loop, core = fission.loop, fission.core
        read_after = set(jaxprs.free_variables((*fission.sunk, *fission.added)))
        given = {*loop.xs, *jaxprs.variables(loop.ys)}
        made = {v for e in fission.added for v in e.outvars}
        added = {*jaxprs.free_variables(fission.added)}
        # What is no contraction or reduction is stacked, and the stack is summed.
        added |= {v for values in fission.summed.values() for v in jaxprs.variables(values) if v not in made}
        return Split(
            self,
            fission,
            inside=self.part(core.eqns, core.outputs),
            before=self.part(fission.hoisted, fission.early, together=True),
            after=self.part(fission.sunk, fission.late, together=True),
            sums=self._sums(fission.added),
            operands=self.sizes(v for v in added if v in self.moving),
            stacks=self.sizes({*fission.early, *core.ys, *fission.late} - given),
            shifted=self.sizes(v for v in core.carry if v in read_after and v not in core.ys),
            given=self.sizes(given),
            results=self.sizes(loop.carry[i] for i in fission.summed),
        )

    def size(self, v: Var) -> int:
        found = self._size.get(v)
        if found is None:
            found = self._size[v] = jaxprs.nbytes(v)
        return found

    def sizes(self, found: Iterable[Var]) -> int:
        return sum(map(self.size, found))

    def part(self, eqns: Sequence[Eqn], outs: Iterable[Atom], together: bool = False) -> Part:
        """Returns what equations cost, evaluated for one step, or for many steps together.

        Args:
            eqns: the equations.
            outs: what is read of their results.
            together: for many steps. Constant operands of products are then read once for all, which costs nothing.
        """
        facts = [self._facts_of(e) for e in eqns]
        wanted = set(jaxprs.variables(outs))
        made = {v for e in eqns for v in e.outvars}
        arrays = {v for v in wanted if v in made}
        for eqn, fact in zip(eqns, facts):
            if fact.call:
                arrays.update(eqn.outvars)
                arrays.update(v for v in fact.inputs if v in made)
            elif fact.reduces:
                arrays.update(eqn.outvars)
        for eqn in eqns:
            if eqn.primitive.name in _SAME and not wanted.intersection(eqn.outvars):
                arrays.discard(eqn.outvars[0])
        sources: dict[Var, frozenset[Var]] = {}  # the arrays that a value that is not an array is computed from
        products = elements = calls = 0.0
        read = written = kernels = total = 0
        last_use: dict[Var, int] = {}
        for i, (eqn, fact) in enumerate(zip(eqns, facts)):
            union = frozenset(u for v in fact.inputs for u in sources.get(v, (v,)))
            if fact.call:
                products += fact.together if together else fact.seconds
                calls += fact.calling
            elif together or eqn.outvars[0] not in self.free:
                elements += fact.seconds
                if any(v in arrays for v in eqn.outvars):
                    kernels += 1
                    written += fact.out
                    read += self.sizes(union)
            for v in eqn.outvars:
                if v in arrays:
                    total += self.size(v)
                else:
                    sources[v] = union
            last_use.update(dict.fromkeys(union, i))
        temporary = {v for v in arrays if v not in wanted}
        ends: dict[int, int] = {}
        for v, at in last_use.items():
            if v in temporary:
                ends[at] = ends.get(at, 0) + self.size(v)
        live = peak = 0
        for i, eqn in enumerate(eqns):
            live += sum(self.size(v) for v in eqn.outvars if v in temporary)
            peak = max(peak, live + (self._copied(eqn) if together else 0))
            live -= ends.get(i, 0)
        return Part(products, elements, read, written, calls, kernels, peak, total)

    def _copied(self, eqn: Eqn) -> int:
        """Returns the bytes of stacks that XLA:CPU transposes before a product: those not contracted over the last axis."""
        if eqn.primitive.name != "dot_general" or _is_outer(eqn):
            return 0
        contracted, _ = eqn.params["dimension_numbers"]
        stacks = [(a, axes) for a, axes in zip(eqn.invars, contracted) if jaxprs.is_in(a, self.moving)]
        return sum(self.size(a) for a, axes in stacks if tuple(axes) != (a.aval.ndim - 1,))

    def _facts_of(self, eqn: Eqn) -> _Facts:
        found = self._facts.get(id(eqn))
        if found is None:
            call = _is_call(eqn)
            found = self._facts[id(eqn)] = _Facts(
                eqn,
                jaxprs.inputs(eqn),
                self.sizes(eqn.outvars),
                call,
                eqn.primitive.name in _REDUCTIONS,
                self._seconds(eqn, False) if call else element_seconds(eqn, self.machine),
                self._seconds(eqn, True) if call else 0.0,
                _call_seconds(eqn, self.machine) if call else 0.0,
            )
        return found

    def _seconds(self, eqn: Eqn, together: bool) -> float:
        """Returns the time of what is not fused, at one step, or for one of many steps together."""
        name = eqn.primitive.name
        if name in _LOOKUPS or name in _UPDATES:
            in_place = not together and (jaxprs.is_in(eqn.invars[0], self.carried) or eqn.outvars[0] in self.updates)
            return _indexing_seconds(eqn, together, in_place, self.machine)
        if any(True for _ in jaxprs.sub_jaxprs(eqn)):
            return self._inner_seconds(eqn)
        return _product_seconds(eqn, self.moving if together else None, self.machine)

    def _inner_seconds(self, eqn: Eqn) -> float:
        """Returns the time of a call, an inner loop, or the longest branch."""
        name, machine, times = eqn.primitive.name, self.machine, [0.0]
        for inner in jaxprs.sub_jaxprs(eqn):
            part = self.part(inner.eqns, inner.outvars)
            times.append(part.seconds(machine, 1, part.total) + part.overhead(machine))
        if name == "cond":
            return max(times)
        trips = jaxprs.extent(eqn.params["length"]) if name == "scan" else _WHILE if name == "while" else 1
        return trips * (sum(times) + machine.elementwise_trip)

    def trips(self, loop: Loop, inside: Part) -> tuple[float, Terms]:
        machine, steps = self.machine, jaxprs.extent(loop.length)
        reading, writing = self.sizes(loop.xs), self.sizes(jaxprs.variables(loop.ys))
        stacks = machine.reading(steps * reading, steps * reading) + machine.writing(steps * writing, steps * writing)
        work = inside.seconds(machine, steps, inside.total)
        trips = steps * (machine.trip + inside.overhead(machine) if inside.calls else machine.elementwise_trip)
        # What a product or a branch makes is copied into its stack.
        made = {v for e in loop.eqns for v in e.outvars if self._facts_of(e).calling}
        trips += steps * machine.kernel * sum(v in made for v in jaxprs.variables(loop.ys))
        return stacks + work + trips, (("steps", work), ("trips", trips), ("stacks", stacks))

    def _sums(self, eqns: Sequence[Eqn]) -> Part:
        """Returns what the sums after a loop cost. The result of a contraction over time is written once for all steps."""
        facts = [self._facts_of(e) for e in eqns]
        dots = sum(_operations(e) / self.machine.products for e in eqns if e.primitive.name == "dot_general")
        others = sum(f.seconds for f in facts if f.call and f.eqn.primitive.name != "dot_general")
        reductions = sum(f.seconds for f in facts if f.reduces)
        # XLA copies the first operand of a product over time, transposed; the smaller one is put first. It also copies
        # operands that are contracted over other axes than the first ones.
        copied = [min(map(self.size, f.inputs)) for f in facts if f.call and len(f.inputs) > 1]
        for f in facts:
            if f.eqn.primitive.name == "dot_general" and not _is_outer(f.eqn):
                contracted, _ = f.eqn.params["dimension_numbers"]
                inner = [a for a, axes in zip(f.eqn.invars, contracted) if sorted(axes) != [*range(len(axes))]]
                copied.append(sum(map(self.size, jaxprs.variables(inner))))
        calls = sum(f.calling for f in facts)
        return Part(dots + others, reductions, calls=calls, kernels=len(eqns), peak=max(copied, default=0))


@dataclass(frozen=True)
class _Facts:
    """What is known of an equation: see `Estimator._facts_of`. It keeps the equation alive, whose id is the key."""

    eqn: Eqn
    inputs: Sequence[Var]
    out: int
    call: bool
    reduces: bool
    seconds: float
    together: float
    calling: float


@dataclass(frozen=True)
class Split:
    """The costs of a loop in parts.

    Attributes:
        estimator, fission: of which loop, and its parts.
        inside: the loop that stays.
        before, after: what is computed for all steps before and after it.
        sums: what is summed after it; their operands are `operands` bytes a step, their results `results` bytes.
        stacks: bytes a step of the arrays that the original loop would not make.
        shifted: bytes a step of copies that are shifted by a step.
        given: bytes a step of the loop's own inputs and outputs.
    """

    estimator: Estimator
    fission: Fission
    inside: Part
    before: Part
    after: Part
    sums: Part
    operands: int
    stacks: int
    shifted: int
    given: int
    results: int

    def per_step(self, in_chunks: bool) -> int:
        """Returns the bytes of temporary arrays that each step of a chunk adds."""
        return (
            self.stacks + self.shifted + in_chunks * self.given + max(self.before.peak, self.after.peak, self.sums.peak)
        )

    def at_once(self, chunk: int | None = None) -> Estimate:
        """Returns the estimate for `chunk` steps at a time, or all at once."""
        machine, core = self.estimator.machine, self.fission.core
        steps = jaxprs.extent(self.fission.loop.length)
        n = min(chunk or steps, steps)
        times = math.ceil(steps / n)
        again = times > 1
        size = n * max(self.per_step(again), 1)
        seconds, terms = self.estimator.trips(core, self.inside)
        bulk = sum(p.seconds(machine, steps, size) for p in (self.before, self.after))
        adding = steps * (self.sums.products + max(self.sums.elements, machine.reading(self.operands, size)))
        adding += times * (machine.writing(self.results, self.results) * (1 + 2 * again))
        overhead = times * (sum(p.overhead(machine) for p in (self.before, self.after, self.sums)))
        overhead += again * times * 2 * machine.trip
        copies = steps * (machine.reading(2 * again * self.given, size) + machine.writing(self.shifted, size))
        copies += n * self.stacks * _TOUCHING / machine.written
        memory = n * self.per_step(again) + self.inside.peak + again * 2 * self.results
        more = (("all steps at once", bulk), ("sums", adding), ("calls", overhead), ("copies", copies))
        return Estimate(seconds + bulk + adding + overhead + copies, memory, (*terms, *more))


# Equations ------------------------------------------------------------------------------------------------------------


def _is_call(eqn: Eqn) -> bool:
    """Returns True for what is not fused into kernels of elementwise equations."""
    name = eqn.primitive.name
    if name == "dot_general":
        return not _is_outer(eqn)
    return primitives.is_heavy(eqn) or (not primitives.is_cheap(eqn) and name not in _REDUCTIONS)


def _is_outer(eqn: Eqn) -> bool:
    """Returns True for a product that sums nothing, which XLA computes as a multiplication of elements."""
    (axes, _), _ = eqn.params["dimension_numbers"]
    return all(eqn.invars[0].aval.shape[a] == 1 for a in axes)


def _call_seconds(eqn: Eqn, machine: Machine) -> float:
    """Returns what an equation costs besides its operations. Tiny products are slower, but are not calls."""
    if eqn.primitive.name == "dot_general":
        return 0.0 if _is_by_vector(eqn) else machine.kernel + _tiny_seconds(eqn, machine)
    if eqn.primitive.name in _LOOKUPS or eqn.primitive.name == "dynamic_update_slice":
        return 0.0  # part of a kernel
    return machine.call if primitives.is_contraction(eqn) else machine.kernel


def _tiny_seconds(eqn: Eqn, machine: Machine) -> float:
    """Returns what a product costs besides its operations at the rate of large ones."""
    return min(machine.call, _operations(eqn) * (1 / machine.tiny_products - 1 / machine.products))


def _is_by_vector(eqn: Eqn) -> bool:
    """Returns True for a product with a vector, which XLA:CPU computes in the program of the loop, without a call."""
    return not eqn.params["dimension_numbers"][1][0] and any(a.aval.ndim == 1 for a in eqn.invars)


def _operations(eqn: Eqn) -> int:
    """Returns the floating-point operations of a `dot_general`."""
    (axes, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(jaxprs.extent(eqn.invars[0].aval.shape[a]) for a in axes)
    return 2 * jaxprs.elements(eqn.outvars[0].aval.shape) * depth


def _reads_rows(eqn: Eqn) -> bool:
    """Returns True for a product x W^T, which XLA:CPU computes more slowly than x W."""
    ((_, axes), (_, batch)), right = eqn.params["dimension_numbers"], eqn.invars[1].aval
    return right.ndim == 2 and tuple(axes) == (1,) and not batch


def _product_seconds(eqn: Eqn, moving: Collection[Var] | None, machine: Machine) -> float:
    def is_read(atom: Atom) -> bool:
        return moving is None or jaxprs.is_in(atom, moving)

    name = eqn.primitive.name
    out = sum(map(jaxprs.nbytes, eqn.outvars))
    size = out + sum(jaxprs.nbytes(a) for a in eqn.invars if is_read(a))
    moved = machine.reading(size, size)
    count = max((jaxprs.elements(v.aval.shape) for v in eqn.outvars), default=0)
    shapes = [a.aval.shape for a in eqn.invars]
    together = moving is not None  # for many steps
    if name == "dot_general":
        apart = all(map(is_read, eqn.invars)) if together else _is_by_vector(eqn)
        each = _tiny_seconds(eqn, machine) if apart else 0.0
        by_rows = _BY_ROWS if _reads_rows(eqn) and not together else 1.0
        return by_rows * max(_operations(eqn) / machine.products, moved) + each
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        taps = jaxprs.elements(shapes[1]) // max(jaxprs.extent(shapes[1][numbers.rhs_spec[0]]), 1)
        return max(2 * count * taps / machine.products, moved)
    if name in _SOLVERS:
        n = jaxprs.extent(shapes[0][-1])
        matrices = jaxprs.elements(shapes[0][:-2])  # also for many at once, each is one call
        slower = _BATCHED if name == "triangular_solve" and (together or matrices > 1) else 1
        return slower * (matrices * machine.call + jaxprs.elements(shapes[0]) * n * _SOLVING / machine.products)
    of_first = jaxprs.elements(shapes[0]) if shapes else count
    if name == "sort":
        n = jaxprs.extent(shapes[0][-1])
        return _SORTING * of_first * math.log2(n + 1) * machine.function
    if name in ("top_k", "approx_top_k"):
        return _SELECTING * of_first * machine.function
    slower = _DRAWING if name in _DRAWS else _RUNNING if name in _RUNNING_RESULTS else 1
    return moved + slower * count * machine.function


def _indexing_seconds(eqn: Eqn, together: bool, in_place: bool, machine: Machine) -> float:
    """Returns the time of a lookup or an update at indices. An update in place moves only what it writes."""
    name = eqn.primitive.name
    at = {"gather": 1, "dynamic_slice": None, "dynamic_update_slice": None}.get(name, 1)
    rows = 1 if at is None else jaxprs.elements(eqn.invars[at].aval.shape[:-1])
    table = 0
    if name in _LOOKUPS:
        placed, whole, table = eqn.outvars[0], 0, jaxprs.nbytes(eqn.invars[0])
    else:
        placed = eqn.invars[1 if name == "dynamic_update_slice" else 2]
        whole = 0 if in_place else 2 * jaxprs.nbytes(eqn.outvars[0])
    size = whole + 2 * jaxprs.nbytes(placed)
    count = _PLACING * jaxprs.elements(placed.aval.shape) + rows * (_ROW_FOR_ALL if together else _ROW)
    return machine.reading(size, max(size, table)) + count * machine.function


def element_seconds(eqn: Eqn, machine: Machine = CPU) -> float:
    """Returns the time of the operations of an elementwise equation, a view or a reduction."""
    name = eqn.primitive.name
    if primitives.is_view(eqn) or name in ("iota", "concatenate", "pad", "rev", "copy"):
        return 0.0
    of = eqn.invars if name in _REDUCTIONS else eqn.outvars
    count = max(max((jaxprs.elements(a.aval.shape) for a in of), default=1), _LEAST)
    if name in _FUNCTIONS:
        return count * machine.function * _FUNCTIONS[name]
    return count * machine.element * (4 if name in _REDUCTIONS else 1)
