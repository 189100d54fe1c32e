"""What a train step of a loop costs in chunks.

Shapes: T time, C steps of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jrnn import jaxprs
from jrnn.loops.affine.matrix import AffineForm
from jrnn.loops.costs.constants import CHUNKS
from jrnn.loops.costs.estimates import Estimate, Estimator


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
    by_steps = CHUNKS.passes_by_steps * forward.seconds
    stored_bytes = steps * stored + math.ceil(length / steps) * stored
    writing = machine.writing(steps * stored, stored_bytes)
    reading = machine.reading(steps * stored, stored_bytes)
    states_seconds = length / steps * (writing + reading)
    terms = (
        ("steps", by_steps),
        ("steps again", forward.seconds),
        ("states of a chunk", states_seconds),
    )
    return Estimate(
        by_steps + forward.seconds + states_seconds, stored_bytes + forward.memory, terms
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
    loop = estimator.loop
    machine = estimator.machine
    count = math.ceil(jaxprs.extent(loop.length) / steps)
    # Accelerators compute scores next to products.
    has_slow_scores = machine.elementwise_trip < machine.kernel
    products = 0.0
    blocks = 0.0
    scores = 0.0
    boundary_bytes = 0
    chunk_bytes = 0
    for form in forms:
        states = form.forms.states
        aval = states[0].aval
        itemsize = aval.dtype.itemsize
        elements = len(states) * jaxprs.elements(aval.shape)
        k = form.forms.size[form.forms.contracted or 0]
        v = form.width
        batch = elements // (k * v)
        queries = sum(any(t.operand in states for t in row.terms) for row in form.rows)
        solved = len(form.solved)
        keys = len(form.known) + solved
        vectors = queries + keys
        pairs = queries * keys * steps**2

        # Products of matrices, slower the smaller they are.
        operations = 2 * vectors * steps * k * v + 2 * pairs * (k + v)
        operations += 2 * (solved * steps) ** 2 * v
        side = (steps * k * v) ** (1 / 3)
        slowdown = 1 + CHUNKS.half_rate_side / side
        runs = CHUNKS.passes * count * batch
        products += runs * operations * slowdown / machine.product_rate
        if has_slow_scores:
            scores += runs * pairs * CHUNKS.functions_per_score * machine.function
        if form.decays_along_k:
            moved_bytes = vectors * math.log2(steps) * batch * steps * k * itemsize
            blocks += CHUNKS.moves_per_doubling * count * moved_bytes / machine.cache_rate

        # Of a step and head the scores, rows, and the inverse are saved.
        saved_elements = queries * keys * steps + solved * (v + solved * steps)
        boundary_bytes += count * elements * max(itemsize, 4)
        boundary_bytes += 4 * count * steps * batch * saved_elements
        chunk_bytes += 8 * vectors * batch * steps * (k + v) * 4
    kernels = count * CHUNKS.kernels
    if batched:
        kernels = CHUNKS.preparation_kernels + count * CHUNKS.batched_kernels
    writing = boundary_bytes / machine.write_rate
    terms = (
        ("products", products),
        ("decays", blocks),
        ("scores", scores),
        ("calls", kernels * machine.call + count * machine.trip),
        ("stacks of states", writing + machine.reading(boundary_bytes, boundary_bytes)),
    )
    seconds = sum(seconds for _, seconds in terms)
    return Estimate(seconds, boundary_bytes + chunk_bytes, terms)
