"""The options of the layers: one record for each kind of cell."""

import math
from dataclasses import dataclass, fields

from jrnn.errors import NetError
from jrnn.files import plain
from jrnn.nets.cells.base import RunOptions


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options that all kinds of layers share.

    Attributes:
        drop_states: the state of a sequence becomes zero at its end, instead of staying as it is.
        forward_only: build no backward step net.
        outputs_with_grads: if given, only these outputs pass gradients on. A number is an output of the top layer, by its
            position; a pair (layer, position) is an output of any layer. By default all outputs do; Caffe2's default
            is (0,).
        mask_padding: see `RunOptions`.
        unroll_steps: see `RunOptions`.
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
        """The options of `run_cell` for this number of layers with this number of outputs each."""
        given = []
        for chosen in self.outputs_with_grads or ():
            layer, k = map(plain, chosen if isinstance(chosen, tuple) else (layers - 1, chosen))
            if not (0 <= layer < layers and 0 <= k < outputs):
                raise NetError(
                    f"outputs_with_grads holds {chosen}, but there are {layers} layers with {outputs} outputs each; give "
                    "the number of an output of the top layer, or a pair (layer, number), both from 0"
                )
            given.append(outputs * layer + k)
        passing = None if self.outputs_with_grads is None else tuple(given)
        return RunOptions(passing, self.forward_only, self.mask_padding, self.unroll_steps)


@dataclass(frozen=True, kw_only=True)
class LayerOptions(CommonOptions):
    """Options of layers whose steps have intermediate values.

    Attributes:
        memory_optimization: the backward pass computes the intermediate values of a step again, instead of storing them.
    """

    memory_optimization: bool = False


@dataclass(frozen=True, kw_only=True)
class LSTMOptions(LayerOptions):
    """Options of LSTMs.

    Attributes:
        forget_bias: added to the forget gate before its sigmoid.
    """

    forget_bias: float = 0.0


@dataclass(frozen=True, kw_only=True)
class GRUOptions(LayerOptions):
    """Options of GRUs.

    Attributes:
        linear_before_reset: the reset gate scales the product of the hidden state, as in cuDNN and PyTorch, instead of the
            hidden state before the product.
    """

    linear_before_reset: bool = False


@dataclass(frozen=True, kw_only=True)
class BasicRNNOptions(LayerOptions):
    """Options of plain recurrent layers.

    Attributes:
        activation: "tanh" or "relu".
    """

    activation: str = "tanh"


@dataclass(frozen=True, kw_only=True)
class LRUOptions(CommonOptions):
    """Options of LRUs. A step stores only its state, so there is no memory_optimization.

    Attributes:
        radius: the smallest and the largest absolute value of the first eigenvalues, within [0, 1].
        max_phase: the largest angle of the first eigenvalues, in radians.
    """

    radius: tuple[float, float] = (0.0, 1.0)
    max_phase: float = 2 * math.pi
