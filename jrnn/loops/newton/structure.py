"""The structure of a step's Jacobian, read from its jaxpr: which elements of the old carry an element of the new one reads.

For every value of the step, each axis of each carry is followed to an axis of the value. The axis is *aligned* while
element i along it depends on element i of the carry alone. Axes that are aligned from the old carries to the new ones are
batch axes of the Jacobian. What remains is a block of M x M numbers for each element of the batch axes: 1 x 1 where
everything is elementwise (a diagonal Jacobian), K x K for K carries that read each other elementwise, H x H for a product of
the carry with a matrix.

Shapes: A the aligned axes, M the size of a block, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Program, Var
from jrnn.jaxprs.axes import aligned

# For each axis of a carry, the axis of a value that is aligned with it, or None.
Axes = tuple[int | None, ...]
# The position of a carry -> its axes, for the carries that a value depends on.
Reads = dict[int, Axes]


@dataclass(frozen=True)
class Group:
    """Carries that read each other.

    Attributes:
        carries: their positions among the leaves of the carry.
        shapes: their shapes.
        aligned: the axes, at the same positions in all of them, along which the Jacobian is a batch of blocks.
    """

    carries: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    aligned: tuple[int, ...]

    @property
    def batch(self) -> tuple[int, ...]:
        """The sizes of the aligned axes."""
        return tuple(self.shapes[0][axis] for axis in self.aligned)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each carry in a block."""
        return tuple(math.prod(shape) // max(1, math.prod(self.batch)) for shape in self.shapes)

    @property
    def block(self) -> int:
        """M, the number of rows of a block."""
        return sum(self.sizes)

    def join(self, leaves: Sequence[Any], lead: int = 0) -> jax.Array:
        """Returns carries [lead..., shape] as one array of vectors, [lead..., A, M]."""
        found = []
        for leaf, shape, size in zip(leaves, self.shapes, self.sizes):
            rest = [lead + k for k in range(len(shape)) if k not in self.aligned]
            moved = jnp.transpose(leaf, (*range(lead), *(lead + k for k in self.aligned), *rest))
            found.append(moved.reshape(*leaf.shape[:lead], *self.batch, size))
        return jnp.concatenate(found, axis=-1)

    def part(self, joined: jax.Array, lead: int = 0) -> list[jax.Array]:
        """The inverse of `join`."""
        found, start = [], 0
        for shape, size in zip(self.shapes, self.sizes):
            piece = joined[..., start : start + size]
            start += size
            rest = [k for k in range(len(shape)) if k not in self.aligned]
            order = (*self.aligned, *rest)
            piece = piece.reshape(*joined.shape[:lead], *(shape[k] for k in order))
            found.append(jnp.transpose(piece, (*range(lead), *(lead + order.index(k) for k in range(len(shape))))))
        return found


def groups(program: Program, n_consts: int, n_carry: int) -> list[Group]:
    """Groups the carries of a step that read each other, each group after those that it reads.

    Args:
        program: the step, from constants, carries and inputs to new carries and outputs, with all calls opened.
        n_consts, n_carry: the numbers of constants and carries.
    """
    carry = program.invars[n_consts : n_consts + n_carry]
    outs = reads_of(program, carry, n_carry)
    together, _ = jaxprs.components(outs)
    return [_group(members, [tuple(carry[i].aval.shape) for i in members], outs) for members in together]


def reads_of(program: Program, roots: Sequence[Var], count: int | None = None) -> list[Reads]:
    """Returns what the first `count` outputs of a program read of some of its inputs."""
    found: dict[Var, Reads] = {v: {i: tuple(range(v.aval.ndim))} for i, v in enumerate(roots)}
    for eqn in program.eqns:
        for v, reads in zip(eqn.outvars, _through(eqn, found)):
            found[v] = reads
    return [{} if jaxprs.is_literal(a) else found.get(a, {}) for a in program.outvars[:count]]


def joint_group(shapes: Sequence[tuple[int, ...]], outs: Sequence[Reads]) -> Group:
    """Returns all carries as one group, from what the new carries read of the old ones."""
    return _group(tuple(range(len(shapes))), list(shapes), outs)


def _group(members: tuple[int, ...], shapes: list[tuple[int, ...]], outs: Sequence[Reads]) -> Group:
    def is_aligned(axis: int) -> bool:
        sizes = {shape[axis] if axis < len(shape) else None for shape in shapes}
        if len(sizes) > 1 or None in sizes:
            return False
        reads = (outs[i][j] for i in members for j in members if j in outs[i])
        return sizes == {1} or all(axes[axis] == axis for axes in reads)

    aligned = tuple(axis for axis in range(min(map(len, shapes))) if is_aligned(axis))
    return Group(members, tuple(shapes), aligned)


def _through(eqn: Eqn, found: Mapping[Var, Reads]) -> list[Reads]:
    """Returns what the results of an equation read."""
    made: list[Reads] = [{} for _ in eqn.outvars]
    for place, atom in enumerate(eqn.invars):
        if not jaxprs.is_in(atom, found) or not found[atom]:
            continue
        for reads, out in zip(made, eqn.outvars):
            follow = aligned(eqn, place, out)
            for carry, axes in found[atom].items():
                now = tuple(None if axis is None else follow.get(axis) for axis in axes)
                before = reads.get(carry, now)
                reads[carry] = tuple(a if a == b else None for a, b in zip(before, now))
    return made
