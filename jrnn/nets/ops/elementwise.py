"""Activations, with their gradients. Each works element by element on any shape.

Files of operators look like this one: a forward function, which declares its gradient maker, and the gradient operator.
"TanhGradient(y, dy)" means: append a TanhGradient to the backward net. It reads the output y and the gradient dy that
arrives at y, and writes the gradient of the first input. `registry.op` documents the notation. A maker that needs more is a
function under `@gradient`, such as Sqr's in `ops/math.py`, where an operator of one expression is one line. The decorator
`takes` of `ops/values.py` declares Arguments that several operators share, as in `ops/arithmetic.py`. `inplace={0: 1}`:
output 0 may overwrite input 1.
"""

import jax
import jax.numpy as jnp

from jrnn.nets.registry import op


@op("Tanh", inplace={0: 0}, gradient="TanhGradient(y, dy)")
def tanh(x):
    return jnp.tanh(x)


@op("TanhGradient", inplace={0: 1})
def tanh_gradient(y, dy):
    return dy * (1 - y * y)


@op("Sigmoid", inplace={0: 0}, gradient="SigmoidGradient(y, dy)")
def sigmoid(x):
    return jax.nn.sigmoid(x)


@op("SigmoidGradient", inplace={0: 1})
def sigmoid_gradient(y, dy):
    return dy * y * (1 - y)


@op("Relu", inplace={0: 0}, gradient="ReluGradient(y, dy)")
def relu(x):
    return jax.nn.relu(x)  # its derivative at 0 is 0, like ReluGradient's; that of jnp.maximum is 1/2


@op("ReluGradient", inplace={0: 1})
def relu_gradient(y, dy):
    return jnp.where(y > 0, dy, 0)
