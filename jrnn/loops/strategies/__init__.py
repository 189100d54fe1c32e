"""How a loop is run: a plan, whose `node` is a tree.

`platforms.py` has what each platform may do. `nodes.py` has the nodes, which run, estimate and describe themselves.
`plan.py` has the plan of a loop, and prints it from their descriptions (`ir/description.py`).
"""

from jrnn.loops.ir.description import Description as Description
from jrnn.loops.ir.description import Item as Item
from jrnn.loops.strategies.arithmetic import Arithmetic as Arithmetic
from jrnn.loops.strategies.nodes import Conversion as Conversion
from jrnn.loops.strategies.nodes import Converted as Converted
from jrnn.loops.strategies.nodes import InChunks as InChunks
from jrnn.loops.strategies.nodes import Node as Node
from jrnn.loops.strategies.nodes import Solved as Solved
from jrnn.loops.strategies.nodes import Split as Split
from jrnn.loops.strategies.nodes import Steps as Steps
from jrnn.loops.strategies.nodes import at_leaf as at_leaf
from jrnn.loops.strategies.nodes import by_steps as by_steps
from jrnn.loops.strategies.nodes import converted as converted
from jrnn.loops.strategies.plan import NOTHING as NOTHING
from jrnn.loops.strategies.plan import LoopPlan as LoopPlan
from jrnn.loops.strategies.plan import Target as Target
