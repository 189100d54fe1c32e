"""All blobs that the step net of a recurrent network writes, at every step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jrnn.ir import Net, Op
from jrnn.lowering import run_net
from jrnn.ops.recurrent_network import StepWorkspaces

FETCHER = "RecurrentNetworkBlobFetcher"


def retrieve_step_blobs(
    net: Net, blobs: Mapping[str, Any], *, prefix: str = "rnn", key: Any = None
) -> dict[str, np.ndarray]:
    """Runs a net, and returns the blobs that its recurrent networks' step nets wrote, for debugging.

    Args:
        net, blobs, key: as for `run_net`.
        prefix: of the names.

    Returns:
        For each blob b of a step net and each step t, `<prefix>_<b><t>`, as Caffe2 names them. A blob that a step overwrites
        has its last value. Blobs of two recurrent networks that have one name: those of the later one.

    Raises:
        NetError, OpError: as `run_net` does.
    """
    networks = [op for op in net.ops if op.type == "RecurrentNetwork"]
    fetchers = tuple(
        Op.of(FETCHER, [op.outputs[-1]], [f"{prefix}_{k}"], prefix=prefix) for k, op in enumerate(networks, 1)
    )
    got = run_net(replace(net, ops=net.ops + fetchers), blobs, key=key)
    found: dict[str, np.ndarray] = {}
    for op in networks:
        workspaces = got[op.outputs[-1]]
        if isinstance(workspaces, StepWorkspaces):  # else the network is of a version without them
            found |= {f"{prefix}_{name}": np.asarray(value) for name, value in workspaces.steps()}
    return found
