"""Operators that recurrent networks do not need: images, detection, quantized numbers, sparse features, rare optimizers."""

from jrnn.ops.contrib import (
    aten,
    conv,
    detection,
    distance,
    features,
    fused,
    image,
    int8,
    layout,
    learning_rate,
    norm,
    optim_rare,
    optim_sparse,
    pool,
    reduce_ends,
    row_quantized,
    segment_ids,
    segment_range,
    sparse_lengths,
)
