"""Affine forms: what a step computes from a matrix-shaped carry S, as sums of terms, and the labels of their axes.

Every axis gets a label: the axes of S are 0, 1, ..., other axes get fresh numbers, and labels are unified where values meet.
A value that depends on S is a sum of terms. A term is a product of factors, which do not depend on the carry, times S, times
a row (S contracted over its axis K), or alone. So the form does not depend on how a step is spelled: an einsum, a product
and a sum, a matrix `I - b k k^T`, a transposition and a `vmap` all lead to the same terms.

Shapes: S [batch axes, K, V] in any order. Products with S sum over K, and return rows along V.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jrnn import jaxprs
from jrnn.jaxprs import Var
from jrnn.jaxprs.axes import UnionFind
from jrnn.loops.ir import CARRY, Unsupported

T = TypeVar("T")

Label = (
    int | str | None
)  # of an axis; None: constant along it. `chunkwise/labeled.py` has the names.
Labels = tuple[Label, ...]
Axes = tuple[int, ...]  # labels that are not None, or numbers of axes
Terms = tuple["Term", ...]
Product = tuple["Factor", ...]

_LONGEST_UNROLLED = 8  # an axis that S does not have, and over which rows are summed, is unrolled if it is this short


def relabeled(labels: Iterable[Any], old: Any, new: Any) -> tuple[Any, ...]:
    """Returns the labels, with another one in place of one of them."""
    return tuple(new if l == old else l for l in labels)


def without(labels: Iterable[Any], others: Collection[Any]) -> tuple[Any, ...]:
    """Returns the labels, without some others, in their order."""
    return tuple(l for l in labels if l not in others)


@dataclass(frozen=True, eq=False)
class Factor:
    """A value that does not depend on the carry.

    Attributes:
        operand: a variable or literal; a tuple of factors, whose product is summed over K; or, of a
            "sum", a tuple of known terms.
        labels: the label of each axis.
        kind: "value", "reciprocal", "mask" or "inverted mask" (as a number), "identity" (an identity matrix), or "sum".
        index: for axes without a label, the index of the value.
    """

    operand: Any
    labels: Labels
    kind: str = "value"
    index: Axes = ()

    @property
    def parts(self) -> list[Factor]:
        """The factors that it is computed from."""
        if self.kind == "sum":
            return factors_in(self.operand)
        return list(self.operand) if isinstance(self.operand, tuple) else []

    def with_parts(self, changed: Mapping[Factor, Factor]) -> Factor:
        """Returns the factor with other parts."""
        if self.kind != "sum":
            return replace(self, operand=tuple(jaxprs.take(changed, self.operand)))
        return replace(self, operand=tuple(term.of(changed) for term in self.operand))


@dataclass(frozen=True, eq=False)
class Row:
    """A sum of terms: S times factors is summed over K; the other terms have no K."""

    terms: Terms


@dataclass(frozen=True, eq=False)
class Term:
    """`sign * product(factors) * operand`, where `operand` is a carry, a row, or None for a known term."""

    operand: Var | Row | None
    factors: Product = ()
    sign: int = 1
    new_state: int = 0  # for a term of a new carry: its index in `UnifiedLabels.states`

    def times(self, factors: Iterable[Factor], sign: int = 1) -> Term:
        return replace(self, factors=(*self.factors, *factors), sign=self.sign * sign)

    def of(self, changed: Mapping[Factor, Factor]) -> Term:
        """Returns the term with other factors."""
        return replace(self, factors=tuple(jaxprs.take(changed, self.factors)))


@dataclass(frozen=True)
class AffineSum:
    """A sum of terms, and the label of each of its axes; also summed over `sums`, axes of S other than K."""

    labels: Labels
    terms: Terms
    sums: Axes = ()

    def scaled(self, factors: Sequence[Factor] = (), sign: int = 1) -> AffineSum:
        return replace(self, terms=tuple(t.times(factors, sign) for t in self.terms))


class UnifiedLabels:
    """Which labels of a step are one: axes of S and of other values get their labels here, and meet here.

    `chunkwise/labeled.py` has the arrays whose axes have these labels.

    Attributes:
        states: the carries, of one shape.
        axes: the labels of the carries' axes.
        size: the size of each label.
        contracted: the label of K, or None before the first contraction.
        numbers: of factors: equal factors have equal numbers.
        number_of: the number of each kind of factor.
    """

    _rows: dict[Any, Row]  # by what they are made of, so that equal rows are one
    _replaced_rows: dict[Any, dict[Row, Row]]  # for as long as no more labels are unified

    def __init__(self, states: tuple[Var, ...]):
        shape = states[0].aval.shape
        self.states = states
        self.axes: Labels = tuple(None if n == 1 else i for i, n in enumerate(shape))
        self.size = dict(zip(self.long_axes, jaxprs.take(shape, self.long_axes)))
        self.contracted: Label = None
        self._numbers = itertools.count(len(shape))
        self._unified = UnionFind[Label]()
        self.numbers: dict[Factor, int] = {}
        self.number_of: dict[Any, int] = {}
        self._rows = {}
        self._replaced_rows = {}

    def find(self, label: Label) -> Label:
        return self._unified.root(label)

    def resolved(self, labels: Iterable[Label]) -> Labels:
        return tuple(map(self.find, labels))

    def labels_of(self, factor: Factor) -> set[int]:
        return set(without(self.resolved(factor.labels), (None,)))

    def labels_in(self, terms: Iterable[Term]) -> set[int]:
        return set().union(*map(self.labels_of, factors_in(terms)))

    def with_another(
        self,
        labels: Iterable[Label],
        label: Label,
        other: Label,
    ) -> Labels:
        """Returns labels with another one, or with none, in place of one of them."""
        return relabeled(self.resolved(labels), label, other)

    @property
    def long_axes(self) -> Axes:
        """The labels of the axes of S that are longer than 1."""
        return without(self.axes, (None,))

    def free_of(self, fixed: Collection[int]) -> Axes:
        """Returns the axes of S, without K and fixed axes."""
        return without(self.long_axes, {self.contracted, *fixed})

    def _fresh(self, size: int) -> int:
        label = next(self._numbers)
        self.size[label] = size
        return label

    def _unify_labels(self, a: Label, b: Label) -> Label:
        a = self.find(a)
        b = self.find(b)
        if a is None or b is None or a == b:
            return b if a is None else a
        if a in self.axes and b in self.axes:
            raise Unsupported(f"two axes of {CARRY} meet, as in {CARRY} + {CARRY}.T")
        # an axis of S, or the older label
        first = min(a, b)
        second = max(a, b)
        self._unified.above[second] = first
        return first

    def is_matrix(self, value: AffineSum) -> bool:
        """Returns True for values that are as large as S."""
        for term in value.terms:
            if term.operand in self.states:
                return True
        return self.contracted is not None and self.contracted in self.resolved(value.labels)

    # Labels that are replaced by an index or another label

    def _is_short(self, label: Label) -> bool:
        label = self.find(label)
        return (
            label is not None and label not in self.axes and self.size[label] <= _LONGEST_UNROLLED
        )

    def _at_index(
        self,
        value: AffineSum,
        label: Label,
        index: int,
    ) -> AffineSum:
        """The value at an index of an axis."""
        label = self.find(label)
        labels = self.with_another(value.labels, label, None)
        return AffineSum(labels, self._replaced(value.terms, label, index=index))

    def _replaced(
        self,
        terms: Sequence[Term],
        label: Label,
        index: int | None = None,
        other: Label = None,
    ) -> Terms:
        """Returns terms at an index of an axis, or with another label for it."""
        key = (label, index, other)
        rows = self._replaced_rows.setdefault((len(self._unified.above), *key), {})
        factors: dict[Factor, Factor] = {}

        def changed(term: Term) -> Term:
            for part in factors_of(term.factors, factors):
                factors[part] = self._own_factor_with(part, factors, *key)
            operand = rows.get(term.operand, term.operand)
            return replace(term.of(factors), operand=operand)

        for row in rows_of(terms, rows):
            new_terms = tuple(map(changed, row.terms))
            if all(map(_are_same, new_terms, row.terms)):
                rows[row] = row
            else:
                rows[row] = self._rows.setdefault((row, *key), Row(new_terms))
        return tuple(map(changed, terms))

    def _own_factor_with(
        self,
        factor: Factor,
        changed: Mapping[Factor, Factor],
        label: Label,
        index: int | None,
        other: Label,
    ) -> Factor:
        """Returns a factor whose parts are changed already."""
        labels = self.resolved(factor.labels)
        new_labels = self.with_another(labels, label, other)
        if isinstance(factor.operand, tuple):
            if all(changed[part] is part for part in factor.parts):
                return factor
            return replace(factor.with_parts(changed), labels=without(new_labels, (None,)))
        if label not in labels:
            return factor
        if other is not None:
            return replace(factor, labels=new_labels)
        indices = list(factor.index or (0,) * len(labels))
        for axis, own_label in enumerate(labels):
            if own_label == label:
                indices[axis] = index
        kind = "mask" if factor.kind == "identity" else factor.kind
        return replace(factor, labels=new_labels, kind=kind, index=tuple(indices))


def factors_in(terms: Iterable[Term]) -> list[Factor]:
    return list(itertools.chain.from_iterable(term.factors for term in terms))


def _are_same(a: Term, b: Term) -> bool:
    return a.operand is b.operand and a.factors == b.factors


def rows_of(terms: Iterable[Term], known: Collection[Row] = ()) -> dict[Row, None]:
    """Returns the unknown rows in terms, each after the rows that it reads."""

    def read_by(row: Row) -> list[Row]:
        return _rows_read(row.terms)

    return _in_order(_rows_read(terms), read_by, known)


def _rows_read(terms: Iterable[Term]) -> list[Row]:
    rows = []
    for term in terms:
        if isinstance(term.operand, Row):
            rows.append(term.operand)
    return rows


def factors_of(factors: Iterable[Factor], known: Collection[Factor] = ()) -> dict[Factor, None]:
    """Returns the unknown factors and the factors in them, each after its parts."""
    return _in_order(factors, operator.attrgetter("parts"), known)


def _in_order(
    roots: Iterable[T],
    read_by: Callable[[T], Sequence[T]],
    known: Collection[T] = (),
) -> dict[T, None]:
    """Returns nodes and all that they read, each once and after what it reads, without what is known.

    Chains are as long as the step, so that this function must not call itself.
    """
    in_order: dict[T, None] = {}
    for root in roots:
        pending = [root]
        while pending:
            node = pending[-1]
            if node in in_order or node in known:
                pending.pop()
                continue
            before = [n for n in read_by(node) if n not in in_order and n not in known]
            if before:
                pending += before[::-1]
            else:
                pending.pop()
                in_order[node] = None
    return in_order
