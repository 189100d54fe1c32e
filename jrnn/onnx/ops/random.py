"""Operators that draw random numbers, from the key of the call or the seed of the node."""

import jax
import jax.numpy as jnp
from onnx import TensorProto, helper

from jrnn.nets.memory import check_size
from jrnn.onnx.graph import op


def _dtype(node, default):
    code = node.get("dtype")
    return jax.dtypes.canonicalize_dtype(default if code is None else helper.tensor_dtype_to_np_dtype(code))


@op("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
def _(node, like=None):
    shape = check_size(node.get("shape") if like is None else like.shape, jnp.float32)
    dtype = _dtype(node, jnp.float32 if like is None else like.dtype)
    if "Uniform" in node.type:
        return jax.random.uniform(node.random(), shape, dtype, node.get("low", 0.0), node.get("high", 1.0))
    drawn = jax.random.normal(node.random(), shape, dtype)
    return drawn * jnp.asarray(node.get("scale", 1.0), dtype) + jnp.asarray(node.get("mean", 0.0), dtype)


@op("Bernoulli")
def _(node, x):
    """1 with the probability x. ONNX's function for it has 1 - x."""
    return jax.random.bernoulli(node.random(), jnp.asarray(x)).astype(_dtype(node, x.dtype))


@op("Multinomial")
def _(node, logits):
    """[N, C] -> indices [N, samples]."""
    shape = check_size((logits.shape[0], node.get("sample_size", 1)), jnp.int32)
    drawn = jax.random.categorical(node.random(), jnp.asarray(logits)[:, None], shape=shape)
    return drawn.astype(_dtype(node, helper.tensor_dtype_to_np_dtype(TensorProto.INT32)))
