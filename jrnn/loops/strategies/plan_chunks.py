"""Whether a loop that is about to be differentiated may run in chunks: quick questions, before the form is derived.

`try_chunks.py` derives it. Most loops need not load that file.

Shapes: T time.
"""

from __future__ import annotations

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import are_arrays, cached
from jrnn.loops.costs.constants import CHUNKS
from jrnn.loops.costs.target import Target
from jrnn.loops.ir import AUTO, Options, ScanParams, Unsupported, planning, tag
from jrnn.loops.plan import Plan, left_after_error


@cached(256)
def plan_to_differentiate(
    scan: ScanParams, target: Target, options: Options, tangents: tuple[bool, ...]
) -> Plan | None:
    """Returns the plan of a loop that is about to be differentiated, or None if it need not be read.

    A plan without a node leaves it to JAX's rules.

    Args:
        scan: the loop.
        target: what it is lowered for.
        options: the caller's.
        tangents: which of its inputs have tangents.
    """
    body = jaxprs.jaxpr_of(scan.jaxpr)
    if not jaxprs.is_known(scan.length) or body.effects:
        return None
    if not are_arrays([v.aval for v in body.invars]) or options.executor not in (AUTO, "chunks"):
        return None
    if options.executor == AUTO and not chunks_may_pay(scan):
        return None
    from jrnn.loops.strategies import try_chunks

    try:
        with tag.untagged(), planning.budget(scan.jaxpr):
            return try_chunks.try_chunks(scan, target, options, tangents)
    except Unsupported as why:
        return Plan.left_to_jax(target, None, f"not {try_chunks.NAME}: {why.explained()}")
    except Exception as error:
        return left_after_error(error, target, None)


def chunks_may_pay(scan: ScanParams) -> bool:
    """Returns True if training a loop in chunks may be faster than step by step: T of two chunks, and a large state."""
    if scan.length < CHUNKS.min_steps:
        return False
    _, carry, xs = scan.partition(jaxprs.jaxpr_of(scan.jaxpr).invars)
    max_bytes = max(map(jaxprs.nbytes, xs), default=0)
    for v in carry:
        shape = v.aval.shape
        is_matrix = len(shape) > 1 and sum(n > 1 for n in shape) > 1
        is_large = (
            jaxprs.nbytes(v) > 2 * max_bytes and jaxprs.elements(shape) >= CHUNKS.min_state_elements
        )
        if is_matrix and is_large:
            return True
    return False
