"""Versions of blobs: which operators write and read each value of a net; and parts of nets.

Operators may overwrite a blob, so a name alone does not identify a value; a *versioned blob* `(name, version)` does.
Version 0 is the value before the net ran, and each operator that writes the blob makes the next version, as in Caffe2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jrnn.errors import NetError, check_known, describe_op
from jrnn.nets.graph.scope import all_reads, free_names, keeps_outputs, reads
from jrnn.nets.ir import Names, NameSet, Net, Op, written_by

KnownVersions = Mapping[str, int]  # of blobs, to continue from
Versions = dict[str, int]  # the version of each blob

Versioned = tuple[str, int]
Ssa = list[tuple[list[Versioned], list[Versioned]]]


def get_ssa(net: Net, blob_versions: KnownVersions | None = None) -> tuple[Ssa, Versions]:
    """Returns the versions that each operator reads and writes, and the last version of each blob.

    Args:
        net: the net. Only the declared inputs and outputs of its own operators are numbered; `free_names` lists what
            only their sub-nets read.
        blob_versions: versions to continue from, such as the last versions of an init net.

    Returns:
        `(ssa, versions)`: `ssa[i]` is the pair of the versioned inputs and outputs of operator i. As in Caffe2, a blob
        that is read but neither declared nor written is in `versions` only if the net declares no external input.

    >>> net = Net("n", (Op.of("Relu", ["x"], ["x"]), Op.of("FC", ["x", "w", "b"], ["y"])))
    >>> ssa, versions = get_ssa(net)
    >>> ssa[0], ssa[1][0][0], versions["x"]
    (([('x', 0)], [('x', 1)]), ('x', 1), 1)
    """
    versions = _first_versions(net, blob_versions)
    ssa: Ssa = []
    for op in net.ops:
        if not net.external_inputs:
            for name in op.inputs:
                versions.setdefault(name, 0)
        read = versioned(op.inputs, versions)
        _count_writes(op, versions)
        ssa.append((read, versioned(op.outputs, versions)))
    return ssa, versions


def _first_versions(net: Net, blob_versions: KnownVersions | None) -> Versions:
    """Returns the versions of blobs before the first operator runs."""
    versions = dict(blob_versions or {})
    for name in net.external_inputs:
        versions.setdefault(name, 0)
    return versions


def _count_writes(op: Op, versions: Versions) -> None:
    """Adds the new versions that an operator writes to `versions`."""
    for name in op.outputs:
        versions[name] = versions.get(name, 0) + 1


def versioned(names: Iterable[str], versions: KnownVersions) -> list[Versioned]:
    """Returns names with their versions; 0 for names that have none."""
    return [(name, versions.get(name, 0)) for name in names]


@dataclass(frozen=True, slots=True)
class Access:
    """The version of each blob that an operator and its sub-nets read and write.

    `updates` are the written blobs that may keep their old value; both versions must then have one name.
    """

    reads: Versions
    writes: Versions
    updates: Names = ()

    @property
    def blobs(self) -> list[Versioned]:
        """All that it reads and writes."""
        return [*self.reads.items(), *self.writes.items()]


def get_accesses(
    net: Net, blob_versions: KnownVersions | None = None
) -> tuple[list[Access], Versions]:
    """Does the same as `get_ssa`, and includes what the sub-nets of each operator read besides its inputs."""
    versions = _first_versions(net, blob_versions)
    accesses = []
    for op in net.ops:
        read: Versions = {}
        for name in all_reads(op):
            read[name] = versions.setdefault(name, 0)
        updates: list[str] = []
        if keeps_outputs(op):
            updates += filter(versions.__contains__, dict.fromkeys(op.outputs))
        read.update(versioned(updates, versions))
        _count_writes(op, versions)
        accesses.append(Access(read, dict(versioned(op.outputs, versions)), tuple(updates)))
    return accesses, versions


def _writers(accesses: Iterable[Access]) -> dict[Versioned, int]:
    """Returns the index of the operator that writes each versioned blob."""
    writer: dict[Versioned, int] = {}
    for index, access in enumerate(accesses):
        writer.update(dict.fromkeys(access.writes.items(), index))
    return writer


@dataclass(frozen=True)
class Flow:
    """The writer and the readers of each versioned blob of a net."""

    accesses: list[Access]
    versions: Versions
    writer: dict[Versioned, int]
    readers: dict[Versioned, list[int]]
    external: set[Versioned]

    @classmethod
    def of(cls, net: Net) -> Flow:
        accesses, versions = get_accesses(net)
        readers: dict[Versioned, list[int]] = {}
        for index, access in enumerate(accesses):
            for blob in access.reads.items():
                readers.setdefault(blob, []).append(index)
        return cls(
            accesses=accesses,
            versions=versions,
            writer=_writers(accesses),
            readers=readers,
            external=set(versioned(net.external_outputs, versions)),
        )

    def overwritten(self, blob: Versioned, removed: Collection[int]) -> int:
        """Returns the operator that overwrites `blob`, if the operators `removed` do not count."""
        name, version = blob
        while self.writer.get((name, version + 1)) in removed:
            version += 1
        return self.writer.get((name, version + 1), len(self.accesses))

    def read_by(self, ops: Iterable[int]) -> dict[Versioned, None]:
        """Returns the versioned blobs that some operators read, each once, in order."""
        read: dict[Versioned, None] = {}
        for index in ops:
            read.update(dict.fromkeys(self.accesses[index].reads.items()))
        return read

    def written_by(self, ops: Iterable[int]) -> dict[Versioned, None]:
        """Returns the versioned blobs that some operators write, each once, in order."""
        written: dict[Versioned, None] = {}
        for index in ops:
            written.update(dict.fromkeys(self.accesses[index].writes.items()))
        return written

    def needed_ops(self, wanted: Iterable[Versioned], given: Collection[Versioned]) -> list[int]:
        """Returns the operators that `wanted` blobs depend on if `given` ones need none, in order."""
        return needed_ops([a.reads.items() for a in self.accesses], self.writer, wanted, given)


def get_undefined_blobs(ssa: Ssa) -> list[str]:
    """Returns the blobs that are read before any operator writes them, in the order of their first use."""
    undefined: NameSet = {}
    for read, _ in ssa:
        for name, version in read:
            if version == 0:
                undefined[name] = None
    return list(undefined)


def get_output_producers(ssa: Ssa) -> dict[Versioned, int]:
    """Returns the index of the operator that writes each versioned blob."""
    return {blob: index for blob, (index, _) in get_producer_map(ssa).items()}


def get_producer_map(ssa: Ssa) -> dict[Versioned, tuple[int, int]]:
    """Maps each versioned blob to the operator and the output position that write it: `{(name, version): (op, output)}`."""
    producers: dict[Versioned, tuple[int, int]] = {}
    for i, (_, written) in enumerate(ssa):
        for j, blob in enumerate(written):
            producers[blob] = (i, j)
    return producers


def get_consumer_map(ssa: Ssa) -> dict[Versioned, list[tuple[int, int]]]:
    """Maps each versioned blob to the operators that read it: `{(name, version): [(op, input), ...]}`."""
    consumers: dict[Versioned, list[tuple[int, int]]] = {}
    for i, (read, _) in enumerate(ssa):
        for j, blob in enumerate(read):
            consumers.setdefault(blob, []).append((i, j))
    return consumers


def get_op_ids_in_path(
    ssa: Ssa, blob_versions: KnownVersions, inputs: Iterable[str], outputs: Iterable[str]
) -> list[int]:
    """Returns the operators that compute the last versions of `outputs` from the last versions of `inputs`.

    Raises:
        NetError: a name in `inputs` or `outputs` that has no version.
    """

    def last(name: str) -> Versioned:
        check_known(name, blob_versions, NetError, f"blob {name!r} has no version in the net")
        return name, blob_versions[name]

    return needed_ops(
        reads=[read for read, _ in ssa],
        producers=get_output_producers(ssa),
        given=set(map(last, inputs)),
        wanted=list(map(last, outputs)),
    )


def needed_ops(
    reads: Sequence[Iterable[Versioned]],
    producers: Mapping[Versioned, int],
    wanted: Iterable[Versioned],
    given: Collection[Versioned],
) -> list[int]:
    """Returns the operators that `wanted` blobs depend on if `given` ones need none, in order.

    Args:
        reads: what each operator reads.
        producers: the operator that writes each blob.
        wanted: the blobs to compute.
        given: the blobs that are known.
    """
    queue = list(wanted)
    needed = set()
    while queue:
        blob = queue.pop()
        at = producers.get(blob)
        if blob not in given and at is not None and at not in needed:
            needed.add(at)
            queue.extend(reads[at])
    return sorted(needed)


def undeclared_reads(net: Net) -> list[str]:
    """Returns the blobs that `net` reads from outside but does not declare as external inputs, in order of first use.

    >>> undeclared_reads(Net("n", (Op.of("FC", ["x", "w", "b"], ["y"]),), ("x",)))
    ['w', 'b']
    """
    declared = set(net.external_inputs)
    return [name for name in reads(net) if name not in declared]


def live_ops(net: Net, outputs: Iterable[str]) -> list[int]:
    """Returns the indices of the operators that the final values of `outputs` depend on, in order.

    Versions of a blob are distinguished, and blobs that sub-nets read count as read. If an operator with sub-nets may
    keep the old value of an output, the operator that wrote this value is live too.

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


