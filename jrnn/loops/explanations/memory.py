"""The temporary memory of a program, estimated from its equations and from the plans of its loops."""

from __future__ import annotations

from jrnn import jaxprs
from jrnn.jaxprs import Eqn
from jrnn.jaxprs.jax_internals import ClosedJaxpr, metadata_of, scan_p
from jrnn.loops.compile import compile_loop
from jrnn.loops.costs.estimates import Estimator
from jrnn.loops.costs.target import Target
from jrnn.loops.ir import ScanParams, tag


def temporary_bytes(closed: ClosedJaxpr, target: Target) -> int | None:
    """Returns the bytes of temporary arrays at the peak, without arguments and results; None without a cost model.

    Args:
        closed: the program, a closed jaxpr.
        target: what it is lowered for.
    """
    if not target.is_estimated:
        return None
    program = jaxprs.inlined(closed, jaxprs.CALLS_AND_CHECKPOINTS)
    once = ScanParams(closed, n_consts=0, n_carry=0, length=1, reverse=False).loop(program)
    once = once.with_eqns(once.eqns, once.outputs)  # without what is dead

    def planned_bytes(eqn: Eqn) -> int | None:
        """Returns the bytes of a tagged loop as it is planned; None for another equation."""
        of_loop = tag.tag_in(metadata_of(eqn)) if eqn.primitive is scan_p else None
        if of_loop is None:
            return None
        with tag.untagged():
            plan = compile_loop(ScanParams.of(eqn.params), target, *of_loop)
        return None if plan.chosen is None else plan.chosen.estimate.memory

    estimator = Estimator(once, target.machine, planned_bytes=planned_bytes)
    return estimator.part(once.eqns, once.outputs, all_steps=True).peak_bytes
