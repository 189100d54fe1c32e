"""jrnn: recurrent networks on JAX, and nets in Caffe2's wire format.

`import jrnn` is enough to use every public name and sub-module. Each loads when it is first used: `import jrnn` alone
does not even load JAX.

>>> import jrnn
>>> jrnn.scan.__module__, jrnn.nn.LSTM.__name__
('jrnn.loops.scan.scan', 'LSTM')
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from jrnn.version import __version__

if TYPE_CHECKING:  # the names of _HOMES and _MODULES for type checkers; `x as x` re-exports x
    from jrnn import corpus as corpus
    from jrnn import errors as errors
    from jrnn import interop as interop
    from jrnn import loops as executor
    from jrnn import loops as loops
    from jrnn import models as models
    from jrnn import nets as nets
    from jrnn import nn as nn
    from jrnn import onnx as onnx
    from jrnn import testing as testing
    from jrnn import train as train
    from jrnn.bench.own_step import bench_step as bench_step
    from jrnn.convert import Package as Package
    from jrnn.convert import Predictor as Predictor
    from jrnn.convert import export_package as export_package
    from jrnn.convert import load_package as load_package
    from jrnn.convert import write_predictor as write_predictor
    from jrnn.convert import write_python as write_python
    from jrnn.convert.from_jax import from_jax as from_jax
    from jrnn.errors import GradientWarning as GradientWarning
    from jrnn.errors import JrnnError as JrnnError
    from jrnn.loops import Newton as Newton
    from jrnn.loops import ScanStatistics as ScanStatistics
    from jrnn.loops import Trips as Trips
    from jrnn.loops import explain as explain
    from jrnn.loops import online_gradient as online_gradient
    from jrnn.loops import optimize_scans as optimize_scans
    from jrnn.loops import plain_scans as plain_scans
    from jrnn.loops import scan as scan
    from jrnn.loops import scan_statistics as scan_statistics
    from jrnn.loops import while_loop as while_loop
    from jrnn.nets import cells as cells
    from jrnn.nets import graph as graph
    from jrnn.nets import ops as ops
    from jrnn.nets import plans as plans
    from jrnn.nets.autodiff import add_gradients as add_gradients
    from jrnn.nets.builder import NetBuilder as NetBuilder
    from jrnn.nets.gradient_maker import GradientSlice as GradientSlice
    from jrnn.nets.ir import Net as Net
    from jrnn.nets.ir import Op as Op
    from jrnn.nets.lowering import infer_shapes as infer_shapes
    from jrnn.nets.lowering import run_net as run_net
    from jrnn.nets.lowering import to_jax as to_jax
    from jrnn.nets.proto import format_net as format_net
    from jrnn.nets.proto import read_net as read_net
    from jrnn.nets.proto import serialize_net as serialize_net
    from jrnn.nets.proto import write_net as write_net
    from jrnn.nets.recurrent import recurrent_net as recurrent_net
    from jrnn.nets.recurrent import retrieve_step_blobs as retrieve_step_blobs
    from jrnn.nets.recurrent import unrolled_net as unrolled_net
    from jrnn.onnx import OnnxModel as OnnxModel
    from jrnn.onnx import from_onnx as from_onnx
    from jrnn.onnx import to_onnx as to_onnx
    from jrnn.testing.gradients import GradientReport as GradientReport
    from jrnn.testing.gradients import check_gradients as check_gradients
    from jrnn.train import load_run as load_run

_HOMES = {  # name -> module, for the names that load lazily
    name: f"jrnn.{module}"
    for module, names in {
        "nets.autodiff": ["add_gradients"],
        "bench.own_step": ["bench_step"],
        "nets.builder": ["NetBuilder"],
        "convert": ["Package", "Predictor", "export_package", "load_package", "write_predictor", "write_python"],
        "convert.from_jax": ["from_jax"],
        "errors": ["GradientWarning", "JrnnError"],
        "loops": [
            "Newton",
            "ScanStatistics",
            "Trips",
            "explain",
            "online_gradient",
            "optimize_scans",
            "plain_scans",
            "scan",
            "scan_statistics",
            "while_loop",
        ],
        "testing.gradients": ["GradientReport", "check_gradients"],
        "nets.gradient_maker": ["GradientSlice"],
        "nets.ir": ["Net", "Op"],
        "nets.lowering": ["infer_shapes", "run_net", "to_jax"],
        "onnx": ["OnnxModel", "from_onnx", "to_onnx"],
        "nets.proto": ["format_net", "read_net", "serialize_net", "write_net"],
        "train": ["load_run"],
        "nets.recurrent": ["recurrent_net", "retrieve_step_blobs", "unrolled_net"],
    }.items()
    for name in names
}
_MODULES = {  # attribute -> module
    name: f"jrnn.{module}"
    for name, module in {
        **{
            name: name
            for name in ("corpus", "errors", "interop", "loops", "models", "nets", "nn", "onnx", "testing", "train")
        },
        **{name: f"nets.{name}" for name in ("cells", "graph", "ops", "plans")},
        "executor": "loops",  # its name before the packages were divided into loops and nets
    }.items()
}
_ONNX = "jrnn.onnx"  # the one module that needs an extra
__all__ = sorted((*_HOMES, *(name for name in _MODULES if name != "onnx" or find_spec("onnx")), "__version__"))


def __getattr__(name: str) -> Any:
    home = _MODULES.get(name) or _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'jrnn' has no attribute {name!r}")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if home != _ONNX or find_spec("onnx") is not None:
            raise
        if name in _MODULES:
            raise AttributeError(_needs(name)) from error  # so that `hasattr` returns False
        globals()[name] = placeholder = _placeholder(name)
        return placeholder
    if name in _MODULES:
        return module
    value = globals()[name] = getattr(module, name)
    return value


def _needs(name: str) -> str:
    return f"jrnn.{name} needs the extra 'onnx': pip install 'jrnn[onnx]'"


def _placeholder(name: str) -> type:
    """What stands for a function or class whose package is not installed, so that tools can list it."""

    def refuse(cls: type, *args: Any, **options: Any) -> Any:
        raise ImportError(_needs(name))

    return type(name, (), {"__new__": refuse, "__doc__": f"{_needs(name)}.", "__module__": __name__})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
