"""Matrix-valued carries: the affine form of a carry S [K, V] (`terms.py`), or of several that read each other as wholes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.loops.affine.carries import DECAYS_ALONE, ON_INPUTS
from jrnn.loops.affine.equations import Forms
from jrnn.loops.affine.terms import AffineSum, Row, Term, rows_of
from jrnn.loops.ir import CARRY, Loop, Unsupported

_MOST = 3  # carries that read each other as wholes


@dataclass(frozen=True)
class AffineForm:
    """A carry S with `S' = decay * S + sum of outer products`, in chunks; or several that read each other as wholes.

    Attributes:
        positions: of the carries.
        forms: the forms of the step.
        decay: terms of S; none if S is overwritten.
        updates: terms of rows, p times row.
        known: terms without the carry, p times r.
        matrices: terms without the carry, a matrix that is the same at every step times a factor without K; an initial state
            to which `resets` go back is one.
        solved: the rows that updates read.
        readouts: the variables where S is read, and their forms.
        free: the labels of V.
        columns: the labels of V along which the decay differs.
    """

    positions: tuple[int, ...]
    forms: Forms
    decay: tuple[Term, ...]
    updates: tuple[Term, ...]
    known: tuple[Term, ...]
    matrices: tuple[tuple[Term, Term], ...]
    solved: tuple[Row, ...]
    readouts: Mapping[Var, AffineSum]
    free: tuple[int, ...]
    columns: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        return math.prod(self.forms.size[l] for l in self.free)

    @property
    def rows(self) -> dict[Row, None]:
        """The rows that updates and readouts read, each after those that it reads."""
        return rows_of([*self.updates, *(t for v in self.readouts.values() for t in v.terms)])

    @property
    def terms(self) -> list[Term]:
        """All terms, those of rows included."""
        readouts = (t for v in self.readouts.values() for t in v.terms)
        terms = [
            *self.decay,
            *self.updates,
            *self.known,
            *(t for pair in self.matrices for t in pair),
            *readouts,
        ]
        return [*terms, *(t for row in rows_of(terms) for t in row.terms)]

    @property
    def precision(self) -> Any:
        """The strongest precision of the step's contractions of S."""
        order = [None, *jax.lax.Precision]
        flat = [
            p
            for pair in self.forms.products
            for p in (pair if isinstance(pair, tuple) else (pair,))
        ]
        known = [p if p in order else jax.lax.Precision.HIGHEST for p in flat]
        return max(known, key=order.index, default=None)

    @property
    def decays_along_k(self) -> bool:
        return self.forms.contracted in self.forms.labels_in(self.decay)

    def description(self, names: Sequence[str] = ()) -> str:
        """Returns a phrase for `explain`.

        Args:
            names: what the user calls the carries, or nothing.
        """
        none = all(
            not t.factors and t.operand is self.forms.states[t.new_state] for t in self.decay
        )
        kind = "no transition" if not self.decay else "no decay" if none else "decay"
        along = ["row"] * self.decays_along_k + ["column"] * bool(self.columns)
        kind += f" per {' and '.join(along)}" if along else ""
        n = len(self.solved)
        ranks = f", {n} transition{'s' * (n > 1)} of rank one" if n else ""
        shape = ",".join(map(str, self.forms.states[0].aval.shape))
        several = f" x {len(self.positions)}" * (len(self.positions) > 1)
        return f"{' and '.join(names) or 'S'}[{shape}]{several} with {kind}{ranks}"


