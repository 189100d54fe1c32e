"""Contractions of affine forms over one axis. `terms.py` defines forms, S, K and V.

A step reads S by summing it over an axis, which is then K: the result is a *row*, the sum of S times factors over K. What
is summed over another axis has no form, with three exceptions:

- An axis that S does not have, and that is short, as where several vectors read S in one product: each index of it is a
  term of its own.
- An identity matrix: the sum of `x[i] I[i, j]` over i is `x[j]`, so that the axis only gets another label. So the terms of
  `(I - b k k^T) S` are S, and k times a row.
- Known values, if what remains of their product is a vector: a matrix would have to be computed for each step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jrnn.loops.affine.like_terms import bounded
from jrnn.loops.affine.terms import (
    AffineSum,
    Factor,
    Label,
    Labels,
    Product,
    Row,
    Term,
    Terms,
    UnifiedLabels,
    without,
)
from jrnn.loops.ir import CARRY, Unsupported


class Contractions(UnifiedLabels):
    """Contracts forms, and notes which axis of S is K."""

    def _as_one_row(self, value: AffineSum, labels: Iterable[Label]) -> AffineSum:
        """Makes a sum of rows one row, before it is spread over an axis that it does not have, as in an outer product."""
        new = {*self.resolved(labels)} - {None, *self.resolved(value.labels)}
        is_one_row = len(value.terms) == 1 and not value.terms[0].factors
        if not new or is_one_row or self.is_matrix(value):
            return value
        row = self._rows.setdefault(value.terms, Row(value.terms))
        return replace(value, terms=(Term(row),))

    def _contract(self, value: AffineSum, label: int) -> AffineSum:
        """Sums a value over a label."""
        label = self.find(label)
        matrix = self.is_matrix(value)
        if matrix and self.contracted is None and label in self.axes:
            self.contracted = label
        if not matrix or label != self.contracted:
            raise Unsupported(f"a sum over a second axis of {CARRY}" if matrix else "")
        terms = []
        for term in value.terms:
            is_state = term.operand in self.states
            terms.append(term if is_state else self._contract_factors(term, label))
        labels = tuple(l for l in value.labels if self.find(l) != label)
        return AffineSum(labels, (Term(Row(tuple(terms))),))

    def _choose_k(self, labels: Sequence[int]) -> int:
        """Returns which of the labels that are summed over is K."""
        return self.contracted if self.contracted in labels else labels[-1]

    def _contract_factors(self, term: Term, label: int) -> Term:
        """Sums the factors of a term that have a label; S is not in it."""
        with_label, without_label = self._with_and_without(term.factors, label)
        labels = self._labels_without(with_label, label)
        return replace(term, factors=(*without_label, Factor(with_label, labels)))

    def _with_and_without(self, factors: Iterable[Factor], label: Label) -> tuple[Product, Product]:
        """Returns the factors that have a label, and the others."""
        with_label = []
        without_label = []
        for factor in factors:
            has_label = label is not None and label in self.labels_of(factor)
            (with_label if has_label else without_label).append(factor)
        return tuple(with_label), tuple(without_label)

    def _labels_without(self, factors: Iterable[Factor], label: int) -> Labels:
        """Returns the labels of factors, without one of these."""
        labels: dict[Label, None] = {}
        for factor in factors:
            labels.update(dict.fromkeys(self.resolved(factor.labels)))
        return without(labels, (None, label))

    def _state_terms(
        self,
        value: AffineSum,
        parts: Sequence[Term],
        over: Label,
    ) -> tuple[list[Term], list[Any]]:
        """Contracts a value that depends on S with known terms: an identity in one of them renames an axis."""
        terms = []
        renamed = []
        for part in parts:
            with_label, without_label = self._with_and_without(part.factors, over)
            identity = _identity(with_label)
            if identity is not None:
                scales = [f for f in part.factors if f is not identity]
                renamed.append((*(self.labels_of(identity) - {over}), scales, part.sign))
            elif over is not None and self._is_short(over):
                for i in range(self.size[over]):
                    (indexed,) = self._replaced([part], over, index=i)
                    indexed_value = self._at_index(value, over, i)
                    terms += self._spread(indexed_value, indexed.factors, part.sign)
            elif over is not None:
                row = self._contract(value.scaled(with_label), over)
                terms += row.scaled(without_label, part.sign).terms
            else:
                terms += self._spread(value, part.factors, part.sign)
        return terms, renamed

    def _spread(
        self,
        value: AffineSum,
        factors: Sequence[Factor],
        sign: int,
    ) -> Terms:
        """Returns the terms of a product with factors that may have other axes."""
        labels = itertools.chain.from_iterable(f.labels for f in factors)
        return self._as_one_row(value, labels).scaled(factors, sign).terms

    def _known_terms(self, terms: Iterable[Term], over: Label) -> Iterator[Term]:
        """Sums known terms over a label; raises Unsupported if what remains is no product of vectors."""
        for term in terms:
            with_label, _ = self._with_and_without(term.factors, over)
            identity = _identity(with_label)
            if over is None:
                yield term
            elif identity is not None:
                (other,) = self.labels_of(identity) - {over}
                others = tuple(f for f in term.factors if f is not identity)
                yield from self._replaced([replace(term, factors=others)], over, other=other)
            elif with_label and len(self._labels_without(with_label, over)) < 2:
                yield self._contract_factors(term, over)
            elif with_label and self._is_short(over):
                for i in range(self.size[over]):
                    yield from self._replaced([term], over, index=i)
            else:
                raise Unsupported("")


def _identity(factors: Iterable[Factor]) -> Factor | None:
    return next((f for f in factors if f.kind == "identity"), None)


def products(a: Iterable[Term], b: Sequence[Term]) -> Terms:
    """Returns the products of all pairs of terms; raises Unsupported if there are too many."""
    products = []
    for x, y in itertools.product(a, b):
        products.append(x.times(y.factors, y.sign))
    return bounded(products)
