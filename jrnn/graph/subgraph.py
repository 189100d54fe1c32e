"""Parts of nets: the inputs and outputs of a part, and the part between given blobs."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from jrnn.errors import NetError, describe_op, near
from jrnn.graph.scope import reads
from jrnn.graph.ssa import Versioned, get_accesses
from jrnn.ir import Net


def get_sub_graph_external_input_output(
    net: Net, sub_graph_op_indices: Iterable[int]
) -> tuple[list[Versioned], list[Versioned]]:
    """The versioned blobs that some operators of `net` need from outside, and those they give to the outside.

    Inputs stand in the order of first use, each once (Caffe2's tools repeat one that an operator reads twice); outputs are
    those that other operators read or that are external outputs of the net. What sub-nets read counts as read.

    >>> from jrnn.ir import Op
    >>> net = Net("n", (Op.of("Relu", ["x"], ["y"]), Op.of("Add", ["y", "b"], ["z"])), ("x", "b"), ("z",))
    >>> get_sub_graph_external_input_output(net, [1])
    ([('y', 1), ('b', 0)], [('z', 1)])
    """
    accesses, versions = get_accesses(net)
    inside = list(sub_graph_op_indices)
    for i in inside:
        if not 0 <= i < len(net.ops):
            raise NetError(f"net {net.name!r} has {len(net.ops)} operators, #{i} was asked for; count from 0")
    written = dict.fromkeys(blob for i in inside for blob in accesses[i].writes.items())
    read = dict.fromkeys(blob for i in inside for blob in accesses[i].reads.items())
    chosen = set(inside)
    used = {(name, versions.get(name, 0)) for name in net.external_outputs}
    used.update(blob for i, a in enumerate(accesses) if i not in chosen for blob in a.reads.items())
    return [blob for blob in read if blob not in written], [blob for blob in written if blob in used]


def get_external_blob_names(net: Net, lexical_scope: Collection[str]) -> tuple[list[str], list[str]]:
    """The outer blobs that `net` reads and those that it writes, when it becomes the body of an operator.

    Args:
        lexical_scope: the names of all outer blobs that the net can see. A written blob is an outer one where its name is
            among them, and local to the net otherwise.

    Raises:
        NetError: the net reads a blob that is neither its own nor in `lexical_scope`.

    >>> from jrnn.ir import Op
    >>> body = Net("body", (Op.of("Add", ["a", "b"], ["t"]), Op.of("Relu", ["t"], ["a"])))
    >>> get_external_blob_names(body, ["a", "b", "c"])
    (['a', 'b'], ['a'])
    """
    scope = set(lexical_scope)
    inputs = reads(net)
    for name in inputs:
        if name not in scope:
            raise NetError(
                f"net {net.name!r}: its input blob {name!r} is undefined: not written before it is read, and not visible "
                f"from outside{near(name, scope)}"
            )
    return inputs, list(dict.fromkeys(o for op in net.ops for o in op.outputs if o in scope))


def extract_sub_net(net: Net, inputs: Iterable[str], outputs: Iterable[str], name: str | None = None) -> Net:
    """The part of `net` that computes the last versions of `outputs` from the last versions of `inputs`.

    Its external inputs are `inputs` and then whatever else the part reads from outside. No blob is renamed. Caffe2 refuses
    every part that shares an operator with what makes an input; here only one in which a blob would be in the way.

    Raises:
        NetError: a name is no blob of the net, or the part would also need an earlier version of an input: rename
            versions apart first (`ssa_rewrite`).

    >>> from jrnn.ir import Op
    >>> ops = (Op.of("Relu", ["x"], ["y"]), Op.of("Add", ["y", "b"], ["z"]), Op.of("Tanh", ["x"], ["t"]))
    >>> part = extract_sub_net(Net("n", ops, ("x", "b"), ("z", "t")), ["y"], ["z"])
    >>> [op.type for op in part.ops], part.external_inputs, part.external_outputs
    (['Add'], ('y', 'b'), ('z',))
    """
    inputs, outputs = list(inputs), list(outputs)
    accesses, versions = get_accesses(net)
    for blob in (*inputs, *outputs):
        if blob not in versions:
            raise NetError(f"net {net.name!r} has no blob {blob!r}{near(blob, versions)}")
    given = {blob: versions[blob] for blob in inputs}
    producers = {blob: i for i, a in enumerate(accesses) for blob in a.writes.items()}
    queue = [(blob, versions[blob]) for blob in outputs]
    kept: set[int] = set()
    while queue:
        name_read, version = queue.pop()
        at = producers.get((name_read, version))
        if given.get(name_read) != version and at is not None and at not in kept:
            kept.add(at)
            queue.extend(accesses[at].reads.items())
    order = sorted(kept)
    for i in order:
        for blob, version in (*accesses[i].reads.items(), *accesses[i].writes.items()):
            if given.get(blob, version) != version:
                where = describe_op(i, net.ops[i].type, net.ops[i].outputs, net.name)
                raise NetError(
                    f"{where} is needed and handles version {version} of {blob!r}, which is given as version "
                    f"{given[blob]}; rename the versions apart first (ssa_rewrite)"
                )
    needed = [blob for i in order for blob in accesses[i].reads.items()] + [(name, versions[name]) for name in outputs]
    outside = (blob for blob, version in needed if (blob, version) not in producers)
    return replace(
        net,
        name=net.name if name is None else name,
        ops=tuple(net.ops[i] for i in order),
        external_inputs=tuple(dict.fromkeys((*inputs, *outside))),
        external_outputs=tuple(outputs),
    )
