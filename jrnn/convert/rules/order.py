"""Rules for order: `sort` and `top_k`, by TopK, which puts the lower index first among equals."""

import math

import numpy as np

from jrnn.convert.emit import BOOL, FLOAT, INT32, INT64, Blob, Emitter, Value
from jrnn.convert.flat import Node
from jrnn.convert.rules.elementwise import binary, unary
from jrnn.convert.rules.shapes import transpose
from jrnn.convert.rules.table import rule
from jrnn.errors import ConversionError

_HALF = 2**16


def _keys(e: Emitter, x: Blob) -> list[Blob]:
    """x as floats that are in the same order, the last one decides first: TopK orders floats alone."""
    if x.dtype == FLOAT:
        return [x]
    if x.dtype == BOOL:
        return [e.cast(x, FLOAT)]
    if x.dtype != INT32:
        raise ConversionError(f"the order of {x.dtype}: convert to int32 or float32 before")
    unit = np.asarray(_HALF, np.int32)
    high = binary(e, "Div", x, unit)
    return [e.cast(v, FLOAT) for v in (binary(e, "Sub", x, binary(e, "Mul", high, unit)), high)]


def _ranked(e: Emitter, keys: list[Blob], k: int, ascending: bool) -> Blob:
    """The places of the first k of each row, [..., D] by keys of which the last decides first, in the flat array."""
    places: Blob | None = None
    for number, key in enumerate(keys):
        count = k if number == len(keys) - 1 else key.shape[-1]
        if places is not None:
            key = e.reshaped(_at(e, key, places), key.shape)
        key = unary(e, "Negative", key) if ascending else key
        lead = key.shape[:-1]
        names = [e.claim("TopK") for _ in range(3)]
        e.b.op("TopK", [e.blob(key).name], names, k=count)
        found = Blob.of(names[2], (math.prod(lead) * count,), INT64)
        places = found if places is None else _at(e, places, found)
    assert places is not None
    return places


def _at(e: Emitter, x: Blob, places: Blob) -> Blob:
    flat = e.reshaped(x, (math.prod(x.shape),))
    return e.op("Gather", [flat, places], places.shape, x.dtype, dense_gradient=1)


@rule("sort")
def _(e: Emitter, node: Node, *xs):
    p = node.params
    rank, axis = len(xs[0].shape), p["dimension"]
    order = [*(k for k in range(rank) if k != axis), axis]
    rows = [e.blob(transpose(e, x, order)) for x in xs]
    keys = [key for x in reversed(rows[: p["num_keys"]]) for key in _keys(e, x)]
    places = _ranked(e, keys, rows[0].shape[-1], ascending=True)
    found = [e.reshaped(_at(e, x, places), x.shape) for x in rows]
    return tuple(transpose(e, x, np.argsort(order)) for x in found)


@rule("top_k")
def _(e: Emitter, node: Node, x: Value):
    rank, k = len(x.shape), node.params["k"]
    axis = node.params.get("axis", rank - 1) % rank
    order = [*(d for d in range(rank) if d != axis), axis]
    rows = e.blob(transpose(e, x, order))
    shape = (*rows.shape[:-1], k)
    places = _ranked(e, _keys(e, rows), k, ascending=False)
    values = e.reshaped(_at(e, rows, places), shape)
    size, lead = rows.shape[-1], math.prod(shape[:-1])
    first = np.arange(lead, dtype=np.int32).reshape(lead, 1) * size
    within = binary(e, "Sub", e.reshaped(e.cast(places, INT32), (lead, k)), first)
    indices = e.cast(e.reshaped(e.blob(within), shape), node.outputs[1].dtype)
    return transpose(e, values, np.argsort(order)), transpose(e, indices, np.argsort(order))
