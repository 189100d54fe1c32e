"""One affine carry S in a chunk of C steps, as a few products of matrices: the chunkwise form.

A step of linear attention or of the delta rule updates a matrix, and reads it by queries a:

    S[t + 1] = d[t] * S[t] + sum over i of p_i[t] r_i[t]^T,    R[t] = E[t] + S[t]^T a[t]

A row r that is written may be such an R: the delta rule writes the difference of a value and what S has for a key. Run by
steps, each step reads and writes all of S for a few operations an element, and the reverse pass stores S of every step.

In a chunk, S before step t is `W(t, start) S_0 + sum_{s < t} W(t, s) p_s r_s^T`, where W(t, s) is the product of the
decays of the steps between s and t (`decay.py`). So what a query reads is

    R[t] = E[t] + (a_t * W(t, start))^T S_0 + sum_{s < t} N[t, s] r_s,    N[t, s] = sum_k a_t W(t, s) p_s

        S_0 ----> [ all reads of S_0: one product ]----+
        a, p, W -> scores N, [C, C], lower triangle ---+--> R = (I - N)^-1 (E + ...) --> S_C: one product
        E ---------------------------------------------+

N are scores, as in attention, of queries a and keys p. Where the rows r are known, all reads are products. Where they are
R themselves, they solve a triangular system with ones on its diagonal (`row_equations.py`).

This is the chunkwise form of Yang, Wang, Zhang, Shen, Kim, "Parallelizing Linear Transformers with the Delta Rule over
Sequence Length" (2024), and, with decays, of Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024). Here the formula is
not written for one layer: `affine/matrix.py` reads the factors off any step.

Shapes: T time, C steps of a chunk, S [K, V]. "T" labels the step that reads, "S" the one that wrote.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Env, Var
from jrnn.loops.affine.chunkwise.decay import (
    TO_STATE,
    Decay,
    DecayedVectors,
    sums,
)
from jrnn.loops.affine.chunkwise.guarded import Arrays
from jrnn.loops.affine.chunkwise.labeled import (
    Labeled,
    Labels,
    Product,
    dot,
    plus,
    times,
    union,
    without,
)
from jrnn.loops.affine.chunkwise.row_equations import RowEquation, RowEquations, Rows, solve_rows
from jrnn.loops.affine.chunkwise.shared_decay import SharedDecay
from jrnn.loops.affine.chunkwise.solve import SavedForBackward
from jrnn.loops.affine.chunkwise.step_values import Queries, StepValues
from jrnn.loops.affine.chunkwise.vector_decay import VectorDecay
from jrnn.loops.affine.matrix import AffineForm
from jrnn.loops.affine.terms import AffineSum, Row, Term, rows_of


@dataclass(frozen=True)
class Decays:
    """The decays that are equal along the columns, the other decays, and the factor of each step of both."""

    rows: Decay
    columns: Decay
    both: Product


@dataclass(frozen=True)
class Writes:
    """What each step writes to S.

    Attributes:
        known_keys: the keys of outer products that are known, with K.
        known_values: the values of these outer products.
        keys: the keys of the rows that are to be solved for.
        matrices: matrices, with what remains of them before each step and after the chunk.
    """

    known_keys: list[Labeled] = field(default_factory=list)
    known_values: list[Labeled] = field(default_factory=list)
    keys: Rows = field(default_factory=dict)
    matrices: list[tuple[Labeled, Labeled, Labeled]] = field(default_factory=list)


@dataclass(frozen=True)
class Chunk:
    """Computes the reads of one carry S in a chunk, and S after it.

    Several carries that read each other are one with one more axis.

    Attributes:
        values: what the steps read and write.
        saved: saves values for the reverse pass.
        batched: all chunks are prepared at once.
    """

    values: StepValues
    saved: SavedForBackward
    batched: bool

    @property
    def form(self) -> AffineForm:
        return self.values.form

    def run(self, states: Arrays) -> tuple[Env, Arrays]:
        """Returns the values of the readouts, [C, ...], and the new states."""
        form = self.form
        values = self.values
        start = self._start(states)
        decays = self._decays()
        self.saved.growth += [decays.rows.largest, decays.columns.largest]
        writes = self._writes(decays)

        # Queries and keys, times the decays of the chunk.
        queries_of = {row: values.queries(row) for row in form.rows}
        queries: list[Labeled] = []
        for queries_of_row in queries_of.values():
            queries += [query for query, _ in queries_of_row]
        keys = [*writes.known_keys, *writes.keys.values()]
        vectors = decays.rows.of_vectors(queries, keys)
        ones = []
        if form.columns:
            ones.append(values.per_step(values.with_label(None, form.columns[-1])))
        known = decays.columns.of_vectors(ones, writes.known_values)

        # The rows that are written are solved for, and the others computed from them.
        equations = self._row_equations(start, decays, writes, queries_of, vectors, known)
        to_solve = {row: equations[row] for row in equations if row in writes.keys}
        solved = solve_rows(to_solve, values, self.saved)
        rows = self._rows_read(equations, solved)

        # What remains at the end of the chunk.
        new = []
        written = [*known.to_end, *(solved[row] for row in writes.keys)]
        for key, row in zip(vectors.to_end, written):
            missing = without(start.labels, key.labels + row.labels)
            out = without(start.labels, missing)
            new.append(dot(key, row, out, values.factors.precision))
        if form.decay:
            decayed = decays.columns.scaled(start, known.total)
            new.append(decays.rows.scaled(decayed, vectors.total))
        for matrix, _, remaining in writes.matrices:
            new.append(times([matrix, remaining]))
        after = plus(new).full(start.labels, values.size)
        after = after.reshape(-1, *states[0].shape)

        readouts = {}
        for v, value in form.readouts.items():
            readouts[v] = self._readout_values(v, value, rows)
        return readouts, list(after)

    def _start(self, states: Arrays) -> Labeled:
        """Returns S before the chunk."""
        labels = without(self.form.forms.axes, (None,))
        array = states[0]
        if len(states) > 1:
            array = jnp.stack(states)
            labels = (TO_STATE, *labels)
        shape = jaxprs.take(self.values.size, labels)
        return Labeled(array.reshape(shape), labels)

    def _decays(self) -> Decays:
        """Returns the decays of the chunk. A factor that differs along the columns is a decay of its own."""
        values = self.values
        terms = self.form.decay
        columns = self.form.columns
        if not columns:
            factor = values.decay(terms)
            rows = self._decay_of(factor, values.k)
            return Decays(rows, self._decay_of(None, values.k), times([factor]))
        of_rows = None
        if len(terms) == 1:
            along_columns, term_of_rows = values.divided(terms[0], columns)
            of_rows = values.decay([term_of_rows])
            terms = (replace(terms[0], factors=tuple(along_columns), sign=1),)
        of_columns = values.decay(terms)
        return Decays(
            self._decay_of(of_rows, values.k),
            self._decay_of(of_columns, columns[-1]),
            times([of_rows, of_columns]),
        )

    def _decay_of(self, factor: Product, k: int) -> Decay:
        """Returns the products of decays from the decay of each step, None if nothing decays; k is the label of K."""
        values = self.values
        none = Decay(values.steps, k, values.factors.precision)
        if factor is None:
            return none
        if k in factor.labels:
            return VectorDecay(none.steps, k, none.precision, factor, self.batched)
        return SharedDecay.of(none, factor, self.saved, self.batched)

    def _writes(self, decays: Decays) -> Writes:
        """Returns what the steps write: keys and values of outer products, and matrices."""
        values = self.values
        writes = Writes()
        for term, factors, value in values.split_by_k(self.form.known):
            writes.known_keys.append(values.key(factors, 1, term.new_state))
            writes.known_values.append(values.per_step(value))
        for term in self.form.updates:
            key = values.key(term.factors, term.sign, term.new_state)
            before = writes.keys.get(term.operand)
            writes.keys[term.operand] = plus([before, key])
        for matrix, scale in self.form.matrices:
            scales = values.masked(values.per_step(values.factors.value(scale)))
            array = values.factors.value(matrix)
            writes.matrices.append((array, *sums(decays.both, scales)))
        return writes

    # The equations of rows

    def _row_equations(
        self,
        start: Labeled,
        decays: Decays,
        writes: Writes,
        queries_of: dict[Row, Queries],
        vectors: DecayedVectors,
        known: DecayedVectors,
    ) -> RowEquations:
        """Returns the equation of each row, after the equations of the rows that it reads.

        Args:
            start: S before the chunk.
            decays: of the chunk.
            writes: what is written.
            queries_of: the queries of each row.
            vectors: all queries in this order, and all keys, times decays.
            known: the values of the outer products that are known, times decays along the columns.
        """
        column_decay = times(known.from_start[0]) if self.form.columns else None
        count = len(writes.known_keys)
        outer_products = list(zip(vectors.keys[:count], known.keys))
        keys = dict(zip(writes.keys, vectors.keys[count:]))
        queries = iter(zip(vectors.queries, vectors.from_start))
        equations: RowEquations = {}
        for row in self.form.rows:
            parts = []
            scores = {}
            for query, scale in queries_of[row]:
                decayed, from_start = next(queries)
                of_start = self._read_matrix(from_start[0], start, from_start[1])
                products = [times([of_start, column_decay])]
                for matrix, remaining, _ in writes.matrices:
                    products.append(self._read_matrix(query, matrix, remaining))
                for key, value in outer_products:
                    known_scores = decays.rows.scores(decayed, key, self.saved)
                    out = self._labels_of_reads(known_scores, value)
                    products.append(decays.columns.apply_scores(known_scores, value, known, out))
                parts += [times([scale, product]) for product in products]
                for u, key in keys.items():
                    scores[u] = decays.rows.scores(decayed, key, self.saved)
            for term in row.terms:
                if term.operand is None:
                    parts.append(self.values.factors.value(term))
                elif isinstance(term.operand, Row):
                    self._add_row(term, term.operand in writes.keys, equations, parts, scores)
            equations[row] = RowEquation(plus(parts), scores)
        return equations

    def _add_row(
        self,
        term: Term,
        is_solved: bool,
        equations: RowEquations,
        parts: list[Labeled],
        scores: Rows,
    ) -> None:
        """Adds a term with another row of the same step to what a row is."""
        scale = self.values.factors.product(term.factors, term.sign)
        assert term.operand in equations, "a row is read before it is computed"
        equation = equations[term.operand]
        if is_solved:
            equation = RowEquation(None, {term.operand: self.values.eye})
        if equation.known is not None:
            parts.append(times([equation.known, scale]))
        for u, matrix in equation.scores.items():
            product = times([matrix, scale])
            scores[u] = plus([scores.get(u), product])

    def _read_matrix(
        self,
        query: Labeled,
        matrix: Labeled,
        decay: Product,
    ) -> Labeled:
        """Reads a matrix at each step, times a decay, which may have K."""
        k = self.values.k
        scales_k = decay is not None and k in decay.labels
        if scales_k:
            query = times([query, decay])
        out = without(self._labels_of_reads(query, matrix), (k, TO_STATE))
        product = dot(query, matrix, out, self.values.factors.precision)
        return product if scales_k else times([product, decay])

    def _labels_of_reads(self, *arrays: Labeled) -> Labels:
        """Returns the labels of what is read from arrays at steps T."""
        return without(union(arrays, ("T", *self.form.free)), ("N", "S"))

    # What is read

    def _rows_read(self, equations: RowEquations, solved: Rows) -> Rows:
        """Returns the rows that are written, and the rows that the readouts read."""
        rows = dict(solved)
        terms: list[Term] = []
        for value in self.form.readouts.values():
            terms += value.terms
        for row in rows_of(terms):
            if row in rows:
                continue
            equation = equations[row]
            parts = [equation.known]
            for u, scores in equation.scores.items():
                written = rows[u].renamed("T", "S")
                out = self._labels_of_reads(scores, written)
                parts.append(dot(scores, written, out, self.values.factors.precision))
            rows[row] = plus(parts)
        return rows

    def _readout_values(
        self,
        v: Var,
        value: AffineSum,
        rows: Rows,
    ) -> Array:
        """Returns the values of a variable where S was read."""
        forms = self.form.forms
        steps = self.values.steps
        factors = self.values.factors
        one = factors.value(Term(None))
        parts = []
        for term in value.terms:
            part = factors.product(term.factors, term.sign)
            if term.operand:
                part = times([part, rows[term.operand]])
            parts.append(part or one)
        labels = ("T", *without(forms.resolved(value.labels), (None,)))
        labels_with_sums = (*labels, *forms.resolved(value.sums))
        array = plus(parts).full(labels_with_sums, self.values.size)
        array = jnp.sum(array, range(len(labels), array.ndim))
        sizes = v.aval.shape
        shape = [1 if l is None else n for l, n in zip(value.labels, sizes)]
        array = jnp.broadcast_to(array.reshape(steps, *shape), (steps, *sizes))
        return array.astype(v.aval.dtype)
