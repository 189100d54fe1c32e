"""Affine forms: what a step computes from a matrix-shaped carry S, read off its equations without evaluating them.

Every axis gets a label: the axes of S are 0, 1, ..., other axes get fresh numbers, and labels are unified where values meet.
A value that depends on S is a sum of terms. A term is a product of factors, which do not depend on the carry, times S, times
a row (S contracted over its axis K), or alone. So the form does not depend on how a step is spelled: an einsum, a product
and a sum, a matrix `I - b k k^T`, a transposition and a `vmap` all lead to the same terms.

Shapes: S [batch axes, K, V] in any order.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jrnn.loops import jaxprs, primitives
from jrnn.loops.jaxprs import Atom, Var

Labels = tuple[int | None, ...]  # None: constant along this axis

_SAME = ("copy", "copy_p", "name", "reduce_precision")
_SUMS = ("add", "add_any", "sub")


class NotAffine(Exception):
    """Raised for a step that cannot run in chunks; the message is the reason, and `eqn` the operation, if there is one."""

    def __init__(self, why: str, eqn: Any = None):
        super().__init__(why)
        self.eqn = eqn


@dataclass(frozen=True, eq=False)
class Factor:
    """A value that does not depend on the carry.

    Attributes:
        of: a variable or literal; or a tuple of factors, whose product is summed over K.
        labels: the label of each axis.
        how: "value", "inverse", "where" or "unless" (a mask as a number), or "eye" (an identity matrix).
    """

    of: Any
    labels: Labels
    how: str = "value"


@dataclass(frozen=True, eq=False)
class Row:
    """A sum of terms: S times factors is summed over K; the other terms have no K."""

    terms: tuple[Term, ...]


@dataclass(frozen=True, eq=False)
class Term:
    """`sign * product(factors) * of`, where `of` is a carry, a row, or None for a known term."""

    of: Var | Row | None
    factors: tuple[Factor, ...] = ()
    sign: int = 1

    def times(self, factors: Iterable[Factor], sign: int = 1) -> Term:
        return replace(self, factors=(*self.factors, *factors), sign=self.sign * sign)


@dataclass(frozen=True)
class Value:
    """A sum of terms, and the label of each of its axes."""

    labels: Labels
    terms: tuple[Term, ...]

    def scaled(self, factors: Sequence[Factor] = (), sign: int = 1) -> Value:
        return replace(self, terms=tuple(t.times(factors, sign) for t in self.terms))


@dataclass
class Forms:
    """The forms of the values of a step that depend on one carry.

    Attributes:
        state: the carry.
        eqns: the step's equations.
        known: the variables that do not depend on carries that are still to be computed.
        size: the size of each label.
        contracted: the label of K, or None before the first contraction.
        values: the form of each variable that has one.
        cuts: the variables where a matrix is contracted to rows.
        products: the contractions of S as (precision or None, whether it was written as a sum).
    """

    state: Var
    eqns: Sequence[Any]
    known: Collection[Var]
    constants: dict[Var, Any] = field(default_factory=dict)
    size: dict[int, int] = field(default_factory=dict)
    contracted: int | None = None
    values: dict[Var, Value] = field(default_factory=dict)
    cuts: dict[Var, Any] = field(default_factory=dict)
    products: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.state.aval.shape
        self.axes: Labels = tuple(None if n == 1 else i for i, n in enumerate(shape))
        self.size.update((l, shape[l]) for l in self.axes if l is not None)
        self._numbers = itertools.count(len(shape))
        self._same: dict[int, int] = {}
        self._rows: dict[tuple[Term, ...], Row] = {}
        self._made = jaxprs.producers(self.eqns)
        self._varying = varying_axes(self.eqns)
        self.values[self.state] = Value(self.axes, (Term(self.state),))

    # Labels

    def find(self, label: int | None) -> int | None:
        while label in self._same:
            label = self._same[label]
        return label

    def found(self, labels: Iterable[int | None]) -> Labels:
        return tuple(map(self.find, labels))

    def labels_of(self, factor: Factor) -> set[int]:
        return {l for l in self.found(factor.labels) if l is not None}

    def _fresh(self, size: int) -> int:
        label = next(self._numbers)
        self.size[label] = size
        return label

    def _unified(self, a: int | None, b: int | None) -> int | None:
        a, b = self.find(a), self.find(b)
        if a is None or b is None or a == b:
            return b if a is None else a
        if a in self.axes and b in self.axes:
            raise NotAffine("two axes of S meet, as in S + S.T")
        a, b = (b, a) if b in self.axes else (a, b)
        self._same[b] = a
        return a

    def is_matrix(self, value: Value) -> bool:
        """Returns True for values that are as large as S."""
        whole = any(t.of is self.state for t in value.terms)
        return whole or (self.contracted is not None and self.contracted in self.found(value.labels))

    # Walking

    def walk(self) -> None:
        """Computes the forms of all variables. Where there is none, what follows from rows stays without a form.

        Raises:
            NotAffine: if an operation on a value as large as S has no form.
        """
        later: dict[Var, Any] = {}  # values without a form, with the operation that broke it
        for eqn in self.eqns:
            read = [v for v in jaxprs.inputs(eqn) if v in self.values]
            if not read and not any(v in later for v in jaxprs.inputs(eqn)):
                if not all(v in self.known for v in jaxprs.inputs(eqn)):
                    later.update(dict.fromkeys(eqn.outvars))
                continue
            cause = next((later[v] for v in jaxprs.inputs(eqn) if v in later), None)
            matrix = any(self.is_matrix(self.values[v]) for v in read)
            try:
                if any(v in later or v not in self.known for v in jaxprs.inputs(eqn) if v not in self.values):
                    raise NotAffine("another value that depends on the carry")
                self.values[eqn.outvars[0]] = made = self._rule(eqn)
                if matrix and not self.is_matrix(made):
                    self.cuts[eqn.outvars[0]] = eqn
            except NotAffine as why:
                if matrix and cause is not None:
                    raise NotAffine(f"{cause.primitive.name} of what was read from S", cause) from None
                if matrix:
                    raise NotAffine(f"{eqn.primitive.name} of S" + f": {why}" * bool(str(why)), eqn) from None
                later.update(dict.fromkeys(eqn.outvars, cause or (eqn if read else None)))

    def _rule(self, eqn: Any) -> Value:
        name, ins = eqn.primitive.name, eqn.invars
        out = eqn.outvars[0].aval
        forms = [self.values.get(a) if not jaxprs.is_literal(a) else None for a in ins]
        moving = [f is not None for f in forms]
        first = next(f for f in forms if f is not None)
        if len(eqn.outvars) > 1:
            raise NotAffine("")
        if name in _SAME or (name == "convert_element_type" and jnp.issubdtype(out.dtype, jnp.floating)):
            return first
        if name == "neg":
            return first.scaled(sign=-1)
        if name in _SUMS:
            sides = [f or self._known(a, first, out.ndim) for a, f in zip(ins, forms)]
            return self._sum(sides[0], sides[1].scaled(sign=-1) if name == "sub" else sides[1])
        if name == "mul" and not all(moving):
            return self._scaled(first, ins[moving.index(False)])
        if name == "div" and not moving[1]:
            return self._scaled(first, ins[1], "inverse")
        if name == "select_n" and not moving[0] and len(ins) == 3:
            sides = [f or self._known(a, first, out.ndim) for a, f in zip(ins[1:], forms[1:])]
            return self._sum(*(self._scaled(side, ins[0], how) for side, how in zip(sides, ("unless", "where"))))
        labels = _view(eqn, first.labels)
        if labels is not None:
            return replace(first, labels=labels)
        if name == "reduce_sum":
            return self._summed(eqn, first)
        if name == "dot_general" and not all(moving):
            return self._dot(eqn, first, moving.index(True))
        raise NotAffine("")

    def _sum(self, a: Value, b: Value) -> Value:
        labels = tuple(self._unified(x, y) for x, y in zip(a.labels, b.labels))
        return Value(labels, (*a.terms, *b.terms))

    def _scaled(self, value: Value, atom: Atom, how: str = "") -> Value:
        """Multiplies with a known operand, along whose axes the value may have been constant."""
        given = self._labels_beside(value, atom)
        value = self._named(value, given)
        terms = [] if how else self._terms(atom, given)
        one = len(terms) == 1 and terms[0].sign == 1
        scaled = value.scaled(terms[0].factors if one else [Factor(atom, given, how or "value")])
        labels = given or (None,) * len(value.labels)
        return replace(scaled, labels=tuple(self.find(b) if a is None else a for a, b in zip(value.labels, labels)))

    def _named(self, value: Value, labels: Iterable[int | None]) -> Value:
        """Makes a sum of rows one row, before it is spread over an axis that it does not have, as in an outer product."""
        new = {*self.found(labels)} - {None, *self.found(value.labels)}
        if not new or self.is_matrix(value) or (len(value.terms) == 1 and not value.terms[0].factors):
            return value
        return replace(value, terms=(Term(self._rows.setdefault(value.terms, Row(value.terms))),))

    # Values that do not depend on S

    def _labels_beside(self, value: Value, atom: Atom) -> Labels:
        """Labels for a known operand next to a value: the value's, and fresh ones where the value is constant."""
        if not atom.aval.shape:
            return ()
        labels = []
        for axis, (label, n) in enumerate(zip(value.labels, atom.aval.shape)):
            varies = n != 1 and axis in self._axes_of(atom)
            labels.append(None if not varies else self.find(label) if label is not None else self._fresh(n))
        return tuple(labels)

    def _axes_of(self, atom: Atom) -> Collection[int]:
        if jaxprs.is_literal(atom):
            return ()
        every = [axis for axis, n in enumerate(atom.aval.shape) if n != 1]
        return self._varying.get(atom, every)

    def _known(self, atom: Atom, beside: Value, ndim: int) -> Value:
        """The form of a known summand."""
        labels = self._labels_beside(beside, atom)
        terms = self._terms(atom, labels)
        used = {l for t in terms for f in t.factors for l in f.labels}
        return Value(tuple(l if l in used else None for l in labels) or (None,) * ndim, tuple(terms))

    def _terms(self, atom: Atom, labels: Labels) -> list[Term]:
        """Returns a known value as a sum of products of smaller values, if it is one; otherwise as one factor."""
        labels = tuple(l if axis in self._axes_of(atom) else None for axis, l in enumerate(labels))
        mine = {l for l in labels if l is not None}
        value = None if mine else constant(atom, self._made, self.constants)
        if value is not None and not value.any():
            return []
        if len(mine) < 2:
            return [Term(None, (Factor(atom, labels),))]
        if len(mine) == 2 and self._is_identity(atom, labels):
            return [Term(None, (Factor(atom, labels, "eye"),))]
        parts = self._parts(self._made.get(atom), labels)
        smaller = parts is not None and all(
            f.how == "eye" or {*f.labels} - {None} < mine for t in parts for f in t.factors
        )
        return parts if parts is not None and smaller else [Term(None, (Factor(atom, labels),))]

    def _parts(self, eqn: Any, labels: Labels) -> list[Term] | None:
        if eqn is None:
            return None
        name, ins = eqn.primitive.name, eqn.invars
        inner = _unviewed(eqn, labels)
        if inner is not None:
            return self._terms(ins[0], inner)

        def operand(atom: Atom, sign: int = 1) -> list[Term]:
            return [t.times((), sign) for t in self._terms(atom, labels if atom.aval.shape else ())]

        if name == "neg":
            return operand(ins[0], -1)
        if name in _SUMS:
            return operand(ins[0]) + operand(ins[1], -1 if name == "sub" else 1)
        if name == "mul":
            return [a.times(b.factors, b.sign) for a in operand(ins[0]) for b in operand(ins[1])]
        if name == "div":
            below = Factor(ins[1], self._where_varying(ins[1], labels), "inverse")
            return [a.times([below]) for a in operand(ins[0])]
        if name == "select_n" and len(ins) == 3:
            mask = self._where_varying(ins[0], labels)
            parts = [self._is_identity(ins[0], mask) and ("unless", "eye"), ("unless", "where")]
            hows = parts[0] or parts[1]
            return [t.times([Factor(ins[0], mask, how)]) for a, how in zip(ins[1:], hows) for t in operand(a)]
        if name == "dot_general" and not _long(eqn):
            (contracted, batches), sides = eqn.params["dimension_numbers"], []
            at = len(batches[0])
            for atom, over, batch in zip(ins, contracted, batches):
                mine: list[int | None] = [None] * atom.aval.ndim
                for i, axis in enumerate(batch):
                    mine[axis] = labels[i]
                for axis in (d for d in range(atom.aval.ndim) if d not in batch and d not in over):
                    mine[axis], at = labels[at], at + 1
                sides.append(self._terms(atom, tuple(mine)))
            return [a.times(b.factors, b.sign) for a in sides[0] for b in sides[1]]
        return None

    def _where_varying(self, atom: Atom, labels: Labels) -> Labels:
        labels = labels if atom.aval.shape else ()
        return tuple(l if axis in self._axes_of(atom) else None for axis, l in enumerate(labels))

    def _is_identity(self, atom: Atom, labels: Labels) -> bool:
        """Returns True for an identity matrix along the two labeled axes."""
        axes = [axis for axis, l in enumerate(labels) if l is not None]
        if len(axes) != 2 or len({atom.aval.shape[a] for a in axes}) > 1:
            return False
        value = constant(atom, self._made, self.constants)
        if value is None:
            return False
        matrix = value[tuple(slice(None) if a in axes else 0 for a in range(value.ndim))]
        return bool(np.array_equal(matrix, np.eye(len(matrix))))

    # Contractions

    def _contracted(self, value: Value, label: int) -> Value:
        """Sums a value over a label."""
        label = self.find(label)
        matrix = self.is_matrix(value)
        if matrix and self.contracted is None and label in self.axes:
            self.contracted = label
        if not matrix or label != self.contracted:
            raise NotAffine("a sum over a second axis of S" if matrix else "")
        terms = [t if t.of is self.state else self._folded(t) for t in value.terms]
        labels = tuple(l for l in value.labels if self.find(l) != label)
        return Value(labels, (Term(Row(tuple(terms))),))

    def _folded(self, term: Term) -> Term:
        """Sums the factors of a term that have K; S is not in it."""
        inside = tuple(f for f in term.factors if self.contracted in self.labels_of(f))
        rest = tuple(f for f in term.factors if f not in inside)
        labels = dict.fromkeys(l for f in inside for l in self.found(f.labels) if l not in (None, self.contracted))
        return replace(term, factors=(*rest, Factor(inside, tuple(labels))))

    def _summed(self, eqn: Any, value: Value) -> Value:
        axes = eqn.params["axes"]
        for axis in axes:
            if value.labels[axis] is None:
                raise NotAffine("a sum over an axis along which it is constant")
        kept = tuple(l for axis, l in enumerate(value.labels) if axis not in axes)
        for label in [value.labels[axis] for axis in axes]:
            value = self._contracted(value, label)
        self.products.append(jax.lax.Precision.HIGHEST)
        return replace(value, labels=kept)

    def _dot(self, eqn: Any, value: Value, side: int) -> Value:
        """Contracts a value with a known operand, term by term: an identity in the operand renames an axis."""
        contract, batch = eqn.params["dimension_numbers"]
        other = eqn.invars[1 - side]
        mine, labels = list(value.labels), [None] * other.aval.ndim
        for a, b in zip((*contract[side], *batch[side]), (*contract[1 - side], *batch[1 - side])):
            if mine[a] is None and other.aval.shape[b] != 1:
                if a in contract[side]:
                    raise NotAffine("a contraction over an axis along which it is constant")
                mine[a] = self._fresh(other.aval.shape[b])
            labels[b] = mine[a]
        for axis, n in enumerate(other.aval.shape):
            if axis not in contract[1 - side] and axis not in batch[1 - side] and n != 1:
                labels[axis] = self._fresh(n)
        over = [self.find(value.labels[pair[side]]) for pair in _long(eqn)]
        if len(over) > 1:
            raise NotAffine("a contraction over several axes")
        value = replace(value, labels=tuple(mine))
        made, renamed = [], []
        for part in self._terms(other, tuple(labels)):
            same = next((f for f in part.factors if f.how == "eye" and over and over[0] in self.labels_of(f)), None)
            if same is not None:
                rest = [f for f in part.factors if f is not same]
                renamed.append((*(self.labels_of(same) - {over[0]}), rest, part.sign))
            elif over:
                inside = [f for f in part.factors if over[0] in self.labels_of(f)]
                outside = [f for f in part.factors if f not in inside]
                row = self._contracted(value.scaled(inside), over[0])
                made += row.scaled(outside, part.sign).terms
            else:
                named = self._named(value, (l for f in part.factors for l in f.labels))
                made += named.scaled(part.factors, part.sign).terms
        sides = (mine, contract[side], batch[side]), (labels, contract[1 - side], batch[1 - side])
        free = [[l for axis, l in enumerate(given) if axis not in c and axis not in b] for given, c, b in sides]
        free = free if side == 0 else free[::-1]
        result = Value(tuple([mine[a] for a in batch[side]] + free[0] + free[1]), tuple(made))
        for label, rest, sign in renamed:
            self._unified(label, over[0])
            result = replace(result, terms=(*result.terms, *value.scaled(rest, sign).terms))
        self.products.append(eqn.params["precision"])
        return result


