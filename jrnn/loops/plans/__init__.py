"""How a loop is run: a plan, whose `node` is a tree.

`nodes.py` has the nodes, which run, estimate and describe themselves, and nest. `plan.py` has the plan of a loop, and prints
it from their descriptions (`loop/description.py`).
"""

from jrnn.loops.loop.description import Description as Description
from jrnn.loops.loop.description import Item as Item
from jrnn.loops.plans.arithmetic import Arithmetic as Arithmetic
from jrnn.loops.plans.nodes import Conversion as Conversion
from jrnn.loops.plans.nodes import Converted as Converted
from jrnn.loops.plans.nodes import InChunks as InChunks
from jrnn.loops.plans.nodes import Node as Node
from jrnn.loops.plans.nodes import Solved as Solved
from jrnn.loops.plans.nodes import Split as Split
from jrnn.loops.plans.nodes import Steps as Steps
from jrnn.loops.plans.nodes import at_leaf as at_leaf
from jrnn.loops.plans.nodes import by_steps as by_steps
from jrnn.loops.plans.nodes import converted as converted
from jrnn.loops.plans.plan import NOTHING as NOTHING
from jrnn.loops.plans.plan import LoopPlan as LoopPlan
from jrnn.loops.plans.plan import Target as Target
