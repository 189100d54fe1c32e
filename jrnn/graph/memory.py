"""Reuse of blobs: fewer names, so that a workspace holds fewer arrays at a time."""

import bisect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from jrnn.graph.rename import rename_blobs
from jrnn.graph.scope import Workspace, all_names, has_sub_nets, keeps_outputs, outer_names, reads, workspace_of
from jrnn.ir import Net


@dataclass(frozen=True)
class MemoryReport:
    """What sharing memory among blobs saves.

    `assignments` maps each shared blob to the one whose memory it uses; `baseline_bytes` is what these blobs take with each
    its own memory, `optimized_bytes` what they take together.
    """

    baseline_bytes: int
    optimized_bytes: int
    assignments: dict[str, str]

    @property
    def saved_bytes(self) -> int:
        return self.baseline_bytes - self.optimized_bytes


def optimize_memory(
    net: Net, shapes: Mapping[str, Any], static_blobs: Collection[str] = ()
) -> tuple[Net, MemoryReport]:
    """`net` with blobs renamed so that those which are never needed at the same time share a name, and what that saves.

    The operators keep their order, no operator becomes in-place, and the blobs that the net reads from outside, its external
    inputs and outputs, `static_blobs`, and those of unknown shape keep their names. So do the blobs of recurrent networks
    and what sub-nets see by name; the nets inside operators are left as they are. Idempotent.

    Args:
        shapes: arrays, or anything with `.shape` and `.dtype`, by blob, such as `jrnn.infer_shapes` gives. Blobs that are
            no arrays count as of unknown shape.

    >>> from jrnn.ir import Op
    >>> relu = lambda a, b: Op.of("Relu", [a], [b])
    >>> net = Net("n", (relu("x", "a"), relu("a", "b"), relu("b", "c"), relu("c", "y")), ("x",), ("y",))
    >>> optimized, report = optimize_memory(net, dict.fromkeys("abc", np.zeros([2, 5], np.float32)))
    >>> [op.outputs[0] for op in optimized.ops], report.saved_bytes, report.assignments
    (['a', 'b', 'a', 'y'], 40, {'c': 'a'})
    """
    fixed = {*net.external_inputs, *net.external_outputs, *static_blobs, *reads(net)}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, op in enumerate(net.ops):
        fixed.update(outer_names(op))
        if has_sub_nets(op):
            fixed.update(name for _, sub in op.sub_nets() for name in all_names(sub))
            if workspace_of(op) is Workspace.STEP or keeps_outputs(op):
                fixed.update(op.inputs, op.outputs)
        for name in op.outputs:
            first.setdefault(name, i)
        last.update((name, i) for name in (*op.inputs, *op.outputs))
    known = {name: shapes[name] for name in first if hasattr(shapes.get(name), "dtype")}
    sizes = {name: prod(array.shape) * np.dtype(array.dtype).itemsize for name, array in known.items()}
    ends: dict[int, list[str]] = {}
    for name in sizes:
        if name not in fixed:
            ends.setdefault(last[name], []).append(name)

    slot_of: dict[str, str] = {}
    slot_sizes: dict[str, int] = {}
    free: list[tuple[int, int, str]] = []  # size, age, name; sorted
    for i, op in enumerate(net.ops):
        for name in op.outputs:
            if name in sizes and name not in fixed and name not in slot_of:
                slot = name
                if free:
                    # The smallest that is large enough, else the largest, which grows.
                    slot = free.pop(min(bisect.bisect_left(free, (sizes[name],)), len(free) - 1))[2]
                slot_of[name] = slot
                slot_sizes[slot] = max(slot_sizes.get(slot, 0), sizes[name])
        for name in ends.get(i, ()):
            slot = slot_of[name]
            bisect.insort(free, (slot_sizes[slot], first[slot], slot))
    report = MemoryReport(
        baseline_bytes=sum(sizes[name] for name in slot_of),
        optimized_bytes=sum(slot_sizes.values()),
        assignments={name: slot for name, slot in slot_of.items() if slot != name},
    )
    return rename_blobs(net, report.assignments), report
