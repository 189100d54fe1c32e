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

from jrnn.errors import JrnnError, PlanError, near, printable
from jrnn.nets.graph.scope import reads
from jrnn.nets.ir import ExecutionStep, Net, Plan
from jrnn.nets.lowering import Freed, run_net, without_sources


class _Workspace(ChainMap[str, Any]):
    """Blobs by name, of this workspace and its parents; None for a blob that is not written yet."""

    def __setitem__(self, name: str, value: Any) -> None:
        owner = next(blobs for blobs in self.maps if name in blobs)
        owner[name] = value


def run_plan(
    plan: Plan,
    blobs: Mapping[str, Any] | None = None,
    *,
    key: Any = None,
    max_iterations: int | None = None,
    files: str | Path | None = None,
) -> dict[str, Any]:
    """Runs a plan as Caffe2 does, one net at a time.

    Concurrent substeps run in order. A report net, and a substep that runs every so many milliseconds, run once, when their
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
    run = _Execution(plan, given, key, max_iterations, files)
    written: dict[str, Any] = dict.fromkeys(
        n for s in plan.steps if not s.create_workspace for n in run.written(s)
    )
    top = _Workspace(written | given)
    for step in plan.steps:
        run.step(step, top)
    return {
        name: value
        for name, value in top.items()
        if value is not None and not isinstance(value, Freed)
    }


class _Execution:
    def __init__(
        self, plan: Plan, given: Mapping[str, Any], key: Any, max_iterations: int | None, files: Any
    ):
        self.files = files
        self.nets = {
            name: without_sources(net, given) for name, net in _checked(plan, given).items()
        }
        self.reads = {name: reads(net) for name, net in self.nets.items()}
        self.key = key
        self.max_iterations = max_iterations
        self.nets_run = 0

    def written(self, step: ExecutionStep) -> Iterator[str]:
        """Yields the blobs that a step makes in its workspace; a substep may have one of its own."""
        for name in (*step.networks, *([step.report_net] if step.report_net else ())):
            yield from (o for op in self.nets[name].ops for o in op.outputs)
        for substep in step.substeps:
            yield from () if substep.create_workspace else self.written(substep)

    def step(self, step: ExecutionStep, ws: _Workspace) -> None:
        if step.create_workspace:
            ws = ws.new_child(dict.fromkeys(n for n in self.written(step) if n not in ws))
        for rounds in count():
            if step.num_iter is not None and rounds >= step.num_iter:
                break
            if step.num_iter is None and rounds and (not step.should_stop_blob or step.only_once):
                break
            if self.max_iterations is not None and rounds >= self.max_iterations:
                waits = (
                    f"; its stop blob {step.should_stop_blob!r} is still False"
                    if step.should_stop_blob
                    else ""
                )
                raise PlanError(
                    f"step {step.name!r}: runs on after {rounds} rounds{waits}; raise max_iterations"
                )
            if self.round(step, ws):
                break
        for substep in step.substeps:
            if substep.run_every_ms:
                self.step(substep, ws)
        if step.report_net:
            self.net(step.report_net, step, ws)

    def round(self, step: ExecutionStep, ws: _Workspace) -> bool:
        """Runs everything in a step once; returns whether its stop blob ended it."""
        for name in step.networks:
            self.net(name, step, ws)
            if _stops(step, ws):
                return True
        at_once = step.side_by_side
        copies = max(step.num_concurrent_instances or 1, 1)
        for substep in [s for s in step.substeps if not s.run_every_ms] * copies:
            self.step(substep, ws)
            if not at_once and _stops(step, ws):
                return True
        return at_once and _stops(step, ws)

    def net(self, name: str, step: ExecutionStep, ws: _Workspace) -> None:
        self.nets_run += 1
        key = None if self.key is None else jax.random.fold_in(self.key, self.nets_run)
        env = {n: value for n in self.reads[name] if (value := ws.get(n)) is not None}
        try:
            written = run_net(
                self.nets[name],
                env,
                key=key,
                max_iterations=self.max_iterations,
                files=self.files,
                fed=(),
            )
        except JrnnError as e:
            raise e.at(f"step {step.name!r}") from e.__cause__
        for blob in (o for op in self.nets[name].ops for o in op.outputs):
            ws[blob] = written.get(blob, Freed(f"net {name!r}"))


def _stops(step: ExecutionStep, ws: _Workspace) -> bool:
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


def _checked(plan: Plan, given: Mapping[str, Any]) -> dict[str, Net]:
    """Returns the nets by name; raises PlanError for a plan that cannot run with any values."""
    nets: dict[str, Net] = {}
    for net in plan.networks:
        if net.name in nets:
            raise PlanError(f"plan {plan.name!r}: two nets are named {net.name!r}; rename one")
        nets[net.name] = net
    known = {*given, *(o for net in plan.networks for op in net.ops for o in op.outputs)}
    for step in plan.steps:
        _check_step(step, nets, known)
    return nets


def _check_step(step: ExecutionStep, nets: Mapping[str, Net], known: set[str]) -> None:
    where = f"step {step.name!r}"
    for name in (*step.networks, *([step.report_net] if step.report_net else ())):
        if name not in nets:
            raise PlanError(f"{where}: runs net {name!r}, which the plan lacks{near(name, nets)}")
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
    elif not step.networks and all(s.run_every_ms for s in step.substeps) and not step.only_once:
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
    order = tuple(
        dict.fromkeys(n for step in plan.steps for n in step.network_names() if n in nets)
    )
    if name is None:
        used = [n for n in nets if nets[n].ops]
        if len(used) != 1:
            names = ", ".join(used)
            raise PlanError(
                f"plan {plan.name!r} has {len(used)} nets: {names}; choose one with --network NAME"
            )
        name = used[0]
    if name not in nets:
        raise PlanError(
            f"plan {plan.name!r} has no net {name!r}{near(name, nets)}; it has {', '.join(nets)}"
        )
    before = order[: order.index(name)] if name in order else ()
    return nets[name], tuple(nets[n] for n in before)


def show_steps(plan: Plan) -> str:
    """Lists the steps of a plan, one line each; substeps are indented.

    >>> print(show_steps(Plan("p", (Net("train"),), (ExecutionStep("loop", networks=("train",), num_iter=9),))))
    plan p
      step loop num_iter=9: train
    """
    lines = [f"plan {plan.name}".rstrip()]

    def add(step: ExecutionStep, depth: int) -> None:
        fields = [
            "num_iter",
            "should_stop_blob",
            "only_once",
            "concurrent_substeps",
            "num_concurrent_instances",
        ]
        fields += ["create_workspace", "run_every_ms", "report_net", "report_interval"]
        shown = "".join(f" {f}={v}" for f in fields if (v := getattr(step, f)) is not None)
        nets = f": {', '.join(step.networks)}" if step.networks else ""
        lines.append(f"{'  ' * depth}step {step.name}{shown}{nets}")
        for substep in step.substeps:
            add(substep, depth + 1)

    for step in plan.steps:
        add(step, 1)
    return "\n".join(map(printable, lines))
