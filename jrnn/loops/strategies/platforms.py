"""The backends that a loop is planned for, by platform."""

from __future__ import annotations

from jrnn.loops.ir import Loop, Options
from jrnn.loops.strategies import accelerator, cpu, gpu
from jrnn.loops.strategies.backend import Backend
from jrnn.loops.strategies.plan import LoopPlan, Target

BY_PLATFORM = {
    name: backend for backend in (cpu.BACKEND, gpu.BACKEND, accelerator.BACKEND) for name in backend.platforms
}


def of(target: Target) -> Backend:
    """Returns the backend that plans the loops of a platform; an accelerator without a file is planned as a TPU is."""
    return BY_PLATFORM.get(target.platform, accelerator.BACKEND)


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    return of(target).planned(loop, target, options)
