"""Partitioning rows by the remainder of their keys, and gathering them again.

With P parts, a row of key k goes to part k mod P (never negative), in order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.checks import check_rank, describe
from jrnn.ops.segments import check_lengths, per_row
from jrnn.ops.values import check_integers, is_concrete
from jrnn.registry import gradient, op


def _rows(keys: Any, blob: Any) -> Any:
    """A blob whose first dimensions are those of the keys, with these made one."""
    if blob.shape[: keys.ndim] != keys.shape:
        raise OpError(
            f"an input is {describe(blob)}; its first dimensions must be those of the keys, {list(keys.shape)}"
        )
    return blob.reshape(keys.size, *blob.shape[keys.ndim :])


def _parts(keys: Any, inputs: tuple, outputs: int, pack_first_input: bool) -> list[list[Any]]:
    """For each part, its keys and its rows of the inputs."""
    check_integers(keys, "keys")
    each = 1 + len(inputs)
    if outputs % each:
        raise OpError(f"has {outputs} outputs; they must be a multiple of its {each} inputs, a group for each part")
    count = outputs // each
    values = np.asarray(keys).reshape(-1)
    part = values % count
    first = (values - part) // count if pack_first_input else values
    blobs = [first.astype(keys.dtype), *(jax.lax.stop_gradient(_rows(keys, x)) for x in inputs)]
    return [[blob[np.flatnonzero(part == p)] for blob in blobs] for p in range(count)]


@op("Partition", outputs=(1, None), gradient="stops", dynamic=True)
def partition(keys, *inputs, pack_first_input: bool = False, op):
    """Parts keys and rows: outputs are keys, rows, ... of part 0, then those of part 1, ...

    With `pack_first_input` the keys are divided by the number of parts, rounding down.
    """
    parts = _parts(keys, inputs, len(op.outputs), pack_first_input)
    return tuple(blob for part in parts for blob in part)


@op("LengthsPartition", outputs=(2, None), gradient="stops", dynamic=True)
def lengths_partition(lengths, keys, *inputs, pack_first_input: bool = False, op):
    """Partition of rows in segments; each part begins with the lengths of its segments."""
    check_rank(keys, 1, "keys")
    check_lengths(lengths, keys.size)
    each = 2 + len(inputs)
    if len(op.outputs) % each:
        raise OpError(
            f"has {len(op.outputs)} outputs; they must be a multiple of its {each} inputs, a group for each part"
        )
    count = len(op.outputs) // each
    parts = _parts(keys, inputs, count * (each - 1), pack_first_input)
    segment = np.repeat(np.arange(lengths.size), np.asarray(lengths))
    own = [segment[np.asarray(keys) % count == p] for p in range(count)]
    counts = [np.bincount(s, minlength=lengths.size).astype(lengths.dtype) for s in own]
    return tuple(blob for n, part in zip(counts, parts) for blob in (n, *part))


@op("GatherByKey")
def gather_by_key(keys, *parts, pack_first_input: bool = False):
    """The reverse of Partition: for each key the next row of its part."""
    check_rank(keys, 1, "keys")
    check_integers(keys, "keys")
    if not parts or sum(p.shape[0] for p in parts) != keys.size:
        raise OpError(f"there are {keys.size} keys and {sum(p.shape[0] for p in parts)} rows; they must be as many")
    part = keys % len(parts)
    gathered = jnp.zeros((keys.size, *parts[0].shape[1:]), parts[0].dtype)
    for k, rows in enumerate(parts):
        own = part == k
        if is_concrete(own) and int(np.sum(np.asarray(own))) != rows.shape[0]:
            raise OpError(f"part {k} has {rows.shape[0]} rows, and {int(np.sum(np.asarray(own)))} keys are for it")
        if rows.shape[0]:
            taken = jnp.take(rows, jnp.cumsum(own) - 1, axis=0, mode="clip")
            gathered = jnp.where(per_row(own, taken), taken, gathered)
    return gathered


@gradient("GatherByKey")
def _(g):
    outputs = []
    for k in range(1, len(g.op.inputs)):
        outputs += [g.temporary(f"_{g.op.inputs[k]}_grad_keys"), g.grad_input(k)]
    g.emit("Partition", [g.input(0), g.grad_output(0)], outputs, pack_first_input=g.arg("pack_first_input", 0))
