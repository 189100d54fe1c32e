"""Plans as frozen records: nets, and the steps that say in which order and how often to run them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jrnn.nets.ir import Net


@dataclass(frozen=True)
class ExecutionStep:
    """Runs `networks` (by name, in order) or `substeps`: `num_iter` times, or until `should_stop_blob` is True.

    None: the field is absent on the wire. On the wire, `substeps` and `networks` are `substep` and `network`; the other
    fields have the same names.

    Attributes:
        should_stop_blob: is read after each net and substep; True ends the step immediately.
        only_once: the step ends after one iteration even if `should_stop_blob` is False.
        concurrent_substeps: the substeps may run concurrently; `should_stop_blob` is read when all have ended.
        num_concurrent_instances: how many copies of the substeps run concurrently.
        create_workspace: when the step ends, blobs that it created are dropped.
        report_net: a net that Caffe2 runs every `report_interval` milliseconds during the step, and once at its end.
        run_every_ms: Caffe2 runs this substep at such intervals during the others.
        criteria_network: Caffe2 ignores it.
    """

    name: str = ""
    substeps: tuple[ExecutionStep, ...] = ()
    networks: tuple[str, ...] = ()
    num_iter: int | None = None
    criteria_network: str | None = None
    concurrent_substeps: bool | None = None
    report_net: str | None = None
    report_interval: int | None = None
    should_stop_blob: str | None = None
    only_once: bool | None = None
    run_every_ms: int | None = None
    create_workspace: bool | None = None
    num_concurrent_instances: int | None = None

    @property
    def side_by_side(self) -> bool:
        """Whether the substeps may run concurrently."""
        return (self.num_concurrent_instances or 1) > 1 or (bool(self.concurrent_substeps) and len(self.substeps) > 1)

    def network_names(self) -> Iterator[str]:
        """The names of the nets that the step and its substeps run, in order, with duplicates."""
        yield from self.networks
        if self.report_net:
            yield self.report_net
        for substep in self.substeps:
            yield from substep.network_names()


@dataclass(frozen=True)
class Plan:
    """Nets, and the steps that run them, one after the other."""

    name: str = ""
    networks: tuple[Net, ...] = ()
    steps: tuple[ExecutionStep, ...] = ()
