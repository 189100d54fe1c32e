"""Contractions over time: the gradients of weights.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.executor import jaxprs

Axes = tuple[Sequence[int], Sequence[int]]
Contract = Callable[[Any, Any, Axes, Any, Any], Any]


def as_written(lhs: Any, rhs: Any, axes: Axes, precision: Any, preferred_element_type: Any) -> Any:
    """`lax.dot_general` of two stacks [T, ...] without batch axes; time is among the axes that are contracted.

    Args:
        lhs, rhs: the stacks.
        axes: which axes of each are contracted.
        precision, preferred_element_type: as in `dot_general`.
    """
    return jax.lax.dot_general(
        lhs, rhs, (axes, ((), ())), precision=precision, preferred_element_type=preferred_element_type
    )


def smaller_first(lhs: Any, rhs: Any, axes: Axes, precision: Any, preferred_element_type: Any) -> Any:
    """`as_written`, with the operands in the order that XLA:CPU computes faster.

    For a product A^T B, XLA:CPU first copies A, transposed. Where A is the larger one, B^T A is computed instead and the
    result, which is small, is transposed. XLA would merge a transposition of the result, this one or one of the caller's,
    with the product again; a cast to the type that it has keeps them apart.
    """
    result = preferred_element_type or jnp.result_type(lhs, rhs)
    if not jnp.issubdtype(result, jnp.floating):
        return as_written(lhs, rhs, axes, precision, preferred_element_type)
    kind = jnp.finfo(result)
    if jaxprs.elements(lhs.shape) <= jaxprs.elements(rhs.shape):
        made = as_written(lhs, rhs, axes, precision, preferred_element_type)
        return jax.lax.reduce_precision(made, kind.nexp, kind.nmant)
    exchanged = precision[::-1] if isinstance(precision, tuple) else precision
    made = as_written(rhs, lhs, axes[::-1], exchanged, preferred_element_type)
    own = rhs.ndim - len(axes[1])
    return jnp.transpose(jax.lax.reduce_precision(made, kind.nexp, kind.nmant), (*range(own, made.ndim), *range(own)))
