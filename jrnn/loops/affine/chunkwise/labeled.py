"""Arrays whose axes have labels, and the factors of a form as such arrays.

A label is a number (`terms.py`), "T" (the step that reads), "S" (the step that wrote) or "N" (the length of blocks).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Env, Var
from jrnn.loops.affine.terms import Factor, Term, factors_of

Label = int | str


@dataclass(frozen=True, eq=False)
class Labeled:
    """An array, and the label of each of its axes."""

    array: Array
    labels: tuple[Label, ...]

    def along(self, labels: Sequence[Label]) -> Array:
        """Returns the array with these axes, of size 1 where it has none."""
        order = [self.labels.index(l) for l in labels if l in self.labels]
        sizes = dict(zip(self.labels, self.array.shape))
        return jnp.transpose(self.array, order).reshape([sizes.get(l, 1) for l in labels])

    def full(self, labels: Sequence[Label], size: dict[Label, int]) -> Array:
        """Returns the array with these axes, repeated along the axes that it does not have."""
        return jnp.broadcast_to(self.along(labels), [size[l] for l in labels])

    def renamed(self, old: Label, new: Label) -> Labeled:
        """Returns the array with another label for one of its axes."""
        return Labeled(self.array, tuple(new if l == old else l for l in self.labels))

    def map(self, fn: Callable[[Array], Array]) -> Labeled:
        return Labeled(fn(self.array), self.labels)


def union(arrays: Iterable[Labeled], last: Sequence[Label] = ()) -> tuple[Label, ...]:
    """Returns all labels of the arrays, sorted, with those in `last` at the end."""
    all_labels = {l for a in arrays for l in a.labels}
    first = sorted(all_labels.difference(last), key=lambda label: (isinstance(label, str), label))
    return (*first, *(l for l in last if l in all_labels))


def elementwise(fn: Callable[[Array, Array], Array], arrays: Iterable[Labeled | None]) -> Any:
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


def dot(a: Labeled, b: Labeled, out: Sequence[Label], precision: Any) -> Labeled:
    """Returns the product of two arrays, summed over the labels that are not in `out`, whose axes are those of `out`."""
    kept = {*out}
    shared = [l for l in a.labels if l in b.labels]
    a = sum_over(a, [l for l in a.labels if l not in kept.union(shared)])
    b = sum_over(b, [l for l in b.labels if l not in kept.union(shared)])
    batch = [l for l in shared if l in kept]
    over = [l for l in shared if l not in kept]
    contracted_axes = (tuple(map(a.labels.index, over)), tuple(map(b.labels.index, over)))
    batch_axes = (tuple(map(a.labels.index, batch)), tuple(map(b.labels.index, batch)))
    numbers = (contracted_axes, batch_axes)
    product = jaxprs.product(a.array, b.array, numbers, precision, a.array.dtype)
    labels = (*batch, *(l for l in a.labels + b.labels if l not in shared))
    labels_of_out = tuple(l for l in out if l in labels)
    return Labeled(Labeled(product, labels).along(labels_of_out), labels_of_out)


def sum_over(a: Labeled, over: Sequence[Label]) -> Labeled:
    """Returns the array summed over labels."""
    if not over:
        return a
    remaining = tuple(l for l in a.labels if l not in over)
    return Labeled(jnp.sum(a.array, axis=tuple(map(a.labels.index, over))), remaining)


@dataclass(frozen=True)
class Factors:
    """Evaluates products of factors at all steps of a chunk.

    Attributes:
        env: the values that are the same at every step.
        stacked: the values that differ, [T, ...].
        find: the label that a label was unified with.
        dtype: the dtype of the results.
        contracted: the size of K.
        precision: of contractions.
    """

    env: Env
    stacked: Env
    find: Callable[[int | None], int | None]
    dtype: Any
    contracted: int
    precision: Any

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
                product = self._times_sign([values[f] for f in term.factors], term.sign)
                products.append(product or self._one())
            return plus(products)
        if isinstance(factor.operand, tuple):
            return self._contraction(factor, [values[f] for f in factor.operand])
        is_stacked = jaxprs.is_in(factor.operand, self.stacked)
        values_of = self.stacked if is_stacked else self.env
        array = jaxprs.value(values_of, factor.operand)
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
        labels = tuple(self.find(l) for l in factor.labels if l is not None)
        return Labeled(array, ("T", *labels) if is_stacked else labels)

    def product(self, factors: Sequence[Factor], sign: int = 1) -> Labeled | None:
        """Returns the product of factors, or None if it is 1."""
        return self._times_sign([self.evaluate(f) for f in factors], sign)

    def _times_sign(self, values: Sequence[Labeled], sign: int) -> Labeled | None:
        minus = [Labeled(jnp.asarray(-1, self.dtype), ())] if sign < 0 else []
        product: Labeled | None = times([*minus, *values])
        return product

    def value(self, term: Term) -> Labeled:
        """Returns the product of a term's factors."""
        return self.product(term.factors, term.sign) or self._one()

    def _one(self) -> Labeled:
        return Labeled(jnp.ones((), self.dtype), ())

    def _contraction(self, factor: Factor, values: Sequence[Labeled]) -> Labeled:
        """Returns the product of values, summed over K."""
        if not values:
            return Labeled(jnp.asarray(self.contracted, self.dtype), ())
        *others, last = values
        remaining = {"T", *map(self.find, factor.labels)}
        out = [l for l in union(values) if l in remaining]
        if not others:
            return sum_over(last, [l for l in last.labels if l not in out])
        return dot(times(others), last, out, self.precision)


def variables(terms: Iterable[Term]) -> list[Var]:
    """Returns the variables that the factors of terms read, in their order."""
    factors = factors_of(factor for term in terms for factor in term.factors)
    return list(dict.fromkeys(jaxprs.variables(f.operand for f in factors)))
