"""Activations, with their gradients. Each works element by element on any shape.

The model for every family of operators: the forward function, which declares its gradient maker, and the gradient operator.
"TanhGradient(y, dy)" says: append a TanhGradient to the backward net, which reads the output y and the gradient dy that
arrives at it, and writes the gradient of the first input. `registry.op` has the whole notation. A maker that needs more is a
function under `@gradient`: see `ops/math.py`, Sqr. Arguments that several operators share are stated once, under
`values.takes`: see `ops/arithmetic.py`.
"""

import jax
import jax.numpy as jnp

from jrnn.registry import op


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
    return jax.nn.relu(x)  # its derivative at 0 is 0, as ReluGradient has it; that of maximum is 1/2


@op("ReluGradient", inplace={0: 1})
def relu_gradient(y, dy):
    return jnp.where(y > 0, dy, 0)
