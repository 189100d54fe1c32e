"""The rules of equations: reads the forms (`terms.py`) of a step's values off its equations, without evaluating them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var
from jrnn.loops.affine.carries import NotAffine
from jrnn.loops.affine.renaming import SAME, constant, long_axes, long_pairs, unviewed, varying_axes, view
from jrnn.loops.affine.terms import Axes, Factor, Labels, Row, Term, Value

_SUMS = ("add", "add_any", "sub")


class Forms(Axes):
    """The forms of the values of a step that depend on one carry, or on several that read each other.

    Attributes:
        eqns: the step's equations.
        known: the variables that do not depend on carries that are still to be computed.
        constants: the values of variables that are known now.
        values: the form of each variable that has one.
        cuts: the variables where a matrix is contracted to rows.
        products: the contractions of S as (precision or None, whether it was written as a sum).
    """

    def __init__(self, states: tuple[Var, ...], eqns: Sequence[Eqn], known: Collection[Var], constants: dict[Var, Any]):
        super().__init__(states)
        self.eqns, self.known, self.constants = eqns, known, constants
        self._producers = jaxprs.producers(eqns)
        self._varying: dict[Var, set[int]] = {}
        for eqn in eqns:
            self._varying.update(zip(eqn.outvars, varying_axes(eqn, self._axes_of)))
        self.values = {v: Value(self.axes, (Term(v),)) for v in states}
        self.cuts: dict[Var, Any] = {}
        self.products: list[Any] = []

    def walk(self) -> None:
        """Computes the forms of all variables. Where there is none, what follows from rows stays without a form.

        Raises:
            NotAffine: if an operation on a value as large as S has no form.
        """
        later: dict[Var, Any] = {}  # values without a form, with the operation that broke it
        for eqn in self.eqns:
            read = [v for v in jaxprs.inputs(eqn) if v in self.values]
            if not read and not any(v in later for v in jaxprs.inputs(eqn)):
                if not all(v in self.known for v in jaxprs.inputs(eqn)):
                    later.update(dict.fromkeys(eqn.outvars))
                continue
            cause = next((later[v] for v in jaxprs.inputs(eqn) if v in later), None)
            matrix = any(self.is_matrix(self.values[v]) for v in read)
            try:
                if any(v in later or v not in self.known for v in jaxprs.inputs(eqn) if v not in self.values):
                    raise NotAffine("another value that depends on the carry")
                self.values[eqn.outvars[0]] = value = self._rule(eqn)
                if matrix and not self.is_matrix(value):
                    self.cuts[eqn.outvars[0]] = eqn
            except NotAffine as why:
                if matrix and cause is not None:
                    raise NotAffine(f"{cause.primitive.name} of what was read from S", cause) from None
                if matrix:
                    raise NotAffine(f"{eqn.primitive.name} of S" + f": {why}" * bool(str(why)), eqn) from None
                later.update(dict.fromkeys(eqn.outvars, cause or (eqn if read else None)))

    def _rule(self, eqn: Eqn) -> Value:
        name, ins = eqn.primitive.name, eqn.invars
        out = eqn.outvars[0].aval
        forms = [self.values.get(a) if not jaxprs.is_literal(a) else None for a in ins]
        moving = [f is not None for f in forms]
        first = next(f for f in forms if f is not None)
        if len(eqn.outvars) > 1 or any(f.sums for f in forms if f is not None):
            raise NotAffine("")
        if name in SAME or (name == "convert_element_type" and jnp.issubdtype(out.dtype, jnp.floating)):
            return first
        if name == "neg":
            return first.scaled(sign=-1)
        if name in _SUMS:
            sides = [f or self._known(a, first, out.ndim) for a, f in zip(ins, forms)]
            return self.sum(sides[0], sides[1].scaled(sign=-1) if name == "sub" else sides[1])
        if name == "mul" and not all(moving):
            return self._scaled(first, ins[moving.index(False)])
        if name == "div" and not moving[1]:
            return self._scaled(first, ins[1], "inverse")
        if name == "select_n" and not moving[0] and len(ins) == 3:
            sides = [f or self._known(a, first, out.ndim) for a, f in zip(ins[1:], forms[1:])]
            return self.sum(*(self._scaled(side, ins[0], how) for side, how in zip(sides, ("unless", "where"))))
        labels = view(eqn, first.labels)
        if labels is not None:
            return replace(first, labels=labels)
        if name == "slice":
            return self._sliced(eqn, first)
        if name == "reduce_sum":
            return self._summed(eqn, first)
        if name == "dot_general" and not all(moving):
            return self._dot(eqn, first, moving.index(True))
        raise NotAffine("")

    def _sliced(self, eqn: Eqn, value: Value) -> Value:
        """Takes one index of a short axis, as where several vectors read S in one product."""
        whole = eqn.invars[0].aval.shape
        for axis, (n, m) in enumerate(zip(whole, eqn.outvars[0].aval.shape)):
            if n == m or value.labels[axis] is None:
                continue
            if m > 1 or {*(eqn.params["strides"] or (1,))} != {1} or not self._is_few(value.labels[axis]):
                raise NotAffine("")
            value = self._at(value, value.labels[axis], eqn.params["start_indices"][axis])
        return value

    def sum(self, a: Value, b: Value) -> Value:
        labels = tuple(self._unified(x, y) for x, y in zip(a.labels, b.labels))
        return Value(labels, (*a.terms, *b.terms))

    def _scaled(self, value: Value, atom: Atom, how: str = "") -> Value:
        """Multiplies with a known operand, along whose axes the value may have been constant."""
        given = self._labels_next_to(value, atom)
        value = self._named(value, given)
        terms = [] if how else self._terms(atom, given)
        one = len(terms) == 1 and terms[0].sign == 1
        scaled = value.scaled(terms[0].factors if one else [Factor(atom, given, how or "value")])
        labels = given or (None,) * len(value.labels)
        return replace(scaled, labels=tuple(self.find(b) if a is None else a for a, b in zip(value.labels, labels)))

    def _named(self, value: Value, labels: Iterable[int | None]) -> Value:
        """Makes a sum of rows one row, before it is spread over an axis that it does not have, as in an outer product."""
        new = {*self.resolved(labels)} - {None, *self.resolved(value.labels)}
        if not new or self.is_matrix(value) or (len(value.terms) == 1 and not value.terms[0].factors):
            return value
        return replace(value, terms=(Term(self._rows.setdefault(value.terms, Row(value.terms))),))

    # Contractions

    def _contracted(self, value: Value, label: int) -> Value:
        """Sums a value over a label."""
        label = self.find(label)
        matrix = self.is_matrix(value)
        if matrix and self.contracted is None and label in self.axes:
            self.contracted = label
        if not matrix or label != self.contracted:
            raise NotAffine("a sum over a second axis of S" if matrix else "")
        terms = [t if t.of in self.states else self._folded(t) for t in value.terms]
        labels = tuple(l for l in value.labels if self.find(l) != label)
        return Value(labels, (Term(Row(tuple(terms))),))

    def _chosen(self, labels: Sequence[int]) -> int:
        """Returns which of the labels that are summed over is K."""
        return next((l for l in labels if l == self.contracted), labels[-1])

    def _folded(self, term: Term) -> Term:
        """Sums the factors of a term that have K; S is not in it."""
        inside = tuple(f for f in term.factors if self.contracted in self.labels_of(f))
        rest = tuple(f for f in term.factors if f not in inside)
        labels = dict.fromkeys(l for f in inside for l in self.resolved(f.labels) if l not in (None, self.contracted))
        return replace(term, factors=(*rest, Factor(inside, tuple(labels))))

    def _summed(self, eqn: Eqn, value: Value) -> Value:
        axes = eqn.params["axes"]
        for axis in axes:
            if value.labels[axis] is None:
                raise NotAffine("a sum over an axis along which it is constant")
        kept = tuple(l for axis, l in enumerate(value.labels) if axis not in axes)
        over = [self.find(value.labels[axis]) for axis in axes]
        for label in filter(self._is_few, over):
            every = [self._at(value, label, i) for i in range(self.size[label])]
            value = replace(every[0], terms=tuple(t for v in every for t in v.terms))
        long = [l for l in over if not self._is_few(l)]
        if long:
            value = self._contracted(value, k := self._chosen(long))
            value = replace(value, sums=tuple(l for l in long if l != k))
        self.products.append(jax.lax.Precision.HIGHEST)
        return replace(value, labels=kept)

    def _dot(self, eqn: Eqn, value: Value, side: int) -> Value:
        """Contracts a value with a known operand, term by term: an identity in the operand renames an axis."""
        contract, batch = eqn.params["dimension_numbers"]
        other = eqn.invars[1 - side]
        mine, labels = list(value.labels), [None] * other.aval.ndim
        for a, b in zip((*contract[side], *batch[side]), (*contract[1 - side], *batch[1 - side])):
            if mine[a] is None and other.aval.shape[b] != 1:
                if a in contract[side]:
                    raise NotAffine("a contraction over an axis along which it is constant")
                mine[a] = self._fresh(other.aval.shape[b])
            labels[b] = mine[a]
        for axis, n in enumerate(other.aval.shape):
            if axis not in contract[1 - side] and axis not in batch[1 - side] and n != 1:
                labels[axis] = self._fresh(n)
        over = [self.find(value.labels[pair[side]]) for pair in long_pairs(eqn)]
        if len(over) > 1 and not (self.is_matrix(value) and {*over} <= {*self.axes}):
            raise NotAffine("a contraction over several axes")
        sums = tuple(l for l in over if l != self._chosen(over)) if over else ()
        over = [l for l in over if l not in sums]
        value = replace(value, labels=tuple(mine))
        terms, renamed = [], []
        for part in self._terms(other, tuple(labels)):
            same = next((f for f in part.factors if f.how == "eye" and over and over[0] in self.labels_of(f)), None)
            if same is not None:
                rest = [f for f in part.factors if f is not same]
                renamed.append((*(self.labels_of(same) - {over[0]}), rest, part.sign))
            elif over and self._is_few(over[0]):
                for i in range(self.size[over[0]]):
                    here, factors = self._at(value, over[0], i), [self._with(f, over[0], i) for f in part.factors]
                    here = self._named(here, (l for f in factors for l in f.labels))
                    terms += here.scaled(factors, part.sign).terms
            elif over:
                inside = [f for f in part.factors if over[0] in self.labels_of(f)]
                outside = [f for f in part.factors if f not in inside]
                row = self._contracted(value.scaled(inside), over[0])
                terms += row.scaled(outside, part.sign).terms
            else:
                named = self._named(value, (l for f in part.factors for l in f.labels))
                terms += named.scaled(part.factors, part.sign).terms
        sides = (mine, contract[side], batch[side]), (labels, contract[1 - side], batch[1 - side])
        free = [[l for axis, l in enumerate(given) if axis not in c and axis not in b] for given, c, b in sides]
        free = free if side == 0 else free[::-1]
        if sums and renamed:
            raise NotAffine("a contraction over several axes")
        result = Value(tuple([mine[a] for a in batch[side]] + free[0] + free[1]), tuple(terms), sums)
        for label, rest, sign in renamed:
            self._unified(label, over[0])
            result = replace(result, terms=(*result.terms, *value.scaled(rest, sign).terms))
        self.products.append(eqn.params["precision"])
        return result

    # Known values: sums of products of smaller values, where they are ones

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
        value = None if mine else constant(atom, self._producers, self.constants)
        if value is not None and not value.any():
            return []
        if len(mine) < 2:
            return [Term(None, (Factor(atom, labels),))]
        if len(mine) == 2 and self._is_identity(atom, labels):
            return [Term(None, (Factor(atom, labels, "eye"),))]
        parts = self._parts(self._producers.get(atom), labels)
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
        if name in _SUMS:
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
        value = constant(atom, self._producers, self.constants)
        if value is None:
            return False
        matrix = value[tuple(slice(None) if a in axes else 0 for a in range(value.ndim))]
        return bool(np.array_equal(matrix, np.eye(len(matrix))))
