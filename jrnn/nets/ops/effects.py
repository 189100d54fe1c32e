"""Operators with effects outside the net's values: Free, counters, timers, databases, Load, Save and Print.

A net reads and writes files only in the folder that the caller allows (`files`). A database is opened when its first record
is read. Effects cannot happen in a traced loop or branch.
"""

import functools
from itertools import chain
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import jax
import numpy as np

from jrnn.errors import OpError, describe_value, printable
from jrnn.nets.ir import Names
from jrnn.nets.lowering import Context, Freed
from jrnn.nets.memory import check_size
from jrnn.nets.ops.values import raise_if
from jrnn.nets.proto.database import (
    CHUNK_MARK,
    Records,
    named_chunks,
    read_database,
    tensors_of,
    write_records,
)
from jrnn.nets.proto.tensor_protos import blob_to_numpy
from jrnn.nets.registry import op

_SMALLEST_ARRAY = 128  # bytes that an array takes, however small


@jax.tree_util.register_static
class DatabaseReader:
    """A database with a position, which advances with each record and returns to the start after the last."""

    def __init__(self, path: Path, db_type: str):
        self.path = path
        self.db_type = db_type
        self.next = 0

    @functools.cached_property
    def records(self) -> Records:
        return read_database(self.path, self.db_type)

    def take(self) -> bytes:
        raise_if(not self.records, f"{self.path} has no records")
        value = self.records[self.next][1]
        self.next = (self.next + 1) % len(self.records)
        return value


def _within(context: Context, path: str) -> Path:
    """The file that a net names; OpError unless it is in the folder that the caller allows."""
    _check_eager(context)
    raise_if(not path, "argument 'db' is empty; it must name a file")
    if context.options.files is None:
        raise OpError(
            f"names the file {path!r}, and nets reach no files by themselves: give the folder that it is in (`files`, or on "
            "the command line --files DIR), or feed its outputs"
        )
    root = Path(context.options.files).resolve()
    file = (root / path).resolve()
    if not file.is_relative_to(root):
        raise OpError(
            f"names the file {path!r}, which is not within the folder {root} that the net may reach"
        )
    return file


def _check_eager(context: Context) -> None:
    if not context.eager or context.in_branch:
        raise OpError(
            "reads or writes outside of the net, which a traced function cannot; run the net with run_net"
        )


def _without(prefix: str, name: str) -> str:
    """The part of the name after a prefix, which may stand anywhere in it."""
    return name.partition(prefix)[2] if prefix and prefix in name else name


@op("CreateDB", gradient="forbidden", source=True)
def create_db(
    *,
    db: str,
    db_type: str = "leveldb",
    num_shards: int = 1,
    shard_id: int = 0,
    use_cache: bool = False,
    context,
):
    """A reader of a database, minidb or lmdb."""
    if num_shards != 1 or shard_id:
        raise OpError(
            f"num_shards {num_shards} and shard_id {shard_id} divide a database, which is not offered here"
        )
    return DatabaseReader(_within(context, db), db_type)


@op("TensorProtosDBInput", outputs=(1, None), gradient="stops", updates=(0,), source=True)
def tensor_protos_db_input(reader, *, batch_size: int = 0, op, context):
    """The tensors of the next record, or the tensors of the next `batch_size` records, stacked, [N, ...]."""
    _check_eager(context)
    if not isinstance(reader, DatabaseReader):
        raise OpError(
            f"its input must be a database, made by CreateDB; it is {type(reader).__name__}"
        )
    raise_if(batch_size < 0, f"batch_size is {batch_size}; it must be at least 0")
    rows = []
    for _ in range(max(batch_size, 1)):
        tensors = tensors_of(reader.take())
        if len(tensors) != len(op.outputs):
            raise OpError(
                f"a record of {reader.path} has {len(tensors)} tensors; there are {len(op.outputs)} outputs"
            )
        rows.append(tensors)
        if len(rows) == 1:
            check_size(
                (max(batch_size, 1), sum(t.nbytes + _SMALLEST_ARRAY for t in tensors)), np.uint8
            )
        if [(t.shape, t.dtype) for t in tensors] != [(t.shape, t.dtype) for t in rows[0]]:
            raise OpError(
                f"records of {reader.path} differ in shapes or types of tensors; batch_size must be 0"
            )
    return tuple(np.stack(column) for column in zip(*rows)) if batch_size else tuple(rows[0])


