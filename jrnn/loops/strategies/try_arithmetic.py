"""The strategy "arithmetic" on a CPU: small linear algebra is written as arithmetic, if that is estimated to pay.

XLA:CPU outlines a while loop as one kernel if nothing in it is a custom call, sort, scatter, transform or library fusion,
and if one trip accesses fewer bytes than a limit. Before jaxlib 0.12 there is one by default.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, primitives
from jrnn.loops.costs.equation_costs import (
    LARGE_PRODUCT,
    LIBRARY_SUM,
    has_one_row,
    is_matvec,
    is_one_row,
    is_outer,
)
from jrnn.loops.costs.estimates import Estimate, Estimator, estimate
from jrnn.loops.costs.machines import ONE_KERNEL_FLAG, SMALL_LOOP, Machine
from jrnn.loops.ir import Loop, Results
from jrnn.loops.ir.description import Description, described
from jrnn.loops.passes import Moves
from jrnn.loops.passes.arithmetic import draws
from jrnn.loops.passes.arithmetic.rewrite import RULES, Fits, as_arithmetic, equations
from jrnn.loops.plan import Candidate
from jrnn.loops.strategies.context import Context
from jrnn.loops.strategies.nodes import Split

NAME = "arithmetic"
# operations of a factorization or sort; elements to sort, or places of a scatter
_LARGEST = 1 << 15
_PLACES = 16
_ROWS = {"eigh": 3, "lu": 10}  # of matrices whose eigenvalues are computed, or that are eliminated
_WORDS = 0.4  # operations of a generator on words stay in registers
# rows of a matrix to factorize in one kernel, and in several
_ORDER = 12
_ORDER_IN_PARTS = 8
# Places of all scatters of a step. XLA joins some of them again, which are then kernels: of 249 places of a neuron with 12
# compartments, 25 pairs, so that a step was 280 kernels, and took 1.5 times as long as without arithmetic.
_SCATTERS = 128
_LINEAR = "small linear algebra"
_SUBJECTS: dict[primitives.Kind, str] = {
    "draw": "draws of random numbers",
    "order": "small sorts",
    "update": "small scatters",
}
_EQUATIONS = 3_000  # of a rewritten step, which bounds the time of compilation


@dataclass(frozen=True)
class Arithmetic:
    """The node of a loop whose small linear algebra, sorts, scatters or draws are arithmetic.

    Attributes:
        loop: the loop as arithmetic.
        subjects: what of it is written so, as in "small sorts".
        cost: of all steps.
        kernel_blockers: the primitives that keep it from being one kernel.
        fits_kernel_limit: it accesses so few bytes at a step that XLA makes one kernel, if nothing blocks that.
    """

    loop: Loop
    subjects: tuple[str, ...]
    cost: Estimate
    kernel_blockers: tuple[str, ...]
    fits_kernel_limit: bool

    def run(
        self, consts: Sequence[Any], init: Sequence[Any], xs: Sequence[Any], length: Any
    ) -> Results:
        return self.loop.run(consts, init, xs, length)

    def estimate(self, estimator: Estimator) -> Estimate:
        return self.cost

    def describe(self) -> Description:
        return described(self.loop, str(self))

    @property
    def is_one_kernel(self) -> bool:
        return self.fits_kernel_limit and not self.kernel_blockers

    def __str__(self) -> str:
        if self.kernel_blockers:
            how = f"no single kernel, because of {', '.join(self.kernel_blockers)}"
        elif self.fits_kernel_limit:
            how = "one kernel"
        else:
            how = f"one kernel if the process starts with XLA_FLAGS={ONE_KERNEL_FLAG}"
        subject = " and ".join(self.subjects)
        verb = "is" if self.subjects == (_LINEAR,) else "are"
        return f"{subject} {verb} written as arithmetic: {how}"


def try_arithmetic(context: Context) -> Sequence[Candidate]:
    """Returns the candidates with small linear algebra as arithmetic; one if nothing keeps it from being one kernel."""
    candidates = []
    for moves in dict.fromkeys((Moves(), _with_draws_inside(context))):
        split_loop = context.split(moves)
        rewritten = arithmetic(split_loop.residual, context.estimator)
        if rewritten is None:
            continue
        label = "as arithmetic" if moves == Moves() else "as arithmetic, all else outside"
        candidates.append(context.candidate(NAME, Split(split_loop, rewritten), label))
        if not rewritten.kernel_blockers:
            break
    return candidates


def _with_draws_inside(context: Context) -> Moves:
    """Returns all that may leave a loop but draws of random numbers, except those that something else before the loop reads.

    As arithmetic a draw takes less time in the loop than for all steps before it, where JAX's own rounds are a loop over
    arrays of all steps.
    """
    loop = context.loop
    moves = context.movable
    draws = {v for e in loop.eqns if primitives.is_kind(e, "draw") for v in e.outvars}
    feeding, _ = jaxprs.needed(loop.eqns, moves.hoist - draws, set(loop.inputs))
    read = set(jaxprs.results(feeding))
    return replace(moves, hoist=moves.hoist - (draws - read))


def arithmetic(loop: Loop, estimator: Estimator) -> Arithmetic | None:
    """Returns the loop as arithmetic, or None if that changes nothing or makes its step too long to compile."""
    eqns = [*equations(loop.eqns)]
    if not all(jaxprs.is_known(n) for e in eqns for v in e.outvars for n in v.aval.shape):
        return None
    are_too_many = sum(map(_scattered_places, eqns)) > _SCATTERS

    def fits(eqn: Eqn, order: int = _ORDER) -> bool:
        return not (are_too_many and _scattered_places(eqn)) and fits_arithmetic(eqn, order)

    has_blocker = any(_is_blocker(e) and not (e.primitive.name in RULES and fits(e)) for e in eqns)
    order = (
        _ORDER_IN_PARTS
        if has_blocker or estimator.machine.one_kernel_bytes <= SMALL_LOOP
        else _ORDER
    )
    written = _written(loop, estimator, lambda e: fits(e, order))
    if written is None or written.is_one_kernel or estimator.machine.one_kernel_bytes > SMALL_LOOP:
        return written
    # XLA before jaxlib 0.12 writes products of one row itself, faster than as arithmetic in a kernel of their own.
    return _written(loop, estimator, lambda e: fits(e, order) and not has_one_row(e))


def _written(loop: Loop, estimator: Estimator, fits: Fits) -> Arithmetic | None:
    """Returns the loop with what `fits` as arithmetic, or None if that changes nothing or makes its step too long."""
    changed = as_arithmetic(loop, fits)
    rewritten = [*equations(changed.eqns)]
    if changed is loop or len(rewritten) > _EQUATIONS:
        return None
    kernel_blockers = tuple(dict.fromkeys(e.primitive.name for e in rewritten if _is_blocker(e)))
    costs = _Estimator(changed, estimator.machine if kernel_blockers else quiet(estimator.machine))
    inside = costs.part(changed.eqns, changed.outputs)
    fits_kernel_limit = inside.is_small(costs.machine)
    if not fits_kernel_limit and not kernel_blockers:
        costs = _Estimator(changed, estimator.machine)
        inside = costs.part(changed.eqns, changed.outputs)
    memory = estimator.part(loop.eqns, loop.outputs).peak_bytes  # of the loop as it was
    cost = estimate(costs.trips(changed, inside), memory)
    subjects = _subjects(loop, changed)
    return Arithmetic(changed, subjects, cost, kernel_blockers, fits_kernel_limit)


def _subjects(loop: Loop, changed: Loop) -> tuple[str, ...]:
    """Returns what of a loop is arithmetic in another: the kinds of the primitives of which that has fewer."""
    before = Counter(e.primitive.name for e in equations(loop.eqns))
    after = Counter(e.primitive.name for e in equations(changed.eqns))
    kinds = [primitives.named(name).kind for name in before - after if name in RULES]
    return tuple(dict.fromkeys(_SUBJECTS.get(kind, _LINEAR) for kind in kinds)) or (_LINEAR,)


def _scattered_places(eqn: Eqn) -> int:
    """Returns the number of places of a scatter, or 0 for another equation."""
    return (
        jaxprs.elements(eqn.invars[1].aval.shape[:-1])
        if eqn.primitive.name.startswith("scatter")
        else 0
    )


class _Estimator(Estimator):
    """Counts no calls and kernels in inner loops that are one kernel, and the rounds of a generator as what they are."""

    def _own_seconds(self, eqn: Eqn, call: bool) -> float:
        words = any(v.aval.dtype == np.uint32 for v in eqn.outvars)
        return (_WORDS if words else 1.0) * super()._own_seconds(eqn, call)

    def _inner_seconds(self, eqn: Eqn) -> float:
        outer = self.machine
        bodies = [*jaxprs.run_jaxprs(eqn)]
        fits_kernel_limit = all(self.inside(jaxpr).is_small(outer) for jaxpr in bodies)
        if fits_kernel_limit and not any(map(_is_blocker, equations([eqn]))):
            self.machine = quiet(outer)
        try:
            return super()._inner_seconds(eqn)
        finally:
            self.machine = outer


def quiet(machine: Machine) -> Machine:
    """Returns the machine inside of a kernel, where nothing is called."""
    return machine._replace(call=0.0, kernel=0.0, trip=machine.elementwise_trip)


def fits_arithmetic(eqn: Eqn, order: int = _ORDER) -> bool:
    """Returns True if an equation is faster as arithmetic than as a call. A matrix to factorize has at most `order` rows."""
    name = eqn.primitive.name
    if name in draws.RULES:
        return True
    shape: tuple[int, ...] = eqn.invars[0].aval.shape
    if name == "dot_general":
        matrices = not is_matvec(eqn) or is_one_row(
            eqn
        )  # in the kernel, one row is slower than as arithmetic
        return jaxprs.operations(eqn) < LARGE_PRODUCT and matrices and not is_outer(eqn)
    if _scattered_places(eqn):
        return 1 < _scattered_places(eqn) <= _PLACES
    if name in ("sort", "top_k"):
        axis: int = eqn.params.get("dimension", eqn.params.get("axis", -1))
        return shape[axis] <= _PLACES and math.prod(shape) * shape[axis] <= _LARGEST
    return (
        max(shape[-2:]) <= min(order, _ROWS.get(name, order))
        and math.prod(shape) * shape[-1] <= _LARGEST
    )


def _is_blocker(eqn: Eqn) -> bool:
    name = eqn.primitive.name
    if name == "dot_general":
        return not is_matvec(eqn) and not is_outer(eqn)
    if _scattered_places(eqn):
        return _scattered_places(eqn) > 1
    if primitives.is_kind(eqn, "reduction"):
        return jaxprs.elements(eqn.invars[0].aval.shape) >= LIBRARY_SUM
    return primitives.is_library_call(eqn) or bool(eqn.effects)
