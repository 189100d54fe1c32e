"""Differentiation of a marked loop with matrix states: the chunk program (`loops/chunks/`) is differentiated in its place.

JAX's rules would store the state at every step. This has to happen before them: once a loop is differentiated, its states
are among the residuals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

with suppress(ImportError):  # `installation` reports missing names
    from jax._src.interpreters import ad

from jrnn import jaxprs
from jrnn.loops.costs import tuned
from jrnn.loops.costs.candidates import Choice
from jrnn.loops.costs.machines import Machine
from jrnn.loops.costs.tuned import Question
from jrnn.loops.loop import Loop, Options, ScanParams, derived, mark, recorder, strict_passes
from jrnn.loops.plans import LoopPlan, Target

if TYPE_CHECKING:  # it loads when a marked loop is differentiated
    from jrnn.loops.chunks import Chunked

# A program in chunks is compared with its loop for three chunks of this length, of which the last is not full.
_COMPARED_CHUNK = 4
_COMPARED = 11

BY_STEPS, _SIZES = "step by step", (32, 16, 64, 128)  # ways to run a loop: steps one by one, and lengths of chunks

# In a program that is differentiated, `checkpoint` only says what must not be stored, and a chunk stores none of it.
_CALLS = {**jaxprs.CALLS, "checkpoint": "jaxpr", "remat2": "jaxpr"}


def jvp(rule: Callable, current_metadata: Callable) -> Callable:
    """Wraps JAX's rule for the forward mode of a scan."""

    @functools.wraps(rule)
    def differentiate(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        places = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
        moving = [tangents[i] for i in places]
        results = _in_chunks(current_metadata(), params, primals, places, lambda of, at: jax.jvp(of, at, moving))
        if results is None:
            return rule(primals, tangents, **params)
        outs, moved = results
        return outs, [_tangent(o, t) for o, t in zip(outs, moved)]

    return differentiate


def linearize(rule: Callable, current_metadata: Callable) -> Callable:
    """Wraps JAX's rule for the reverse mode of a scan."""

    @functools.wraps(rule)
    def differentiate(is_vjp: bool, nonzeros: Sequence[bool], *primals: Any, **params: Any) -> Any:
        smooth = [jnp.issubdtype(jax.typeof(p).dtype, jnp.inexact) for p in primals]
        places = [i for i, nz in enumerate(nonzeros) if nz and smooth[i]]
        results = _in_chunks(current_metadata(), params, primals, places, lambda of, at: jax.linearize(of, *at))
        if results is None:
            return rule(is_vjp, nonzeros, *primals, **params)
        outs, linear = results

        def linearized(*args: Any) -> list[Any]:
            tangents = args[-len(primals) :]  # after the residuals, which `linear` holds
            moved = linear(*(ad.instantiate_zeros(tangents[i]) for i in places))
            return [_tangent(o, t) for o, t in zip(outs, moved)]

        structured = () if jax.__version_info__ < (0, 12) else (None,)
        moves = [jnp.issubdtype(o.dtype, jnp.inexact) for o in outs]
        return outs, moves, jax.tree.leaves(linear), *structured, linearized

    return differentiate


def _in_chunks(
    metadata: Any, params: dict[str, Any], primals: Sequence[Any], places: Sequence[int], transform: Callable
) -> Any:
    """Returns what a transformation makes of the program in chunks, or None to leave the scan to JAX's rule.

    Args:
        metadata: the mark.
        params: those of the equation.
        primals: its arguments.
        places: of the arguments that have tangents.
        transform: of a function of these arguments, and their values.
    """
    run = _program(metadata, params, primals, [i in places for i in range(len(primals))]) if places else None
    if run is None:
        return None
    try:
        return transform(lambda *some: run(jaxprs.replaced(primals, places, some)), [primals[i] for i in places])
    except Exception as error:  # such as for types of `jax.shard_map`
        if strict_passes.value:
            raise
        recorder.note(f"not in chunks: {type(error).__name__} (please report it): {error}")
        return None


def _tangent(out: Any, tangent: Any) -> Any:
    aval = jax.typeof(out)
    return tangent if jnp.issubdtype(aval.dtype, jnp.inexact) else ad.Zero(aval.to_tangent_aval())


def _program(
    metadata: Any, params: dict[str, Any], primals: Sequence[Any], moves: Sequence[bool]
) -> Callable[[Sequence[Any]], list[Any]] | None:
    """Returns a function of a scan's arguments that runs it in chunks, or None to leave it to other rules.

    Args:
        metadata: the mark.
        params: those of the equation.
        primals: its arguments.
        moves: which of them have tangents.
    """
    options = mark.options_in(metadata)
    if options is None or options.executor != "auto" or isinstance(options.recompute, tuple):
        return None
    scan, target = ScanParams.of(params), Target.here()
    chunked = _chosen(scan, params, [jax.typeof(v) for v in primals], moves, options, target)
    if chunked is None:
        return None
    if isinstance(chunked, str):
        recorder.note(chunked)
        return None
    program, values, choice = chunked
    recorder.record(LoopPlan(target, program.loop, None, "chunks", program.notes, choice))

    def run(args: Sequence[Any]) -> list[Any]:
        with mark.unmarked():
            return scan.flat(program.run, values)(*args)

    return run


def _chosen(
    scan: ScanParams,
    params: dict[str, Any],
    avals: Sequence[Any],
    moves: Sequence[bool],
    options: Options,
    target: Target,
) -> tuple[Chunked, Sequence[Any], Choice] | str | None:
    """Returns what was chosen by measurement, or else what is estimated to be best."""
    given = scan, options, tuple(moves), target.machine
    device = functools.partial(tuned.device, target.platform, target.kind)
    key = functools.cache(lambda: tuned.key_of(f"gradient {list(moves)}", params, avals, options, device()))
    chunked = _chunked(*given, tuned.taken(key))
    if tuned.is_asked() and isinstance(_chunked(*given, _in_chunks_of(_SIZES[0])), tuple):
        chosen = _in_chunks_of(chunked[0].size) if isinstance(chunked, tuple) else BY_STEPS
        names = dict.fromkeys([chosen, BY_STEPS, *map(_in_chunks_of, _SIZES)])
        title = recorder.titled(f"gradient of a loop of {scan.length} steps over matrix states on {target.platform}")
        tuned.ask(Question(key(), params, tuple(avals), options, tuple(moves), tuple(names), title))
    return chunked


def _in_chunks_of(size: int) -> str:
    """Names a way to run a loop."""
    return f"in chunks of {size}"


@functools.lru_cache(maxsize=256)
def _chunked(
    scan: ScanParams, options: Options, moves: tuple[bool, ...], machine: Machine, take: str | None = None
) -> tuple[Chunked, Sequence[Any], Choice] | str | None:
    """Returns a loop in chunks, the values of its constants, and the candidates; or the reason if it stays as it is.

    Returns None for loops that need not be tried.
    """
    from jrnn.loops import chunks

    body = jaxprs.jaxpr_of(scan.jaxpr)
    if not jaxprs.is_known(scan.length) or body.effects:
        return None
    if not all(type(v.aval).__name__ == "ShapedArray" for v in body.invars) or not chunks.pays(scan):
        return None
    try:
        with mark.unmarked():
            program, loop, holds = _read(scan)
            chunks.check(loop)  # before it is differentiated, which reverse-mode rules in it do not allow
            consts, carry, xs = scan.apart(moves)
            parts = [h.parts for h in holds]
            carried = [m for m, n in zip(carry, parts) for _ in range(n)]
            stored = chunks.stored_states(loop, [*(False for _ in program.consts), *consts, *carried, *xs])
            if not stored:
                return "not in chunks: this gradient reads no state"
        names = _names(body, scan.n_consts, parts)
        chunked = chunks.chunked(loop, dict(zip(loop.consts, program.consts)), holds, names)
        forms = tuple(form for stage in chunked.stages for form in stage.forms)
        choice = chunks.compared(chunked.loop, forms, stored, chunks.chunk_length(scan.length), options.memory, machine)
        if take == BY_STEPS:
            return f"not in chunks: {tuned.NOTE}{take}"
        size = next((size for size in _SIZES if take == _in_chunks_of(size)), None)
        if size is not None:
            chunked = replace(chunked, size=size, notes=(*chunked.notes, f"{tuned.NOTE}{take}"))
        elif not choice.chosen.node:
            (other, reason), at = choice.others[0], choice.chosen.estimate
            return f"not in chunks: {reason}: {other.estimate} in chunks, {at} step by step"
        if options.verify and chunked.stages:
            agrees, note = derived.verdict(replace(scan, length=_COMPARED, unroll=1), "chunks", _small)
            if not agrees:
                return f"not in chunks: {note}"
            chunked = replace(chunked, notes=(*chunked.notes, note)) if note else chunked
        return chunked, program.consts, choice
    except chunks.NotAffine as reason:
        return f"not in chunks: {reason if reason.eqn is None else reason.explained()}"  # several have their remedies
    except Exception as error:
        if strict_passes.value:
            raise
        return f"not in chunks: {type(error).__name__} (please report it): {error}"


def _names(body: Any, n_consts: int, parts: Sequence[int]) -> list[str]:
    """Returns what the user calls each carry of a loop, which holds so many parts of each of the step's; or nothing."""
    names = list(getattr(getattr(body, "debug_info", None), "arg_names", None) or ())[n_consts:]
    if len(names) < len(parts) or not all(names[: len(parts)]):
        return []
    return [name for name, count in zip(names, parts) for _ in range(count)]


def _read(scan: ScanParams) -> tuple[jaxprs.Program, Loop, Any]:
    """Returns the program of a step, its loop, and how the loop holds the carries."""
    from jrnn.loops import chunks

    program = chunks.opened(scan.jaxpr, _CALLS)
    return program, *chunks.held(scan.loop(program))


def _small(scan: ScanParams) -> derived.Run:
    """Returns the loop of a step in chunks of few steps."""
    from jrnn.loops import chunks

    program, loop, holds = _read(scan)
    chunked = replace(chunks.chunked(loop, dict(zip(loop.consts, program.consts)), holds), size=_COMPARED_CHUNK)
    return lambda consts, init, xs: chunked.run([*program.consts, *consts], init, xs, scan.length)
