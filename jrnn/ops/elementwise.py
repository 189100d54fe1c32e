"""Activations, with their gradients. Each works element by element on any shape.

The model for every family of operators: the forward function, its gradient operator, and the gradient maker, which says how
the second follows from the first. In a maker, `g.input(k)` and `g.output(k)` are blobs of the forward operator,
`g.grad_output(k)` is the blob of the gradient that arrives at output k, `g.grad_input(k)` names the gradient of input k, and
`g.emit` appends an operator to the backward net.
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