def with_live_ops(net: Net, outputs: Iterable[str]) -> Net:
    """Returns the net with the operators of `live_ops` alone."""
    return replace(net, ops=tuple(net.ops[index] for index in live_ops(net, outputs)))


def writers(ops: Sequence[Op], names: Iterable[str]) -> tuple[Op, ...]:
    """Returns the operators that write one of `names`, or a blob that another of them reads."""
    wanted = set(names)
    kept = []
    for op in reversed(ops):
        if wanted.intersection(op.outputs):
            kept.append(op)
            wanted.update(op.inputs)
    return tuple(reversed(kept))


def get_sub_graph_external_input_output(
    net: Net, sub_graph_op_indices: Iterable[int]
) -> tuple[list[Versioned], list[Versioned]]:
    """Returns the versioned blobs that some operators of `net` read from outside, and the blobs that others read of them.

    Inputs are in the order of first use, each once (Caffe2's tools repeat one that an operator reads twice). Outputs are
    blobs that other operators read, or external outputs of the net. Blobs that sub-nets read count as read.

    >>> net = Net("n", (Op.of("Relu", ["x"], ["y"]), Op.of("Add", ["y", "b"], ["z"])), ("x", "b"), ("z",))
    >>> get_sub_graph_external_input_output(net, [1])
    ([('y', 1), ('b', 0)], [('z', 1)])
    """
    flow = Flow.of(net)
    inside = list(sub_graph_op_indices)
    for index in inside:
        check_index(net, index)
    written = flow.written_by(inside)
    inputs = [blob for blob in flow.read_by(inside) if blob not in written]

    chosen = set(inside)
    outputs = []
    for blob in written:
        if blob in flow.external or not chosen.issuperset(flow.readers.get(blob, ())):
            outputs.append(blob)
    return inputs, outputs


