"""How values of a step are laid out: which of a value's axes each axis of an array stands for.

Arrays have no axes of size 1, except the rows of a loop over one row. Several axes may be merged into one.
Arrays of all steps have an axis of time in front.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import ShapedArray

Dimension = Any  # a number, or a symbolic dimension of `jax.export`
Shape = Sequence[Dimension]
Group = tuple[int, ...]  # the axes of a value that one axis of an array holds
Groups = tuple[Group, ...]  # for each axis of an array


def is_unit(n: Dimension) -> bool:
    """Whether a dimension is 1; a symbolic one is not."""
    return jaxprs.is_known(n) and n == 1


def natural(shape: Shape) -> Groups:
    """Returns the layout of a value whose axes stay in their order.

    >>> natural((1, 32, 256))
    ((1,), (2,))
    """
    return tuple([(a,) for a, n in enumerate(shape) if not is_unit(n)])


def apart_groups(axes: Iterable[int]) -> list[Group]:
    """A group for each of some axes.

    >>> apart_groups((2, 3))
    [(2,), (3,)]
    """
    return [(a,) for a in axes]


@dataclass(frozen=True)
class StepValue:
    """A value of a step.

    >>> x = StepValue(jnp.zeros((8, 6)), (2, 3, 1, 8), ((3,), (0, 1)))
    >>> x.to_array().shape
    (2, 3, 1, 8)
    >>> x.unmerge().groups
    ((3,), (0,), (1,))
    >>> x.in_layout(((0,), (1,), (3,))).array.shape
    (2, 3, 8)

    Attributes:
        array: its elements.
        shape: the shape of the value.
        groups: its layout.
    """

    array: Array
    shape: Shape
    groups: Groups

    @property
    def axes(self) -> list[int]:
        """All axes that are not of size 1, in the order of the array."""
        return [a for a in itertools.chain(*self.groups) if not is_unit(self.shape[a])]

    def array_axis(self, axis: int) -> int | None:
        """Returns the axis of the array that holds an axis alone; None if there is none."""
        return self.groups.index((axis,)) if (axis,) in self.groups else None

    def unmerge(self, which: Iterable[int] | None = None) -> StepValue:
        """Returns the value with merged axes apart: those groups that have some of the given axes, or all groups."""
        some = set(itertools.chain(*self.groups) if which is None else which)
        groups: list[Group] = []
        for group in self.groups:
            groups += [group] if some.isdisjoint(group) else apart_groups(group)
        return self if groups == list(self.groups) else self._reshaped(tuple(groups))

    def in_layout(self, groups: Groups) -> StepValue:
        """Returns the value in another layout, which has the same axes but perhaps others of size 1."""
        if groups == self.groups:
            return self
        target = self._without_units(groups)
        other = set(self.groups).difference(target)
        apart = self.unmerge(itertools.chain(*other)).squeezed()
        order: list[Group] = []
        for group in target:
            order += [group] if group in apart.groups else apart_groups(group)
        axes = list(map(apart.groups.index, order))
        array = apart.array if axes == sorted(axes) else jax.lax.transpose(apart.array, axes)
        return StepValue(array, self.shape, tuple(order))._reshaped(groups)

    def squeezed(self) -> StepValue:
        """Returns the value without axes of size 1."""
        return self._reshaped(self._without_units(self.groups))

    def _without_units(self, groups: Groups) -> Groups:
        return tuple(itertools.filterfalse(self.is_unit_group, groups))

    def is_unit_group(self, group: Group) -> bool:
        """Whether all axes of a group have size 1."""
        return all(is_unit(self.shape[a]) for a in group)

    def _reshaped(self, groups: Groups) -> StepValue:
        return StepValue(_in_shape(self.array, sizes(self.shape, groups)), self.shape, groups)

    def aligned(self, groups: Groups) -> Array:
        """Returns the array with an axis of size 1 for each group that the value lacks; groups have axes of the result."""
        present = [g for g in groups if g in self.groups and not self.is_unit_group(g)]
        value = self.in_layout(tuple(present))
        size_of = dict(zip(value.groups, jnp.shape(value.array)))
        return _in_shape(value.array, tuple(size_of.get(g, 1) for g in groups))

    def to_array(self) -> Array:
        """Returns the array in the shape of the value."""
        return _in_shape(self.in_layout(natural(self.shape)).array, self.shape)

    @staticmethod
    def of(array: Array, shape: Shape | None = None) -> StepValue:
        """Returns the value of an array with all of its axes, except axes of size 1."""
        shape = tuple(jnp.shape(array) if shape is None else shape)
        groups = natural(shape)
        return StepValue(_in_shape(array, sizes(shape, groups)), shape, groups)


def _in_shape(array: Array, shape: Shape) -> Array:
    """Returns an array in a shape, with an equation only if it has another one."""
    return array if jnp.shape(array) == shape else jax.lax.reshape(array, shape)


def sizes(shape: Shape, groups: Groups) -> tuple[Dimension, ...]:
    """Returns the shape of an array with a layout."""
    return tuple(math.prod(jaxprs.take(shape, group)) for group in groups)


@dataclass(frozen=True)
class LayoutChange:
    """From a value outside of the loop, [...] or stacked [T, ...], to its array in the rewritten loop, and back.

    >>> change = LayoutChange(shape=(2, 1, 8), groups=((2,), (0,)))
    >>> change.inward(jnp.zeros((2, 1, 8))).shape
    (8, 2)
    >>> change.outward(jnp.zeros((5, 8, 2)), stacked=True).shape
    (5, 2, 1, 8)
    """

    shape: Shape
    groups: Groups

    @property
    def is_same(self) -> bool:
        """Whether the array stays as it is."""
        return list(self.groups) == apart_groups(range(len(self.shape)))

    @property
    def is_transposed(self) -> bool:
        """Whether the elements change their order."""
        order = [*itertools.chain(*self.groups)]
        return order != sorted(order)

    @property
    def _order(self) -> list[int]:
        """All axes: the ones of the array in its order, then the others, of size 1."""
        order = dict.fromkeys(itertools.chain(*self.groups))
        order.update(dict.fromkeys(range(len(self.shape))))
        return list(order)

    def aval(self, of: ShapedArray) -> ShapedArray:
        """Returns the type of the array of one step, for a value of a type."""
        return of if self.is_same else of.update(shape=sizes(self.shape, self.groups))

    def inward(self, value: Array, stacked: bool = False) -> Array:
        """Returns the array of the rewritten loop for a value."""
        if self.is_same:
            return value
        lead = jnp.shape(value)[:1] if stacked else ()
        array = jnp.transpose(value, _behind_time(self._order, stacked))
        return jnp.reshape(array, (*lead, *sizes(self.shape, self.groups)))

    def outward(self, array: Array, stacked: bool = False) -> Array:
        """Returns the value for an array of the rewritten loop."""
        if self.is_same:
            return array
        lead = jnp.shape(array)[:1] if stacked else ()
        order = self._order
        array = jnp.reshape(array, (*lead, *jaxprs.take(self.shape, order)))
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return jnp.transpose(array, _behind_time(inverse, stacked))


def _behind_time(order: Sequence[int], stacked: bool) -> list[int]:
    """An order of axes, with the axis of time in front if there is one."""
    return [0, *(a + 1 for a in order)] if stacked else list(order)
