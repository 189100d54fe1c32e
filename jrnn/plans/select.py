"""One net of a plan, and what its plan runs before it."""

from __future__ import annotations

from collections.abc import Callable

from jrnn.errors import PlanError, near
from jrnn.execution_step import ExecutionStep, Plan
from jrnn.ir import Net


def net_of_plan(plan: Plan, name: str | None = None) -> tuple[Net, tuple[Net, ...]]:
    """A net of a plan, and the nets that the plan's steps run before it, each once: they make its parameters.

    Args:
        plan: the plan.
        name: the net's name; by default the plan must have one net with operators that is not run before another.

    Raises:
        PlanError: for a name that the plan lacks, and where none is given and there are several.

    >>> from jrnn.plans import execution_step, make_plan
    >>> plan = make_plan("p", Net("init"), execution_step("loop", Net("train"), num_iter=9))
    >>> net, before = net_of_plan(plan, "train")
    >>> net.name, [n.name for n in before]
    ('train', ['init'])
    """
    nets = {net.name: net for net in plan.networks}
    order = tuple(dict.fromkeys(n for step in plan.steps for n in step.network_names() if n in nets))
    if name is None:
        used = [n for n in nets if nets[n].ops]
        if len(used) != 1:
            raise PlanError(
                f"plan {plan.name!r} has {len(used)} nets: {', '.join(used)}; say which, with --network NAME"
            )
        name = used[0]
    if name not in nets:
        raise PlanError(f"plan {plan.name!r} has no net {name!r}{near(name, nets)}; it has {', '.join(nets)}")
    before = order[: order.index(name)] if name in order else ()
    return nets[name], tuple(nets[n] for n in before)


def upgraded(plan: Plan, upgrade: Callable[[Net], Net]) -> Plan:
    """The plan with each of its nets changed."""
    return Plan(plan.name, tuple(map(upgrade, plan.networks)), plan.steps)


def show_steps(plan: Plan) -> str:
    """The steps of a plan, one line each, those within another indented.

    >>> from jrnn.plans import execution_step, make_plan
    >>> print(show_steps(make_plan("p", execution_step("loop", Net("train"), num_iter=9))))
    plan p
      step loop num_iter=9: train
    """
    lines = [f"plan {plan.name}".rstrip()]

    def add(step: ExecutionStep, depth: int) -> None:
        fields = ["num_iter", "should_stop_blob", "only_once", "concurrent_substeps", "num_concurrent_instances"]
        fields += ["create_workspace", "run_every_ms", "report_net", "report_interval"]
        told = "".join(f" {f}={v}" for f in fields if (v := getattr(step, f)) is not None)
        nets = f": {', '.join(step.networks)}" if step.networks else ""
        lines.append(f"{'  ' * depth}step {step.name}{told}{nets}")
        for substep in step.substeps:
            add(substep, depth + 1)

    for step in plan.steps:
        add(step, 1)
    return "\n".join(lines)
