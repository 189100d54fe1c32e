"""Utilities over nets: each takes a Net and returns a new Net, or facts about it. None runs an operator.

In: a `Net`. Out: a new `Net`, facts, or a picture. Read `passes.py` first.

For shapes and types of blobs, which need operators, see `jrnn.nets.infer_shapes`.
"""

import types

from jrnn.nets.graph.device_copies import assign_device_option as assign_device_option
from jrnn.nets.graph.device_copies import (
    fuse_copy_between_cpu_and_gpu as fuse_copy_between_cpu_and_gpu,
)
from jrnn.nets.graph.device_copies import get_params_from_init_net as get_params_from_init_net
from jrnn.nets.graph.device_copies import infer_device_type as infer_device_type
from jrnn.nets.graph.device_copies import infer_output_devices as infer_output_devices
from jrnn.nets.graph.device_copies import infer_status as infer_status
from jrnn.nets.graph.history import upgrade as upgrade
from jrnn.nets.graph.passes import MemoryReport as MemoryReport
from jrnn.nets.graph.passes import append_net as append_net
from jrnn.nets.graph.passes import identify_reshape_sub_graph as identify_reshape_sub_graph
from jrnn.nets.graph.passes import optimize_memory as optimize_memory
from jrnn.nets.graph.passes import remove_dead_end_ops as remove_dead_end_ops
from jrnn.nets.graph.passes import remove_reshape_for_fc as remove_reshape_for_fc
from jrnn.nets.graph.passes import verify_graph_equality as verify_graph_equality
from jrnn.nets.graph.rename import clone_and_bind as clone_and_bind
from jrnn.nets.graph.rename import number_init_net as number_init_net
from jrnn.nets.graph.rename import rename_blobs as rename_blobs
from jrnn.nets.graph.rename import rename_op_input as rename_op_input
from jrnn.nets.graph.rename import rename_op_output as rename_op_output
from jrnn.nets.graph.rename import ssa_rewrite as ssa_rewrite
from jrnn.nets.graph.scope import free_names as free_names
from jrnn.nets.graph.show import show as show
from jrnn.nets.graph.show import to_dot as to_dot
from jrnn.nets.graph.ssa import extract_sub_net as extract_sub_net
from jrnn.nets.graph.ssa import get_consumer_map as get_consumer_map
from jrnn.nets.graph.ssa import get_external_blob_names as get_external_blob_names
from jrnn.nets.graph.ssa import get_op_ids_in_path as get_op_ids_in_path
from jrnn.nets.graph.ssa import get_output_producers as get_output_producers
from jrnn.nets.graph.ssa import get_producer_map as get_producer_map
from jrnn.nets.graph.ssa import get_ssa as get_ssa
from jrnn.nets.graph.ssa import (
    get_sub_graph_external_input_output as get_sub_graph_external_input_output,
)
from jrnn.nets.graph.ssa import get_undefined_blobs as get_undefined_blobs
from jrnn.nets.graph.ssa import live_ops as live_ops
from jrnn.nets.graph.ssa import undeclared_reads as undeclared_reads
from jrnn.nets.graph.svg import to_svg as to_svg

__all__ = sorted(
    n for n, v in globals().items() if not n.startswith("_") and not isinstance(v, types.ModuleType)
)
