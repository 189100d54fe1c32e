"""What is differentiated in the place of a tagged loop (`replacement.py`), each as a function of the loop's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import are_arrays, cached
from jrnn.loops.ir import ScanParams, Tag, observers, tag
from jrnn.loops.passes import canonical
from jrnn.loops.strategies import Steps, Target, chooser, converted


def by_strategy(
    loop_tag: Tag, scan: ScanParams, argnums: Sequence[int]
) -> Callable[..., Sequence[Any]] | None:
    """Returns the node of a loop's plan, such as a program in chunks, where JAX would store every state."""
    if isinstance(loop_tag.options.recompute, tuple):
        return None
    plan = chooser.differentiated(scan, Target.here(), loop_tag.options, _moves(scan, argnums))
    if plan is None or plan.node is None:
        for note in plan.notes if plan is not None else ():
            observers.notify(note)
        return None
    chooser.report(plan)
    return _within(tag.untagged, scan.flat(plan.node.run, plan.constants))


def rewritten(
    loop_tag: Tag, scan: ScanParams, argnums: Sequence[int]
) -> Callable[..., Sequence[Any]] | None:
    """Returns a loop whose derivative is cheaper (`passes/canonical/`)."""
    loop = _rewritten(scan, _moves(scan, argnums))
    return None if loop is None else _within(lambda: tag.tagged(loop_tag), scan.flat(*loop))


def _within(
    context: Callable[[], Any], run: Callable[..., Sequence[Any]]
) -> Callable[..., Sequence[Any]]:
    def program(*args: Any) -> Sequence[Any]:
        with context():
            return run(*args)

    return program


def _moves(scan: ScanParams, argnums: Sequence[int]) -> tuple[bool, ...]:
    return tuple(i in argnums for i in range(len(jaxprs.jaxpr_of(scan.jaxpr).invars)))


@cached(256)
def _rewritten(
    scan: ScanParams, moves: Sequence[bool]
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Returns what runs such a loop, and the values of its constants."""
    body = jaxprs.jaxpr_of(scan.jaxpr)
    if body.effects or not are_arrays([v.aval for v in body.invars]):
        return None
    program = jaxprs.inlined(scan.jaxpr)
    loop, conversions = canonical.for_derivatives(
        scan.loop(program), [v for v, m in zip(program.invars, moves) if m]
    )
    return (converted(Steps(loop), conversions).run, program.consts) if conversions else None
