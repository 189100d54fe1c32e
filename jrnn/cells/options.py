"""What the layers may do differently: one record for each kind of cell."""

from __future__ import annotations

from dataclasses import dataclass

from .base import RunOptions


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """What all kinds of layers share.

    drop_states: the state of a finished sequence becomes zero instead of being held. forward_only: build no backward step
    net. outputs_with_grads: which outputs of the top layer, in the order in which they iterate, pass gradients on.
    mask_padding, unroll_steps: see RunOptions.
    """

    drop_states: bool = False
    forward_only: bool = False
    outputs_with_grads: tuple[int, ...] = (0,)
    mask_padding: bool = True
    unroll_steps: int | None = None

    def run_options(self, shift: int) -> RunOptions:
        """How the cells of all layers are run, where `shift` outputs come before those of the top layer."""
        given = tuple(shift + k for k in self.outputs_with_grads)
        return RunOptions(given, self.forward_only, self.mask_padding, self.unroll_steps)


@dataclass(frozen=True, kw_only=True)
class LSTMOptions(LayerOptions):
    """forget_bias: added to the forget gate before its sigmoid. memory_optimization: recompute the gates in the backward
    pass instead of storing them. The rest is in LayerOptions."""

    forget_bias: float = 0.0
    memory_optimization: bool = False


@dataclass(frozen=True, kw_only=True)
class GRUOptions(LayerOptions):
    """linear_before_reset: the reset gate scales the product of the hidden state, as in cuDNN and PyTorch, instead of the
    hidden state before the product. The rest is in LayerOptions."""

    linear_before_reset: bool = False


@dataclass(frozen=True, kw_only=True)
class BasicRNNOptions(LayerOptions):
    """activation: "tanh" or "relu". The rest is in LayerOptions."""

    activation: str = "tanh"
