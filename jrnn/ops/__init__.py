"""The operators. Importing this package fills the registry; each module holds one family."""

from . import (
    activation,
    arithmetic,
    compare,
    concat,
    copies,
    elementwise,
    fill,
    index,
    loss,
    math,
    matmul,
    metric,
    norm,
    random_fill,
    recurrent_network,
    recurrent_network_gradient,
    reduce,
    shape,
    softmax_loss,
)
