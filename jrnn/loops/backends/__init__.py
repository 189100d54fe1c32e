"""The backends that a loop is planned for. A file here is a backend if it has a `BACKEND`; it proposes nodes (`plans/`)."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from jrnn.loops.backends import accelerator
from jrnn.loops.backends.backend import Backend
from jrnn.loops.loop import Loop, Options
from jrnn.loops.plans import LoopPlan, Target


def _table() -> dict[str, Backend]:
    files = (
        import_module(f"{__name__}.{name}") for name in sorted(file.name for file in pkgutil.iter_modules(__path__))
    )
    backends = [file.BACKEND for file in files if hasattr(file, "BACKEND")]
    rows = [(name, backend) for backend in backends for name in backend.platforms]
    assert len(dict(rows)) == len(rows), f"two backends serve one of {[name for name, _ in rows]}"
    return dict(rows)


BY_PLATFORM = _table()


def of(target: Target) -> Backend:
    """Returns the backend that plans the loops of a platform; an accelerator without a file is planned as a TPU is."""
    return BY_PLATFORM.get(target.platform, accelerator.BACKEND)


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    return of(target).planned(loop, target, options)
