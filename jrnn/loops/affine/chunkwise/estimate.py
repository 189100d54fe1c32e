"""What a train step of a loop costs: step by step, with the states of chunk boundaries stored, and in chunks.

Times are the rates of a machine times what is computed and moved (`costs/machines.py`); what differs from other loops has a
constant (`costs/constants.py`: `ChunkCosts`).

Shapes: T time, C steps of a chunk, S [K, V].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jrnn import jaxprs
from jrnn.loops.affine.matrix import AffineForm
from jrnn.loops.costs.constants import CHUNKS
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.machines import Machine
from jrnn.loops.costs.times import Estimate

Terms = tuple[tuple[str, float], ...]


def _sum(terms: Terms, memory: int) -> Estimate:
    return Estimate(sum(seconds for _, seconds in terms), memory, terms)


def step_by_step(estimator: Estimator, stored: int) -> Estimate:
    """Returns what a train step costs that stores states at every step.

    Args:
        estimator: of the loop.
        stored: bytes a step of states that the derivative of a step stores.
    """
    machine = estimator.machine
    forward = estimator.whole()
    stack_bytes = jaxprs.extent(estimator.loop.length) * stored
    # New memory in each run, however small.
    moving = stack_bytes / machine.write_rate + machine.reading(stack_bytes, stack_bytes)
    terms = (
        ("steps", CHUNKS.passes_by_steps * forward.seconds),
        ("stacks of states", moving),
    )
    return _sum(terms, stack_bytes + forward.memory)


def with_checkpoints(estimator: Estimator, stored: int, steps: int) -> Estimate:
    """Returns what a train step costs in which all steps run again, while the states of a chunk are in a cache.

    Args:
        estimator: of the loop.
        stored: bytes a step of states that the derivative of a step stores.
        steps: C.
    """
    machine = estimator.machine
    forward = estimator.whole()
    length = jaxprs.extent(estimator.loop.length)
    chunk_bytes = steps * stored
    stored_bytes = chunk_bytes + math.ceil(length / steps) * stored
    writing = machine.writing(chunk_bytes, stored_bytes)
    reading = machine.reading(chunk_bytes, stored_bytes)
    terms = (
        ("steps", CHUNKS.passes_by_steps * forward.seconds),
        ("steps again", forward.seconds),
        ("states of a chunk", length / steps * (writing + reading)),
    )
    return _sum(terms, stored_bytes + forward.memory)


class _ChunkCost(NamedTuple):
    """What a carry costs in one chunk: seconds of a train step, bytes stored for the reverse pass, and bytes of vectors."""

    products: float
    decays: float
    scores: float
    stored_bytes: int
    vector_bytes: int

    @staticmethod
    def of(form: AffineForm, steps: int, machine: Machine) -> _ChunkCost:
        states = form.forms.states
        aval = states[0].aval
        itemsize = aval.dtype.itemsize
        elements = len(states) * jaxprs.elements(aval.shape)
        k = form.forms.size[form.forms.contracted or 0]
        v = form.width
        batch = elements // (k * v)
        runs = CHUNKS.passes * batch
        queries = 0
        for row in form.rows:
            if any(term.operand in states for term in row.terms):
                queries += 1
        solved = len(form.solved)
        keys = len(form.known) + solved
        vectors = queries + keys
        pairs = queries * keys * steps**2

        # Products of matrices, slower the smaller they are.
        operations = 2 * vectors * steps * k * v
        operations += 2 * pairs * (k + v)
        operations += 2 * (solved * steps) ** 2 * v
        side = (steps * k * v) ** (1 / 3)
        slowdown = 1 + CHUNKS.half_rate_side / side

        # A decay along K moves vectors from level to level.
        levels = math.log2(steps) if form.decays_along_k else 0
        moves = CHUNKS.moves_per_doubling * levels
        moved_bytes = vectors * batch * steps * k * itemsize

        # Accelerators compute scores next to products.
        has_slow_scores = machine.elementwise_trip < machine.kernel
        functions = CHUNKS.functions_per_score * pairs if has_slow_scores else 0

        # Of a step and head the scores, rows, and the inverse are saved.
        saved_elements = queries * keys * steps
        saved_elements += solved * (v + solved * steps)
        return _ChunkCost(
            products=runs * operations * slowdown / machine.product_rate,
            decays=moves * moved_bytes / machine.cache_rate,
            scores=runs * functions * machine.function,
            stored_bytes=elements * max(itemsize, 4) + 4 * steps * batch * saved_elements,
            vector_bytes=8 * vectors * batch * steps * (k + v) * 4,
        )


def with_products(
    estimator: Estimator, forms: Sequence[AffineForm], steps: int, batched: bool
) -> Estimate:
    """Returns what a train step in chunks costs.

    Args:
        estimator: of the loop.
        forms: of its carries that run in chunks.
        steps: C.
        batched: all chunks are prepared at once.
    """
    machine = estimator.machine
    count = math.ceil(jaxprs.extent(estimator.loop.length) / steps)
    costs = [_ChunkCost.of(form, steps, machine) for form in forms]
    cost = _ChunkCost(*map(sum, zip(*costs)))
    kernels = count * CHUNKS.kernels
    if batched:
        kernels = CHUNKS.preparation_kernels + count * CHUNKS.batched_kernels
    stored_bytes = count * cost.stored_bytes
    writing = stored_bytes / machine.write_rate
    reading = machine.reading(stored_bytes, stored_bytes)
    terms = (
        ("products", count * cost.products),
        ("decays", count * cost.decays),
        ("scores", count * cost.scores),
        ("calls", kernels * machine.call + count * machine.trip),
        ("stacks of states", writing + reading),
    )
    return _sum(terms, stored_bytes + cost.vector_bytes)
