"""The devices that share the work: each has a part of every batch, and all parameters.

One process may drive several devices, and several processes, on one machine or many, may join to drive theirs together.
JAX's runtime divides the work: the compiled step is written as for one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrnn.errors import ConfigError, JrnnError, TrainError
from jrnn.jaxprs.jax_internals import broadcast_one_to_all, process_allgather
from jrnn.train.config import Config
from jrnn.train.models.interface import CARRY_AXIS
from jrnn.train.step import State
from jrnn.train.tasks.task import Axes

T = TypeVar("T")
AXIS = "batch"  # the one axis of the mesh


class ProcessLost(TrainError):
    """Another process has ended without an error of its own: the run can be resumed."""


class _Nowhere:
    """Replaces the writers of the first process in all others: takes every call and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


NOWHERE = _Nowhere()


def join(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> None:
    """Makes this process one of several that train together; call it before any computation.

    JAX itself finds all three arguments under SLURM, Open MPI, Kubernetes and on TPUs.

    Args:
        coordinator: HOST:PORT, where the first process listens.
        processes: the number of processes.
        process: the index of this process, from 0.

    Raises:
        ConfigError: if the other processes are not found.
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
    """The devices of all processes."""

    mesh: Mesh

    @classmethod
    def of(cls, config: Config) -> Devices:
        """Returns the devices that `train.devices` asks for; with several processes, all that they have.

        Raises:
            ConfigError: if there are fewer, or a batch cannot be divided among them equally.
        """
        count = config.train.devices
        there = jax.devices()
        if jax.process_count() > 1:
            if count not in (0, 1, len(there)):
                raise ConfigError(
                    f"train.devices is {count}, but {jax.process_count()} processes have {len(there)} devices, and train "
                    "on all of them; leave train.devices out"
                )
            count = len(there)
        count = count or len(there)
        if count > len(there):
            raise ConfigError(
                f"train.devices is {count}, but JAX finds {len(there)}: {', '.join(map(str, there[:8]))}"
            )
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
        """Whether this process writes the files of the run."""
        return jax.process_index() == 0

    @property
    def count(self) -> int:
        return self.mesh.size

    def _sharding(self, axis: int | None = None) -> NamedSharding:
        """Returns the sharding of an array that is divided along `axis`, or copied to every device."""
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)
        return NamedSharding(self.mesh, spec)

    @property
    def state_sharding(self) -> State:
        """The sharding of each member of a state, which holds for all arrays in it."""
        everywhere: Any = self.result_sharding
        return State(*[everywhere] * len(State._fields))._replace(carry=self._sharding(CARRY_AXIS))

    @property
    def result_sharding(self) -> NamedSharding:
        """The sharding of results, which every device has."""
        return self._sharding()

    def put_state(self, state: State) -> State:
        """Puts a state of host arrays, the same in every process, on the devices."""
        members = []
        for member, sharding in zip(state, self.state_sharding):
            members.append(jax.tree.map(partial(_put, sharding=sharding), member))
        return State(*members)

    def put_batches(self, batches: Any, axes: Axes) -> Any:
        """Puts stacked batches [K, ...] of host arrays on the devices.

        Args:
            batches: a NamedTuple of arrays.
            axes: see `Task`. Every device gets the whole of a member whose examples cannot be divided equally, as may
                happen in validation.
        """

        def put(name: str, value: Any) -> jax.Array:
            axis = axes.get(name)
            if axis is None or value.shape[axis + 1] % self.count:
                return _put(value, self._sharding())
            return _put(value, self._sharding(axis + 1))

        members = {}
        for name, value in batches._asdict().items():
            members[name] = None if value is None else put(name, value)
        return type(batches)(**members)

    def get(self, tree: T) -> T:
        """Returns arrays on the devices as whole host arrays, in every process."""
        if jax.process_count() > 1:
            return process_allgather(tree, tiled=True)
        return jax.device_get(tree)

    def local(self, tree: T) -> T:
        """Returns arrays that every device has, on one device of this process."""
        return jax.tree.map(lambda x: x.addressable_data(0), tree)

    def from_first(self, tree: T) -> T:
        """Returns the host arrays of the first process, in every process."""
        return broadcast_one_to_all(tree) if jax.process_count() > 1 else tree

    def any(self, flag: bool) -> bool:
        """Returns whether the flag is set in any process; raises TrainError if one of them is lost."""
        if jax.process_count() == 1:
            return flag
        with self.in_touch():
            return bool(np.any(process_allgather(np.asarray(flag))))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Runs a `with` block that must succeed in all processes: if one of them fails, all do.

        Raises:
            TrainError: if another process failed, or is lost.
        """
        try:
            yield
        except BaseException:
            with suppress(TrainError):
                self.any(True)
            raise
        if self.any(False):
            raise TrainError("another process cannot begin; see its error message")

    @contextmanager
    def in_touch(self) -> Iterator[None]:
        """Runs a `with` block that needs all processes until its end; raises TrainError if one of them is lost."""
        try:
            yield
        except JrnnError:
            raise
        except (RuntimeError, ValueError) as e:  # of JAX's runtime, for a collective that fails
            if jax.process_count() == 1:
                raise
            raise ProcessLost(
                f"another process is lost ({str(e).strip().splitlines()[0][:200]}); start all again with --resume"
            ) from e


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
