"""One jaxpr for equal jaxprs, so that layers of one shape have one plan and one derivative.

JAX compares jaxprs by identity, and so do caches whose keys hold them. Each trace makes a new jaxpr: the second layer
of a stack differs from the first one only by the names of its variables. `interned` returns the first of
jaxprs that are equal in all that JAX lowers and differentiates, and in all that messages show of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from jrnn.jaxprs.jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    argument_names,
    cached,
    context_of,
    function_name,
    scan_p,
    source_line,
    tracing_options,
)
from jrnn.jaxprs.programs import TAG, is_literal, jaxpr_of


@cached(512)
def interned(jaxpr: Any) -> Any:
    """Returns the first jaxpr, closed or not, that equals this one, which may be itself.

    One with constants, whose values are arrays, or with side effects is its own. So is one with a parameter that cannot be
    compared, such as a function.

    >>> import jax
    >>> first, second = (jax.make_jaxpr(lambda x: 2 * x)(1.0) for _ in range(2))
    >>> first is second, interned(first) is interned(second)
    (False, True)
    """
    if getattr(jaxpr, "consts", ()) or jaxpr.effects:
        return jaxpr
    try:
        equals = equals_of((type(jaxpr), _structure(jaxpr_of(jaxpr)), tracing_options()))
    except (TypeError, ValueError):  # not hashable, or sizes of different exported programs
        return jaxpr
    if not equals:
        equals.append(jaxpr)
    return equals[0]


@cached(512)
def equals_of(key: Hashable) -> list[Any]:
    """Returns a list for the first jaxpr with this key."""
    return []


def _structure(jaxpr: Jaxpr) -> Hashable:
    """Returns a key of a jaxpr, in which its variables are numbers. Raises TypeError if it has no hashable key."""
    numbers: dict[Any, int] = {}

    def defined(variables: Any) -> Hashable:
        types = []
        for v in variables:
            numbers[v] = len(numbers)
            types.append(v.aval)
        return tuple(types)

    def read(atom: Any) -> Hashable:
        return _value((atom.aval, atom.val)) if is_literal(atom) else numbers[atom]

    inputs = defined((*jaxpr.constvars, *jaxpr.invars))
    eqns = []
    for eqn in jaxpr.eqns:
        operands = tuple(map(read, eqn.invars))
        # Only a loop's own tag counts: other equations have the tag of the loop around them.
        context = context_of(eqn, None if eqn.primitive is scan_p else TAG)
        where = (context, str(eqn.source_info.name_stack), source_line(eqn))
        eqns.append((eqn.primitive, _value(eqn.params), operands, defined(eqn.outvars), where))
    names = (tuple(argument_names(jaxpr)), function_name(jaxpr))
    return inputs, tuple(eqns), tuple(map(read, jaxpr.outvars)), names


def _value(value: Any) -> Hashable:
    """Returns a key of a parameter or a literal, which tells 1 from 1.0 and 0.0 from -0.0."""
    if isinstance(value, (ClosedJaxpr, Jaxpr)):
        return interned(value)  # compared by identity, so that a shared jaxpr is read once
    if isinstance(value, dict):
        return tuple((name, _value(value[name])) for name in sorted(value))
    if isinstance(value, (tuple, list)):
        return type(value), *map(_value, value)
    if isinstance(value, (float, complex, np.ndarray, np.generic)):
        array = np.asarray(value)
        return type(value), array.dtype, array.shape, array.tobytes()
    hash(value)
    return type(value), value
