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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Program, Var, primitives
from jrnn.jaxprs.axes import aligned
from jrnn.loops.affine import rounds

_UNROLLED = 4  # blocks up to this size are computed column by column, without `vmap`

# For each axis of a carry, the axis of a value that is aligned with it, or None.
AlignedAxes = tuple[int | None, ...]
# The position of a carry -> its axes, for the carries that a value depends on.
Reads = dict[int, AlignedAxes]


@dataclass(frozen=True)
class Blocks:
    """Carries that read each other, as vectors between which their Jacobian is a batch of blocks.

    Attributes:
        carries: their positions among the leaves of the carry.
        shapes: their shapes.
        aligned: the axes, at the same positions in all of them, along which the Jacobian is a batch of blocks.
        same: axes of a single carry along which the blocks are the same, so that there is one for all of them.
    """

    carries: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    aligned: tuple[int, ...]
    same: tuple[int, ...] = ()

    @property
    def batch(self) -> tuple[int, ...]:
        """The sizes of the aligned axes."""
        return tuple(self.shapes[0][axis] for axis in self.aligned)

    @property
    def _lead(self) -> tuple[int, ...]:
        """The axes of vectors before the last: those of the batch, and how many vectors have the same block."""
        return (
            (*self.batch, math.prod(self.shapes[0][axis] for axis in self.same))
            if self.same
            else self.batch
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each carry in a block."""
        return tuple(math.prod(shape) // max(1, math.prod(self._lead)) for shape in self.shapes)

    @property
    def block(self) -> int:
        """M, the number of rows of a block."""
        return sum(self.sizes)

    @property
    def runs(self) -> int:
        """The number of `basis` vectors, of which the step makes all columns of the blocks."""
        return -(-self.block // (self._lead[-1] if self.same else 1))

    def join(self, leaves: Sequence[Any], lead: int = 0) -> jax.Array:
        """Returns carries [lead..., shape] as one array of vectors, [lead..., A, M]."""
        parts = []
        for leaf, shape, size in zip(leaves, self.shapes, self.sizes):
            moved = jnp.transpose(leaf, (*range(lead), *(lead + k for k in self._order(shape))))
            parts.append(moved.reshape(*leaf.shape[:lead], *self._lead, size))
        return jnp.concatenate(parts, axis=-1)

    def part(self, joined: jax.Array, lead: int = 0) -> list[jax.Array]:
        """The inverse of `join`."""
        leaves = []
        start = 0
        for shape, size in zip(self.shapes, self.sizes):
            piece = joined[..., start : start + size]
            order = self._order(shape)
            start += size
            piece = piece.reshape(*joined.shape[:lead], *(shape[k] for k in order))
            leaves.append(
                jnp.transpose(
                    piece, (*range(lead), *(lead + order.index(k) for k in range(len(shape))))
                )
            )
        return leaves

    def _order(self, shape: Sequence[int]) -> tuple[int, ...]:
        first = (*self.aligned, *self.same)
        return (*first, *(k for k in range(len(shape)) if k not in first))

    def basis(self, run: Any, like: Sequence[Any]) -> list[jax.Array]:
        """Returns carries of zeros and ones: the derivatives of the new carries along them are columns of the blocks."""
        columns = run * self._lead[-1] + jnp.arange(self._lead[-1]) if self.same else run
        units = jnp.broadcast_to(jax.nn.one_hot(columns, self.block), (*self._lead, self.block))
        return [unit.astype(leaf.dtype) for unit, leaf in zip(self.part(units), like)]

    def matrix(self, derivatives: Sequence[Any]) -> jax.Array:
        """Returns the blocks [A, M, M] from the derivatives along each basis vector, [runs, shape]."""
        columns = self.join(derivatives, 1)
        if self.same:
            columns = jnp.moveaxis(columns, -2, 1)
            columns = columns.reshape(-1, *columns.shape[2:])[: self.block]
        return jnp.moveaxis(columns, 0, -1)

    def jacobian(
        self, push: Callable[[list[Any]], Sequence[Any]], like: Sequence[Any]
    ) -> jax.Array:
        """Returns the blocks [A, M, M] of a linear function of the carries."""
        if self.runs > _UNROLLED:
            return self.matrix(
                jax.vmap(lambda run: push(self.basis(run, like)))(jnp.arange(self.runs))
            )
        return self.matrix(
            [
                jnp.stack(each)
                for each in zip(*(push(self.basis(k, like)) for k in range(self.runs)))
            ]
        )

    def applied(self, blocks: jax.Array, leaves: Sequence[Any]) -> list[jax.Array]:
        """Returns the products of blocks [A, M, M] with carries."""
        vectors = self.join(leaves)
        if not self.same:
            return self.part(rounds.matvec(blocks, vectors))
        return self.part(jnp.einsum("...ij,...cj->...ci", blocks, vectors, precision="highest"))

    def __str__(self) -> str:
        if self.block > len(self.carries):
            return f"a matrix of {self.block} x {self.block}"
        return (
            "elementwise"
            if len(self.carries) == 1
            else f"elementwise in {len(self.carries)} carries"
        )


def blocks_of(program: Program, n_carry: int) -> list[Blocks]:
    """Groups the carries of a step that read each other, each group after those that it reads.

    Args:
        program: the step, from carries and inputs to new carries and outputs, with all calls inlined.
        n_carry: the number of carries.
    """
    carry = program.invars[:n_carry]
    outs = reads_of(program, carry, n_carry)
    groups = jaxprs.components(outs).groups
    return [
        block_of(members, [tuple(carry[i].aval.shape) for i in members], outs) for members in groups
    ]


def reads_of(program: Program, roots: Sequence[Var], count: int | None = None) -> list[Reads]:
    """Returns what the first `count` outputs of a program read of some of its inputs."""
    reads: dict[Var, Reads] = {v: {i: tuple(range(v.aval.ndim))} for i, v in enumerate(roots)}
    for eqn in program.eqns:
        reads.update(zip(eqn.outvars, _through(eqn, reads)))
    return [{} if jaxprs.is_literal(a) else reads.get(a, {}) for a in program.outvars[:count]]


def block_of(
    members: tuple[int, ...], shapes: Sequence[tuple[int, ...]], outs: Sequence[Reads]
) -> Blocks:
    """Returns carries as one group.

    Args:
        members: their positions.
        shapes: their shapes.
        outs: what the new carries read of the old ones.
    """

    def is_aligned(axis: int) -> bool:
        sizes = {shape[axis] if axis < len(shape) else None for shape in shapes}
        if len(sizes) > 1 or None in sizes:
            return False
        reads = (outs[i][j] for i in members for j in members if j in outs[i])
        return sizes == {1} or all(axes[axis] == axis for axes in reads)

    aligned = tuple(axis for axis in range(min(map(len, shapes))) if is_aligned(axis))
    return Blocks(members, tuple(shapes), aligned)


def _through(eqn: Eqn, known: Mapping[Var, Reads]) -> list[Reads]:
    """Returns what the results of an equation read."""
    results: list[Reads] = [{} for _ in eqn.outvars]
    for place, atom in enumerate(eqn.invars):
        if not jaxprs.is_in(atom, known) or not known[atom]:
            continue
        for reads, out in zip(results, eqn.outvars):
            follow = aligned(eqn, place, out)
            for carry, axes in known[atom].items():
                now = tuple(None if axis is None else follow.get(axis) for axis in axes)
                before = reads.get(carry, now)
                reads[carry] = tuple(a if a == b else None for a, b in zip(before, now))
    return results


def why_no_jacobian(closed: Any, carry: Sequence[Any]) -> str | None:
    """Returns the reason why a step has no Jacobian, or may not be evaluated for all steps at once; or None."""
    eqns = list(jaxprs.all_equations(closed.jaxpr))
    why = None
    if not carry:
        why = "nothing is carried"
    elif any(eqn.effects for eqn in closed.jaxpr.eqns):
        why = "it has side effects"
    elif any(map(primitives.draws_differently_under_vmap, eqns)):
        why = "only threefry keys draw the same numbers under vmap"
    elif any(eqn.primitive.name.startswith("custom_vjp_call") for eqn in eqns):
        why = "a function with jax.custom_vjp has no forward-mode derivative; define it with jax.custom_jvp"
    for value in carry:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            why = f"a carry is {value.dtype}, and only real floating-point carries have a Jacobian"
    return why
