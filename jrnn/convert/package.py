"""Package: a model as an init net, which fills the weights, and a predict net; Predictor: a package compiled for serving."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import ConversionError, FormatError, near
from jrnn.files import AtLeast, checked, kind_of, new_folder, read_json, write_whole
from jrnn.nets.graph.scope import reads
from jrnn.nets.ir import Blobs, Net, Numbers, Op, inputs_of, makers_of, written_by
from jrnn.nets.lowering import run_net, to_jax
from jrnn.nets.ops.values import DTYPES
from jrnn.nets.proto import read_net, write_net

Arrays = dict[str, Any]  # by name

INIT = "init_net.pb"
PREDICT = "predict_net.pb"
SHAPES = "value_info.json"
CODES = {np.dtype(d): code for code, d in DTYPES.items()}
_MAX_BYTES_OF_SHAPES = 1 << 20
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
    if net.external_outputs:
        return net.external_outputs
    read = inputs_of(net.ops)
    return tuple(name for name in written_by(net.ops) if name not in read)


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
        predict = self.predict_net
        init = self.init_net
        return (
            f"Package({len(predict.ops)} operators in {predict.name!r}, {len(init.ops)} operators in {init.name!r}; "
            f"inputs {list(self.input_names)}, outputs {list(self.output_names)})"
        )

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The blobs that the init net fills, without the inputs."""
        inputs = self.inputs
        return tuple(name for name in makers_of(self.init_net.ops) if name not in inputs)

    @property
    def inputs(self) -> dict[str, str]:
        """The inputs, by name, each with the reason why it counts as an input.

        >>> ops = (Op.of("Relu", ["data"], ["y"]),)
        >>> Package(Net("init"), Net("predict", ops, ("data",), ("y",))).inputs
        {'data': 'the init net does not fill it'}
        """
        placeholders = self._placeholders()
        read = self._read()
        reasons = {}
        for name in self._required(read):
            reasons[name] = _PLACEHOLDER if name in placeholders else _NOT_FILLED
        return reasons or self._suggested(read)

    def _read(self) -> dict[str, None]:
        """The blobs that the predict net declares as inputs or reads, each once."""
        return dict.fromkeys((*self.predict_net.external_inputs, *reads(self.predict_net)))

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of `inputs`."""
        return tuple(self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The outputs that the predict net declares; if it declares none, the blobs that none of its operators reads."""
        return outputs_of(self.predict_net)

    def weights(self, *, key: Any = None) -> Arrays:
        """The weights as numpy arrays, by name; `key` is for init nets that draw random numbers."""
        blobs = self.filled(key=key)
        return {name: blobs[name] for name in self.weight_names}

    def filled(self, *, key: Any = None) -> Arrays:
        """All that the init net fills but placeholders: the weights, and the examples that serve as default inputs."""
        blobs = run_net(self.init_net, {}, key=key)
        placeholders = self._placeholders()
        return {name: value for name, value in blobs.items() if name not in placeholders}

    def check_known(self, given: Iterable[str]) -> None:
        """Raises ConversionError for a blob that the predict net does not read."""
        inputs = self.inputs
        known = {**inputs, **self._read()}
        for name in sorted(set(given) - set(known)):
            raise ConversionError(
                f"the package has no input {name!r}{near(name, known)}; it has {list(inputs)}"
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

    def _required(self, names: Iterable[str]) -> list[str]:
        """The names that need a value of the caller."""
        fills = makers_of(self.init_net.ops)
        placeholders = self._placeholders()
        return [name for name in names if name not in fills or name in placeholders]

    def _placeholders(self) -> tuple[str, ...]:
        """The longest prefix of the predict net's inputs for which the init net ends in placeholders."""
        filled: list[str] = []
        for op in reversed(self.init_net.ops):
            if not _is_placeholder(op):
                break
            filled.insert(0, op.outputs[0])
        inputs = self.predict_net.external_inputs
        for count in range(len(filled), 0, -1):
            if tuple(filled[-count:]) == inputs[:count]:
                return inputs[:count]
        return ()

    def _suggested(self, read: Iterable[str]) -> dict[str, str]:
        """Inputs of a package whose init net fills every blob: leading single numbers, and the first operator's input."""
        fills = makers_of(self.init_net.ops)
        reasons = {}
        for name in read:
            if not _fills_one_number(fills[name]):
                break
            reasons[name] = "the init net fills it with a single number, before the first weight"
        for op in self.predict_net.ops:
            if op.inputs:
                why = f"the first operator, {op.type}, reads it first; the init net fills it"
                if op.inputs[0] in fills:
                    reasons.setdefault(op.inputs[0], why)
                break
        return reasons

    def to_jax(self) -> Callable[..., Arrays]:
        """The function `fn(inputs, weights=None) -> outputs` of dicts of arrays. The weights default to the init net's.

        >>> import jax.numpy as jnp
        >>> import jrnn
        >>> package = jrnn.from_jax(lambda x: 2 * x + 1, jnp.ones(3))
        >>> package.to_jax()({"x": jnp.arange(3.0)})["output"].tolist()
        [1.0, 3.0, 5.0]
        """
        own = self.filled()
        run = to_jax(self.predict_net, self.output_names)

        def fn(inputs: Blobs, weights: Blobs | None = None) -> Arrays:
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
                info = {}
                for name, spec in self.shapes.items():
                    info[name] = [CODES[np.dtype(spec.dtype)], list(spec.shape)]
                text = json.dumps(info, indent=1) + "\n"
                write_whole(new / SHAPES, text.encode(), FormatError)

    @classmethod
    def load(cls, folder: str | Path) -> Package:
        """Reads the folder that `save` wrote. Raises ConversionError if one of the nets is missing."""
        folder = Path(folder)
        for name in (INIT, PREDICT):
            if not (folder / name).is_file():
                raise ConversionError(
                    f"{folder}: has no {name}; a package is a folder with {INIT} and {PREDICT}"
                )
        init_net = read_net(folder / INIT)
        predict_net = read_net(folder / PREDICT)
        return cls(init_net, predict_net, _read_shapes(folder / SHAPES))


def _read_shapes(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of inputs in a file such as `{"x": [1, [2, 3]]}`; none if there is no file."""
    if not kind_of(path):
        return {}
    info = read_json(path, FormatError, most=_MAX_BYTES_OF_SHAPES)
    try:
        shapes = {}
        for name, (code, sizes) in info.items():
            shape = checked(tuple[Size, ...], sizes, name, FormatError)
            shapes[name] = jax.ShapeDtypeStruct(shape, DTYPES[code])
        return shapes
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
        self._weights: dict[str, jax.Array] = {}
        static: Arrays = {}
        for name, weight in package.filled().items():
            if weight.dtype.kind == "f":
                self._weights[name] = jnp.asarray(weight)
            else:
                static[name] = weight  # integers and strings may decide shapes
        run = to_jax(package.predict_net, self.output_names)

        @jax.jit
        def run_with_weights(weights: Arrays, inputs: Arrays) -> Arrays:
            return run({**static, **weights, **inputs})

        self._run = run_with_weights

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
        inputs = dict(zip(self.input_names, values))
        for name in named:
            if name in inputs:
                raise ConversionError(f"input {name!r} is given twice, by position and by name")
        inputs |= named
        self.package.check_inputs(inputs)
        for name, value in inputs.items():
            if isinstance(value, list):
                inputs[name] = np.asarray(value)
        outs = self._run(self._weights, inputs)
        return {name: np.asarray(outs[name]) for name in self.output_names}
