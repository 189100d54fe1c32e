"""Affine forms: what a step computes from a matrix-shaped carry S, as sums of terms, and the labels of their axes.

Every axis gets a label: the axes of S are 0, 1, ..., other axes get fresh numbers, and labels are unified where values meet.
A value that depends on S is a sum of terms. A term is a product of factors, which do not depend on the carry, times S, times
a row (S contracted over its axis K), or alone. So the form does not depend on how a step is spelled: an einsum, a product
and a sum, a matrix `I - b k k^T`, a transposition and a `vmap` all lead to the same terms.

Shapes: S [batch axes, K, V] in any order. Products with S sum over K, and return rows along V.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from jrnn.jaxprs import Var
from jrnn.loops.ir import CARRY, Unsupported

T = TypeVar("T")

Labels = tuple[int | None, ...]  # None: constant along this axis

_LONGEST_UNROLLED = 8  # an axis that S does not have, and over which rows are summed, is unrolled if it is this short


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
    index: tuple[int, ...] = ()

    @property
    def parts(self) -> list[Factor]:
        """The factors that it is computed from."""
        if self.kind != "sum":
            return list(self.operand) if isinstance(self.operand, tuple) else []
        parts: list[Factor] = []
        for term in self.operand:
            parts += term.factors
        return parts

    def with_parts(self, changed: Mapping[Factor, Factor]) -> Factor:
        """Returns the factor with other parts."""
        if self.kind != "sum":
            return replace(self, operand=tuple(changed[part] for part in self.operand))
        terms = (
            replace(term, factors=tuple(changed[part] for part in term.factors))
            for term in self.operand
        )
        return replace(self, operand=tuple(terms))


@dataclass(frozen=True, eq=False)
class Row:
    """A sum of terms: S times factors is summed over K; the other terms have no K."""

    terms: tuple[Term, ...]


@dataclass(frozen=True, eq=False)
class Term:
    """`sign * product(factors) * operand`, where `operand` is a carry, a row, or None for a known term."""

    operand: Var | Row | None
    factors: tuple[Factor, ...] = ()
    sign: int = 1
    new_state: int = 0  # for a term of a new carry: its index in `AxisLabels.states`

    def times(self, factors: Iterable[Factor], sign: int = 1) -> Term:
        return replace(self, factors=(*self.factors, *factors), sign=self.sign * sign)


@dataclass(frozen=True)
class AffineSum:
    """A sum of terms, and the label of each of its axes; also summed over `sums`, axes of S other than K."""

    labels: Labels
    terms: tuple[Term, ...]
    sums: tuple[int, ...] = ()

    def scaled(self, factors: Sequence[Factor] = (), sign: int = 1) -> AffineSum:
        return replace(self, terms=tuple(t.times(factors, sign) for t in self.terms))


class AxisLabels:
    """The labels of the axes of S, and of other values of the step.

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
        self.size = {l: shape[l] for l in self.axes if l is not None}
        self.contracted: int | None = None
        self._numbers = itertools.count(len(shape))
        self._unified_with: dict[int, int] = {}
        self.numbers: dict[Factor, int] = {}
        self.number_of: dict[Any, int] = {}
        self._rows = {}
        self._replaced_rows = {}

    def find(self, label: int | None) -> int | None:
        first = label
        while first in self._unified_with:
            first = self._unified_with[first]
        while label in self._unified_with:  # the next search takes one step
            following = self._unified_with[label]
            self._unified_with[label] = first
            label = following
        return first

    def resolved(self, labels: Iterable[int | None]) -> Labels:
        return tuple(map(self.find, labels))

    def labels_of(self, factor: Factor) -> set[int]:
        return {l for l in self.resolved(factor.labels) if l is not None}

    def labels_in(self, terms: Iterable[Term]) -> set[int]:
        return set().union(*(self.labels_of(f) for t in terms for f in t.factors))

    def free_of(self, fixed: Collection[int]) -> tuple[int, ...]:
        """Returns the axes of S, without K and those that are fixed."""
        return tuple(
            l for l in self.axes if l is not None and l != self.contracted and l not in fixed
        )

    def _fresh(self, size: int) -> int:
        label = next(self._numbers)
        self.size[label] = size
        return label

    def _unify_labels(self, a: int | None, b: int | None) -> int | None:
        a = self.find(a)
        b = self.find(b)
        if a is None or b is None or a == b:
            return b if a is None else a
        if a in self.axes and b in self.axes:
            raise Unsupported(f"two axes of {CARRY} meet, as in {CARRY} + {CARRY}.T")
        # an axis of S, or the older label
        first = min(a, b)
        second = max(a, b)
        self._unified_with[second] = first
        return first

    def is_matrix(self, value: AffineSum) -> bool:
        """Returns True for values that are as large as S."""
        has_state = any(t.operand in self.states for t in value.terms)
        return has_state or (
            self.contracted is not None and self.contracted in self.resolved(value.labels)
        )

    # Labels that are replaced by an index or another label

    def _is_short(self, label: int | None) -> bool:
        label = self.find(label)
        return (
            label is not None and label not in self.axes and self.size[label] <= _LONGEST_UNROLLED
        )

    def _at_index(self, value: AffineSum, label: int | None, index: int) -> AffineSum:
        """The value at an index of an axis."""
        label = self.find(label)
        labels = tuple(None if self.find(l) == label else l for l in value.labels)
        return AffineSum(labels, tuple(self._term_with(t, label, index=index) for t in value.terms))

    def _term_with(self, term: Term, label: int | None, **replacements: int) -> Term:
        key = (label, *replacements.items())
        rows = self._replaced_rows.setdefault((len(self._unified_with), *key), {})

        def changed(factor: Factor) -> Factor:
            return self._factor_with(factor, label, **replacements)

        for row in rows_of([term], rows):
            terms = tuple(_mapped(t, changed, rows) for t in row.terms)
            same = all(
                a.operand is b.operand and a.factors == b.factors for a, b in zip(terms, row.terms)
            )
            rows[row] = row if same else self._rows.setdefault((row, *key), Row(terms))
        return _mapped(term, changed, rows)

    def _factor_with(
        self, factor: Factor, label: int | None, index: Any = None, other: int | None = None
    ) -> Factor:
        """The factor at an index of an axis, or with another label for it."""
        changed: dict[Factor, Factor] = {}
        for part in factors_of([factor]):
            changed[part] = self._own_factor_with(part, changed, label, index, other)
        return changed[factor]

    def _own_factor_with(
        self,
        factor: Factor,
        changed: Mapping[Factor, Factor],
        label: int | None,
        index: Any,
        other: int | None,
    ) -> Factor:
        labels = self.resolved(factor.labels)
        if isinstance(factor.operand, tuple):
            if all(changed[part] is part for part in factor.parts):
                return factor
            new_labels = (other if l == label else l for l in labels)
            remaining = tuple(l for l in new_labels if l != label and l is not None)
            return replace(factor.with_parts(changed), labels=remaining)
        if label not in labels:
            return factor
        if other is not None:
            return replace(factor, labels=tuple(other if l == label else l for l in labels))
        indices = factor.index or (0,) * len(labels)
        at = tuple(index if l == label else i for l, i in zip(labels, indices))
        kind = "mask" if factor.kind == "identity" else factor.kind
        return replace(
            factor, labels=tuple(None if l == label else l for l in labels), kind=kind, index=at
        )


def _mapped(term: Term, change: Callable[[Factor], Factor], rows: Mapping[Any, Row]) -> Term:
    """Returns a term with its factors changed, and its row replaced."""
    factors = tuple(map(change, term.factors))
    return replace(term, factors=factors, operand=rows.get(term.operand, term.operand))


def rows_of(terms: Iterable[Term], known: Collection[Row] = ()) -> dict[Row, None]:
    """Returns the rows in terms, each after those that it reads, without those that are known."""

    def read_by(row: Row) -> list[Row]:
        return _rows_read(row.terms)

    return _in_order(_rows_read(terms), read_by, known)


def _rows_read(terms: Iterable[Term]) -> list[Row]:
    return [t.operand for t in terms if isinstance(t.operand, Row)]


def factors_of(factors: Iterable[Factor], known: Collection[Factor] = ()) -> dict[Factor, None]:
    """Returns factors, and those that they are computed from, each after its parts, without those that are known."""
    return _in_order(factors, lambda factor: factor.parts, known)


def _in_order(
    roots: Iterable[T], read_by: Callable[[T], Sequence[T]], known: Collection[T] = ()
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