def _long(eqn: Any) -> list[tuple[int, int]]:
    """Returns the pairs of axes that a `dot_general` contracts, except those of size 1."""
    pairs = zip(*eqn.params["dimension_numbers"][0])
    return [(a, b) for a, b in pairs if eqn.invars[0].aval.shape[a] != 1]


# Equations that only rename axes --------------------------------------------------------------------------------------


def _sources(eqn: Any) -> list[int | None] | None:
    """For each axis of the result of a view, the axis of the operand that it is; None if the equation is no such view."""
    name, operand, out = eqn.primitive.name, eqn.invars[0].aval, eqn.outvars[0].aval
    if name in _SAME or name == "convert_element_type":
        return list(range(out.ndim))
    if name == "broadcast_in_dim":
        axes = eqn.params["broadcast_dimensions"]
        return [axes.index(d) if d in axes else None for d in range(out.ndim)]
    if name == "transpose":
        return list(eqn.params["permutation"])
    if name in ("reshape", "squeeze", "expand_dims"):
        long = [d for d, n in enumerate(operand.shape) if n != 1]
        if [operand.shape[d] for d in long] == [n for n in out.shape if n != 1]:
            left = iter(long)
            return [None if n == 1 else next(left) for n in out.shape]
        raise NotAffine("it merges or splits axes")
    return None


