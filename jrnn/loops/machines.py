"""The constants of the cost model: those that are shipped for each platform, and those that `jrnn bench --calibrate` wrote.

The environment variable `JRNN_COSTS` names a file of constants to use instead of the shipped ones, on its platform. It is
read when a loop is planned.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from jrnn.errors import ConfigError, near
from jrnn.files import read_json

VARIABLE = "JRNN_COSTS"


@dataclass(frozen=True)
class Machine:
    """The constants of the model. Times are seconds of one core of a CPU, or of a whole accelerator.

    The defaults are those of `CPU`.

    Attributes:
        products: floating-point operations of matrix products a second.
        tiny_products: the same of products so small that they are not worth a call.
        call: one call of a product or solver.
        kernel: one kernel of elementwise equations, in a loop that also calls products.
        trip: one trip of such a loop.
        elementwise_trip: one trip of a loop of elementwise equations alone, which on a CPU is one kernel.
        array: one more array that a loop stacks at each step.
        element: one elementwise operation on one element.
        function: one value of a function such as tanh.
        cached: bytes a second, read or written, of arrays that fit `cache` bytes.
        read, written: bytes a second of larger arrays.
        cache: bytes.
    """

    products: float = 90e9
    tiny_products: float = 12e9
    call: float = 0.4e-6
    kernel: float = 0.1e-6
    trip: float = 0.2e-6
    elementwise_trip: float = 0.01e-6
    array: float = 8e-9
    element: float = 0.03e-9
    function: float = 0.7e-9
    cached: float = 50e9
    read: float = 15e9
    written: float = 5e9
    cache: int = 16 << 20

    def reading(self, size: float, of: float) -> float:
        """Returns the time to read `size` bytes of arrays of `of` bytes in all."""
        return size / (self.cached if of <= self.cache else self.read)

    def writing(self, size: float, of: float) -> float:
        """Returns the time to write `size` bytes of arrays of `of` bytes in all."""
        return size / (self.cached if of <= self.cache else self.written)


CPU = Machine()  # measured on an AMD EPYC

# Launches, bandwidth, operations and caches are those of `jrnn bench --compile-for h100` (`bench/compile_for.py`). From the
# same description: 132 multiprocessors of 128 lanes at 1.98 GHz. A function takes 8 times as long: CUDA C++ Programming
# Guide, "Throughput of Native Arithmetic Instructions", 16 results a clock and multiprocessor. L2 is 2.5 times as fast as
# memory: XLA's `kL2CacheSpeedup`. None was measured on a device.
_LAUNCH, _BANDWIDTH, _LANES = 2.5e-6, 3.352e12, 132 * 128 * 1.98e9
H100 = Machine(
    products=495e12,
    tiny_products=495e12,  # a product is a launch, however small it is
    call=_LAUNCH,
    kernel=_LAUNCH,
    trip=2 * _LAUNCH,  # the counter, and the stacks of all ys
    elementwise_trip=3 * _LAUNCH,
    array=0.0,
    element=1 / _LANES,
    function=8 / _LANES,
    cached=2.5 * _BANDWIDTH,
    read=_BANDWIDTH,
    written=_BANDWIDTH,
    cache=52_428_800,
)

# Launches, bandwidth and operations are those of `--compile-for v5e`. How To Scale Your Model, "How to Think About TPUs":
# vectors of 8 x 128 lanes with 4 units at 1.5 GHz; VMEM of 128 MiB, 22 times as fast as memory. A function is estimated as
# ten operations. None was measured on a device.
_LAUNCH, _BANDWIDTH, _LANES = 0.5e-6, 819e9, 8 * 128 * 4 * 1.5e9
V5E = Machine(
    products=197e12,
    tiny_products=197e12,
    call=_LAUNCH,
    kernel=_LAUNCH,
    trip=_LAUNCH,
    elementwise_trip=2 * _LAUNCH,
    array=_LAUNCH,
    element=1 / _LANES,
    function=10 / _LANES,
    cached=22 * _BANDWIDTH,
    read=_BANDWIDTH,
    written=_BANDWIDTH,
    cache=128 << 20,
)

_SHIPPED = {"cpu": CPU, "cuda": H100, "gpu": H100, "rocm": H100, "tpu": V5E}


def of(platform: str) -> Machine:
    """Returns the constants for a platform of JAX: those of the file that `JRNN_COSTS` names, or else the shipped ones.

    Raises:
        ConfigError: for a file that is none of constants.
    """
    shipped = _SHIPPED.get(platform, H100)
    name = os.environ.get(VARIABLE)
    if not name:
        return shipped
    path = Path(name).expanduser()
    try:
        changed = path.stat().st_mtime_ns
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or e
        raise ConfigError(f"{VARIABLE}={name}: {why}; `jrnn bench --calibrate` writes such a file") from None
    found, machine = _read(path, changed)
    return machine if _SHIPPED.get(found) is shipped else shipped


@functools.lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> tuple[str, Machine]:
    return read(path)


def read(path: Path) -> tuple[str, Machine]:
    """Returns the platform of a file of constants, and these; a constant that it lacks is the shipped one.

    Raises:
        ConfigError: names the file, the key and the rule.
    """

    def refused(rule: str) -> ConfigError:
        return ConfigError(f"{path}: {rule}; `jrnn bench --calibrate` writes such a file")

    try:
        data = read_json(path, ConfigError)
    except ConfigError as error:
        raise ConfigError(f"{error}; `jrnn bench --calibrate` writes such a file") from None
    if not isinstance(data.get("constants"), dict):
        raise refused('expected {"platform": ..., "constants": {...}}')
    platform = data.get("platform")
    if not isinstance(platform, str) or platform not in _SHIPPED:
        raise refused(f"platform must be one of {', '.join(_SHIPPED)}, not {platform!r:.80}")
    known = {f.name: f.type for f in fields(Machine)}
    for key, value in data["constants"].items():
        if key not in known:
            raise refused(f"there is no constant {key!r}{near(key, known)}")
        if type(value) not in (int, float) or not 0 < value < 2**63:
            raise refused(f"constants.{key} must be a positive number, not {value!r:.80}")
    given: dict[str, Any] = data["constants"]
    if "cache" in given:
        given["cache"] = int(given["cache"])
    return platform, replace(_SHIPPED[platform], **given)


def written(platform: str, machine: Machine, **conditions: Any) -> str:
    """Returns the text of a file of constants."""
    return json.dumps({"platform": platform, **conditions, "constants": asdict(machine)}, indent=1) + "\n"
