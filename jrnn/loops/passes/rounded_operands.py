"""Products of a gradient in the type of the products that they are the gradient of, on accelerators.

A product of bfloat16 values with `preferred_element_type=float32`, as layers of `jrnn.nn` with `dtype=bfloat16` have, has
gradients of mixed types in JAX: the cotangent is float32, the other operand bfloat16, and JAX rounds the result:

        z [f32] = h [bf16] . W [bf16]         dh [bf16] = round(dz [f32] . W [bf16])

XLA makes a float32 product of it. It converts W to float32 at every step, because it does not hoist what grows, and its
units for matrices run at a fraction of their speed. With dz rounded, too, W is read as it is. The result has the error of a
rounded operand in addition to the error of the rounded result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Env, Eqn, Var, primitives
from jrnn.loops.ir import Loop


def round_operands(loop: Loop) -> Loop:
    """Rounds float32 operands of products whose other operand and whose result have 16 bits.

    Products whose results stay float32 keep their operands.
    """
    readers = jaxprs.readers(loop.eqns)
    outputs = set(jaxprs.variables(loop.outputs))
    types: dict[int, Any] = {}
    for eqn in loop.eqns:
        dtype = _narrow_type(eqn)
        if dtype is not None and _is_rounded_to(dtype, eqn, readers, outputs):
            types[id(eqn)] = dtype
    if not types:
        return loop

    def rule(eqn: Eqn, env: Env) -> Sequence[Any] | None:
        if id(eqn) not in types:
            return None
        operands = [jaxprs.value(env, atom).astype(types[id(eqn)]) for atom in eqn.invars]
        with jaxprs.in_scope(eqn):
            return jaxprs.bind(eqn, *operands)

    return loop.rewrite(rule)


def _narrow_type(eqn: Eqn) -> Any:
    """Returns the type of 16 bits that one operand of a product has, if the other is float32; or None."""
    if eqn.primitive.name != "dot_general":
        return None
    dtypes = {atom.aval.dtype for atom in eqn.invars}
    narrow = dtypes - {jnp.dtype(jnp.float32)}
    if len(dtypes) != 2 or len(narrow) != 1:
        return None
    (dtype,) = narrow
    return dtype if dtype in (jnp.bfloat16, jnp.float16) else None


def _is_rounded_to(
    dtype: Any, eqn: Eqn, readers: Mapping[Var, Sequence[Eqn]], outputs: set[Var]
) -> bool:
    """Returns True if all that reads the result of an equation is its conversion to a type, perhaps of a view of it."""
    while True:
        (result,) = eqn.outvars
        reading = readers.get(result, ())
        if len(reading) != 1 or result in outputs:
            return False
        (eqn,) = reading
        if eqn.primitive.name == "convert_element_type":
            return bool(eqn.params["new_dtype"] == dtype)
        if not primitives.is_whole_view(eqn):
            return False
