"""What `scan` makes of a step: hoisted, sunk, deferred, stored and recomputed, with bytes, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jrnn.executor import jaxprs, pieces, rewrite
from jrnn.executor import recompute as recomputation
from jrnn.executor.executors import choose
from jrnn.executor.residuals import Perturbed, SideEffects, gradient, is_smooth
from jrnn.executor.scan import request_of
from jrnn.executor.step import AS_IT_IS


@dataclass(frozen=True)
class Item:
    """One value of a step: what makes it, its type, and its bytes over all steps."""

    what: str
    type: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.what} {self.type}" + (f", {self.bytes:,} bytes" if self.bytes else "")


@dataclass(frozen=True)
class Explanation:
    """What `scan` makes of a step.

    Attributes:
        executor: the one that takes it.
        refused: why others do not.
        hoisted: computed for all steps before the loop.
        sunk: computed for all steps after the loop.
        summed: carries that became one sum after the loop.
        deferred: gradients of constants that are formed after the reverse loop.
        stored: stacked by the forward loop for the reverse pass, beside the outputs.
        recomputed: computed again by the reverse pass.
        in_loop: contractions that stay in the forward and in the reverse loop.
        checkpoints: steps between checkpoints, or None.
        pieces: of time in which the loop is run, so that bulk work is done beside it; 1 for whole.
        chunk: steps at a time where no gradients are asked for, or None for all.
    """

    executor: str
    refused: tuple[str, ...]
    hoisted: tuple[Item, ...]
    sunk: tuple[Item, ...]
    summed: tuple[Item, ...]
    deferred: tuple[Item, ...]
    stored: tuple[Item, ...]
    recomputed: tuple[Item, ...]
    in_loop: tuple[int, int]
    checkpoints: int | None
    pieces: int
    chunk: int | None

    @property
    def stored_bytes(self) -> int:
        return sum(item.bytes for item in self.stored)

    def __str__(self) -> str:
        parts = {
            "hoisted before the loop (they do not need the carry)": self.hoisted,
            "sunk behind the loop (only outputs need them)": self.sunk,
            "summed after the loop (carries that only add)": self.summed,
            "gradients formed after the reverse loop": self.deferred,
            f"stored for the reverse pass ({self.stored_bytes:,} bytes)": self.stored,
            "computed again by the reverse pass": self.recomputed,
        }
        lines = [f"executor: {self.executor}", *(f"  not {why}" for why in self.refused)]
        for title, items in parts.items():
            lines += [f"{title}: {'none' if not items else ''}".rstrip(), *(f"  {item}" for item in items)]
        lines.append("contractions left in the loops: {} forward, {} reverse".format(*self.in_loop))
        if self.checkpoints:
            lines.append(f"checkpoints: every {self.checkpoints} steps; the above holds within one chunk")
        if self.pieces > 1:
            lines.append(f"pieces of time, the bulk work of one beside the loop of another: {self.pieces}")
        if self.chunk:
            lines.append(f"steps at a time where no gradients are asked for: {self.chunk}")
        return "\n".join(lines)


def explain_scan(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    lengths: Any = None,
    recompute: Any = None,
    executor: str = "auto",
) -> Explanation:
    """Says what `scan` does with the same arguments, when gradients of everything are asked for; nothing is run.

    >>> import jax.numpy as jnp
    >>> w = jnp.ones((3, 3))
    >>> told = explain_scan(lambda h, x: (jnp.tanh(h @ w + x @ w), h @ w), jnp.ones((2, 3)), jnp.ones((5, 2, 3)))
    >>> print(told)  # doctest: +ELLIPSIS
    executor: scan
    ...
    hoisted before the loop (they do not need the carry):
      dot_general float32[2,3], 120 bytes
    ...
    contractions left in the loops: 1 forward, 1 reverse
    """
    request = request_of(step, carry, xs, length, reverse, unroll, lengths, recompute)
    chosen, refused = choose(request, executor)
    traced = request.traced
    nothing: tuple[Item, ...] = ()
    if traced is None:
        why = f"jax.lax.scan itself runs it ({AS_IT_IS})"
        return Explanation("lax.scan", tuple(dict.fromkeys((*refused, why))), *(nothing,) * 6, (0, 0), None, 1, None)
    steps, fission = traced.loop.length, request.fission
    checkpoints = recomputation.chunk_length(recompute, steps)
    core = rewrite.together(fission.core)
    perturbed = Perturbed.of(core, [is_smooth(v) for v in core.inputs])
    try:
        grad = gradient(core, perturbed, recomputation.forbidden(recompute, traced.names))
    except SideEffects:
        why = "jax.lax.scan itself differentiates the loop (a derivative rule has side effects)"
        return Explanation(chosen.name, (*refused, why), *(nothing,) * 6, (0, 0), checkpoints, 1, None)
    back = grad.fission
    made = jaxprs.producers([*fission.loop.eqns, *grad.forward.eqns, *grad.again, *back.loop.eqns])

    def items(values: Iterable[Any], times: int) -> tuple[Item, ...]:
        return tuple(_item(v, made, times) for v in values if not jaxprs.is_literal(v))

    return Explanation(
        chosen.name,
        tuple(refused),
        items(fission.early, steps),
        items(fission.late, steps),
        items((fission.loop.carry_out[i] for i in fission.summed), 1),
        items(back.summed.values(), 1),
        items(grad.stored, steps),
        items((v for eqn in grad.again if not jaxprs.is_view(eqn) for v in eqn.outvars), 0),
        (_contractions(core.eqns), _contractions(back.core.eqns)),
        checkpoints,
        1 if checkpoints else pieces.count(fission.core, request.platform),
        None if checkpoints else pieces.chunk(fission, request.platform, chosen.name == "associative"),
    )


def _item(v: Any, made: dict[Any, Any], times: int) -> Item:
    eqn = made.get(v)
    scope = str(eqn.source_info.name_stack) if eqn is not None else ""
    what = eqn.primitive.name if eqn is not None else "carry"
    return Item(f"{scope}/{what}" if scope else what, v.aval.str_short(), jaxprs.nbytes(v) * times)


def _contractions(eqns: Iterable[Any]) -> int:
    return sum(jaxprs.is_contraction(eqn) for eqn in eqns)
