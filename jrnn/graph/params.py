"""The parameters that an init net makes."""

from collections.abc import Callable, Mapping
from typing import Any

from jrnn.errors import NetError
from jrnn.graph.devices import COPIES
from jrnn.graph.ssa import get_output_producers, get_ssa
from jrnn.ir import DeviceOption, Net


def get_params_from_init_net(
    init_net: Net, run: Callable[[Net, dict[str, Any]], Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, DeviceOption]]:
    """The values of an init net's external outputs, and the device on which each was made.

    Args:
        init_net: a net that reads nothing from outside.
        run: runs a net on given blobs and returns the blobs it wrote: `jrnn.run_net`. It is an argument because the graph
            utilities do not run operators themselves.

    Returns:
        `(values, devices)`, both by blob. The device is that of the operator that made the blob, an empty option where it
        has none and where it copied the blob from the GPU.

    Raises:
        NetError: an external output that no operator makes.

    >>> from jrnn.ir import Op
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
            raise NetError(f"net {init_net.name!r} declares the output {name!r}, which none of its operators makes")
        op = init_net.ops[at]
        devices[name] = DeviceOption() if COPIES.get(op.type) == ("gpu", "cpu") else op.device_option or DeviceOption()
    blobs = run(init_net, {})
    return {name: blobs[name] for name in init_net.external_outputs}, devices