def check_index(net: Net, index: int) -> None:
    """Raises NetError if a net has no operator of this index."""
    if not 0 <= index < len(net.ops):
        raise NetError(
            f"net {net.name!r} has {len(net.ops)} operators, #{index} was asked for; count from 0"
        )


def place_of(net: Net, index: int) -> str:
    """Returns the words by which an error names an operator of a net."""
    op = net.ops[index]
    return describe_op(index, op.type, op.outputs, net.name)


def get_external_blob_names(
    net: Net, lexical_scope: Collection[str]
) -> tuple[list[str], list[str]]:
    """Returns the outer blobs that `net` reads and writes as the body of an operator.

    Args:
        lexical_scope: the names of all outer blobs that the net can see. A blob that it writes is an outer blob if its
            name is among them, else it is local.

    Raises:
        NetError: the net reads a blob that is neither its own nor in `lexical_scope`.

    >>> body = Net("body", (Op.of("Add", ["a", "b"], ["t"]), Op.of("Relu", ["t"], ["a"])))
    >>> get_external_blob_names(body, ["a", "b", "c"])
    (['a', 'b'], ['a'])
    """
    scope = set(lexical_scope)
    inputs = reads(net)
    for name in inputs:
        check_known(
            name,
            scope,
            NetError,
            f"net {net.name!r}: its input blob {name!r} is undefined: not written before it is read, and not visible from "
            "outside",
        )
    return inputs, [name for name in written_by(net.ops) if name in scope]


def extract_sub_net(
    net: Net, inputs: Iterable[str], outputs: Iterable[str], name: str | None = None
) -> Net:
    """Returns the part of `net` that computes the last versions of `outputs` from the last versions of `inputs`.

    Its external inputs are `inputs` and then all other blobs that it reads from outside. No blob is renamed. Caffe2 rejects
    every part that shares an operator with the part that makes an input; jrnn only rejects conflicting versions.

    Raises:
        NetError: a name is not a blob of the net, or the part also needs an earlier version of an input: first give the
            versions different names (`ssa_rewrite`).

    >>> ops = (Op.of("Relu", ["x"], ["y"]), Op.of("Add", ["y", "b"], ["z"]), Op.of("Tanh", ["x"], ["t"]))
    >>> part = extract_sub_net(Net("n", ops, ("x", "b"), ("z", "t")), ["y"], ["z"])
    >>> [op.type for op in part.ops], part.external_inputs, part.external_outputs
    (['Add'], ('y', 'b'), ('z',))
    """
    inputs = list(inputs)
    outputs = list(outputs)
    flow = Flow.of(net)
    for blob in (*inputs, *outputs):
        check_known(blob, flow.versions, NetError, f"net {net.name!r} has no blob {blob!r}")

    given = dict(versioned(inputs, flow.versions))
    wanted = versioned(outputs, flow.versions)
    order = flow.needed_ops(wanted, given.items())
    for index in order:
        access = flow.accesses[index]
        for blob, version in access.blobs:
            if given.get(blob, version) != version:
                raise NetError(
                    f"{place_of(net, index)} is needed and handles version {version} of {blob!r}, which is given as "
                    f"version {given[blob]}; rename the versions first (ssa_rewrite)"
                )

    external_inputs = dict.fromkeys(inputs)
    for versioned_blob in (*flow.read_by(order), *wanted):
        if versioned_blob not in flow.writer:
            external_inputs[versioned_blob[0]] = None
    return replace(
        net,
        name=net.name if name is None else name,
        ops=tuple(net.ops[i] for i in order),
        external_inputs=tuple(external_inputs),
        external_outputs=tuple(outputs),
    )
