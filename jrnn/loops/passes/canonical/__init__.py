"""The canonical form of a loop: the first stage of every plan, so that all that follows sees one spelling of a step.

In: any `Loop`. Out: the canonical `Loop`, and conversions of arguments and results. Read `axis_order.py` first.

Its stages are passes from a loop to a loop, each with a conversion of what goes in and out (`nodes.Conversion`):

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

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import AxisType, NamedSharding

from jrnn import jaxprs
from jrnn.jaxprs import Var, primitives
from jrnn.loops.ir import Loop
from jrnn.loops.passes.branches import products_after_branches
from jrnn.loops.passes.canonical.axis_order import normalize_axes
from jrnn.loops.passes.canonical.constant_carries import eliminate_carries
from jrnn.loops.passes.canonical.invariants import hoist_invariants
from jrnn.loops.passes.canonical.lookups import hoist_lookups
from jrnn.loops.passes.canonical.random_keys import hoist_random_keys
from jrnn.loops.passes.canonical.shared_operands import join_products
from jrnn.loops.passes.canonical.unpack import unpack_carries
from jrnn.loops.passes.simplify import common_subexpressions, compose_views, pads_to_concatenate

_PASSES = (
    products_after_branches,
    compose_views,
    common_subexpressions,
    pads_to_concatenate,
    join_products,
)


def canonical(loop: Loop, devices: int = 1, hoist_keys: bool = False) -> tuple[Loop, Sequence[Any]]:
    """Returns the canonical form of a loop, and the conversions to it, that of the first stage first.

    Args:
        loop: the loop.
        devices: the number of devices that its arrays are divided among. If there are several, no axes are merged, one of
            which may be divided.
        hoist_keys: True to compute the keys that it carries in a loop of their own.
    """
    keys = (hoist_random_keys,) if hoist_keys else ()
    axes = functools.partial(normalize_axes, merge=devices == 1)
    return _in_stages(loop, eliminate_carries, *keys, unpack_carries, axes)


def with_plain_carries(loop: Loop) -> tuple[Loop, Sequence[Any]]:
    """Returns a loop without the last stage of the canonical form: values keep their axes."""
    return _in_stages(loop, eliminate_carries, unpack_carries)


def for_derivatives(loop: Loop, moving: Iterable[Var]) -> tuple[Loop, Sequence[Any]]:
    """Returns a loop whose derivative is cheaper, and the conversions to it; none if it stays as it is.

    Args:
        loop: a loop that is about to be differentiated.
        moving: those of its inputs that have tangents.
    """
    form, of_carries = eliminate_carries(loop)
    form, of_lookups = hoist_lookups(form, {*moving}.intersection(form.consts))
    form, of_constants = hoist_invariants(join_products(form))
    if of_lookups is None and of_constants is None:
        return loop, ()
    return form, [c for c in (of_carries, of_lookups, of_constants) if c is not None]


def _unplaced(loop: Loop) -> Loop:
    """Returns a loop whose equations do not repeat that a mesh without explicit axes places their results.

    Only primitives of the table lose the parameter. To others, such as `sharding_constraint`, it is what they do.
    """

    def says_nothing(value: Any) -> bool:
        return isinstance(value, NamedSharding) and {*value.mesh.axis_types} <= {
            AxisType.Auto,
            AxisType.Manual,
        }

    def unplaced(eqn: Any) -> Any:
        if not primitives.is_known(eqn):
            return eqn
        cleared = {
            name: None
            for name in ("sharding", "out_sharding")
            if says_nothing(eqn.params.get(name))
        }
        return eqn.replace(params={**eqn.params, **cleared}) if cleared else eqn

    return replace(loop, eqns=tuple(map(unplaced, loop.eqns)))


def _in_stages(
    loop: Loop, *stages: Callable[[Loop], tuple[Loop, Any]]
) -> tuple[Loop, Sequence[Any]]:
    for rewrite in (_unplaced, *_PASSES):
        loop = rewrite(loop)
    if any(jaxprs.is_literal(a) and np.ndim(a.val) for eqn in loop.eqns for a in eqn.invars):
        return loop, ()  # arrays in a step would become constants when it is traced
    form = loop
    conversions = []
    for stage in stages:
        form, conversion = stage(form)
        if conversion is not None:
            conversions.append(conversion)
    return (loop if form is loop else compose_views(form)), conversions
