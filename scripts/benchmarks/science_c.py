"""The loops of `science_loops.c`, compiled for the processor at hand, as calls without arguments."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jrnn.errors import DataError

SOURCE = Path(__file__).with_name("science_loops.c")
# Contracted products would round differently from the others' programs.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
REALS = {"float32": ("float", ctypes.c_float), "float64": ("double", ctypes.c_double)}
# Of each loop, in the order in which its function takes them.
PARAMETERS = {
    "biquads": ("sos",),
    "average": ("decay",),
    "garch": ("omega", "alpha", "beta"),
    "kalman": ("transition", "observation"),
    "hidden_states": ("matrix",),
    "neurons": ("leak",),
    "epidemic": ("rate", "healing"),
    "advantages": ("discount",),
    "returns": ("discount",),
    "lstm": ("w", "u", "b"),
    "pendulum": ("damping",),
}


@functools.cache
def _library(dtype: str) -> ctypes.CDLL:
    """Compiles the loops for a type."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        raise DataError(
            "bench: the peer C needs a C compiler; set CC, or leave it out with --peers"
        )
    path = Path(tempfile.mkdtemp()) / f"{dtype}.so"
    real = f"-DREAL={REALS[dtype][0]}"
    subprocess.run([compiler, *FLAGS, real, str(SOURCE), "-o", str(path), "-lm"], check=True)
    return ctypes.CDLL(str(path))


def in_c(name: str, p: dict[str, Any], carry: Any, xs: Any, kind: type) -> Callable[[], Any]:
    """Returns a call without arguments that runs a loop in C, and returns its outputs."""
    dtype = np.dtype(kind)
    real = REALS[dtype.name][1]
    function = getattr(_library(dtype.name), name)
    function.restype = None

    args = [p[key] for key in PARAMETERS[name]]
    match name:
        case "garch" | "hidden_states":
            args.append(carry)
        case "epidemic":
            args += carry
        case "pendulum":
            args += [0.01, *carry]
        case "advantages":
            args.append(p["discount"] * kind(0.95))
    inputs = xs if isinstance(xs, tuple) else (xs,)
    sizes = inputs[0].shape
    out = sizes
    match name:
        case "kalman":
            sizes = sizes[:1]
            out = (*sizes, len(p["transition"]))
        case "hidden_states":
            out = sizes[:1]
        case "lstm":
            hidden = len(p["u"])
            out = (*sizes[:2], hidden)
            sizes = (*sizes, hidden)
    args += inputs
    kept = [np.ascontiguousarray(a, dtype) if np.ndim(a) else real(float(a)) for a in args]
    pointers = [a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else a for a in kept]
    lengths = [ctypes.c_long(size) for size in sizes]

    def call() -> np.ndarray:
        y = np.empty(out, dtype)
        function(*pointers, y.ctypes.data_as(ctypes.c_void_p), *lengths)
        return y

    call.arrays = kept  # type: ignore[attr-defined]  # the pointers are into them
    return call
