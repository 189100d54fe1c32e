"""Features of ranking models: buckets, Box-Cox, ranges, sparse rows and dense ones, statistics."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.ops.checks import check_float, check_rank, check_shape, describe
from jrnn.ops.segments import check_lengths, known_lengths, segment_ids
from jrnn.ops.values import check_indices, check_integers, check_size
from jrnn.registry import op

_SMALLEST = 1e-6  # what BatchBoxCox takes the logarithm or the power of at least


@op("Bucketize", gradient="forbidden")
def bucketize(x, *, boundaries: tuple[float, ...] = ()):
    """How many boundaries are less than each element, int32; the boundaries must ascend."""
    check_float(x, "x")
    edges = np.asarray(boundaries, np.float32)
    if (np.diff(edges) < 0).any():
        raise OpError(f"boundaries {list(boundaries)[:8]} must ascend")
    return jnp.searchsorted(edges, jnp.asarray(x).astype(jnp.float32), side="left").astype(jnp.int32)


@op("BatchBoxCox", gradient="forbidden")
def batch_box_cox(data, lambda1, lambda2):
    """((x + lambda2) ** lambda1 - 1) / lambda1 for each column, ln(x + lambda2) where lambda1 is 0: [N, D], [D], [D]."""
    check_float(data, "data")
    check_rank(data, 2, "data")
    for name, value in (("lambda1", lambda1), ("lambda2", lambda2)):
        check_shape(value, data.shape[1:], name)
    x = jnp.maximum(data + lambda2[None, :], _SMALLEST)
    power = jnp.where(lambda1 == 0, 1, lambda1)[None, :]
    return jnp.where(lambda1[None, :] == 0, jnp.log(x), (x**power - 1) / power)


def _places(lengths: Any, indices: Any, columns: int) -> Any:
    """The row of each of the sparse elements."""
    check_rank(indices, 1, "indices")
    check_lengths(lengths, indices.size)
    check_indices(indices, columns)
    return segment_ids(lengths, indices.size)


@op("BatchSparseToDense", gradient="BatchDenseToSparse(lengths, indices, dy) -> values")
def batch_sparse_to_dense(
    lengths, indices, values, shape=None, *, dense_last_dim: int = -1, default_value: float = 0.0
):
    """Rows of (index, value) pairs as a matrix [rows, dense_last_dim], or of the shape of the fourth input."""
    check_shape(values, indices.shape, "values")
    columns = dense_last_dim
    if shape is not None:
        check_rank(shape, 2, "the fourth input")
        if shape.shape[0] != lengths.size or dense_last_dim not in (-1, shape.shape[1]):
            raise OpError(
                f"the fourth input is {describe(shape)}; it must have {lengths.size} rows, one a length, and "
                "dense_last_dim columns where that is given"
            )
        columns = shape.shape[1]
    if columns < 1:
        raise OpError(f"dense_last_dim {dense_last_dim} must be at least 1, or a fourth input must tell the shape")
    rows = _places(lengths, indices, columns)
    made = check_size((lengths.size, columns), np.float32)
    return jnp.full(made, default_value, values.dtype).at[rows, indices].set(values)


@op("BatchDenseToSparse", gradient="BatchSparseToDense(lengths, indices, dy, dense) -> dense")
def batch_dense_to_sparse(lengths, indices, dense):
    """The values at the indices of each row of a matrix."""
    check_rank(dense, 2, "dense")
    rows = _places(lengths, indices, dense.shape[1])
    return jnp.asarray(dense)[rows, indices]


@op("GatherRanges", outputs=2, gradient="forbidden", dynamic=True)
def gather_ranges(data, ranges):
    """The elements of data [N] in ranges [E, R, 2] of (start, length), one after the other, and how many each of E has."""
    check_rank(data, 1, "data")
    check_rank(ranges, 3, "ranges")
    check_integers(ranges, "ranges")
    found = np.asarray(ranges).astype(np.int64)
    if found.shape[2] != 2 or (found < 0).any() or (found.sum(2) > data.shape[0]).any():
        raise OpError(
            f"ranges is {describe(ranges)}; its pairs (start, length) must lie within the {data.shape[0]} of data"
        )
    check_size((int(found[..., 1].sum()),), np.float64)
    picked = [np.arange(start, start + length) for start, length in found.reshape(-1, 2)]
    return data[np.concatenate([np.zeros(0, np.int64), *picked])], found[..., 1].sum(1).astype(np.int32)


@op("SparseLabelSplit", outputs=(2, None), gradient="forbidden", dynamic=True)
def sparse_label_split(lengths, indices, values, *, num_labels: int, keep_gradient_offset_map: bool = False, op):
    """For each label the values that belong to it, then for each the examples they are of, and where each value went."""
    if len(op.outputs) != 2 * num_labels + keep_gradient_offset_map:
        raise OpError(
            f"has {len(op.outputs)} outputs; num_labels {num_labels} needs 2 for each, and one for the offsets"
        )
    check_shape(values, indices.shape, "values")
    check_indices(indices, num_labels)
    label = np.asarray(indices)
    example = np.repeat(np.arange(lengths.size, dtype=np.int64), known_lengths(lengths, label.size))
    places = [np.flatnonzero(label == k) for k in range(num_labels)]
    offsets = np.zeros(label.size, np.int32)
    for place in places:
        offsets[place] = np.arange(place.size)
    kept = (offsets,) if keep_gradient_offset_map else ()
    return (*(values[p] for p in places), *(example[p] for p in places), *kept)


@op("Summarize", outputs=(0, 1), gradient="forbidden")
def summarize(x, *, to_file: int = 0):
    """The least and the greatest element, the mean, and the standard deviation of a sample: float32 [4]."""
    if to_file:
        raise OpError("to_file asks for a file to be written, which operators here do not do; leave it out")
    check_float(x, "x")
    x = jnp.asarray(x)
    spread = jnp.sqrt(jnp.sum((x - x.mean()) ** 2) / max(x.size - 1, 1))
    return jnp.stack([x.min(), x.max(), x.mean(), spread])
