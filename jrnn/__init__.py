"""jrnn: recurrent networks on JAX, and nets in Caffe2's wire format.

`import jrnn` is enough to use every public name and sub-module. Each loads when it is first used: `import jrnn` itself
loads nothing, not even JAX.

>>> import jrnn
>>> jrnn.scan.__module__, jrnn.nn.LSTM.__name__
('jrnn.executor.scan', 'LSTM')
"""

import importlib
from typing import TYPE_CHECKING, Any

from jrnn.version import __version__

if TYPE_CHECKING:  # what _HOMES says, for type checkers
    from jrnn import cells, errors, executor, graph, interop, nn, onnx, ops, plans, testing, train
    from jrnn.autodiff import add_gradients
    from jrnn.builder import NetBuilder
    from jrnn.convert import Package, Predictor, export_package, load_package, write_predictor, write_python
    from jrnn.convert.from_jax import from_jax
    from jrnn.errors import GradientWarning, JrnnError
    from jrnn.executor import Trips, explain_scan, optimize_scans, scan
    from jrnn.gradcheck import GradientReport, check_gradients
    from jrnn.gradient_maker import GradientSlice
    from jrnn.ir import Net, Op
    from jrnn.lowering import infer_shapes, run_net, to_jax
    from jrnn.onnx import OnnxModel, from_onnx, to_onnx
    from jrnn.proto import format_net, read_net, serialize_net, write_net
    from jrnn.recurrent import recurrent_net, retrieve_step_blobs, unrolled_net

_HOMES = {
    "GradientReport": "jrnn.gradcheck",
    "GradientSlice": "jrnn.gradient_maker",
    "GradientWarning": "jrnn.errors",
    "JrnnError": "jrnn.errors",
    "Net": "jrnn.ir",
    "NetBuilder": "jrnn.builder",
    "OnnxModel": "jrnn.onnx",
    "Op": "jrnn.ir",
    "Package": "jrnn.convert",
    "Predictor": "jrnn.convert",
    "Trips": "jrnn.executor",
    "add_gradients": "jrnn.autodiff",
    "check_gradients": "jrnn.gradcheck",
    "explain_scan": "jrnn.executor",
    "export_package": "jrnn.convert",
    "format_net": "jrnn.proto",
    "from_jax": "jrnn.convert.from_jax",
    "from_onnx": "jrnn.onnx",
    "infer_shapes": "jrnn.lowering",
    "load_package": "jrnn.convert",
    "optimize_scans": "jrnn.executor",
    "read_net": "jrnn.proto",
    "recurrent_net": "jrnn.recurrent",
    "retrieve_step_blobs": "jrnn.recurrent",
    "run_net": "jrnn.lowering",
    "scan": "jrnn.executor",
    "serialize_net": "jrnn.proto",
    "to_jax": "jrnn.lowering",
    "to_onnx": "jrnn.onnx",
    "unrolled_net": "jrnn.recurrent",
    "write_net": "jrnn.proto",
    "write_predictor": "jrnn.convert",
    "write_python": "jrnn.convert",
}
_MODULES = ("cells", "errors", "executor", "graph", "interop", "nn", "onnx", "ops", "plans", "testing", "train")


def __getattr__(name: str) -> Any:
    home = f"jrnn.{name}" if name in _MODULES else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'jrnn' has no attribute {name!r}")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if home != "jrnn.onnx":
            raise
        raise ImportError(f"jrnn.{name} needs the extra 'onnx': pip install 'jrnn[onnx]'") from error
    if name in _MODULES:
        return module
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "GradientReport",
    "GradientSlice",
    "GradientWarning",
    "JrnnError",
    "Net",
    "NetBuilder",
    "OnnxModel",
    "Op",
    "Package",
    "Predictor",
    "Trips",
    "__version__",
    "add_gradients",
    "cells",
    "check_gradients",
    "errors",
    "executor",
    "explain_scan",
    "export_package",
    "format_net",
    "from_jax",
    "from_onnx",
    "graph",
    "infer_shapes",
    "interop",
    "load_package",
    "nn",
    "onnx",
    "ops",
    "optimize_scans",
    "plans",
    "read_net",
    "recurrent_net",
    "retrieve_step_blobs",
    "run_net",
    "scan",
    "serialize_net",
    "testing",
    "to_jax",
    "to_onnx",
    "train",
    "unrolled_net",
    "write_net",
    "write_predictor",
    "write_python",
]
