"""Contractions over time: the gradients of weights, written so that XLA:CPU need not copy the larger operand.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.executor import jaxprs

Axes = tuple[Sequence[int], Sequence[int]]


def over_time(lhs: Any, rhs: Any, axes: Axes, precision: Any, preferred_element_type: Any) -> Any:
    """`lax.dot_general` of two stacks [T, ...] without batch axes; time is among the axes that are contracted.

    For a product A^T B, XLA:CPU first copies A, transposed. Where A is the larger one, B^T A is computed instead and the
    result, which is small, transposed. XLA would merge a transposition of the result, this one or one of the caller's, with
    the product again; a cast to the type that it has keeps them apart.

    Args:
        axes: which axes of each are contracted.
        precision, preferred_element_type: as of `dot_general`.
    """

    def dot(a: Any, b: Any, axes: Axes, precision: Any) -> Any:
        return jax.lax.dot_general(
            a, b, (axes, ((), ())), precision=precision, preferred_element_type=preferred_element_type
        )

    result = preferred_element_type or jnp.result_type(lhs, rhs)
    if jax.default_backend() != "cpu" or not jnp.issubdtype(result, jnp.floating):
        return dot(lhs, rhs, axes, precision)
    kind = jnp.finfo(result)
    if jaxprs.elements(lhs.shape) <= jaxprs.elements(rhs.shape):
        return jax.lax.reduce_precision(dot(lhs, rhs, axes, precision), kind.nexp, kind.nmant)
    made = dot(rhs, lhs, axes[::-1], precision[::-1] if isinstance(precision, tuple) else precision)
    own = rhs.ndim - len(axes[1])
    return jnp.transpose(jax.lax.reduce_precision(made, kind.nexp, kind.nmant), (*range(own, made.ndim), *range(own)))
