"""Features of ranking models: buckets, Box-Cox, sparse and dense rows, partitions by key, positions, calibration.

Partition puts the row of key k into part k mod P of P parts (never negative), in order.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError
from jrnn.nets.memory import check_size
from jrnn.nets.ops.lengths import check_lengths, known_lengths, rows_from, segment_ids
from jrnn.nets.ops.select import put_where
from jrnn.nets.ops.values import (
    check_float,
    check_indices,
    check_integers,
    check_rank,
    check_shape,
    describe,
    is_concrete,
    raise_if,
)
from jrnn.nets.registry import gradient, op

_SMALLEST = 1e-6  # the least argument of BatchBoxCox's logarithm and power


@op("Bucketize", gradient="forbidden")
def bucketize(x, *, boundaries: tuple[float, ...] = ()):
    """How many boundaries are less than each element, int32; the boundaries must ascend."""
    check_float(x, "x")
    edges = np.asarray(boundaries, np.float32)
    raise_if((np.diff(edges) < 0).any(), f"boundaries {list(boundaries)[:8]} must ascend")
    return jnp.searchsorted(edges, jnp.asarray(x).astype(jnp.float32), side="left").astype(
        jnp.int32
    )


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
    raise_if(
        columns < 1,
        f"dense_last_dim {dense_last_dim} must be at least 1, or a fourth input must have the shape",
    )
    rows = _places(lengths, indices, columns)
    whole = check_size((lengths.size, columns), np.float32)
    return jnp.full(whole, default_value, values.dtype).at[rows, indices].set(values)


@op("BatchDenseToSparse", gradient="BatchSparseToDense(lengths, indices, dy, dense) -> dense")
def batch_dense_to_sparse(lengths, indices, dense):
    """The values at the indices of each row of a matrix."""
    check_rank(dense, 2, "dense")
    rows = _places(lengths, indices, dense.shape[1])
    return jnp.asarray(dense)[rows, indices]


@op("GatherRanges", outputs=2, gradient="forbidden", dynamic=True)
def gather_ranges(data, ranges):
    """The elements of data [N] in ranges [E, R, 2] of (start, length), concatenated, and their number for each of E."""
    check_rank(data, 1, "data")
    check_rank(ranges, 3, "ranges")
    check_integers(ranges, "ranges")
    spans = np.asarray(ranges).astype(np.int64)
    if spans.shape[2] != 2 or (spans < 0).any() or (spans.sum(2) > data.shape[0]).any():
        raise OpError(
            f"ranges is {describe(ranges)}; its pairs (start, length) must be within {describe(data)}"
        )
    check_size((int(spans[..., 1].sum()),), np.float64)
    return data[rows_from(*spans.reshape(-1, 2).T)], spans[..., 1].sum(1).astype(np.int32)


@op("SparseLabelSplit", outputs=(2, None), gradient="forbidden", dynamic=True)
def sparse_label_split(
    lengths, indices, values, *, num_labels: int, keep_gradient_offset_map: bool = False, op
):
    """The values of each label, then the examples of each label's values, and the place of each value in its output."""
    if len(op.outputs) != 2 * num_labels + keep_gradient_offset_map:
        raise OpError(
            f"has {len(op.outputs)} outputs; num_labels {num_labels} needs 2 each, and the offsets 1 more"
        )
    check_shape(values, indices.shape, "values")
    check_indices(indices, num_labels)
    label = np.asarray(indices)
    example = np.repeat(np.arange(lengths.size, dtype=np.int64), known_lengths(lengths, label.size))
    places = [np.flatnonzero(label == k) for k in range(num_labels)]
    offsets = np.zeros(label.size, np.int32)
    for place in places:
        offsets[place] = np.arange(place.size)
    return (
        *(values[p] for p in places),
        *(example[p] for p in places),
        *[offsets] * keep_gradient_offset_map,
    )


