"""Devices: which blobs are on the GPU, options that say so, and copies to remove; and how facts spread through a net.

A status is any fact about a blob, such as its device, layout or type. Known statuses spread along the operators, forwards
once and then backwards once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jrnn.errors import JrnnError, NetError, describe_op
from jrnn.nets.graph.passes import on_device
from jrnn.nets.graph.rename import rename_in_op
from jrnn.nets.graph.scope import all_names, has_sub_nets
from jrnn.nets.graph.ssa import Access, Flow, Versioned, get_accesses, get_output_producers, get_ssa
from jrnn.nets.ir import DeviceOption, Net, Op

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
    devices = list(dict.fromkeys(d for d in (*read, *written) if d is not None))
    if len(devices) > 1:
        raise NetError(
            f"its blobs must be on one device, they are on {devices}; put a copy between"
        )
    device = devices[0] if devices else None
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
    return {
        blob: names[device] for blob, device in infer_status(net, _spread_device, known).items()
    }


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
    return [devices[name, versions.get(name, 0)] for name in net.external_outputs]


def _set_devices(net: Net, devices: Mapping[Versioned, str]) -> Net:
    accesses, _ = get_accesses(net)

    def placed(op: Op, blobs: list[Versioned]) -> Op:
        on_gpu = op.type in COPIES or any(devices[blob] == "gpu" for blob in blobs)
        return on_device(op, CUDA) if on_gpu else op

    ops = (placed(op, [*a.reads.items(), *a.writes.items()]) for op, a in zip(net.ops, accesses))
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
    wanted = {(name, versions.get(name, 0)): devices[name, 0] for name in init_net.external_outputs}
    return _set_devices(predict_net, devices), _set_devices(
        init_net, infer_device_type(init_net, wanted)
    )


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
    flow = Flow.of(net)
    accesses = flow.accesses
    readers = flow.readers
    original: dict[
        Versioned, Versioned
    ] = {}  # the blob that was copied back -> the blob that was copied first
    removed: set[int] = set()

    for i, op in enumerate(net.ops):
        if op.type not in COPIES or i in removed:
            continue
        (source,), (copy,) = accesses[i].reads.items(), accesses[i].writes.items()
        source = original.get(source, source)
        backs = readers.get(copy, [])
        way_back = COPIES[op.type][::-1]
        if (
            not backs
            or copy in flow.external
            or any(COPIES.get(net.ops[b].type) != way_back for b in backs)
        ):
            continue
        returned = [blob for b in backs for blob in accesses[b].writes.items()]
        ends = [(blob, end) for blob in returned for end in readers.get(blob, [])]
        removed.update((i, *backs))
        end_of_source = flow.overwritten(source, removed)
        if flow.external.isdisjoint(returned) and all(
            end <= end_of_source and _can_read(net.ops[end], accesses[end], blob[0], source[0])
            for blob, end in ends
        ):
            original.update((blob, source) for blob in returned)
        else:
            removed.difference_update((i, *backs))

    if not removed:
        return net

    def rewired(op: Op, access: Access) -> Op:
        names = {b[0]: original[b][0] for b in access.reads.items() if b in original}
        return rename_in_op(op, names, {}) if names else op

    return replace(
        net, ops=tuple(rewired(op, accesses[i]) for i, op in enumerate(net.ops) if i not in removed)
    )


def _can_read(op: Op, access: Access, old: str, new: str) -> bool:
    """Returns whether `op` may read `new` for `old`: no sub-net has a `new`, and it does not update `old` in place."""
    if not has_sub_nets(op):
        return True
    return (
        old not in access.updates
        and new not in op.inputs
        and all(new not in all_names(n) for _, n in op.sub_nets())
    )


def get_params_from_init_net(
    init_net: Net, run: Callable[[Net, dict[str, Any]], Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, DeviceOption]]:
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
        devices[name] = (
            DeviceOption()
            if COPIES.get(op.type) == ("gpu", "cpu")
            else op.device_option or DeviceOption()
        )
    blobs = run(init_net, {})
    return {name: blobs[name] for name in init_net.external_outputs}, devices


def infer_status(
    net: Net, status_updater: StatusUpdater, known_status: Mapping[Versioned, Any]
) -> dict[Versioned, Any]:
    """Returns the status of every versioned blob, from known ones by one forward and one backward sweep.

    Args:
        status_updater: `(op, inputs, outputs) -> (inputs, outputs)`, from the statuses of an operator's blobs (None: not
            known yet) to those that follow. After the inputs come the blobs that only its sub-nets read, and those
            that it may leave unchanged.
        known_status: the known statuses, by versioned blob.

    Raises:
        NetError: a known blob is not in the net, two statuses of a blob conflict, or two sweeps leave one unknown.
    """
    accesses, versions = get_accesses(net)
    ends = [(name, 0) for name in net.external_inputs] + [
        (n, versions.get(n, 0)) for n in net.external_outputs
    ]
    blobs = dict.fromkeys(blob for a in accesses for blob in (*a.reads.items(), *a.writes.items()))
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
        read = [(name, access.reads[name]) for name in op.inputs]
        read += [blob for blob in access.reads.items() if blob[0] not in op.inputs]
        written = [(name, access.writes[name]) for name in op.outputs]
        new = status_updater(op, [known.get(b) for b in read], [known.get(b) for b in written])
        for these, statuses in zip((read, written), new):
            assert len(these) == len(statuses), (
                "a status updater returns as many statuses as it is given"
            )
            for blob, status in zip(these, statuses):
                if status is not None and known.setdefault(blob, status) != status:
                    raise NetError(
                        f"conflicting statuses of blob {blob[0]!r}: {known[blob]!r} and {status!r}"
                    )

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
