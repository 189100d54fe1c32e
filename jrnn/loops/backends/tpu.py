"""The TPU target: the passes of accelerators, and, if possible, one kernel (`kernels/`) for the loop that stays."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from jrnn.loops.backends import accelerator
from jrnn.loops.kernels import Refused
from jrnn.loops.loop import Loop, strict_passes
from jrnn.loops.mark import Options
from jrnn.loops.passes import WideSums
from jrnn.loops.plans.plan import LoopPlan, Runner, Target

if TYPE_CHECKING:  # it loads when a loop may become a kernel
    from jrnn.loops.kernels.persistent import Persistent

KERNEL = "persistent"


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    """Returns the plan of a loop on a TPU; or on any platform, if the caller chose the executor "persistent"."""
    by_name = options.executor == KERNEL
    found = accelerator.plan(loop, target, replace(options, executor="scan") if by_name else options)
    if found.executor != "scan" or options.executor == "scan":
        return found
    try:
        core, kernel = _in_kernel(found.core, target)
    except Exception as error:
        if strict_passes.value and not isinstance(error, Refused):
            raise
        unexpected = "" if isinstance(error, Refused) else f"{type(error).__name__} (please report it): "
        return replace(found, notes=(*found.notes, f"not persistent: {unexpected}{error}"))
    return replace(
        found, core=core, executor=KERNEL, notes=(*found.notes, str(kernel)), otherwise=(found, *found.otherwise)
    )


def refusal(loop: Loop) -> str | None:
    """Returns the reason, other than its size, why a loop cannot be a kernel, or None."""
    from jrnn.loops.kernels.persistent import kernel_of

    try:
        kernel_of(loop, "", interpret=True)
    except Refused as why:
        return str(why)
    return None


def _in_kernel(core: Runner | None, target: Target) -> tuple[Runner, Persistent]:
    from jrnn.loops.kernels.persistent import kernel_of

    elsewhere = target.platform != "tpu"
    if target.devices > 1 and not elsewhere:
        raise Refused("the program is divided among devices, and a kernel is not; put the scan inside of jax.shard_map")
    loop = core.runner if isinstance(core, WideSums) else core
    assert isinstance(loop, Loop)
    kernel = kernel_of(loop, target.kind, elsewhere)
    return replace(core, runner=kernel) if isinstance(core, WideSums) else kernel, kernel
