"""What the layers may do differently: one record for each kind of cell."""

import math
from dataclasses import dataclass, fields

from jrnn.cells.base import RunOptions
from jrnn.errors import NetError
from jrnn.ir import plain


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """What all kinds of layers share.

    drop_states: the state of a finished sequence becomes zero instead of being held. forward_only: build no backward step
    net. outputs_with_grads: where given, only these outputs pass gradients on, by their place in the order in which they
    iterate: a number is an output of the top layer, a pair (layer, number) one of any layer. By default all of them do;
    Caffe2's default is (0,). mask_padding, unroll_steps: see RunOptions.
    """

    drop_states: bool = False
    forward_only: bool = False
    outputs_with_grads: tuple[int | tuple[int, int], ...] | None = None
    mask_padding: bool = True
    unroll_steps: int | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, plain(getattr(self, f.name)))

    def run_options(self, layers: int, outputs: int) -> RunOptions:
        """How the cells of so many layers, of so many outputs each, are run together."""
        if self.outputs_with_grads is None:
            return RunOptions(None, self.forward_only, self.mask_padding, self.unroll_steps)
        given = []
        for chosen in self.outputs_with_grads:
            layer, k = map(plain, chosen if isinstance(chosen, tuple) else (layers - 1, chosen))
            if not (0 <= layer < layers and 0 <= k < outputs):
                raise NetError(
                    f"outputs_with_grads holds {chosen}, but there are {layers} layers with {outputs} outputs each; give "
                    "the number of an output of the top layer, or a pair (layer, number), both from 0"
                )
            given.append(outputs * layer + k)
        return RunOptions(tuple(given), self.forward_only, self.mask_padding, self.unroll_steps)


@dataclass(frozen=True, kw_only=True)
class LayerOptions(CommonOptions):
    """memory_optimization: the backward pass computes again what a step makes on its way to the state, instead of keeping
    it. The rest is in CommonOptions."""

    memory_optimization: bool = False


@dataclass(frozen=True, kw_only=True)
class LSTMOptions(LayerOptions):
    """forget_bias: added to the forget gate before its sigmoid. The rest is in LayerOptions."""

    forget_bias: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GRUOptions(LayerOptions):
    """linear_before_reset: the reset gate scales the product of the hidden state, as in cuDNN and PyTorch, instead of the
    hidden state before the product. The rest is in LayerOptions."""

    linear_before_reset: bool = False


@dataclass(frozen=True, kw_only=True)
class BasicRNNOptions(LayerOptions):
    """activation: "tanh" or "relu". The rest is in LayerOptions."""

    activation: str = "tanh"


@dataclass(frozen=True, kw_only=True)
class LRUOptions(CommonOptions):
    """radius: the least and the largest absolute value that eigenvalues start with, within [0, 1]. max_phase: the largest
    angle that they start with, in radians. The rest is in CommonOptions: a step keeps nothing but its state,
    so there is no memory_optimization."""

    radius: tuple[float, float] = (0.0, 1.0)
    max_phase: float = 2 * math.pi
