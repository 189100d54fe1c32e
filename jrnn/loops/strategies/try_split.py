"""The strategy "scan" on a CPU: steps run one by one, and parts of them for all steps before or after the loop.

A few splits are compared: nothing leaves the loop (it is only simplified), one kind of work leaves it, or all that can;
then the best of them with single moves added or removed. A split whose arrays of all steps are large runs in tiles.
docs/notes/cpu_log.md has the measurements behind the passes.

Shapes: T time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jrnn import jaxprs
from jrnn.loops.costs.bounds import SHORT_MIN_GAIN
from jrnn.loops.costs.equation_costs import has_large_products
from jrnn.loops.costs.times import Estimate
from jrnn.loops.ir import Loop
from jrnn.loops.passes import (
    NOTHING_MOVES,
    Moves,
    gates,
    slice_operands,
    split,
)
from jrnn.loops.passes.carries_in_place import update_in_place
from jrnn.loops.passes.moves import is_slice
from jrnn.loops.plan import Candidate, Node, cheapest
from jrnn.loops.strategies import try_unrolled
from jrnn.loops.strategies.context import Context
from jrnn.loops.strategies.nodes import Split, SplitInTiles, Steps, steps_with_wide_sums
from jrnn.loops.strategies.split_costs import SplitCosts

NAME = "scan"
_TILE_BYTES = 1 << 20  # of the arrays of one tile, if they fit the bound of memory
# A candidate that takes less than a third of another one's time replaces it, however uncertain both are.
_CLEARLY_FASTER = 3
_MAX_ESTIMATED = 2_000  # equations that single moves estimate again: bounds the time of planning


def try_split(context: Context) -> Sequence[Candidate]:
    """Returns splits of the loop; nothing if a candidate is faster than the part that stays in all of them."""
    residual_seconds = _residual_seconds(context)
    for candidate in context.candidates:
        if _beats(candidate, residual_seconds, context):
            return []
    can_leave = context.movable
    moves_by_label = {
        "nothing moved": NOTHING_MOVES,
        "hoist": Moves(hoist=can_leave.hoist),
        "sink": Moves(sink=can_leave.sink),
        "sum after the loop": Moves(accumulate=can_leave.accumulate),
        "everything moved": can_leave,
    }
    tried: dict[Moves, Candidate] = {}
    for label, moves in moves_by_label.items():
        if moves not in tried:
            tried[moves] = _cheapest_tiling(label, moves, context)
    candidates = list(tried.values())
    best, _ = cheapest([context.baseline, *candidates], context.bounds)
    if residual_seconds < _seconds_to_beat(best, context):
        candidates += _selection(tried, can_leave, context)
    return candidates


def _seconds_to_beat(best: Candidate, context: Context) -> float:
    """Returns the time that a further candidate must be below."""
    baseline_seconds = context.baseline.estimate.seconds
    return min(best.estimate.seconds, (1 - context.bounds.min_gain) * baseline_seconds)


def _selection(
    tried: dict[Moves, Candidate],
    can_leave: Moves,
    context: Context,
) -> Sequence[Candidate]:
    """Returns the best of the tried splits with single moves added or removed in one sweep; nothing if none helps.

    It leaves the sum of a bias in the loop, say, whose stacked operand would be written for nothing. Next to the splits
    above alone, gated units train 1.5 to 1.7 times as fast, and a delta rule 1.3 times.
    """
    loop = context.loop
    start = min(tried, key=lambda moves: _rank(tried[moves], context))
    best = start
    single_moves = can_leave.in_order(loop)
    if len(single_moves) < 2:
        return []
    for field, move in single_moves[: _MAX_ESTIMATED // max(len(loop.eqns), 1)]:
        moves = replace(best, **{field: getattr(best, field) ^ {move}})
        if moves in tried:  # no better than the best
            continue
        tried[moves] = _cheapest_tiling("some values moved", moves, context)
        if _rank(tried[moves], context) < _rank(tried[best], context):
            best = moves
    return [] if best == start else [tried[best]]


def _rank(candidate: Candidate, context: Context) -> tuple[bool, float]:
    return not _fits(candidate, context), candidate.estimate.seconds


def _fits(candidate: Candidate, context: Context) -> bool:
    max_bytes = context.bounds.max_bytes(context.baseline.estimate, candidate.estimate)
    return candidate.estimate.memory <= max_bytes


def _beats(
    candidate: Candidate,
    residual_seconds: float,
    context: Context,
) -> bool:
    """Returns True if even the part that no split can move takes `_CLEARLY_FASTER` times the time of a candidate."""
    if _CLEARLY_FASTER * candidate.estimate.seconds >= residual_seconds:
        return False
    chosen, _ = cheapest([context.baseline, candidate], context.bounds)
    return chosen is candidate


def _residual_seconds(context: Context) -> float:
    """Returns the seconds of the loop that remains in each split, without its stacked arrays."""
    residual = Steps(context.split(None).residual).estimate(context.estimator)
    return residual.seconds - dict(residual.terms)["stacks"]


def _cheapest_tiling(
    label: str,
    moves: Moves,
    context: Context,
) -> Candidate:
    """Returns the fastest way to run a split that fits the bound of memory, or the smallest way if none does."""
    split_loop = context.split(moves)
    whole = Split(split_loop, Steps(split_loop.residual))
    parts = whole.costs(context.estimator)
    tilings = []
    for size in _tile_sizes(parts, context):
        node = whole if size is None else SplitInTiles(whole, size)
        finish = functools.partial(node.with_inner, functools.partial(_written_for_xla, context))
        cost = context.with_adapters(parts.estimate(size))
        tilings.append(
            Candidate(
                label,
                cost,
                node,
                strategy=NAME,
                min_gain=_min_gain(moves, cost, context),
                finish=finish,
            )
        )
    fitting = [candidate for candidate in tilings if _fits(candidate, context)]
    if fitting:
        return min(fitting, key=lambda candidate: candidate.estimate.seconds)
    return min(tilings, key=lambda candidate: candidate.estimate.memory)


def _min_gain(
    moves: Moves,
    cost: Estimate,
    context: Context,
) -> float | None:
    """Returns the part of the baseline's time that a split must save, or None for the bounds' own.

    If nothing moves, and what is saved is mostly elementwise work, that is more: XLA fuses elementwise equations in its own
    way. Steps that stack their states were estimated at 2.5 to 14 times of what they take, and written anew took up to 1.8
    times as long.
    """
    if moves != Moves() or has_large_products(context.loop.eqns):
        return None
    baseline = context.baseline.estimate
    saved_elements = dict(baseline.terms)["elements"] - dict(cost.terms)["elements"]
    is_mostly_elementwise = 2 * saved_elements > baseline.seconds - cost.seconds
    return SHORT_MIN_GAIN if is_mostly_elementwise else None


def _tile_sizes(parts: SplitCosts, context: Context) -> Iterator[int | None]:
    """Yields numbers of steps to run at a time: all (None), tiles of `_TILE_BYTES`, and the most that fit the bound."""
    yield None
    length = context.loop.length
    if not jaxprs.is_known(length) or parts.per_step(False) * length < _TILE_BYTES // 2:
        return
    if _is_of_small_kernels(context):
        return
    fixed_bytes = parts.estimate(1).memory - parts.per_step(True)
    free_bytes = context.bounds.max_bytes(context.baseline.estimate) - fixed_bytes
    for max_bytes in (_TILE_BYTES, free_bytes):
        size = int(max_bytes / parts.per_step(True))
        if 2 <= size < length:
            # A divisor of the length leaves no shorter last tile, whose results would be copied.
            divisors = (n for n in range(size, size // 2, -1) if length % n == 0)
            yield next(divisors, size)


def _is_of_small_kernels(context: Context) -> bool:
    """Returns True if XLA runs the loop kernel by kernel, and none of them is large.

    What its kernels take is estimated too roughly to pay for a loop over tiles.
    """
    loop = context.loop
    if has_large_products(loop.eqns):
        return False
    inside = context.estimator.part(loop.eqns, loop.outputs)
    return not context.estimator.is_small(loop, inside)


def _written_for_xla(context: Context, residual: Loop) -> Node:
    """Returns a node for the loop that remains, written as XLA:CPU compiles it best."""
    tiny = try_unrolled.tiny_node(context, residual)
    if tiny is not None:
        return tiny
    computed_before = {*residual.xs}.difference(context.loop.xs)
    if gates.prefers_separate_slices(residual, computed_before):
        split_loop = split(slice_operands(residual), is_slice, moves=NOTHING_MOVES)
        return Split(split_loop, Steps(update_in_place(split_loop.residual)))
    return steps_with_wide_sums(update_in_place(residual))
