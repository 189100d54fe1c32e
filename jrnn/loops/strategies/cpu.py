"""The CPU backend. docs/notes/cpu_log.md has the measurements behind its passes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, primitives
from jrnn.loops.affine import associative
from jrnn.loops.costs.equation_costs import is_by_vector, is_outer, product_seconds
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.machines import Machine
from jrnn.loops.ir import Loop, Options
from jrnn.loops.kernels import Refused, native
from jrnn.loops.passes import (
    Moves,
    activate_together,
    columns,
    gates,
    reads_rows,
    slice_apart,
    split,
)
from jrnn.loops.passes.canonical import canonical
from jrnn.loops.passes.fission import computation, slices
from jrnn.loops.passes.sums import smaller_first
from jrnn.loops.strategies import (
    NOTHING,
    Conversion,
    LoopPlan,
    Node,
    Split,
    Steps,
    Target,
    at_leaf,
    by_steps,
    converted,
)
from jrnn.loops.strategies.arithmetic import LARGE_PRODUCT, arithmetic
from jrnn.loops.strategies.backend import Backend
from jrnn.loops.strategies.candidates import REFERENCE, Candidate, Choice
from jrnn.loops.strategies.search import Search

_LONGEST_CALLED = 400  # equations of a step for which the native kernel is tried
_BRIEF = 3e-5  # seconds of all steps of a loop that is left alone
_MANY = 1_000  # runs of a loop that is in another one, whose number is not known
_LEAST_GAIN = 0.03  # the part of a loop's time that another layout must save


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    """Returns the plan of a loop on a CPU.

    Args:
        loop: the loop as JAX made it.
        target: what it is lowered for.
        options: the caller's.
    """
    reference = _reference(loop, target)
    if options.executor == "auto" and _is_brief(reference, target):
        return LoopPlan.left(target, loop, "it takes less time than planning it", choice=Choice(reference))
    search, conversions = _searched(reference, target, options)
    notes: tuple[str, ...] = ()
    if options.executor == "associative":
        # On a CPU rounds cost more than they save. Only the coefficients are computed for all steps before the loop. The
        # multiplications and additions stay in the loop, in their order.
        why = associative.refusal(split(search.loop).core)
        if why is None:
            fission = split(search.loop, computation, contract=smaller_first)
            node = converted(Split(fission, by_steps(fission.core)), conversions)
            return LoopPlan(target, loop, node, "associative")
        notes = (f"not associative: {why}",)
    choice, refusal = _choice(search, target, options)
    notes = (f"not native: {refusal}",) if refusal and options.executor == native.NAME else notes
    if choice.chosen is search.reference:
        return LoopPlan.left(target, loop, *notes, NOTHING, choice=choice)
    node = at_leaf(choice.chosen.node, _for_xla)
    executor = native.NAME if getattr(node, "inner", node).way == native.NAME else "scan"
    return LoopPlan(target, loop, converted(node, conversions), executor, notes, choice)


def _reference(loop: Loop, target: Target) -> Candidate:
    return Candidate(REFERENCE, Estimator(loop, target.machine).whole(), Steps(loop, REFERENCE))


def _is_brief(reference: Candidate, target: Target) -> bool:
    """Returns True for a loop that gains less than its lowering takes: `x W^T` takes 1.2 to 1.4 times as long as `x W`."""
    runs = _MANY if target.repeated else 1
    return runs * reference.estimate.seconds < _BRIEF and not reads_rows(reference.node.loop)


def _searched(reference: Candidate, target: Target, options: Options) -> tuple[Search, Sequence[Conversion]]:
    """Returns the search among ways to run the canonical form of a loop, and the conversions to it."""
    loop, conversions = canonical(reference.node.loop, target.devices)
    if _turning_may_pay(loop, reference, target.machine):
        turned = columns(loop)
        loop = turned if _turning_pays(loop, turned, target.machine) else loop
    return Search(reference, loop, options, target.machine, smaller_first), conversions


def _choice(search: Search, target: Target, options: Options) -> tuple[Choice, str]:
    """Returns the chosen candidate, and the reason why no candidate is a call of the native kernel, or ""."""
    refusal = ""
    if options.executor == native.NAME:
        asked, refusal = calls(search, target)
        if asked:
            chosen = min(asked, key=lambda candidate: candidate.estimate.seconds)
            return Choice(chosen, tuple((other, "slower") for other in asked if other is not chosen)), refusal
    others = _others(search, target)
    splits = [search.reference] if any(map(search.settles, others)) else search.candidates()
    return search.choose([*splits, *others]), refusal


def _others(search: Search, target: Target) -> list[Candidate]:
    """Returns the candidates that run the loop that stays in another way than step by step."""
    if search.options.executor != "auto":
        return []
    rewritten = _as_arithmetic(search)
    if any(candidate.node.inner.is_one_kernel for candidate in rewritten):
        return rewritten  # a call would pay for each of its small products
    may_call = any(map(_is_for_native, search.loop.eqns)) and len(search.loop.eqns) <= _LONGEST_CALLED
    return [*rewritten, *(calls(search, target)[0] if may_call else [])]  # XLA cannot look into a call


def _is_for_native(eqn: Eqn) -> bool:
    """Returns True for a product that XLA:CPU calls, or that is long."""
    is_product = eqn.primitive.name == "dot_general" and not is_outer(eqn)
    return is_product and (not is_by_vector(eqn) or jaxprs.operations(eqn) >= LARGE_PRODUCT)


def _as_arithmetic(search: Search) -> list[Candidate]:
    """Returns the candidates with small linear algebra as arithmetic; one if nothing is in the way of one kernel."""
    candidates = []
    for moves in dict.fromkeys((Moves(), _with_draws_inside(search))):
        fission = search.split(moves)
        rewritten = arithmetic(fission.core, search.estimator)
        if rewritten is not None:
            name = "as arithmetic" if moves == Moves() else "as arithmetic, all else outside"
            candidates.append(search.candidate(name, Split(fission, rewritten)))
            if not rewritten.in_the_way:
                break
    return candidates


def _with_draws_inside(search: Search) -> Moves:
    """Returns all that may leave a loop but draws of random numbers, except those that something else before the loop reads.

    As arithmetic a draw takes less time in the loop than for all steps before it, where JAX's own rounds are a loop over
    arrays of all steps.
    """
    loop, moves = search.loop, search.movable
    draws = {v for e in loop.eqns if primitives.is_kind(e, "draw") for v in e.outvars}
    read = {v for e in jaxprs.needed(loop.eqns, moves.early - draws, set(loop.inputs))[0] for v in e.outvars}
    return replace(moves, early=moves.early - (draws - read))


def calls(search: Search, target: Target) -> tuple[list[Candidate], str]:
    """Returns the candidates whose loop is one call of the native kernel, and why there are not more, or "".

    Products of inputs are in the loop, or before it.
    """
    if target.exported or target.devices > 1:
        where = "exported" if target.exported else "divided among devices; put the scan inside of jax.shard_map"
        return [], f"the program is {where}"
    from jrnn.loops.kernels.native.runner import called

    most, candidates, refusal = search.movable, {}, ""
    names = {Moves(summed=most.summed): "native", most: "native, all else outside"}  # perhaps the same moves
    for moves, name in names.items():
        try:
            fission, kernel = called(functools.partial(search.split, moves))
        except Refused as why:
            refusal = str(why)
            continue
        if search.options.executor != "auto" or kernel.is_worth_a_call(search.machine):
            candidates[moves] = search.candidate(name, Split(fission, kernel))
    return [*candidates.values()], refusal


def _for_xla(leaf: Node) -> Node:
    """Returns the loop that stays as XLA:CPU compiles it best."""
    if not isinstance(leaf, Steps):
        return leaf
    core = leaf.loop
    if gates.better_apart(core):
        fission = split(slice_apart(core), slices, moves=Moves())
        return Split(fission, Steps(fission.core))
    return by_steps(activate_together(core))


def _turning_may_pay(loop: Loop, reference: Candidate, machine: Machine) -> bool:
    """Returns False if all products of a loop take too small a part of its time."""
    products = sum(product_seconds(e, None, machine) for e in loop.eqns if e.primitive.name == "dot_general")
    return jaxprs.extent(loop.length) * products > _LEAST_GAIN * reference.estimate.seconds


def _turning_pays(loop: Loop, turned: Loop, machine: Machine) -> bool:
    """Returns True if products in another layout save a part of the time of a loop. Tiny products have no layout to gain."""
    if turned is loop:
        return False
    fissions = (split(either, moves=Moves()) for either in (loop, turned))
    before, after = (Split(f, Steps(f.core)).estimate(Estimator(f.loop, machine)).seconds for f in fissions)
    return after < (1 - _LEAST_GAIN) * before


BACKEND = Backend(plan, ("cpu",))
