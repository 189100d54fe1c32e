"""The rules of equations: reads the forms of a step's values off its equations. `terms.py` defines forms, S, K and V."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var, primitives
from jrnn.loops.affine.carries import ON_INPUTS
from jrnn.loops.affine.like_terms import added_up, bounded
from jrnn.loops.affine.terms import (
    AffineSum,
    AxisLabels,
    Factor,
    Labels,
    Row,
    Term,
    factors_of,
)
from jrnn.loops.affine.varying import long_axes, sources_of, varying_axes
from jrnn.loops.ir import CARRY, Unsupported

# Primitives whose results of known values are divided into smaller ones, next to copies, sums and views.
_KNOWN = (
    "reduce_precision",
    "convert_element_type",
    "neg",
    "mul",
    "div",
    "select_n",
    "dot_general",
)
_MOST_FACTORS = 32  # of a known value: each use has a copy of them


class Forms(AxisLabels):
    """The forms of the values of a step that depend on one carry, or on several that read each other.

    Attributes:
        eqns: the step's equations.
        known: the variables that do not depend on carries that are still to be computed.
        constants: the values of variables that are known now.
        values: the form of each variable that has one.
        readouts: the variables where a matrix is contracted to rows.
        products: the contractions of S as (precision or None, whether it was written as a sum).
    """

    def __init__(
        self,
        states: tuple[Var, ...],
        eqns: Sequence[Eqn],
        known: Collection[Var],
        constants: dict[Var, Any],
    ):
        super().__init__(states)
        self.eqns = eqns
        self.known = known
        self.constants = constants
        self._producers = jaxprs.producers(eqns)
        self._varying: dict[Var, set[int]] = {}
        self._order: dict[Var, int] = {}  # the number of the equation of each variable
        for i, eqn in enumerate(eqns):
            self._varying.update(zip(eqn.outvars, varying_axes(eqn, self._axes_of)))
            self._order.update(dict.fromkeys(eqn.outvars, i))
        self._constant_values: dict[Var, np.ndarray | None] = {}
        self._known_forms: dict[Var, AffineSum] = {}
        self.values = {v: AffineSum(self.axes, (Term(v),)) for v in states}
        self.readouts: dict[Var, Any] = {}
        self.products: list[Any] = []

    def walk(self) -> None:
        """Computes the forms of all variables. Where there is none, what follows from rows stays without a form.

        Raises:
            Unsupported: if an operation on a value as large as S has no form.
        """
        breaking: dict[
            Var, Eqn | None
        ] = {}  # of values without a form: the operation that has none
        for eqn in self.eqns:
            inputs = jaxprs.inputs(eqn)
            read = [v for v in inputs if v in self.values]
            others = [v for v in inputs if v not in self.values]
            unread = [v for v in others if v in breaking or v not in self.known]
            if not read and not any(v in breaking for v in others):
                if unread:
                    breaking.update(dict.fromkeys(eqn.outvars))
                continue
            cause = next((breaking[v] for v in others if v in breaking), None)
            reads_matrix = any(self.is_matrix(self.values[v]) for v in read)
            try:
                if unread:
                    raise Unsupported("another value that depends on the carry")
                value = self._rule(eqn)
            except Unsupported as why:
                if reads_matrix:
                    raise _of_matrix(eqn, cause, why.reason) from None
                breaking.update(dict.fromkeys(eqn.outvars, cause or (eqn if read else None)))
                continue
            self.values[eqn.outvars[0]] = value
            if reads_matrix and not self.is_matrix(value):
                self.readouts[eqn.outvars[0]] = eqn

    def _rule(self, eqn: Eqn) -> AffineSum:
        """Returns the form of the result of an equation; raises Unsupported if there is none."""
        name = eqn.primitive.name
        ins = eqn.invars
        out = eqn.outvars[0].aval
        moves = [jaxprs.is_in(a, self.values) for a in ins]
        if len(eqn.outvars) > 1 or any(self.values[a].sums for a, m in zip(ins, moves) if m):
            raise Unsupported("")
        rounds = name == "reduce_precision" or (
            name == "convert_element_type" and jnp.issubdtype(out.dtype, jnp.floating)
        )
        if rounds or primitives.is_copy(eqn):
            return self._form(ins[0])
        if name == "neg":
            return self._form(ins[0]).scaled(sign=-1)
        if primitives.is_sum(eqn):
            a, b = map(self._form, ins)
            return self.sum(a, b.scaled(sign=-1) if name == "sub" else b)
        if name == "mul" and not all(moves):
            a, b = ins[::-1] if moves[1] else ins
            return self._times(a, self._form(b), b)
        if name == "div" and not moves[1]:
            return self._times(ins[0], self._factor(ins[1], "reciprocal"), ins[1])
        if name == "select_n" and not moves[0] and len(ins) == 3:
            kinds = "inverted mask", "identity" if self._is_identity(ins[0]) else "mask"
            return self.sum(
                *(
                    self._times(a, self._factor(ins[0], kind), ins[0])
                    for a, kind in zip(ins[1:], kinds)
                )
            )
        if primitives.is_whole_view(eqn):
            value = self._form(ins[0])
            return replace(
                value,
                labels=tuple(None if s is None else value.labels[s] for s in sources_of(eqn)),
            )
        if name == "slice" and any(moves):
            return self._sliced(eqn, self.values[ins[0]])
        if name == "reduce_sum" and any(moves):
            return self._reduce_sum(eqn, self.values[ins[0]])
        if name == "dot_general" and not all(moves):
            return self._dot(eqn, moves.index(True) if any(moves) else 0, any(moves))
        raise Unsupported("")

    def _sliced(self, eqn: Eqn, value: AffineSum) -> AffineSum:
        """Takes one index of a short axis, as where several vectors read S in one product."""
        whole = eqn.invars[0].aval.shape
        for axis, (n, m) in enumerate(zip(whole, eqn.outvars[0].aval.shape)):
            if n == m or value.labels[axis] is None:
                continue
            if (
                m > 1
                or {*(eqn.params["strides"] or (1,))} != {1}
                or not self._is_short(value.labels[axis])
            ):
                raise Unsupported("")
            value = self._at_index(value, value.labels[axis], eqn.params["start_indices"][axis])
        return value

    def sum(self, a: AffineSum, b: AffineSum) -> AffineSum:
        return AffineSum(self._unify(a.labels, b.labels), added_up(self, a.terms, b.terms))

    def _unify(self, a: Labels, b: Labels) -> Labels:
        """Unifies the labels of two operands, of which one may be a scalar."""
        return tuple(map(self._unify_labels, a, b)) if a and b else a or b

    def _times(self, atom: Atom, other: AffineSum, other_atom: Atom) -> AffineSum:
        """Multiplies with a known value, along whose axes the other may have been constant."""
        value = self._form(atom)
        labels = self._unify(value.labels, other.labels)
        if jaxprs.is_in(atom, self.values):
            value = self._as_one_row(value, other.labels)
            if len(other.terms) != 1 or other.terms[0].sign != 1:
                other = AffineSum(other.labels, (Term(None, (Factor(other_atom, other.labels),)),))
        return replace(value, labels=labels, terms=_products(value.terms, other.terms))

    def _as_one_row(self, value: AffineSum, labels: Iterable[int | None]) -> AffineSum:
        """Makes a sum of rows one row, before it is spread over an axis that it does not have, as in an outer product."""
        new = {*self.resolved(labels)} - {None, *self.resolved(value.labels)}
        if (
            not new
            or self.is_matrix(value)
            or (len(value.terms) == 1 and not value.terms[0].factors)
        ):
            return value
        return replace(value, terms=(Term(self._rows.setdefault(value.terms, Row(value.terms))),))

    # Contractions

    def _contract(self, value: AffineSum, label: int) -> AffineSum:
        """Sums a value over a label."""
        label = self.find(label)
        matrix = self.is_matrix(value)
        if matrix and self.contracted is None and label in self.axes:
            self.contracted = label
        if not matrix or label != self.contracted:
            raise Unsupported(f"a sum over a second axis of {CARRY}" if matrix else "")
        terms = [
            t if t.operand in self.states else self._contract_factors(t, label) for t in value.terms
        ]
        labels = tuple(l for l in value.labels if self.find(l) != label)
        return AffineSum(labels, (Term(Row(tuple(terms))),))

    def _choose_k(self, labels: Sequence[int]) -> int:
        """Returns which of the labels that are summed over is K."""
        return next((l for l in labels if l == self.contracted), labels[-1])

    def _contract_factors(self, term: Term, label: int) -> Term:
        """Sums the factors of a term that have a label; S is not in it."""
        with_label = tuple(f for f in term.factors if label in self.labels_of(f))
        without_label = tuple(f for f in term.factors if f not in with_label)
        return replace(
            term,
            factors=(*without_label, Factor(with_label, self._labels_without(with_label, label))),
        )

    def _labels_without(self, factors: Iterable[Factor], label: int) -> Labels:
        """Returns the labels of factors, without one of these."""
        return tuple(
            dict.fromkeys(
                l for f in factors for l in self.resolved(f.labels) if l not in (None, label)
            )
        )

    def _reduce_sum(self, eqn: Eqn, value: AffineSum) -> AffineSum:
        axes = eqn.params["axes"]
        for axis in axes:
            if value.labels[axis] is None:
                raise Unsupported("a sum over an axis along which it is constant")
        remaining = tuple(l for axis, l in enumerate(value.labels) if axis not in axes)
        over = [self.find(value.labels[axis]) for axis in axes]
        for label in filter(self._is_short, over):
            slices = [self._at_index(value, label, i) for i in range(self.size[label])]
            value = replace(
                slices[0], terms=added_up(self, (), (t for v in slices for t in v.terms))
            )
        long = [l for l in over if not self._is_short(l)]
        if long:
            value = self._contract(value, k := self._choose_k(long))
            value = replace(value, sums=tuple(l for l in long if l != k))
        self.products.append(jax.lax.Precision.HIGHEST)
        return replace(value, labels=remaining)

    def _dot(self, eqn: Eqn, side: int, moves: bool) -> AffineSum:
        """Contracts a value with a known operand.

        Args:
            eqn: the equation.
            side: which operand is the value.
            moves: whether the value depends on S.
        """
        dims = eqn.params["dimension_numbers"]
        operands = eqn.invars
        values = [self._form(a) for a in operands]
        labels = [list(value.labels) for value in values]
        contracted = [*zip(*dims[0])]
        for a, b in (*contracted, *zip(*dims[1])):
            label = self._unify_labels(labels[0][a], labels[1][b])
            own_label = labels[side][(a, b)[side]] if moves else label
            if own_label is None and (a, b) in contracted and operands[0].aval.shape[a] != 1:
                raise Unsupported("a contraction over an axis along which it is constant")
            labels[0][a] = labels[1][b] = label
        shape = operands[0].aval.shape
        long = [self.find(labels[side][pair[side]]) for pair in contracted if shape[pair[0]] != 1]
        value = replace(values[side], labels=tuple(labels[side]))
        other = values[1 - side]
        if len(long) > 1 and not (moves and self.is_matrix(value) and {*long} <= {*self.axes}):
            raise Unsupported("a contraction over several axes")
        over = self._choose_k(long) if long else None
        sums = tuple(l for l in long if l != over)
        free = [
            [l for d, l in enumerate(labels[i]) if d not in dims[0][i] and d not in dims[1][i]]
            for i in range(2)
        ]
        result_labels = tuple([labels[0][a] for a in dims[1][0]] + free[0] + free[1])
        if not moves:
            known = self._known_terms(_products(value.terms, other.terms), over)
            return AffineSum(result_labels, added_up(self, (), known))
        terms, renamed = self._state_terms(value, other.terms, over)
        if sums and renamed:
            raise Unsupported("a contraction over several axes")
        result = AffineSum(result_labels, added_up(self, (), terms), sums)
        for label, scales, sign in renamed:
            self._unify_labels(label, over)
            more = value.scaled(scales, sign).terms
            result = replace(result, terms=added_up(self, result.terms, more))
        self.products.append(eqn.params["precision"])
        return result

    def _state_terms(
        self, value: AffineSum, parts: Sequence[Term], over: int | None
    ) -> tuple[list[Term], list[Any]]:
        """Contracts a value that depends on S with known terms: an identity in one of them renames an axis."""
        terms = []
        renamed = []
        for part in parts:
            with_label = [f for f in part.factors if over is not None and over in self.labels_of(f)]
            identity = next((f for f in with_label if f.kind == "identity"), None)
            if identity is not None:
                scales = [f for f in part.factors if f is not identity]
                renamed.append((*(self.labels_of(identity) - {over}), scales, part.sign))
            elif over is not None and self._is_short(over):
                for i in range(self.size[over]):
                    indexed = self._at_index(value, over, i)
                    factors = [self._factor_with(f, over, i) for f in part.factors]
                    indexed = self._as_one_row(indexed, (l for f in factors for l in f.labels))
                    terms += indexed.scaled(factors, part.sign).terms
            elif over is not None:
                row = self._contract(value.scaled(with_label), over)
                terms += row.scaled(
                    [f for f in part.factors if f not in with_label], part.sign
                ).terms
            else:
                row = self._as_one_row(value, (l for f in part.factors for l in f.labels))
                terms += row.scaled(part.factors, part.sign).terms
        return terms, renamed

    def _known_terms(self, terms: Iterable[Term], over: int | None) -> Iterator[Term]:
        """Sums known terms over a label; raises Unsupported if what remains is no product of vectors."""
        for term in terms:
            with_label = tuple(
                f for f in term.factors if over is not None and over in self.labels_of(f)
            )
            identity = next((f for f in with_label if f.kind == "identity"), None)
            if over is None:
                yield term
            elif identity is not None:
                (other,) = self.labels_of(identity) - {over}
                without_identity = replace(
                    term, factors=tuple(f for f in term.factors if f is not identity)
                )
                yield self._term_with(without_identity, over, other=other)
            elif with_label and len(self._labels_without(with_label, over)) < 2:
                yield self._contract_factors(term, over)
            elif with_label and self._is_short(over):
                yield from (self._term_with(term, over, index=i) for i in range(self.size[over]))
            else:
                raise Unsupported("")

    # Known values: sums of products of smaller values, where they are ones

    def _form(self, atom: Atom) -> AffineSum:
        """Returns the form of a value. That of a known one has labels of its own for each use."""
        if jaxprs.is_in(atom, self.values):
            return self.values[atom]
        if jaxprs.is_literal(atom):
            return self._undivided(atom)
        self._find_known_forms(atom)
        return self._with_own_labels(self._known_forms[atom])

    def _find_known_forms(self, atom: Var) -> None:
        """Finds the form of a known value, and before it the forms of the values that it is computed from.

        Each is computed once, without recursion: a step may compute a value in thousands of
        equations that read each other's results several times.
        """
        pending = [atom]
        while pending:
            v = pending[-1]
            if v in self._known_forms:
                pending.pop()
                continue
            eqn = self._divided_by(v)
            operands = [] if eqn is None else jaxprs.inputs(eqn)
            before = [a for a in operands if a not in self.values and a not in self._known_forms]
            if before:
                pending += before
                continue
            pending.pop()
            self._known_forms[v] = self._undivided(v) if eqn is None else self._divided(v, eqn)

    def _divided_by(self, v: Var) -> Eqn | None:
        """Returns the equation that may compute a known value from smaller ones, or None."""
        eqn = self._producers.get(v)
        is_large = len(self._axes_of(v)) > 1 and jnp.issubdtype(v.aval.dtype, jnp.floating)
        if eqn is None or not is_large or self._is_identity(v):
            return None
        name = eqn.primitive.name
        has_rule = name in _KNOWN or primitives.is_copy(eqn) or primitives.is_sum(eqn)
        return eqn if has_rule or primitives.is_whole_view(eqn) else None

    def _divided(self, v: Var, eqn: Eqn) -> AffineSum:
        """Returns a known value as a sum of products of smaller values, or as it is if there is no such sum."""
        try:
            value = self._rule(eqn)
        except Unsupported:
            return self._factor(v)
        count = len(self._axes_of(v))
        factors = [f for t in value.terms for f in t.factors]
        is_smaller = all(f.kind == "identity" or len(self.labels_of(f)) < count for f in factors)
        is_short = len(factors_of(factors)) <= _MOST_FACTORS
        return value if is_smaller and is_short else self._factor(v)

    def _undivided(self, atom: Atom) -> AffineSum:
        """Returns a known value as one factor, or as no term if it is the number 0."""
        if self._is_identity(atom):
            return self._factor(atom, "identity")
        whole = self._factor(atom)
        if self._axes_of(atom):
            return whole
        value = self._constant(atom)
        return whole if value is None or value.any() else replace(whole, terms=())

    def _with_own_labels(self, value: AffineSum) -> AffineSum:
        """Returns a known value with other labels, which may be unified for this use only."""
        own: dict[int | None, int | None] = {None: None}

        def renamed(label: int | None) -> int | None:
            label = self.find(label)
            if label not in own:
                own[label] = self._fresh(self.size[label])
            return own[label]

        labels = tuple(map(renamed, value.labels))
        own_factors: dict[Factor, Factor] = {}
        for factor in factors_of(f for t in value.terms for f in t.factors):
            copy = factor.with_parts(own_factors) if factor.parts else factor
            own_factors[factor] = replace(copy, labels=tuple(map(renamed, factor.labels)))
        terms = (replace(t, factors=tuple(own_factors[f] for f in t.factors)) for t in value.terms)
        return AffineSum(labels, tuple(terms))

    def _factor(self, atom: Atom, kind: str = "value") -> AffineSum:
        """Returns a known value as one factor."""
        axes = self._axes_of(atom)
        labels = tuple(
            self._fresh(n) if axis in axes else None for axis, n in enumerate(atom.aval.shape)
        )
        return AffineSum(labels, (Term(None, (Factor(atom, labels, kind),)),))

    def _axes_of(self, atom: Atom) -> set[int]:
        return set() if jaxprs.is_literal(atom) else self._varying.get(atom, long_axes(atom))

    def _is_identity(self, atom: Atom) -> bool:
        """Returns True for an identity matrix along the two axes along which a value varies."""
        axes = self._axes_of(atom)
        if len(axes) != 2 or len({atom.aval.shape[a] for a in axes}) > 1:
            return False
        value = self._constant(atom)
        if value is None:
            return False
        matrix = value[tuple(slice(None) if a in axes else 0 for a in range(value.ndim))]
        return bool(np.array_equal(matrix, np.eye(len(matrix))))

    def _constant(self, atom: Atom) -> np.ndarray | None:
        """Returns the value of an atom that is computed from literals and known constants only, or None."""
        if jaxprs.is_literal(atom):
            return np.asarray(atom.val)
        if atom not in self._constant_values:
            value = _constant(atom, self._producers, self._order, self.constants)
            self._constant_values[atom] = value
        return self._constant_values[atom]


def _of_matrix(eqn: Eqn, cause: Eqn | None, why: str) -> Unsupported:
    """Returns the refusal of an operation on a value as large as S.

    Args:
        eqn: the operation.
        cause: an operation on a row of S whose result it reads, and that has no form; or None.
        why: the reason why there is no form, or "".
    """
    if cause is not None:
        reason = f"{cause.primitive.name} of what was read from {CARRY}"
        return Unsupported(reason, cause, ON_INPUTS)
    reason = f"{eqn.primitive.name} of {CARRY}"
    if why:
        reason += f": {why}"
    return Unsupported(reason, eqn, ON_INPUTS)


def _products(a: Iterable[Term], b: Sequence[Term]) -> tuple[Term, ...]:
    """Returns the products of all pairs of terms; raises Unsupported if there are too many."""
    products = [x.times(y.factors, y.sign) for x in a for y in b]
    return bounded(products)


def _constant(
    atom: Var, producers: dict[Var, Eqn], order: dict[Var, int], constants: dict[Var, Any]
) -> np.ndarray | None:
    """Returns the value of a variable that is computed from literals and known constants only, or None.

    Args:
        atom: the variable.
        producers: the equations of variables.
        order: the numbers of these equations.
        constants: the values of variables that are known now.
    """
    eqns: dict[int, Eqn] = {}
    pending: list[Atom] = [atom]
    while pending:
        v = pending.pop()
        if jaxprs.is_literal(v) or v in constants:
            continue
        if v not in producers or len(eqns) > 16 or not all(map(jaxprs.is_known, v.aval.shape)):
            return None
        if order[v] not in eqns:
            eqns[order[v]] = producers[v]
            pending += producers[v].invars
    with jax.ensure_compile_time_eval():
        in_order = (eqns[i] for i in sorted(eqns))
        env = jaxprs.evaluate(in_order, dict(constants), rule=jaxprs.uncast)
        return np.asarray(jaxprs.value(env, atom))
