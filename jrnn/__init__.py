"""jrnn: a JAX-compiled functional engine for recurrent networks, wire-compatible with Caffe2's.

The names here are the public ones; see the README for a first run. `jrnn.nn`, `jrnn.interop`, `jrnn.train` and `jrnn.bench`
need flax or other libraries that take time to load, and are imported by name.
"""

import importlib
from typing import Any

from jrnn import cells, graph, ops, plans
from jrnn.autodiff import add_gradients
from jrnn.builder import NetBuilder
from jrnn.convert import Package, Predictor, export_package, from_jax, load_package
from jrnn.executor import explain_scan, optimize_scans, scan
from jrnn.gradcheck import check_gradients
from jrnn.gradient_maker import GradientSlice
from jrnn.ir import Net, Op
from jrnn.lowering import infer_shapes, run_net, to_jax
from jrnn.proto import read_net, serialize_net, write_net
from jrnn.recurrent import recurrent_net, unrolled_net
from jrnn.step_blobs import retrieve_step_blobs
from jrnn.version import __version__

_LAZY = {
    "from_onnx": "jrnn.onnx",
    "to_onnx": "jrnn.onnx",
}  # what needs an optional extra is imported when it is asked for


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'jrnn' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"jrnn.{name} needs the extra 'onnx': pip install 'jrnn[onnx]'") from error


__all__ = [
    "GradientSlice",
    "Net",
    "NetBuilder",
    "Op",
    "Package",
    "Predictor",
    "__version__",
    "add_gradients",
    "cells",
    "check_gradients",
    "explain_scan",
    "export_package",
    "from_jax",
    "from_onnx",
    "graph",
    "infer_shapes",
    "load_package",
    "ops",
    "optimize_scans",
    "plans",
    "read_net",
    "recurrent_net",
    "retrieve_step_blobs",
    "run_net",
    "scan",
    "serialize_net",
    "to_jax",
    "to_onnx",
    "unrolled_net",
    "write_net",
]
