"""Package: a model as Caffe2 stores it, an init net that fills the weights and a predict net that reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrnn.errors import ConversionError, FormatError, near
from jrnn.graph.scope import reads
from jrnn.ir import Net, Numbers, Op
from jrnn.lowering import run_net, to_jax
from jrnn.ops.values import DTYPES
from jrnn.proto import read_net, write_net

INIT, PREDICT, SHAPES = "init_net.pb", "predict_net.pb", "value_info.json"
CODES = {np.dtype(d): code for code, d in DTYPES.items()}
_LONGEST = 1 << 20  # bytes of the file of shapes
_NOT_FILLED = "the init net does not fill it"
_PLACEHOLDER = "the init net ends in placeholders for it, as Caffe2's mobile exporter writes them"


def placeholder(name: str) -> Op:
    """What stands for an input in the init nets of Caffe2's mobile exporter: a zero of shape [1, 1]."""
    return Op.of("GivenTensorFill", [], [name], shape=[1, 1], values=[0.0])


@dataclass(frozen=True)
class Package:
    """`init_net` fills the weights, `predict_net` reads them and the inputs and gives the outputs.

    An init net may also fill the inputs: with placeholders, as Caffe2's mobile exporter and Caffe's translator do, or with
    an example. Nothing on the wire sets these fills apart from weights, so `inputs` says how it chose. A caller may give any
    other blob as well, in the place of what the init net fills. `shapes` are the shapes and types of inputs, where they are
    known.
    """

    init_net: Net
    predict_net: Net
    shapes: Mapping[str, jax.ShapeDtypeStruct] = field(default_factory=dict)

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The blobs that the init net makes, without inputs."""
        return tuple(n for n in self._made() if n not in self.inputs)

    @property
    def inputs(self) -> dict[str, str]:
        """The blobs to give, by name, each with the reason why it counts as an input.

        >>> ops = (Op.of("Relu", ["data"], ["y"]),)
        >>> Package(Net("init"), Net("predict", ops, ("data",), ("y",))).inputs
        {'data': 'the init net does not fill it'}
        """
        placeholders = self._placeholders()
        read = dict.fromkeys((*self.predict_net.external_inputs, *reads(self.predict_net)))
        found = {n: _PLACEHOLDER if n in placeholders else _NOT_FILLED for n in self._required(read)}
        return found or self._suggested(read)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of `inputs`."""
        return tuple(self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The outputs that the predict net declares; where it declares none, the blobs that none of its operators reads."""
        net = self.predict_net
        read = {i for op in net.ops for i in op.inputs}
        return net.external_outputs or tuple(dict.fromkeys(o for op in net.ops for o in op.outputs if o not in read))

    def weights(self, *, key: Any = None) -> dict[str, Any]:
        """The weights as numpy arrays, by name; `key` is for init nets that draw random numbers."""
        found = self.filled(key=key)
        return {n: found[n] for n in self.weight_names}

    def filled(self, *, key: Any = None) -> dict[str, Any]:
        """The weights, and the values that the init net has for suggested inputs: what serves where nothing is given."""
        made, placeholders = run_net(self.init_net, {}, key=key), self._placeholders()
        return {n: v for n, v in made.items() if n not in placeholders}

    def check_known(self, given: Iterable[str]) -> None:
        """Raises ConversionError for a blob that the predict net does not read."""
        known = dict.fromkeys((*self.inputs, *self.predict_net.external_inputs, *reads(self.predict_net)))
        for name in sorted(set(given) - set(known)):
            raise ConversionError(f"the package has no input {name!r}{near(name, known)}")

    def check_inputs(self, given: Iterable[str]) -> None:
        """Raises ConversionError for a blob that the predict net does not read, and for an input without a value."""
        given = set(given)
        self.check_known(given)
        for name in self._required(self.inputs):
            if name not in given:
                raise ConversionError(f"the package needs {', '.join(map(repr, self.inputs))}; {name!r} is missing")

    def _made(self) -> dict[str, Op]:
        return {o: op for op in self.init_net.ops for o in op.outputs}

    def _required(self, names: Iterable[str]) -> list[str]:
        made, placeholders = self._made(), self._placeholders()
        return [n for n in names if n not in made or n in placeholders]

    def _placeholders(self) -> tuple[str, ...]:
        """The longest start of the predict net's inputs that the init net's last operators are placeholders of."""
        ops, inputs = self.init_net.ops, self.predict_net.external_inputs
        last = 0
        while last < len(ops) and _is_placeholder(ops[-1 - last]):
            last += 1
        ends = (k for k in range(last, 0, -1) if tuple(op.outputs[0] for op in ops[-k:]) == inputs[:k])
        return inputs[: next(ends, 0)]

    def _suggested(self, read: Iterable[str]) -> dict[str, str]:
        """Of a package whose init net fills everything: single numbers in front, and what the first operator reads first."""
        made = self._made()
        single = takewhile(lambda n: _fills_one_number(made[n]), read)
        found = dict.fromkeys(single, "the init net fills it with a single number, before the first weight")
        first = next((op for op in self.predict_net.ops if op.inputs), None)
        if first is not None and first.inputs[0] in made:
            found.setdefault(
                first.inputs[0], f"the first operator, {first.type}, reads it first; the init net fills it"
            )
        return found

    def to_jax(self) -> Callable[..., dict[str, Any]]:
        """The function `fn(inputs, weights=None) -> outputs` of dicts of arrays; by default the init net's weights.

        >>> import jax.numpy as jnp
        >>> import jrnn
        >>> package = jrnn.from_jax(lambda x: 2 * x + 1, jnp.ones(3))
        >>> package.to_jax()({"x": jnp.arange(3.0)})["output"].tolist()
        [1.0, 3.0, 5.0]
        """
        own = self.filled()
        run = to_jax(self.predict_net, self.output_names)

        def fn(inputs: Mapping[str, Any], weights: Mapping[str, Any] | None = None) -> dict[str, Any]:
            self.check_inputs(inputs)
            return run({**own, **(weights or {}), **inputs})

        return fn

    def save(self, folder: str | Path) -> None:
        """Writes `init_net.pb` and `predict_net.pb` into a folder, which is made where it is not there.

        Known shapes of inputs go into `value_info.json`, as in Caffe2's model zoo: name -> [data type, sizes].
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_net(self.init_net, folder / INIT)
        write_net(self.predict_net, folder / PREDICT)
        if self.shapes:
            info = {n: [CODES[np.dtype(s.dtype)], list(s.shape)] for n, s in self.shapes.items()}
            (folder / SHAPES).write_text(json.dumps(info, indent=1) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> Package:
        """Reads what `save` wrote; a ConversionError where one of the files is missing."""
        folder = Path(folder)
        for name in (INIT, PREDICT):
            if not (folder / name).is_file():
                raise ConversionError(f"{folder}: has no {name}; a package is a folder with {INIT} and {PREDICT}")
        return cls(read_net(folder / INIT), read_net(folder / PREDICT), _read_shapes(folder / SHAPES))


def _read_shapes(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of inputs in a file of the form `{"x": [1, [2, 3]]}`; none where there is no file."""
    try:
        found = json.loads(path.read_bytes()[:_LONGEST]) if path.is_file() else {}
        return {n: jax.ShapeDtypeStruct(tuple(map(int, shape)), DTYPES[code]) for n, (code, shape) in found.items()}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as e:
        raise FormatError(f'{path}: must map inputs to [data type, sizes], as {{"x": [1, [2, 3]]}}: {e}') from e


def _fills_one_number(op: Op) -> bool:
    """Whether an operator of an init net makes one number of known size."""
    shape = op.arg("shape")
    return not op.inputs and isinstance(shape, (Numbers, tuple)) and math.prod(shape) == 1


def _is_placeholder(op: Op) -> bool:
    return len(op.outputs) == 1 and (op.type, op.inputs, op.args) == (
        (wanted := placeholder(op.outputs[0])).type,
        wanted.inputs,
        wanted.args,
    )
