"""What the steps of a chunk read and write, as arrays over the steps: queries, keys, scales and decays of each step.

The factors of a form (`affine/terms.py`) are evaluated at all C steps. A vector gets the axis K, which a product of factors
may lack: `S.sum(K)` is a query of ones. Several states that read each other have one more axis, on which a vector of one
state is zero at the others. Steps after the end of the loop write nothing, and decay by 1.

Shapes: C steps of a chunk, S [K, V].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import Array

from jrnn.loops.affine.chunkwise.decay import FROM_STATE, STATE_LABELS, TO_STATE
from jrnn.loops.affine.chunkwise.labeled import Factors, Label, Labeled, Product, plus, times
from jrnn.loops.affine.matrix import AffineForm
from jrnn.loops.affine.terms import Factor, Row, Term

Queries = list[tuple[Labeled, Product]]  # vectors that read S, with what scales the results


@dataclass(frozen=True)
class StepValues:
    """The values of a form at the steps of a chunk.

    Attributes:
        form: the affine form of the step.
        factors: evaluates its factors at the C steps.
        steps: C.
        valid: [C] booleans, False for steps after the end, which change nothing; None if there are no such steps.
    """

    form: AffineForm
    factors: Factors
    steps: int
    valid: Array | None

    @property
    def k(self) -> int:
        k = self.form.forms.contracted
        assert k is not None
        return k

    @property
    def n_states(self) -> int:
        return len(self.form.positions)

    @property
    def size(self) -> dict[Label, int]:
        """The size of each label."""
        size: dict[Label, int] = dict(self.form.forms.size)
        size["T"] = self.steps
        size["S"] = self.steps
        size[TO_STATE] = self.n_states
        return size

    @property
    def eye(self) -> Labeled:
        return Labeled(jnp.eye(self.steps, dtype=self.factors.dtype), ("T", "S"))

    def per_step(self, a: Labeled) -> Labeled:
        """Returns the array with the label T."""
        if "T" in a.labels:
            return a
        shape = (self.steps, *a.array.shape)
        return Labeled(jnp.broadcast_to(a.array, shape), ("T", *a.labels))

    def with_label(self, a: Product, label: Label) -> Labeled:
        """Returns the array with a label; None stands for ones."""
        ones = jnp.ones(self.size[label], self.factors.dtype)
        if a is not None and label in a.labels:
            return a
        return times([a, Labeled(ones, (label,))])

    def masked(self, a: Labeled, otherwise: Product = None) -> Labeled:
        """Returns the array with a value that changes nothing at steps after the end, by default 0."""
        if self.valid is None:
            return a
        value = otherwise.along(a.labels) if otherwise is not None else 0
        is_valid = Labeled(self.valid, ("T",)).along(a.labels)
        return Labeled(jnp.where(is_valid, a.array, value), a.labels)

    def at_state(
        self,
        a: Labeled,
        index: int,
        label: Label = TO_STATE,
    ) -> Labeled:
        """Returns the array at an index of a new axis over the states, and zeros at the others.

        With one state there is no such axis.
        """
        if self.n_states == 1:
            return a
        arrays = []
        for i in range(self.n_states):
            arrays.append(a.array if i == index else jnp.zeros_like(a.array))
        return Labeled(jnp.stack(arrays, -1), (*a.labels, label))

    def key(
        self,
        factors: Sequence[Factor],
        sign: int,
        new_state: int,
    ) -> Labeled:
        """Returns the vector by which a row is written, 0 at steps after the end."""
        product = self.factors.product(factors, sign)
        key = self.masked(self.per_step(self.with_label(product, self.k)))
        return self.at_state(key, new_state)

    def split_by_k(self, terms: Sequence[Term]) -> Iterator[tuple[Term, list[Factor], Labeled]]:
        """Yields terms, their factors with K, and the product of the others."""
        for term in terms:
            with_k, without_k = self.divided(term, [self.k])
            yield term, with_k, self.factors.value(without_k)

    def divided(self, term: Term, labels: Iterable[Label]) -> tuple[list[Factor], Term]:
        """Returns the factors of a term that have one of some labels, and the term of the others."""
        having: list[Factor] = []
        others: list[Factor] = []
        for factor in term.factors:
            if self.form.forms.labels_of(factor).isdisjoint(labels):
                others.append(factor)
            else:
                having.append(factor)
        return having, replace(term, factors=tuple(others))

    def queries(self, row: Row) -> Queries:
        """Returns the vectors by which a row reads S at each step, with what scales the results.

        The scale is None, or, if decays differ along the columns, the product of the factors without K.
        """
        states = self.form.forms.states
        terms = [t for t in row.terms if t.operand in states]
        if not terms:
            return []
        if self.form.columns:
            return self._queries_with_scales(terms)
        queries = []
        values = list(map(self.factors.value, terms))
        for i, state in enumerate(states):
            parts = [value for t, value in zip(terms, values) if t.operand is state]
            if parts:
                query = self.per_step(self.with_label(plus(parts), self.k))
                queries.append(self.at_state(query, i))
        return [(plus(queries), None)]

    def _queries_with_scales(self, terms: Sequence[Term]) -> Queries:
        scales_of: dict[tuple[Factor, ...], list[Labeled]] = {}
        for _, with_k, product in self.split_by_k(terms):
            scales_of.setdefault(tuple(with_k), []).append(product)
        queries: Queries = []
        for factors, scales in scales_of.items():
            query = self.with_label(self.factors.product(factors), self.k)
            queries.append((self.per_step(query), plus(scales)))
        return queries

    def decay(self, terms: Sequence[Term]) -> Product:
        """Returns the decay of each step, or None if it is 1; for several states, matrices from states to states."""
        several = self.n_states > 1
        if not several and len(terms) == 1:
            (term,) = terms
            if not term.factors and term.sign == 1:
                return None
        one = self.factors.number(1)
        zero = self.factors.number(0)
        if several:
            one = Labeled(jnp.eye(self.n_states, dtype=self.factors.dtype), STATE_LABELS)
            zero = one.map(jnp.zeros_like)
        parts = []
        for term in terms:
            part = self.at_state(self.factors.value(term), term.new_state)
            state = self.form.forms.states.index(term.operand)
            parts.append(self.at_state(part, state, FROM_STATE))
        if several or not parts:
            parts.insert(0, zero)
        return self.masked(self.per_step(plus(parts)), one)
