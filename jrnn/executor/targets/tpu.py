"""The TPU target: the passes of accelerators, and the loop that stays as one kernel (`kernels/`) where it can be one."""

from __future__ import annotations

from dataclasses import replace

from jrnn.executor.kernels import Persistent, Refused, kernel_of
from jrnn.executor.loop import Loop, strict_passes
from jrnn.executor.mark import Options
from jrnn.executor.passes import WideSums
from jrnn.executor.plan import LoopPlan, Runner, Target
from jrnn.executor.targets import accelerator

KERNEL = "persistent"


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    """The plan of a loop on a TPU, or, where the kernel is asked for by name, on any platform."""
    asked = options.executor == KERNEL
    found = accelerator.plan(loop, target, replace(options, executor="scan") if asked else options)
    if found.executor != "scan" or options.executor == "scan":
        return found
    try:
        core, kernel = _in_kernel(found.core, target)
    except Refused as why:
        return replace(found, notes=(*found.notes, f"not persistent: {why}"))
    except Exception as error:
        if strict_passes.value:
            raise
        return replace(
            found, notes=(*found.notes, f"not persistent: {type(error).__name__} (please report it): {error}")
        )
    return replace(found, core=core, executor=KERNEL, notes=(*found.notes, str(kernel)), otherwise=found)


def refusal(loop: Loop) -> str | None:
    """Why a loop cannot be a kernel, apart from its size; None where it can."""
    try:
        kernel_of(loop, "", interpret=True)
    except Refused as why:
        return str(why)
    return None


def _in_kernel(core: Runner | None, target: Target) -> tuple[Runner, Persistent]:
    elsewhere = target.platform != "tpu"
    if target.devices > 1 and not elsewhere:
        raise Refused("the program is divided among devices, and a kernel is not; put the scan inside of jax.shard_map")
    if isinstance(core, WideSums):
        kernel = kernel_of(core.loop, target.kind, elsewhere)
        return replace(core, runner=kernel), kernel
    assert isinstance(core, Loop)
    kernel = kernel_of(core, target.kind, elsewhere)
    return kernel, kernel
