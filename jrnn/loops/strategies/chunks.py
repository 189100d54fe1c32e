"""The strategy "chunks": a loop over matrix states that is differentiated runs in chunks of steps (`loops/chunks/`).

Shapes: T time, C steps of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import argument_names
from jrnn.loops.affine.carries import NotAffine
from jrnn.loops.chunks.chunked import Chunkwise, chunkwise
from jrnn.loops.chunks.control_flow import expand_control
from jrnn.loops.ir import Refused, ScanParams, derived
from jrnn.loops.passes.canonical import with_plain_carries
from jrnn.loops.strategies.candidates import Candidate
from jrnn.loops.strategies.nodes import converted
from jrnn.loops.strategies.plan import Target
from jrnn.loops.strategies.problem import Problem

# A program in chunks is compared with its loop for three chunks of this length, of which the last is not full.
_COMPARED_CHUNK = 4
_COMPARED = 11

# Elements of S in all; a delta rule on 4 x 16 x 16 took 1.1 times the time of its steps, on 16 x 32 x 32 0.96.
_MIN_ELEMENTS = 2048

_MIN_GAIN = 0.25  # the part of the time that chunks must save: their program takes several times as long to compile


def may_pay(scan: ScanParams) -> bool:
    """Returns True if training a loop in chunks may be faster than step by step: T of two chunks, and a large state."""
    _, carry, xs = scan.partition(jaxprs.jaxpr_of(scan.jaxpr).invars)
    most_bytes = max(map(jaxprs.nbytes, xs), default=0)
    large = [
        v
        for v in carry
        if v.aval.ndim > 1
        and jaxprs.nbytes(v) > 2 * most_bytes
        and sum(n > 1 for n in v.aval.shape) > 1
    ]
    return scan.length >= 128 and any(
        v.aval.shape and jaxprs.elements(v.aval.shape) >= _MIN_ELEMENTS for v in large
    )


def propose(problem: Problem) -> Sequence[Candidate]:
    """Returns the loop in chunks."""
    names = _names(problem.scan, problem.conversions)
    batched = prefers_batched(problem.target)
    try:
        node = chunkwise(problem.loop, problem.constants, names, batched)
    except NotAffine as reason:
        raise Refused(reason.why) from reason
    node = replace(node, stored=problem.stored_bytes)
    return [problem.candidate(node, "in chunks", _MIN_GAIN if node.stages else 0.0)]


def finish(problem: Problem, node: Chunkwise) -> Chunkwise:
    """Returns the node if it agrees with the loop on random numbers; raises `Refused` if not."""
    if not problem.options.verify or not node.stages:
        return node
    short_scan = replace(problem.scan, length=_COMPARED, unroll=1)
    kind = "chunks at once" if node.batched else "chunks"
    agrees, note = derived.validate(
        short_scan, kind, functools.partial(_run_in_short_chunks, node.batched)
    )
    if not agrees:
        raise Refused(note)
    return replace(node, notes=(*node.notes, note)) if note else node


def prefers_batched(target: Target) -> bool:
    """Returns True for platforms on which the number of kernels determines the time of a chunk."""
    return target.platform != "cpu"


def _names(scan: ScanParams, conversions: Sequence[Any]) -> list[str]:
    """Returns what the user calls each carry of a loop, which holds parts of each of the step's; or nothing."""
    names = argument_names(jaxprs.jaxpr_of(scan.jaxpr))[scan.n_consts :][: scan.n_carry]
    if len(names) < scan.n_carry or not all(names):
        return []
    for conversion in conversions:
        _, names, _ = conversion.map_inputs((), names, ())
    return names


def _run_in_short_chunks(batched: bool, scan: ScanParams) -> derived.Run:
    """Returns the loop of a step in chunks of few steps."""
    program = expand_control(scan.jaxpr)
    loop, conversions = with_plain_carries(scan.loop(program))
    node = replace(
        chunkwise(loop, dict(zip(loop.consts, program.consts)), batched=batched),
        size=_COMPARED_CHUNK,
    )
    return lambda consts, init, xs: converted(node, conversions).run(
        [*program.consts, *consts], init, xs, scan.length
    )
