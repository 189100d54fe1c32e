"""A step over smaller arrays, for checks on small random numbers (`derived.py`).

Axes of one meaning have one size. Axes that operations compare with numbers, such as the axes of slices, keep theirs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Program, primitives

Axis = tuple[Any, int]  # a variable, and the position of an axis

_CASTS = ("pcast", "pvary")  # of types inside `jax.shard_map`; the numbers are those of one device
SMALL = 12  # larger axes have 9 to 12 elements; some forms depend on whether an axis has up to 8


class _Classes:
    """Axes that have the same size, by union and find; `fixed` are those that keep their size."""

    def __init__(self) -> None:
        self._above: dict[Axis, Axis] = {}
        self.fixed: set[Axis] = set()

    def root(self, axis: Axis) -> Axis:
        while axis in self._above:
            axis = self._above[axis]
        return axis

    def join(self, a: Axis, b: Axis) -> None:
        a, b = self.root(a), self.root(b)
        if a != b:
            self._above[a] = b
            if a in self.fixed:
                self.fixed.add(b)

    def fix(self, axis: Axis) -> None:
        self.fixed.add(self.root(axis))


def resized(program: Program, alike: Sequence[tuple[Atom, Atom]] = ()) -> tuple[Callable[..., list[Any]], list[Any]]:
    """Returns the program as a function of smaller arguments, and their types.

    Args:
        program: the program.
        alike: pairs of values of one type, such as a carry and its new value.
    """
    classes = _Classes()
    for a, b in alike:
        for d in range(a.aval.ndim):
            _join(classes, a, d, b, d)
    for eqn in program.eqns:
        _RULES.get(eqn.primitive.name, _fix_all)(eqn, classes)
    for v in program.constvars:
        _fix(classes, v)
    every = (*program.invars, *(v for eqn in program.eqns for v in eqn.outvars))
    roots = dict.fromkeys(classes.root((v, d)) for v in every for d in range(v.aval.ndim))
    number = itertools.count()
    size: dict[Axis, int] = {}
    for root in roots:
        n = root[0].aval.shape[root[1]]
        keeps = root in classes.fixed or not jaxprs.is_known(n) or n <= SMALL
        size[root] = n if keeps else SMALL - next(number) % 4

    def shape(atom: Atom) -> tuple[int, ...]:
        if jaxprs.is_literal(atom):
            return atom.aval.shape
        return tuple(size[classes.root((atom, d))] for d in range(atom.aval.ndim))

    def run(*args: Any) -> list[Any]:
        env = dict(zip(program.constvars, program.consts)) | dict(zip(program.invars, args))
        for eqn in program.eqns:
            if eqn.primitive.name in _CASTS:
                env[eqn.outvars[0]] = jaxprs.value(env, eqn.invars[0])
                continue
            changed = _PARAMS.get(eqn.primitive.name, lambda eqn, shape: {})(eqn, shape)
            with jaxprs.in_scope(eqn):
                results = jaxprs.bind(eqn, *(jaxprs.read(env, a) for a in eqn.invars), **changed)
            env.update(zip(eqn.outvars, results))
        return [jaxprs.value(env, a) for a in program.outvars]

    return run, [jax.ShapeDtypeStruct(shape(v), v.aval.dtype) for v in program.invars]


# Which axes have one size -----------------------------------------------------------------------------------------------


def _fix(classes: _Classes, atom: Atom, axes: Sequence[int] | None = None) -> None:
    if not jaxprs.is_literal(atom):
        for d in range(atom.aval.ndim) if axes is None else axes:
            classes.fix((atom, d))


def _fix_all(eqn: Eqn, classes: _Classes) -> None:
    for atom in (*eqn.invars, *eqn.outvars):
        _fix(classes, atom)


def _join(classes: _Classes, a: Atom, i: int, b: Atom, j: int) -> None:
    if jaxprs.is_literal(a) or jaxprs.is_literal(b):
        _fix(classes, a, [i])
        _fix(classes, b, [j])
    elif a.aval.shape[i] == b.aval.shape[j]:
        classes.join((a, i), (b, j))
    else:  # one of them is repeated along the axis, and keeps its size, 1
        classes.fix((a, i) if a.aval.shape[i] == 1 else (b, j))


def _elementwise(eqn: Eqn, classes: _Classes) -> None:
    for out, atom in itertools.product(eqn.outvars, eqn.invars):
        if atom.aval.ndim == out.aval.ndim:
            for d in range(out.aval.ndim):
                _join(classes, atom, d, out, d)
        elif atom.aval.ndim:
            _fix_all(eqn, classes)


def _broadcast(eqn: Eqn, classes: _Classes) -> None:
    (atom, *others), (out,) = eqn.invars, eqn.outvars
    for d, to in enumerate(eqn.params["broadcast_dimensions"]):
        if atom.aval.shape[d] == out.aval.shape[to]:
            _join(classes, atom, d, out, to)
        else:
            _fix(classes, atom, [d])
    if others:
        _fix_all(eqn, classes)


def _kept(removed: Callable[[Eqn], Sequence[int]]) -> Callable[[Eqn, _Classes], None]:
    """The rule of operations that remove axes."""

    def rule(eqn: Eqn, classes: _Classes) -> None:
        (atom,), (out,) = eqn.invars, eqn.outvars
        for to, d in enumerate(d for d in range(atom.aval.ndim) if d not in removed(eqn)):
            _join(classes, atom, d, out, to)

    return rule


def _transpose(eqn: Eqn, classes: _Classes) -> None:
    for to, d in enumerate(eqn.params["permutation"]):
        _join(classes, eqn.invars[0], d, eqn.outvars[0], to)


def _reshape(eqn: Eqn, classes: _Classes) -> None:
    """Joins the axes of a reshape that only adds or removes axes of size 1 there; axes that are merged or split stay."""
    (atom, *others), (out,) = eqn.invars, eqn.outvars
    starts = {(math.prod(out.aval.shape[:j]), n): j for j, n in enumerate(out.aval.shape) if n != 1}
    if others or eqn.params.get("dimensions") is not None:
        _fix_all(eqn, classes)
        return
    joined = set()
    for i, n in enumerate(atom.aval.shape):
        j = starts.get((math.prod(atom.aval.shape[:i]), n)) if n != 1 else None
        if j is not None:
            joined.add(j)
            _join(classes, atom, i, out, j)
        else:
            _fix(classes, atom, [i])
    _fix(classes, out, [j for j in range(out.aval.ndim) if j not in joined])


def _product(eqn: Eqn, classes: _Classes) -> None:
    (a, b), (out,) = eqn.invars, eqn.outvars
    (contracted, batch), at = eqn.params["dimension_numbers"], 0
    for i, j in (*zip(*contracted), *zip(*batch)):
        _join(classes, a, i, b, j)
    for d in batch[0]:
        _join(classes, a, d, out, at)
        at += 1
    for side, atom in enumerate((a, b)):
        for d in (d for d in range(atom.aval.ndim) if d not in contracted[side] and d not in batch[side]):
            _join(classes, atom, d, out, at)
            at += 1


def _along_others(axes: Callable[[Eqn], Sequence[int]]) -> Callable[[Eqn, _Classes], None]:
    """The rule of operations that keep all axes, and count elements along some of them."""

    def rule(eqn: Eqn, classes: _Classes) -> None:
        for atom in eqn.invars:
            for out in eqn.outvars:
                for d in (d for d in range(out.aval.ndim) if d not in axes(eqn)):
                    _join(classes, atom, d, out, d)
        for atom in (*eqn.invars, *eqn.outvars):
            _fix(classes, atom, axes(eqn))

    return rule


def _cut(eqn: Eqn) -> list[int]:
    whole, part = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return [d for d, (n, m) in enumerate(zip(whole, part)) if n != m]


def _sliced(eqn: Eqn, shape: Callable[[Atom], Any]) -> dict[str, Any]:
    starts, sizes = eqn.params["start_indices"], shape(eqn.outvars[0])
    strides = eqn.params["strides"] or (1,) * len(starts)
    return {"limit_indices": tuple(a + (n - 1) * by + 1 for a, n, by in zip(starts, sizes, strides))}


def _nothing(eqn: Eqn, classes: _Classes) -> None:
    pass


_RULES: dict[str, Callable[[Eqn, _Classes], None]] = {
    **dict.fromkeys((*primitives.ELEMENTWISE, *_CASTS, "stop_gradient", "optimization_barrier"), _elementwise),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), _kept(lambda eqn: eqn.params["axes"])),
    "squeeze": _kept(lambda eqn: eqn.params["dimensions"]),
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "dot_general": _product,
    "iota": _nothing,
    "split": _along_others(lambda eqn: [eqn.params["axis"]]),
    "concatenate": _along_others(lambda eqn: [eqn.params["dimension"]]),
    "slice": _along_others(_cut),
    "rev": _along_others(lambda eqn: ()),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), _along_others(lambda eqn: ())),
}
_PARAMS: dict[str, Callable[[Eqn, Callable[[Atom], Any]], dict[str, Any]]] = {
    "broadcast_in_dim": lambda eqn, shape: {"shape": shape(eqn.outvars[0])},
    "reshape": lambda eqn, shape: {"new_sizes": shape(eqn.outvars[0])},
    "iota": lambda eqn, shape: {"shape": shape(eqn.outvars[0])},
    "slice": _sliced,
}
