"""Values that do not depend on S, next to values that do: sums of products of smaller values, where they are ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var
from jrnn.loops.affine.renaming import constant, long_axes, long_pairs, unviewed, varying_axes
from jrnn.loops.affine.terms import Axes, Factor, Labels, Term, Value

SUMS = ("add", "add_any", "sub")


class Known(Axes):
    """Reads known values as terms.

    Attributes:
        constants: the values of variables that are known now.
    """

    def __init__(self, states: tuple[Var, ...], eqns: Sequence[Eqn], constants: dict[Var, Any]):
        super().__init__(states)
        self.constants = constants
        self._made = jaxprs.producers(eqns)
        self._varying: dict[Var, set[int]] = {}
        for eqn in eqns:
            self._varying.update(zip(eqn.outvars, varying_axes(eqn, self._axes_of)))

    def _labels_next_to(self, value: Value, atom: Atom) -> Labels:
        """Labels for a known operand next to a value: the value's, and fresh ones where the value is constant."""
        if not atom.aval.shape:
            return ()
        labels = []
        for axis, (label, n) in enumerate(zip(value.labels, atom.aval.shape)):
            varies = n != 1 and axis in self._axes_of(atom)
            labels.append(None if not varies else self.find(label) if label is not None else self._fresh(n))
        return tuple(labels)

    def _axes_of(self, atom: Atom) -> set[int]:
        return set() if jaxprs.is_literal(atom) else self._varying.get(atom, long_axes(atom))

    def _known(self, atom: Atom, other: Value, ndim: int) -> Value:
        """The form of a known summand."""
        labels = self._labels_next_to(other, atom)
        terms = self._terms(atom, labels)
        used = {l for t in terms for f in t.factors for l in f.labels}
        return Value(tuple(l if l in used else None for l in labels) or (None,) * ndim, tuple(terms))

    def _terms(self, atom: Atom, labels: Labels) -> list[Term]:
        """Returns a known value as a sum of products of smaller values, if it is one; otherwise as one factor."""
        labels = self._where_varying(atom, labels)
        mine = {l for l in labels if l is not None}
        value = None if mine else constant(atom, self._made, self.constants)
        if value is not None and not value.any():
            return []
        if len(mine) < 2:
            return [Term(None, (Factor(atom, labels),))]
        if len(mine) == 2 and self._is_identity(atom, labels):
            return [Term(None, (Factor(atom, labels, "eye"),))]
        parts = self._parts(self._made.get(atom), labels)
        smaller = parts is not None and all(
            f.how == "eye" or {*f.labels} - {None} < mine for t in parts for f in t.factors
        )
        return parts if parts is not None and smaller else [Term(None, (Factor(atom, labels),))]

    def _parts(self, eqn: Eqn, labels: Labels) -> list[Term] | None:
        if eqn is None:
            return None
        name, ins = eqn.primitive.name, eqn.invars
        inner = unviewed(eqn, labels)
        if inner is not None:
            return self._terms(ins[0], inner)

        def operand(atom: Atom, sign: int = 1) -> list[Term]:
            return [t.times((), sign) for t in self._terms(atom, labels)]

        if name == "neg":
            return operand(ins[0], -1)
        if name in SUMS:
            return operand(ins[0]) + operand(ins[1], -1 if name == "sub" else 1)
        if name == "mul":
            return [a.times(b.factors, b.sign) for a in operand(ins[0]) for b in operand(ins[1])]
        if name == "div":
            below = Factor(ins[1], self._where_varying(ins[1], labels), "inverse")
            return [a.times([below]) for a in operand(ins[0])]
        if name == "select_n" and len(ins) == 3:
            mask = self._where_varying(ins[0], labels)
            parts = [self._is_identity(ins[0], mask) and ("unless", "eye"), ("unless", "where")]
            hows = parts[0] or parts[1]
            return [t.times([Factor(ins[0], mask, how)]) for a, how in zip(ins[1:], hows) for t in operand(a)]
        if name == "dot_general":
            return self._known_product(eqn, labels)
        return None

    def _known_product(self, eqn: Eqn, labels: Labels) -> list[Term] | None:
        """Returns a product of known values as a sum of products; None if it is one only as a whole."""
        (contracted, batches), sides, long = eqn.params["dimension_numbers"], [], long_pairs(eqn)
        if len(long) > 1:
            return None
        over = self._fresh(eqn.invars[0].aval.shape[long[0][0]]) if long else None
        at = len(batches[0])
        for side, (atom, batch) in enumerate(zip(eqn.invars, batches)):
            mine: list[int | None] = [None] * atom.aval.ndim
            for i, axis in enumerate(batch):
                mine[axis] = labels[i]
            for axis in (d for d in range(atom.aval.ndim) if d not in batch and d not in contracted[side]):
                mine[axis], at = labels[at], at + 1
            if long:
                mine[long[0][side]] = over
            sides.append(self._terms(atom, tuple(mine)))
        products = [a.times(b.factors, b.sign) for a in sides[0] for b in sides[1]]
        if over is None:
            return products
        terms: list[Term] = []
        for term in products:
            inside = tuple(f for f in term.factors if over in self.labels_of(f))
            same = next((f for f in inside if f.how == "eye"), None)
            left = dict.fromkeys(l for f in inside for l in self.resolved(f.labels) if l not in (None, over))
            rest = tuple(f for f in term.factors if f not in inside)
            if same is not None:
                (other,) = self.labels_of(same) - {over}
                kept = replace(term, factors=tuple(f for f in term.factors if f is not same))
                terms.append(self._term_with(kept, over, other=other))
            elif inside and len(left) < 2:
                terms.append(replace(term, factors=(*rest, Factor(inside, tuple(left)))))
            elif inside and self._is_few(over):
                terms += [self._term_with(term, over, index=i) for i in range(self.size[over])]
            else:
                return None
        return terms

    def _where_varying(self, atom: Atom, labels: Labels) -> Labels:
        labels = labels if atom.aval.shape else ()
        return tuple(l if axis in self._axes_of(atom) else None for axis, l in enumerate(labels))

    def _is_identity(self, atom: Atom, labels: Labels) -> bool:
        """Returns True for an identity matrix along the two labeled axes."""
        axes = [axis for axis, l in enumerate(labels) if l is not None]
        if len(axes) != 2 or len({atom.aval.shape[a] for a in axes}) > 1:
            return False
        value = constant(atom, self._made, self.constants)
        if value is None:
            return False
        matrix = value[tuple(slice(None) if a in axes else 0 for a in range(value.ndim))]
        return bool(np.array_equal(matrix, np.eye(len(matrix))))
