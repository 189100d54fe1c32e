"""What a loop is lowered for, which its plan depends on."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jrnn.jaxprs.jax_internals import platform_of
from jrnn.loops.costs import machines
from jrnn.loops.costs.machines import CPU, Machine

# The platform of programs that are compiled for a device that is not there, or "" for this process's platform: what JAX
# differentiates is planned before JAX says for which platform it lowers.
planned_platform = jax.make_user_context("")

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")  # of JAX


@dataclass(frozen=True)
class Target:
    """What a loop is lowered for.

    Attributes:
        platform: "cpu", "cuda", "rocm" or "tpu".
        devices: the number of devices that the program is divided among.
        exported: it will run elsewhere, where custom calls of this process are unknown.
        machine: the constants of the cost model.
        repeated: it is in the body of another loop.
    """

    platform: str
    devices: int = 1
    exported: bool = False
    machine: Machine = CPU
    repeated: bool = False

    @property
    def is_estimated(self) -> bool:
        """Whether candidates for loops that are lowered are compared by estimates."""
        return self.platform == "cpu"

    @staticmethod
    def here() -> Target:
        """Returns the target of programs of this process, or of `planned_platform`, which are not divided."""
        return Target.on(planned_platform.value or platform_of(jax.devices()[0].client))

    @staticmethod
    def on(
        platform: str, devices: int = 1, exported: bool = False, repeated: bool = False
    ) -> Target:
        """Returns a target with the constants of this machine, if the platform is this one's."""
        return Target(platform, devices, exported, machines.of(platform), repeated)
