"""How a loop is run: a plan, whose `node` is a tree.

`nodes.py` has the nodes, which run, estimate and describe themselves, and nest. `plan.py` has the plan of a loop, and prints
it from the descriptions (`description.py`).
"""

from jrnn.loops.plans.description import Description, Item
from jrnn.loops.plans.nodes import (
    Arithmetic,
    Converted,
    InChunks,
    Kernel,
    Node,
    OneCall,
    Solved,
    Split,
    Steps,
    at_leaf,
    by_steps,
)
from jrnn.loops.plans.plan import NOTHING, LoopPlan, Target

__all__ = [
    "NOTHING",
    "Arithmetic",
    "Converted",
    "Description",
    "InChunks",
    "Item",
    "Kernel",
    "LoopPlan",
    "Node",
    "OneCall",
    "Solved",
    "Split",
    "Steps",
    "Target",
    "at_leaf",
    "by_steps",
]
