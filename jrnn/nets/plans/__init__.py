"""Caffe2's PlanDefs: nets that the host runs in steps. `run.py` runs a plan, or chooses a net of it.

In: a `Plan` and blobs. Out: a net of it, its text, or the blobs after it ran. Read `run.py` first.
"""

from jrnn.nets.ir import ExecutionStep, Plan
from jrnn.nets.plans.run import net_of_plan, run_plan, show_steps
from jrnn.nets.proto import read_plan, write_plan

__all__ = ["ExecutionStep", "Plan", "read_plan", "run_plan", "write_plan"]
