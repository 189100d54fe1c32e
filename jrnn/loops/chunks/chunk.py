"""One affine carry in a chunk of C steps, as a few products of matrices.

The rows of a chunk solve `(I - N) R = E + (a * W(t, start)) . S_0`, where `N[t, s] = sum_k a_t W(t, s) p_s` for s < t. Then
all reads of S, and S after the chunk, are products.

Shapes: T time, C steps of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from jrnn.jaxprs import Var
from jrnn.loops.affine.matrix import AffineForm, rows_of
from jrnn.loops.affine.terms import AffineSum, Factor, Row, Term
from jrnn.loops.chunks.decay import MIXED, Decay, decay_of, sums
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
        at_once: all chunks are prepared at once.
    """

    form: AffineForm
    factors: Factors
    steps: int
    valid: Any
    saved: SavedForBackward
    at_once: bool

    def run(self, states: Sequence[Any]) -> tuple[dict[Var, Any], list[Any]]:
        """Returns the values of the readouts, [C, ...], and the new states."""
        form, shape = self.form, states[0].shape
        axes = tuple(l for l in form.forms.axes if l is not None)
        start = Labeled(jnp.stack(states), (MIXED[0], *axes)) if self._several else Labeled(states[0], axes)
        start = Labeled(start.array.reshape([self._size[l] for l in start.labels]), start.labels)
        decays = self._decays()
        self.saved.growth += [decays.rows.largest, decays.columns.largest]
        written = Writes(
            [(self._writer(inside, 1, t.into), self._timed(value)) for t, inside, value in self._apart(form.known)]
        )
        for term in form.updates:
            vector = self._writer(term.factors, term.sign, term.into)
            written.vectors[term.of] = plus([written.vectors.get(term.of), vector])
        for matrix, scale in form.matrices:
            scaled = self._masked(self._timed(self.factors.value(scale)))
            written.matrices.append((self.factors.value(matrix), *sums(decays.both, scaled)))

        reads = self._reads(start, decays, written)
        solved = self._solved({row: read for row, read in reads.items() if row in written.vectors})
        rows = dict(solved)
        for row in rows_of([t for v in form.readouts.values() for t in v.terms]):
            if row not in rows:
                read = reads[row]
                parts = [self._times(m, rows[u].renamed("T", "S")) for u, m in read.scores.items()]
                rows[row] = plus([read.known, *parts])
        new = []
        for vector, value in [*written.known, *((v, solved[row]) for row, v in written.vectors.items())]:
            vector, value = decays.rows.to_end(vector), decays.columns.to_end(value)
            out = [l for l in start.labels if l in vector.labels + value.labels]
            new.append(dot(vector, value, out, self.factors.precision))
        if form.decay:
            new.append(decays.rows.after(decays.columns.after(start)))
        new += [times([m, remaining]) for m, _, remaining in written.matrices]
        after = plus(new).full(start.labels, self._size).reshape(-1, *shape)
        return {v: self._readout(v, value, rows) for v, value in form.readouts.items()}, list(after)

    def _reads(self, start: Labeled, decays: Decays, written: Writes) -> dict[Row, RowEquation]:
        """Returns what the rows of each step are."""
        form, decay = self.form, decays.rows
        wrote = [(decay.writer(v), value.renamed("T", "S")) for v, value in written.known]
        writes = {row: decay.writer(v) for row, v in written.vectors.items()}
        reads: dict[Row, RowEquation] = {}
        for row in form.rows:
            parts, scores = [], {}
            for inside, outside in self._readers([t for t in row.terms if t.of in form.forms.states]):
                vector = self._timed(inside)
                reader, scale = decay.from_start(vector)
                seen = [times([self._read(reader, start, scale), decays.columns.prefix])]
                seen += [self._read(vector, matrix, remaining) for matrix, remaining, _ in written.matrices]
                reader = decay.reader(vector)
                seen += [self._times(decay.scores(reader, w, self.saved), v, decays.columns) for w, v in wrote]
                parts += [times([outside, a]) for a in seen]
                scores = {row: decay.scores(reader, w, self.saved) for row, w in writes.items()}
            for term in row.terms:
                if term.of is None:
                    parts.append(self.factors.value(term))
                elif isinstance(term.of, Row):
                    scale = self.factors.product(term.factors, term.sign)
                    assert term.of in reads, "a row is read before it is computed: the system would not be triangular"
                    here = RowEquation(None, {term.of: self._eye}) if term.of in written.vectors else reads[term.of]
                    parts += [times([here.known, scale])] if here.known is not None else []
                    for u, m in here.scores.items():
                        scores[u] = plus([scores.get(u), times([m, scale])])
            reads[row] = RowEquation(plus(parts), scores)
        return reads

    def _read(self, reader: Labeled, matrix: Labeled, decay: Labeled | None) -> Labeled:
        """Reads a matrix at each step, times a decay, which may have K."""
        inside = decay is not None and self.k in decay.labels
        reader = times([reader, decay]) if inside else reader
        out = [l for l in union([reader, matrix], ("T", *self.form.free)) if l not in (self.k, MIXED[0])]
        product = dot(reader, matrix, out, self.factors.precision)
        return product if inside else times([product, decay])

    def _readers(self, terms: Sequence[Term]) -> list[tuple[Labeled, Labeled | None]]:
        """Returns the vectors that read S at each step, with what scales the results.

        The scale is None, or, if decays differ along the columns, the product of the factors without K.
        """
        if not terms:
            return []
        if not self.form.columns:
            of, groups = self.form.forms.states, {}
            for term in terms:
                groups.setdefault(of.index(term.of), []).append(self.factors.value(term))
            every = [
                self._placed(self._timed(self._with(plus(groups[i]), self.k)), i, MIXED[0]) for i in sorted(groups)
            ]
            return [(plus(every), None)]
        same: dict[tuple[Factor, ...], list[Labeled]] = {}
        for _, inside, outside in self._apart(terms):
            same.setdefault(tuple(inside), []).append(outside)
        return [(self._with(self.factors.product(fs), self.k), plus(scales)) for fs, scales in same.items()]

    def _times(self, scores: Labeled, values: Labeled, columns: Decay | None = None) -> Labeled:
        """Returns what the values written at steps S are to a reader at steps T."""
        out = [l for l in union([scores, values], ("T", *self.form.free)) if l != "S"]
        if columns is None or columns.levels is None:
            return dot(scores, values, out, self.factors.precision)
        return columns.spread(scores, self._with(values, self.form.columns[-1]), out)

    @property
    def k(self) -> int:
        k = self.form.forms.contracted
        assert k is not None
        return k

    @property
    def _several(self) -> bool:
        return len(self.form.positions) > 1

    @property
    def _size(self) -> dict[Label, int]:
        return {**self.form.forms.size, "T": self.steps, "S": self.steps, MIXED[0]: len(self.form.positions)}

    @property
    def _eye(self) -> Labeled:
        return Labeled(jnp.eye(self.steps, dtype=self.factors.dtype), ("T", "S"))

    def _timed(self, a: Labeled) -> Labeled:
        """The array with the label T."""
        if "T" in a.labels:
            return a
        return Labeled(jnp.broadcast_to(a.array, (self.steps, *a.array.shape)), ("T", *a.labels))

    def _with(self, a: Labeled | None, label: Label) -> Labeled:
        """The array with a label."""
        ones = Labeled(jnp.ones(self._size[label], self.factors.dtype), (label,))
        return a if a is not None and label in a.labels else times([a, ones])

    def _masked(self, a: Labeled, otherwise: Labeled | None = None) -> Labeled:
        """The array with a value that changes nothing at steps after the end, by default 0."""
        if self.valid is None:
            return a
        where = otherwise.along(a.labels) if otherwise is not None else 0
        return a.map(lambda x: jnp.where(Labeled(self.valid, ("T",)).along(a.labels), x, where))

    def _decays(self) -> Decays:
        terms, labels = self.form.decay, set(self.form.columns)
        rows, columns = (terms, []) if not labels else ([], terms)
        if len(terms) == 1 and labels:
            (term,), parts = terms, ([], [])
            for factor in term.factors:
                parts[bool(labels & self.form.forms.labels_of(factor))].append(factor)
            rows, columns = ([replace(term, factors=tuple(fs), sign=s)] for fs, s in zip(parts, (term.sign, 1)))
        of_rows, along = self._decay(rows) if rows or not labels else None, self._decay(columns) if labels else None
        settings = self.factors.precision, self.saved, self.at_once
        last = self.form.columns[-1] if labels else self.k
        return Decays(
            decay_of(of_rows, self.steps, self.k, *settings),
            decay_of(along, self.steps, last, *settings),
            times([of_rows, along]),
        )

    def _decay(self, terms: Sequence[Term]) -> Labeled | None:
        """The decay of each step, or None if it is 1; for several states, matrices from states to states."""
        if not self._several and len(terms) == 1 and not terms[0].factors and terms[0].sign == 1:
            return None
        one, zero = (Labeled(jnp.asarray(x, self.factors.dtype), ()) for x in (1, 0))
        if self._several:
            one = Labeled(jnp.eye(len(self.form.positions), dtype=self.factors.dtype), MIXED)
            zero = one.map(jnp.zeros_like)
        of = self.form.forms.states
        parts = [self._placed(self.factors.value(t), t.into, MIXED[0]) for t in terms]
        parts = [self._placed(part, of.index(t.of), MIXED[1]) for part, t in zip(parts, terms)]
        return self._masked(self._timed(plus(parts if parts and not self._several else [zero, *parts])), one)

    def _apart(self, terms: Iterable[Term]) -> Iterator[tuple[Term, list[Factor], Labeled]]:
        """Yields terms, their factors with K, and the product of the others."""
        for term in terms:
            inside = [f for f in term.factors if self.k in self.form.forms.labels_of(f)]
            outside = tuple(f for f in term.factors if f not in inside)
            yield term, inside, self.factors.value(replace(term, factors=outside))

    def _writer(self, factors: Sequence[Factor], sign: int, into: int) -> Labeled:
        vector = self._masked(self._timed(self._with(self.factors.product(factors, sign), self.k)))
        return self._placed(vector, into, MIXED[0])

    def _placed(self, a: Labeled, index: int, label: Label) -> Labeled:
        """The array at an index of a new axis over the states, and zeros at the others; the array if there is one state."""
        if not self._several:
            return a
        every = [a.array if i == index else jnp.zeros_like(a.array) for i in range(len(self.form.positions))]
        return Labeled(jnp.stack(every, -1), (*a.labels, label))

    def _solved(self, reads: dict[Row, RowEquation]) -> dict[Row, Labeled]:
        """Solves `u = known_u + sum over w of scores[w] . w` for all rows u, [T, ...].

        Args:
            reads: what each row is, after the rows of the same step that it reads: then the system is triangular.
        """
        free, n, steps = self.form.free, len(reads), self.steps
        zero = Labeled(jnp.zeros((), self.factors.dtype), ())
        known = {row: read.known or zero for row, read in reads.items()}
        if not any(read.scores for read in reads.values()):
            return {row: self._timed(r) for row, r in known.items()}
        every = [*known.values(), *(m for read in reads.values() for m in read.scores.values())]
        lead = [l for l in union(every) if l not in ("T", "S", *free)]
        shape, size = [self._size[l] for l in lead], self._size
        b = [r.full((*lead, "T", *free), size).reshape(*shape, steps, -1) for r in known.values()]
        a = [[read.scores.get(u, zero).full((*lead, "T", "S"), size) for u in reads] for read in reads.values()]
        matrix = jnp.stack([jnp.stack(of, -1) for of in a], -3).reshape(*shape, steps * n, steps * n)
        right = jnp.stack(b, -2).reshape(*shape, steps * n, -1)
        x = unit_lower_solve(-matrix, right, self.factors.precision, self.saved)
        x = jnp.moveaxis(x.reshape(*shape, steps, n, *(size[l] for l in free)), len(shape) + 1, 0)
        return {row: Labeled(x[i], (*lead, "T", *free)) for i, row in enumerate(reads)}

    def _readout(self, v: Var, value: AffineSum, rows: dict[Row, Labeled]) -> Any:
        """Returns the values of a variable where S was read."""
        labels = ("T", *(l for l in self.form.forms.resolved(value.labels) if l is not None))
        sums = self.form.forms.resolved(value.sums)
        shape = (self.steps, *(1 if l is None else n for l, n in zip(value.labels, v.aval.shape)))
        scales = (self.factors.product(t.factors, t.sign) for t in value.terms)
        one = self.factors.value(Term(None))
        parts = [times([scale, rows[t.of]]) if t.of else scale or one for t, scale in zip(value.terms, scales)]
        array = plus(parts).full((*labels, *sums), self._size)
        array = jnp.sum(array, range(len(labels), array.ndim)).reshape(shape)
        return jnp.broadcast_to(array, (self.steps, *v.aval.shape)).astype(v.aval.dtype)
