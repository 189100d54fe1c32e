"""The rules of equations: reads the forms of a step's values off its equations. `terms.py` defines forms, S, K and V."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var, primitives
from jrnn.loops.affine.carries import ON_INPUTS
from jrnn.loops.affine.contractions import Contractions, products
from jrnn.loops.affine.like_terms import added_up
from jrnn.loops.affine.terms import (
    AffineSum,
    Factor,
    Label,
    Labels,
    Term,
    factors_in,
    factors_of,
    without,
)
from jrnn.loops.affine.varying import long_axes, sources_of, varying_axes
from jrnn.loops.ir import CARRY, Unsupported

# Primitives whose results of known values are divided into smaller ones, next to affine ones and views.
_KNOWN = ("reduce_precision", "convert_element_type", "dot_general")
_LONGEST_CONSTANT = 16  # equations that compute a constant
_MOST_FACTORS = 32  # of a known value: each use has a copy of them


class StateProduct(NamedTuple):
    """A contraction of S.

    Attributes:
        precision: that the step gives, or None.
        dtype: of its operands; if they differ, the wider one.
        is_sum: it is written as a product and a sum, which have no precision.
    """

    precision: Any
    dtype: Any
    is_sum: bool = False


class Forms(Contractions):
    """The forms of the values of a step that depend on one carry, or on several that read each other.

    Attributes:
        eqns: the step's equations.
        known: the variables that do not depend on carries that are still to be computed.
        constants: the values of variables that are known now.
        values: the form of each variable that has one.
        readouts: the variables where a matrix is contracted to rows.
        breaking: of each variable that has none, the operation that has none, if it reads S.
        products: the contractions of S.
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
        self._varying: dict[Var, set[int]] = {}
        self._positions: dict[Var, int] = {}  # of the equations of variables
        for i, eqn in enumerate(eqns):
            self._varying.update(zip(eqn.outvars, varying_axes(eqn, self._axes_of)))
            self._positions.update(dict.fromkeys(eqn.outvars, i))
        self._constant_values: dict[Var, np.ndarray | None] = {}
        self._known_forms: dict[Var, AffineSum] = {}
        self.values: dict[Var, AffineSum] = {}
        for v in states:
            self.values[v] = AffineSum(self.axes, (Term(v),))
        self.readouts: dict[Var, Any] = {}
        self.breaking: dict[Var, Eqn | None] = {}
        self.products: list[StateProduct] = []

    def walk(self) -> None:
        """Computes the forms of all variables. Where there is none, what follows from rows stays without a form.

        Raises:
            Unsupported: if an operation on a value as large as S has no form.
        """
        for eqn in self.eqns:
            read = []
            others = []
            for v in jaxprs.inputs(eqn):
                operands = read if v in self.values else others
                operands.append(v)
            broken = [v for v in others if v in self.breaking]
            is_known = not broken and all(v in self.known for v in others)
            if not read and not broken:
                if not is_known:
                    self.breaking.update(dict.fromkeys(eqn.outvars))
                continue
            cause = self.breaking[broken[0]] if broken else None
            reads_matrix = any(self.is_matrix(self.values[v]) for v in read)
            try:
                if not is_known:
                    raise Unsupported("another value that depends on the carry")
                value = self._rule(eqn)
            except Unsupported as why:
                if reads_matrix:
                    raise _of_matrix(eqn, cause, why.reason) from None
                if cause is None and read:
                    cause = eqn
                self.breaking.update(dict.fromkeys(eqn.outvars, cause))
                continue
            self.values[eqn.outvars[0]] = value
            if reads_matrix and not self.is_matrix(value):
                self.readouts[eqn.outvars[0]] = eqn

    def _rule(self, eqn: Eqn) -> AffineSum:
        """Returns the form of the result of an equation; raises Unsupported if there is none."""
        moves = [jaxprs.is_in(a, self.values) for a in eqn.invars]
        for atom in itertools.compress(eqn.invars, moves):
            if self.values[atom].sums:
                raise Unsupported("")
        if len(eqn.outvars) > 1:
            raise Unsupported("")
        if primitives.is_kind(eqn, "elementwise"):
            return self._elementwise(eqn, moves)
        name = eqn.primitive.name
        operand = eqn.invars[0]
        if primitives.is_whole_view(eqn):
            value = self._form(operand)
            labels: list[Label] = []
            for axis in sources_of(eqn):
                labels.append(None if axis is None else value.labels[axis])
            return replace(value, labels=tuple(labels))
        if name == "slice" and any(moves):
            return self._sliced(eqn, self.values[operand])
        if name == "reduce_sum" and any(moves):
            return self._reduce_sum(eqn, self.values[operand])
        if name == "dot_general" and not all(moves):
            side = moves.index(True) if any(moves) else 0
            return self._dot(eqn, side, any(moves))
        raise Unsupported("")

    def _elementwise(self, eqn: Eqn, moves: Sequence[bool]) -> AffineSum:
        name = eqn.primitive.name
        first, *others = eqn.invars
        is_float = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
        is_rounding = name == "reduce_precision" or (name == "convert_element_type" and is_float)
        if is_rounding or primitives.is_copy(eqn):
            return self._form(first)
        if not primitives.is_affine(eqn, moves) or len(others) > 2:
            raise Unsupported("")
        if name == "neg":
            return self._form(first).scaled(sign=-1)
        if name == "mul":
            value, known = eqn.invars[::-1] if moves[1] else eqn.invars
            return self._times(value, self._form(known), known)
        if name == "div":
            return self._times(first, self._factor(others[0], "reciprocal"), others[0])
        if name == "select_n":
            kind = "identity" if self._is_identity(first) else "mask"
            where_false = self._times(others[0], self._factor(first, "inverted mask"), first)
            where_true = self._times(others[1], self._factor(first, kind), first)
            return self.sum(where_false, where_true)
        if primitives.is_sum(eqn):
            sign = -1 if name == "sub" else 1
            return self.sum(self._form(first), self._form(others[0]).scaled(sign=sign))
        raise Unsupported("")

    def _sliced(self, eqn: Eqn, value: AffineSum) -> AffineSum:
        """Takes one index of a short axis, as where several vectors read S in one product."""
        whole = eqn.invars[0].aval.shape
        part = eqn.outvars[0].aval.shape
        has_strides = not {1}.issuperset(eqn.params["strides"] or ())
        for axis, label in enumerate(value.labels):
            if label is None or whole[axis] == part[axis]:
                continue
            if part[axis] > 1 or has_strides or not self._is_short(label):
                raise Unsupported("")
            value = self._at_index(value, label, eqn.params["start_indices"][axis])
        return value

    def sum(self, a: AffineSum, b: AffineSum) -> AffineSum:
        return AffineSum(self._unify(a.labels, b.labels), added_up(self, a.terms, b.terms))

    def _unify(self, a: Labels, b: Labels) -> Labels:
        """Unifies the labels of two operands; one may be a scalar."""
        return tuple(map(self._unify_labels, a, b)) if a and b else a or b

    def _times(
        self,
        atom: Atom,
        other: AffineSum,
        other_atom: Atom,
    ) -> AffineSum:
        """Multiplies with a known value, along whose axes the other may have been constant."""
        value = self._form(atom)
        labels = self._unify(value.labels, other.labels)
        if jaxprs.is_in(atom, self.values):
            value = self._as_one_row(value, other.labels)
            if len(other.terms) != 1 or other.terms[0].sign != 1:
                factor = Factor(other_atom, other.labels)
                other = AffineSum(other.labels, (Term(None, (factor,)),))
        return replace(value, labels=labels, terms=products(value.terms, other.terms))

    def _reduce_sum(self, eqn: Eqn, value: AffineSum) -> AffineSum:
        axes = eqn.params["axes"]
        remaining = tuple(l for axis, l in enumerate(value.labels) if axis not in axes)
        long = []
        for label in self.resolved(jaxprs.take(value.labels, axes)):
            if label is None:
                raise Unsupported("a sum over an axis along which it is constant")
            if not self._is_short(label):
                long.append(label)
                continue
            slices = [self._at_index(value, label, i) for i in range(self.size[label])]
            terms = itertools.chain.from_iterable(part.terms for part in slices)
            value = replace(slices[0], terms=added_up(self, (), terms))
        if long:
            k = self._choose_k(long)
            sums = without(long, (k,))
            value = replace(self._contract(value, k), sums=sums)
        self.products.append(StateProduct(None, self.states[0].aval.dtype, is_sum=True))
        return replace(value, labels=remaining)

    def _dot(
        self,
        eqn: Eqn,
        side: int,
        moves: bool,
    ) -> AffineSum:
        """Contracts a value with a known operand.

        Args:
            eqn: the equation.
            side: which operand is the value.
            moves: whether the value depends on S.
        """
        dims = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        values = list(map(self._form, eqn.invars))
        labels = [list(value.labels) for value in values]
        long = []  # the labels of contracted axes
        contracted = list(zip(*dims[0]))
        for pair in (*contracted, *zip(*dims[1])):
            a, b = pair
            is_long = pair in contracted and shape[a] != 1
            label = self._unify_labels(labels[0][a], labels[1][b])
            own_label = labels[side][pair[side]] if moves else label
            if own_label is None and is_long:
                raise Unsupported("a contraction over an axis along which it is constant")
            labels[0][a] = labels[1][b] = label
            if is_long:
                long.append(label)
        long = list(map(self.find, long))
        value = replace(values[side], labels=tuple(labels[side]))
        other = values[1 - side]
        is_of_state = moves and self.is_matrix(value) and {*long} <= {*self.axes}
        if len(long) > 1 and not is_of_state:
            raise Unsupported("a contraction over several axes")
        over = self._choose_k(long) if long else None
        sums = without(long, (over,))

        result_labels = jaxprs.take(labels[0], dims[1][0])
        for of_operand, summed_axes, batch_axes in zip(labels, *dims):
            for axis, label in enumerate(of_operand):
                if axis not in summed_axes and axis not in batch_axes:
                    result_labels.append(label)
        if not moves:
            known = self._known_terms(products(value.terms, other.terms), over)
            return AffineSum(
                labels=tuple(result_labels),
                terms=added_up(self, (), known),
            )
        terms, renamed = self._state_terms(value, other.terms, over)
        if sums and renamed:
            raise Unsupported("a contraction over several axes")
        result = AffineSum(tuple(result_labels), added_up(self, (), terms), sums)
        for label, scales, sign in renamed:
            self._unify_labels(label, over)
            more = value.scaled(scales, sign).terms
            result = replace(result, terms=added_up(self, result.terms, more))
        dtype = jaxprs.promoted_type(*(a.aval.dtype for a in eqn.invars))
        self.products.append(StateProduct(eqn.params["precision"], dtype))
        return result

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
            pending_before = len(pending)
            for operand in [] if eqn is None else jaxprs.inputs(eqn):
                if operand not in self.values and operand not in self._known_forms:
                    pending.append(operand)
            if len(pending) == pending_before:
                pending.pop()
                if eqn is None:
                    self._known_forms[v] = self._undivided(v)
                else:
                    self._known_forms[v] = self._divided(v, eqn)

    def _divided_by(self, v: Var) -> Eqn | None:
        """Returns the equation that may compute a known value from smaller ones, or None."""
        is_vector = len(self._axes_of(v)) < 2
        is_float = jnp.issubdtype(v.aval.dtype, jnp.floating)
        if v not in self._positions or is_vector or not is_float or self._is_identity(v):
            return None
        eqn = self.eqns[self._positions[v]]
        is_affine = primitives.is_affine(eqn, [False] * len(eqn.invars))
        has_rule = is_affine or eqn.primitive.name in _KNOWN or primitives.is_whole_view(eqn)
        return eqn if has_rule else None

    def _divided(self, v: Var, eqn: Eqn) -> AffineSum:
        """Returns a known value as a sum of products of smaller values, or as it is if there is no such sum."""
        try:
            value = self._rule(eqn)
        except Unsupported:
            return self._factor(v)
        count = len(self._axes_of(v))
        factors = factors_in(value.terms)
        if len(factors_of(factors)) > _MOST_FACTORS:
            return self._factor(v)
        for factor in factors:
            if factor.kind != "identity" and len(self.labels_of(factor)) >= count:
                return self._factor(v)
        return value

    def _undivided(self, atom: Atom) -> AffineSum:
        """Returns a known value as one factor, or as no term if it is the number 0."""
        if self._is_identity(atom):
            return self._factor(atom, "identity")
        whole = self._factor(atom)
        if self._axes_of(atom):
            return whole
        value = self._constant(atom)
        if value is None or value.any():
            return whole
        return replace(whole, terms=())

    def _with_own_labels(self, value: AffineSum) -> AffineSum:
        """Returns a known value with other labels, which may be unified for this use only."""
        own: dict[Label, Label] = {None: None}

        def renamed(label: Label) -> Label:
            label = self.find(label)
            if label not in own:
                own[label] = self._fresh(self.size[label])
            return own[label]

        labels = tuple(map(renamed, value.labels))
        own_factors: dict[Factor, Factor] = {}
        for factor in factors_of(factors_in(value.terms)):
            copy = factor.with_parts(own_factors) if factor.parts else factor
            own_factors[factor] = replace(copy, labels=tuple(map(renamed, factor.labels)))
        return AffineSum(labels, tuple(term.of(own_factors) for term in value.terms))

    def _factor(self, atom: Atom, kind: str = "value") -> AffineSum:
        """Returns a known value as one factor."""
        axes = self._axes_of(atom)
        labels: list[Label] = []
        for axis, size in enumerate(atom.aval.shape):
            labels.append(self._fresh(size) if axis in axes else None)
        factor = Factor(atom, tuple(labels), kind)
        return AffineSum(factor.labels, (Term(None, (factor,)),))

    def _axes_of(self, atom: Atom) -> set[int]:
        if jaxprs.is_literal(atom):
            return set()
        return self._varying.get(atom, long_axes(atom))

    def _is_identity(self, atom: Atom) -> bool:
        """Returns True for an identity matrix along the two axes along which a value varies."""
        axes = self._axes_of(atom)
        if len(axes) != 2:
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
            self._constant_values[atom] = self._computed(atom)
        return self._constant_values[atom]

    def _computed(self, atom: Var) -> np.ndarray | None:
        positions: set[int] = set()
        pending = [atom]
        while pending:
            v = pending.pop()
            if v in self.constants:
                continue
            at = self._positions.get(v)
            is_long = len(positions) > _LONGEST_CONSTANT
            if at is None or is_long or not all(map(jaxprs.is_known, v.aval.shape)):
                return None
            if at not in positions:
                positions.add(at)
                pending += jaxprs.inputs(self.eqns[at])
        with jax.ensure_compile_time_eval():
            eqns = jaxprs.take(self.eqns, sorted(positions))
            env = jaxprs.evaluate(eqns, dict(self.constants), rule=jaxprs.uncast)
            return np.asarray(env[atom])


def _of_matrix(
    eqn: Eqn,
    cause: Eqn | None,
    why: str,
) -> Unsupported:
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
