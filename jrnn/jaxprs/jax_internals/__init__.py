"""What jrnn knows of JAX beyond its stable interface: names that move, the shapes of internals, and differences of versions.

In: equations, jaxprs, and rules for loops. Out: what this version of JAX knows or does. Read `tracing.py` first.

`jax.core`, `jax.extend`, `jax.experimental`, `jax.interpreters` and `jax._src` may change with every release of JAX. Then
this is the folder to edit: no other one imports from them or compares versions. `tracing` has what concerns jaxprs and
traces, `lowering` has rules and lowered programs. `missing` has the private names that the installed JAX lacks;
`loops/install.py` warns about them. tests/loops/test_jax_names.py checks what jrnn expects.
"""

from jax.core import ShapedArray as ShapedArray
from jax.experimental import topologies as topologies
from jax.experimental.multihost_utils import broadcast_one_to_all as broadcast_one_to_all
from jax.experimental.multihost_utils import process_allgather as process_allgather
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.extend.core.primitives import scan_p as scan_p
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir

from jrnn.jaxprs.jax_internals.lowering import LINEARIZATION_PARTS as LINEARIZATION_PARTS
from jrnn.jaxprs.jax_internals.lowering import XLA_KEEPS_BARRIERS as XLA_KEEPS_BARRIERS
from jrnn.jaxprs.jax_internals.lowering import XLA_MAKES_ONE_KERNEL as XLA_MAKES_ONE_KERNEL
from jrnn.jaxprs.jax_internals.lowering import LoopRules as LoopRules
from jrnn.jaxprs.jax_internals.lowering import fix_rules as fix_rules
from jrnn.jaxprs.jax_internals.lowering import is_threefry_loop as is_threefry_loop
from jrnn.jaxprs.jax_internals.lowering import loop_rules as loop_rules
from jrnn.jaxprs.jax_internals.lowering import lower_or_undo as lower_or_undo
from jrnn.jaxprs.jax_internals.lowering import lowered_for as lowered_for
from jrnn.jaxprs.jax_internals.lowering import lowered_metadata as lowered_metadata
from jrnn.jaxprs.jax_internals.lowering import (
    omit_metadata_when_lowering as omit_metadata_when_lowering,
)
from jrnn.jaxprs.jax_internals.lowering import platform_of as platform_of
from jrnn.jaxprs.jax_internals.lowering import replace_rules as replace_rules
from jrnn.jaxprs.jax_internals.lowering import set_check_rule as set_check_rule
from jrnn.jaxprs.jax_internals.tracing import THREEFRY as THREEFRY
from jrnn.jaxprs.jax_internals.tracing import ClosedJaxpr as ClosedJaxpr
from jrnn.jaxprs.jax_internals.tracing import Jaxpr as Jaxpr
from jrnn.jaxprs.jax_internals.tracing import JaxprEqn as JaxprEqn
from jrnn.jaxprs.jax_internals.tracing import Params as Params
from jrnn.jaxprs.jax_internals.tracing import SourceInfo as SourceInfo
from jrnn.jaxprs.jax_internals.tracing import Var as Var
from jrnn.jaxprs.jax_internals.tracing import api_boundary as api_boundary
from jrnn.jaxprs.jax_internals.tracing import are_arrays as are_arrays
from jrnn.jaxprs.jax_internals.tracing import argument_names as argument_names
from jrnn.jaxprs.jax_internals.tracing import bind_scan as bind_scan
from jrnn.jaxprs.jax_internals.tracing import cached as cached
from jrnn.jaxprs.jax_internals.tracing import calling as calling
from jrnn.jaxprs.jax_internals.tracing import can_change_metadata as can_change_metadata
from jrnn.jaxprs.jax_internals.tracing import closed_jaxpr as closed_jaxpr
from jrnn.jaxprs.jax_internals.tracing import context_of as context_of
from jrnn.jaxprs.jax_internals.tracing import current_lines as current_lines
from jrnn.jaxprs.jax_internals.tracing import current_metadata as current_metadata
from jrnn.jaxprs.jax_internals.tracing import expanded as expanded
from jrnn.jaxprs.jax_internals.tracing import function_name as function_name
from jrnn.jaxprs.jax_internals.tracing import global_metadata as global_metadata
from jrnn.jaxprs.jax_internals.tracing import has_own_shardings as has_own_shardings
from jrnn.jaxprs.jax_internals.tracing import hide_lines_of as hide_lines_of
from jrnn.jaxprs.jax_internals.tracing import in_context as in_context
from jrnn.jaxprs.jax_internals.tracing import in_scope as in_scope
from jrnn.jaxprs.jax_internals.tracing import is_recomputed as is_recomputed
from jrnn.jaxprs.jax_internals.tracing import is_staged as is_staged
from jrnn.jaxprs.jax_internals.tracing import is_traced as is_traced
from jrnn.jaxprs.jax_internals.tracing import is_untested as is_untested
from jrnn.jaxprs.jax_internals.tracing import mesh_axes_type as mesh_axes_type
from jrnn.jaxprs.jax_internals.tracing import metadata_of as metadata_of
from jrnn.jaxprs.jax_internals.tracing import missing as missing
from jrnn.jaxprs.jax_internals.tracing import named_axis as named_axis
from jrnn.jaxprs.jax_internals.tracing import scan_counts as scan_counts
from jrnn.jaxprs.jax_internals.tracing import scopes as scopes
from jrnn.jaxprs.jax_internals.tracing import set_global_metadata as set_global_metadata
from jrnn.jaxprs.jax_internals.tracing import set_thread_metadata as set_thread_metadata
from jrnn.jaxprs.jax_internals.tracing import set_xla_metadata as set_xla_metadata
from jrnn.jaxprs.jax_internals.tracing import source_line as source_line
from jrnn.jaxprs.jax_internals.tracing import swap_thread_metadata as swap_thread_metadata
from jrnn.jaxprs.jax_internals.tracing import thread_metadata as thread_metadata
from jrnn.jaxprs.jax_internals.tracing import trace_context as trace_context
from jrnn.jaxprs.jax_internals.tracing import traced as traced
from jrnn.jaxprs.jax_internals.tracing import tracing_options as tracing_options
from jrnn.jaxprs.jax_internals.tracing import updated_metadata as updated_metadata
from jrnn.jaxprs.jax_internals.tracing import varying_axes as varying_axes
from jrnn.jaxprs.jax_internals.tracing import within as within
from jrnn.jaxprs.jax_internals.tracing import without_bits as without_bits
from jrnn.jaxprs.jax_internals.tracing import without_outer_scope as without_outer_scope
from jrnn.jaxprs.jax_internals.tracing import without_remat3 as without_remat3
