"""A Package: a model as Caffe2 keeps it, a net that makes the weights and a net that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConversionError
from ..ir import Net, Op
from ..lowering import run_net, to_jax
from ..proto import read_net, write_net

INIT, PREDICT = "init_net.pb", "predict_net.pb"


def placeholder(name: str) -> Op:
    """What stands for an input in the init nets of Caffe2's mobile exporter: a zero of shape [1, 1]."""
    return Op.of("GivenTensorFill", [], [name], shape=[1, 1], values=[0.0])


@dataclass(frozen=True)
class Package:
    """`init_net` fills the weights, `predict_net` reads them and the inputs and gives the outputs.

    An init net may end in placeholders for the first external inputs of the predict net, in their order, as those of
    Caffe2's mobile exporter do; they count as inputs, not as weights.
    """

    init_net: Net
    predict_net: Net

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The blobs that the init net makes, without the placeholders of inputs."""
        made = dict.fromkeys(o for op in self.init_net.ops for o in op.outputs)
        return tuple(n for n in made if n not in self._placeholders())

    def _placeholders(self) -> tuple[str, ...]:
        """The longest start of the predict net's inputs that the init net's last operators are placeholders of."""
        ops, inputs = self.init_net.ops, self.predict_net.external_inputs
        last = 0
        while last < len(ops) and _is_placeholder(ops[-1 - last]):
            last += 1
        ends = (k for k in range(last, 0, -1) if tuple(op.outputs[0] for op in ops[-k:]) == inputs[:k])
        return inputs[: next(ends, 0)]

    @property
    def input_names(self) -> tuple[str, ...]:
        """The blobs to give: inputs of the predict net that are no weights."""
        weights = set(self.weight_names)
        return tuple(n for n in self.predict_net.external_inputs if n not in weights)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.predict_net.external_outputs

    def weights(self, *, key: Any = None) -> dict[str, Any]:
        """The weights as numpy arrays, by name; `key` is for init nets that draw random numbers."""
        made = run_net(self.init_net, {}, key=key)
        return {n: made[n] for n in self.weight_names}

    def to_jax(self) -> Callable[..., dict[str, Any]]:
        """The function `fn(inputs, weights=None) -> outputs` of dicts of arrays; by default the init net's weights.

        >>> import jax.numpy as jnp
        >>> import jrnn
        >>> package = jrnn.from_jax(lambda x: 2 * x + 1, jnp.ones(3))
        >>> package.to_jax()({"x": jnp.arange(3.0)})["output"].tolist()
        [1.0, 3.0, 5.0]
        """
        own = self.weights()
        run = to_jax(self.predict_net)

        def fn(inputs: Mapping[str, Any], weights: Mapping[str, Any] | None = None) -> dict[str, Any]:
            return run({**own, **(weights or {}), **inputs})

        return fn

    def save(self, folder: str | Path) -> None:
        """Writes `init_net.pb` and `predict_net.pb` into a folder, which is made where it is not there."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_net(self.init_net, folder / INIT)
        write_net(self.predict_net, folder / PREDICT)

    @classmethod
    def load(cls, folder: str | Path) -> Package:
        """Reads what `save` wrote; a ConversionError where one of the files is missing."""
        folder = Path(folder)
        for name in (INIT, PREDICT):
            if not (folder / name).is_file():
                raise ConversionError(f"{folder}: has no {name}; a package is a folder with {INIT} and {PREDICT}")
        return cls(read_net(folder / INIT), read_net(folder / PREDICT))


def _is_placeholder(op: Op) -> bool:
    return len(op.outputs) == 1 and (op.type, op.inputs, op.args) == (
        (wanted := placeholder(op.outputs[0])).type,
        wanted.inputs,
        wanted.args,
    )
