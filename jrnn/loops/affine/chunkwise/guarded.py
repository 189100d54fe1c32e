"""Linear maps that are computed in products, or step by step where a result of the products is not finite.

The tangents of a chunk are such a map, and so is its transpose, the reverse pass. Products of cotangents with rows of a
chunk are no values of the recurrence, so they may overflow where the gradients of the recurrence do not. `linear_p` is a
primitive, so that JAX differentiates, transposes and batches both ways of a map together, and each result is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.jaxprs.jax_internals import Primitive, ad, batching, calling, jaxpr_as_fun, mlir, traced
from jrnn.jaxprs.tangents import pushed
from jrnn.loops.affine.rounds import all_finite

linear_p = Primitive("checked_linear_map")
linear_p.multiple_results = True


def traced_with(fn: Callable, operands: Sequence[Any]) -> Any:
    """Returns a function of arrays like the operands as a closed jaxpr."""
    return traced(fn, list(map(jax.typeof, operands)))


def linear_map(
    products: Any, steps: Any, good: Any, residuals: Sequence[Any], moving: Sequence[Any]
) -> list[Any]:
    """Returns `products(*residuals, *moving)`, or `steps(...)` if `good` is False or a result is not finite.

    Args:
        products, steps: closed jaxprs that return the same lists of floating-point arrays, and are linear in `moving`.
        good: a boolean.
        residuals, moving: arrays.
    """
    return _bind(good, [*residuals, *moving], products, steps, len(moving))


def _bind(good: Any, operands: Sequence[Any], products: Any, steps: Any, count: int) -> list[Any]:
    return linear_p.bind(good, *operands, products=products, steps=steps, count=count)


@linear_p.def_impl
def _impl(good: Any, *operands: Any, products: Any, steps: Any, count: int) -> list[Any]:
    results = calling(products)(*operands)
    good = good & all_finite(results)
    return jax.lax.cond(
        good,
        lambda results, _: results,
        lambda _, operands: calling(steps)(*operands),
        results,
        operands,
    )


linear_p.def_abstract_eval(lambda good, *operands, products, steps, count: products.out_avals)
mlir.register_lowering(linear_p, mlir.lower_fun(_impl, multiple_results=True))


def _rewritten(
    closed: Any, rewrite: Callable[[Callable], Callable], operands: Sequence[Any]
) -> Any:
    return traced_with(rewrite(jaxpr_as_fun(closed)), operands)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, products: Any, steps: Any, count: int
) -> tuple[list[Any], list[Any]]:
    good, *operands = primals
    argnums = [i for i, t in enumerate(tangents[1:]) if type(t) is not ad.Zero]
    moving = [tangents[1 + i] for i in argnums]

    def tangents_of(fn: Callable) -> Callable:
        return lambda *args: pushed(fn, args[: len(operands)], argnums, args[len(operands) :])[1]

    arguments = [*operands, *moving]
    both = (_rewritten(closed, tangents_of, arguments) for closed in (products, steps))
    return _bind(good, operands, products, steps, count), _bind(good, arguments, *both, len(moving))


def _transpose(
    cotangents: Sequence[Any], good: Any, *operands: Any, products: Any, steps: Any, count: int
) -> list[Any | None]:
    residuals = operands[:-count]
    moving = operands[-count:]
    cotangents = [ad.instantiate_zeros(ct) for ct in cotangents]
    is_needed = [ad.is_undefined_primal(m) for m in moving]
    avals = [m.aval if w else jax.typeof(m) for m, w in zip(moving, is_needed)]

    def transpose_of(fn: Callable) -> Callable:
        def of(*args: Any) -> list[Any]:
            fixed = args[: len(residuals)]
            back = jax.linear_transpose(lambda *moving: fn(*fixed, *moving), *avals)(
                list(args[len(residuals) :])
            )
            return [ct for ct, w in zip(back, is_needed) if w]

        return of

    arguments = [*residuals, *cotangents]
    both = (_rewritten(closed, transpose_of, arguments) for closed in (products, steps))
    results = iter(_bind(good, arguments, *both, len(cotangents)))
    return [None] * (1 + len(residuals)) + [next(results) if w else None for w in is_needed]


def _batched(
    args: Sequence[Any], axes: Sequence[Any], *, products: Any, steps: Any, count: int
) -> tuple[Any, Any]:
    (good, *operands), (of_good, *operand_axes) = args, axes
    good = good if of_good is None else jnp.all(good)
    both = (
        _rewritten(closed, lambda fn: jax.vmap(fn, tuple(operand_axes)), operands)
        for closed in (products, steps)
    )
    results = _bind(good, operands, *both, count)
    return results, [0] * len(results)


ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batched


# JAX moves what a step computes from constants in front of its loop, such as a mask that is spread over all rows. Each would
# be a kernel to compile and an array to read, so this primitive hides the equations of a step.
hidden_p = Primitive("hidden_program")
hidden_p.multiple_results = True


@hidden_p.def_impl
def hidden(*operands: Any, program: Any) -> list[Any]:
    """Returns the results of a closed jaxpr."""
    return calling(program)(*operands)


hidden_p.def_abstract_eval(lambda *operands, program: program.out_avals)
mlir.register_lowering(hidden_p, mlir.lower_fun(hidden, multiple_results=True))


def _hidden_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, program: Any
) -> tuple[list[Any], list[Any]]:
    argnums = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    return pushed(jaxpr_as_fun(program), primals, argnums, [tangents[i] for i in argnums])


def _hidden_batched(args: Sequence[Any], axes: Sequence[Any], *, program: Any) -> tuple[Any, Any]:
    results = hidden_p.bind(
        *args, program=_rewritten(program, lambda fn: jax.vmap(fn, tuple(axes)), args)
    )
    return results, [0] * len(results)


ad.primitive_jvps[hidden_p] = _hidden_jvp
batching.primitive_batchers[hidden_p] = _hidden_batched
