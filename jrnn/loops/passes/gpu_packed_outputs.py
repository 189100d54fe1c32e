"""Stacks that a loop writes side by side in one array, for GPUs, where each array is written by its own kernel.

Shapes: T time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.loops.ir import Loop, Results, RunLoop


@dataclass(frozen=True)
class PackedStacks:
    """Takes the packs that a loop writes apart.

    Attributes:
        packs: for each pack, the positions of its stacks and their widths in it.
        stacks: the number of stacks.
    """

    packs: tuple[tuple[tuple[int, int], ...], ...]
    stacks: int

    def adapt(
        self,
        run: RunLoop,
        consts: Sequence[Any],
        init: Sequence[Any],
        xs: Sequence[Any],
        length: Any,
    ) -> Results:
        last, packed = run(consts, init, xs, length)
        ys: list[Any] = [None] * self.stacks
        for pack, value in zip(self.packs, packed):
            at = 0
            for position, width in pack:
                ys[position] = value if len(pack) == 1 else value[..., at : at + width]
                at += width
        return list(last), ys


def pack_stacks(loop: Loop, max_bytes: int) -> tuple[Loop, PackedStacks | None]:
    """Packs the arrays that a loop writes at each step, if they have one dtype and differ in their last axis only.

    Invariant: every value is unchanged.

    Args:
        loop: the loop.
        max_bytes: of a pack at one step. Taking a larger one apart after the loop costs more than a kernel in it.

    Returns:
        The loop that writes packs, and how to take them apart; None if nothing is packed.
    """
    groups: dict[Any, list[int]] = {}
    for at, atom in enumerate(loop.ys):
        alone = jaxprs.is_literal(atom) or not atom.aval.ndim
        groups.setdefault(
            ("alone", at) if alone else (atom.aval.dtype, atom.aval.shape[:-1]), []
        ).append(at)
    packs: list[list[int]] = []
    for group in groups.values():
        fits = sum(jaxprs.nbytes(loop.ys[at]) for at in group) <= max_bytes
        packs += [group] if fits else [[at] for at in group]
    if len(packs) == len(loop.ys):
        return loop, None

    def step(*args: Any) -> list[Any]:
        env = jaxprs.evaluate(loop.eqns, dict(zip(loop.inputs, args)))
        values = [jaxprs.value(env, a) for a in loop.outputs]
        carry = values[: len(loop.carry)]
        ys = values[len(loop.carry) :]
        return [
            *carry,
            *(
                jnp.concatenate([ys[at] for at in pack], -1) if pack[1:] else ys[pack[0]]
                for pack in packs
            ),
        ]

    packed = loop.traced(step, [v.aval for v in loop.inputs], len(loop.carry))
    widths = tuple(
        tuple((at, loop.ys[at].aval.shape[-1] if pack[1:] else 0) for at in pack) for pack in packs
    )
    return packed, PackedStacks(widths, len(loop.ys))
