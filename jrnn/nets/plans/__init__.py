"""Plans: nets that the host runs in loops and branches, like Caffe2's execution steps."""

from jrnn.nets.execution_step import ExecutionStep, Plan
from jrnn.nets.plans.build import (
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
    net_of_plan,
    show_steps,
)
from jrnn.nets.plans.run import run_plan
from jrnn.nets.proto import read_plan, write_plan

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
