"""A step over smaller arrays, for checks on small random numbers (`derived.py`).

Axes of one meaning have one size. Axes that operations compare with numbers, such as the axes of slices, keep theirs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Program, axes

SMALL = 12  # larger axes have 9 to 12 elements; some forms depend on whether an axis has up to 8


def resized(
    program: Program, alike: Sequence[tuple[Atom, Atom]] = ()
) -> tuple[Callable[..., list[Any]], list[Any]]:
    """Returns the program as a function of smaller arguments, and their types.

    Args:
        program: the program.
        alike: pairs of values of one type, such as a carry and its new value.
    """
    classes = axes.Classes()
    for a, b in alike:
        for d in range(a.aval.ndim):
            classes.join(a, d, b, d)
    for eqn in program.eqns:
        _classify(eqn, classes)
    for v in program.constvars:
        classes.fix(v, range(v.aval.ndim))
    every = (*program.invars, *jaxprs.results(program.eqns))
    roots = dict.fromkeys(classes.root((v, d)) for v in every for d in range(v.aval.ndim))
    number = itertools.count()
    size: dict[axes.Axis, int] = {}
    for root in roots:
        n = root[0].aval.shape[root[1]]
        keeps = root in classes.fixed or not jaxprs.is_known(n) or n <= SMALL
        size[root] = n if keeps else SMALL - next(number) % 4

    def shape(atom: Atom) -> tuple[int, ...]:
        if jaxprs.is_literal(atom):
            return atom.aval.shape
        return tuple(size[classes.root((atom, d))] for d in range(atom.aval.ndim))

    def rule(eqn: Eqn, *operands: Any) -> Sequence[Any] | None:
        params = _PARAMS.get(eqn.primitive.name)
        return (
            jaxprs.bind(eqn, *operands, **params(eqn, shape))
            if params
            else jaxprs.uncast(eqn, *operands)
        )

    avals = [jax.ShapeDtypeStruct(shape(v), v.aval.dtype) for v in program.invars]
    return functools.partial(program.run, rule=rule), avals


# Which axes have one size -----------------------------------------------------------------------------------------------


def _classify(eqn: Eqn, classes: axes.Classes) -> None:
    """Joins the axes that an equation needs to have one size, and fixes those that it compares with numbers."""
    followed = axes.join_followed(eqn, classes, axes.of_one_size, ("broadcast_in_dim", "iota"))
    if followed and eqn.primitive.name == "dot_general":
        a, b = eqn.invars
        contracted, batch = eqn.params["dimension_numbers"]
        for i, j in (*zip(*contracted), *zip(*batch)):
            classes.join(a, i, b, j)


def _sliced(eqn: Eqn, shape: Callable[[Atom], Any]) -> dict[str, Any]:
    starts = eqn.params["start_indices"]
    sizes = shape(eqn.outvars[0])
    strides = eqn.params["strides"] or (1,) * len(starts)
    return {
        "limit_indices": tuple(a + (n - 1) * by + 1 for a, n, by in zip(starts, sizes, strides))
    }


_PARAMS: dict[str, Callable[[Eqn, Callable[[Atom], Any]], dict[str, Any]]] = {
    "broadcast_in_dim": lambda eqn, shape: {"shape": shape(eqn.outvars[0])},
    "reshape": lambda eqn, shape: {"new_sizes": shape(eqn.outvars[0])},
    "iota": lambda eqn, shape: {"shape": shape(eqn.outvars[0])},
    "slice": _sliced,
}
