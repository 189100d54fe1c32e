"""The strategy "arithmetic" on a CPU: small linear algebra is written as arithmetic, if that is estimated to pay.

XLA:CPU outlines a while loop as one kernel if nothing in it is a custom call, sort, scatter, transform or library fusion,
and if one trip accesses fewer bytes than a limit. Before jaxlib 0.12 there is one by default.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.machines import ONE_KERNEL_FLAG, SMALL_LOOP, quiet
from jrnn.loops.costs.times import Estimate, estimate
from jrnn.loops.ir import Loop
from jrnn.loops.ir.description import Description, described
from jrnn.loops.passes import NOTHING_MOVES, Moves
from jrnn.loops.passes.arithmetic import draws
from jrnn.loops.passes.arithmetic.rewrite import RULES, Fits, as_arithmetic, equations
from jrnn.loops.plan import Candidate
from jrnn.loops.strategies.context import Context
from jrnn.loops.strategies.nodes import Split, Steps

NAME = "arithmetic"


class ArithmeticLimits(NamedTuple):
    """What is faster as arithmetic than as a call.

    Attributes:
        operations: of a factorization or a sort.
        places: elements to sort, or of a scatter.
        scattered_places: of all scatters of a step. XLA joins some of them again, which are then kernels: of 249 places of
            a neuron with 12 compartments, 25 pairs, so that a step was 280 kernels, and took 1.5 times as long as without
            arithmetic.
        order: rows of a matrix to factorize in one kernel.
        order_in_parts: the same in several kernels.
        lu_order: rows of a matrix that is eliminated.
        equations: of a rewritten step, which bounds the time of compilation.
    """

    operations: int = 1 << 15
    places: int = 16
    scattered_places: int = 128
    order: int = 12
    order_in_parts: int = 8
    lu_order: int = 10
    equations: int = 3_000


LIMITS = ArithmeticLimits()
_LINEAR = "small linear algebra"
_SUBJECTS: dict[primitives.Kind, str] = {
    "draw": "draws of random numbers",
    "order": "small sorts",
    "update": "small scatters",
}


@dataclass(frozen=True)
class Arithmetic(Steps):
    """The node of a loop whose small linear algebra, sorts, scatters or draws are arithmetic.

    Attributes:
        loop: the loop as arithmetic.
        subjects: what of it is written so, as in "small sorts".
        cost: of all steps.
        kernel_blockers: the primitives that keep it from being one kernel.
        fits_kernel_limit: it accesses so few bytes at a step that XLA makes one kernel, if nothing blocks that.
    """

    subjects: tuple[str, ...]
    cost: Estimate
    kernel_blockers: tuple[str, ...]
    fits_kernel_limit: bool

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
    for moves in dict.fromkeys((NOTHING_MOVES, _with_draws_inside(context))):
        split_loop = context.split(moves)
        rewritten = arithmetic(split_loop.residual, context.estimator)
        if rewritten is None:
            continue
        label = (
            "as arithmetic" if moves == NOTHING_MOVES else "as arithmetic, everything else moved"
        )
        candidates.append(context.candidate(NAME, Split(split_loop, rewritten), label))
        if not rewritten.kernel_blockers:
            break
    return candidates


def _with_draws_inside(context: Context) -> Moves:
    """Returns all that may leave a loop, without draws of random numbers unless something else before the loop reads them.

    As arithmetic a draw takes less time in the loop than for all steps before it, where JAX's own rounds are a loop over
    arrays of all steps.
    """
    loop = context.loop
    moves = context.movable
    draw_eqns = [e for e in loop.eqns if primitives.is_kind(e, "draw")]
    drawn = set(jaxprs.results(draw_eqns))
    feeding, _ = jaxprs.needed(loop.eqns, moves.hoist - drawn, set(loop.inputs))
    only_inside = drawn.difference(jaxprs.results(feeding))
    return replace(moves, hoist=moves.hoist - only_inside)


def arithmetic(loop: Loop, estimator: Estimator) -> Arithmetic | None:
    """Returns the loop as arithmetic, or None if that changes nothing or makes its step too long to compile."""
    eqns = [*equations(loop.eqns)]
    sizes: set[object] = set()
    for v in jaxprs.results(eqns):
        sizes.update(v.aval.shape)
    if not all(map(jaxprs.is_known, sizes)):
        return None
    are_too_many = sum(map(_scattered_places, eqns)) > LIMITS.scattered_places
    order = LIMITS.order
    with_one_row = True

    def fits(eqn: Eqn) -> bool:
        if are_too_many and _scattered_places(eqn):
            return False
        return fits_arithmetic(eqn, order) and (with_one_row or not has_one_row(eqn))

    is_in_parts = estimator.machine.one_kernel_bytes <= SMALL_LOOP
    blockers = [eqn for eqn in eqns if _is_blocker(eqn)]
    if is_in_parts or not all(eqn.primitive.name in RULES and fits(eqn) for eqn in blockers):
        order = LIMITS.order_in_parts
    written = _written(loop, estimator, fits)
    if written is None or written.is_one_kernel or not is_in_parts:
        return written
    # XLA before jaxlib 0.12 writes products of one row itself, faster than as arithmetic in a kernel of their own.
    with_one_row = False
    return _written(loop, estimator, fits)


def _written(loop: Loop, estimator: Estimator, fits: Fits) -> Arithmetic | None:
    """Returns the loop with what `fits` as arithmetic, or None if that changes nothing or makes its step too long."""
    changed = as_arithmetic(loop, fits)
    rewritten = [*equations(changed.eqns)]
    if changed is loop or len(rewritten) > LIMITS.equations:
        return None
    kernel_blockers = tuple(dict.fromkeys(e.primitive.name for e in rewritten if _is_blocker(e)))
    machine = estimator.machine if kernel_blockers else quiet(estimator.machine)
    costs = Estimator(changed, machine, _is_fused)
    inside = costs.part(changed.eqns, changed.outputs)
    fits_kernel_limit = inside.is_small(costs.machine)
    if not fits_kernel_limit and not kernel_blockers:
        costs = Estimator(changed, estimator.machine, _is_fused)
        inside = costs.part(changed.eqns, changed.outputs)
    memory = estimator.part(loop.eqns, loop.outputs).peak_bytes  # of the loop as it was
    cost = estimate(costs.trips(changed, inside), memory)
    subjects = _subjects(loop, changed)
    return Arithmetic(
        loop=changed,
        subjects=subjects,
        cost=cost,
        kernel_blockers=kernel_blockers,
        fits_kernel_limit=fits_kernel_limit,
    )


def _subjects(loop: Loop, changed: Loop) -> tuple[str, ...]:
    """Returns the kinds of primitives that became arithmetic: `changed` has fewer of them."""
    before = Counter(e.primitive.name for e in equations(loop.eqns))
    after = Counter(e.primitive.name for e in equations(changed.eqns))
    kinds = [primitives.named(name).kind for name in before - after if name in RULES]
    return tuple(dict.fromkeys(_SUBJECTS.get(kind, _LINEAR) for kind in kinds)) or (_LINEAR,)


def _scattered_places(eqn: Eqn) -> int:
    """Returns the number of places of a scatter, or 0 for another equation."""
    if not eqn.primitive.name.startswith("scatter"):
        return 0
    return jaxprs.elements(eqn.invars[1].aval.shape[:-1])


def _is_fused(eqn: Eqn) -> bool:
    """Whether nothing in an inner loop or branch is called."""
    return not any(map(_is_blocker, equations([eqn])))


def fits_arithmetic(eqn: Eqn, order: int = LIMITS.order) -> bool:
    """Returns True if an equation is faster as arithmetic than as a call. A matrix to factorize has at most `order` rows."""
    name = eqn.primitive.name
    if name in draws.RULES:
        return True
    shape: tuple[int, ...] = eqn.invars[0].aval.shape
    if name == "dot_general":
        # In the kernel, one row is slower than as arithmetic.
        is_slow = not is_matvec(eqn) or is_one_row(eqn)
        return jaxprs.operations(eqn) < LARGE_PRODUCT and is_slow and not is_outer(eqn)
    if _scattered_places(eqn):
        return 1 < _scattered_places(eqn) <= LIMITS.places
    if name in ("sort", "top_k"):
        axis: int = eqn.params.get("dimension", eqn.params.get("axis", -1))
        return shape[axis] <= LIMITS.places and math.prod(shape) * shape[axis] <= LIMITS.operations
    if name == "lu":
        order = min(order, LIMITS.lu_order)
    return max(shape[-2:]) <= order and math.prod(shape) * shape[-1] <= LIMITS.operations


def _is_blocker(eqn: Eqn) -> bool:
    """Whether an equation is a call, which keeps a loop from being one kernel."""
    name = eqn.primitive.name
    if name == "dot_general":
        return not is_matvec(eqn) and not is_outer(eqn)
    if _scattered_places(eqn):
        return _scattered_places(eqn) > 1
    if primitives.is_kind(eqn, "reduction"):
        return jaxprs.elements(eqn.invars[0].aval.shape) >= LIBRARY_SUM
    return primitives.is_library_call(eqn) or bool(eqn.effects)
