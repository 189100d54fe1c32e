"""Predictor: a package as a compiled function of its inputs, for serving."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.convert.package import Package
from jrnn.errors import ConversionError
from jrnn.lowering import to_jax


class Predictor:
    """Serves a package: compiles it once for each shape of the inputs, and keeps the weights on the device.

    >>> from jrnn.convert import export_package
    >>> from jrnn.ir import Net, Op
    >>> net = Net("n", (Op.of("Mul", ["x", "w"], ["y"]),), ("x", "w"), ("y",))
    >>> predict = Predictor(export_package(net, {"w": np.array([1.0, 2.0], np.float32)}, ["x"], ["y"]))
    >>> predict(x=np.array([3.0, 4.0], np.float32))
    {'y': array([3., 8.], dtype=float32)}
    """

    def __init__(self, package: Package):
        self.package = package
        self.inputs = package.inputs
        self.input_names = tuple(self.inputs)
        self.output_names = package.output_names
        weights = package.filled()
        self._weights = {n: jnp.asarray(w) for n, w in weights.items() if w.dtype.kind == "f"}
        static = {n: w for n, w in weights.items() if w.dtype.kind != "f"}  # integers and strings may decide shapes
        run = to_jax(package.predict_net, self.output_names)
        self._run = jax.jit(lambda weights, inputs: run({**static, **weights, **inputs}))

    def __call__(self, *values: Any, **named: Any) -> dict[str, np.ndarray]:
        """The outputs, by name, from inputs given in the order of `input_names`, or by name.

        `inputs` says why each of these counts as an input. Any other blob that the predict net reads may be given by name,
        in the place of what the init net fills.

        Raises:
            ConversionError: inputs that are missing, unknown, or given twice. OpError: inputs that do not fit the net.
        """
        if len(values) > len(self.input_names):
            raise ConversionError(f"{len(values)} inputs given, the package has {len(self.input_names)}")
        given = dict(zip(self.input_names, values))
        for name in named:
            if name in given:
                raise ConversionError(f"input {name!r} is given twice, by place and by name")
        given |= named
        self.package.check_inputs(given)
        found = self._run(self._weights, {n: np.asarray(v) if isinstance(v, list) else v for n, v in given.items()})
        return {n: np.asarray(found[n]) for n in self.output_names}
