"""Devices: which blobs are on the GPU, options that say so, and copies to remove; and how facts spread through a net.

A status is any fact about a blob, such as its device, layout or type. Known statuses spread along the operators, forwards
once and then backwards once.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jrnn.errors import JrnnError, NetError
from jrnn.nets.graph.passes import on_device
from jrnn.nets.graph.rename import rename_in_op
from jrnn.nets.graph.scope import all_names, has_sub_nets
from jrnn.nets.graph.ssa import (
    Access,
    Flow,
    Versioned,
    get_accesses,
    get_output_producers,
    get_ssa,
    place_of,
    versioned,
)
from jrnn.nets.ir import Blobs, DeviceOption, Net, Op, Values, nets_of

# Copies between devices, with the devices of their input and output.
COPIES = {"CopyCPUToGPU": ("cpu", "gpu"), "CopyGPUToCPU": ("gpu", "cpu")}
CUDA = DeviceOption(device_type=1, device_id=0)

Statuses = Sequence[Any]
StatusUpdater = Callable[[Op, Statuses, Statuses], tuple[Statuses, Statuses]]


def _spread_device(op: Op, read: Statuses, written: Statuses) -> tuple[Statuses, Statuses]:
    if op.type in COPIES:
        source, target = COPIES[op.type]
        if (read[0] or source) != source or (written[0] or target) != target:
            raise NetError(
                f"copies from {source} to {target}, but its blobs are on {list(read)} and {list(written)}"
            )
        return [source], [target]
    devices = dict.fromkeys((*read, *written))
    devices.pop(None, None)
    if len(devices) > 1:
        raise NetError(
            f"its blobs must be on one device, they are on {list(devices)}; put a copy between"
        )
    device = next(iter(devices), None)
    return [device] * len(read), [device] * len(written)


_TO_CAFFE2 = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu"}
_STYLES = {"caffe2": {"cpu": "cpu", "gpu": "gpu"}, "pytorch": {"cpu": "cpu", "gpu": "cuda"}}


def infer_device_type(
    net: Net, known_status: Mapping[Versioned, str], device_name_style: str = "caffe2"
) -> dict[Versioned, str]:
    """Returns the device of every versioned blob. Only copies have blobs on two devices.

    Args:
        known_status: the known devices, "cpu", "gpu" or "cuda".
        device_name_style: "caffe2" returns "cpu" and "gpu", "pytorch" returns "cpu" and "cuda".

    Raises:
        NetError: see `infer_status`; or an unknown device or style.

    >>> net = Net("n", (Op.of("CopyCPUToGPU", ["x"], ["g"]), Op.of("Relu", ["g"], ["y"])), ("x",), ("y",))
    >>> infer_device_type(net, {("x", 0): "cpu"})[("y", 1)]
    'gpu'
    """
    if device_name_style not in _STYLES:
        raise NetError(
            f"device_name_style must be one of {list(_STYLES)}, is {device_name_style!r}"
        )
    known = {}
    for blob, device in known_status.items():
        if device not in _TO_CAFFE2:
            raise NetError(
                f"the device of {blob[0]!r} must be one of {list(_TO_CAFFE2)}, is {device!r}"
            )
        known[blob] = _TO_CAFFE2[device]
    names = _STYLES[device_name_style]
    statuses = infer_status(net, _spread_device, known)
    return {blob: names[device] for blob, device in statuses.items()}


def _input_devices(net: Net, devices: Sequence[str] | Mapping[str, str]) -> dict[Versioned, str]:
    pairs = devices.items() if isinstance(devices, Mapping) else zip(net.external_inputs, devices)
    return {(name, 0): device for name, device in pairs}


def infer_output_devices(net: Net, input_devices: Sequence[str] | Mapping[str, str]) -> list[str]:
    """Returns the device, "cpu" or "cuda", of each external output.

    Args:
        input_devices: the devices of the external inputs, by name or in order; parameters at the end may be left out.

    >>> net = Net("n", (Op.of("CopyGPUToCPU", ["x"], ["y"]),), ("x",), ("y",))
    >>> infer_output_devices(net, ["cuda"])
    ['cpu']
    """
    devices = infer_device_type(net, _input_devices(net, input_devices), "pytorch")
    _, versions = get_accesses(net)
    return [devices[blob] for blob in versioned(net.external_outputs, versions)]


def _set_devices(net: Net, devices: Mapping[Versioned, str]) -> Net:
    accesses, _ = get_accesses(net)
    ops = []
    for op, access in zip(net.ops, accesses):
        if op.type in COPIES or any(devices[blob] == "gpu" for blob in access.blobs):
            op = on_device(op, CUDA)
        ops.append(op)
    return replace(net, ops=tuple(ops))


def assign_device_option(
    predict_net: Net, init_net: Net, input_devices: Sequence[str] | Mapping[str, str]
) -> tuple[Net, Net]:
    """Gives the device option CUDA:0 to every copy and every operator whose blobs are on the GPU, and to its sub-nets.

    The devices of the predict net follow from its inputs, and the devices of the init net from the uses of its outputs.

    Args:
        input_devices: "cpu", "gpu" or "cuda" for the predict net's external inputs, in order or by name.

    Returns:
        The new `(predict_net, init_net)`.
    """
    devices = infer_device_type(predict_net, _input_devices(predict_net, input_devices))
    _, versions = get_accesses(init_net)
    for name in init_net.external_outputs:
        if (name, 0) not in devices:
            raise NetError(
                f"net {init_net.name!r} gives {name!r}, which net {predict_net.name!r} does not read"
            )
    wanted = {}
    for blob in versioned(init_net.external_outputs, versions):
        wanted[blob] = devices[blob[0], 0]
    init_devices = infer_device_type(init_net, wanted)
    return _set_devices(predict_net, devices), _set_devices(init_net, init_devices)


def fuse_copy_between_cpu_and_gpu(net: Net) -> Net:
    """Removes copies of a blob to the other device and back; idempotent.

    If every reader of a copy copies it back, all readers of these second copies read the original instead (Caffe2's tools
    rewire only the first), and all these copies are removed. They are kept if a second copy is an external output, or if
    the original is overwritten before the last of those readers.

    >>> there, back = Op.of("CopyCPUToGPU", ["x"], ["g"]), Op.of("CopyGPUToCPU", ["g"], ["c"])
    >>> net = Net("n", (there, back, Op.of("Relu", ["c"], ["y"])), ("x",), ("y",))
    >>> [(op.type, op.inputs) for op in fuse_copy_between_cpu_and_gpu(net).ops]
    [('Relu', ('x',))]
    """
    while (fused := _fuse_once(net)) is not net:
        net = fused
    return net


def _fuse_once(net: Net) -> Net:
    """Returns the net without the copies that one sweep over its operators removes, or the same net."""
    flow = Flow.of(net)
    original: dict[Versioned, Versioned] = {}  # the source of each blob that was copied back
    removed: set[int] = set()
    for i, op in enumerate(net.ops):
        if op.type not in COPIES or i in removed:
            continue
        (source,) = flow.accesses[i].reads.items()
        (copy,) = flow.accesses[i].writes.items()
        source = original.get(source, source)
        backs = _copies_back(net, flow, op, copy)
        returned = flow.written_by(backs)
        pair = {i, *backs}
        if backs and _may_fuse(net, flow, source, returned, removed | pair):
            removed |= pair
            original.update(dict.fromkeys(returned, source))
    if not removed:
        return net

    ops = []
    for i, op in enumerate(net.ops):
        if i in removed:
            continue
        names = {}
        for blob in flow.accesses[i].reads.items():
            if blob in original:
                names[blob[0]] = original[blob][0]
        ops.append(rename_in_op(op, names, {}) if names else op)
    return replace(net, ops=tuple(ops))


def _copies_back(net: Net, flow: Flow, op: Op, copy: Versioned) -> list[int]:
    """Returns the readers of a copy if all of them copy it back, else none."""
    readers = flow.readers.get(copy, [])
    way_back = COPIES[op.type][::-1]
    if copy in flow.external or any(COPIES.get(net.ops[r].type) != way_back for r in readers):
        return []
    return readers


def _may_fuse(
    net: Net, flow: Flow, source: Versioned, returned: Collection[Versioned], removed: set[int]
) -> bool:
    """Returns whether all readers of the `returned` blobs may read `source` if the operators `removed` go."""
    if not flow.external.isdisjoint(returned):
        return False
    end_of_source = flow.overwritten(source, removed)
    for blob in returned:
        for reader in flow.readers.get(blob, []):
            access = flow.accesses[reader]
            if reader > end_of_source:
                return False
            if not _can_read(net.ops[reader], access, blob[0], source[0]):
                return False
    return True


def _can_read(op: Op, access: Access, old: str, new: str) -> bool:
    """Returns whether `op` may read `new` for `old`: no sub-net has a `new`, and it does not update `old` in place."""
    if not has_sub_nets(op):
        return True
    if old in access.updates or new in op.inputs:
        return False
    return not any(new in all_names(net) for net in nets_of(op))


def get_params_from_init_net(
    init_net: Net, run: Callable[[Net, Values], Blobs]
) -> tuple[Values, dict[str, DeviceOption]]:
    """Returns the values of an init net's external outputs, and the device on which each was made.

    Args:
        init_net: a net that reads nothing from outside.
        run: runs a net on given blobs and returns the blobs it wrote: `jrnn.run_net`. It is an argument because the graph
            utilities do not run operators themselves.

    Returns:
        `(values, devices)`, both by blob. A device is the option of the operator that made the blob; it is empty if the
        operator has none, or copied the blob from the GPU.

    Raises:
        NetError: an external output that no operator makes.

    >>> from jrnn.nets.ir import Op
    >>> init = Net("init", (Op.of("GivenTensorFill", [], ["w"], shape=[1], values=[2.0]),), (), ("w",))
    >>> get_params_from_init_net(init, lambda net, blobs: {"w": 2.0})[0]
    {'w': 2.0}
    """
    ssa, versions = get_ssa(init_net)
    producers = get_output_producers(ssa)
    devices = {}
    for name in init_net.external_outputs:
        at = producers.get((name, versions.get(name, 0)))
        if at is None:
            raise NetError(
                f"net {init_net.name!r} declares the output {name!r}, which none of its operators makes"
            )
        op = init_net.ops[at]
        devices[name] = DeviceOption()
        if op.device_option is not None and COPIES.get(op.type) != ("gpu", "cpu"):
            devices[name] = op.device_option
    blobs = run(init_net, {})
    return {name: blobs[name] for name in init_net.external_outputs}, devices


def infer_status(
    net: Net, status_updater: StatusUpdater, known_status: Mapping[Versioned, Any]
) -> dict[Versioned, Any]:
    """Returns the status of every versioned blob, from known ones by one forward and one backward sweep.

    Args:
        status_updater: `(op, inputs, outputs) -> (inputs, outputs)`, from the statuses of an operator's blobs (None: not
            known yet) to the statuses that follow. After the inputs come the blobs that only its sub-nets read, and the
            blobs that it may leave unchanged.
        known_status: the known statuses, by versioned blob.

    Raises:
        NetError: a known blob is not in the net, two statuses of a blob conflict, or two sweeps leave one unknown.
    """
    accesses, versions = get_accesses(net)
    ends = [*versioned(net.external_inputs, {}), *versioned(net.external_outputs, versions)]
    blobs: dict[Versioned, None] = {}
    for access in accesses:
        blobs.update(dict.fromkeys(access.blobs))
    for blob, status in known_status.items():
        if blob not in blobs and blob not in ends:
            raise NetError(
                f"net {net.name!r} has no version {blob[1]} of a blob {blob[0]!r}, whose status is given"
            )
        if status is None:
            raise NetError(
                f"the status given for version {blob[1]} of {blob[0]!r} is None; leave out unknown ones"
            )
    known = dict(known_status)

    def update(i: int) -> None:
        op = net.ops[i]
        access = accesses[i]
        read = versioned(op.inputs, access.reads)
        read += [blob for blob in access.reads.items() if blob[0] not in op.inputs]
        written = versioned(op.outputs, access.writes)
        of_inputs, of_outputs = status_updater(
            op, list(map(known.get, read)), list(map(known.get, written))
        )
        is_complete = len(of_inputs) == len(read) and len(of_outputs) == len(written)
        assert is_complete, "a status updater returns as many statuses as it is given"
        for blob, status in zip((*read, *written), (*of_inputs, *of_outputs)):
            if status is not None and known.setdefault(blob, status) != status:
                raise NetError(
                    f"conflicting statuses of blob {blob[0]!r}: {known[blob]!r} and {status!r}"
                )

    for i in (*range(len(net.ops)), *reversed(range(len(net.ops)))):
        try:
            update(i)
        except JrnnError as error:
            raise error.at(place_of(net, i)) from None
    for blob in blobs:
        if blob not in known:
            raise NetError(
                f"net {net.name!r}: the status of version {blob[1]} of {blob[0]!r} does not follow from known ones "
                "by one forward and one backward sweep; give the status of more blobs, or remove dead ends first"
            )
    return known