def _view(eqn: Any, labels: Labels) -> Labels | None:
    sources = _sources(eqn) if eqn.primitive.name != "convert_element_type" else None
    return None if sources is None else tuple(None if s is None else labels[s] for s in sources)


def _unviewed(eqn: Any, labels: Labels) -> Labels | None:
    """Labels for the operand of a view from those of its result."""
    try:
        sources = _sources(eqn)
    except NotAffine:
        return None
    if sources is None or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
        return None
    inner: list[int | None] = [None] * eqn.invars[0].aval.ndim
    for label, s in zip(labels, sources):
        if s is not None:
            inner[s] = label
    return tuple(inner)


def varying_axes(eqns: Sequence[Any]) -> dict[Var, set[int]]:
    """Returns the axes along which each result may vary: broadcasts are followed through elementwise operations."""
    found: dict[Var, set[int]] = {}

    def of(atom: Atom) -> set[int]:
        if jaxprs.is_literal(atom):
            return set()
        return found.get(atom, {d for d, n in enumerate(atom.aval.shape) if n != 1})

    for eqn in eqns:
        every = [{d for d, n in enumerate(v.aval.shape) if n != 1} for v in eqn.outvars]
        try:
            sources = _sources(eqn) if eqn.invars and len(eqn.outvars) == 1 else None
        except NotAffine:
            sources = None
        if sources is not None:
            inner = of(eqn.invars[0])
            every = [{d for d in every[0] if sources[d] in inner}]
        elif eqn.primitive.name in primitives.ELEMENTWISE:
            every = [set().union(*map(of, eqn.invars)) & e for e in every]
        elif eqn.primitive.name == "iota":
            every = [{eqn.params["dimension"]} & every[0]]
        found.update(zip(eqn.outvars, every))
    return found


def constant(atom: Atom, made: dict[Var, Any], constants: dict[Var, Any]) -> np.ndarray | None:
    """Returns the value of an atom that is computed from literals and known constants only, or None."""
    eqns: dict[int, Any] = {}
    pending: list[Atom] = [atom]
    while pending:
        v = pending.pop()
        if jaxprs.is_literal(v) or v in constants:
            continue
        if v not in made or len(eqns) > 16:
            return None
        eqns[id(made[v])] = made[v]
        pending += made[v].invars
    order = [eqn for eqn in dict.fromkeys(map(id, made.values())) if eqn in eqns]
    with jax.ensure_compile_time_eval():
        env = dict(constants)
        for eqn in (eqns[i] for i in order):
            if eqn.primitive.name == "pvary":  # a cast of types that exist inside `jax.shard_map` only
                env[eqn.outvars[0]] = jaxprs.value(env, eqn.invars[0])
            else:
                jaxprs.evaluate([eqn], env)
        return np.asarray(jaxprs.value(env, atom))
