"""Stacks that a loop writes side by side in one array, for GPUs, where each array is written by its own kernel.

Shapes: T time.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.loops.ir import Adapter, Length, Loop, Results, RunLoop, Values


def pack_stacks(loop: Loop, max_bytes: int) -> tuple[Loop, Adapter | None]:
    """Packs the arrays that a loop writes at each step, if they have one dtype and differ in their last axis only.

    Invariant: every value is unchanged.

    Args:
        loop: the loop.
        max_bytes: of a pack at one step. Taking a larger one apart after the loop costs more than a kernel in it.

    Returns:
        The loop that writes packs, and its adapter, which takes them apart; None if nothing is packed.
    """
    groups: dict[Any, list[int]] = {}
    for at, atom in enumerate(loop.ys):
        key: Any = ("alone", at)
        if not jaxprs.is_literal(atom) and atom.aval.ndim:
            key = (atom.aval.dtype, atom.aval.shape[:-1])
        groups.setdefault(key, []).append(at)
    packs: list[list[int]] = []
    for group in groups.values():
        fits = sum(map(jaxprs.nbytes, jaxprs.take(loop.ys, group))) <= max_bytes
        packs += [group] if fits else [[at] for at in group]
    if len(packs) == len(loop.ys):
        return loop, None

    def step(*args: Array) -> list[Array]:
        values = loop.step(*args)
        ys = values[len(loop.carry) :]
        outs = values[: len(loop.carry)]
        for pack in packs:
            arrays = jaxprs.take(ys, pack)
            outs.append(jnp.concatenate(arrays, -1) if len(pack) > 1 else arrays[0])
        return outs

    def adapter(run: RunLoop, consts: Values, init: Values, xs: Values, length: Length) -> Results:
        last, packed = run(consts, init, xs, length)
        ys: dict[int, Array] = {}
        for pack, value in zip(packs, packed):
            if len(pack) == 1:
                ys[pack[0]] = value
                continue
            start = 0
            for at in pack:
                end = start + loop.ys[at].aval.shape[-1]
                ys[at] = value[..., start:end]
                start = end
        return list(last), jaxprs.take(ys, range(len(ys)))

    return loop.traced(step, [v.aval for v in loop.inputs], len(loop.carry)), adapter
