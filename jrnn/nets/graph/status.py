"""Facts that spread through a net.

A status is any fact about a blob, such as its device, layout or type. Known statuses spread along the operators, forwards
once and then backwards once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrnn.errors import JrnnError, NetError, describe_op
from jrnn.nets.graph.ssa import Versioned, get_accesses
from jrnn.nets.ir import Net, Op

Statuses = Sequence[Any]
StatusUpdater = Callable[[Op, Statuses, Statuses], tuple[Statuses, Statuses]]


def infer_status(
    net: Net, status_updater: StatusUpdater, known_status: Mapping[Versioned, Any]
) -> dict[Versioned, Any]:
    """Returns the status of every versioned blob, from known ones by one forward and one backward sweep.

    Args:
        status_updater: `(op, inputs, outputs) -> (inputs, outputs)`, from the statuses of an operator's blobs (None: not
            known yet) to those that follow. After the inputs come the blobs that its sub-nets read besides, and those
            that it may leave unchanged.
        known_status: the known statuses, by versioned blob.

    Raises:
        NetError: a known blob is not in the net, two statuses of a blob conflict, or two sweeps leave one unknown.
    """
    accesses, versions = get_accesses(net)
    ends = [(name, 0) for name in net.external_inputs] + [(n, versions.get(n, 0)) for n in net.external_outputs]
    blobs = dict.fromkeys(blob for a in accesses for blob in (*a.reads.items(), *a.writes.items()))
    for blob, status in known_status.items():
        if blob not in blobs and blob not in ends:
            raise NetError(f"net {net.name!r} has no version {blob[1]} of a blob {blob[0]!r}, whose status is given")
        if status is None:
            raise NetError(f"the status given for version {blob[1]} of {blob[0]!r} is None; leave out unknown ones")
    known = dict(known_status)

    def update(i: int) -> None:
        op, access = net.ops[i], accesses[i]
        read = [(name, access.reads[name]) for name in op.inputs]
        read += [blob for blob in access.reads.items() if blob[0] not in op.inputs]
        written = [(name, access.writes[name]) for name in op.outputs]
        new = status_updater(op, [known.get(b) for b in read], [known.get(b) for b in written])
        for these, statuses in zip((read, written), new):
            assert len(these) == len(statuses), "a status updater returns as many statuses as it is given"
            for blob, status in zip(these, statuses):
                if status is not None and known.setdefault(blob, status) != status:
                    raise NetError(f"conflicting statuses of blob {blob[0]!r}: {known[blob]!r} and {status!r}")

    for i in (*range(len(net.ops)), *reversed(range(len(net.ops)))):
        try:
            update(i)
        except JrnnError as error:
            raise error.at(describe_op(i, net.ops[i].type, net.ops[i].outputs, net.name)) from None
    for blob in blobs:
        if blob not in known:
            raise NetError(
                f"net {net.name!r}: the status of version {blob[1]} of {blob[0]!r} does not follow from known ones "
                "by one forward and one backward sweep; give the status of more blobs, or remove dead ends first"
            )
    return known
