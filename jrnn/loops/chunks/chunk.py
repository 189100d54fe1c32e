"""One affine carry in a chunk of C steps, as a few products of matrices.

A step reads S by vectors a (readers), and writes outer products of vectors p (writers) and rows R to it. Those of a chunk
solve `(I - N) R = E + (a * W(t, start)) . S_0`, where `N[t, s] = sum_k a_t W(t, s) p_s` for s < t. All reads are products.

Shapes: T time, C steps of a chunk, S [K, V]. "T" labels the step that reads, "S" the one that wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from jrnn.jaxprs import Var
from jrnn.loops.affine.matrix import AffineForm
from jrnn.loops.affine.terms import AffineSum, Factor, Row, Term, rows_of
from jrnn.loops.chunks.decay import (
    FROM_STATE,
    STATE_LABELS,
    TO_STATE,
    Decay,
    Vectors,
    decay_of,
    sums,
)
from jrnn.loops.chunks.labeled import Factors, Label, Labeled, dot, plus, times, union
from jrnn.loops.chunks.solve import SavedForBackward, unit_lower_solve


@dataclass(frozen=True)
class RowEquation:
    """What a row of each step is: `known + sum over u of scores[u] . u`, where u are the rows to solve for, [T, S]."""

    known: Labeled | None
    scores: dict[Row, Labeled]


@dataclass(frozen=True)
class Decays:
    """The decays that are the same along the columns, those that are not, and the factor of each step of both."""

    rows: Decay
    columns: Decay
    both: Labeled | None


@dataclass(frozen=True)
class Writes:
    """What each step writes to S.

    Attributes:
        known: outer products, as vectors with K and values.
        vectors: the vectors of the rows that are to be solved for.
        matrices: matrices, with what remains of them before each step and after the chunk.
    """

    known: list[tuple[Labeled, Labeled]]
    vectors: dict[Row, Labeled] = field(default_factory=dict)
    matrices: list[tuple[Labeled, Labeled, Labeled]] = field(default_factory=list)


@dataclass(frozen=True)
class Chunk:
    """Computes the reads of one carry S in a chunk, and S after it.

    Several carries that read each other are one with one more axis.

    Attributes:
        form: the affine form of the step.
        factors: evaluates its factors at the C steps.
        steps: C.
        valid: [C] booleans, False for steps after the end, which change nothing; None if there are no such steps.
        saved: saves values for the reverse pass.
        batched: all chunks are prepared at once.
    """

    form: AffineForm
    factors: Factors
    steps: int
    valid: Any
    saved: SavedForBackward
    batched: bool

    def run(self, states: Sequence[Any]) -> tuple[dict[Var, Any], list[Any]]:
        """Returns the values of the readouts, [C, ...], and the new states."""
        form = self.form
        shape = states[0].shape
        axes = tuple(l for l in form.forms.axes if l is not None)
        start = (
            Labeled(jnp.stack(states), (TO_STATE, *axes))
            if self._several_states
            else Labeled(states[0], axes)
        )
        start = Labeled(start.array.reshape([self._size[l] for l in start.labels]), start.labels)
        decays = self._all_decays()
        self.saved.growth += [decays.rows.largest, decays.columns.largest]
        writes = Writes(
            [
                (self._vector(fs, 1, t.new_state), self._per_step(v))
                for t, fs, v in self._split_by_k(form.known)
            ]
        )
        for term in form.updates:
            vector = self._vector(term.factors, term.sign, term.new_state)
            writes.vectors[term.operand] = plus([writes.vectors.get(term.operand), vector])
        for matrix, scale in form.matrices:
            scaled = self._masked(self._per_step(self.factors.value(scale)))
            writes.matrices.append((self.factors.value(matrix), *sums(decays.both, scaled)))

        reads = {
            row: self._read_vectors([t for t in row.terms if t.operand in form.forms.states])
            for row in form.rows
        }
        readers = [vector for several in reads.values() for vector, _ in several]
        vectors = decays.rows.of_vectors(
            readers, [*(v for v, _ in writes.known), *writes.vectors.values()]
        )
        ones = [self._per_step(self._with_label(None, form.columns[-1]))] if form.columns else []
        values = decays.columns.of_vectors(ones, [value for _, value in writes.known])
        equations = self._row_equations(start, decays, writes, reads, vectors, values)
        solved = self._solve(
            {row: equation for row, equation in equations.items() if row in writes.vectors}
        )
        rows = dict(solved)
        for row in rows_of([t for v in form.readouts.values() for t in v.terms]):
            if row not in rows:
                equation = equations[row]
                parts = [
                    self._apply_scores(m, rows[u].renamed("T", "S"))
                    for u, m in equation.scores.items()
                ]
                rows[row] = plus([equation.known, *parts])
        new = []
        for vector, value in zip(
            vectors.ends, [*values.ends, *(solved[row] for row in writes.vectors)]
        ):
            out = [l for l in start.labels if l in vector.labels + value.labels]
            new.append(dot(vector, value, out, self.factors.precision))
        if form.decay:
            new.append(
                decays.rows.scaled(decays.columns.scaled(start, values.total), vectors.total)
            )
        new += [times([m, remaining]) for m, _, remaining in writes.matrices]
        after = plus(new).full(start.labels, self._size).reshape(-1, *shape)
        return {
            v: self._readout_values(v, value, rows) for v, value in form.readouts.items()
        }, list(after)

    def _row_equations(
        self,
        start: Labeled,
        decays: Decays,
        writes: Writes,
        reads: dict[Row, list[tuple[Labeled, Labeled | None]]],
        vectors: Vectors,
        values: Vectors,
    ) -> dict[Row, RowEquation]:
        """Returns the equations of the rows of each step, from their readers, and the vectors and values of the writes."""
        form = self.form
        decay = decays.rows
        known = list(zip(vectors.writers, values.writers))
        writers = dict(zip(writes.vectors, vectors.writers[len(known) :]))
        readers = iter(zip(vectors.readers, vectors.starts))
        of_columns = [times(values.starts[0])] if form.columns else []
        equations: dict[Row, RowEquation] = {}
        for row in form.rows:
            parts = []
            scores = {}
            for vector, scale_after in reads[row]:
                reader, of_start = next(readers)
                products = [
                    times([self._read_matrix(of_start[0], start, of_start[1]), *of_columns])
                ]
                products += [
                    self._read_matrix(vector, matrix, remaining)
                    for matrix, remaining, _ in writes.matrices
                ]
                scored = (
                    (decay.scores(reader, writer, self.saved), value) for writer, value in known
                )
                products += [
                    self._apply_scores(m, value, decays.columns, values) for m, value in scored
                ]
                parts += [times([scale_after, a]) for a in products]
                scores = {row: decay.scores(reader, w, self.saved) for row, w in writers.items()}
            for term in row.terms:
                if term.operand is None:
                    parts.append(self.factors.value(term))
                elif isinstance(term.operand, Row):
                    scale = self.factors.product(term.factors, term.sign)
                    assert term.operand in equations, "a row is read before it is computed"
                    to_solve = {term.operand: self._eye} if term.operand in writes.vectors else None
                    read = RowEquation(None, to_solve) if to_solve else equations[term.operand]
                    parts += [times([read.known, scale])] if read.known is not None else []
                    for u, m in read.scores.items():
                        scores[u] = plus([scores.get(u), times([m, scale])])
            equations[row] = RowEquation(plus(parts), scores)
        return equations

    def _read_matrix(self, reader: Labeled, matrix: Labeled, decay: Labeled | None) -> Labeled:
        """Reads a matrix at each step, times a decay, which may have K."""
        scales_k = decay is not None and self.k in decay.labels
        reader = times([reader, decay]) if scales_k else reader
        out = [
            l
            for l in union([reader, matrix], ("T", *self.form.free))
            if l not in (self.k, TO_STATE)
        ]
        product = dot(reader, matrix, out, self.factors.precision)
        return product if scales_k else times([product, decay])

    def _read_vectors(self, terms: Sequence[Term]) -> list[tuple[Labeled, Labeled | None]]:
        """Returns the vectors that read S at each step, with what scales the results.

        The scale is None, or, if decays differ along the columns, the product of the factors without K.
        """
        if not terms:
            return []
        if not self.form.columns:
            states = self.form.forms.states
            groups = {}
            for term in terms:
                groups.setdefault(states.index(term.operand), []).append(self.factors.value(term))
            vectors = (
                (self._per_step(self._with_label(plus(groups[i]), self.k)), i)
                for i in sorted(groups)
            )
            return [(plus(self._at_state(a, i, TO_STATE) for a, i in vectors), None)]
        scales_of: dict[tuple[Factor, ...], list[Labeled]] = {}
        for _, with_k, product in self._split_by_k(terms):
            scales_of.setdefault(tuple(with_k), []).append(product)
        with_k = (
            (self._with_label(self.factors.product(fs), self.k), scales)
            for fs, scales in scales_of.items()
        )
        return [(self._per_step(vector), plus(scales)) for vector, scales in with_k]

    def _apply_scores(
        self,
        scores: Labeled,
        values: Labeled,
        columns: Decay | None = None,
        of_columns: Vectors | None = None,
    ) -> Labeled:
        """Returns what the values written at steps S add to what is read at steps T."""
        out = [l for l in union([scores, values], ("T", *self.form.free)) if l not in ("N", "S")]
        if columns is None or columns.each is None or of_columns is None:
            return dot(scores, values, out, self.factors.precision)
        return columns.apply_scores(scores, values, of_columns.readers[0], out)

    @property
    def k(self) -> int:
        k = self.form.forms.contracted
        assert k is not None
        return k

    @property
    def _several_states(self) -> bool:
        return len(self.form.positions) > 1

    @property
    def _size(self) -> dict[Label, int]:
        return {
            **self.form.forms.size,
            "T": self.steps,
            "S": self.steps,
            TO_STATE: len(self.form.positions),
        }

    @property
    def _eye(self) -> Labeled:
        return Labeled(jnp.eye(self.steps, dtype=self.factors.dtype), ("T", "S"))

    def _per_step(self, a: Labeled) -> Labeled:
        """The array with the label T."""
        if "T" in a.labels:
            return a
        return Labeled(jnp.broadcast_to(a.array, (self.steps, *a.array.shape)), ("T", *a.labels))

    def _with_label(self, a: Labeled | None, label: Label) -> Labeled:
        """The array with a label."""
        ones = Labeled(jnp.ones(self._size[label], self.factors.dtype), (label,))
        return a if a is not None and label in a.labels else times([a, ones])

    def _masked(self, a: Labeled, otherwise: Labeled | None = None) -> Labeled:
        """The array with a value that changes nothing at steps after the end, by default 0."""
        if self.valid is None:
            return a
        where = otherwise.along(a.labels) if otherwise is not None else 0
        return a.map(lambda x: jnp.where(Labeled(self.valid, ("T",)).along(a.labels), x, where))

    def _all_decays(self) -> Decays:
        terms = self.form.decay
        labels = set(self.form.columns)
        rows, columns = (terms, []) if not labels else ([], terms)
        if len(terms) == 1 and labels:
            (term,), parts = terms, ([], [])
            for factor in term.factors:
                parts[bool(labels & self.form.forms.labels_of(factor))].append(factor)
            rows, columns = (
                [replace(term, factors=tuple(fs), sign=s)] for fs, s in zip(parts, (term.sign, 1))
            )
        of_rows = self._decay(rows) if rows or not labels else None
        of_columns = self._decay(columns) if labels else None
        settings = self.factors.precision, self.saved, self.batched
        last = self.form.columns[-1] if labels else self.k
        return Decays(
            decay_of(of_rows, self.steps, self.k, *settings),
            decay_of(of_columns, self.steps, last, *settings),
            times([of_rows, of_columns]),
        )

    def _decay(self, terms: Sequence[Term]) -> Labeled | None:
        """The decay of each step, or None if it is 1; for several states, matrices from states to states."""
        if (
            not self._several_states
            and len(terms) == 1
            and not terms[0].factors
            and terms[0].sign == 1
        ):
            return None
        one, zero = (Labeled(jnp.asarray(x, self.factors.dtype), ()) for x in (1, 0))
        if self._several_states:
            one = Labeled(jnp.eye(len(self.form.positions), dtype=self.factors.dtype), STATE_LABELS)
            zero = one.map(jnp.zeros_like)
        states = self.form.forms.states
        parts = [self._at_state(self.factors.value(t), t.new_state, TO_STATE) for t in terms]
        parts = [
            self._at_state(part, states.index(t.operand), FROM_STATE)
            for part, t in zip(parts, terms)
        ]
        return self._masked(
            self._per_step(plus(parts if parts and not self._several_states else [zero, *parts])),
            one,
        )

    def _split_by_k(self, terms: Iterable[Term]) -> Iterator[tuple[Term, list[Factor], Labeled]]:
        """Yields terms, their factors with K, and the product of the others."""
        for term in terms:
            with_k = [f for f in term.factors if self.k in self.form.forms.labels_of(f)]
            others = tuple(f for f in term.factors if f not in with_k)
            yield term, with_k, self.factors.value(replace(term, factors=others))

    def _vector(self, factors: Sequence[Factor], sign: int, new_state: int) -> Labeled:
        vector = self._masked(
            self._per_step(self._with_label(self.factors.product(factors, sign), self.k))
        )
        return self._at_state(vector, new_state, TO_STATE)

    def _at_state(self, a: Labeled, index: int, label: Label) -> Labeled:
        """The array at an index of a new axis over the states, and zeros at the others; the array if there is one state."""
        if not self._several_states:
            return a
        arrays = [
            a.array if i == index else jnp.zeros_like(a.array)
            for i in range(len(self.form.positions))
        ]
        return Labeled(jnp.stack(arrays, -1), (*a.labels, label))

    def _solve(self, equations: dict[Row, RowEquation]) -> dict[Row, Labeled]:
        """Solves `u = known_u + sum over w of scores[w] . w` for all rows u, [T, ...].

        Args:
            equations: of each row, after the rows of the same step that it reads: then the system is triangular.
        """
        free = self.form.free
        n = len(equations)
        steps = self.steps
        zero = Labeled(jnp.zeros((), self.factors.dtype), ())
        known = {row: equation.known or zero for row, equation in equations.items()}
        if not any(equation.scores for equation in equations.values()):
            return {row: self._per_step(r) for row, r in known.items()}
        arrays = [
            *known.values(),
            *(m for equation in equations.values() for m in equation.scores.values()),
        ]
        lead = [l for l in union(arrays) if l not in ("T", "S", *free)]
        shape = [self._size[l] for l in lead]
        size = self._size
        b = [r.full((*lead, "T", *free), size).reshape(*shape, steps, -1) for r in known.values()]
        a = [
            [e.scores.get(u, zero).full((*lead, "T", "S"), size) for u in equations]
            for e in equations.values()
        ]
        matrix = jnp.stack([jnp.stack(row, -1) for row in a], -3).reshape(
            *shape, steps * n, steps * n
        )
        right = jnp.stack(b, -2).reshape(*shape, steps * n, -1)
        x = unit_lower_solve(-matrix, right, self.factors.precision, self.saved)
        x = jnp.moveaxis(x.reshape(*shape, steps, n, *(size[l] for l in free)), len(shape) + 1, 0)
        return {row: Labeled(x[i], (*lead, "T", *free)) for i, row in enumerate(equations)}

    def _readout_values(self, v: Var, value: AffineSum, rows: dict[Row, Labeled]) -> Any:
        """Returns the values of a variable where S was read."""
        labels = ("T", *(l for l in self.form.forms.resolved(value.labels) if l is not None))
        sums = self.form.forms.resolved(value.sums)
        shape = (self.steps, *(1 if l is None else n for l, n in zip(value.labels, v.aval.shape)))
        scales = (self.factors.product(t.factors, t.sign) for t in value.terms)
        one = self.factors.value(Term(None))
        parts = [
            times([a, rows[t.operand]]) if t.operand else a or one
            for t, a in zip(value.terms, scales)
        ]
        array = plus(parts).full((*labels, *sums), self._size)
        array = jnp.sum(array, range(len(labels), array.ndim)).reshape(shape)
        return jnp.broadcast_to(array, (self.steps, *v.aval.shape)).astype(v.aval.dtype)
