"""The chunk program: C steps of a loop with affine matrix carries as a few products of matrices.

The rows of a chunk solve `(I - N) R = E + (a * W(t, start)) . S_0`, where `N[t, s] = sum_k a_t W(t, s) p_s` for s < t. Then
all reads of S, and S after the chunk, are products. Between chunks only S is carried. For the reverse pass only S at the
chunk boundaries is stored, besides the inputs: the tangent of a chunk is behind a checkpoint.

Products such as `q . k` are no values of the recurrence. If one of them overflows, or an input is NaN or infinite, the
results of a chunk are not all finite. Then the chunk runs step by step, so that every result is one of the recurrence.

Shapes: T time, C steps of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jrnn.loops import jaxprs
from jrnn.loops.chunks.decay import decay_of, sums
from jrnn.loops.chunks.forms import Factor, Row, Term
from jrnn.loops.chunks.labeled import Factors, Label, Labeled, dot, plus, times, union, variables
from jrnn.loops.chunks.recognize import Affine, rows_of
from jrnn.loops.chunks.solve import Kept, unit_lower_solve
from jrnn.loops.jaxprs import Atom, Env, Var


def over_time(eqns: Sequence[Any], outs: Sequence[Atom], env: Env, steps: Env) -> None:
    """Evaluates equations for all steps. Adds results to `env`, or to `steps` [T, ...] if they differ from step to step."""
    needed, _ = jaxprs.needed(eqns, outs, {*env, *steps})
    for eqn in needed:
        moving = [jaxprs.is_in(a, steps) for a in eqn.invars]
        if not any(moving):
            jaxprs.evaluate([eqn], env)
            continue
        values = [steps[a] if m else jaxprs.read(env, a) for a, m in zip(eqn.invars, moving)]
        with jaxprs.in_scope(eqn):
            results = jax.vmap(functools.partial(jaxprs.bind, eqn), [0 if m else None for m in moving])(*values)
        steps.update(zip(eqn.outvars, results))


# One carry in one chunk -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """What a row of each step is: `known + sum over u of scores[u] . u`, where u are the rows to solve for, [T, S]."""

    known: Labeled | None
    scores: dict[Row, Labeled]


@dataclass(frozen=True)
class Chunk:
    """Computes the reads of one carry S in a chunk, and S after it.

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

    def run(self, state: Any) -> tuple[dict[Var, Any], Any]:
        """Returns the values of the cuts, [C, ...], and the new state."""
        form, precision, state_var = self.form, self.factors.precision, self.form.forms.state
        axes = tuple(l for l in form.forms.axes if l is not None)
        start = Labeled(state.reshape([form.forms.size[l] for l in axes]), axes)
        factor = self._decay()
        decay = decay_of(factor, self.steps, self.k, precision)
        known = [
            (self._writer(inside), self._product(t, outside)) for t, inside, outside in map(self._apart, form.known)
        ]
        vectors: dict[Row, Labeled] = {}  # of the rows that are written to S
        for term in form.updates:
            vector = self._writer(term.factors, term.sign)
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
            whole = [t for t in row.terms if t.of is state_var]
            if whole:
                vector = self._timed(self._with_k(self.factors.sum(whole) or self._one()))
                parts.append(self._read(vector, start, decay.pre))
                parts += [self._read(vector, matrix, left) for matrix, left, _ in added]
                reader = decay.reader(vector)
                parts += [self._times(decay.scores(reader, w), value) for w, value in wrote]
                scores = {row: decay.scores(reader, w) for row, w in writes.items()}
            for term in row.terms:
                if term.of is None:
                    parts.append(self.factors.product(term.factors, term.sign) or self._one())
                elif isinstance(term.of, Row):
                    scale = self.factors.product(term.factors, term.sign)
                    here = Read(None, {term.of: self._eye}) if term.of in vectors else reads[term.of]
                    times_scale = (lambda x, scale=scale: x) if scale is None else (lambda x, s=scale: times([x, s]))
                    parts += [times_scale(here.known)] if here.known is not None else []
                    for u, m in here.scores.items():
                        scores[u] = plus([scores[u], times_scale(m)]) if u in scores else times_scale(m)
            reads[row] = Read(plus(parts) if parts else None, scores)

        solved = self._solved({row: reads[row] for row in vectors})
        rows = dict(solved)
        for row in rows_of([t for v in form.cuts.values() for t in v.terms]):
            if row not in rows:
                read = reads[row]
                parts = [] if read.known is None else [read.known]
                rows[row] = plus([*parts, *(self._times(m, rows[u].renamed("T", "S")) for u, m in read.scores.items())])
        new = []
        for vector, value in [*known, *((v, solved[row]) for row, v in vectors.items())]:
            vector = times([vector, decay.suf]) if decay.suf is not None else vector
            new.append(dot(vector, value, [l for l in axes if l in vector.labels + value.labels], precision))
        if form.decay:
            new.append(times([start, decay.total]) if decay.total is not None else start)
        new += [times([m, left]) for m, _, left in added]
        after = plus(new).full(axes, self._size).reshape(state.shape)
        return {v: self._cut(v, value.labels, value.terms, rows) for v, value in form.cuts.items()}, after

    def _read(self, reader: Labeled, matrix: Labeled, decay: Labeled | None) -> Labeled:
        """Reads a matrix at each step, times a decay, which may have K."""
        inside = decay is not None and self.k in decay.labels
        reader = times([reader, decay]) if inside else reader
        out = [l for l in union([reader, matrix], ("T", *self.form.free)) if l != self.k]
        made = dot(reader, matrix, out, self.factors.precision)
        return made if inside or decay is None else times([made, decay])

    def _times(self, scores: Labeled, values: Labeled) -> Labeled:
        """Returns what the values written at steps S are to a reader at steps T."""
        out = [l for l in union([scores, values], ("T", *self.form.free)) if l != "S"]
        return dot(scores, values, out, self.factors.precision)

    @property
    def k(self) -> int:
        k = self.form.forms.contracted
        assert k is not None
        return k

    @property
    def _size(self) -> dict[Label, int]:
        return {**self.form.forms.size, "T": self.steps, "S": self.steps}

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

    def _decay(self) -> Labeled | None:
        """The decay of each step, or None if it is 1."""
        terms = self.form.decay
        if len(terms) == 1 and not terms[0].factors and terms[0].sign == 1:
            return None
        factor = self.factors.sum(terms) or Labeled(jnp.zeros((), self.factors.dtype), ())
        return self._masked(self._timed(factor), 1)

    def _apart(self, term: Term) -> tuple[Term, list[Factor], list[Factor]]:
        """Returns a term, and its factors with K and without."""
        inside = [f for f in term.factors if self.k in self.form.forms.labels_of(f)]
        return term, inside, [f for f in term.factors if f not in inside]

    def _product(self, term: Term, factors: Sequence[Factor]) -> Labeled:
        return self._timed(self.factors.product(factors, term.sign) or self._one())

    def _writer(self, factors: Sequence[Factor], sign: int = 1) -> Labeled:
        return self._masked(self._timed(self._with_k(self.factors.product(factors, sign) or self._one())))

    def _beside(self, row: Row, rows: dict[Row, Labeled]) -> list[Labeled]:
        """Returns the terms of a row without S."""
        found = []
        for term in row.terms:
            if term.of is None or isinstance(term.of, Row):
                parts = [self.factors.product(term.factors, term.sign), rows[term.of] if term.of else None]
                found.append(times([p for p in parts if p is not None] or [self._one()]))
        return found

    def _solved(self, reads: dict[Row, Read]) -> dict[Row, Labeled]:
        """Solves `u = known_u + sum over w of scores[w] . w` for all rows u, [T, ...]."""
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

    def _cut(self, v: Var, labels: Sequence[int | None], terms: Sequence[Term], rows: dict[Row, Labeled]) -> Any:
        """Returns the values of a variable where S was read."""
        value = plus(self._beside(Row(tuple(terms)), rows))
        kept = ("T", *(l for l in self.form.forms.found(labels) if l is not None))
        shape = (self.steps, *(1 if l is None else n for l, n in zip(labels, v.aval.shape)))
        array = value.full(kept, self._size).reshape(shape)
        return jnp.broadcast_to(array, (self.steps, *v.aval.shape)).astype(v.aval.dtype)


