"""Rules for products: `dot_general` in all its forms, as MatMul or BatchMatMul, and FC where a bias is added."""

import math

from jrnn.convert.emit import FLOAT, Blob, Emitter, Value
from jrnn.convert.flat import Node
from jrnn.convert.rules.elementwise import binary
from jrnn.convert.rules.reduce import reduce
from jrnn.convert.rules.shapes import transpose
from jrnn.convert.rules.table import rule


@rule("dot_general")
def _(e: Emitter, node: Node, x, y):
    if x.dtype != FLOAT or y.dtype != FLOAT:
        return _product_of_integers(e, node, x, y)
    (over_x, over_y), (batch_x, batch_y) = node.params["dimension_numbers"]
    free_x = [k for k in range(len(x.shape)) if k not in (*over_x, *batch_x)]
    free_y = [k for k in range(len(y.shape)) if k not in (*over_y, *batch_y)]
    batch = tuple(x.shape[k] for k in batch_x)
    rows, columns = (tuple(v.shape[k] for k in free) for v, free in ((x, free_x), (y, free_y)))
    size = math.prod(x.shape[k] for k in over_x)
    a, trans_a = _matrices(e, x, batch_x, free_x, over_x, len(batch), rows, size)
    b, trans_b = _matrices(e, y, batch_y, over_y, free_y, len(batch), columns, size, right=True)
    args = {"trans_a": trans_a, "trans_b": trans_b}
    args = {k: v for k, v in args.items() if v}
    m, n = math.prod(rows), math.prod(columns)
    if batch:
        made = e.op("BatchMatMul", [a, b], (math.prod(batch), m, n), FLOAT, **args)
    else:
        made = e.op("MatMul", [a, b], (m, n), FLOAT, **args)
    return e.reshaped(made, (*batch, *rows, *columns))


def _product_of_integers(e: Emitter, node: Node, x: Value, y: Value) -> Blob:
    """The sum of all products: Caffe2 multiplies matrices of floats alone, which do not hold every integer."""
    dtype = node.outputs[0].dtype
    (over_x, over_y), (batch_x, batch_y) = node.params["dimension_numbers"]
    free_x = [k for k in range(len(x.shape)) if k not in (*over_x, *batch_x)]
    free_y = [k for k in range(len(y.shape)) if k not in (*over_y, *batch_y)]
    batch, over = tuple(x.shape[k] for k in batch_x), tuple(x.shape[k] for k in over_x)
    rows, columns = (tuple(v.shape[k] for k in free) for v, free in ((x, free_x), (y, free_y)))
    ones_x, ones_y = (1,) * len(columns), (1,) * len(rows)
    x = e.cast(e.blob(transpose(e, x, [*batch_x, *free_x, *over_x])), dtype)
    y = e.cast(e.blob(transpose(e, y, [*batch_y, *free_y, *over_y])), dtype)
    x = e.reshaped(x, (*batch, *rows, *ones_x, *over))
    y = e.reshaped(y, (*batch, *ones_y, *columns, *over))
    shape = (*batch, *rows, *columns)
    axes = tuple(range(len(shape), len(shape) + len(over)))
    return reduce(e, "ReduceSum", binary(e, "Mul", x, y), axes)


def _matrices(e: Emitter, x: Value, batch, first, second, batches: int, free, size: int, right: bool = False):
    """x as matrices [batch, first, second], or as their transposes where that spares moving elements."""
    m, k = (size, math.prod(free)) if right else (math.prod(free), size)
    lead = (math.prod(x.shape[d] for d in batch),) if batches else ()
    order, swapped = (
        [d for d in dims if x.shape[d] != 1] for dims in ([*batch, *first, *second], [*batch, *second, *first])
    )
    if swapped == sorted(swapped) and order != swapped:  # dimensions of size 1 may stand anywhere
        return e.reshaped(e.blob(x), (*lead, k, m)), 1
    return e.reshaped(e.blob(transpose(e, x, [*batch, *first, *second])), (*lead, m, k)), 0


def fully_connected(e: Emitter, x: Blob, w: Blob, bias: Blob, *, out_first: bool) -> Blob:
    """x [..., in] times w, [out, in] or [in, out], plus bias [out]."""
    x, size = e.blob(x), bias.shape[0]
    type = "FC" if out_first else "FCTransposed"
    axis = len(x.shape) - 1
    if axis == 0:
        row = e.reshaped(x, (1, *x.shape))
        return e.reshaped(e.op(type, [row, e.blob(w), e.blob(bias)], (1, size), FLOAT), (size,))
    args = {} if axis == 1 else {"axis": axis}
    return e.op(type, [x, e.blob(w), e.blob(bias)], (*x.shape[:-1], size), FLOAT, **args)
