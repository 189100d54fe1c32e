"""Facts about blobs that spread through a net by a given rule.

A status is anything known of a blob: its device, its layout, its type. It is known of some blobs and spreads along the
operators, forwards once and then backwards once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrnn.errors import JrnnError, NetError, describe_op
from jrnn.graph.ssa import Versioned, get_accesses
from jrnn.ir import Net, Op

Statuses = Sequence[Any]
StatusUpdater = Callable[[Op, Statuses, Statuses], tuple[Statuses, Statuses]]


def infer_status(
    net: Net, status_updater: StatusUpdater, known_status: Mapping[Versioned, Any]
) -> dict[Versioned, Any]:
    """The status of every versioned blob, spread from those known by one forward and one backward sweep.

    Args:
        status_updater: given an operator, the statuses of its inputs and those of its outputs (None: not known yet), returns
            both again with what follows. What an operator's sub-nets read besides its inputs, or may leave as it was,
            stands after the inputs.
        known_status: what is known at first, by versioned blob.

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
            raise NetError(
                f"the status given for version {blob[1]} of {blob[0]!r} is None; leave out what is not known"
            )
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
                    raise NetError(
                        f"conflicting statuses of blob {blob[0]!r}: it is {known[blob]!r}, and also {status!r}"
                    )

    for i in (*range(len(net.ops)), *reversed(range(len(net.ops)))):
        try:
            update(i)
        except JrnnError as error:
            raise error.at(describe_op(i, net.ops[i].type, net.ops[i].outputs, net.name)) from None
    for blob in blobs:
        if blob not in known:
            raise NetError(
                f"net {net.name!r}: the status of version {blob[1]} of {blob[0]!r} does not follow from what is known "
                "by one forward and one backward sweep; give the status of more blobs, or remove dead ends first"
            )
    return known
