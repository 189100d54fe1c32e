"""Products of matrices whose operands have 16 bits, with sums in float32, forward and in reverse.

Units for matrices multiply numbers of 16 bits many times as fast as float32. A product of bfloat16 arrays with
`preferred_element_type=float32` is one of them. Its gradient in JAX is not: the cotangent is float32, the other operand is
bfloat16, and XLA makes a float32 product of the two. Here both operands of every product are rounded, also cotangents and
tangents, so this is a primitive with rules of its own. Rounded operands are what the reverse pass stores:

        a [float32] -- rounded --+                         ct [float32] -- rounded --+
                                 +--> a . b [float32]                                +--> of a [float32]
        b [float32] -- rounded --+                         b, as it was rounded -----+

Rules are simple for one form, [B, M, K] and [B, N, K] to [B, M, N], so other products are brought to it.

Shapes: B batch axes, M and N kept axes, K summed axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import Primitive, ad, batching, mlir
from jrnn.jaxprs.mesh_axes import alike
from jrnn.jaxprs.programs import is_explicit

rounded_product_p = Primitive("rounded_product")


def rounded_product(a: Array, b: Array, numbers: Any, dtype: Any) -> Array:
    """Computes `lax.dot_general` of operands that are rounded to a type, as float32.

    Args:
        a, b: the operands.
        numbers: the dimension numbers.
        dtype: the type of 16 bits.
    """
    if any(is_explicit(jax.typeof(x)) for x in (a, b)):
        return _in_float32(a, b, numbers, dtype)
    a, b = alike((a, b))
    contracted, batch = numbers
    sizes = list(jaxprs.take(a.shape, batch[0]))
    operands = []
    for x, summed, axes in zip((a, b), contracted, batch):
        kept = jaxprs.other_axes(x.ndim, (*axes, *summed))
        kept_sizes = jaxprs.take(x.shape, kept)
        sizes += kept_sizes
        count = math.prod(jaxprs.take(x.shape, axes))
        ordered = jnp.transpose(x, (*axes, *kept, *summed))
        operands.append(ordered.reshape(count, math.prod(kept_sizes), -1))
    return rounded_product_p.bind(*operands, dtype=dtype).reshape(sizes)


def matmul(a: Array, b: Array, precision: Any) -> Array:
    """Returns the product of matrices, `[..., M, K] @ [..., K, N]`.

    Args:
        a, b: matrices with equal batch axes.
        precision: JAX's, or the type of 16 bits to which operands are rounded.
    """
    if not is_rounding(precision):
        return jnp.matmul(a, b, precision=precision)
    batch = tuple(range(a.ndim - 2))
    numbers = (((a.ndim - 1,), (b.ndim - 2,)), (batch, batch))
    return rounded_product(a, b, numbers, precision)


def is_rounding(precision: Any) -> bool:
    """Returns True for a type to which operands are rounded, and False for a precision of JAX."""
    return isinstance(precision, jnp.dtype)


def full(precision: Any) -> Any:
    """Returns the precision of products that must not be rounded: of decays, and for the inverse of a triangular matrix."""
    return jax.lax.Precision.HIGHEST if is_rounding(precision) else precision


def _in_float32(a: Array, b: Array, numbers: Any, dtype: Any) -> Array:
    a = a.astype(dtype)
    b = b.astype(dtype)
    return jax.lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32)


def rounded(x: Array, precision: Any) -> Array:
    """Returns an operand of products as it is stored: in the type to which the products round it."""
    return x.astype(precision) if is_rounding(precision) else x


@rounded_product_p.def_impl
def _impl(a: Array, b: Array, *, dtype: Any) -> Array:
    return _in_float32(a, b, (((2,), (2,)), ((0,), (0,))), dtype)


@rounded_product_p.def_abstract_eval
def _type(a: Any, b: Any, *, dtype: Any) -> Any:
    return a.update(shape=(*a.shape[:2], b.shape[1]), dtype=jnp.dtype(jnp.float32))


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], *, dtype: Any) -> tuple[Array, Any]:
    a = primals[0].astype(dtype)
    b = primals[1].astype(dtype)
    moved_a, moved_b = tangents
    product = rounded_product_p.bind(a, b, dtype=dtype)
    parts = []
    if type(moved_a) is not ad.Zero:
        parts.append(rounded_product_p.bind(moved_a, b, dtype=dtype))
    if type(moved_b) is not ad.Zero:
        parts.append(rounded_product_p.bind(a, moved_b, dtype=dtype))
    return product, functools.reduce(ad.add_tangents, parts)


def _transpose(cotangent: Any, a: Any, b: Any, *, dtype: Any) -> tuple[Any, Any]:
    """Returns the cotangent of the operand in which the product is linear."""
    if type(cotangent) is ad.Zero:
        return None, None
    if ad.is_undefined_primal(a):
        of_a = rounded_product_p.bind(cotangent, b.mT, dtype=dtype)
        return of_a.astype(a.aval.dtype), None
    of_b = rounded_product_p.bind(cotangent.mT, a.mT, dtype=dtype)
    return None, of_b.astype(b.aval.dtype)


def _batched(args: Sequence[Array], axes: Sequence[int | None], *, dtype: Any) -> tuple[Array, int]:
    """Joins the new axis with B."""
    (size,) = {x.shape[axis] for x, axis in zip(args, axes) if axis is not None}
    operands = []
    for x, axis in zip(args, axes):
        if axis is None:
            x = jnp.broadcast_to(x, (size, *x.shape))
        else:
            x = jnp.moveaxis(x, axis, 0)
        operands.append(jax.lax.collapse(x, 0, 2))
    product = rounded_product_p.bind(*operands, dtype=dtype)
    return product.reshape(size, -1, *product.shape[1:]), 0


mlir.register_lowering(rounded_product_p, mlir.lower_fun(_impl, multiple_results=False))
ad.primitive_jvps[rounded_product_p] = _jvp
ad.primitive_transposes[rounded_product_p] = _transpose
batching.primitive_batchers[rounded_product_p] = _batched
