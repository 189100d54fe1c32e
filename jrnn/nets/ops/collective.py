"""Collective operators of data-parallel nets, on one process: each replica gets the sum of all, or the value of one.

Shapes: R replicas, whose blobs stand side by side in one net; ... the shape of a blob.

Operators that read a common world also combine the replicas of other processes. Here this process is the only one, so a
common world has the size 1.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import OpError, describe_value
from jrnn.nets.lowering import Freed
from jrnn.nets.ops.values import raise_if
from jrnn.nets.registry import op


@jax.tree_util.register_static
@dataclass(frozen=True)
class CommonWorld:
    """The processes that a net runs on: this one."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class StoreHandler:
    """Where processes would meet, a folder or a server. One process reads neither."""


op("FileStoreHandlerCreate", gradient="forbidden")(lambda: StoreHandler())
op("RedisStoreHandlerCreate", gradient="forbidden")(lambda: StoreHandler())


@op("CreateCommonWorld", gradient="forbidden")
def create_common_world(store=None, *, size: int = 1, rank: int = 0):
    raise_if(
        size != 1 or rank != 0,
        f"size {size} and rank {rank} ask for other processes, and this one runs alone; write the net for one (size 1, rank "
        "0), with a replica for each device",
    )
    return CommonWorld()


def _check_world(world: Any) -> None:
    if not isinstance(world, CommonWorld):
        raise OpError(
            f"its first input must be a common world, made by CreateCommonWorld; it is {describe_value(world)}"
        )


def _same(replicas: Sequence[Any]) -> Sequence[Any]:
    """The replicas of a blob; OpError if they have several shapes or types."""
    for x in replicas[1:]:
        if (x.shape, x.dtype) != (replicas[0].shape, replicas[0].dtype):
            raise OpError(
                f"combines {describe_value(replicas[0])} and {describe_value(x)}; replicas must have one shape and one type"
            )
    return replicas


def _total(replicas: Sequence[Any]) -> Any:
    return functools.reduce(operator.add, _same(replicas))


def _for_each(values: Sequence[Any], op: Any) -> tuple[Any, ...]:
    """The results for all replicas; OpError unless `op` has an output for each."""
    raise_if(
        len(values) != len(op.outputs),
        f"combines {len(values)} replicas and has {len(op.outputs)} outputs; it needs as many",
    )
    return tuple(values)


def _root(root: int, size: int) -> int:
    raise_if(not 0 <= root < size, f"argument 'root' is {root}; it must be from 0 to {size - 1}")
    return root


@op("CloneCommonWorld", gradient="forbidden")
def clone_common_world(world):
    _check_world(world)
    return world


@op("DestroyCommonWorld", gradient="forbidden", inplace={0: 0}, frees=True)
def destroy_common_world(world, *, op):
    return Freed(f"{op.type} -> {op.outputs[0]!r}")


@op("Barrier", outputs=0, gradient="forbidden")
def barrier(world):
    _check_world(world)
    return ()


@op("Allreduce", outputs=(1, None), gradient="forbidden", inplace={0: 1})
def allreduce(world, x, *xs, op):
    """The sum of all replicas, for each [...] x R."""
    _check_world(world)
    return nccl_allreduce(x, *xs, op=op)


@op("Broadcast", outputs=(1, None), gradient="forbidden", inplace={0: 1})
def broadcast(world, x, *xs, root: int = 0, op):
    """The first replica of the process `root`, for each [...] x R."""
    _check_world(world)
    _root(root, 1)
    return nccl_broadcast(x, *xs, op=op)


@op("Reduce", gradient="forbidden", inplace={0: 1})
def reduce(world, x, *, root: int = 0):
    _check_world(world)
    _root(root, 1)
    return x


@op("Allgather", gradient="forbidden")
def allgather(world, x, *xs):
    """The elements of all replicas one after another, [R * elements], as Gloo has them."""
    _check_world(world)
    return jnp.concatenate([jnp.reshape(v, -1) for v in _same((x, *xs))])


@op("NCCLAllreduce", outputs=(1, None), gradient="forbidden", inplace={0: 0})
def nccl_allreduce(x, *xs, op):
    """The sum of all replicas, for each [...] x R."""
    return _for_each([_total((x, *xs))] * (1 + len(xs)), op)


@op("NCCLBroadcast", outputs=(1, None), gradient="forbidden", inplace={0: 0})
def nccl_broadcast(x, *xs, root: int = 0, op):
    """The replica `root`, for each [...] x R."""
    replicas = _same((x, *xs))
    return _for_each([replicas[_root(root, len(replicas))]] * len(replicas), op)


@op("NCCLReduce", gradient="forbidden", inplace={0: 0})
def nccl_reduce(x, *xs, root: int = 0):
    """The sum of all replicas, [...]."""
    _root(root, 1 + len(xs))
    return _total((x, *xs))


@op("NCCLAllGather", outputs=(1, None), gradient="forbidden")
def nccl_all_gather(x, *xs, op):
    """All replicas, stacked, for each [R, ...] x R."""
    return _for_each([jnp.stack(_same((x, *xs)))] * (1 + len(xs)), op)


@op("NCCLReduceScatter", outputs=(1, None), gradient="forbidden")
def nccl_reduce_scatter(x, *xs, op):
    """Row k of the sum of all replicas [R, ...], for replica k [...] x R."""
    total = _total((x, *xs))
    raise_if(
        x.shape[:1] != (1 + len(xs),),
        f"x is {describe_value(x)}; its first axis must have a row for each of {1 + len(xs)} replicas",
    )
    return _for_each([total[k] for k in range(1 + len(xs))], op)