# A chunk of all carries -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Body:
    """The steps of one chunk, for carries that run in chunks together.

    Attributes:
        forms: of the carries.
        eqns: the step's equations.
        consts, xs: the variables that are the same at every step, and those that differ.
        carry, carry_out: the carries, and their new values.
        outs: what is wanted at each step.
        steps: C.
    """

    forms: tuple[Affine, ...]
    eqns: tuple[Any, ...]
    consts: tuple[Var, ...]
    xs: tuple[Var, ...]
    carry: tuple[Var, ...]
    carry_out: tuple[Atom, ...]
    outs: tuple[Atom, ...]
    steps: int

    def run(self, states: Sequence[Any], consts: Sequence[Any], xs: Sequence[Any], valid: Any) -> list[Any]:
        """Returns the new states and the outputs [C, ...]. If they are not all finite, they are those of `by_steps`.

        Args:
            states, consts, xs: values of the variables.
            valid: [C] booleans, or None if all steps are valid.
        """

        def together(args: Any, kept: Sequence[Any] | None = None) -> tuple[list[Any], list[Any]]:
            keep = Kept(kept)
            return self.in_products(*args, keep), keep.values

        def one_by_one(args: Any, kept: Sequence[Any] | None = None) -> tuple[list[Any], None]:
            return self.by_steps(*args), None

        def checked(args: Any) -> tuple[list[Any], list[Any], Any]:
            made, kept = together(args)
            good = all_finite([jax.lax.stop_gradient(x) for x in made if jnp.issubdtype(x.dtype, jnp.inexact)])
            return jax.lax.cond(good, lambda made, _: made, lambda _, args: one_by_one(args)[0], made, args), kept, good

        @jax.custom_jvp
        def run(*args: Any) -> list[Any]:
            return checked(tree.unflatten(args))[0]

        def rule(args: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            made, kept, good = checked(tree.unflatten(args))
            moves = [
                not isinstance(t, SymbolicZero) and jnp.issubdtype(a.dtype, jnp.inexact) for a, t in zip(args, tangents)
            ]
            smooth = [jnp.issubdtype(m.dtype, jnp.inexact) for m in made]

            def unpacked(args: Sequence[Any], moving: Sequence[Any]) -> tuple[Any, Any]:
                left = iter(moving)
                found = [next(left) if m else _no_tangent(a) for a, m in zip(args, moves)]
                return tree.unflatten(args), tree.unflatten(found)

            def of_products(args: Sequence[Any], kept: Sequence[Any], moving: Sequence[Any]) -> list[Any]:
                made = jax.jvp(
                    lambda args: together(args, kept)[0], [tree.unflatten(args)], [unpacked(args, moving)[1]]
                )[1]
                return [t for t, s in zip(made, smooth) if s]

            def of_steps(args: Sequence[Any], _: Any, moving: Sequence[Any]) -> list[Any]:
                return [t for t, s in zip(self.tangents_by_steps(*unpacked(args, moving)), smooth) if s]

            given = [t for t, m in zip(tangents, moves) if m]
            branches = (jax.checkpoint(of, prevent_cse=False) for of in (of_products, of_steps))
            found = iter(jax.lax.cond(good, *branches, list(args), kept, given))
            zeros = (SymbolicZero(jax.typeof(m).to_tangent_aval()) for m in made)
            return made, [next(found) if s else zero for s, zero in zip(smooth, zeros)]

        run.defjvp(rule, symbolic_zeros=True)
        flat, tree = jax.tree.flatten((list(states), list(consts), list(xs), valid))
        return run(*flat)

    def in_products(
        self, states: Sequence[Any], consts: Sequence[Any], xs: Sequence[Any], valid: Any, keep: Kept
    ) -> list[Any]:
        env, steps = dict(zip(self.consts, consts)), dict(zip(self.xs, xs))
        over_time(self.eqns, [v for form in self.forms for v in variables(form.terms)], env, steps)
        new, cuts = [], {}
        for form, state in zip(self.forms, states):
            forms = form.forms
            factors = Factors(env, steps, forms.find, state.dtype, forms.size[forms.contracted], form.precision)
            found, after = Chunk(form, factors, self.steps, valid, keep).run(state)
            cuts.update(found)
            new.append(after)
        return [*new, *self._outs(env, {**steps, **cuts}, self.steps)]

    def _outs(self, env: Env, steps: Env, count: int) -> list[Any]:
        over_time(self.eqns, self.outs, env, steps)

        def out(atom: Atom) -> Any:
            if jaxprs.is_in(atom, steps):
                return steps[atom]
            value = jaxprs.value(env, atom)
            return jnp.broadcast_to(value, (count, *value.shape))

        return list(map(out, self.outs))

    def by_steps(self, states: Sequence[Any], consts: Sequence[Any], xs: Sequence[Any], valid: Any) -> list[Any]:
        states, outs = jax.lax.scan(lambda s, x: self._step(s, consts, *x), list(states), (list(xs), valid), self.steps)
        return [*states, *outs]

    def _step(
        self, states: Sequence[Any], consts: Sequence[Any], xs: Sequence[Any], here: Any
    ) -> tuple[Any, list[Any]]:
        old = [s.astype(v.aval.dtype) for s, v in zip(states, self.carry)]
        env = dict(zip((*self.consts, *self.carry, *self.xs), (*consts, *old, *xs)))
        found = jaxprs.evaluate(self.eqns, env)
        new = [jaxprs.value(found, a).astype(s.dtype) for a, s in zip(self.carry_out, states)]
        new = new if here is None else [jnp.where(here, a, s) for a, s in zip(new, states)]
        return new, [jaxprs.value(found, a) for a in self.outs]

    def tangents_by_steps(self, args: Any, tangents: Any) -> list[Any]:
        """Returns the tangents of `by_steps`. No state is stored: each step computes those before it again."""
        first, consts, xs, valid = args
        moved, moved_consts, moved_xs, _ = tangents
        number = jnp.arange(self.steps)

        def state_before(t: Any) -> Any:
            def step(states: Any, given: Any) -> Any:
                u, x, here = given
                return self._step(states, consts, x, u < t if here is None else here & (u < t))[0], None

            return jax.lax.scan(step, first, (number, xs, valid))[0]

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def step(moved: Any, given: Any) -> Any:
            t, x, here, moved_x = given
            at = (state_before(t), consts, x)
            return jax.jvp(lambda *at: self._step(*at, here), at, (moved, moved_consts, moved_x))[1]

        moved, outs = jax.lax.scan(step, moved, (number, xs, valid, moved_xs))
        return [*moved, *outs]


def _no_tangent(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


@jax.custom_batching.custom_vmap
def all_finite(arrays: Sequence[Any]) -> Any:
    """Returns True if all elements of all arrays are finite."""
    return functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(a)) for a in arrays])


@all_finite.def_vmap
def _(size: int, batched: Any, arrays: Sequence[Any]) -> tuple[Any, bool]:
    return all_finite(arrays), False  # one condition for the whole batch: `vmap` of a condition runs both branches
