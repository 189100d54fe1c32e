"""Matrix-valued carries: the affine form of a carry S [K, V], or of several that read each other as wholes.

The chunkwise form (`chunkwise/chunk.py`) needs a step of the form

    S' = decay * S + sum of p R^T + sum of p r^T + matrices

where the rows R read S by queries, and all else does not depend on S. The rules of equations (`equations.py`) return the
new S as a sum of terms (`terms.py`), however the step is written. Here the terms are sorted by what they contain, and are
checked: a decay may differ along K or along V, but queries and keys must not differ along V, because a chunk has one matrix
of scores for all columns.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, primitives
from jrnn.loops.affine.carries import DECAYS_ALONE, ON_INPUTS, Group
from jrnn.loops.affine.equations import Forms, StateProduct
from jrnn.loops.affine.terms import AffineSum, Axes, Row, Term, Terms, factors_in, rows_of, without
from jrnn.loops.ir import CARRY, Loop, Unsupported

Matrices = tuple[tuple[Term, Term], ...]  # a matrix that is the same at every step, and a factor
HIGHEST = jax.lax.Precision.HIGHEST
# JAX's algorithms that round operands to 16 bits, and add up in float32.
_ROUNDING = {
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32: jnp.dtype(jnp.bfloat16),
    jax.lax.DotAlgorithmPreset.F16_F16_F32: jnp.dtype(jnp.float16),
}
_OF_16_BITS = tuple(_ROUNDING.values())
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

    positions: Group
    forms: Forms
    decay: Terms
    updates: Terms
    known: Terms
    matrices: Matrices
    solved: tuple[Row, ...]
    readouts: Mapping[Var, AffineSum]
    free: Axes
    columns: Axes = ()

    @property
    def width(self) -> int:
        """The number of columns V."""
        return math.prod(map(self.forms.size.__getitem__, self.free))

    @property
    def rows(self) -> dict[Row, None]:
        """The rows that updates and readouts read, each after the rows that it reads."""
        return rows_of(_with_readouts(self.updates, self.readouts))

    @property
    def terms(self) -> list[Term]:
        """All terms, with the terms of rows."""
        of_state = [*self.decay, *self.updates, *self.known, *itertools.chain(*self.matrices)]
        terms = _with_readouts(of_state, self.readouts)
        for row in rows_of(terms):
            terms += row.terms
        return terms

    @property
    def precision(self) -> Any:
        """The strongest precision of the step's contractions of S."""
        order = [None, *jax.lax.Precision]
        strongest = 0
        for precision in itertools.chain(*map(_precisions, self.forms.products)):
            known = precision if precision in order else HIGHEST
            strongest = max(strongest, order.index(known))
        return order[strongest]

    @property
    def batched_precision(self) -> Any:
        """What the products of chunks on accelerators are computed in: the type in which the step contracts S.

        That is a type of 16 bits, a precision or an algorithm that the step asks for, or the highest precision. A step whose
        S is float32 contracts it in float32, whatever type its queries have, unless it rounds S for that.
        """
        products = self.forms.products
        asked = set(itertools.chain(*map(_precisions, products)))
        dtypes = {product.dtype for product in products}
        is_double = self.forms.states[0].aval.dtype == jnp.float64
        if len(dtypes) == 1 and dtypes.issubset(_OF_16_BITS) and not is_double:
            return dtypes.pop()
        if len(asked) == 1 and asked.isdisjoint([None, *jax.lax.Precision]):
            (algorithm,) = asked  # such as TF32_TF32_F32
            return _ROUNDING.get(algorithm, algorithm)
        return self.precision or HIGHEST

    @property
    def decays_along_k(self) -> bool:
        return self.forms.contracted in self.forms.labels_in(self.decay)

    def description(self, names: Sequence[str] = ()) -> str:
        """Returns a phrase for `explain`.

        Args:
            names: what the user calls the carries, or nothing.
        """
        states = self.forms.states
        kind = "no decay"
        if not self.decay:
            kind = "no transition"
        elif any(t.factors or t.operand is not states[t.new_state] for t in self.decay):
            kind = "decay"
        along = ["row"] * self.decays_along_k + ["column"] * bool(self.columns)
        if along:
            kind += f" per {' and '.join(along)}"
        n = len(self.solved)
        ranks = f", {n} transition{'s' * (n > 1)} of rank one" if n else ""
        shape = ",".join(map(str, states[0].aval.shape))
        several = f" x {len(self.positions)}" * (len(self.positions) > 1)
        return f"{' and '.join(names) or 'S'}[{shape}]{several} with {kind}{ranks}"


