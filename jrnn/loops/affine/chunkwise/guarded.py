"""Results and linear maps of products, each with a fallback step by step where a result of the products is not finite.

The tangents of a chunk are a linear map, and so is its transpose, the reverse pass. Products of cotangents with rows of a
chunk are no values of the recurrence, so they may overflow where the gradients of the recurrence do not. `linear_p` is a
primitive, so that JAX differentiates, transposes and batches both ways of a map together, and each result is checked:

        products(residuals, moving) ---> all finite? --yes--> results
        steps(residuals, moving) <----------no

A custom JVP rule could not check cotangents: JAX transposes the equations of its tangents, and a condition on a tangent is
not linear.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jrnn.jaxprs.jax_internals import (
    ClosedJaxpr,
    Primitive,
    ad,
    batching,
    calling,
    jaxpr_as_fun,
    mlir,
    traced,
)
from jrnn.jaxprs.tangents import is_smooth, pushed
from jrnn.loops.affine.rounds import all_finite

Arrays = Sequence[Array]
Pair = tuple[Arrays, Arrays]  # results and their tangents, or new carries and outputs
ArraysFn = Callable[..., Arrays]
BatchAxes = Sequence[int | None]

linear_p = Primitive("checked_linear_map")
linear_p.multiple_results = True


def are_finite(results: Arrays) -> Array:
    """Returns True if all floating-point arrays are finite. The check has no tangents."""
    return all_finite([jax.lax.stop_gradient(x) for x in results if is_smooth(x)])


def or_else(
    good: Array,
    results: Any,
    fallback: Callable[..., Any],
    operands: Arrays,
) -> Any:
    """Returns the results if they are good, and otherwise `fallback(*operands)`: only one of both is computed."""

    def as_they_are(results: Any, operands: Arrays) -> Any:
        return results

    def again(results: Any, operands: Arrays) -> Any:
        return fallback(*operands)

    return jax.lax.cond(good, as_they_are, again, results, operands)


def traced_with(fn: ArraysFn, operands: Arrays) -> Any:
    """Returns a function of arrays like the operands as a closed jaxpr."""
    return traced(fn, list(map(jax.typeof, operands)))


class LinearMap(NamedTuple):
    """A linear map in two forms, which return the same lists of floating-point arrays.

    Attributes:
        products: the closed jaxpr of products.
        steps: the closed jaxpr that runs step by step.
        n_moving: the number of operands, at the end, in which the map is linear.
    """

    products: ClosedJaxpr
    steps: ClosedJaxpr
    n_moving: int

    @staticmethod
    def of(products: ArraysFn, steps: ArraysFn, residuals: Arrays, moving: Arrays) -> LinearMap:
        """Traces both forms, for arrays like these. The map is linear in `moving`."""
        operands = [*residuals, *moving]
        return LinearMap(traced_with(products, operands), traced_with(steps, operands), len(moving))

    def run(self, good: Array, operands: Arrays) -> Arrays:
        """Returns the results of `products`, or those of `steps` if `good` is False or a result is not finite."""
        return linear_p.bind(good, *operands, linear_map=self)

    def rewritten(
        self, rewrite: Callable[[ArraysFn], ArraysFn], operands: Arrays, n_moving: int
    ) -> LinearMap:
        """Returns the map with both forms changed by a function of functions."""
        products = traced_with(rewrite(jaxpr_as_fun(self.products)), operands)
        steps = traced_with(rewrite(jaxpr_as_fun(self.steps)), operands)
        return LinearMap(products, steps, n_moving)


@linear_p.def_impl
def _impl(good: Array, *operands: Array, linear_map: LinearMap) -> Arrays:
    results = calling(linear_map.products)(*operands)
    good = good & all_finite(results)
    return or_else(good, results, calling(linear_map.steps), operands)


@linear_p.def_abstract_eval
def _types(good: Any, *operands: Any, linear_map: LinearMap) -> list[Any]:
    return linear_map.products.out_avals


def _moving(tangents: Sequence[Any]) -> list[int]:
    """Returns the positions of the tangents that are not zero."""
    return [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]


def _jvp(primals: Arrays, tangents: Sequence[Any], *, linear_map: LinearMap) -> Pair:
    good, *operands = primals
    argnums = _moving(tangents[1:])
    moving = [tangents[1 + i] for i in argnums]
    arguments = [*operands, *moving]

    def with_tangents(fn: ArraysFn) -> ArraysFn:
        def tangents_of(*args: Array) -> Arrays:
            values = args[: len(operands)]
            tangents = args[len(operands) :]
            return pushed(fn, values, argnums, tangents)[1]

        return tangents_of

    of_tangents = linear_map.rewritten(with_tangents, arguments, len(moving))
    return linear_map.run(good, operands), of_tangents.run(good, arguments)


def _transpose(
    cotangents: Sequence[Any], good: Array, *operands: Any, linear_map: LinearMap
) -> list[Array | None]:
    residuals = operands[: -linear_map.n_moving]
    moving = operands[-linear_map.n_moving :]
    cotangents = list(map(ad.instantiate_zeros, cotangents))
    is_needed = list(map(ad.is_undefined_primal, moving))
    types = []
    for m, needed in zip(moving, is_needed):
        types.append(m.aval if needed else jax.typeof(m))
    arguments = [*residuals, *cotangents]

    def transposed(fn: ArraysFn) -> ArraysFn:
        def cotangents_of(*args: Array) -> Arrays:
            residuals_here = args[: len(residuals)]
            cotangents_here = list(args[len(residuals) :])
            linear = functools.partial(fn, *residuals_here)
            results = jax.linear_transpose(linear, *types)(cotangents_here)
            return [ct for ct, needed in zip(results, is_needed) if needed]

        return cotangents_of

    transpose = linear_map.rewritten(transposed, arguments, len(cotangents))
    results = iter(transpose.run(good, arguments))
    of_moving = [next(results) if needed else None for needed in is_needed]
    return [None] * (1 + len(residuals)) + of_moving


def _batched(
    args: Arrays, axes: BatchAxes, *, linear_map: LinearMap
) -> tuple[list[Array], list[int]]:
    good, *operands = args
    if axes[0] is not None:
        good = jnp.all(good)
    over_axes = functools.partial(jax.vmap, in_axes=tuple(axes[1:]))
    results = linear_map.rewritten(over_axes, operands, linear_map.n_moving).run(good, operands)
    return results, [0] * len(results)


mlir.register_lowering(linear_p, mlir.lower_fun(_impl, multiple_results=True))
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batched


# JAX moves what a step computes from constants in front of its loop, such as a mask that is spread over all rows. Each would
# be a kernel to compile and an array to read, so this primitive hides the equations of a step.
hidden_p = Primitive("hidden_program")
hidden_p.multiple_results = True


@hidden_p.def_impl
def hidden(*operands: Array, program: Any) -> Arrays:
    """Returns the results of a closed jaxpr."""
    return calling(program)(*operands)


@hidden_p.def_abstract_eval
def _types_of_hidden(*operands: Any, program: Any) -> list[Any]:
    return program.out_avals


def _hidden_jvp(primals: Arrays, tangents: Sequence[Any], *, program: Any) -> Pair:
    argnums = _moving(tangents)
    return pushed(jaxpr_as_fun(program), primals, argnums, [tangents[i] for i in argnums])


def _hidden_batched(
    args: Arrays, axes: BatchAxes, *, program: Any
) -> tuple[list[Array], list[int]]:
    over_axes = functools.partial(jax.vmap, in_axes=tuple(axes))
    program = traced_with(over_axes(jaxpr_as_fun(program)), args)
    results = hidden_p.bind(*args, program=program)
    return results, [0] * len(results)


mlir.register_lowering(hidden_p, mlir.lower_fun(hidden, multiple_results=True))
ad.primitive_jvps[hidden_p] = _hidden_jvp
batching.primitive_batchers[hidden_p] = _hidden_batched
