"""Over which axes of a mesh a value differs from device to device: its type says so in `jax.shard_map` with `check_vma`.

A loop needs a first carry that varies over all axes over which the later ones do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrnn.jaxprs import jax_internals

Tree = Any  # a user's pytree of arrays


def varying_axes(tree: Tree) -> frozenset[Hashable]:
    """Returns the axes over which any array of a tree varies; none outside of `jax.shard_map`, or without `check_vma`."""
    return frozenset().union(*(jax_internals.varying_axes(leaf) for leaf in jax.tree.leaves(tree)))


def cast(tree: Tree, axes: Iterable[Hashable]) -> Tree:
    """Returns the arrays of a tree typed as ones that vary over these axes, in addition to their own."""

    def of(value: jax.Array) -> jax.Array:
        missing = tuple(sorted(set(axes) - varying_axes(value), key=str))
        return lax.pcast(value, missing, to="varying") if missing else jnp.asarray(value)

    return jax.tree.map(of, tree)


def like(tree: Tree, other: Tree) -> Tree:
    """Returns the arrays of a tree typed as ones that vary over the axes of another tree, in addition to their own."""
    return cast(tree, varying_axes(other))


def alike(tree: Tree) -> Tree:
    """Returns a tree all of whose arrays vary over the axes over which any of them does.

    The gradient with respect to an array that is the same on all devices is then summed over them once, and not inside of
    each loop that reads it.
    """
    axes = varying_axes(tree)
    return cast(tree, axes) if axes else tree
