"""The nets of a plan, and its steps as text."""

from __future__ import annotations

from jrnn.errors import PlanError, near, printable
from jrnn.nets.execution_step import ExecutionStep, Plan
from jrnn.nets.ir import Net


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
    order = tuple(dict.fromkeys(n for step in plan.steps for n in step.network_names() if n in nets))
    if name is None:
        used = [n for n in nets if nets[n].ops]
        if len(used) != 1:
            names = ", ".join(used)
            raise PlanError(f"plan {plan.name!r} has {len(used)} nets: {names}; choose one with --network NAME")
        name = used[0]
    if name not in nets:
        raise PlanError(f"plan {plan.name!r} has no net {name!r}{near(name, nets)}; it has {', '.join(nets)}")
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
        fields = ["num_iter", "should_stop_blob", "only_once", "concurrent_substeps", "num_concurrent_instances"]
        fields += ["create_workspace", "run_every_ms", "report_net", "report_interval"]
        shown = "".join(f" {f}={v}" for f in fields if (v := getattr(step, f)) is not None)
        nets = f": {', '.join(step.networks)}" if step.networks else ""
        lines.append(f"{'  ' * depth}step {step.name}{shown}{nets}")
        for substep in step.substeps:
            add(substep, depth + 1)

    for step in plan.steps:
        add(step, 1)
    return "\n".join(map(printable, lines))
