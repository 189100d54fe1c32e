"""The devices that share the work: each holds a part of every batch, and all of the parameters.

One process may drive several devices, and several processes, on one machine or many, may join to drive theirs together.
JAX's runtime divides the work: the compiled step is written as for one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrnn.errors import ConfigError, JrnnError, TrainError
from jrnn.jax_names import broadcast_one_to_all, process_allgather
from jrnn.train.config import Config
from jrnn.train.models.model import CARRY_AXIS
from jrnn.train.step import State

T = TypeVar("T")
AXIS = "batch"  # the one axis of the mesh


class _Nowhere:
    """Stands, in all processes but the first, for what only the first writes: takes every call and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


NOWHERE = _Nowhere()


def join(coordinator: str | None = None, processes: int | None = None, process: int | None = None) -> None:
    """Makes this process one of several that train together; to be called before anything is computed.

    Args:
        coordinator: HOST:PORT of the first process, which listens there; all three are found out by JAX itself under SLURM,
            Open MPI, Kubernetes and on TPUs.
        processes: how many there are.
        process: this one's number, from 0.

    Raises:
        ConfigError: where the others are not found.
    """
    try:
        jax.distributed.initialize(coordinator, processes, process)
    except (RuntimeError, ValueError) as e:
        raise ConfigError(
            f"cannot join the other processes: {str(e).splitlines()[0]}; give --coordinator HOST:PORT --processes N "
            "--process K, or start them with srun or mpirun"
        ) from None


@dataclass(frozen=True)
class Devices:
    """A row of devices, over all processes."""

    mesh: Mesh

    @classmethod
    def of(cls, config: Config) -> Devices:
        """The devices that `train.devices` asks for; with several processes, all that they have.

        Raises:
            ConfigError: where there are fewer, or a batch cannot be divided among them equally.
        """
        count, there = config.train.devices, jax.devices()
        if jax.process_count() > 1:
            if count not in (0, 1, len(there)):
                raise ConfigError(
                    f"train.devices is {count}, but {jax.process_count()} processes have {len(there)} devices, and train "
                    "on all of them; leave train.devices out"
                )
            count = len(there)
        count = count or len(there)
        if count > len(there):
            raise ConfigError(f"train.devices is {count}, but JAX finds {len(there)}: {', '.join(map(str, there[:8]))}")
        parts = config.optimizer.accumulate
        if config.data.batch % (count * parts):
            read = f"in {parts} parts (optimizer.accumulate) " if parts > 1 else ""
            raise ConfigError(
                f"a batch of data.batch = {config.data.batch} examples {read}cannot be divided equally among {count} "
                f"devices; make it a multiple of {count * parts}"
            )
        return cls(Mesh(np.asarray(there[:count]), (AXIS,)))

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return jax.process_index() == 0

    @property
    def count(self) -> int:
        return self.mesh.size

    def _sharding(self, axis: int | None = None) -> NamedSharding:
        """Of an array that is divided along `axis`, or that every device has."""
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)
        return NamedSharding(self.mesh, spec)

    @property
    def state_sharding(self) -> State:
        """How a state lies on the devices: its members, or what stands for all of a member's arrays."""
        members: dict[str, Any] = dict.fromkeys(State._fields, self._sharding())
        return State(**{**members, "carry": self._sharding(CARRY_AXIS)})

    @property
    def result_sharding(self) -> NamedSharding:
        """How what every process must see lies on the devices."""
        return self._sharding()

    def put_state(self, state: State) -> State:
        """A state of host arrays, the same in every process, on the devices."""
        members = zip(state, self.state_sharding)
        return State(*(jax.tree.map(lambda x, to=to: _put(x, to), member) for member, to in members))

    def put_batches(self, batches: Any, axes: Mapping[str, int]) -> Any:
        """Stacked batches [K, ...] of host arrays on the devices: a process keeps what its own devices need.

        axes: of the members of one batch, see `Task`. A member whose examples cannot be divided equally, as may be in
        validation, every device gets whole.
        """
        found: dict[str, Any] = {}
        for name, value in batches._asdict().items():
            axis = axes.get(name)
            if value is None:
                found[name] = None
                continue
            divided = axis is not None and value.shape[axis + 1] % self.count == 0
            found[name] = _put(value, self._sharding(axis + 1 if divided and axis is not None else None))
        return type(batches)(**found)

    def get(self, tree: T) -> T:
        """Arrays on the devices as host arrays, whole, in every process."""
        return process_allgather(tree, tiled=True) if jax.process_count() > 1 else jax.device_get(tree)

    def local(self, tree: T) -> T:
        """Arrays that every device has, on one device of this process."""
        return jax.tree.map(lambda x: x.addressable_data(0), tree)

    def from_first(self, tree: T) -> T:
        """The host arrays of the first process, in every process."""
        return broadcast_one_to_all(tree) if jax.process_count() > 1 else tree

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if jax.process_count() == 1:
            return flag
        return bool(np.any(process_allgather(np.asarray(flag))))

    @contextmanager
    def together(self) -> Iterator[None]:
        """What all processes do before they may go on: where one of them fails, all do.

        Raises:
            TrainError: where another process failed.
        """
        try:
            yield
        except BaseException:
            self.any(True)
            raise
        if self.any(False):
            raise TrainError("another of the processes cannot begin; see what it says")

    @contextmanager
    def in_touch(self) -> Iterator[None]:
        """What needs all processes until its end.

        Raises:
            TrainError: where one of them is lost.
        """
        try:
            yield
        except JrnnError:
            raise
        except (RuntimeError, ValueError) as e:  # as JAX's runtime tells of a collective that fails
            if jax.process_count() == 1:
                raise
            raise TrainError(
                f"another of the processes is lost ({str(e).strip().splitlines()[0][:200]}); start all again with --resume"
            ) from e


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