@op("Summarize", outputs=(0, 1), gradient="forbidden")
def summarize(x, *, to_file: int = 0):
    """The least and the greatest element, the mean, and the standard deviation of a sample: float32 [4]."""
    raise_if(
        to_file,
        "to_file asks for a file to be written, which operators here do not do; leave it out",
    )
    check_float(x, "x")
    x = jnp.asarray(x)
    spread = jnp.sqrt(jnp.sum((x - x.mean()) ** 2) / max(x.size - 1, 1))
    return jnp.stack([x.min(), x.max(), x.mean(), spread])


@op("SinusoidPositionEncoding")
def sinusoid_position_encoding(
    positions, *, embedding_size: int = 100, alpha: float = 10000.0, amplitude: float = 1.0
):
    """Positions [T, N] -> [T, N, E]: amplitude * sin or cos (even or odd k) of position / alpha^(k / E)."""
    check_rank(positions, 2, "positions")
    check_integers(positions, "positions")
    raise_if(
        embedding_size < 1 or alpha <= 0,
        f"embedding_size {embedding_size} and alpha {alpha} must be positive",
    )
    check_size((embedding_size,), np.float64)
    k = np.arange(embedding_size)
    frequency = (alpha ** (-k / embedding_size)).astype(np.float32)
    # compat: the first example's positions are used for all
    angle = jnp.asarray(positions)[:, :1].astype(jnp.float32) * frequency[None, :]
    waves = amplitude * jnp.where((k % 2 == 0)[None, :], jnp.sin(angle), jnp.cos(angle))  # [T, E]
    return jnp.broadcast_to(waves[:, None, :], (*positions.shape, embedding_size))


def _pieces(bounds: Any, slopes: Any, intercepts: Any) -> tuple[Any, Any, Any]:
    """The lines of each group: bounds [G, P + 1], slopes and intercepts [G, P]."""
    groups = bounds.size - slopes.size
    if slopes.size != intercepts.size or groups < 1 or slopes.size % groups or slopes.size < groups:
        raise OpError(
            f"has {bounds.size} bounds, {slopes.size} slopes and {intercepts.size} intercepts; a group of lines has "
            "as many slopes as intercepts, and one bound more"
        )
    b = bounds.reshape(groups, -1)
    raise_if(
        is_concrete(b) and (np.diff(np.asarray(b), axis=1) < 0).any(),
        "bounds must ascend in each group",
    )
    return b, slopes.reshape(groups, -1), intercepts.reshape(groups, -1)


def _transform(x: Any, bounds: Any, slopes: Any, intercepts: Any) -> Any:
    """Applies the lines of each group to x [N, G]; outside the bounds, the value at the nearest one."""
    x = jnp.clip(x, bounds[:, :1].T, bounds[:, -1:].T)
    above = (x[:, :, None] > bounds[None, :, 1:-1]).sum(
        -1
    )  # [N, G]: a bound belongs to the line before it
    group = jnp.arange(bounds.shape[0])[None, :]
    return slopes[group, above] * x + intercepts[group, above]


@op("PiecewiseLinearTransform", gradient="forbidden")
def piecewise_linear_transform(
    x,
    bounds_blob=None,
    slopes_blob=None,
    intercepts_blob=None,
    *,
    bounds: tuple[float, ...] = (),
    slopes: tuple[float, ...] = (),
    intercepts: tuple[float, ...] = (),
    binary: bool = False,
):
    """slope * x + intercept, for the line whose bounds contain x; lines come from arguments or from blobs.

    x is [N, G] with one group of lines a column. With `binary` there is one group: x is [N] or [N, 1], or [N, 2] whose
    second column p is transformed and whose first becomes 1 - p.
    """
    check_float(x, "x")
    given = [a for a in (bounds, slopes, intercepts) if a]
    blobs = [b for b in (bounds_blob, slopes_blob, intercepts_blob) if b is not None]
    if (len(given), len(blobs)) not in ((3, 0), (0, 3)):
        raise OpError(
            "give bounds, slopes and intercepts, either all as arguments or all as inputs 1, 2 and 3"
        )
    lines = _pieces(*(blobs or (np.asarray(a, x.dtype) for a in given)))
    lines = tuple(jnp.asarray(a) for a in lines)
    groups = lines[0].shape[0]
    if not binary:
        raise_if(
            x.ndim != 2 or x.shape[1] != groups,
            f"it must be [N, {groups}], one column a group of lines",
            x=x,
        )
        return _transform(x, *lines)
    if groups != 1 or x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[1] not in (1, 2)):
        raise OpError(
            f"x is {describe(x)} with {groups} groups; binary=1 takes [N], [N, 1] or [N, 2] and 1 group"
        )
    if x.ndim == 2 and x.shape[1] == 2:
        p = _transform(x[:, 1:], *lines)
        return jnp.concatenate([1 - p, p], 1)
    return _transform(x.reshape(-1, 1), *lines).reshape(x.shape)


