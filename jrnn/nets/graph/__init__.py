"""Utilities over nets: each takes a Net and returns a new Net, or facts about it. None runs an operator.

In: a `Net`. Out: a new `Net`, facts, or a picture. Read `passes.py` first.

For shapes and types of blobs, which need operators, see `jrnn.nets.infer_shapes`.
"""

from jrnn.nets.graph.devices import (
    assign_device_option,
    fuse_copy_between_cpu_and_gpu,
    get_params_from_init_net,
    infer_device_type,
    infer_output_devices,
)
from jrnn.nets.graph.history import upgrade
from jrnn.nets.graph.passes import MemoryReport, append_net, optimize_memory, remove_dead_end_ops, verify_graph_equality
from jrnn.nets.graph.rename import (
    clone_and_bind,
    number_init_net,
    rename_blobs,
    rename_op_input,
    rename_op_output,
    ssa_rewrite,
)
from jrnn.nets.graph.reshape import identify_reshape_sub_graph, remove_reshape_for_fc
from jrnn.nets.graph.scope import free_names
from jrnn.nets.graph.show import show, to_dot
from jrnn.nets.graph.ssa import (
    extract_sub_net,
    get_consumer_map,
    get_external_blob_names,
    get_op_ids_in_path,
    get_output_producers,
    get_producer_map,
    get_ssa,
    get_sub_graph_external_input_output,
    get_undefined_blobs,
    live_ops,
    undeclared_reads,
)
from jrnn.nets.graph.status import infer_status
from jrnn.nets.graph.svg import to_svg

__all__ = [
    "MemoryReport",
    "append_net",
    "assign_device_option",
    "clone_and_bind",
    "extract_sub_net",
    "free_names",
    "fuse_copy_between_cpu_and_gpu",
    "get_consumer_map",
    "get_external_blob_names",
    "get_op_ids_in_path",
    "get_output_producers",
    "get_params_from_init_net",
    "get_producer_map",
    "get_ssa",
    "get_sub_graph_external_input_output",
    "get_undefined_blobs",
    "identify_reshape_sub_graph",
    "infer_device_type",
    "infer_output_devices",
    "infer_status",
    "live_ops",
    "number_init_net",
    "optimize_memory",
    "remove_dead_end_ops",
    "remove_reshape_for_fc",
    "rename_blobs",
    "rename_op_input",
    "rename_op_output",
    "show",
    "ssa_rewrite",
    "to_dot",
    "to_svg",
    "undeclared_reads",
    "upgrade",
    "verify_graph_equality",
]
