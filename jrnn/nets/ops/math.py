"""Elementary functions with their gradients, element by element; and Max, Min, Mean and WeightedSum of several inputs."""

import inspect
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.nets.ops.reduce import max_of, min_of
from jrnn.nets.ops.values import as_float, check_same_shape, describe, magnitude, raise_if
from jrnn.nets.ops.vjp import op_with_vjp
from jrnn.nets.registry import gradient, op


def register(
    type: str,
    fn: Callable,
    slope: Callable | None = None,
    *,
    inplace: bool = False,
    own: bool = False,
) -> None:
    """Registers `type`, y = fn(x), and `typeGradient`, the product of dy and the derivative.

    Args:
        slope: the gradient operator, a function of the blobs that it reads: x, y, dy.
        inplace: whether y may overwrite x.
        own: whether dx needs a blob of its own; otherwise it may overwrite dy.
    """
    reads = list(inspect.signature(slope).parameters) if slope is not None else []
    declared = f"{type}Gradient({', '.join(reads)})" if reads else "forbidden"

    @op(type, inplace={0: 0} if inplace else None, gradient=declared)
    def forward(x):
        return fn(as_float(x))

    if slope is not None:
        op(type + "Gradient", inplace=None if own else {0: reads.index("dy")})(slope)


@jax.custom_jvp
def _cube_root(x):
    return jnp.cbrt(x)


@_cube_root.defjvp
def _(primals, tangents):
    y = _cube_root(primals[0])
    return y, tangents[0] / (3 * y * y)  # jnp's has a quotient of y and x, which is NaN at 0


_ERF = 2 / math.sqrt(math.pi)
register("Log1p", jnp.log1p)  # Caffe2 itself has no such operator; nets of its later users do
register("Ceil", jnp.ceil, inplace=True)
register("Floor", jnp.floor, inplace=True)
register("Sin", jnp.sin, lambda x, dy: dy * jnp.cos(x))
register("Cos", jnp.cos, lambda x, dy: -dy * jnp.sin(x))
register("Tan", jnp.tan, lambda x, dy: dy / jnp.square(jnp.cos(x)))
register("Sinh", jnp.sinh, lambda dy, x: dy * jnp.cosh(x), own=True)
register("Cosh", jnp.cosh, lambda dy, x: dy * jnp.sinh(x), own=True)
register("Asin", jnp.arcsin, lambda x, dy: dy / jnp.sqrt(1 - x * x))
register("Acos", jnp.arccos, lambda x, dy: -dy / jnp.sqrt(1 - x * x))
register("Atan", jnp.arctan, lambda x, dy: dy / (1 + x * x))
register("Erf", jax.scipy.special.erf, lambda x, dy: dy * _ERF * jnp.exp(-x * x))
register("Rsqrt", lambda x: 1 / jnp.sqrt(x), lambda dy, y: -0.5 * dy * y**3, inplace=True)
register("Cbrt", _cube_root, lambda dy, y: dy / (3 * y * y), inplace=True)
register("Reciprocal", lambda x: 1 / x, lambda y, dy: -dy * y * y, inplace=True)


op("Abs", inplace={0: 0}, gradient="AbsGradient(x, dy)")(lambda x: magnitude(x))
op("AbsGradient", inplace={0: 1})(lambda x, dy: dy * jnp.sign(x))
op("Cube", gradient="CubeGradient(dy, x)")(lambda x: x**3)
op("CubeGradient", inplace={0: 0})(lambda dy, x: dy * 3 * x * x)
op("Negative", inplace={0: 0}, gradient="Negative(dy)")(lambda x: -x)
op("Sign", gradient="forbidden")(lambda x: jnp.sign(x))
op("Exp", inplace={0: 0}, gradient="Mul(y, dy)")(lambda x: jnp.exp(as_float(x)))
op("Log", inplace={0: 0}, gradient="Div(dy, x)")(lambda x: jnp.log(as_float(x)))
op("Sqr", inplace={0: 0})(lambda x: jnp.square(as_float(x)))


@gradient("Sqr")
def _(g):
    # Not in place: others may read the gradient that arrives.
    doubled = g.temporary(g.grad_output(0) + "_doubled")
    g.emit("Scale", [g.grad_output(0)], [doubled], scale=2.0)
    g.emit("Mul", [doubled, g.input(0)], [g.grad_input(0)])


op("Sqrt", inplace={0: 0})(lambda x: jnp.sqrt(as_float(x)))


@gradient("Sqrt")
def _(g):
    halved = g.temporary(g.grad_output(0) + "_halved")  # each gradient in a sum is written once
    g.emit("Scale", [g.grad_output(0)], [halved], scale=0.5)
    g.emit("Div", [halved, g.output(0)], [g.grad_input(0)])


@op_with_vjp("Logit", inplace={0: 0}, gradient="LogitGradient(x, dy)")
def logit(x, *, eps: float = 1e-6):
    x = as_float(x)  # with derivative 0 where it is clipped
    x = jnp.where((x >= eps) & (x <= 1 - eps), x, jax.lax.stop_gradient(jnp.clip(x, eps, 1 - eps)))
    return jnp.log(x / (1 - x))


def _named(xs: tuple) -> str:
    return "inputs " + ", ".join(f"#{k}" for k in range(len(xs)))


def _register_extremum(type: str, pick: Callable) -> None:
    """Max or Min: every input that attains the extremum gets the whole gradient (jnp's would share it)."""

    @op_with_vjp(type, inplace={0: 0}, gradient=f"{type}Gradient(y, dy, *) -> *")
    def forward(x, *xs):
        check_same_shape(_named((x, *xs)), x, *xs)
        return pick(jnp.stack([as_float(v) for v in (x, *xs)]), (0,))[0]


_register_extremum("Max", max_of)
_register_extremum("Min", min_of)


@op("Mean", inplace={0: 0}, gradient="MeanGradient(dy) -> *")
def mean(x, *xs):
    check_same_shape(_named((x, *xs)), x, *xs)
    return sum(xs, as_float(x)) / (1 + len(xs))


@op("MeanGradient", outputs=(1, None), inplace={0: 0})
def mean_gradient(dy, *, op):
    count = len(op.outputs)
    return (dy / count,) * count


def _pairs(inputs: tuple) -> tuple[list, list]:
    """The arrays and the weights among X0, w0, X1, w1, ..."""
    raise_if(
        not inputs or len(inputs) % 2,
        f"takes pairs of an array and its weight, was given {len(inputs)} inputs",
    )
    xs = list(inputs[::2])
    ws = list(inputs[1::2])
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
    gradients = [dy * jnp.reshape(w, (1,) * dy.ndim) for w in ws]
    if grad_on_w:
        gradients += [jnp.reshape(jnp.sum(dy * x), w.shape) for x, w in zip(xs, ws)]
    return tuple(gradients)


@gradient("WeightedSum")
def _(g):
    count = len(g.op.inputs)
    outputs = list(map(g.grad_input, range(0, count, 2)))
    if g.arg("grad_on_w", 0):
        outputs += map(g.grad_input, range(1, count, 2))
    inputs = [g.grad_output(0), *map(g.input, range(count))]
    g.emit("WeightedSumGradient", inputs, outputs)
