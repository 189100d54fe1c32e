"""Strategies: how a loop may be run, what each proposes, and which one runs.

In: an equation of JAX's scan (`ScanParams`), the target and the caller's options. Out: a `LoopPlan`, whose node runs the
loop. Read `table.py` first.

`table.py` has a row for each strategy. `problem.py` is what a strategy reads, `nodes.py` has what it
proposes, `chooser.py` compares the candidates of all strategies and `candidates.py` says which one is cheapest.
"""

from jrnn.loops.ir.description import Description as Description
from jrnn.loops.ir.description import Item as Item
from jrnn.loops.strategies.candidates import Candidate as Candidate
from jrnn.loops.strategies.nodes import AssociativeSolve as AssociativeSolve
from jrnn.loops.strategies.nodes import Conversion as Conversion
from jrnn.loops.strategies.nodes import Converted as Converted
from jrnn.loops.strategies.nodes import Node as Node
from jrnn.loops.strategies.nodes import Split as Split
from jrnn.loops.strategies.nodes import SplitInChunks as SplitInChunks
from jrnn.loops.strategies.nodes import Steps as Steps
from jrnn.loops.strategies.nodes import converted as converted
from jrnn.loops.strategies.nodes import map_leaf as map_leaf
from jrnn.loops.strategies.nodes import steps_with_wide_sums as steps_with_wide_sums
from jrnn.loops.strategies.plan import NOTHING_TO_GAIN as NOTHING_TO_GAIN
from jrnn.loops.strategies.plan import LoopPlan as LoopPlan
from jrnn.loops.strategies.plan import Target as Target
from jrnn.loops.strategies.problem import Problem as Problem
from jrnn.loops.strategies.strategy import Strategy as Strategy
