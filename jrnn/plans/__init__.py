"""Plans: nets run in loops and branches by the host, as Caffe2's execution steps are."""

from jrnn.execution_step import ExecutionStep, Plan
from jrnn.plans.build import (
    Do,
    DoParallel,
    DoUntil,
    DoWhile,
    For,
    If,
    IfNot,
    Part,
    Switch,
    SwitchNot,
    Until,
    While,
    execution_step,
    make_plan,
)
from jrnn.plans.run import run_plan
from jrnn.plans.select import net_of_plan, show_steps, upgraded
from jrnn.proto import read_plan, write_plan

__all__ = [
    "Do",
    "DoParallel",
    "DoUntil",
    "DoWhile",
    "ExecutionStep",
    "For",
    "If",
    "IfNot",
    "Part",
    "Plan",
    "Switch",
    "SwitchNot",
    "Until",
    "While",
    "execution_step",
    "make_plan",
    "read_plan",
    "run_plan",
    "write_plan",
]
