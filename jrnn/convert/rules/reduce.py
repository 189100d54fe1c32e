"""Rules for reductions and running sums."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.convert.emit import BOOL, FLOAT, INT32, INT64, Blob, Emitter, Value
from jrnn.convert.flat import Node
from jrnn.convert.rules.defined import halved, running
from jrnn.convert.rules.shapes import transpose
from jrnn.convert.rules.table import rule

_TYPES = {"reduce_sum": "ReduceSum", "reduce_max": "ReduceMax", "reduce_min": "ReduceMin"}


@rule(*_TYPES)
def _(e: Emitter, node: Node, x):
    return reduce(e, _TYPES[node.name], x, node.params["axes"])


def reduce(e: Emitter, type: str, x: Value, axes: tuple[int, ...]) -> Blob:
    x = e.blob(x)
    shape = tuple(n for k, n in enumerate(x.shape) if k not in axes)
    if not axes:
        return x
    return e.op(type, [x], shape, x.dtype, axes=tuple(axes), keepdims=0)


@rule("reduce_or", "reduce_and")
def _(e: Emitter, node: Node, x):
    if x.dtype != BOOL:
        combine = lax.bitwise_or if node.name == "reduce_or" else lax.bitwise_and
        return e.call(partial(halved, combine, node.params["axes"]), x)
    type = "ReduceMax" if node.name == "reduce_or" else "ReduceMin"
    return e.cast(reduce(e, type, e.cast(x, INT32), node.params["axes"]), BOOL)


@rule("cumsum")
def _(e: Emitter, node: Node, x):
    if x.dtype != FLOAT:
        return e.call(partial(running, jnp.add, node.params["axis"], node.params["reverse"]), x)
    axis, size, rank = node.params["axis"], x.shape[node.params["axis"]], len(x.shape)
    order = [k for k in range(rank) if k != axis] + [axis]
    moved = e.blob(transpose(e, x, order))
    below = np.tril(np.ones((size, size), np.float32))
    ones = below.T if node.params["reverse"] else below  # [out, in]
    product = e.op(
        "FC", [moved, e.constant(ones), e.constant(np.zeros(size, np.float32))], moved.shape, FLOAT, axis=rank - 1
    )
    return transpose(e, product, np.argsort(order))


@rule("argmax", "argmin")
def _(e: Emitter, node: Node, x):
    (axis,) = node.params["axes"]
    x = e.cast(x, INT32) if x.dtype == BOOL else e.blob(x)
    type = "ArgMax" if node.name == "argmax" else "ArgMin"
    found = e.op(type, [e.blob(x)], node.outputs[0].shape, INT64, axis=axis, keepdims=0)
    return e.cast(found, node.outputs[0].dtype)
