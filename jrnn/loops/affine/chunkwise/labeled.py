"""Arrays whose axes have labels, and the factors of a form as such arrays.

A label is a number (`terms.py`), "T" (the step that reads), "S" (the step that wrote) or "N" (the length of blocks). The
formula of a chunk has axes of batches, heads, keys and values, and a factor may lack any of them: a decay of each head alone
has the labels T and H. Labels say which axes meet, so that no function of a chunk counts axes:

        times([decay [T, H], key [T, B, H, K]])  ->  [T, B, H, K]
        dot(query [T, B, H, K], key [S, B, H, K], [B, H, T, S])  ->  scores
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Env, Var
from jrnn.loops.affine.chunkwise.rounded_product import is_rounding, rounded_product
from jrnn.loops.affine.terms import Factor, Label, Labels, Term, factors_in, factors_of, relabeled
from jrnn.loops.affine.terms import without as without


@dataclass(frozen=True, eq=False)
class Labeled:
    """An array, and the label of each of its axes."""

    array: Array
    labels: Labels

    def axes(self, labels: Iterable[Label]) -> tuple[int, ...]:
        """Returns the axes that have these labels."""
        return tuple(map(self.labels.index, labels))

    def along(self, labels: Labels) -> Array:
        """Returns the array with these axes, of size 1 where it has none."""
        order = self.axes(l for l in labels if l in self.labels)
        size = dict(zip(self.labels, self.array.shape))
        shape = [size.get(l, 1) for l in labels]
        return jnp.transpose(self.array, order).reshape(shape)

    def full(self, labels: Labels, size: Mapping[Label, int]) -> Array:
        """Returns the array with these axes, repeated along the axes that it does not have."""
        return jnp.broadcast_to(self.along(labels), jaxprs.take(size, labels))

    def renamed(self, old: Label, new: Label) -> Labeled:
        """Returns the array with another label for one of its axes."""
        return Labeled(self.array, relabeled(self.labels, old, new))

    def at_first(self, labels: Collection[Label]) -> Labeled:
        """Returns the array at the first index of some of its axes, without these axes."""
        index = tuple(0 if l in labels else slice(None) for l in self.labels)
        return Labeled(self.array[index], without(self.labels, labels))

    def map(self, fn: Callable[[Array], Array]) -> Labeled:
        return Labeled(fn(self.array), self.labels)


Product = Labeled | None  # None stands for what changes nothing: 1 in a product, 0 in a sum


def union(arrays: Iterable[Labeled], last: Labels = ()) -> Labels:
    """Returns all labels of the arrays, sorted, with the labels in `last` at the end."""
    all_labels: set[Label] = set()
    for a in arrays:
        all_labels.update(a.labels)

    def key(label: Label) -> tuple[bool, Label]:
        return isinstance(label, str), label  # numbers first

    first = sorted(all_labels.difference(last), key=key)
    return (*first, *(l for l in last if l in all_labels))


def elementwise(fn: Callable[[Array, Array], Array], arrays: Iterable[Product]) -> Any:
    """Joins arrays element by element. None stands for what changes nothing, and is the result if there is nothing else."""
    operands = [a for a in arrays if a is not None]
    if len(operands) < 2:
        return operands[0] if operands else None
    labels = union(operands)
    for a in operands:
        if len(a.labels) == len(labels):
            labels = a.labels  # no transposition of this operand
            break
    return Labeled(functools.reduce(fn, [a.along(labels) for a in operands]), labels)


times = functools.partial(elementwise, operator.mul)
plus = functools.partial(elementwise, operator.add)


def dot(
    a: Labeled,
    b: Labeled,
    out: Sequence[Label],
    precision: Any,
) -> Labeled:
    """Returns the product of two arrays, summed over the labels that are not in `out`; the result has the axes `out`.

    Args:
        a, b: the operands.
        out: labels.
        precision: JAX's, or the type of 16 bits to which operands are rounded (`rounded_product.py`).
    """
    shared = [l for l in a.labels if l in b.labels]
    a = sum_over(a, without(a.labels, {*out, *shared}))
    b = sum_over(b, without(b.labels, {*out, *shared}))
    over = without(shared, out)
    batch = without(shared, over)
    contracted_axes = (a.axes(over), b.axes(over))
    batch_axes = (a.axes(batch), b.axes(batch))
    numbers = (contracted_axes, batch_axes)
    if is_rounding(precision):
        product = rounded_product(a.array, b.array, numbers, precision)
    else:
        product = jaxprs.product(a.array, b.array, numbers, precision, a.array.dtype)
    labels = (*batch, *without(a.labels + b.labels, shared))
    out = tuple(l for l in out if l in labels)
    return Labeled(Labeled(product, labels).along(out), out)


def sum_over(a: Labeled, over: Labels) -> Labeled:
    """Returns the array summed over labels."""
    if not over:
        return a
    array = jnp.sum(a.array, axis=a.axes(over))
    return Labeled(array, without(a.labels, over))


@dataclass(frozen=True)
class Factors:
    """Evaluates products of factors at all steps of a chunk.

    Attributes:
        env: the values that are the same at every step.
        stacked: the values that differ, [T, ...].
        find: the label that a label was unified with.
        dtype: the dtype of the results.
        contracted: the size of K.
        precision: of contractions, as of `dot`.
    """

    env: Env
    stacked: Env
    find: Callable[[int | None], int | None]
    dtype: Any
    contracted: int
    precision: Any

    def number(self, value: float) -> Labeled:
        return Labeled(jnp.asarray(value, self.dtype), ())

    def evaluate(self, factor: Factor) -> Labeled:
        """Returns the value of a factor. Its parts are evaluated once each, and before it."""
        values: dict[Factor, Labeled] = {}
        for part in factors_of([factor]):
            values[part] = self._own_value(part, values)
        return values[factor]

    def _own_value(self, factor: Factor, values: Mapping[Factor, Labeled]) -> Labeled:
        """Returns the value of a factor from the values of its parts."""
        if factor.kind == "sum":
            products = []
            for term in factor.operand:
                product = self._times_sign(jaxprs.take(values, term.factors), term.sign)
                products.append(product or self._one())
            return plus(products)
        if isinstance(factor.operand, tuple):
            return self._contraction(factor, jaxprs.take(values, factor.operand))
        is_stacked = jaxprs.is_in(factor.operand, self.stacked)
        array = jaxprs.value(self.stacked if is_stacked else self.env, factor.operand)
        # An axis without a label is read at an index.
        index = factor.index or (0,) * len(factor.labels)
        for axis in reversed(range(len(index))):
            if factor.labels[axis] is None:
                array = jax.lax.index_in_dim(array, index[axis], axis + is_stacked, keepdims=False)
        if factor.kind in ("mask", "inverted mask", "identity"):
            array = array if array.dtype == bool else array != 0
        if factor.kind == "inverted mask":
            array = ~array
        array = array.astype(self.dtype)
        if factor.kind == "reciprocal":
            array = 1 / array
        labels: Any = map(self.find, without(factor.labels, (None,)))
        return Labeled(array, ("T", *labels) if is_stacked else tuple(labels))

    def product(self, factors: Iterable[Factor], sign: int = 1) -> Product:
        """Returns the product of factors, or None if it is 1."""
        return self._times_sign(list(map(self.evaluate, factors)), sign)

    def _times_sign(self, values: Sequence[Labeled], sign: int) -> Product:
        if sign < 0:
            values = [self.number(-1), *values]
        return times(values)

    def value(self, term: Term) -> Labeled:
        """Returns the product of a term's factors."""
        return self.product(term.factors, term.sign) or self._one()

    def _one(self) -> Labeled:
        return Labeled(jnp.ones((), self.dtype), ())

    def _contraction(self, factor: Factor, values: Sequence[Labeled]) -> Labeled:
        """Returns the product of values, summed over K."""
        if not values:
            return self.number(self.contracted)
        *others, last = values
        remaining = {"T", *map(self.find, factor.labels)}
        out = tuple(l for l in union(values) if l in remaining)
        if not others:
            return sum_over(last, without(last.labels, out))
        return dot(times(others), last, out, self.precision)


def variables(terms: Iterable[Term]) -> list[Var]:
    """Returns the variables that the factors of terms read, in their order."""
    operands = [factor.operand for factor in factors_of(factors_in(terms))]
    return list(dict.fromkeys(jaxprs.variables(operands)))
