"""What a train step of a loop costs: step by step, with the states of chunk boundaries stored, and in chunks.

`affine/chunkwise` says what runs in a chunk (`ChunkedCarry`), and this file what that takes on a machine. What differs from
other loops has a constant (`constants.py`: `ChunkCosts`).

Shapes: T time, C steps of a chunk, S [K, V].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jrnn import jaxprs
from jrnn.loops.costs.constants import CHUNKS
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.times import Estimate, estimate


def step_by_step(estimator: Estimator, stored: int) -> Estimate:
    """Returns what a train step costs that stores states at every step.

    Args:
        estimator: of the loop.
        stored: bytes a step of states that the derivative of a step stores.
    """
    forward = estimator.whole()
    stack_bytes = jaxprs.extent(estimator.loop.length) * stored
    terms = {
        "steps": CHUNKS.passes_by_steps * forward.seconds,
        "stacks of states": estimator.machine.storing(stack_bytes),
    }
    return estimate(terms, stack_bytes + forward.memory)


def with_checkpoints(estimator: Estimator, stored: int, steps: int) -> Estimate:
    """Returns what a train step costs in which all steps run again, while the states of a chunk are in a cache.

    Args:
        estimator: of the loop.
        stored: bytes a step of states that the derivative of a step stores.
        steps: C.
    """
    forward = estimator.whole()
    length = jaxprs.extent(estimator.loop.length)
    chunk_bytes = steps * stored
    stored_bytes = chunk_bytes + math.ceil(length / steps) * stored
    moved = estimator.machine.moving(chunk_bytes, stored_bytes)
    terms = {
        "steps": CHUNKS.passes_by_steps * forward.seconds,
        "steps again": forward.seconds,
        "states of a chunk": length / steps * moved,
    }
    return estimate(terms, stored_bytes + forward.memory)


class ChunkedCarry(NamedTuple):
    """A carry that runs in chunks, as the numbers that its cost depends on.

    Attributes:
        batch: the number of matrices S.
        k, v: K and V.
        itemsize: the bytes of an element.
        queries: the vectors of a step that read S.
        known: the vectors of a step that are written to S, and do not depend on it.
        solved: the vectors of a step that depend on S, by a triangular system of a chunk.
        decays_along_k: whether a decay differs along K.
    """

    batch: int
    k: int
    v: int
    itemsize: int
    queries: int
    known: int
    solved: int
    decays_along_k: bool

    def train_step(self, steps: int) -> _Chunk:
        """Returns what a chunk of some steps computes and stores, forward and reverse."""
        k = self.k
        v = self.v
        keys = self.known + self.solved
        vectors = self.queries + keys
        pairs = self.queries * keys * steps**2
        runs = CHUNKS.passes * self.batch

        # Products of matrices, slower the smaller they are.
        operations = 2 * vectors * steps * k * v
        operations += 2 * pairs * (k + v)
        operations += 2 * (self.solved * steps) ** 2 * v
        slowdown = 1 + CHUNKS.half_rate_side / (steps * k * v) ** (1 / 3)

        # A decay along K moves vectors from level to level.
        levels = math.log2(steps) if self.decays_along_k else 0
        vector_bytes = vectors * self.batch * steps * k * self.itemsize

        # Of a step and head the scores, rows, and the inverse are saved.
        saved = self.queries * keys * steps + self.solved * (v + self.solved * steps)
        state_bytes = self.batch * k * v * max(self.itemsize, 4)
        return _Chunk(
            operations=runs * operations * slowdown,
            moved_bytes=CHUNKS.moves_per_doubling * levels * vector_bytes,
            functions=runs * CHUNKS.functions_per_score * pairs,
            stored_bytes=state_bytes + 4 * steps * self.batch * saved,
            vector_bytes=8 * vectors * self.batch * steps * (k + v) * 4,
        )


class _Chunk(NamedTuple):
    """What a train step computes of a chunk.

    Attributes:
        operations: of products.
        moved_bytes: of vectors that decays move in a cache.
        functions: of scores.
        stored_bytes: for the reverse pass.
        vector_bytes: of temporary vectors.
    """

    operations: float
    moved_bytes: float
    functions: float
    stored_bytes: int
    vector_bytes: int


def with_products(
    estimator: Estimator, carries: Sequence[ChunkedCarry], steps: int, batched: bool
) -> Estimate:
    """Returns what a train step in chunks costs.

    Args:
        estimator: of the loop.
        carries: that run in chunks.
        steps: C.
        batched: all chunks are prepared at once.
    """
    machine = estimator.machine
    count = math.ceil(jaxprs.extent(estimator.loop.length) / steps)
    chunk = _Chunk(*map(sum, zip(*[carry.train_step(steps) for carry in carries])))
    kernels = count * CHUNKS.kernels
    if batched:
        kernels = CHUNKS.preparation_kernels + count * CHUNKS.batched_kernels
    stored_bytes = count * chunk.stored_bytes
    # Accelerators compute scores next to products.
    functions = chunk.functions if machine.makes_one_kernel else 0.0
    terms = {
        "products": count * chunk.operations / machine.product_rate,
        "decays": count * chunk.moved_bytes / machine.cache_rate,
        "scores": count * functions * machine.function,
        "calls": kernels * machine.call + count * machine.trip,
        "stacks of states": machine.storing(stored_bytes),
    }
    return estimate(terms, stored_bytes + chunk.vector_bytes)
