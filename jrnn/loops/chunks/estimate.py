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
    products = blocks = scores = 0.0
    on_cpu = (
        machine.elementwise_trip < machine.kernel
    )  # accelerators compute scores next to products
    boundaries = inside = 0
    for form in forms:
        (state, *_), size = form.forms.states, form.forms.size
        elements = len(form.forms.states) * jaxprs.elements(state.aval.shape)
        k = size[form.forms.contracted or 0]
        v = form.width
        batch = elements // (k * v)
        readers = sum(any(t.operand in form.forms.states for t in row.terms) for row in form.rows)
        writers = len(form.known) + len(form.solved)
        solved = len(form.solved)
        operations = 2 * (readers + writers) * steps * k * v + 2 * readers * writers * steps**2 * (
            k + v
        )
        operations += 2 * (solved * steps) ** 2 * v
        side = (steps * k * v) ** (1 / 3)
        products += (
            CHUNKS.passes
            * count
            * batch
            * operations
            * (1 + CHUNKS.half_rate_side / side)
            / machine.product_rate
        )
        pairs = readers * writers * steps**2
        scores += (
            on_cpu
            * CHUNKS.passes
            * count
            * batch
            * pairs
            * CHUNKS.functions_per_score
            * machine.function
        )
        if form.decays_along_k:
            vectors = (
                (readers + writers)
                * math.log2(steps)
                * batch
                * steps
                * k
                * state.aval.dtype.itemsize
            )
            blocks += CHUNKS.moves_per_doubling * count * vectors / machine.cache_rate
        boundaries += count * elements * max(state.aval.dtype.itemsize, 4)
        # Of a step and head: scores, rows, and the inverse.
        saved_elements = readers * writers * steps + solved * (v + solved * steps)
        boundaries += 4 * count * steps * batch * saved_elements
        inside += 8 * (readers + writers) * batch * steps * (k + v) * 4
    kernels = (
        CHUNKS.preparation_kernels + count * CHUNKS.batched_kernels
        if batched
        else count * CHUNKS.kernels
    )
    calls = kernels * machine.call + count * machine.trip
    moved = boundaries / machine.write_rate + machine.reading(boundaries, boundaries)
    elementwise = (("decays", blocks), ("scores", scores))
    terms = (("products", products), *elementwise, ("calls", calls), ("stacks of states", moved))
    return Estimate(sum(seconds for _, seconds in terms), boundaries + inside, terms)
