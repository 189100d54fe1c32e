"""Operators that inference builds fuse or pack: a convolution with its Relu, and weights in half precision."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.ops.contrib.conv import conv
from jrnn.ops.matmul import fc
from jrnn.ops.values import as_float
from jrnn.registry import op


def conv_relu(*blobs: Any, **args: Any) -> Any:
    return jax.nn.relu(conv(*blobs, **args))


conv_relu.__signature__ = inspect.signature(conv)  # type: ignore[attr-defined]
op("ConvRelu", gradient="forbidden")(conv_relu)


@op("FbGemmPack", gradient="forbidden")
def pack(w):
    """w in half precision, as which it is multiplied."""
    return as_float(w, "w").astype(jnp.float16)


@op("FbGemmPackTranspose", gradient="forbidden")
def pack_transposed(w):
    return jnp.swapaxes(pack(w), -1, -2)


@op("FbFCPacked", gradient="forbidden")
def fc_packed(x, w, b, *, axis: int = 1, axis_w: int = 1):
    """y = x w^T + b with w in half precision, added up in x's own."""
    half: Any = jnp.asarray(w).astype(jnp.float16)
    return fc(x, half.astype(x.dtype), b, axis=axis, axis_w=axis_w)
