"""A scan in a few pieces of time: to do the bulk work of one piece beside the loop of another, or to need little memory.

XLA:CPU runs a loop of small contractions on one core, and what is done before and after it on all of them. In pieces, the
contractions before and after the loop of one piece (inputs, coefficients, gradients of weights) need nothing of the
next piece's loop, and the runtime gives them to the other cores meanwhile. The results are the same; the program is
longer by as many loops. A gradient gains; without one there is too little bulk work, and the scan runs whole.

Unless it is large: arrays of all steps that nobody asked for, such as the projected inputs, cost more to write to fresh
memory and read back than a loop over chunks, whose arrays stay in the caches.

Shapes: T time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrnn.executor import host_memory, jaxprs
from jrnn.executor.fission import Fission
from jrnn.executor.gradient import jvp_where_given
from jrnn.executor.linear import batch_in_front
from jrnn.executor.loop import Loop

_PIECES = 4
# Fewer steps a piece make its contractions too small to be quick.
_STEPS = 12
# A contraction with a larger constant keeps all cores busy by itself, and then pieces only disturb it.
_LARGE = 1 << 22
# Contractions of the loop, over all its steps, that take about a millisecond: below it nothing is worth a task.
_WORK = 10**8

# Bytes beyond which glibc gives memory back and takes it anew, page by page; and what stays in a core's cache.
_BULK = 32 << 20
_CHUNK = 1 << 20

Run = Callable[[Sequence[Any], Sequence[Any], int], tuple[Sequence[Any], Sequence[Any]]]


def count(core: Loop, platform: str) -> int:
    """In how many pieces to run a scan of which `core` is what stays in the loop; 1 for whole."""
    if platform != "cpu" or _cores() < 2 or jax.local_device_count() > 1 or _short(core):
        return 1
    contractions = [e for e in core.eqns if e.primitive.name == "dot_general"]
    constants = [a for e in contractions for a in e.invars if a in core.consts]
    work = core.length * sum(_operations(e) for e in contractions)
    small = constants and max(map(jaxprs.nbytes, constants)) <= _LARGE
    return _PIECES if small and work >= _WORK else 1


def chunk(fission: Fission, platform: str, solved: bool) -> int | None:
    """How many steps at a time to run a scan that is not differentiated; None for all.

    `solved` says that the core is solved and not run, from two factors and a result of each carry at each step.
    """
    if platform != "cpu" or host_memory.kept or _short(fission.loop):
        return None
    asked = {*fission.loop.xs, *(v for v in fission.loop.ys if not jaxprs.is_literal(v))}
    made = {*fission.early, *fission.core.ys, *fission.late} - asked
    step = sum(map(jaxprs.nbytes, made)) + solved * 3 * sum(map(jaxprs.nbytes, fission.core.carry))
    return max(_STEPS, _CHUNK // step) if step * fission.loop.length > _BULK else None


def in_pieces(
    run: Run, init: Sequence[Any], xs: Sequence[Any], steps: int, pieces: int, reverse: bool
) -> tuple[list[Any], list[Any]]:
    """`(last carry, stacked ys)`, flat, of a scan that is run piece by piece.

    Args:
        run: `(carry, xs, steps) -> (carry, ys)` over some of the steps.
        init, xs: what the whole scan is given.
        steps: T.
        pieces: how many.
        reverse: whether time runs backwards.
    """
    sizes = [steps * (i + 1) // pieces - steps * i // pieces for i in range(pieces)]
    parts = list(zip(*(jax.lax.split(x, sizes) for x in xs))) or [()] * pieces
    order = reversed(range(pieces)) if reverse else range(pieces)
    carry, made = list(init), {}
    for i in order:
        carry, made[i] = run(carry, parts[i], sizes[i])
    ys = [jax.lax.concatenate(stacks, 0) for stacks in zip(*(made[i] for i in range(pieces)))]
    return list(carry), ys


def when_differentiated(run: Callable[..., Sequence[Any]], whole: Callable[..., Sequence[Any]]) -> Callable:
    """`whole`, but `run` where derivatives are asked for; both are the same function of flat arguments."""

    @jax.custom_jvp
    def either(*flat: Any) -> Sequence[Any]:
        return batch_in_front(whole(*flat), flat)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return jvp_where_given(run, primals, tangents)

    either.defjvp(rule, symbolic_zeros=True)
    return either


def _operations(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    inner = [eqn.invars[0].aval.shape[a] for a in contracted]
    return 2 * jaxprs.elements(inner) * jaxprs.elements(eqn.outvars[0].aval.shape)


def _short(loop: Loop) -> bool:
    """Too few steps to divide, or as many as `jax.export` leaves open."""
    return not jaxprs.is_known(loop.length) or loop.length < _PIECES * _STEPS


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
