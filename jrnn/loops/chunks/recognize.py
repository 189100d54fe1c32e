"""Which carries of a loop run in chunks, and in which order the carries are computed.

Carries that read each other are a group. A group is a stage: one affine matrix carry in chunks, a carry whose new value
needs no carry as a shift, or a small loop of its own. Stages that need no other stage's result run together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.loops.chunks.forms import Forms
from jrnn.loops.chunks.terms import Factor, NotAffine, Row, Term, Value
from jrnn.loops.loop import Loop

_MOST = 3  # carries that read each other as wholes


@dataclass(frozen=True)
class Affine:
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
        cuts: the variables where S is read, and their forms.
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
    cuts: Mapping[Var, Value]
    free: tuple[int, ...]
    columns: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        return math.prod(self.forms.size[l] for l in self.free)

    @property
    def terms(self) -> list[Term]:
        """All terms, those of rows included."""
        found = [
            *self.decay,
            *self.updates,
            *self.known,
            *(t for pair in self.matrices for t in pair),
            *(t for v in self.cuts.values() for t in v.terms),
        ]
        rows = rows_of(found)
        return [*found, *(t for row in rows for t in row.terms)]

    @property
    def precision(self) -> Any:
        """The strongest precision of the step's contractions of S."""
        order = [None, *jax.lax.Precision]
        flat = [p for given in self.forms.products for p in (given if isinstance(given, tuple) else (given,))]
        known = [p if p in order else jax.lax.Precision.HIGHEST for p in flat]
        return max(known, key=order.index, default=None)

    @property
    def decays_along_k(self) -> bool:
        return any(self.forms.contracted in self.forms.labels_of(f) for t in self.decay for f in t.factors)

    def __str__(self) -> str:
        none = all(not t.factors and t.of is self.forms.states[t.into] for t in self.decay)
        kind = "no decay" if none else "decay per row" if self.decays_along_k else "decay"
        kind = "no transition" if not self.decay else kind
        kind = (
            kind.removesuffix(" per row")
            + " per row and column" * self.decays_along_k
            + " per column" * (not self.decays_along_k)
            if self.columns
            else kind
        )
        n = len(self.solved)
        ranks = f", {n} transition{'s' * (n > 1)} of rank one" if n else ""
        shape = ",".join(map(str, self.forms.states[0].aval.shape))
        several = f" x {len(self.positions)}" * (len(self.positions) > 1)
        return f"S[{shape}]{several} with {kind}{ranks}"


def affine(
    loop: Loop, positions: tuple[int, ...], known: Collection[Var], outs: Sequence[Any], constants: dict[Var, Any]
) -> Affine:
    """Returns the affine form of a carry, or of several that read each other.

    Args:
        loop: the loop.
        positions: of the carries.
        known: the variables that depend on no carry but those that are computed before.
        outs: what is wanted after the rows are known, besides the carry.
        constants: values of variables that are known now.

    Raises:
        NotAffine: with the reason, and the operation.
    """
    states = tuple(loop.carry[i] for i in positions)
    if len({(v.aval.shape, v.aval.dtype) for v in states}) > 1 or len(states) > _MOST:
        raise NotAffine(f"{len(states)} carries read each other")
    if states[0].aval.dtype not in (jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16):
        raise NotAffine(f"S is {states[0].aval.dtype}")
    forms = Forms(states, loop.eqns, known, constants)
    forms.walk()
    terms: list[Term] = []
    for into, new in enumerate(loop.carry_out[i] for i in positions):
        if not jaxprs.is_in(new, forms.values):
            raise NotAffine(
                "the new S depends on what was read from S by an operation that is not affine",
                _breaking(loop, forms, new),
            )
        found = forms._sum(Value(forms.axes, ()), forms.values[new])
        terms += [replace(t, into=into) for t in found.terms]
    if forms.contracted is None:
        raise NotAffine("S is never contracted")
    k = forms.contracted
    decay = tuple(t for t in terms if t.of in states)
    updates = tuple(t for t in terms if isinstance(t.of, Row))
    axes = {l for l in forms.axes if l is not None}
    varying = jaxprs.depends(loop.eqns, (*loop.carry, *loop.xs))

    def matrix_in(term: Term) -> Factor | None:
        return next((f for f in term.factors if forms.labels_of(f) >= axes and not jaxprs.is_in(f.of, varying)), None)

    alone = [t for t in terms if t.of is None]
    matrices = tuple(
        (Term(None, (f,)), replace(t, factors=tuple(g for g in t.factors if g is not f)))
        for t in alone
        if len(axes) > 1 and (f := matrix_in(t)) is not None
    )
    if any(k in forms.labels_of(f) for _, scale in matrices for f in scale.factors):
        raise NotAffine("a matrix that is added to S is scaled along K")
    if len(states) > 1 and (matrices or any(k in forms.labels_of(f) for t in decay for f in t.factors)):
        raise NotAffine("carries that read each other decay along K, or are reset")
    free_terms = tuple(t for t in alone if len(axes) == 1 or matrix_in(t) is None)
    solved = tuple(dict.fromkeys(t.of for t in updates))

    late, used = jaxprs.needed(loop.eqns, outs, {*known, *forms.cuts})
    whole = [e for e in late if any(v in forms.values and forms.is_matrix(forms.values[v]) for v in jaxprs.inputs(e))]
    if whole or any(a in forms.values and forms.is_matrix(forms.values[a]) for a in jaxprs.variables(outs)):
        raise NotAffine("S is an output of every step", whole[0] if whole else None)
    cuts = {v: forms.values[v] for v in used if v in forms.cuts}
    rows = rows_of([*updates, *(t for v in cuts.values() for t in v.terms)])

    below = rows_of(updates)
    read = [t for row in rows for t in row.terms if t.of is not None]
    writers = [f for t in (*free_terms, *(scale for _, scale in matrices)) for f in t.factors]
    writers = [f for f in writers if k in forms.labels_of(f)]
    free, columns = forms.free_of(*(f for t in (*decay, *updates, *read) for f in t.factors), *writers), ()
    if not free and not updates and len(axes) > 1 and len(states) == 1:  # then decays may differ along V
        free = forms.free_of(*writers, *(f for t in read for f in t.factors if k in forms.labels_of(f)))
        columns = tuple(l for l in free if any(l in forms.labels_of(f) for t in decay for f in t.factors))
        along_k = [forms.labels_of(f) for t in decay for f in t.factors if k in forms.labels_of(f)]
        if any(labels & {*columns} for labels in along_k) or (len(decay) > 1 and along_k):
            raise NotAffine("transitions differ along every axis")
    for row in rows:
        own = {l for t in row.terms for f in t.factors for l in forms.labels_of(f)}
        if row in below and own - axes:
            raise NotAffine("a dense matrix times S, or several rows at once")
    if any(l not in axes for t in updates for f in t.factors for l in forms.labels_of(f)):
        raise NotAffine("a dense matrix times S, or several rows at once")
    for term in [*terms, *(t for row in rows for t in row.terms)]:
        for f in term.factors:
            labels = [l for l in forms.found(f.labels) if l is not None]
            if len(set(labels)) < len(labels):
                raise NotAffine("a matrix has one axis of S twice")
    return Affine(positions, forms, decay, updates, free_terms, matrices, solved, cuts, free, columns)


