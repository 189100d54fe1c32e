"""What a train step of a loop costs in chunks.

Shapes: T time, C steps of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jrnn import jaxprs
from jrnn.loops.affine.matrix import AffineForm
from jrnn.loops.costs.estimates import Estimate, Estimator

_SIDE = 62  # products of so many rows and columns run at half of the rate of large ones
_PASSES = 24  # a decay along K moves a vector so often, for each doubling of the blocks of a chunk, forward and reverse
# A score of two steps of a chunk is a difference of decays, its exponential, a product and a mask: so many functions.
# With 2, mLSTMs of states of 16 x 16 and 32 x 32 take 1.0 to 1.3 of the estimated part of the time of their steps.
_SCORE = 2
_TRAIN = 4  # a chunk is computed forward, again in the reverse pass, and twice as much for its derivative
BY_STEPS = 3  # a step, and its derivative
_KERNELS = 60  # of the forward and the reverse pass of a chunk
# The same if all chunks are prepared at once, and those of the preparation: counted for a gated delta rule on an H100.
_BATCHED_KERNELS = 23
_PREPARATION = 139


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
    by_steps = BY_STEPS * forward.seconds
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
        products += _TRAIN * count * batch * operations * (1 + _SIDE / side) / machine.product_rate
        pairs = readers * writers * steps**2
        scores += on_cpu * _TRAIN * count * batch * pairs * _SCORE * machine.function
        if form.decays_along_k:
            vectors = (
                (readers + writers)
                * math.log2(steps)
                * batch
                * steps
                * k
                * state.aval.dtype.itemsize
            )
            blocks += _PASSES * count * vectors / machine.cache_rate
        boundaries += count * elements * max(state.aval.dtype.itemsize, 4)
        # Of a step and head: scores, rows, and the inverse.
        saved_elements = readers * writers * steps + solved * (v + solved * steps)
        boundaries += 4 * count * steps * batch * saved_elements
        inside += 8 * (readers + writers) * batch * steps * (k + v) * 4
    kernels = _PREPARATION + count * _BATCHED_KERNELS if batched else count * _KERNELS
    calls = kernels * machine.call + count * machine.trip
    moved = boundaries / machine.write_rate + machine.reading(boundaries, boundaries)
    elementwise = (("decays", blocks), ("scores", scores))
    terms = (("products", products), *elementwise, ("calls", calls), ("stacks of states", moved))
    return Estimate(sum(seconds for _, seconds in terms), boundaries + inside, terms)
