"""Jaxprs: reading, evaluating and retracing the programs that JAX traces. Of jrnn it imports the errors alone.

In: functions of JAX, and jaxprs. Out: programs, facts about equations, and values. Read `programs.py` first.

`programs` traces, opens and evaluates, `queries` asks what equations read and make, and groups carries, `over_time`
evaluates for all steps, and `tangents` separates tangents from values. `primitives` is the table of what is known about each
primitive. `axes` and `ranges` follow axes and bounds through equations, `resized` makes arrays smaller, and `by_numpy`
evaluates without a compiler. `arguments` traces a user's function, `real_parts` makes complex numbers pairs of real ones,
`flat` has programs as lists of nodes, and `trials` runs them on numbers. `unit_formulas` has the formulas of LSTM and GRU,
which layers, operators and converters share. `jax_internals` has the names of JAX
that move between releases.
"""

from jrnn.jaxprs.over_time import over_time as over_time
from jrnn.jaxprs.over_time import product as product
from jrnn.jaxprs.over_time import shifted as shifted
from jrnn.jaxprs.over_time import stack as stack
from jrnn.jaxprs.over_time import stacks as stacks
from jrnn.jaxprs.programs import CALLS as CALLS
from jrnn.jaxprs.programs import CALLS_AND_CHECKPOINTS as CALLS_AND_CHECKPOINTS
from jrnn.jaxprs.programs import CHECKPOINTS as CHECKPOINTS
from jrnn.jaxprs.programs import LOWERED_CALLS as LOWERED_CALLS
from jrnn.jaxprs.programs import TAG as TAG
from jrnn.jaxprs.programs import Atom as Atom
from jrnn.jaxprs.programs import Env as Env
from jrnn.jaxprs.programs import Eqn as Eqn
from jrnn.jaxprs.programs import Names as Names
from jrnn.jaxprs.programs import Program as Program
from jrnn.jaxprs.programs import Rule as Rule
from jrnn.jaxprs.programs import Value as Value
from jrnn.jaxprs.programs import Values as Values
from jrnn.jaxprs.programs import Var as Var
from jrnn.jaxprs.programs import bind as bind
from jrnn.jaxprs.programs import called as called
from jrnn.jaxprs.programs import evaluate as evaluate
from jrnn.jaxprs.programs import in_scope as in_scope
from jrnn.jaxprs.programs import inlined as inlined
from jrnn.jaxprs.programs import interpreted as interpreted
from jrnn.jaxprs.programs import is_in as is_in
from jrnn.jaxprs.programs import is_literal as is_literal
from jrnn.jaxprs.programs import jaxpr_of as jaxpr_of
from jrnn.jaxprs.programs import named as named
from jrnn.jaxprs.programs import placed as placed
from jrnn.jaxprs.programs import read as read
from jrnn.jaxprs.programs import replaced as replaced
from jrnn.jaxprs.programs import shared_calls as shared_calls
from jrnn.jaxprs.programs import take as take
from jrnn.jaxprs.programs import trace as trace
from jrnn.jaxprs.programs import uncast as uncast
from jrnn.jaxprs.programs import value as value
from jrnn.jaxprs.programs import variables as variables
from jrnn.jaxprs.programs import with_operands as with_operands
from jrnn.jaxprs.programs import without_closure as without_closure
from jrnn.jaxprs.programs import zeros_of_shape as zeros_of_shape
from jrnn.jaxprs.queries import Leading as Leading
from jrnn.jaxprs.queries import all_equations as all_equations
from jrnn.jaxprs.queries import any_in as any_in
from jrnn.jaxprs.queries import carry_groups as carry_groups
from jrnn.jaxprs.queries import components as components
from jrnn.jaxprs.queries import depends as depends
from jrnn.jaxprs.queries import elements as elements
from jrnn.jaxprs.queries import extent as extent
from jrnn.jaxprs.queries import free_variables as free_variables
from jrnn.jaxprs.queries import inputs as inputs
from jrnn.jaxprs.queries import is_by_rows as is_by_rows
from jrnn.jaxprs.queries import is_known as is_known
from jrnn.jaxprs.queries import is_zero as is_zero
from jrnn.jaxprs.queries import made_by as made_by
from jrnn.jaxprs.queries import nbytes as nbytes
from jrnn.jaxprs.queries import needed as needed
from jrnn.jaxprs.queries import nested_equations as nested_equations
from jrnn.jaxprs.queries import nodes_of as nodes_of
from jrnn.jaxprs.queries import operations as operations
from jrnn.jaxprs.queries import other_axes as other_axes
from jrnn.jaxprs.queries import producers as producers
from jrnn.jaxprs.queries import promoted_type as promoted_type
from jrnn.jaxprs.queries import readers as readers
from jrnn.jaxprs.queries import results as results
from jrnn.jaxprs.queries import run_jaxprs as run_jaxprs
from jrnn.jaxprs.queries import scan_counts as scan_counts
from jrnn.jaxprs.queries import scan_parts as scan_parts
from jrnn.jaxprs.queries import sub_jaxprs as sub_jaxprs
from jrnn.jaxprs.queries import type_of as type_of
from jrnn.jaxprs.queries import uses as uses
from jrnn.jaxprs.queries import with_promotion as with_promotion