@op("Load", outputs=(1, None), gradient="stops", source=True)
def load(
    reader=None,
    *,
    db: str = "",
    db_type: str = "",
    absolute_path: bool = False,
    add_prefix: str = "",
    strip_prefix: str = "",
    source_blob_names: Names = (),
    load_all: bool = False,
    allow_incomplete: bool = False,
    keep_device: bool = False,
    op,
    context,
):
    """Reads blobs from a database that Save wrote, by the outputs' names or by `source_blob_names`."""
    if load_all or allow_incomplete:
        raise OpError(
            "load_all and allow_incomplete are not offered: outputs must be named, and each be in the file"
        )
    if reader is None:
        reader = DatabaseReader(_within(context, db), db_type)
    _check_eager(context)
    if source_blob_names and len(source_blob_names) != len(op.outputs):
        raise OpError(
            f"source_blob_names has {len(source_blob_names)} names, and there are {len(op.outputs)} outputs"
        )
    chunks: dict[str, list[bytes]] = {}
    for key, value in reader.records:
        name = key.partition(CHUNK_MARK)[0].decode(errors="replace")
        if not source_blob_names:
            name = add_prefix + _without(strip_prefix, name)
        chunks.setdefault(name, []).append(value)
    blobs = []
    for name in source_blob_names or op.outputs:
        if name not in chunks:
            raise OpError(
                f"{reader.path} has no blob {name!r}; it has {', '.join(map(repr, list(chunks)[:8]))}"
            )
        blobs.append(blob_to_numpy(*chunks[name])[1])
    return tuple(blobs)


@op("Save", outputs=0, gradient="forbidden")
def save(
    *blobs,
    db: str = "",
    db_type: str = "",
    absolute_path: bool = False,
    strip_prefix: str = "",
    blob_name_overrides: Names = (),
    op,
    context,
):
    """Writes blobs to a minidb, under their names or others. The file is written completely or not at all."""
    path = _within(context, db)
    raise_if(db_type != "minidb", f"db_type is {db_type!r}; blobs can be saved as minidb")
    if blob_name_overrides and (strip_prefix or len(blob_name_overrides) != len(blobs)):
        raise OpError(
            "blob_name_overrides must hold one name for each input, and needs no strip_prefix"
        )
    names = blob_name_overrides or [_without(strip_prefix, n) for n in op.inputs]
    for name, value in zip(op.inputs, blobs):
        if not hasattr(value, "dtype"):
            raise OpError(
                f"input {name!r} is a {type(value).__name__}, which cannot be saved; give arrays"
            )
    records = map(named_chunks, names, map(np.asarray, blobs))
    write_records(path, chain.from_iterable(records))
    return ()


@op("Print", outputs=0, gradient="forbidden")
def print_(x, *, to_file: bool = False, limit: int = 0, every_n: int = 1, op, context):
    """Prints the first `limit` elements of a blob (0: 1000). Prints nothing while traced."""
    raise_if(
        to_file,
        "to_file asks for a file, which Print does not write here; leave it out, and use Save",
    )
    if context.eager and not context.in_branch:
        value: Any = np.asarray(x)
        flat = value.reshape(-1)[: limit or 1000].tolist()
        print(
            printable(
                f"{op.inputs[0]} {value.dtype}{list(value.shape)}: {', '.join(map(str, flat))}"
            )
        )
    return ()


