"""Plans: nets, and the steps that say in which order and how often to run them. Frozen, equal by content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jrnn.ir import Net


@dataclass(frozen=True)
class ExecutionStep:
    """Runs `networks` (by name, in order) or `substeps`: `num_iter` times, or until `should_stop_blob` holds True.

    None marks a field that is absent on the wire. The fields keep their names there, but for `substeps` and `networks`.

    should_stop_blob: looked at after each net and substep; True ends the step at once. only_once: the step ends after one
    round even so. concurrent_substeps: the substeps may run side by side, and the stop blob is looked at when all have
    ended. num_concurrent_instances: as if the substeps were given so many times, side by side. create_workspace: what the
    step writes under names that the workspace lacks is dropped when the step ends. report_net, with report_interval in
    milliseconds: a net that Caffe2 runs now and then while the step lasts, and once at its end. run_every_ms: the same
    for a substep. criteria_network: Caffe2 reads it no more.
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
        """Whether the substeps may run at the same time."""
        return (self.num_concurrent_instances or 1) > 1 or (bool(self.concurrent_substeps) and len(self.substeps) > 1)

    def network_names(self) -> Iterator[str]:
        """The names of the nets that the step and its substeps run, in order, with repetitions."""
        yield from self.networks
        if self.report_net:
            yield self.report_net
        for substep in self.substeps:
            yield from substep.network_names()


@dataclass(frozen=True)
class Plan:
    """Nets under their names, and the steps that run them, one after the other."""

    name: str = ""
    networks: tuple[Net, ...] = ()
    steps: tuple[ExecutionStep, ...] = ()
