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


# One rule a primitive: the axis of the operand -> the axis of the result, or None. --------------------------------------


def _through(eqn: Eqn, found: Mapping[Var, Reads]) -> list[Reads]:
    """Returns what the results of an equation read."""
    rule = _RULES.get(eqn.primitive.name, _nothing)
    made: list[Reads] = [{} for _ in eqn.outvars]
    for place, atom in enumerate(eqn.invars):
        if not jaxprs.is_in(atom, found) or not found[atom]:
            continue
        for reads, out in zip(made, eqn.outvars):
            follow = rule(eqn, place, out)
            for carry, axes in found[atom].items():
                now = tuple(None if axis is None else follow.get(axis) for axis in axes)
                before = reads.get(carry, now)
                reads[carry] = tuple(a if a == b else None for a, b in zip(before, now))
    return made


Follow = dict[int, int]


def _nothing(eqn: Eqn, place: int, out: Any) -> Follow:
    return {}


def _elementwise(eqn: Eqn, place: int, out: Any) -> Follow:
    same = eqn.invars[place].aval.shape == out.aval.shape
    return {k: k for k in range(out.aval.ndim)} if same else {}


def _broadcast(eqn: Eqn, place: int, out: Any) -> Follow:
    shape, to = eqn.invars[place].aval.shape, eqn.params["broadcast_dimensions"]
    return {k: axis for k, axis in enumerate(to) if shape[k] == out.aval.shape[axis]} if place == 0 else {}


def _reshape(eqn: Eqn, place: int, out: Any) -> Follow:
    if eqn.params.get("dimensions") is not None:
        return {}
    old, new = eqn.invars[place].aval.shape, out.aval.shape
    starts = {(math.prod(new[:k]), new[k]): k for k in range(len(new)) if new[k] != 1}
    pairs = ((k, starts.get((math.prod(old[:k]), old[k]))) for k in range(len(old)) if old[k] != 1)
    return {k: axis for k, axis in pairs if axis is not None}


def _without(axes: Callable[[Any], Sequence[int]]) -> Callable[..., Follow]:
    """The rule of primitives that remove axes."""

    def rule(eqn: Eqn, place: int, out: Any) -> Follow:
        gone = axes(eqn)
        kept = [k for k in range(eqn.invars[place].aval.ndim) if k not in gone]
        return {k: axis for axis, k in enumerate(kept)}

    return rule


def _except(axes: Callable[[Any], Sequence[int]]) -> Callable[..., Follow]:
    """The rule of primitives that mix elements along some axes, and keep all axes."""

    def rule(eqn: Eqn, place: int, out: Any) -> Follow:
        return {k: k for k in range(eqn.invars[place].aval.ndim) if k not in axes(eqn)}

    return rule


def _cut(eqn: Eqn) -> list[int]:
    shape = eqn.invars[0].aval.shape
    return [k for k, size in enumerate(eqn.outvars[0].aval.shape) if size != shape[k]]


def _product(eqn: Eqn, place: int, out: Any) -> Follow:
    contracted, batch = eqn.params["dimension_numbers"]
    free = [
        [k for k in range(a.aval.ndim) if k not in contracted[side] and k not in batch[side]]
        for side, a in enumerate(eqn.invars)
    ]
    follow = {k: axis for axis, k in enumerate(batch[place])}
    start = len(batch[0]) + (len(free[0]) if place else 0)
    return {**follow, **{k: start + axis for axis, k in enumerate(free[place])}}


_RULES: dict[str, Callable[..., Follow]] = {
    **dict.fromkeys(primitives.ELEMENTWISE, _elementwise),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _without(lambda eqn: eqn.params["dimensions"]),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"),
        _without(lambda eqn: eqn.params["axes"]),
    ),
    "transpose": lambda eqn, place, out: {k: axis for axis, k in enumerate(eqn.params["permutation"])},
    "slice": _except(_cut),
    "split": _except(lambda eqn: [eqn.params["axis"]]),
    "concatenate": _except(lambda eqn: [eqn.params["dimension"]]),
    "stack": lambda eqn, place, out: {k: k + (k >= eqn.params["axis"]) for k in range(eqn.invars[place].aval.ndim)},
    "unstack": _without(lambda eqn: [eqn.params["axis"]]),
    "tile": lambda eqn, place, out: {
        k: k for k, reps in enumerate(eqn.params["reps"]) if reps == 1 and len(eqn.params["reps"]) == out.aval.ndim
    },
    "rev": _except(lambda eqn: eqn.params["dimensions"]),
    "pad": lambda eqn, place, out: (
        {k: k for k, padding in enumerate(eqn.params["padding_config"]) if padding == (0, 0, 0)} if place == 0 else {}
    ),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _except(lambda eqn: [eqn.params["axis"]])
    ),
    "dot_general": _product,
}
