"""Package: a model as an init net, which fills the weights, and a predict net; Predictor: a package compiled for serving."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import ConversionError, FormatError, near
from jrnn.files import AtLeast, checked, kind_of, new_folder, read_json, write_whole
from jrnn.nets.graph.scope import reads
from jrnn.nets.ir import Net, Numbers, Op
from jrnn.nets.lowering import run_net, to_jax
from jrnn.nets.ops.values import DTYPES
from jrnn.nets.proto import read_net, write_net

INIT = "init_net.pb"
PREDICT = "predict_net.pb"
SHAPES = "value_info.json"
CODES = {np.dtype(d): code for code, d in DTYPES.items()}
_LONGEST = 1 << 20  # bytes that are read of the file of shapes
Size = Annotated[int, AtLeast(0, 2**63 - 1)]
_NOT_FILLED = "the init net does not fill it"
_PLACEHOLDER = "the init net ends in placeholders for it, as Caffe2's mobile exporter writes them"
_FILLS = {
    np.dtype(np.float32): "GivenTensorFill",
    np.dtype(np.int32): "GivenTensorIntFill",
    np.dtype(np.int64): "GivenTensorInt64Fill",
    np.dtype(np.int16): "GivenTensorInt16Fill",
    np.dtype(np.bool_): "GivenTensorBoolFill",
}


def fill(name: str, value: Any) -> Op:
    """The operator of an init net that fills blob `name` with a value."""
    value = np.asarray(value)
    if value.dtype == np.uint8:
        type = "GivenTensorByteStringToUInt8Fill"
        values = [value.tobytes()]
    elif value.dtype.kind in "OSU":
        type = "GivenTensorStringFill"
        values = value.reshape(-1).tolist()
    elif value.dtype in _FILLS:
        type = _FILLS[value.dtype]
        values = value.reshape(-1)
    else:
        known = ", ".join(map(str, _FILLS))
        raise ConversionError(
            f"parameter {name!r} is {value.dtype}, which no operator fills; convert it to {known}"
        )
    return Op.of(type, [], [name], shape=list(value.shape), values=values)


def outputs_of(net: Net) -> tuple[str, ...]:
    """The outputs that a net declares; if it declares none, the blobs that none of its operators reads."""
    read = {i for op in net.ops for i in op.inputs}
    return net.external_outputs or tuple(
        dict.fromkeys(o for op in net.ops for o in op.outputs if o not in read)
    )


def placeholder(name: str) -> Op:
    """The fill of an input in the init nets of Caffe2's mobile exporter: a zero of shape [1, 1]."""
    return fill(name, np.zeros((1, 1), np.float32))


