"""Operators on any number of inputs of one shape: Max, Min, Mean, WeightedSum."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.ops.values import as_float, check_same_shape, describe
from jrnn.registry import gradient, op


def _named(xs: tuple) -> str:
    return "inputs " + ", ".join(f"#{k}" for k in range(len(xs)))


def _extremum(type: str, pick: Callable) -> None:
    """Max or Min: every input that attains the extremum gets the whole gradient (jnp's would share it)."""

    @jax.custom_jvp
    def extremum(*xs: Any) -> Any:
        return functools.reduce(pick, xs)

    @extremum.defjvp
    def _(xs, tangents):
        y = extremum(*xs)
        return y, sum(jnp.where(x == y, t, 0) for x, t in zip(xs, tangents))

    @op(type, inplace={0: 0}, gradient=f"{type}Gradient(y, dy, *) -> *")
    def forward(x, *xs):
        check_same_shape(_named((x, *xs)), x, *xs)
        return extremum(*map(as_float, (x, *xs)))

    @op(type + "Gradient", outputs=(1, None), inplace={0: 1})
    def backward(y, dy, *xs):
        check_same_shape("y, dy and the inputs", y, dy, *xs)
        return tuple(jnp.where(x == y, dy, 0) for x in xs)


_extremum("Max", jnp.maximum)
_extremum("Min", jnp.minimum)


@op("Mean", inplace={0: 0}, gradient="MeanGradient(dy) -> *")
def mean(x, *xs):
    check_same_shape(_named((x, *xs)), x, *xs)
    return sum(xs, as_float(x)) / (1 + len(xs))


@op("MeanGradient", outputs=(1, None), inplace={0: 0})
def mean_gradient(dy, *, op):
    return (dy / len(op.outputs),) * len(op.outputs)


def _pairs(inputs: tuple) -> tuple[list, list]:
    """The arrays and the weights among X0, w0, X1, w1, ..."""
    if not inputs or len(inputs) % 2:
        raise OpError(f"takes pairs of an array and its weight, was given {len(inputs)} inputs")
    xs, ws = list(inputs[::2]), list(inputs[1::2])
    check_same_shape("the arrays", *xs)
    for k, w in enumerate(ws):
        if w.size != 1:
            raise OpError(f"weight #{k} is {describe(w)}; it must have 1 element")
    return xs, ws


@op("WeightedSum", inplace={0: 0})
def weighted_sum(*inputs, grad_on_w: bool = False):
    xs, ws = _pairs(inputs)
    ws = ws if grad_on_w else jax.lax.stop_gradient(ws)
    return sum(as_float(x) * jnp.reshape(w, (1,) * x.ndim) for x, w in zip(xs, ws))


@op("WeightedSumGradient", outputs=(1, None))
def weighted_sum_gradient(dy, *inputs, grad_on_w: bool = False):
    xs, ws = _pairs(inputs)
    dxs = [dy * jnp.reshape(w, (1,) * dy.ndim) for w in ws]
    dws = [jnp.reshape(jnp.sum(dy * x), w.shape) for x, w in zip(xs, ws)] if grad_on_w else []
    return (*dxs, *dws)


@gradient("WeightedSum")
def _(g):
    count = len(g.op.inputs)
    outputs = [g.grad_input(k) for k in range(0, count, 2)]
    if g.arg("grad_on_w", 0):
        outputs += [g.grad_input(k) for k in range(1, count, 2)]
    g.emit("WeightedSumGradient", [g.grad_output(0), *(g.input(k) for k in range(count))], outputs)
