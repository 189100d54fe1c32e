"""jrnn: recurrent networks on JAX, and nets in Caffe2's wire format.

In: functions, arrays and files of the user. Out: results, other programs and files. Read `loops/scan/scan.py` first.

`import jrnn` is enough to use every public name and sub-module. Each loads when it is first used: `import jrnn` alone
does not even load JAX. What is not here lives in its module, such as `jrnn.nets.Op` or `jrnn.loops.scan_statistics`.

>>> import jrnn
>>> jrnn.scan.__module__, jrnn.nn.LSTM.__name__
('jrnn.loops.scan.scan', 'LSTM')
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from jrnn.lazy import attributes
from jrnn.version import __version__

if TYPE_CHECKING:  # the names of _HOMES and _MODULES for type checkers; `x as x` re-exports x
    from jrnn import errors as errors
    from jrnn import interop as interop
    from jrnn import models as models
    from jrnn import nets as nets
    from jrnn import nn as nn
    from jrnn import onnx as onnx
    from jrnn import testing as testing
    from jrnn import train as train
    from jrnn.bench.own_step import bench_step as bench_step
    from jrnn.convert.from_jax import from_jax as from_jax
    from jrnn.loops import Newton as Newton
    from jrnn.loops import explain as explain
    from jrnn.loops import online_gradient as online_gradient
    from jrnn.loops import optimize_scans as optimize_scans
    from jrnn.loops import plain_scans as plain_scans
    from jrnn.loops import scan as scan  # type: ignore[no-redef]  # the room that it is in has its name
    from jrnn.loops import while_loop as while_loop
    from jrnn.nets import Net as Net
    from jrnn.nets import NetBuilder as NetBuilder
    from jrnn.nets import add_gradients as add_gradients
    from jrnn.nets import read_net as read_net
    from jrnn.nets import recurrent_net as recurrent_net
    from jrnn.nets import run_net as run_net
    from jrnn.nets import to_jax as to_jax
    from jrnn.nets import write_net as write_net
    from jrnn.onnx import from_onnx as from_onnx
    from jrnn.onnx import to_onnx as to_onnx
    from jrnn.testing.gradients import check_gradients as check_gradients
    from jrnn.train import load_run as load_run

_HOMES = {  # module -> the names in it
    "bench.own_step": ["bench_step"],
    "convert.from_jax": ["from_jax"],
    "loops": [
        "Newton",
        "explain",
        "online_gradient",
        "optimize_scans",
        "plain_scans",
        "scan",
        "while_loop",
    ],
    "nets": [
        "Net",
        "NetBuilder",
        "add_gradients",
        "read_net",
        "recurrent_net",
        "run_net",
        "to_jax",
        "write_net",
    ],
    "onnx": ["from_onnx", "to_onnx"],
    "testing.gradients": ["check_gradients"],
    "train": ["load_run"],
}
_MODULES = ["errors", "interop", "models", "nets", "nn", "onnx", "testing", "train"]
_NEEDS_ONNX = ("onnx", *_HOMES["onnx"])
__all__ = sorted(
    {*(name for names in _HOMES.values() for name in names), *_MODULES, "__version__"}
    - ({"onnx"} if find_spec("onnx") is None else set())
)
_load, _ = attributes(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if name not in _NEEDS_ONNX or find_spec("onnx") is not None:
            raise
        if name == "onnx":
            raise AttributeError(_needs(name)) from error  # so that `hasattr` returns False
        globals()[name] = placeholder = _placeholder(name)
        return placeholder


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def _needs(name: str) -> str:
    from jrnn.errors import needs_extra

    return needs_extra(f"jrnn.{name}", "onnx")


def _placeholder(name: str) -> type:
    """What stands for a function or class whose package is not installed, so that tools can list it."""

    def refuse(cls: type, *args: Any, **options: Any) -> Any:
        raise ImportError(_needs(name))

    return type(
        name, (), {"__new__": refuse, "__doc__": f"{_needs(name)}.", "__module__": __name__}
    )
