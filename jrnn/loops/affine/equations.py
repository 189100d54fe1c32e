"""The rules of equations: reads the forms (`terms.py`) of a step's values off its equations, without evaluating them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var
from jrnn.loops.affine.carries import NotAffine
from jrnn.loops.affine.known import SUMS, Known
from jrnn.loops.affine.renaming import SAME, long_pairs, view
from jrnn.loops.affine.terms import Factor, Row, Term, Value


class Forms(Known):
    """The forms of the values of a step that depend on one carry, or on several that read each other.

    Attributes:
        eqns: the step's equations.
        known: the variables that do not depend on carries that are still to be computed.
        values: the form of each variable that has one.
        cuts: the variables where a matrix is contracted to rows.
        products: the contractions of S as (precision or None, whether it was written as a sum).
    """

    def __init__(self, states: tuple[Var, ...], eqns: Sequence[Eqn], known: Collection[Var], constants: dict[Var, Any]):
        super().__init__(states, eqns, constants)
        self.eqns, self.known = eqns, known
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
        if name in SUMS:
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
