"""Runs plans on the host, over a workspace of blobs, one net at a time; shows plans, and chooses a net of one.

Concurrent steps run in order too.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrnn.errors import JrnnError, PlanError, check_known, near, printable
from jrnn.nets.graph.scope import reads
from jrnn.nets.ir import Blobs, ExecutionStep, Names, Net, Plan, Values, written_by
from jrnn.nets.lowering import Freed, run_net, without_sources

Nets = dict[str, Net]

# The fields of a step that `show_steps` prints, in order.
_SHOWN_FIELDS = (
    "num_iter",
    "should_stop_blob",
    "only_once",
    "concurrent_substeps",
    "num_concurrent_instances",
    "create_workspace",
    "run_every_ms",
    "report_net",
    "report_interval",
)


class _Workspace(ChainMap[str, Any]):
    """Blobs by name, of this workspace and its parents; None for a blob that is not written yet."""

    def __setitem__(self, name: str, value: Any) -> None:
        owner = next(blobs for blobs in self.maps if name in blobs)
        owner[name] = value


def run_plan(
    plan: Plan,
    blobs: Blobs | None = None,
    *,
    key: Any = None,
    max_iterations: int | None = None,
    files: str | Path | None = None,
) -> Values:
    """Runs a plan as Caffe2 does, one net at a time.

    Concurrent substeps run in order. A report net, and a substep with `run_every_ms`, run once, when their
    step ends, as in Caffe2 if the time is longer than the step.

    Args:
        plan: the plan.
        blobs: the first contents of the workspace. An operator that reads data from files does not run if these contain all
            of its outputs.
        key: a `jax.random.key` for random operators; each run of a net draws new numbers.
        max_iterations: the greatest number of rounds of a step, or of a While loop within a net.
        files: the folder in which operators may read and write files; by default they may not.

    Returns:
        Every blob of the workspace, by name.

    Raises:
        PlanError: for a plan that breaks a rule of Caffe2, a stop blob that is not one bool, or more than `max_iterations`.
        NetError, OpError: see `run_net`.

    >>> from jrnn.nets.ir import Op
    >>> double = Net("double", (Op.of("Add", ["x", "x"], ["x"]),), ("x",))
    >>> plan = Plan("p", (double,), (ExecutionStep("s", networks=("double",), num_iter=3),))
    >>> run_plan(plan, {"x": np.float32(1)})["x"]
    array(8., dtype=float32)
    """
    given = dict(blobs or {})
    execution = _Execution(plan, given, key=key, max_iterations=max_iterations, files=files)
    written: Values = {}
    for step in plan.steps:
        if not step.create_workspace:
            written.update(dict.fromkeys(execution.written(step)))
    top = _Workspace(written | given)
    for step in plan.steps:
        execution.run_step(step, top)

    results = {}
    for name, value in top.items():
        if value is not None and not isinstance(value, Freed):
            results[name] = value
    return results


class _Execution:
    """One run of a plan: its nets, and how many of them have run, from which their random keys follow."""

    def __init__(
        self,
        plan: Plan,
        given: Blobs,
        *,
        key: Any,
        max_iterations: int | None,
        files: str | Path | None,
    ):
        self.files = files
        self.nets: Nets = {}
        self.reads: dict[str, list[str]] = {}
        for name, net in _checked(plan, given).items():
            self.nets[name] = without_sources(net, given)
            self.reads[name] = reads(self.nets[name])
        self.key = key
        self.max_iterations = max_iterations
        self.nets_run = 0

    def written(self, step: ExecutionStep) -> Iterator[str]:
        """Yields the blobs that a step makes in its workspace; a substep may have one of its own."""
        for name in _own_nets(step):
            yield from written_by(self.nets[name].ops)
        for substep in step.substeps:
            if not substep.create_workspace:
                yield from self.written(substep)

    def run_step(self, step: ExecutionStep, ws: _Workspace) -> None:
        """Runs a step as often as it says, and then the nets and substeps that run at the same time."""
        if step.create_workspace:
            ws = ws.new_child(dict.fromkeys(n for n in self.written(step) if n not in ws))
        for iteration in count():
            if step.num_iter is not None and iteration >= step.num_iter:
                break
            runs_once = not step.should_stop_blob or step.only_once
            if step.num_iter is None and iteration and runs_once:
                break
            if self.max_iterations is not None and iteration >= self.max_iterations:
                waits = ""
                if step.should_stop_blob:
                    waits = f"; its stop blob {step.should_stop_blob!r} is still False"
                raise PlanError(
                    f"step {step.name!r}: runs on after {iteration} rounds{waits}; raise max_iterations"
                )
            if self.run_once(step, ws):
                break
        for substep in step.substeps:
            if substep.run_every_ms:
                self.run_step(substep, ws)
        if step.report_net:
            self.run_net(step.report_net, step, ws)

    def run_once(self, step: ExecutionStep, ws: _Workspace) -> bool:
        """Runs everything in a step once; returns whether its stop blob ended it."""
        for name in step.networks:
            self.run_net(name, step, ws)
            if _stops(step, ws):
                return True
        at_once = step.side_by_side
        copies = max(step.num_concurrent_instances or 1, 1)
        for substep in step.substeps * copies:
            if substep.run_every_ms:
                continue
            self.run_step(substep, ws)
            if not at_once and _stops(step, ws):
                return True
        return at_once and _stops(step, ws)

    def run_net(self, name: str, step: ExecutionStep, ws: _Workspace) -> None:
        """Runs one net on a workspace, and writes what it wrote."""
        self.nets_run += 1
        key = None if self.key is None else jax.random.fold_in(self.key, self.nets_run)
        blobs = {}
        for blob in self.reads[name]:
            if ws.get(blob) is not None:
                blobs[blob] = ws[blob]
        try:
            results = run_net(
                self.nets[name],
                blobs,
                key=key,
                max_iterations=self.max_iterations,
                files=self.files,
                fed=(),
            )
        except JrnnError as e:
            raise e.at(f"step {step.name!r}") from e.__cause__
        for blob in written_by(self.nets[name].ops):
            ws[blob] = results.get(blob, Freed(f"net {name!r}"))


def _own_nets(step: ExecutionStep) -> Names:
    """Returns the names of the nets that a step runs itself."""
    if step.report_net:
        return (*step.networks, step.report_net)
    return step.networks


def _stops(step: ExecutionStep, ws: _Workspace) -> bool:
    """Returns whether the stop blob of a step says that it ends."""
    if not step.should_stop_blob:
        return False
    value = ws.get(step.should_stop_blob)
    if value is None:  # compat: a blob that no net has written yet does not stop a step
        return False
    if np.size(value) != 1 or np.asarray(value).dtype != np.bool_:
        shape = list(np.shape(value))
        raise PlanError(
            f"step {step.name!r}: its stop blob {step.should_stop_blob!r} must hold one bool; it holds "
            f"{getattr(value, 'dtype', type(value).__name__)} {shape}"
        )
    return bool(np.asarray(value).reshape(()))


def _checked(plan: Plan, given: Blobs) -> Nets:
    """Returns the nets by name; raises PlanError for a plan that cannot run with any values."""
    nets: Nets = {}
    for net in plan.networks:
        if net.name in nets:
            raise PlanError(f"plan {plan.name!r}: two nets are named {net.name!r}; rename one")
        nets[net.name] = net
    known = set(given)
    for net in plan.networks:
        known.update(written_by(net.ops))
    for step in plan.steps:
        _check_step(step, nets, known)
    return nets


def _check_step(step: ExecutionStep, nets: Mapping[str, Net], known: set[str]) -> None:
    where = f"step {step.name!r}"
    for name in _own_nets(step):
        check_known(name, nets, PlanError, f"{where}: runs net {name!r}, which the plan lacks")
    if step.networks and step.substeps:
        raise PlanError(f"{where}: has both nets and substeps; put the nets into a substep")
    if step.should_stop_blob is None:
        if step.only_once is not None:
            raise PlanError(f"{where}: only_once needs a should_stop_blob, and it has none")
    elif step.num_iter is not None:
        raise PlanError(f"{where}: has num_iter and a should_stop_blob; give one of them")
    elif step.should_stop_blob not in known:
        raise PlanError(
            f"{where}: its stop blob {step.should_stop_blob!r} is neither given nor written by a net of the plan"
            f"{near(step.should_stop_blob, known)}"
        )
    elif step.only_once or step.networks:
        pass
    elif all(substep.run_every_ms for substep in step.substeps):
        raise PlanError(
            f"{where}: runs nothing until {step.should_stop_blob!r} holds, so it would never end"
        )
    for substep in step.substeps:
        _check_step(substep, nets, known)


def net_of_plan(plan: Plan, name: str | None = None) -> tuple[Net, tuple[Net, ...]]:
    """Returns a net of a plan, and the nets that its steps run before it, each once, which make its parameters.

    Args:
        plan: the plan.
        name: the net's name; by default, the only net of the plan that has operators.

    Raises:
        PlanError: for a name that the plan lacks, or if no name is given and there are several nets.

    >>> steps = ExecutionStep("start", networks=("init",)), ExecutionStep("loop", networks=("train",), num_iter=9)
    >>> plan = Plan("p", (Net("init"), Net("train")), steps)
    >>> net, before = net_of_plan(plan, "train")
    >>> net.name, [n.name for n in before]
    ('train', ['init'])
    """
    nets = {net.name: net for net in plan.networks}
    if name is None:
        used = [net.name for net in nets.values() if net.ops]
        if len(used) != 1:
            raise PlanError(
                f"plan {plan.name!r} has {len(used)} nets: {', '.join(used)}; choose one with --network NAME"
            )
        name = used[0]
    if name not in nets:
        raise PlanError(
            f"plan {plan.name!r} has no net {name!r}{near(name, nets)}; it has {', '.join(nets)}"
        )
    before: Nets = {}
    for step in plan.steps:
        for network in step.network_names():
            if network == name:
                return nets[name], tuple(before.values())
            if network in nets:
                before[network] = nets[network]
    return nets[name], ()


def show_steps(plan: Plan) -> str:
    """Lists the steps of a plan, one line each; substeps are indented.

    >>> print(show_steps(Plan("p", (Net("train"),), (ExecutionStep("loop", networks=("train",), num_iter=9),))))
    plan p
      step loop num_iter=9: train
    """
    lines = [f"plan {plan.name}".rstrip()]

    def add(step: ExecutionStep, depth: int) -> None:
        line = f"{'  ' * depth}step {step.name}"
        for field in _SHOWN_FIELDS:
            value = getattr(step, field)
            if value is not None:
                line += f" {field}={value}"
        if step.networks:
            line += f": {', '.join(step.networks)}"
        lines.append(line)
        for substep in step.substeps:
            add(substep, depth + 1)

    for step in plan.steps:
        add(step, 1)
    return "\n".join(map(printable, lines))
