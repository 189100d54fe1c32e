"""The TPU backend: the passes of accelerators, and, if possible, one kernel (`kernels/`) for the loop that stays."""

from __future__ import annotations

from dataclasses import replace

from jrnn.loops.backends import accelerator
from jrnn.loops.backends.backend import Backend
from jrnn.loops.kernels import Refused
from jrnn.loops.loop import Loop, Options, recorder
from jrnn.loops.plans import LoopPlan, Node, Target, at_leaf

KERNEL = "persistent"


def plan(loop: Loop, target: Target, options: Options) -> LoopPlan:
    """Returns the plan of a loop on a TPU; or on any platform, if the caller chose the executor "persistent"."""
    by_name = options.executor == KERNEL
    by_steps = accelerator.plan(loop, target, options._replace(executor="scan") if by_name else options)
    if by_steps.executor != "scan" or options.executor == "scan":
        return by_steps
    try:
        node = at_leaf(by_steps.node, lambda steps: _in_kernel(steps.loop, target))
    except Exception as error:
        why = str(error) if isinstance(error, Refused) else recorder.unexpected(error)
        return replace(by_steps, notes=(*by_steps.notes, f"not persistent: {why}"))
    return replace(by_steps, node=node, executor=KERNEL, otherwise=(by_steps, *by_steps.otherwise))


def refusal(loop: Loop) -> str | None:
    """Returns the reason, other than its size, why a loop cannot be a kernel, or None."""
    from jrnn.loops.kernels.persistent.runner import kernel_of

    try:
        kernel_of(loop, "", interpret=True)
    except Refused as why:
        return str(why)
    return None


def _in_kernel(loop: Loop, target: Target) -> Node:
    from jrnn.loops.kernels.persistent.runner import kernel_of

    elsewhere = target.platform != "tpu"
    if target.devices > 1 and not elsewhere:
        raise Refused("the program is divided among devices, and a kernel is not; put the scan inside of jax.shard_map")
    return kernel_of(loop, target.kind, elsewhere)


BACKEND = Backend(plan, ("tpu",), (KERNEL,))
