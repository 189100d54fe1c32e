"""Operators that recurrent networks do not need: images, detection, quantized numbers, sparse features, rare optimizers."""

from jrnn.nets.ops.contrib import (
    aten,
    conv,
    detection,
    distance,
    features,
    image,
    int8,
    layout,
    learning_rate,
    low_precision,
    norm,
    optim,
    pool,
    reduce_ends,
    segments,
)