def _breaking(loop: Loop, forms: Forms, new: Any) -> Any:
    """Returns the first operation on the way to the new S that has no form."""
    way, _ = jaxprs.needed(loop.eqns, [new], {*forms.values, *forms.known})
    return next((e for e in way if any(v in forms.values for v in jaxprs.inputs(e))), None)


def rows_of(terms: Sequence[Term], found: dict[Row, None] | None = None) -> dict[Row, None]:
    """Returns the rows in terms, each after those that it reads."""
    found = {} if found is None else found
    for term in terms:
        if isinstance(term.of, Row) and term.of not in found:
            rows_of(term.of.terms, found)
            found[term.of] = None
    return found


_REMEDIES = {  # by a part of the reason
    "output of every step": "return what is read from it, such as its product with a query",
    "not affine": "apply it to inputs, or to a carry of its own",
    "what was read from S": "apply it to inputs, or to a carry of its own",
    "never contracted": "chunks pay where each step multiplies it by a vector",
    "nothing is written": "let the step close over a matrix that never changes",
    "stays in the loop": "compute it before the loop, and pass its values as xs",
    "read each other": "update them by decays and outer products of inputs alone",
    " of S": "apply it to inputs, or to a carry of its own",
    "dense matrix times S": "a decay, or I - k k^T, can be applied in chunks",
}


def why(error: NotAffine, names: Sequence[str] = ()) -> str:
    """Returns the reason with the names of the carries, the place in the user's code, and what to do about it."""
    where = f" at {source_info_util.summarize(error.eqn.source_info)}" if error.eqn is not None else ""
    remedy = next((f"; {text}" for part, text in _REMEDIES.items() if part in str(error)), "")
    return f"{named(str(error), names)}{where}{remedy}"


def named(text: str, names: Sequence[str]) -> str:
    """Returns a text about the carry S, or about several, with the user's names.

    >>> named("S is never contracted", ["carry['memory']"])
    "carry['memory'] is never contracted"
    """
    both = " and ".join(names)
    found = re.sub(r"\bS\b", lambda _: both, text) if names else text
    return found if found != text or not names else f"{both}: {text}"


def is_evaluable(eqn: Eqn) -> bool:
    """Returns True if an equation may be evaluated for all steps of a chunk at once, and differentiated again."""
    name = eqn.primitive.name
    inner = [e for body in jaxprs.sub_jaxprs(eqn) for e in jaxprs.all_equations(body)]
    if name == "custom_jvp_call":
        return all(primitives.is_movable(e) or e.primitive.name in jaxprs.CALLS for e in inner)
    return primitives.is_movable(eqn)
