"""How values of a step are laid out: which of a value's axes each axis of an array stands for.

Axes of size 1 are in no array, but for one that is the rows of a loop over one row. Several axes may be merged into one.
Arrays of all steps have an axis of time in front.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs

Groups = tuple[
    tuple[int, ...], ...
]  # for each axis of an array, the axes of the value that it holds


def is_unit(n: Any) -> bool:
    return jaxprs.is_known(n) and n == 1


def natural(shape: Sequence[Any]) -> Groups:
    """Returns the layout of a value whose axes stay in their order.

    >>> natural((1, 32, 256))
    ((1,), (2,))
    """
    return tuple((a,) for a, n in enumerate(shape) if not is_unit(n))


@dataclass(frozen=True)
class StepValue:
    """A value of a step.

    Attributes:
        array: its elements.
        shape: the shape of the value.
        groups: its layout.
    """

    array: Any
    shape: tuple[Any, ...]
    groups: Groups

    @property
    def axes(self) -> list[int]:
        """All axes that are not of size 1, in the order of the array."""
        return [a for group in self.groups for a in group if not is_unit(self.shape[a])]

    def array_axis(self, axis: int) -> int | None:
        """Returns the axis of the array that holds an axis alone; None if there is none."""
        return self.groups.index((axis,)) if (axis,) in self.groups else None

    def unmerge(self, which: Iterable[int] | None = None) -> StepValue:
        """Returns the value with merged axes apart: those groups that have some of the given axes, or all groups."""
        some = None if which is None else {*which}
        groups = [
            g
            for group in self.groups
            for g in ([group] if _is_whole(group, some) else [(a,) for a in group])
        ]
        return self if groups == list(self.groups) else self._reshaped(tuple(groups))

    def in_layout(self, groups: Groups) -> StepValue:
        """Returns the value in another layout, which has the same axes but perhaps others of size 1."""
        if groups == self.groups:
            return self
        target = tuple(g for g in groups if not self._is_unit(g))
        apart = self.unmerge(
            [a for group in self.groups if group not in target for a in group]
        ).squeezed()
        order = [apart.groups.index(g) for g in _split_groups(target, apart.groups)]
        array = apart.array if order == sorted(order) else jax.lax.transpose(apart.array, order)
        return StepValue(array, self.shape, tuple(apart.groups[i] for i in order))._reshaped(groups)

    def squeezed(self) -> StepValue:
        """Returns the value without axes of size 1."""
        return self._reshaped(tuple(g for g in self.groups if not self._is_unit(g)))

    def _is_unit(self, group: tuple[int, ...]) -> bool:
        return all(is_unit(self.shape[a]) for a in group)

    def _reshaped(self, groups: Groups) -> StepValue:
        shape = sizes(self.shape, groups)
        array = self.array if shape == jnp.shape(self.array) else jax.lax.reshape(self.array, shape)
        return StepValue(array, self.shape, groups)

    def aligned(self, groups: Groups) -> Any:
        """Returns the array with an axis of size 1 for each group that the value lacks; groups have axes of the result."""
        value = self.in_layout(
            tuple(g for g in groups if g in self.groups and not self._is_unit(g))
        )
        have = dict(zip(value.groups, jnp.shape(value.array)))
        shape = tuple(have.get(g, 1) for g in groups)
        return (
            value.array if shape == jnp.shape(value.array) else jax.lax.reshape(value.array, shape)
        )

    def to_array(self) -> Any:
        """Returns the array in the shape of the value."""
        array = self.in_layout(natural(self.shape)).array
        return array if jnp.shape(array) == self.shape else jax.lax.reshape(array, self.shape)

    @staticmethod
    def of(array: Any, shape: Sequence[Any] | None = None) -> StepValue:
        """Returns the value of an array with all of its axes, without those of size 1."""
        shape = tuple(jnp.shape(array) if shape is None else shape)
        groups = natural(shape)
        inner = sizes(shape, groups)
        return StepValue(
            array if jnp.shape(array) == inner else jax.lax.reshape(array, inner), shape, groups
        )


def sizes(shape: Sequence[Any], groups: Groups) -> tuple[Any, ...]:
    """Returns the shape of an array with a layout."""
    return tuple(math.prod([shape[a] for a in group]) for group in groups)


def _is_whole(group: tuple[int, ...], some: set[int] | None) -> bool:
    return len(group) == 1 or (some is not None and some.isdisjoint(group))


def _split_groups(groups: Groups, whole_groups: Groups) -> list[tuple[int, ...]]:
    """Returns `whole_groups` in the order of other groups, which may merge them."""
    return [
        g for group in groups for g in ([group] if group in whole_groups else [(a,) for a in group])
    ]


@dataclass(frozen=True)
class LayoutChange:
    """The layout of a value outside of the loop, [...], or of all steps, [T, ...]."""

    shape: tuple[Any, ...]
    groups: Groups

    @property
    def is_same(self) -> bool:
        """Whether the array stays as it is."""
        return self.groups == tuple((a,) for a in range(len(self.shape)))

    @property
    def is_transposed(self) -> bool:
        """Whether the elements change their order."""
        order = [a for group in self.groups for a in group]
        return order != sorted(order)

    def aval(self, of: Any) -> Any:
        """Returns the type of the array of one step, for a value of a type."""
        return of if self.is_same else of.update(shape=sizes(self.shape, self.groups))

    def inward(self, value: Any, stacked: bool = False) -> Any:
        if self.is_same:
            return value
        lead = jnp.shape(value)[:1] if stacked else ()
        order = [a for group in self.groups for a in group]
        units = [a for a in range(len(self.shape)) if a not in order]
        array = jnp.transpose(value, self._stacked([*order, *units], stacked))
        return jnp.reshape(array, (*lead, *sizes(self.shape, self.groups)))

    def outward(self, array: Any, stacked: bool = False) -> Any:
        if self.is_same:
            return array
        lead = jnp.shape(array)[:1] if stacked else ()
        order = [a for group in self.groups for a in group]
        order += [a for a in range(len(self.shape)) if a not in order]
        array = jnp.reshape(array, (*lead, *(self.shape[a] for a in order)))
        return jnp.transpose(
            array, self._stacked([order.index(a) for a in range(len(order))], stacked)
        )

    @staticmethod
    def _stacked(order: Sequence[int], stacked: bool) -> list[int]:
        return [0, *(a + 1 for a in order)] if stacked else list(order)
