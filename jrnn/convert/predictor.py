"""Serving: a package as a compiled function of its inputs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ConversionError, near
from ..lowering import to_jax
from .package import Package


class Predictor:
    """A package, compiled once for each shape of the inputs that it meets. The weights stay on the device.

    >>> from jrnn.convert import export_package
    >>> from jrnn.ir import Net, Op
    >>> net = Net("n", (Op.of("Mul", ["x", "w"], ["y"]),), ("x", "w"), ("y",))
    >>> predict = Predictor(export_package(net, {"w": np.array([1.0, 2.0], np.float32)}, ["x"], ["y"]))
    >>> predict(x=np.array([3.0, 4.0], np.float32))
    {'y': array([3., 8.], dtype=float32)}
    """

    def __init__(self, package: Package):
        self.input_names = package.input_names
        self.output_names = package.output_names
        weights = package.weights()
        self._weights = {n: jnp.asarray(w) for n, w in weights.items() if w.dtype.kind == "f"}
        static = {n: w for n, w in weights.items() if w.dtype.kind != "f"}  # integers and strings may decide shapes
        run = to_jax(package.predict_net, self.output_names)
        self._run = jax.jit(lambda weights, inputs: run({**static, **weights, **inputs}))

    def __call__(self, *values: Any, **named: Any) -> dict[str, np.ndarray]:
        """The outputs, by name, from inputs given in the order of `input_names`, or by name.

        Raises:
            ConversionError: inputs that are missing, unknown, or given twice. OpError: inputs that do not fit the net.
        """
        if len(values) > len(self.input_names):
            raise ConversionError(f"{len(values)} inputs given, the package has {len(self.input_names)}")
        given = dict(zip(self.input_names, values))
        for name in named:
            if name in given:
                raise ConversionError(f"input {name!r} is given twice, by place and by name")
            if name not in self.input_names:
                raise ConversionError(f"the package has no input {name!r}{near(name, self.input_names)}")
        given |= named
        missing = [n for n in self.input_names if n not in given]
        if missing:
            raise ConversionError(
                f"the package needs {', '.join(map(repr, self.input_names))}; {missing[0]!r} is missing"
            )
        found = self._run(self._weights, {n: np.asarray(v) if isinstance(v, list) else v for n, v in given.items()})
        return {n: np.asarray(found[n]) for n in self.output_names}