@dataclass(frozen=True, repr=False)
class Package:
    """A model: `init_net` fills the weights, `predict_net` computes the outputs from weights and inputs.

    An init net may also fill the inputs: with placeholders, as Caffe2's mobile exporter and Caffe's translator do, or with
    an example. The file format does not distinguish these fills from weights, so `inputs` gives the reason for each
    choice. A caller may pass any other blob too, which replaces what the init net fills. `shapes` are the shapes and types
    of the inputs whose shapes are known.
    """

    FILES: ClassVar = (INIT, PREDICT, SHAPES)  # what `save` replaces

    init_net: Net
    predict_net: Net
    shapes: Mapping[str, jax.ShapeDtypeStruct] = field(default_factory=dict)

    def __repr__(self) -> str:
        nets = ", ".join(
            f"{len(net.ops)} operators in {net.name!r}" for net in (self.predict_net, self.init_net)
        )
        return (
            f"Package({nets}; inputs {list(self.input_names)}, outputs {list(self.output_names)})"
        )

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The blobs that the init net fills, without the inputs."""
        return tuple(n for n in self._filled() if n not in self.inputs)

    @property
    def inputs(self) -> dict[str, str]:
        """The inputs, by name, each with the reason why it counts as an input.

        >>> ops = (Op.of("Relu", ["data"], ["y"]),)
        >>> Package(Net("init"), Net("predict", ops, ("data",), ("y",))).inputs
        {'data': 'the init net does not fill it'}
        """
        placeholders = self._placeholders()
        read = dict.fromkeys((*self.predict_net.external_inputs, *reads(self.predict_net)))
        reasons = {
            n: _PLACEHOLDER if n in placeholders else _NOT_FILLED for n in self._required(read)
        }
        return reasons or self._suggested(read)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of `inputs`."""
        return tuple(self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The outputs that the predict net declares; if it declares none, the blobs that none of its operators reads."""
        return outputs_of(self.predict_net)

    def weights(self, *, key: Any = None) -> dict[str, Any]:
        """The weights as numpy arrays, by name; `key` is for init nets that draw random numbers."""
        blobs = self.filled(key=key)
        return {n: blobs[n] for n in self.weight_names}

    def filled(self, *, key: Any = None) -> dict[str, Any]:
        """All that the init net fills but placeholders: the weights, and the examples that serve as default inputs."""
        blobs = run_net(self.init_net, {}, key=key)
        placeholders = self._placeholders()
        return {n: v for n, v in blobs.items() if n not in placeholders}

    def check_known(self, given: Iterable[str]) -> None:
        """Raises ConversionError for a blob that the predict net does not read."""
        known = dict.fromkeys(
            (*self.inputs, *self.predict_net.external_inputs, *reads(self.predict_net))
        )
        for name in sorted(set(given) - set(known)):
            raise ConversionError(
                f"the package has no input {name!r}{near(name, known)}; it has {list(self.inputs)}"
            )

    def check_inputs(self, given: Iterable[str]) -> None:
        """Raises ConversionError for a blob that the predict net does not read, and for an input without a value."""
        given = set(given)
        self.check_known(given)
        inputs = self.inputs
        for name in self._required(inputs):
            if name not in given:
                raise ConversionError(
                    f"the package needs {', '.join(map(repr, inputs))}; {name!r} is missing"
                )

    def _filled(self) -> dict[str, Op]:
        return {o: op for op in self.init_net.ops for o in op.outputs}

    def _required(self, names: Iterable[str]) -> list[str]:
        fills = self._filled()
        placeholders = self._placeholders()
        return [n for n in names if n not in fills or n in placeholders]

    def _placeholders(self) -> tuple[str, ...]:
        """The longest prefix of the predict net's inputs for which the init net ends in placeholders."""
        ops = self.init_net.ops
        inputs = self.predict_net.external_inputs
        last = 0
        while last < len(ops) and _is_placeholder(ops[-1 - last]):
            last += 1
        ends = (
            k for k in range(last, 0, -1) if tuple(op.outputs[0] for op in ops[-k:]) == inputs[:k]
        )
        return inputs[: next(ends, 0)]

    def _suggested(self, read: Iterable[str]) -> dict[str, str]:
        """Inputs of a package whose init net fills every blob: leading single numbers, and the first operator's input."""
        fills = self._filled()
        single = takewhile(lambda n: _fills_one_number(fills[n]), read)
        reasons = dict.fromkeys(
            single, "the init net fills it with a single number, before the first weight"
        )
        first = next((op for op in self.predict_net.ops if op.inputs), None)
        if first is not None and first.inputs[0] in fills:
            reasons.setdefault(
                first.inputs[0],
                f"the first operator, {first.type}, reads it first; the init net fills it",
            )
        return reasons

    def to_jax(self) -> Callable[..., dict[str, Any]]:
        """The function `fn(inputs, weights=None) -> outputs` of dicts of arrays. The weights default to the init net's.

        >>> import jax.numpy as jnp
        >>> import jrnn
        >>> package = jrnn.from_jax(lambda x: 2 * x + 1, jnp.ones(3))
        >>> package.to_jax()({"x": jnp.arange(3.0)})["output"].tolist()
        [1.0, 3.0, 5.0]
        """
        own = self.filled()
        run = to_jax(self.predict_net, self.output_names)

        def fn(
            inputs: Mapping[str, Any], weights: Mapping[str, Any] | None = None
        ) -> dict[str, Any]:
            self.check_inputs(inputs)
            return run({**own, **(weights or {}), **inputs})

        return fn

    def save(self, folder: str | Path) -> None:
        """Writes `init_net.pb` and `predict_net.pb` into a folder, in one step; it is created if it does not exist.

        Known shapes of inputs are written to `value_info.json`, as in Caffe2's model zoo: name -> [data type, sizes].
        """
        with new_folder(folder, FormatError, replaces=self.FILES) as new:
            write_net(self.init_net, new / INIT)
            write_net(self.predict_net, new / PREDICT)
            if self.shapes:
                info = {
                    n: [CODES[np.dtype(s.dtype)], list(s.shape)] for n, s in self.shapes.items()
                }
                write_whole(new / SHAPES, (json.dumps(info, indent=1) + "\n").encode(), FormatError)

    @classmethod
    def load(cls, folder: str | Path) -> Package:
        """Reads the folder that `save` wrote. Raises ConversionError if one of the nets is missing."""
        folder = Path(folder)
        for name in (INIT, PREDICT):
            if not (folder / name).is_file():
                raise ConversionError(
                    f"{folder}: has no {name}; a package is a folder with {INIT} and {PREDICT}"
                )
        return cls(
            read_net(folder / INIT), read_net(folder / PREDICT), _read_shapes(folder / SHAPES)
        )


def _read_shapes(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of inputs in a file such as `{"x": [1, [2, 3]]}`; none if there is no file."""
    shapes = read_json(path, FormatError, most=_LONGEST) if kind_of(path) else {}
    try:
        return {
            n: jax.ShapeDtypeStruct(checked(tuple[Size, ...], shape, n, FormatError), DTYPES[code])
            for n, (code, shape) in shapes.items()
        }
    except (KeyError, TypeError, ValueError) as e:
        raise FormatError(
            f'{path}: must map inputs to [data type, sizes], as {{"x": [1, [2, 3]]}}: {e}'
        ) from e


def _fills_one_number(op: Op) -> bool:
    """Whether an operator of an init net makes a single number."""
    shape = op.arg("shape")
    return not op.inputs and isinstance(shape, (Numbers, tuple)) and math.prod(shape) == 1


def _is_placeholder(op: Op) -> bool:
    if len(op.outputs) != 1:
        return False
    wanted = placeholder(op.outputs[0])
    return (op.type, op.inputs, op.args) == (wanted.type, wanted.inputs, wanted.args)


class Predictor:
    """Serves a package: compiles it once for each shape of the inputs, and keeps the weights on the device.

    >>> net = Net("n", (Op.of("Mul", ["x", "w"], ["y"]),), ("x", "w"), ("y",))
    >>> init = Net("init", (fill("w", np.array([1.0, 2.0], np.float32)),))
    >>> predict = Predictor(Package(init, net))
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
        static = {
            n: w for n, w in weights.items() if w.dtype.kind != "f"
        }  # integers and strings may decide shapes
        run = to_jax(package.predict_net, self.output_names)
        self._run = jax.jit(lambda weights, inputs: run({**static, **weights, **inputs}))

    def __repr__(self) -> str:
        return f"Predictor({self.package!r})"

    def __call__(self, *values: Any, **named: Any) -> dict[str, np.ndarray]:
        """The outputs, by name, from inputs given in the order of `input_names` or by name.

        Any other blob that the predict net reads may be given by name too, and replaces what the init net fills.

        Raises:
            ConversionError: inputs that are missing, unknown, or given twice.
            OpError: inputs that do not fit the net.
        """
        if len(values) > len(self.input_names):
            raise ConversionError(
                f"{len(values)} inputs were given, but the package has {len(self.input_names)}"
            )
        given = dict(zip(self.input_names, values))
        for name in named:
            if name in given:
                raise ConversionError(f"input {name!r} is given twice, by position and by name")
        given |= named
        self.package.check_inputs(given)
        outs = self._run(
            self._weights,
            {n: np.asarray(v) if isinstance(v, list) else v for n, v in given.items()},
        )
        return {n: np.asarray(outs[n]) for n in self.output_names}
