"""The canonical form of a loop, so that all that follows sees one spelling of a step.

In: any `Loop`. Out: an equal one, and for passes that change carries or inputs an adapter, which runs the new loop on the
old one's arguments. Read `constant_carries.py` first.

`compile.py` and `differentiate.py` say which passes run, and when.

- `constant_carries.py`: carries whose value is known become constants and inputs.
- `random_keys.py`: keys of random numbers leave the carry, in loops with large products.
- `unpack.py`: a carry that packs several arrays becomes one carry for each.
- `shared_operands.py`: products of one value with several constant matrices become one.
- `lookups.py`, `invariants.py`: lookups of constants become inputs, and what is computed from constants becomes constant, in
  a loop that is about to be differentiated.
- `axis_order.py`: axes of size 1 leave the loop, and rows come first. `rows.py` finds the batch rows, and `rules.py`
  evaluates equations on values in the layouts of `layouts.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jax.sharding import AxisType, NamedSharding

from jrnn import jaxprs
from jrnn.jaxprs import primitives
from jrnn.loops.ir import Loop
from jrnn.loops.passes.branches import products_after_branches
from jrnn.loops.passes.canonical.shared_operands import join_products
from jrnn.loops.passes.simplify import common_subexpressions, compose_views, pads_to_concatenate


def unplaced(loop: Loop) -> Loop:
    """Returns a loop whose equations do not repeat that a mesh without explicit axes places their results.

    Only primitives of the table lose the parameter. To others, such as `sharding_constraint`, it is what they do.
    """

    eqns = []
    for eqn in loop.eqns:
        params = eqn.params
        for name in ("sharding", "out_sharding"):
            if _says_nothing(params.get(name)) and primitives.is_known(eqn):
                params = {**params, name: None}
        eqns.append(eqn if params is eqn.params else eqn.replace(params=params))
    return replace(loop, eqns=tuple(eqns))


def _says_nothing(sharding: object) -> bool:
    """Whether a value is a sharding over axes that are not explicit."""
    if not isinstance(sharding, NamedSharding):
        return False
    return AxisType.Explicit not in sharding.mesh.axis_types


def reads_array_literals(loop: Loop) -> bool:
    """Returns True for a step with arrays as literals, which would become constants when it is traced again."""
    for eqn in loop.eqns:
        for a in eqn.invars:
            if jaxprs.is_literal(a) and np.ndim(a.val):
                return True
    return False


# The passes that keep carries and inputs as they are, in their order. Each is `loop -> loop`, exact, and pays everywhere.
SIMPLIFICATIONS = (
    unplaced,
    products_after_branches,
    compose_views,
    common_subexpressions,
    pads_to_concatenate,
    join_products,
)
