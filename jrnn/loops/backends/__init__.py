"""The backends that a loop is planned for. A file here is a backend if it has a `BACKEND`; it proposes nodes (`plans/`)."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from jrnn import jaxprs
from jrnn.loops.backends import accelerator
from jrnn.loops.backends.backend import Backend
from jrnn.loops.costs import tuned
from jrnn.loops.costs.candidates import REFERENCE
from jrnn.loops.loop import Loop, Options
from jrnn.loops.plans import LoopPlan, Target

PLANNED = "as planned"  # the way that a backend chose, where it compares no candidates


def _table() -> dict[str, Backend]:
    files = (
        import_module(f"{__name__}.{name}") for name in sorted(file.name for file in pkgutil.iter_modules(__path__))
    )
    table: dict[str, Backend] = {}
    for backend in (file.BACKEND for file in files if hasattr(file, "BACKEND")):
        assert table.keys().isdisjoint(backend.serves), f"two backends serve one of {backend.serves}"
        table |= dict.fromkeys(backend.serves, backend)
    return table


BACKENDS = _table()


def _backend(target: Target, options: Options) -> Backend:
    return BACKENDS.get(options.executor) or BACKENDS.get(target.platform, accelerator.ANY)


def plan(loop: Loop, target: Target, options: Options, take: str | None = None) -> LoopPlan:
    """Returns the plan of a loop: the way `take` if there is such a one, or else the one that is estimated to be best."""
    if jaxprs.is_known(loop.length) and loop.length == 0:
        return LoopPlan.left(target, loop, "it has no steps")
    if take is None and options.executor == "auto" and not options.strict and _has_one_step(loop):
        return LoopPlan.left(target, loop, "it has one step")
    backend = _backend(target, options)
    if backend.ways is not None:
        return backend.plan(loop, target, options, take)
    return LoopPlan.left(target, loop, tuned.NOTE + take) if take == REFERENCE else backend.plan(loop, target, options)


def _has_one_step(loop: Loop) -> bool:
    return jaxprs.is_known(loop.length) and loop.length == 1


def ways(planned: LoopPlan, options: Options) -> tuple[tuple[str, ...], tuple[int, int]]:
    """Returns the names of all ways to run the loop of a plan, that of the plan first; and `Question.held`."""
    backend = _backend(planned.target, options)
    if backend.ways is None or planned.choice is None or planned.loop is None:
        return tuple(dict.fromkeys([PLANNED if planned.executor != REFERENCE else REFERENCE, REFERENCE])), (0, 0)
    others, held = backend.ways(planned.loop, planned.target, options)
    others.sort(key=lambda way: way.estimate.seconds)
    return tuple(dict.fromkeys([planned.choice.chosen.way, REFERENCE, *(way.way for way in others)])), held
