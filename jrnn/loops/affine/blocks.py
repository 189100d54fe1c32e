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
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Program, Var, primitives
from jrnn.jaxprs.axes import aligned
from jrnn.loops.affine import rounds
from jrnn.loops.affine.carries import Group, Values

_UNROLLED = 4  # blocks up to this size are computed column by column, without `vmap`

Axes = tuple[int, ...]
Shape = tuple[int, ...]
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

    carries: Group
    shapes: tuple[Shape, ...]
    aligned: Axes
    same: Axes = ()

    @property
    def batch(self) -> Shape:
        """The sizes of the aligned axes."""
        return tuple(jaxprs.take(self.shapes[0], self.aligned))

    @property
    def _vectors(self) -> int:
        """How many vectors have the same block."""
        return math.prod(jaxprs.take(self.shapes[0], self.same))

    @property
    def _lead(self) -> Shape:
        """The axes of vectors before the last: the batch axes, and how many vectors have the same block."""
        return (*self.batch, self._vectors) if self.same else self.batch

    @property
    def sizes(self) -> Axes:
        """The number of elements of each carry in a block."""
        count = max(1, math.prod(self._lead))
        return tuple(math.prod(shape) // count for shape in self.shapes)

    @property
    def block(self) -> int:
        """M, the number of rows of a block."""
        return sum(self.sizes)

    @property
    def runs(self) -> int:
        """The number of `basis` vectors from which the step computes all columns of the blocks."""
        return -(-self.block // self._vectors)

    def join(self, leaves: Values, lead: int = 0) -> Array:
        """Returns carries [lead..., shape] as one array of vectors, [lead..., A, M]."""
        parts = []
        axes_before = tuple(range(lead))
        for leaf, shape, size in zip(leaves, self.shapes, self.sizes):
            order = map(lead.__add__, self._order(shape))
            moved = jnp.transpose(leaf, (*axes_before, *order))
            parts.append(moved.reshape(*leaf.shape[:lead], *self._lead, size))
        return jnp.concatenate(parts, axis=-1)

    def part(self, joined: Array, lead: int = 0) -> list[Array]:
        """The inverse of `join`."""
        leaves = []
        start = 0
        for shape, size in zip(self.shapes, self.sizes):
            part = joined[..., start : start + size]
            start += size
            order = self._order(shape)
            part = part.reshape(*joined.shape[:lead], *jaxprs.take(shape, order))
            back = [lead + order.index(axis) for axis in range(len(shape))]
            leaves.append(jnp.transpose(part, (*range(lead), *back)))
        return leaves

    def _order(self, shape: Sequence[int]) -> Axes:
        first = (*self.aligned, *self.same)
        others = sorted(set(range(len(shape))).difference(first))
        return (*first, *others)

    def basis(self, run: Any, like: Values) -> list[Array]:
        """Returns carries of zeros and ones: the derivatives of the new carries along them are columns of the blocks."""
        columns = run
        if self.same:
            columns = run * self._vectors + jnp.arange(self._vectors)
        units = jnp.broadcast_to(jax.nn.one_hot(columns, self.block), (*self._lead, self.block))
        return [unit.astype(leaf.dtype) for unit, leaf in zip(self.part(units), like)]

    def matrix(self, derivatives: Values) -> Array:
        """Returns the blocks [A, M, M] from the derivatives along each basis vector, [runs, shape]."""
        columns = self.join(derivatives, 1)
        if self.same:
            columns = jnp.moveaxis(columns, -2, 1)
            columns = columns.reshape(-1, *columns.shape[2:])[: self.block]
        return jnp.moveaxis(columns, 0, -1)

    def jacobian(self, push: Callable[[Values], Values], like: Values) -> Array:
        """Returns the blocks [A, M, M] of a linear function of the carries."""

        def column(run: Any) -> Values:
            return push(self.basis(run, like))

        if self.runs > _UNROLLED:
            return self.matrix(jax.vmap(column)(jnp.arange(self.runs)))
        columns = map(column, range(self.runs))
        return self.matrix(list(map(jnp.stack, zip(*columns))))

    def applied(self, blocks: Array, leaves: Values) -> list[Array]:
        """Returns the products of blocks [A, M, M] with carries."""
        vectors = self.join(leaves)
        if not self.same:
            return self.part(rounds.matvec(blocks, vectors))
        return self.part(jnp.einsum("...ij,...cj->...ci", blocks, vectors, precision="highest"))

    def __str__(self) -> str:
        if self.block > len(self.carries):
            return f"a matrix of {self.block} x {self.block}"
        count = len(self.carries)
        return "elementwise" if count == 1 else f"elementwise in {count} carries"


def blocks_of(program: Program, n_carry: int) -> list[Blocks]:
    """Groups the carries of a step that read each other, each group after the groups that it reads.

    Args:
        program: the step, from carries and inputs to new carries and outputs, with all calls inlined.
        n_carry: the number of carries.
    """
    carry = program.invars[:n_carry]
    outs = reads_of(program, carry, n_carry)
    blocks = []
    for members in jaxprs.components(outs).groups:
        shapes = [tuple(carry[i].aval.shape) for i in members]
        blocks.append(block_of(members, shapes, outs))
    return blocks


def reads_of(
    program: Program,
    roots: Sequence[Var],
    count: int | None = None,
) -> list[Reads]:
    """Returns what the first `count` outputs of a program read of some of its inputs."""
    reads: dict[Var, Reads] = {}
    for i, v in enumerate(roots):
        reads[v] = {i: tuple(range(v.aval.ndim))}
    for eqn in program.eqns:
        reads.update(zip(eqn.outvars, _through(eqn, reads)))
    outs: list[Reads] = []
    for atom in program.outvars[:count]:
        outs.append(reads[atom] if jaxprs.is_in(atom, reads) else {})
    return outs


def block_of(
    members: Group,
    shapes: Sequence[Shape],
    outs: Sequence[Reads],
) -> Blocks:
    """Returns carries as one group.

    Args:
        members: their positions.
        shapes: their shapes.
        outs: what the new carries read of the old ones.
    """

    reads: list[AlignedAxes] = []
    for i in members:
        for j in outs[i].keys() & members:
            reads.append(outs[i][j])

    def is_aligned(axis: int) -> bool:
        sizes = {shape[axis] for shape in shapes}
        if sizes == {1}:
            return True
        return len(sizes) == 1 and all(axes[axis] == axis for axes in reads)

    aligned = tuple(filter(is_aligned, range(min(map(len, shapes)))))
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


def why_no_jacobian(closed: Any, carry: Values) -> str | None:
    """Returns the reason why a step has no Jacobian, or may not be evaluated for all steps at once; or None."""
    for value in carry:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return f"a carry is {value.dtype}, and only real floating-point carries have a Jacobian"
    if not carry:
        return "nothing is carried"
    if closed.effects:
        return "it has side effects"
    for eqn in jaxprs.all_equations(closed.jaxpr):
        if primitives.draws_differently_under_vmap(eqn):
            return "only threefry keys draw the same numbers under vmap"
        if eqn.primitive.name.startswith("custom_vjp_call"):
            return "a function with jax.custom_vjp has no forward-mode derivative; define it with jax.custom_jvp"
    return None
