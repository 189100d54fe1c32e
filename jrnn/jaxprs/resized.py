"""A step over smaller arrays, for checks on small random numbers (`derived.py`).

Axes of one meaning have one size. Axes that operations compare with numbers, such as the axes of slices, keep theirs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Program, axes, primitives

SMALL = 12  # larger axes have 9 to 12 elements; some forms depend on whether an axis has up to 8


def resized(
    program: Program, alike: Sequence[tuple[Atom, Atom]] = ()
) -> tuple[Callable[..., list[Array]], list[jax.ShapeDtypeStruct]]:
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
    size = _sizes(program, classes)

    def shape(atom: Atom) -> tuple[int, ...]:
        if jaxprs.is_literal(atom):
            return atom.aval.shape
        return tuple(size[classes.root((atom, d))] for d in range(atom.aval.ndim))

    def rule(eqn: Eqn, *operands: Array) -> Sequence[Array] | None:
        resize = primitives.named(eqn.primitive.name).resize
        if resize is None:
            return jaxprs.uncast(eqn, *operands)
        return jaxprs.bind(eqn, *operands, **resize(eqn, shape))

    avals = [jax.ShapeDtypeStruct(shape(v), v.aval.dtype) for v in program.invars]
    return functools.partial(program.run, rule=rule), avals


def _sizes(program: Program, classes: axes.Classes) -> dict[axes.Axis, int]:
    """Returns the size of each class of axes. Large sizes differ, so that a check sees which axis is meant."""
    number = itertools.count()
    size: dict[axes.Axis, int] = {}
    for v in (*program.invars, *jaxprs.results(program.eqns)):
        for d in range(v.aval.ndim):
            root = classes.root((v, d))
            if root in size:
                continue
            n = root[0].aval.shape[root[1]]
            keeps = root in classes.fixed or not jaxprs.is_known(n) or n <= SMALL
            size[root] = n if keeps else SMALL - next(number) % 4
    return size


def _classify(eqn: Eqn, classes: axes.Classes) -> None:
    """Joins the axes that an equation needs to have one size, and fixes the axes that it compares with numbers."""
    followed = axes.join_followed(eqn, classes, axes.of_one_size, ("broadcast_in_dim", "iota"))
    if followed and eqn.primitive.name == "dot_general":
        a, b = eqn.invars
        contracted, batch = eqn.params["dimension_numbers"]
        for i, j in (*zip(*contracted), *zip(*batch)):
            classes.join(a, i, b, j)