def matrix_form(
    loop: Loop,
    positions: Group,
    known: Collection[Var],
    outs: Sequence[Atom],
    constants: Env,
) -> AffineForm:
    """Returns the affine form of a carry, or of several that read each other.

    Args:
        loop: the loop.
        positions: of the carries.
        known: the variables that depend only on carries that are computed before.
        outs: what is computed after the rows are known, next to the carry.
        constants: values of variables that are known now.

    Raises:
        Unsupported: with the reason, and the operation.
    """
    states = tuple(jaxprs.take(loop.carry, positions))
    types = {(v.aval.shape, v.aval.dtype) for v in states}
    if len(types) > 1 or len(states) > _MOST:
        raise Unsupported(f"{len(states)} carries read each other", remedy=DECAYS_ALONE)
    if states[0].aval.dtype not in (jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16):
        raise Unsupported(f"{CARRY} is {states[0].aval.dtype}")
    forms = Forms(states, loop.eqns, known, constants)
    forms.walk()
    terms = _terms_of(loop, forms, positions)
    k = forms.contracted
    if k is None:
        raise Unsupported(
            f"{CARRY} is never contracted",
            remedy="chunks pay where each step multiplies it by a vector",
        )

    # The terms by what they contain: S, a row, or neither.
    decay = []
    updates = []
    without_state = []
    for term in terms:
        if isinstance(term.operand, Row):
            updates.append(term)
        elif term.operand is None:
            without_state.append(term)
        else:
            decay.append(term)
    outer_products, matrices = _matrices(loop, forms, without_state)
    scales = list(map(operator.itemgetter(1), matrices))
    if k in forms.labels_in(scales):
        raise Unsupported(f"a matrix that is added to {CARRY} is scaled along K")
    if len(states) > 1 and (matrices or k in forms.labels_in(decay)):
        reason = "carries that read each other decay along K, or are reset"
        raise Unsupported(reason, remedy=DECAYS_ALONE)

    # The rows that are read.
    readouts = _readouts(loop, forms, outs)
    row_terms: list[Term] = []
    for row in rows_of(_with_readouts(updates, readouts)):
        row_terms += row.terms
    queries = [t for t in row_terms if t.operand is not None]

    # V: the axes along which keys, queries and decays are the same; or else decays alone may differ.
    keys = set().union(*_along_k(forms, [*outer_products, *scales]))
    free = forms.free_of(forms.labels_in([*decay, *updates, *queries]) | keys)
    columns: Axes = ()
    if not free and not updates and len(forms.long_axes) > 1 and len(states) == 1:
        free = forms.free_of(keys.union(*_along_k(forms, queries)))
        columns = tuple(filter(forms.labels_in(decay).__contains__, free))
        decays_along_k = _along_k(forms, decay)
        differs_in_one_factor = not set().union(*decays_along_k).isdisjoint(columns)
        if differs_in_one_factor or (len(decay) > 1 and decays_along_k):
            raise Unsupported("transitions differ along every axis")

    _check_factors(forms, updates, [*terms, *row_terms])
    return AffineForm(
        positions=positions,
        forms=forms,
        decay=tuple(decay),
        updates=tuple(updates),
        known=outer_products,
        matrices=matrices,
        solved=tuple(dict.fromkeys(t.operand for t in updates)),
        readouts=readouts,
        free=free,
        columns=columns,
    )


def _precisions(product: StateProduct) -> tuple[Any, ...]:
    """Returns the precisions of the operands of a product."""
    precision = HIGHEST if product.is_sum else product.precision
    return precision if isinstance(precision, tuple) else (precision,)


def _with_readouts(terms: Iterable[Term], readouts: Mapping[Var, AffineSum]) -> list[Term]:
    """Returns terms, and the terms of values where S is read."""
    of_readouts = (value.terms for value in readouts.values())
    return [*terms, *itertools.chain(*of_readouts)]


