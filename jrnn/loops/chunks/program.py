"""The chunk program: C steps of a loop with affine matrix carries as a few products of matrices.

The rows of a chunk solve `(I - N) R = E + (a * W(t, start)) . S_0` with `N[t, s] = sum_k a_t W(t, s) p_s` below the diagonal;
then all reads of S, and S after the chunk, are products. Between chunks only S is carried. For the reverse pass only S at the
chunk boundaries is stored, besides the inputs: the tangent of a chunk is behind a checkpoint.

Products such as `q . k` are no values of the recurrence. If one of them overflows, or an input is NaN or infinite, the results of
a chunk are not all finite. Then the chunk runs step by step instead, so that every result is one of the recurrence.

Shapes: T time, C steps of a chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jrnn.loops import jaxprs
from jrnn.loops.chunks.decay import decay_of
from jrnn.loops.chunks.forms import Row, Term
from jrnn.loops.chunks.labeled import Factors, Label, Labeled, dot, plus, stacked, times, union, variables
from jrnn.loops.chunks.recognize import Affine, rows_of
from jrnn.loops.chunks.solve import unit_lower_solve
from jrnn.loops.jaxprs import Atom, Env, Var
from jrnn.loops.recompute import in_chunks


def over_time(eqns: Sequence[Any], outs: Sequence[Atom], env: Env, steps: Env) -> None:
    """Evaluates equations for all steps. Adds results to `env` if they are the same at each step, else to `steps` [T, ...]."""
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
class Chunk:
    """Computes the reads of one carry S in a chunk, and S after it.

    Attributes:
        form: the affine form of the step.
        factors: evaluates its factors at the C steps.
        valid: [C] booleans: False for steps after the end, which change nothing.
    """

    form: Affine
    factors: Factors
    valid: Any

    def run(self, state: Any) -> tuple[dict[Var, Any], Any]:
        """Returns the values of the cuts, [C, ...], and the new state."""
        form, precision, k = self.form, self.factors.precision, self.k
        axes = tuple(l for l in form.forms.axes if l is not None)
        start = Labeled(state.reshape([form.forms.size[l] for l in axes]), axes)
        decay = decay_of(self._decay(), len(self.valid), k, precision)

        # Writers: the known terms, then the rows to solve.
        solved, n = form.solved, len(form.solved)
        pairs = [self._split([t]) for t in form.known]
        rests = [self._timed(rest or self._one()) for _, rest in pairs]
        pairs = [(vector, None) for vector, _ in pairs]
        pairs += [self._split([t for t in form.updates if t.of is row]) for row in solved]
        writers = self._stack([times([v, Labeled(self.valid.astype(v.array.dtype), ("T",))]) for v, _ in pairs], "J")
        scales = self._scales(pairs, "J")
        writers, scales = writers.renamed("T", "S"), scales and scales.renamed("T", "S")
        known = len(rests)
        values = self._stack(rests, "J").renamed("T", "S") if rests else None

        rows: dict[Row, Labeled] = {}
        for group in self._classes():
            pairs = [self._split([t for t in row.terms if t.of is form.forms.state]) for row in group]
            readers = self._stack([self._timed(v) for v, _ in pairs], "I")
            mine = self._scales(pairs, "I")
            scores = times([x for x in (decay.scores(readers, writers), mine, scales) if x is not None])
            per_row = decay.pre is not None and k in decay.pre.labels
            readers = times([readers, decay.pre]) if per_row else readers
            out = union([readers, start], ("T", "I", *form.free))
            first = dot(readers, start, [l for l in out if l != k], precision)
            first = times([x for x in (first, None if per_row else decay.pre, mine) if x is not None])
            if n and group[:n] == list(solved):
                values = self._solved(_at(first, "I", 0, n), _at(scores, "I", 0, n), values, known)
                rows.update((row, _one_of(values, "J", known + i).renamed("S", "T")) for i, row in enumerate(solved))
            assert values is not None
            read = union([scores, values], ("T", "I", *form.free))
            made = dot(scores, values, [l for l in read if l not in ("S", "J")], precision)
            for i, row in enumerate(group):
                if row not in rows:
                    rows[row] = plus([_one_of(first, "I", i), _one_of(made, "I", i), *self._beside(row, rows)])
        assert values is not None
        end = [x for x in (decay.suf and decay.suf.renamed("T", "S"), scales) if x is not None]
        if end and any(k in x.labels for x in end):
            writers = times([writers, *end])
        elif end:
            values = times([values, *end])
        new = [dot(writers, values, [l for l in axes if l in writers.labels + values.labels], precision)]
        if form.decay:
            new.append(times([start, decay.total]) if decay.total is not None else start)
        after = plus(new).full(axes, self._size).reshape(state.shape)
        return {v: self._cut(v, value.labels, value.terms, rows) for v, value in form.cuts.items()}, after

    @property
    def k(self) -> int:
        k = self.form.forms.contracted
        assert k is not None
        return k

    @property
    def _size(self) -> dict[Label, int]:
        steps = len(self.valid)
        return {**self.form.forms.size, "T": steps, "S": steps}

    def _one(self) -> Labeled:
        return Labeled(jnp.ones((), self.factors.dtype), ())

    def _timed(self, a: Labeled) -> Labeled:
        """The array with the label T."""
        if "T" in a.labels:
            return a
        return Labeled(jnp.broadcast_to(a.array, (len(self.valid), *a.array.shape)), ("T", *a.labels))

    def _decay(self) -> Labeled | None:
        """The decay of each step, or None if it is 1."""
        terms = self.form.decay
        if len(terms) == 1 and not terms[0].factors and terms[0].sign == 1:
            return None
        factor = self.factors.sum(terms) or Labeled(jnp.zeros((), self.factors.dtype), ())
        factor = self._timed(factor)
        valid = self.valid.reshape([-1 if l == "T" else 1 for l in factor.labels])
        return factor.map(lambda d: jnp.where(valid, d, 1))

    def _split(self, terms: Sequence[Term]) -> tuple[Labeled, Labeled | None]:
        """Returns the factors of a sum of terms as a vector with K, and a scale without K, or None for 1."""
        make, ones = self.factors, Labeled(jnp.ones(self._size[self.k], self.factors.dtype), (self.k,))
        if not terms:
            return ones.map(jnp.zeros_like), None
        if len(terms) > 1:
            return times([make.sum(terms) or self._one(), ones]), None
        inside = [f for f in terms[0].factors if self.k in self.form.forms.labels_of(f)]
        outside = [f for f in terms[0].factors if f not in inside]
        return make.product(inside) or ones, make.product(outside, terms[0].sign)

    def _stack(self, arrays: Sequence[Labeled], label: Label) -> Labeled:
        return stacked(arrays, label, self._size)

    def _scales(self, pairs: Sequence[tuple[Labeled, Labeled | None]], label: Label) -> Labeled | None:
        if all(scale is None for _, scale in pairs):
            return None
        return self._stack([self._timed(scale or self._one()) for _, scale in pairs], label)

    def _classes(self) -> list[list[Row]]:
        """Groups rows whose readers have the same axes besides those of S; the rows to solve come first."""
        form, every = self.form, dict.fromkeys(self.form.solved)
        every.update(dict.fromkeys(rows_of([t for v in form.cuts.values() for t in v.terms])))
        found: dict[frozenset[int], list[Row]] = {}
        for row in every:
            read = [t for t in row.terms if t.of is form.forms.state]
            labels = {l for t in read for f in t.factors for l in form.forms.labels_of(f)}
            found.setdefault(frozenset(labels.difference(form.forms.axes)), []).append(row)
        return sorted(found.values(), key=lambda rows: not any(r in form.solved for r in rows))

    def _beside(self, row: Row, rows: dict[Row, Labeled]) -> list[Labeled]:
        """Returns the terms of a row without S."""
        found = []
        for term in row.terms:
            if term.of is None or isinstance(term.of, Row):
                parts = [self.factors.product(term.factors, term.sign), rows[term.of] if term.of else None]
                found.append(times([p for p in parts if p is not None] or [self._one()]))
        return found

    def _solved(self, first: Labeled, scores: Labeled, values: Labeled | None, known: int) -> Labeled:
        """Solves for the rows, and returns the values of all writers, with the labels S and J.

        Args:
            first: what the rows read from S before the chunk.
            scores: what they read of each writer's value.
            values: the values of the known writers.
            known: their number.
        """
        solved, free, size = self.form.solved, self.form.free, self._size
        n, steps = len(solved), len(self.valid)
        index = {row: i for i, row in enumerate(solved)}
        parts = [first]
        if values is not None:
            out = union([scores, values], ("T", "I", *free))
            parts.append(
                dot(_at(scores, "J", 0, known), values, [l for l in out if l not in ("S", "J")], self.factors.precision)
            )
        alone = [[t for t in row.terms if t.of is None] for row in solved]
        if any(alone):
            zero = Labeled(jnp.zeros((), self.factors.dtype), ())
            parts.append(self._stack([self._timed(self.factors.sum(ts) or zero) for ts in alone], "I"))
        right = plus(parts)
        matrix = _at(scores, "J", known, known + n)
        eye = np.eye(steps, dtype=self.factors.dtype)
        for row in solved:
            for other in {t.of: None for t in row.terms if isinstance(t.of, Row)}:
                m = self.factors.sum([t for t in row.terms if t.of is other])
                place = np.zeros((n, n), self.factors.dtype)
                place[index[row], index[other]] = 1
                matrix = plus([matrix, times([m, Labeled(eye, ("T", "S")), Labeled(place, ("I", "J"))])])
        lead = [l for l in union([matrix, right]) if l not in ("T", "I", "S", "J", *free)]
        shape = [size[l] for l in lead]
        size = {**size, "I": n, "J": n}
        a = matrix.full((*lead, "T", "I", "S", "J"), size).reshape(*shape, steps * n, steps * n)
        b = right.full((*lead, "T", "I", *free), size).reshape(*shape, steps * n, -1)
        x = unit_lower_solve(-a, b, self.factors.precision)
        rows = Labeled(x.reshape(*shape, steps, n, *(size[l] for l in free)), (*lead, "S", "J", *free))
        if values is None:
            return rows
        labels = union([values, rows], ("S", "J", *free))
        both = [x.full(labels, {**size, "J": m}) for x, m in ((values, known), (rows, n))]
        return Labeled(jnp.concatenate(both, labels.index("J")), labels)

    def _cut(self, v: Var, labels: Sequence[int | None], terms: Sequence[Term], rows: dict[Row, Labeled]) -> Any:
        """Returns the values of a variable where S was read."""
        value = plus(self._beside(Row(tuple(terms)), rows))
        kept = ("T", *(l for l in self.form.forms.found(labels) if l is not None))
        shape = (len(self.valid), *(1 if l is None else n for l, n in zip(labels, v.aval.shape)))
        array = value.full(kept, self._size).reshape(shape)
        return jnp.broadcast_to(array, (len(self.valid), *v.aval.shape)).astype(v.aval.dtype)


def _at(a: Labeled, label: Label, start: int, end: int) -> Labeled:
    return a.map(lambda x: jax.lax.slice_in_dim(x, start, end, axis=a.labels.index(label)))


def _one_of(a: Labeled, label: Label, i: int) -> Labeled:
    axis = a.labels.index(label)
    kept = tuple(l for l in a.labels if l != label)
    return Labeled(jax.lax.index_in_dim(a.array, i, axis, keepdims=False), kept)


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
    """

    forms: tuple[Affine, ...]
    eqns: tuple[Any, ...]
    consts: tuple[Var, ...]
    xs: tuple[Var, ...]
    carry: tuple[Var, ...]
    carry_out: tuple[Atom, ...]
    outs: tuple[Atom, ...]

    def run(self, states: Sequence[Any], consts: Sequence[Any], xs: Sequence[Any], valid: Any) -> list[Any]:
        """Returns the new states and the outputs [C, ...]. If they are not all finite, they are those of `by_steps`."""
        n, sizes = len(states), (len(states), len(consts), len(xs))

        def apart(args: Sequence[Any]) -> tuple[Any, ...]:
            return args[:n], args[n : n + sizes[1]], args[n + sizes[1] : -1], args[-1]

        def together(*args: Any) -> list[Any]:
            return self.in_products(*apart(args))

        def one_by_one(*args: Any) -> list[Any]:
            return self.by_steps(*apart(args))

        def checked(args: Sequence[Any]) -> tuple[list[Any], Any]:
            made = together(*args)
            good = _all_finite([jax.lax.stop_gradient(x) for x in made if jnp.issubdtype(x.dtype, jnp.inexact)])
            return jax.lax.cond(good, lambda made, *_: made, lambda _, *args: one_by_one(*args), made, *args), good

        @jax.custom_jvp
        def run(*args: Any) -> list[Any]:
            return checked(args)[0]

        def rule(args: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            made, good = checked(args)
            moves = [
                not isinstance(t, SymbolicZero) and jnp.issubdtype(a.dtype, jnp.inexact) for a, t in zip(args, tangents)
            ]
            smooth = [jnp.issubdtype(m.dtype, jnp.inexact) for m in made]

            def tangent(fn: Callable[..., Any]) -> Callable[..., Any]:
                def of(args: Sequence[Any], moving: Sequence[Any]) -> list[Any]:
                    def some(*moving: Any) -> list[Any]:
                        left = iter(moving)
                        found = fn(*(next(left) if m else a for a, m in zip(args, moves)))
                        return [f for f, s in zip(found, smooth) if s]

                    return jax.jvp(some, [a for a, m in zip(args, moves) if m], list(moving))[1]

                return jax.checkpoint(of, prevent_cse=False)

            given = [t for t, m in zip(tangents, moves) if m]
            found = iter(jax.lax.cond(good, tangent(together), tangent(one_by_one), list(args), given))
            zeros = (SymbolicZero(jax.typeof(m).to_tangent_aval()) for m in made)
            return made, [next(found) if s else zero for s, zero in zip(smooth, zeros)]

        run.defjvp(rule, symbolic_zeros=True)
        return run(*states, *consts, *xs, valid)

    def in_products(self, states: Sequence[Any], consts: Sequence[Any], xs: Sequence[Any], valid: Any) -> list[Any]:
        env, steps = dict(zip(self.consts, consts)), dict(zip(self.xs, xs))
        over_time(self.eqns, [v for form in self.forms for v in variables(form.terms)], env, steps)
        new, cuts = [], {}
        for form, state in zip(self.forms, states):
            forms = form.forms
            factors = Factors(env, steps, forms.find, state.dtype, forms.size[forms.contracted], form.precision)
            found, after = Chunk(form, factors, valid).run(state)
            cuts.update(found)
            new.append(after)
        return [*new, *self._outs(env, {**steps, **cuts}, len(valid))]

    def _outs(self, env: Env, steps: Env, count: int) -> list[Any]:
        over_time(self.eqns, self.outs, env, steps)

        def out(atom: Atom) -> Any:
            if jaxprs.is_in(atom, steps):
                return steps[atom]
            value = jaxprs.value(env, atom)
            return jnp.broadcast_to(value, (count, *value.shape))

        return list(map(out, self.outs))

    def by_steps(self, states: Sequence[Any], consts: Sequence[Any], xs: Sequence[Any], valid: Any) -> list[Any]:
        env = dict(zip(self.consts, consts))

        def step(states: Sequence[Any], given: tuple[Any, Sequence[Any]]) -> tuple[list[Any], list[Any]]:
            here, x = given
            old = [s.astype(v.aval.dtype) for s, v in zip(states, self.carry)]
            found = jaxprs.evaluate(self.eqns, {**env, **dict(zip(self.carry, old)), **dict(zip(self.xs, x))})
            new = [jaxprs.value(found, a).astype(s.dtype) for a, s in zip(self.carry_out, states)]
            return [jnp.where(here, a, s) for a, s in zip(new, states)], [jaxprs.value(found, a) for a in self.outs]

        def some(states: Any, given: Any, length: Any) -> Any:
            return jax.lax.scan(step, states, given, length)

        count = len(valid)
        wrap = functools.partial(jax.checkpoint, prevent_cse=False)
        states, outs = in_chunks(some, list(states), (valid, list(xs)), count, math.isqrt(count), False, wrap)
        return [*states, *outs]


@jax.custom_batching.custom_vmap
def _all_finite(arrays: Sequence[Any]) -> Any:
    return functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(a)) for a in arrays])


@_all_finite.def_vmap
def _(size: int, batched: Any, arrays: Sequence[Any]) -> tuple[Any, bool]:
    return _all_finite(arrays), False  # one condition for the whole batch: `vmap` of a condition runs both branches
