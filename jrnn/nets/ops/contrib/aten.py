"""ATen: functions of PyTorch, which its exporters wrote into nets where Caffe2 had no operator.

The argument `operator` names the function, the inputs are its tensors in order, and its other arguments keep their names.
There are no gradients.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import OpError, near
from jrnn.nets.ir import Numbers
from jrnn.nets.ops.values import canonical_axis, int64, raise_if
from jrnn.nets.registry import op


def _elementwise(fn: Callable) -> Callable:
    return lambda x: fn(x)


def _operands(x: Any, y: Any, number: float | None, argument: str = "other") -> tuple[Any, Any]:
    """Both operands in one shape; the second is a tensor or a number."""
    raise_if(
        (y is None) == (number is None), f"takes a second tensor, or the argument {argument!r}"
    )
    return jnp.broadcast_arrays(x, jnp.asarray(number, x.dtype) if y is None else y)


def _binary(fn: Callable) -> Callable:
    return lambda x, y=None, *, other=None: fn(*_operands(x, y, other))


def _sum_of(fn: Callable) -> Callable:
    """Addition or subtraction, with the second operand times `alpha`."""

    def call(x, y=None, *, other=None, alpha=1):
        x, y = _operands(x, y, other)
        return fn(x, jnp.asarray(alpha, x.dtype) * y)

    return call


def _over(fn: Callable) -> Callable:
    """A reduction over one, several or all dimensions."""
    return lambda x, *, dim=None, keepdim=0: fn(x, axis=dim, keepdims=bool(keepdim))


def _spread(root: bool) -> Callable:
    def call(x, *, dim=None, unbiased=1, keepdim=0):
        variance = jnp.var(x, axis=dim, keepdims=bool(keepdim), ddof=int(bool(unbiased)))
        return jnp.sqrt(variance) if root else variance

    return call


def _norm(x, *, p=2.0, dim=None, keepdim=0):
    size = jnp.abs(x)
    if math.isinf(p):
        return size.max(axis=dim, keepdims=bool(keepdim))
    return (size**p).sum(axis=dim, keepdims=bool(keepdim)) ** (1 / p)


def _extreme(reduce: Callable, position: Callable, pair: Callable) -> Callable:
    """The extreme of two tensors, of all elements, or along a dimension, with the places in the last case."""

    def call(x, y=None, *, dim=None, keepdim=0):
        if y is not None:
            return pair(*jnp.broadcast_arrays(x, y))
        if dim is None:
            return reduce(x)
        extreme = (
            reduce(x, axis=dim, keepdims=bool(keepdim)),
            position(x, axis=dim, keepdims=bool(keepdim)),
        )
        return extreme[0], extreme[1].astype(int64())

    return call


def _place(fn: Callable) -> Callable:
    return lambda x, *, dim=None, keepdim=0: fn(x, axis=dim, keepdims=bool(keepdim)).astype(int64())


def _sorted(x, *, dim=-1, descending=0):
    order = jnp.argsort(x, axis=dim, stable=True, descending=bool(descending))
    return jnp.take_along_axis(x, order, dim), order.astype(int64())


def _topk(x, *, k, dim=-1, largest=1, sorted=1):
    values, places = _sorted(x, dim=dim, descending=largest)
    first = [slice(None)] * x.ndim
    first[canonical_axis(dim, x.ndim)] = slice(k)
    return values[tuple(first)], places[tuple(first)]


def _slice(x, *, dim=0, start=0, end=2**63 - 1, step=1):
    return x[(slice(None),) * canonical_axis(dim, x.ndim) + (slice(start, end, step),)]


def _flatten(x, *, start_dim=0, end_dim=-1):
    first, last = (canonical_axis(d, x.ndim) for d in (start_dim, end_dim))
    return x.reshape(*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :])


def _expand(x, *, size, implicit=0):
    shape = (1,) * (len(size) - x.ndim) + x.shape
    return jnp.broadcast_to(
        x.reshape(shape), [have if want == -1 else want for want, have in zip(size, shape)]
    )


def _squeeze(x, *, dim=None):
    if dim is None:
        return jnp.squeeze(x)
    return x if x.shape[dim] != 1 else jnp.squeeze(x, dim)


def _layer_norm(x, weight=None, bias=None, *, normalized_shape, eps=1e-5, cudnn_enable=1):
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    y = (x - x.mean(axes, keepdims=True)) / jnp.sqrt(x.var(axes, keepdims=True) + eps)
    lifted = (1,) * (x.ndim - len(normalized_shape)) + tuple(normalized_shape)
    y = y if weight is None else y * weight.reshape(lifted)
    return y if bias is None else y + bias.reshape(lifted)


def _scaled_product(product: Callable) -> Callable:
    def call(c, a, b, *, beta=1, alpha=1):
        matrix = product(a, b)
        return beta * jnp.broadcast_to(c, matrix.shape) + alpha * matrix

    return call


def _pad2d(mode: str) -> Callable:
    def call(x, *, padding):
        left, right, top, bottom = padding
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(top, bottom), (left, right)], mode=mode)

    return call


def _adaptive_average(x, *, output_size):
    for axis, out in zip((x.ndim - 2, x.ndim - 1), output_size):
        size = x.shape[axis]
        bounds = [(k * size // out, -(-(k + 1) * size // out)) for k in range(out)]
        parts = [
            jax.lax.slice_in_dim(x, a, b, axis=axis).mean(axis, keepdims=True) for a, b in bounds
        ]
        x = jnp.concatenate(parts, axis)
    return x


def _pixel_shuffle(x, *, upscale_factor):
    n, c, h, w = x.shape
    r = upscale_factor
    return (
        x.reshape(n, c // r**2, r, r, h, w)
        .transpose(0, 1, 4, 2, 5, 3)
        .reshape(n, c // r**2, h * r, w * r)
    )


# fmt: off
_UNARY = (
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "exp", "expm1", "floor", "log", "log10",
    "log1p", "log2", "reciprocal", "round", "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)
_BINARY = {
    "mul": "multiply", "div": "divide", "fmod": "fmod", "remainder": "remainder", "atan2": "arctan2",
    "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
}
# fmt: on
FUNCTIONS: dict[str, Callable] = {name: _elementwise(getattr(jnp, name)) for name in _UNARY}
FUNCTIONS |= {name: _binary(getattr(jnp, function)) for name, function in _BINARY.items()}
FUNCTIONS |= {name: _over(getattr(jnp, name)) for name in ("sum", "mean", "prod", "all", "any")}
FUNCTIONS |= dict.fromkeys(("mm", "mv", "bmm", "dot", "matmul"), jnp.matmul)
FUNCTIONS |= {
    "neg": _elementwise(jnp.negative),
    "rsqrt": _elementwise(jax.lax.rsqrt),
    "sigmoid": _elementwise(jax.nn.sigmoid),
    "relu": _elementwise(jax.nn.relu),
    "erf": _elementwise(jax.scipy.special.erf),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "contiguous": lambda x: x,
    "leaky_relu": lambda x, *, negative_slope=0.01: jnp.where(x > 0, x, negative_slope * x),
    "hardtanh": lambda x, *, min_val=-1.0, max_val=1.0: jnp.clip(x, min_val, max_val),
    "softplus": lambda x, *, beta=1.0, threshold=20.0: jnp.where(
        x * beta > threshold, x, jnp.log1p(jnp.exp(jnp.minimum(x * beta, threshold))) / beta
    ),
    "clamp": lambda x, *, min=None, max=None: jnp.clip(x, min, max),
    "add": _sum_of(jnp.add),
    "sub": _sum_of(jnp.subtract),
    "pow": lambda x, y=None, *, exponent=None: jnp.power(*_operands(x, y, exponent, "exponent")),
    "max": _extreme(jnp.max, jnp.argmax, jnp.maximum),
    "min": _extreme(jnp.min, jnp.argmin, jnp.minimum),
    "logsumexp": _over(jax.scipy.special.logsumexp),
    "frobenius_norm": lambda x, *, dim=None, keepdim=0: _norm(x, dim=dim, keepdim=keepdim),
    "norm": _norm,
    "var": _spread(False),
    "std": _spread(True),
    "argmax": _place(jnp.argmax),
    "argmin": _place(jnp.argmin),
    "cumsum": lambda x, *, dim: jnp.cumsum(x, axis=dim),
    "cumprod": lambda x, *, dim: jnp.cumprod(x, axis=dim),
    "sort": _sorted,
    "topk": _topk,
    "t": lambda x: x.T,
    "transpose": lambda x, *, dim0, dim1: jnp.swapaxes(x, dim0, dim1),
    "permute": lambda x, *, dims: jnp.transpose(x, dims),
    "view": lambda x, *, size: x.reshape(size),
    "reshape": lambda x, *, shape: x.reshape(shape),
    "flatten": _flatten,
    "expand": _expand,
    "expand_as": lambda x, like: _expand(x, size=like.shape),
    "repeat": lambda x, *, repeats: jnp.tile(x, repeats),
    "squeeze": _squeeze,
    "unsqueeze": lambda x, *, dim: jnp.expand_dims(x, dim),
    "cat": lambda *xs, dim=0: jnp.concatenate(xs, dim),
    "stack": lambda *xs, dim=0: jnp.stack(xs, dim),
    "select": lambda x, *, dim, index: jnp.take(x, np.asarray(index), axis=dim),
    "slice": _slice,
    "narrow": lambda x, *, dim, start, length: _slice(x, dim=dim, start=start, end=start + length),
    "index_select": lambda x, index, *, dim: jnp.take(x, index, axis=dim),
    "gather": lambda x, index, *, dim, sparse_grad=0: jnp.take_along_axis(x, index, dim),
    "where": lambda mask, x, y: jnp.where(*jnp.broadcast_arrays(mask.astype(bool), x, y)),
    "masked_fill": lambda x, mask, *, value: jnp.where(
        jnp.broadcast_to(mask.astype(bool), x.shape), value, x
    ),
    "triu": lambda x, *, diagonal=0: jnp.triu(x, diagonal),
    "tril": lambda x, *, diagonal=0: jnp.tril(x, diagonal),
    "flip": lambda x, *, dims: jnp.flip(x, dims),
    "type_as": lambda x, like: x.astype(like.dtype),
    "softmax": lambda x, *, dim: jax.nn.softmax(x, axis=dim),
    "log_softmax": lambda x, *, dim: jax.nn.log_softmax(x, axis=dim),
    "layer_norm": _layer_norm,
    "embedding": lambda table, rows, *, padding_idx=-1, scale_grad_by_freq=0, sparse=0: jnp.take(
        table, rows, axis=0
    ),
    "ger": lambda a, b: a[:, None] * b[None, :],
    "addmm": _scaled_product(jnp.matmul),
    "baddbmm": _scaled_product(jnp.matmul),
    "reflection_pad2d": _pad2d("reflect"),
    "replication_pad2d": _pad2d("edge"),
    "adaptive_avg_pool2d": _adaptive_average,
    "pixel_shuffle": _pixel_shuffle,
}
_OWN = ("operator", "overload_name", "type")  # arguments of ATen itself


@op("ATen", outputs=(1, 2), gradient="forbidden")
def aten(*xs, operator: str, op):
    if operator not in FUNCTIONS:
        raise OpError(
            f"names the function {operator!r}, which is not offered{near(operator, FUNCTIONS)}; it must be one of "
            + ", ".join(sorted(FUNCTIONS))
        )
    args = {
        a.name: tuple(a.value) if isinstance(a.value, (Numbers, tuple)) else a.value
        for a in op.args
    }
    args = {name: value for name, value in args.items() if name not in _OWN}
    fn = FUNCTIONS[operator]
    try:
        inspect.signature(fn).bind(*xs, **args)
    except TypeError as e:
        raise OpError(
            f"function {operator!r} with {len(xs)} tensors and arguments {sorted(args)}: {e}"
        ) from None
    return fn(*map(jnp.asarray, xs), **args)
