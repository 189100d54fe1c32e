"""Versions of blobs: who writes and who reads each value of a net.

Operators may overwrite a blob, so a name alone is not a value; a *versioned blob* `(name, version)` is. Version 0 is
what a blob held before the net ran, and each operator that writes it makes the next version. The numbering is Caffe2's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from jrnn.errors import NetError, near
from jrnn.graph.scope import free_names, keeps_outputs, reads
from jrnn.ir import Net

Versioned = tuple[str, int]
Ssa = list[tuple[list[Versioned], list[Versioned]]]


def get_ssa(net: Net, blob_versions: Mapping[str, int] | None = None) -> tuple[Ssa, dict[str, int]]:
    """The versions that each operator reads and writes, and the last version of each blob.

    Args:
        net: the net. Only the inputs and outputs of its own operators are numbered, as the wire declares them; what a
            sub-net reads besides is told by `free_names`.
        blob_versions: versions to continue from, as those that an init net ended with.

    Returns:
        `(ssa, versions)`: `ssa[i]` is the pair of the versioned inputs and outputs of operator i. As in Caffe2, a blob
        that is read but neither declared nor written is in `versions` only where the net declares no external input.

    >>> from jrnn.ir import Op
    >>> net = Net("n", (Op.of("Relu", ["x"], ["x"]), Op.of("FC", ["x", "w", "b"], ["y"])))
    >>> ssa, versions = get_ssa(net)
    >>> ssa[0], ssa[1][0][0], versions["x"]
    (([('x', 0)], [('x', 1)]), ('x', 1), 1)
    """
    versions = dict(blob_versions or {})
    for name in net.external_inputs:
        versions.setdefault(name, 0)
    ssa: Ssa = []
    for op in net.ops:
        if not net.external_inputs:
            for name in op.inputs:
                versions.setdefault(name, 0)
        read = [(name, versions.get(name, 0)) for name in op.inputs]
        for name in op.outputs:
            versions[name] = versions.get(name, 0) + 1
        ssa.append((read, [(name, versions[name]) for name in op.outputs]))
    return ssa, versions


@dataclass(frozen=True, slots=True)
class Access:
    """What an operator does to the blobs of its workspace, sub-nets included: the version of each blob read and written.

    `updates` are the written blobs that may be left as they were; both versions must then go by one name.
    """

    reads: dict[str, int]
    writes: dict[str, int]
    updates: tuple[str, ...] = ()


def get_accesses(net: Net, blob_versions: Mapping[str, int] | None = None) -> tuple[list[Access], dict[str, int]]:
    """As `get_ssa`, with what the sub-nets of each operator read besides its inputs."""
    versions = dict(blob_versions or {})
    for name in net.external_inputs:
        versions.setdefault(name, 0)
    accesses = []
    for op in net.ops:
        read = {name: versions.setdefault(name, 0) for name in (*op.inputs, *free_names(op))}
        updates = tuple(name for name in dict.fromkeys(op.outputs) if name in versions) if keeps_outputs(op) else ()
        read.update((name, versions[name]) for name in updates)
        for name in op.outputs:
            versions[name] = versions.get(name, 0) + 1
        accesses.append(Access(read, {name: versions[name] for name in op.outputs}, updates))
    return accesses, versions


@dataclass(frozen=True)
class Flow:
    """Who writes and who reads each versioned blob of a net."""

    accesses: list[Access]
    versions: dict[str, int]
    writer: dict[Versioned, int]
    readers: dict[Versioned, list[int]]
    external: set[Versioned]

    @classmethod
    def of(cls, net: Net) -> Flow:
        accesses, versions = get_accesses(net)
        readers: dict[Versioned, list[int]] = {}
        for i, a in enumerate(accesses):
            for blob in a.reads.items():
                readers.setdefault(blob, []).append(i)
        writer = {blob: i for i, a in enumerate(accesses) for blob in a.writes.items()}
        return cls(accesses, versions, writer, readers, {(n, versions.get(n, 0)) for n in net.external_outputs})

    def overwritten(self, blob: Versioned, removed: Collection[int]) -> int:
        """The operator after which `blob` is gone, where the operators `removed` do not count."""
        name, version = blob
        while self.writer.get((name, version + 1)) in removed:
            version += 1
        return self.writer.get((name, version + 1), len(self.accesses))


def get_undefined_blobs(ssa: Ssa) -> list[str]:
    """The blobs that are read at version 0, before any operator writes them, in the order of their first reading."""
    return list(dict.fromkeys(name for read, _ in ssa for name, version in read if version == 0))


def get_output_producers(ssa: Ssa) -> dict[Versioned, int]:
    """The index of the operator that writes each versioned blob."""
    return {blob: i for i, (_, written) in enumerate(ssa) for blob in written}


def get_producer_map(ssa: Ssa) -> dict[Versioned, tuple[int, int]]:
    """Maps each versioned blob to the operator and the output position that write it: `{(name, version): (op, output)}`."""
    return {blob: (i, j) for i, (_, written) in enumerate(ssa) for j, blob in enumerate(written)}


def get_consumer_map(ssa: Ssa) -> dict[Versioned, list[tuple[int, int]]]:
    """Maps each versioned blob to the operators that read it: `{(name, version): [(op, input), ...]}`."""
    consumers: dict[Versioned, list[tuple[int, int]]] = {}
    for i, (read, _) in enumerate(ssa):
        for j, blob in enumerate(read):
            consumers.setdefault(blob, []).append((i, j))
    return consumers


def get_op_ids_in_path(
    ssa: Ssa, blob_versions: Mapping[str, int], inputs: Iterable[str], outputs: Iterable[str]
) -> list[int]:
    """The operators needed for the last versions of `outputs` where the last versions of `inputs` are given.

    Raises:
        NetError: a name in `inputs` or `outputs` that has no version.
    """

    def last(name: str) -> Versioned:
        if name not in blob_versions:
            raise NetError(f"blob {name!r} has no version in the net{near(name, blob_versions)}")
        return name, blob_versions[name]

    given = {last(name) for name in inputs}
    producers = get_output_producers(ssa)
    queue = [last(name) for name in outputs]
    needed: set[int] = set()
    while queue:
        blob = queue.pop()
        at = producers.get(blob)
        if blob not in given and at is not None and at not in needed:
            needed.add(at)
            queue.extend(ssa[at][0])
    return sorted(needed)


def undeclared_reads(net: Net) -> list[str]:
    """The blobs that `net` needs from outside and does not declare as external inputs, in the order of first reading.

    >>> from jrnn.ir import Op
    >>> undeclared_reads(Net("n", (Op.of("FC", ["x", "w", "b"], ["y"]),), ("x",)))
    ['w', 'b']
    """
    declared = set(net.external_inputs)
    return [name for name in reads(net) if name not in declared]


def live_ops(net: Net, outputs: Iterable[str]) -> list[int]:
    """The indices of the operators that the final values of `outputs` depend on, in order.

    Overwritten blobs are told apart by version, the blobs that sub-nets read count as read, and where an operator with
    sub-nets may leave an output as it was, what wrote that output before is kept too.

    >>> from jrnn.ir import Op
    >>> live_ops(Net("n", (Op.of("Relu", ["x"], ["y"]), Op.of("Tanh", ["x"], ["y"]))), ["y"])
    [1]
    """
    wanted = set(outputs)
    live = []
    for i in range(len(net.ops) - 1, -1, -1):
        op = net.ops[i]
        if wanted.isdisjoint(op.outputs):
            continue
        live.append(i)
        if not keeps_outputs(op):
            wanted.difference_update(op.outputs)
        wanted.update(op.inputs)
        wanted.update(free_names(op))
    live.reverse()
    return live
