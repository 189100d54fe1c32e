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
R themselves, they solve a triangular system with ones on its diagonal (`solve.py`). Several rows of one step make one system
of C times as many unknowns, in the order in which the step computes them.

This is the chunkwise form of Yang, Wang, Zhang, Shen, Kim, "Parallelizing Linear Transformers with the Delta Rule over
Sequence Length" (2024), and, with decays, of Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024). Here the formula is
not written for one layer: `affine/matrix.py` reads the factors off any step.

Shapes: T time, C steps of a chunk, S [K, V]. "T" labels the step that reads, "S" the one that wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jax import Array

from jrnn.jaxprs import Var
from jrnn.loops.affine.chunkwise.decay import (
    FROM_STATE,
    STATE_LABELS,
    TO_STATE,
    Decay,
    DecayedVectors,
    decay_of,
    sums,
)
from jrnn.loops.affine.chunkwise.labeled import Factors, Label, Labeled, dot, plus, times, union
from jrnn.loops.affine.chunkwise.solve import SavedForBackward, unit_lower_solve
from jrnn.loops.affine.matrix import AffineForm
from jrnn.loops.affine.terms import AffineSum, Factor, Row, Term, rows_of

Queries = list[tuple[Labeled, Labeled | None]]  # vectors that read S, with what scales the results


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
        known_keys: the keys of outer products that are known, with K.
        known_values: the values of these outer products.
        keys: the keys of the rows that are to be solved for.
        matrices: matrices, with what remains of them before each step and after the chunk.
    """

    known_keys: list[Labeled] = field(default_factory=list)
    known_values: list[Labeled] = field(default_factory=list)
    keys: dict[Row, Labeled] = field(default_factory=dict)
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
    valid: Array | None
    saved: SavedForBackward
    batched: bool

    def run(self, states: Sequence[Array]) -> tuple[dict[Var, Array], list[Array]]:
        """Returns the values of the readouts, [C, ...], and the new states."""
        form = self.form
        start = self._start(states)
        decays = self._all_decays()
        self.saved.growth += [decays.rows.largest, decays.columns.largest]
        writes = self._writes(decays)

        # Queries and keys, times the decays of the chunk.
        queries_of: dict[Row, Queries] = {}
        queries = []
        for row in form.rows:
            queries_of[row] = self._queries(row)
            queries += [query for query, _ in queries_of[row]]
        vectors = decays.rows.of_vectors(queries, [*writes.known_keys, *writes.keys.values()])
        ones = []
        if form.columns:
            ones.append(self._per_step(self._with_label(None, form.columns[-1])))
        values = decays.columns.of_vectors(ones, writes.known_values)

        # The rows that are written are solved for, and the others computed from them.
        equations = self._row_equations(start, decays, writes, queries_of, vectors, values)
        solved = self._solve(
            {row: equation for row, equation in equations.items() if row in writes.keys}
        )
        rows = self._rows_read(equations, solved)

        new = self._written(start, vectors, values, [solved[row] for row in writes.keys])
        if form.decay:
            decayed = decays.columns.scaled(start, values.total)
            new.append(decays.rows.scaled(decayed, vectors.total))
        for matrix, _, remaining in writes.matrices:
            new.append(times([matrix, remaining]))
        after = plus(new).full(start.labels, self._size).reshape(-1, *states[0].shape)

        readouts = {}
        for v, value in form.readouts.items():
            readouts[v] = self._readout_values(v, value, rows)
        return readouts, list(after)

    def _start(self, states: Sequence[Array]) -> Labeled:
        """Returns S before the chunk."""
        labels = tuple(l for l in self.form.forms.axes if l is not None)
        array = states[0]
        if self._several_states:
            array = jnp.stack(states)
            labels = (TO_STATE, *labels)
        return Labeled(array.reshape([self._size[l] for l in labels]), labels)

    def _writes(self, decays: Decays) -> Writes:
        """Returns what the steps write: keys and values of outer products, and matrices."""
        writes = Writes()
        for term, factors, value in self._split_by_k(self.form.known):
            writes.known_keys.append(self._key(factors, 1, term.new_state))
            writes.known_values.append(self._per_step(value))
        for term in self.form.updates:
            key = self._key(term.factors, term.sign, term.new_state)
            writes.keys[term.operand] = plus([writes.keys.get(term.operand), key])
        for matrix, scale in self.form.matrices:
            scales = self._masked(self._per_step(self.factors.value(scale)))
            writes.matrices.append((self.factors.value(matrix), *sums(decays.both, scales)))
        return writes

    def _written(
        self,
        start: Labeled,
        vectors: DecayedVectors,
        values: DecayedVectors,
        solved: Sequence[Labeled],
    ) -> list[Labeled]:
        """Returns what remains of the outer products of the chunk at its end."""
        products = []
        for key, value in zip(vectors.to_end, [*values.to_end, *solved]):
            out = [l for l in start.labels if l in key.labels + value.labels]
            products.append(dot(key, value, out, self.factors.precision))
        return products

    def _rows_read(
        self, equations: dict[Row, RowEquation], solved: dict[Row, Labeled]
    ) -> dict[Row, Labeled]:
        """Returns the rows that are written, and those that the readouts read."""
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
                parts.append(self._apply_scores(scores, rows[u].renamed("T", "S")))
            rows[row] = plus(parts)
        return rows

    # The equations of rows

    def _row_equations(
        self,
        start: Labeled,
        decays: Decays,
        writes: Writes,
        queries_of: dict[Row, Queries],
        vectors: DecayedVectors,
        values: DecayedVectors,
    ) -> dict[Row, RowEquation]:
        """Returns the equation of each row, after the equations of the rows that it reads.

        Args:
            start: S before the chunk.
            decays: of the chunk.
            writes: what is written.
            queries_of: the queries of each row.
            vectors: all queries in this order, and all keys, times decays.
            values: the values of the outer products that are known, times decays along the columns.
        """
        column_decay = times(values.from_start[0]) if self.form.columns else None
        count = len(writes.known_keys)
        known = list(zip(vectors.keys[:count], values.keys))
        keys = dict(zip(writes.keys, vectors.keys[count:]))
        queries = iter(zip(vectors.queries, vectors.from_start))
        equations: dict[Row, RowEquation] = {}
        for row in self.form.rows:
            parts = []
            scores = {}
            for query, scale in queries_of[row]:
                decayed, from_start = next(queries)
                of_start = self._read_matrix(from_start[0], start, from_start[1])
                products = [times([of_start, column_decay])]
                for matrix, remaining, _ in writes.matrices:
                    products.append(self._read_matrix(query, matrix, remaining))
                for key, value in known:
                    known_scores = decays.rows.scores(decayed, key, self.saved)
                    products.append(self._apply_scores(known_scores, value, decays.columns, values))
                parts += [times([scale, product]) for product in products]
                for u, key in keys.items():
                    scores[u] = decays.rows.scores(decayed, key, self.saved)
            for term in row.terms:
                if term.operand is None:
                    parts.append(self.factors.value(term))
                elif isinstance(term.operand, Row):
                    self._add_row(term, term.operand in writes.keys, equations, parts, scores)
            equations[row] = RowEquation(plus(parts), scores)
        return equations

    def _add_row(
        self,
        term: Term,
        is_solved: bool,
        equations: dict[Row, RowEquation],
        parts: list[Labeled],
        scores: dict[Row, Labeled],
    ) -> None:
        """Adds a term with another row of the same step to what a row is."""
        scale = self.factors.product(term.factors, term.sign)
        assert term.operand in equations, "a row is read before it is computed"
        equation = equations[term.operand]
        if is_solved:
            equation = RowEquation(None, {term.operand: self._eye})
        if equation.known is not None:
            parts.append(times([equation.known, scale]))
        for u, matrix in equation.scores.items():
            scores[u] = plus([scores.get(u), times([matrix, scale])])

    def _read_matrix(self, query: Labeled, matrix: Labeled, decay: Labeled | None) -> Labeled:
        """Reads a matrix at each step, times a decay, which may have K."""
        scales_k = decay is not None and self.k in decay.labels
        if scales_k:
            query = times([query, decay])
        labels = union([query, matrix], ("T", *self.form.free))
        out = [l for l in labels if l not in (self.k, TO_STATE)]
        product = dot(query, matrix, out, self.factors.precision)
        return product if scales_k else times([product, decay])

    def _queries(self, row: Row) -> Queries:
        """Returns the vectors by which a row reads S at each step, with what scales the results.

        The scale is None, or, if decays differ along the columns, the product of the factors without K.
        """
        states = self.form.forms.states
        terms = [t for t in row.terms if t.operand in states]
        if not terms:
            return []
        if self.form.columns:
            return self._queries_with_scales(terms)
        of_state: dict[int, list[Labeled]] = {}
        for term in terms:
            of_state.setdefault(states.index(term.operand), []).append(self.factors.value(term))
        queries = []
        for i in sorted(of_state):
            query = self._per_step(self._with_label(plus(of_state[i]), self.k))
            queries.append(self._at_state(query, i, TO_STATE))
        return [(plus(queries), None)]

    def _queries_with_scales(self, terms: Sequence[Term]) -> Queries:
        scales_of: dict[tuple[Factor, ...], list[Labeled]] = {}
        for _, with_k, product in self._split_by_k(terms):
            scales_of.setdefault(tuple(with_k), []).append(product)
        queries: Queries = []
        for factors, scales in scales_of.items():
            query = self._with_label(self.factors.product(factors), self.k)
            queries.append((self._per_step(query), plus(scales)))
        return queries

    def _apply_scores(
        self,
        scores: Labeled,
        values: Labeled,
        columns: Decay | None = None,
        of_columns: DecayedVectors | None = None,
    ) -> Labeled:
        """Returns what the values written at steps S add to what is read at steps T."""
        labels = union([scores, values], ("T", *self.form.free))
        out = [l for l in labels if l not in ("N", "S")]
        if columns is None or columns.each is None or of_columns is None:
            return dot(scores, values, out, self.factors.precision)
        return columns.apply_scores(scores, values, of_columns.queries[0], out)

    # Arrays of the chunk

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
        """The size of each label."""
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
        if a is not None and label in a.labels:
            return a
        return times([a, ones])

    def _masked(self, a: Labeled, otherwise: Labeled | None = None) -> Labeled:
        """The array with a value that changes nothing at steps after the end, by default 0."""
        if self.valid is None:
            return a
        value = otherwise.along(a.labels) if otherwise is not None else 0
        is_valid = Labeled(self.valid, ("T",)).along(a.labels)
        return Labeled(jnp.where(is_valid, a.array, value), a.labels)

    def _key(self, factors: Sequence[Factor], sign: int, new_state: int) -> Labeled:
        """The vector by which a row is written, 0 at steps after the end."""
        key = self._per_step(self._with_label(self.factors.product(factors, sign), self.k))
        return self._at_state(self._masked(key), new_state, TO_STATE)

    def _at_state(self, a: Labeled, index: int, label: Label) -> Labeled:
        """The array at an index of a new axis over the states, and zeros at the others; the array if there is one state."""
        if not self._several_states:
            return a
        arrays = []
        for i in range(len(self.form.positions)):
            arrays.append(a.array if i == index else jnp.zeros_like(a.array))
        return Labeled(jnp.stack(arrays, -1), (*a.labels, label))

    def _split_by_k(self, terms: Iterable[Term]) -> Iterator[tuple[Term, list[Factor], Labeled]]:
        """Yields terms, their factors with K, and the product of the others."""
        for term in terms:
            with_k = [f for f in term.factors if self.k in self.form.forms.labels_of(f)]
            others = tuple(f for f in term.factors if f not in with_k)
            yield term, with_k, self.factors.value(replace(term, factors=others))

    # Decays

    def _all_decays(self) -> Decays:
        """Returns the decays of the chunk. A factor that differs along the columns is a decay of its own."""
        terms = self.form.decay
        columns = self.form.columns
        settings = (self.factors.precision, self.saved, self.batched)
        if not columns:
            factor = self._decay(terms)
            rows = decay_of(factor, self.steps, self.k, *settings)
            return Decays(rows, decay_of(None, self.steps, self.k, *settings), times([factor]))
        of_rows = None
        if len(terms) == 1:
            along_rows = []
            along_columns = []
            for factor in terms[0].factors:
                if self.form.forms.labels_of(factor).isdisjoint(columns):
                    along_rows.append(factor)
                else:
                    along_columns.append(factor)
            of_rows = self._decay([replace(terms[0], factors=tuple(along_rows))])
            terms = (replace(terms[0], factors=tuple(along_columns), sign=1),)
        of_columns = self._decay(terms)
        return Decays(
            decay_of(of_rows, self.steps, self.k, *settings),
            decay_of(of_columns, self.steps, columns[-1], *settings),
            times([of_rows, of_columns]),
        )

    def _decay(self, terms: Sequence[Term]) -> Labeled | None:
        """The decay of each step, or None if it is 1; for several states, matrices from states to states."""
        dtype = self.factors.dtype
        several = self._several_states
        if not several and len(terms) == 1 and not terms[0].factors and terms[0].sign == 1:
            return None
        one = Labeled(jnp.asarray(1, dtype), ())
        zero = Labeled(jnp.asarray(0, dtype), ())
        if several:
            one = Labeled(jnp.eye(len(self.form.positions), dtype=dtype), STATE_LABELS)
            zero = one.map(jnp.zeros_like)
        parts = []
        for term in terms:
            part = self._at_state(self.factors.value(term), term.new_state, TO_STATE)
            state = self.form.forms.states.index(term.operand)
            parts.append(self._at_state(part, state, FROM_STATE))
        if several or not parts:
            parts.insert(0, zero)
        return self._masked(self._per_step(plus(parts)), one)

    # The triangular system, and what is read

    def _solve(self, equations: dict[Row, RowEquation]) -> dict[Row, Labeled]:
        """Solves `u = known_u + sum over w of scores[w] . w` for all rows u, [T, ...].

        Args:
            equations: of each row, after the rows of the same step that it reads: then the system is triangular.
        """
        zero = Labeled(jnp.zeros((), self.factors.dtype), ())
        known = {row: equation.known or zero for row, equation in equations.items()}
        scores: list[Labeled] = []
        for equation in equations.values():
            scores += equation.scores.values()
        if not scores:
            return {row: self._per_step(array) for row, array in known.items()}

        free = self.form.free
        n = len(equations)
        size = self._size
        lead = [l for l in union([*known.values(), *scores]) if l not in ("T", "S", *free)]
        shape = [size[l] for l in lead]
        unknowns = self.steps * n

        # The unknowns of one step are next to each other.
        right_sides = []
        for array in known.values():
            right_side = array.full((*lead, "T", *free), size)
            right_sides.append(right_side.reshape(*shape, self.steps, -1))
        block_rows = []
        for equation in equations.values():
            blocks = []
            for u in equations:
                blocks.append(equation.scores.get(u, zero).full((*lead, "T", "S"), size))
            block_rows.append(jnp.stack(blocks, -1))
        matrix = jnp.stack(block_rows, -3).reshape(*shape, unknowns, unknowns)
        right = jnp.stack(right_sides, -2).reshape(*shape, unknowns, -1)
        x = unit_lower_solve(-matrix, right, self.factors.precision, self.saved)

        x = x.reshape(*shape, self.steps, n, *(size[l] for l in free))
        x = jnp.moveaxis(x, len(shape) + 1, 0)
        return {row: Labeled(x[i], (*lead, "T", *free)) for i, row in enumerate(equations)}

    def _readout_values(self, v: Var, value: AffineSum, rows: dict[Row, Labeled]) -> Array:
        """Returns the values of a variable where S was read."""
        forms = self.form.forms
        one = self.factors.value(Term(None))
        parts = []
        for term in value.terms:
            part = self.factors.product(term.factors, term.sign)
            if term.operand:
                part = times([part, rows[term.operand]])
            parts.append(part or one)
        labels = ("T", *(l for l in forms.resolved(value.labels) if l is not None))
        array = plus(parts).full((*labels, *forms.resolved(value.sums)), self._size)
        shape = (self.steps, *(1 if l is None else n for l, n in zip(value.labels, v.aval.shape)))
        array = jnp.sum(array, range(len(labels), array.ndim)).reshape(shape)
        return jnp.broadcast_to(array, (self.steps, *v.aval.shape)).astype(v.aval.dtype)