@op("Free", outputs=(1, None), gradient="forbidden", frees=True)
def free(x, *xs, op):
    """Frees blobs in place, with which Caffe2's memory optimizer follows their last readers."""
    raise_if(
        op.outputs != op.inputs,
        f"its outputs are {list(op.outputs)}; they must be its inputs, which it frees",
    )
    return tuple(Freed(f"{op.type} -> {', '.join(map(repr, op.outputs))}") for _ in op.outputs)


@jax.tree_util.register_static
class Counter:
    """An integer that operators change in place; Caffe2's is 64 bits wide."""

    def __init__(self, count: int):
        self.count = count


def _checked(counter, context) -> Counter:
    if not isinstance(counter, Counter):
        raise OpError(
            f"its input must be a counter, made by CreateCounter; it is {type(counter).__name__}"
        )
    if context.in_branch:
        raise OpError(
            "a counter changes in place, which a traced loop or branch cannot do; run the net with run_net, or count in an "
            "integer blob"
        )
    return counter


@op("CreateCounter", gradient="forbidden")
def create_counter(*, init_count: int = 0):
    raise_if(
        init_count < 0, f"argument 'init_count' is {init_count}; a counter starts at 0 or above"
    )
    return Counter(init_count)


@op("ResetCounter", outputs=(0, 1), gradient="forbidden", updates=(0,))
def reset_counter(counter, *, init_count: int = 0, context):
    before = _checked(counter, context).count
    _checked(counter, context).count = init_count
    return np.asarray(before, np.int64)


@op("CountDown", gradient="forbidden", updates=(0,))
def count_down(counter, *, context):
    """Counts down, below zero too. Returns whether the count is below zero."""
    _checked(counter, context).count -= 1
    return np.asarray(counter.count < 0)


@op("CountUp", gradient="forbidden", updates=(0,))
def count_up(counter, *, context):
    """Returns the count before the increment."""
    _checked(counter, context).count += 1
    return np.asarray(counter.count - 1, np.int64)


@op("RetrieveCount", gradient="forbidden")
def retrieve_count(counter, *, context):
    return np.asarray(_checked(counter, context).count, np.int64)


@jax.tree_util.register_static
class Timer:
    """The time since it began, in nanoseconds, until it ends."""

    def __init__(self) -> None:
        self.began: int | None = perf_counter_ns()

    def read(self) -> int:
        raise_if(self.began is None, "the timer has ended; read it before")
        return perf_counter_ns() - self.began

    def end(self) -> None:
        raise_if(self.began is None, "the timer has ended; end it once")
        self.began = None


def _timer(value) -> Timer:
    if not isinstance(value, Timer):
        raise OpError(
            f"its input must be a timer, made by TimerBegin; it is {describe_value(value)}"
        )
    return value


def _nanoseconds(timer, op, context) -> int:
    if context.eager and not context.in_branch:
        return _timer(timer).read()
    if op.outputs[0] in context.unread:
        return 0
    raise OpError(
        "measures time while the net runs, which a traced function cannot; run the net with run_net, ask for other outputs "
        f"than {op.outputs[0]!r}, or give its value"
    )


@op("TimerBegin", gradient="forbidden", source=True)
def timer_begin():
    """A timer that runs. Caffe2's argument `counter_name` names it in a table of statistics, which is not offered here."""
    return Timer()


@op("TimerEnd", outputs=0, gradient="forbidden", updates=(0,))
def timer_end(timer, *, context):
    """Does nothing while traced."""
    if context.eager and not context.in_branch:
        _timer(timer).end()
    return ()


@op("TimerGet", gradient="forbidden", source=True)
def timer_get(timer, *, op, context):
    """Nanoseconds since the timer began, []."""
    return np.asarray(_nanoseconds(timer, op, context), np.int64)


@op("TimerGetAndEnd", gradient="forbidden", updates=(0,), source=True)
def timer_get_and_end(timer, *, op, context):
    """Nanoseconds since the timer began, [1]."""
    nanoseconds = np.asarray([_nanoseconds(timer, op, context)], np.int64)
    timer_end(timer, context=context)
    return nanoseconds