def matrix_form(
    loop: Loop,
    positions: tuple[int, ...],
    known: Collection[Var],
    outs: Sequence[Any],
    constants: dict[Var, Any],
) -> AffineForm:
    """Returns the affine form of a carry, or of several that read each other.

    Args:
        loop: the loop.
        positions: of the carries.
        known: the variables that depend on no carry but those that are computed before.
        outs: what is computed after the rows are known, next to the carry.
        constants: values of variables that are known now.

    Raises:
        Unsupported: with the reason, and the operation.
    """
    states = tuple(loop.carry[i] for i in positions)
    if len({(v.aval.shape, v.aval.dtype) for v in states}) > 1 or len(states) > _MOST:
        raise Unsupported(f"{len(states)} carries read each other", remedy=DECAYS_ALONE)
    if states[0].aval.dtype not in (jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16):
        raise Unsupported(f"{CARRY} is {states[0].aval.dtype}")
    forms = Forms(states, loop.eqns, known, constants)
    forms.walk()
    terms = _terms_of(loop, forms, positions)
    if forms.contracted is None:
        raise Unsupported(
            f"{CARRY} is never contracted",
            remedy="chunks pay where each step multiplies it by a vector",
        )
    k = forms.contracted
    axes = {l for l in forms.axes if l is not None}
    decay = tuple(t for t in terms if t.operand in states)
    updates = tuple(t for t in terms if isinstance(t.operand, Row))
    outer_products, matrices = _matrices(loop, forms, axes, [t for t in terms if t.operand is None])
    scales = [scale for _, scale in matrices]
    if k in forms.labels_in(scales):
        raise Unsupported(f"a matrix that is added to {CARRY} is scaled along K")
    if len(states) > 1 and (matrices or k in forms.labels_in(decay)):
        raise Unsupported(
            "carries that read each other decay along K, or are reset", remedy=DECAYS_ALONE
        )
    readouts = _readouts(loop, forms, outs)
    rows = rows_of([*updates, *(t for v in readouts.values() for t in v.terms)])

    def along_k(terms: Iterable[Term]) -> list[set[int]]:
        labels = (forms.labels_of(f) for t in terms for f in t.factors)
        return [each for each in labels if k in each]

    read = [t for row in rows for t in row.terms if t.operand is not None]
    writers = set().union(*along_k([*outer_products, *scales]))
    free = forms.free_of(forms.labels_in([*decay, *updates, *read]) | writers)
    columns = ()
    if (
        not free and not updates and len(axes) > 1 and len(states) == 1
    ):  # then decays may differ along V
        free = forms.free_of(writers.union(*along_k(read)))
        columns = tuple(l for l in free if l in forms.labels_in(decay))
        if any(labels & {*columns} for labels in along_k(decay)) or (
            len(decay) > 1 and along_k(decay)
        ):
            raise Unsupported("transitions differ along every axis")
    if any(
        forms.labels_in(of) - axes for of in (updates, *(row.terms for row in rows_of(updates)))
    ):
        raise Unsupported(
            f"a dense matrix times {CARRY}, or several rows at once",
            remedy="a decay, or I - k k^T, can be applied in chunks",
        )
    for factor in (f for t in [*terms, *(t for row in rows for t in row.terms)] for f in t.factors):
        if len(forms.labels_of(factor)) < sum(l is not None for l in factor.labels):
            raise Unsupported(f"a matrix has one axis of {CARRY} twice", remedy=ON_INPUTS)
    solved = tuple(dict.fromkeys(t.operand for t in updates))
    return AffineForm(
        positions, forms, decay, updates, outer_products, matrices, solved, readouts, free, columns
    )


def _terms_of(loop: Loop, forms: Forms, positions: tuple[int, ...]) -> list[Term]:
    """Returns the terms of the new carries."""
    terms: list[Term] = []
    for i, new in enumerate(loop.carry_out[j] for j in positions):
        if not jaxprs.is_in(new, forms.values):
            why = f"the new {CARRY} depends on what was read from {CARRY} by an operation that is not affine"
            raise Unsupported(why, _breaking(loop, forms, new), remedy=ON_INPUTS)
        terms += [
            replace(t, new_state=i)
            for t in forms.sum(AffineSum(forms.axes, ()), forms.values[new]).terms
        ]
    return terms


def _matrices(
    loop: Loop, forms: Forms, axes: set[int], terms: Sequence[Term]
) -> tuple[tuple[Term, ...], tuple[tuple[Term, Term], ...]]:
    """Returns terms without the carry, apart from those that have a matrix that is the same at every step."""
    varying = jaxprs.depends(loop.eqns, (*loop.carry, *loop.xs))
    outer_products = []
    matrices = []
    for term in terms:
        constants = [
            f
            for f in term.factors
            if forms.labels_of(f) >= axes and not jaxprs.is_in(f.operand, varying)
        ]
        if len(axes) > 1 and constants:
            scale = replace(term, factors=tuple(f for f in term.factors if f is not constants[0]))
            matrices.append((Term(None, (constants[0],)), scale))
        else:
            outer_products.append(term)
    return tuple(outer_products), tuple(matrices)


def _readouts(loop: Loop, forms: Forms, outs: Sequence[Any]) -> dict[Var, AffineSum]:
    """Returns the variables where S is read on the way to `outs`; raises Unsupported if S is read as a whole."""
    matrices = {v for v, value in forms.values.items() if forms.is_matrix(value)}
    read_after, used = jaxprs.needed(loop.eqns, outs, {*forms.known, *forms.readouts})
    whole = [e for e in read_after if not matrices.isdisjoint(jaxprs.inputs(e))]
    if whole or not matrices.isdisjoint(jaxprs.variables(outs)):
        raise Unsupported(
            f"{CARRY} is an output of every step",
            whole[0] if whole else None,
            remedy="return what is read from it, such as its product with a query",
        )
    return {v: forms.values[v] for v in used if v in forms.readouts}


def _breaking(loop: Loop, forms: Forms, new: Any) -> Any:
    """Returns the first operation on the way to the new S that has no form."""
    path, _ = jaxprs.needed(loop.eqns, [new], {*forms.values, *forms.known})
    return next((e for e in path if jaxprs.any_in(jaxprs.inputs(e), forms.values)), None)


def is_evaluable(eqn: Eqn) -> bool:
    """Returns True if an equation may be evaluated for all steps of a chunk at once, and differentiated again."""
    if eqn.primitive.name == "custom_jvp_call":
        inner = [e for body in jaxprs.sub_jaxprs(eqn) for e in jaxprs.all_equations(body)]
        return all(is_evaluable(e) or e.primitive.name in jaxprs.CALLS for e in inner)
    return (
        primitives.is_movable(eqn) or eqn.primitive.name == "pvary"
    )  # of a constant, in `jax.shard_map`
