"""Contractions over time, such as the gradients of weights, by the kernel for CPUs.

Shapes: R rows of all steps, M and W columns of two stacks.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.jaxprs.jax_internals import mesh_axes_type
from jrnn.loops.kernels.native import library
from jrnn.loops.passes.sums import ContractedAxes, dot_smaller_first

_LEAST = 1e6  # floating-point operations: below, XLA's product is as fast as a call
_WORK = 3e6  # the fewest of a thread
_COLUMNS = 16  # with fewer columns most of a vector would be empty
_LEAST_PART = 64  # columns: narrower stacks would leave panels empty, and are joined


def contract(
    lhs: Any, rhs: Any, axes: ContractedAxes, precision: Any, preferred_element_type: Any
) -> Any:
    """Contracts the leading axes of two stacks by the kernel; other contractions are those of `dot_smaller_first`.

    XLA:CPU copies one of the stacks, transposed, before such a product, and reaches two thirds of the rate.
    A list of stacks stands for their concatenation along the last axis, the only one that is not contracted.
    """
    if isinstance(lhs, list):
        if isinstance(rhs, list):
            rhs = jnp.concatenate(rhs, -1)
        exchanged = precision[::-1] if isinstance(precision, tuple) else precision
        return jnp.moveaxis(
            contract(rhs, lhs, axes[::-1], exchanged, preferred_element_type), -1, 0
        )
    parts = rhs if isinstance(rhs, list) else [rhs]
    if len(parts) > 1 and parts[0].shape[-1] < _LEAST_PART:
        parts = [jnp.concatenate(parts, -1)]
    count = len(axes[0])
    leading = all(tuple(of_one) == tuple(range(count)) for of_one in axes)
    types = {
        jnp.dtype(lhs.dtype),
        jnp.dtype(parts[0].dtype),
        jnp.dtype(preferred_element_type or lhs.dtype),
    }
    rows = math.prod(lhs.shape[:count])
    m = math.prod(lhs.shape[count:])
    w = math.prod(parts[0].shape[count:])
    (dtype, *others), work = types, 2 * rows * m * w * len(parts)
    if (
        not leading
        or others
        or dtype not in (jnp.float32, jnp.float64)
        or min(m, w) < _COLUMNS
        or work < _LEAST
    ):
        rhs = parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)
        return dot_smaller_first(lhs, rhs, axes, precision, preferred_element_type)
    operands = [lhs.reshape(rows, m), *(part.reshape(rows, w) for part in parts)]
    vary = mesh_axes_type(*operands)
    product = jax.ffi.ffi_call(
        library.SUM, jax.ShapeDtypeStruct((m, w * len(parts)), dtype, manual_axis_type=vary)
    )(*operands, level=np.int64(0), threads=np.int64(max(1, work // _WORK)))
    return product.reshape(*lhs.shape[count:], *parts[0].shape[count:-1], -1)