def _along_k(forms: Forms, terms: Iterable[Term]) -> list[set[int]]:
    """Returns the labels of each factor that has K."""
    labels = map(forms.labels_of, factors_in(terms))
    return [of_factor for of_factor in labels if forms.contracted in of_factor]


def _check_factors(
    forms: Forms,
    updates: Sequence[Term],
    terms: Iterable[Term],
) -> None:
    """Raises Unsupported if a chunk cannot have a factor."""
    for several in [updates, *(row.terms for row in rows_of(updates))]:
        if not forms.labels_in(several).issubset(forms.long_axes):
            raise Unsupported(
                f"a dense matrix times {CARRY}, or several rows at once",
                remedy="a decay, or I - k k^T, can be applied in chunks",
            )
    for factor in factors_in(terms):
        labels = without(forms.resolved(factor.labels), (None,))
        if len(labels) > len(set(labels)):
            raise Unsupported(f"a matrix has one axis of {CARRY} twice", remedy=ON_INPUTS)


def _terms_of(
    loop: Loop,
    forms: Forms,
    positions: Group,
) -> list[Term]:
    """Returns the terms of the new carries."""
    terms: list[Term] = []
    zero = AffineSum(forms.axes, ())
    for i, position in enumerate(positions):
        new = loop.carry_out[position]
        if not jaxprs.is_in(new, forms.values):
            read = f"the new {CARRY} depends on what was read from {CARRY}"
            reason = f"{read} by an operation that is not affine"
            raise Unsupported(
                reason,
                None if jaxprs.is_literal(new) else forms.breaking.get(new),
                remedy=ON_INPUTS,
            )
        for term in forms.sum(zero, forms.values[new]).terms:
            terms.append(replace(term, new_state=i))
    return terms


def _matrices(
    loop: Loop,
    forms: Forms,
    terms: Sequence[Term],
) -> tuple[Terms, Matrices]:
    """Returns terms without the carry, except terms whose matrix is the same at every step."""
    varying = loop.varying
    axes = forms.long_axes
    outer_products = []
    matrices = []
    for term in terms:
        constant = None
        for factor in term.factors:
            if forms.labels_of(factor).issuperset(axes) and not jaxprs.is_in(
                factor.operand, varying
            ):
                constant = factor
                break
        if len(axes) > 1 and constant is not None:
            others = tuple(f for f in term.factors if f is not constant)
            matrices.append((Term(None, (constant,)), replace(term, factors=others)))
        else:
            outer_products.append(term)
    return tuple(outer_products), tuple(matrices)


def _readouts(
    loop: Loop,
    forms: Forms,
    outs: Sequence[Atom],
) -> dict[Var, AffineSum]:
    """Returns the variables where S is read on the way to `outs`; raises Unsupported if S is read as a whole."""
    matrices = {v for v, value in forms.values.items() if forms.is_matrix(value)}
    read_after, used = jaxprs.needed(loop.eqns, outs, {*forms.known, *forms.readouts})
    remedy = "return what is read from it, such as its product with a query"
    for eqn in read_after:
        if not matrices.isdisjoint(jaxprs.inputs(eqn)):
            raise Unsupported(f"{CARRY} is an output of every step", eqn, remedy)
    if not matrices.isdisjoint(jaxprs.variables(outs)):
        raise Unsupported(f"{CARRY} is an output of every step", remedy=remedy)
    readouts = list(filter(forms.readouts.__contains__, used))
    return dict(zip(readouts, jaxprs.take(forms.values, readouts)))


def is_evaluable(eqn: Eqn) -> bool:
    """Returns True if an equation may be evaluated for all steps of a chunk at once, and differentiated again."""
    if eqn.primitive.name == "custom_jvp_call":
        for body in jaxprs.sub_jaxprs(eqn):
            for inner in jaxprs.all_equations(body):
                if inner.primitive.name not in jaxprs.CALLS and not is_evaluable(inner):
                    return False
        return True
    # `pvary` is of a constant, in `jax.shard_map`.
    return primitives.is_movable(eqn) or eqn.primitive.name == "pvary"
