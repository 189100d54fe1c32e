"""One affine carry in a chunk of C steps, as a few products of matrices.

The rows of a chunk solve `(I - N) R = E + (a * W(t, start)) . S_0`, where `N[t, s] = sum_k a_t W(t, s) p_s` for s < t. Then
all reads of S, and S after the chunk, are products.

Shapes: T time, C steps of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jrnn.jaxprs import Var
from jrnn.loops.chunks.decay import MIXED, Decay, Mixing, decay_of, mixing_of, sums
from jrnn.loops.chunks.labeled import Factors, Label, Labeled, dot, plus, times, union
from jrnn.loops.chunks.recognize import Affine, rows_of
from jrnn.loops.chunks.solve import Kept, unit_lower_solve
from jrnn.loops.chunks.terms import Factor, Row, Term, Value


@dataclass(frozen=True)
class Read:
    """What a row of each step is: `known + sum over u of scores[u] . u`, where u are the rows to solve for, [T, S]."""

    known: Labeled | None
    scores: dict[Row, Labeled]


@dataclass(frozen=True)
class Chunk:
    """Computes the reads of one carry S in a chunk, and S after it.

    Several carries that read each other are one with one more axis.

    Attributes:
        form: the affine form of the step.
        factors: evaluates its factors at the C steps.
        steps: C.
        valid: [C] booleans, False for steps after the end, which change nothing; None if there are no such steps.
        keep: keeps values for the reverse pass.
    """

    form: Affine
    factors: Factors
    steps: int
    valid: Any
    keep: Kept

    def run(self, states: Sequence[Any]) -> tuple[dict[Var, Any], list[Any]]:
        """Returns the values of the cuts, [C, ...], and the new states."""
        form, precision, of = self.form, self.factors.precision, self.form.forms.states
        axes = tuple(l for l in form.forms.axes if l is not None)
        shape = [form.forms.size[l] for l in axes]
        start = Labeled(states[0].reshape(shape), axes)
        decay: Decay | Mixing
        if len(of) > 1:
            start = Labeled(jnp.stack([s.reshape(shape) for s in states]), (MIXED[0], *axes))
            decay, columns, factor = mixing_of(self._mixed_decay(), self.k, precision, self.keep), None, None
        else:
            factor, along = self._decays()
            decay = decay_of(factor, self.steps, self.k, precision, self.keep)
            columns = None if along is None else decay_of(along, self.steps, form.columns[-1], precision, self.keep)
            factor = factor if along is None else along if factor is None else times([factor, along])
        known = [
            (self._writer(inside, 1, t.into), self._product(t, outside))
            for t, inside, outside in map(self._apart, form.known)
        ]
        vectors: dict[Row, Labeled] = {}  # of the rows that are written to S
        for term in form.updates:
            vector = self._writer(term.factors, term.sign, term.into)
            vectors[term.of] = plus([vectors[term.of], vector]) if term.of in vectors else vector
        added = []  # matrices, with what is left of them before each step and after the chunk
        for matrix, scale in form.matrices:
            often = self._masked(self._timed(self.factors.sum([scale]) or self._one()))
            added.append((self.factors.sum([matrix]), *sums(factor, often)))
        wrote = [(decay.writer(v), value.renamed("T", "S")) for v, value in known]
        writes = {row: decay.writer(v) for row, v in vectors.items()}

        reads: dict[Row, Read] = {}
        for row in rows_of([*form.updates, *(t for v in form.cuts.values() for t in v.terms)]):
            parts, scores = [], {}
            whole = [t for t in row.terms if t.of in of]
            for inside, outside in self._readers(whole, columns is not None):
                vector = self._timed(inside)
                found = [self._read(decay.from_start(vector)[0], start, decay.from_start(vector)[1])]
                found = found if columns is None else [times([found[0], columns.pre])]
                found += [self._read(vector, matrix, left) for matrix, left, _ in added]
                reader = decay.reader(vector)
                found += [self._times(decay.scores(reader, w, self.keep), value, columns) for w, value in wrote]
                parts += found if outside is None else [times([outside, a]) for a in found]
                scores = {row: decay.scores(reader, w, self.keep) for row, w in writes.items()}
            for term in row.terms:
                if term.of is None:
                    parts.append(self.factors.product(term.factors, term.sign) or self._one())
                elif isinstance(term.of, Row):
                    scale = self.factors.product(term.factors, term.sign)
                    assert term.of in reads, "a row is read before it is computed: the system would not be triangular"
                    here = Read(None, {term.of: self._eye}) if term.of in vectors else reads[term.of]
                    times_scale = (lambda x, scale=scale: x) if scale is None else (lambda x, s=scale: times([x, s]))
                    parts += [times_scale(here.known)] if here.known is not None else []
                    for u, m in here.scores.items():
                        scores[u] = plus([scores[u], times_scale(m)]) if u in scores else times_scale(m)
            reads[row] = Read(plus(parts) if parts else None, scores)

        solved = self._solved({row: read for row, read in reads.items() if row in vectors})
        rows = dict(solved)
        for row in rows_of([t for v in form.cuts.values() for t in v.terms]):
            if row not in rows:
                read = reads[row]
                parts = [] if read.known is None else [read.known]
                rows[row] = plus([*parts, *(self._times(m, rows[u].renamed("T", "S")) for u, m in read.scores.items())])
        new = []
        for vector, value in [*known, *((v, solved[row]) for row, v in vectors.items())]:
            vector, value = decay.to_end(vector), value if columns is None else times([value, columns.suf])
            new.append(dot(vector, value, [l for l in start.labels if l in vector.labels + value.labels], precision))
        if form.decay:
            new.append(decay.after(start if columns is None else columns.after(start)))
        new += [times([m, left]) for m, _, left in added]
        after = plus(new).full(start.labels, self._size).reshape(-1, *states[0].shape)
        return {v: self._cut(v, value, rows) for v, value in form.cuts.items()}, list(after)

    def _read(self, reader: Labeled, matrix: Labeled, decay: Labeled | None) -> Labeled:
        """Reads a matrix at each step, times a decay, which may have K."""
        inside = decay is not None and self.k in decay.labels
        reader = times([reader, decay]) if inside else reader
        out = [l for l in union([reader, matrix], ("T", *self.form.free)) if l not in (self.k, MIXED[0])]
        made = dot(reader, matrix, out, self.factors.precision)
        return made if inside or decay is None else times([made, decay])

    def _readers(self, terms: Sequence[Term], apart: bool) -> list[tuple[Labeled, Labeled | None]]:
        """Returns the vectors that read S at each step, with what scales the results.

        The scale is None, or, if `apart`, the product of the factors without K.
        """
        if not terms:
            return []
        if not apart:
            of = self.form.forms.states
            groups = {i: [t for t in terms if t.of is v] for i, v in enumerate(of)}
            every = [
                self._placed(self._timed(self._with_k(self.factors.sum(ts) or self._one())), i, MIXED[0])
                for i, ts in groups.items()
                if ts
            ]
            return [(plus(every), None)]
        same: dict[tuple[Factor, ...], list[Labeled]] = {}
        for term, inside, outside in map(self._apart, terms):
            same.setdefault(tuple(inside), []).append(self.factors.product(outside, term.sign) or self._one())
        return [(self._with_k(self.factors.product(fs) or self._one()), plus(scales)) for fs, scales in same.items()]

    def _times(self, scores: Labeled, values: Labeled, columns: Decay | None = None) -> Labeled:
        """Returns what the values written at steps S are to a reader at steps T."""
        out = [l for l in union([scores, values], ("T", *self.form.free)) if l != "S"]
        if columns is not None:
            return columns.spread(scores, self._full_columns(values), out)
        return dot(scores, values, out, self.factors.precision)

    @property
    def k(self) -> int:
        k = self.form.forms.contracted
        assert k is not None
        return k

    @property
    def _size(self) -> dict[Label, int]:
        return {**self.form.forms.size, "T": self.steps, "S": self.steps, MIXED[0]: len(self.form.positions)}

    @property
    def _eye(self) -> Labeled:
        return Labeled(jnp.eye(self.steps, dtype=self.factors.dtype), ("T", "S"))

    def _one(self) -> Labeled:
        return Labeled(jnp.ones((), self.factors.dtype), ())

    def _timed(self, a: Labeled) -> Labeled:
        """The array with the label T."""
        if "T" in a.labels:
            return a
        return Labeled(jnp.broadcast_to(a.array, (self.steps, *a.array.shape)), ("T", *a.labels))

    def _with_k(self, a: Labeled) -> Labeled:
        return (
            a
            if self.k in a.labels
            else times([a, Labeled(jnp.ones(self._size[self.k], self.factors.dtype), (self.k,))])
        )

    def _masked(self, a: Labeled, where: Any = 0) -> Labeled:
        """The array with a value that changes nothing at steps after the end."""
        if self.valid is None:
            return a
        valid = self.valid.reshape([-1 if l == "T" else 1 for l in a.labels])
        return a.map(lambda x: jnp.where(valid, x, where))

    def _full_columns(self, values: Labeled) -> Labeled:
        """The values with the last label of the columns."""
        last = self.form.columns[-1]
        one = Labeled(jnp.ones(self._size[last], self.factors.dtype), (last,))
        return values if last in values.labels else times([values, one])

    def _decays(self) -> tuple[Labeled | None, Labeled | None]:
        """The decay of each step that is the same along the columns, and the one that is not; None if it is 1."""
        terms, columns = self.form.decay, set(self.form.columns)
        if len(terms) == 1 and columns:
            parts: list[list[Factor]] = [[], []]
            for factor in terms[0].factors:
                parts[bool(columns & self.form.forms.labels_of(factor))].append(factor)
            rows, along = ([replace(terms[0], factors=tuple(fs), sign=s)] for fs, s in zip(parts, (terms[0].sign, 1)))
            return self._decay(rows), self._decay(along)
        return (None, self._decay(terms)) if columns else (self._decay(terms), None)

    def _decay(self, terms: Sequence[Term]) -> Labeled | None:
        if len(terms) == 1 and not terms[0].factors and terms[0].sign == 1:
            return None
        factor = self.factors.sum(terms) or Labeled(jnp.zeros((), self.factors.dtype), ())
        return self._masked(self._timed(factor), 1)

    def _mixed_decay(self) -> Labeled:
        """The matrices of decays from states to states at each step."""
        of, made = (
            self.form.forms.states,
            [Labeled(jnp.zeros([len(self.form.positions)] * 2, self.factors.dtype), MIXED)],
        )
        for term in self.form.decay:
            here = self._placed(self.factors.product(term.factors, term.sign) or self._one(), term.into, MIXED[0])
            made.append(self._placed(here, of.index(term.of), MIXED[1]))
        factor = self._timed(plus(made))
        if self.valid is None:
            return factor
        labels = ("T", *(l for l in factor.labels if l not in ("T", *MIXED)), *MIXED)
        valid = self.valid.reshape(-1, *[1] * (len(labels) - 1))
        return Labeled(jnp.where(valid, factor.along(labels), jnp.eye(len(of), dtype=self.factors.dtype)), labels)

    def _apart(self, term: Term) -> tuple[Term, list[Factor], list[Factor]]:
        """Returns a term, and its factors with K and without."""
        inside = [f for f in term.factors if self.k in self.form.forms.labels_of(f)]
        return term, inside, [f for f in term.factors if f not in inside]

    def _product(self, term: Term, factors: Sequence[Factor]) -> Labeled:
        return self._timed(self.factors.product(factors, term.sign) or self._one())

    def _writer(self, factors: Sequence[Factor], sign: int, into: int) -> Labeled:
        made = self._masked(self._timed(self._with_k(self.factors.product(factors, sign) or self._one())))
        return self._placed(made, into, MIXED[0])

    def _placed(self, a: Labeled, index: int, label: Label) -> Labeled:
        """The array at an index of a new axis over the states, and zeros at the others; the array if there is one state."""
        count = len(self.form.positions)
        if count == 1:
            return a
        zeros = jnp.zeros_like(a.array)
        return Labeled(jnp.stack([a.array if i == index else zeros for i in range(count)], -1), (*a.labels, label))

    def _beside(self, row: Row, rows: dict[Row, Labeled]) -> list[Labeled]:
        """Returns the terms of a row without S."""
        found = []
        for term in row.terms:
            if term.of is None or isinstance(term.of, Row):
                parts = [self.factors.product(term.factors, term.sign), rows[term.of] if term.of else None]
                found.append(times([p for p in parts if p is not None] or [self._one()]))
        return found

    def _solved(self, reads: dict[Row, Read]) -> dict[Row, Labeled]:
        """Solves `u = known_u + sum over w of scores[w] . w` for all rows u, [T, ...].

        Args:
            reads: what each row is, after the rows of the same step that it reads: then the system is triangular.
        """
        free, n, steps = self.form.free, len(reads), self.steps
        zero = Labeled(jnp.zeros((), self.factors.dtype), ())
        right = {row: read.known or zero for row, read in reads.items()}
        if not any(read.scores for read in reads.values()):
            return {row: self._timed(r) for row, r in right.items()}
        every = [*right.values(), *(m for read in reads.values() for m in read.scores.values())]
        lead = [l for l in union(every) if l not in ("T", "S", *free)]
        shape, size = [self._size[l] for l in lead], self._size
        b = [r.full((*lead, "T", *free), size).reshape(*shape, steps, -1) for r in right.values()]
        a = [[read.scores.get(u, zero).full((*lead, "T", "S"), size) for u in reads] for read in reads.values()]
        if n == 1:
            x = unit_lower_solve(-a[0][0], b[0], self.factors.precision, self.keep)[..., None, :]
        else:
            matrix = jnp.stack([jnp.stack(of, -1) for of in a], -3).reshape(*shape, steps * n, steps * n)
            x = unit_lower_solve(
                -matrix, jnp.stack(b, -2).reshape(*shape, steps * n, -1), self.factors.precision, self.keep
            ).reshape(*shape, steps, n, -1)
        sizes = [size[l] for l in free]
        return {
            row: Labeled(x[..., i, :].reshape(*shape, steps, *sizes), (*lead, "T", *free))
            for i, row in enumerate(reads)
        }

    def _cut(self, v: Var, value: Value, rows: dict[Row, Labeled]) -> Any:
        """Returns the values of a variable where S was read."""
        kept = ("T", *(l for l in self.form.forms.found(value.labels) if l is not None))
        sums = self.form.forms.found(value.sums)
        shape = (self.steps, *(1 if l is None else n for l, n in zip(value.labels, v.aval.shape)))
        array = plus(self._beside(Row(value.terms), rows)).full((*kept, *sums), self._size)
        array = jnp.sum(array, range(len(kept), array.ndim)).reshape(shape)
        return jnp.broadcast_to(array, (self.steps, *v.aval.shape)).astype(v.aval.dtype)