def _parts(keys: Any, inputs: tuple, outputs: int, pack_first_input: bool) -> list[list[Any]]:
    """For each part, its keys and its rows of the inputs."""
    check_integers(keys, "keys")
    each = 1 + len(inputs)
    if outputs % each:
        raise OpError(
            f"has {outputs} outputs; they must be a multiple of its {each} inputs, a group for each part"
        )
    count = outputs // each
    values = np.asarray(keys).reshape(-1)
    part = values % count
    first = (values - part) // count if pack_first_input else values
    blobs = [first.astype(keys.dtype)]
    for x in inputs:
        if x.shape[: keys.ndim] != keys.shape:
            raise OpError(
                f"an input is {describe(x)}; its shape must begin with that of the keys, {list(keys.shape)}"
            )
        blobs.append(jax.lax.stop_gradient(x.reshape(keys.size, *x.shape[keys.ndim :])))
    return [[blob[np.flatnonzero(part == p)] for blob in blobs] for p in range(count)]


@op("Partition", outputs=(1, None), gradient="stops", dynamic=True)
def partition(keys, *inputs, pack_first_input: bool = False, op):
    """Splits keys and rows: the outputs are keys, rows, ... of part 0, then those of part 1, ...

    With `pack_first_input` the keys are divided by the number of parts, rounding down.
    """
    parts = _parts(keys, inputs, len(op.outputs), pack_first_input)
    return tuple(blob for part in parts for blob in part)


@op("LengthsPartition", outputs=(2, None), gradient="stops", dynamic=True)
def lengths_partition(lengths, keys, *inputs, pack_first_input: bool = False, op):
    """Partition of rows in segments; each part begins with the lengths of its segments."""
    check_rank(keys, 1, "keys")
    check_lengths(lengths, keys.size)
    segments = np.repeat(np.arange(lengths.size), np.asarray(lengths))
    parts = _parts(keys, (segments, *inputs), len(op.outputs), pack_first_input)
    outs = []
    for own_keys, own_segments, *blobs in parts:
        counts = np.bincount(np.asarray(own_segments), minlength=lengths.size)
        outs += [counts.astype(lengths.dtype), own_keys, *blobs]
    return tuple(outs)


@op("GatherByKey")
def gather_by_key(keys, *parts, pack_first_input: bool = False):
    """The inverse of Partition: for each key the next row of its part."""
    check_rank(keys, 1, "keys")
    check_integers(keys, "keys")
    if not parts or sum(p.shape[0] for p in parts) != keys.size:
        raise OpError(
            f"there are {keys.size} keys and {sum(p.shape[0] for p in parts)} rows; they must be as many"
        )
    part = keys % len(parts)
    gathered = jnp.zeros((keys.size, *parts[0].shape[1:]), parts[0].dtype)
    for k, rows in enumerate(parts):
        gathered = put_where(part == k, rows, gathered, f"part {k}")
    return gathered


@gradient("GatherByKey")
def _(g):
    outputs = []
    for k in range(1, len(g.op.inputs)):
        outputs += [g.temporary(f"_{g.op.inputs[k]}_grad_keys"), g.grad_input(k)]
    g.emit(
        "Partition",
        [g.input(0), g.grad_output(0)],
        outputs,
        pack_first_input=g.arg("pack_first_input", 0),
    )
