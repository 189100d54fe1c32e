"""What is known of primitives: which may move out of a loop, which are worth moving, linear, or cheap to repeat.

In: an equation. Out: what is known of its primitive. Read `table.py` first.

`table` has one row for each primitive, and this file the questions that passes, costs and evaluators ask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import work
from jrnn.jaxprs.primitives import numpy_rules
from jrnn.jaxprs.primitives.row import Evaluate, Kind
from jrnn.jaxprs.primitives.row import Row as Row
from jrnn.jaxprs.primitives.row import row as row
from jrnn.jaxprs.primitives.table import TABLE, UNKNOWN

T = TypeVar("T")
Rule = Callable[..., Any]


def named(name: str) -> Row:
    return TABLE.get(name, UNKNOWN)


def row_of(eqn: jaxprs.Eqn) -> Row:
    """Returns what is known of the primitive of an equation. All passes ask, so that this is where their work is counted."""
    work.count()
    return TABLE.get(eqn.primitive.name, UNKNOWN)


def rule_of(eqn: jaxprs.Eqn, rules: Mapping[str, T]) -> T | None:
    """Returns the rule for the primitive of an equation, or else that for its kind, or None."""
    name = eqn.primitive.name
    return rules[name] if name in rules else rules.get(row_of(eqn).kind)


def numpy_rule(eqn: jaxprs.Eqn) -> Evaluate | None:
    """Returns the function by which numpy computes a primitive (`Row.numpy`), or None."""
    name = eqn.primitive.name
    column = named(name).numpy
    return numpy_rules.of_numpy(name, column) if isinstance(column, str) else column


def where(test: Callable[[Row], bool]) -> frozenset[str]:
    """Returns the names of primitives whose rows pass a test."""
    return frozenset(name for name, row in TABLE.items() if test(row))


def with_kind(*kinds: Kind) -> frozenset[str]:
    """Returns the names of primitives of some kinds."""
    return where(lambda row: row.kind in kinds)


def is_kind(eqn: jaxprs.Eqn, *kinds: Kind) -> bool:
    return row_of(eqn).kind in kinds


def is_movable(eqn: jaxprs.Eqn) -> bool:
    """Returns True if an equation may be evaluated for all steps, under `vmap` over time."""
    return row_of(eqn).moves and not eqn.effects and not draws_differently_under_vmap(eqn)


def why_immovable(eqn: jaxprs.Eqn) -> str:
    """Returns the reason why an equation is not movable."""
    if eqn.effects:
        return "it has side effects"
    if draws_differently_under_vmap(eqn):
        return "only threefry keys draw the same numbers under vmap"
    if any(True for _ in jaxprs.sub_jaxprs(eqn)):
        return "it is control flow"
    return "a collective" if is_kind(eqn, "collective") else "jrnn does not know this primitive"


def is_known(eqn: jaxprs.Eqn) -> bool:
    row = row_of(eqn)
    return row.moves or row.kind == "collective"


def draws_differently_under_vmap(eqn: jaxprs.Eqn) -> bool:
    """Returns True if `vmap` changes the random numbers: for all keys except JAX's default, threefry's."""
    extended = [
        a.aval.dtype for a in eqn.invars if not isinstance(a.aval.dtype, jnp.dtype)
    ]  # others have no keys
    return any(
        jnp.issubdtype(dtype, jax.dtypes.prng_key) and dtype.name != "key<fry>"
        for dtype in extended
    )


def is_heavy(eqn: jaxprs.Eqn) -> bool:
    """Returns True for products, lookups, solvers and draws. A split names the ones that leave a loop, and repeats none."""
    return row_of(eqn).heavy


def is_contraction(eqn: jaxprs.Eqn) -> bool:
    return is_kind(eqn, "product")


def is_cheap(eqn: jaxprs.Eqn) -> bool:
    return row_of(eqn).cheap


def is_library_call(eqn: jaxprs.Eqn) -> bool:
    """Returns True for primitives that XLA passes to a library or to other devices."""
    kinds: tuple[Kind, ...] = ("collective", "library", "order", "product", "solver", "transform")
    return is_kind(eqn, *kinds) and row_of(eqn).cost != 0.0


def is_activation(eqn: jaxprs.Eqn) -> bool:
    """Returns True for functions that are worth computing for several slices at once."""
    return row_of(eqn).activation


def is_addition(eqn: jaxprs.Eqn) -> bool:
    return eqn.primitive.name in ("add", "add_any")


def is_copy(eqn: jaxprs.Eqn) -> bool:
    """Returns True if the result is the operand, and so is its derivative."""
    row = row_of(eqn)
    return row.copies and not row.stops and row.kind == "elementwise"


_WITH_TANGENTS = (
    with_kind("elementwise", "view", "product", "solver")
    | where(lambda row: row.linear != "" or row.picks)
) - where(lambda row: row.stops or row.jumps)


def keeps_tangents(eqn: jaxprs.Eqn) -> bool:
    """Returns True if the inexact results of an equation have tangents wherever one of its inexact operands has some."""
    return eqn.primitive.name in _WITH_TANGENTS


def is_sum(eqn: jaxprs.Eqn) -> bool:
    """Returns True for sums, differences and copies: linear in all operands, with derivatives of 1 and -1."""
    row = row_of(eqn)
    return adds(row) and not row.stops


def adds(row: Row) -> bool:
    """Returns True for primitives whose result is a sum of operands, or of their negatives."""
    return row.kind == "elementwise" and row.linear == "jointly" and not row.positions


def is_affine(eqn: jaxprs.Eqn, moves: Sequence[bool]) -> bool:
    """Returns True if each element of an elementwise result is affine in the elements of some operands.

    Args:
        eqn: the equation.
        moves: for each operand, whether it is one of these. The others are factors, divisors, conditions and addends.
    """
    name = eqn.primitive.name
    if name == "mul":
        return not all(moves)
    if name == "div":
        return not moves[1]
    if name == "select_n":
        return not moves[0]
    return is_sum(eqn) or is_retyping(eqn)


def is_discontinuous(eqn: jaxprs.Eqn) -> bool:
    """Returns True if the result jumps where a floating-point operand changes by a rounding error."""
    to_integers = eqn.primitive.name == "convert_element_type" and not _is_inexact(eqn.outvars[0])
    return (row_of(eqn).jumps or to_integers) and any(map(_is_inexact, eqn.invars))


def _is_inexact(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def is_view(eqn: jaxprs.Eqn) -> bool:
    return is_kind(eqn, "view")


def is_whole_view(eqn: jaxprs.Eqn) -> bool:
    """Returns True for a view of all elements."""
    row = row_of(eqn)
    return row.kind == "view" and not row.cuts


def is_renaming(eqn: jaxprs.Eqn) -> bool:
    """Returns True if the result is the array of the operand, in another shape or with another meaning."""
    row = row_of(eqn)
    if row.reshapes:
        return jaxprs.elements(eqn.invars[0].aval.shape) == jaxprs.elements(
            eqn.outvars[0].aval.shape
        )
    return row.copies and row.kind == "elementwise"


def is_retyping(eqn: jaxprs.Eqn) -> bool:
    """Returns True for a conversion that changes only whether a type is weak."""
    same = all(a.aval.dtype == eqn.outvars[0].aval.dtype for a in eqn.invars)
    return eqn.primitive.name == "convert_element_type" and same


def is_linear(eqn: jaxprs.Eqn) -> bool:
    """Returns True if an equation is linear in its only operand. Floating-point conversions count as linear."""
    if eqn.primitive.name == "convert_element_type":
        return _is_inexact(eqn.invars[0]) and _is_inexact(eqn.outvars[0])
    row = row_of(eqn)
    return row.linear == "jointly" and row.moves and len(eqn.invars) == 1


def registering(table: dict[str, Rule]) -> Callable[..., Callable[[Rule], Rule]]:
    """Returns the decorator `@rule(*names)`, which enters a function into `table` under each of the names."""

    def rule(*names: str) -> Callable[[Rule], Rule]:
        def register(function: Rule) -> Rule:
            for name in names:
                assert name not in table, f"{name} is registered twice"
                table[name] = function
            return function

        return register

    return rule
