"""The executors of a scan, and which one takes it.

An executor says why it refuses a request, or runs it; a new one is a new row of `EXECUTORS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import ScanError, near
from jrnn.executor import affine, cudnn, jaxprs, pieces, recompute
from jrnn.executor.fission import Fission, split
from jrnn.executor.gradient import differentiable
from jrnn.executor.loop import Loop
from jrnn.executor.masking import masked
from jrnn.executor.step import AS_IT_IS, Traced, trace_step

# From how many steps on an affine step is better solved than run: by rounds on accelerators, where a short loop is as good;
# by a loop of multiplications and additions alone on a CPU, at every length but where carries mix (docs/performance.md).
_SOLVING_PAYS = {"cpu": 1, "gpu": 64, "tpu": 64}


@dataclass(frozen=True)
class Request:
    """A scan that was asked for; the fields are `scan`'s arguments."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    carry: Any
    xs: Any
    length: int | None
    reverse: bool
    unroll: int | bool
    lengths: Any
    recompute: Any
    platform: str

    @functools.cached_property
    def masked(self) -> tuple[Callable, Any]:
        """The step and xs with the lengths worked in."""
        if self.lengths is None:
            return self.step, self.xs
        steps = next((jnp.shape(leaf)[0] for leaf in jax.tree.leaves(self.xs) if jnp.ndim(leaf)), self.length)
        if steps is None:
            return self.step, self.xs  # `jax.lax.scan` says what is wrong with it
        return masked(self.step, self.lengths, self.xs), (jnp.arange(steps), self.xs)

    @functools.cached_property
    def traced(self) -> Traced | None:
        step, xs = self.masked
        return trace_step(step, self.carry, xs, self.length, self.reverse, self.unroll)

    @functools.cached_property
    def fission(self) -> Fission:
        assert self.traced is not None
        return split(self.traced.loop)


@dataclass(frozen=True)
class Executor:
    """A way to run a scan.

    Attributes:
        name: what `executor=` calls it.
        refusal: why it cannot run a request, or None.
        pays: whether "auto" should give it a request that it can run.
        run: runs a request: `(carry, ys)`.
    """

    name: str
    refusal: Callable[[Request], str | None]
    pays: Callable[[Request], bool]
    run: Callable[[Request], tuple[Any, Any]]


def _run_loop(request: Request) -> tuple[Any, Any]:
    traced = request.traced
    if traced is None:
        step, xs = request.masked
        return jax.lax.scan(
            step, request.carry, xs, length=request.length, reverse=request.reverse, unroll=request.unroll
        )
    size = recompute.chunk_length(request.recompute, traced.loop.length)
    if size is not None:
        step, xs = request.masked

        def run_some(carry: Any, xs: Any, steps: int) -> tuple[Any, Any]:
            return _run_loop(Request(step, carry, xs, steps, request.reverse, request.unroll, None, None, ""))

        return recompute.in_chunks(run_some, request.carry, xs, traced.loop.length, size, request.reverse)
    return _run_apart(request, traced)


def _run_apart(request: Request, traced: Traced, solver: Callable[[Loop], Callable] | None = None) -> tuple[Any, Any]:
    """Runs the loop taken apart: where derivatives are asked for in pieces if they pay, otherwise in chunks if it is large.

    Args:
        solver: what makes a runner of the core; the differentiable loop by default.
    """
    loop = traced.loop
    run_core = solver or functools.partial(
        differentiable, forbidden=recompute.forbidden(request.recompute, traced.names)
    )

    @functools.cache
    def parts(steps: int) -> tuple[Fission, Callable]:
        fission = request.fission if steps == loop.length else split(replace(loop, length=steps))
        return fission, run_core(fission.core)

    def run_some(consts: Any, carry: Any, xs: Any, steps: int) -> tuple[Any, Any]:
        fission, core = parts(steps)
        return fission.run(consts, carry, xs, core)

    number = pieces.count(request.fission.core, request.platform)
    chunk = pieces.chunk(request.fission, request.platform, solved=solver is not None)
    if number == 1 and chunk is None:
        return traced.unflatten(*run_some(traced.consts, traced.init, traced.xs, loop.length))
    n_consts, n_carry = len(loop.consts), len(loop.carry)

    def run(number: int, chunk: int | None, *flat: Any) -> list[Any]:
        consts, init, xs = flat[:n_consts], flat[n_consts : n_consts + n_carry], flat[n_consts + n_carry :]
        some = functools.partial(run_some, consts)
        if chunk is not None:
            carry, ys = recompute.in_chunks(some, list(init), list(xs), loop.length, chunk, request.reverse)
        else:
            carry, ys = pieces.in_pieces(some, init, xs, loop.length, number, request.reverse)
        return [*carry, *ys]

    either = pieces.when_differentiated(functools.partial(run, number, None), functools.partial(run, 1, chunk))
    flat = either(*traced.consts, *traced.init, *traced.xs)
    return traced.unflatten(flat[:n_carry], flat[n_carry:])


def _affine_refusal(request: Request) -> str | None:
    if request.traced is None:
        return f"jax.lax.scan itself runs it ({AS_IT_IS})"
    if request.recompute is not None:
        return "it keeps all states, which recompute forbids"
    return affine.refusal(request.fission.core)


def _solving_pays(request: Request) -> bool:
    if request.recompute is not None or request.platform not in _SOLVING_PAYS or request.traced is None:
        return False
    core, long = request.fission.core, jaxprs.extent(request.traced.loop.length) >= _SOLVING_PAYS[request.platform]
    return (
        long
        and affine.suits_bulk(core)
        and not (affine.discards(core) or (request.platform == "cpu" and affine.mixes(core)))
    )


def _run_affine(request: Request) -> tuple[Any, Any]:
    assert request.traced is not None
    return _run_apart(request, request.traced, lambda core: functools.partial(affine.run, core))


EXECUTORS = (
    Executor(
        "cudnn",
        lambda r: cudnn.refusal(r.step, r.carry, r.xs, r.reverse, r.platform),
        lambda r: False,  # faster than a loop, but its gradients are of first order only: it must be asked for
        lambda r: cudnn.run(r.step, r.carry, r.xs, r.lengths),
    ),
    Executor("associative", _affine_refusal, _solving_pays, _run_affine),
    Executor("scan", lambda r: None, lambda r: True, _run_loop),
)


def choose(request: Request, name: str) -> tuple[Executor, list[str]]:
    """The executor that takes a request, and why each one before it does not."""
    reasons = []
    for executor in EXECUTORS:
        if name == "auto" and not executor.pays(request):
            reasons.append(f"{executor.name}: not chosen for this length or purpose")
        elif name in ("auto", executor.name):
            why = executor.refusal(request)
            if why is None:
                return executor, reasons
            reasons.append(f"{executor.name}: {why}")
    names = [e.name for e in EXECUTORS]
    if name not in names:
        raise ScanError(
            f"scan: there is no executor {name!r}; there are auto, {', '.join(names)}{near(str(name), names)}"
        )
    raise ScanError(f"scan: executor {name!r} cannot run this step ({reasons[-1]}); use 'auto' or 'scan'")
