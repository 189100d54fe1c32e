"""A causal convolution as a layer: its state is the window of the last inputs.

Shapes: T time, N batch, D input, P output, K taps.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jrnn.nn.checks import check_integer
from jrnn.nn.params import Params
from jrnn.nn.recurrent import Parameter, RecurrentLayer, uniform
from jrnn.nn.settings import spelled_out
from jrnn.nn.span import Span


class CausalConv(RecurrentLayer):
    """y_t = sum_k W_k x_(t - K + 1 + k) + b: PyTorch's Conv1d over the last K inputs, zeros before the first.

    Args:
        input_size: features of the input, D.
        output_size: features of the output, P.
        kernel_size: taps, K.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = CausalConv(3, 4, kernel_size=5, rngs=nnx.Rngs(0))
    >>> y, window = layer(jnp.ones((7, 2, 3)))
    >>> y.shape, window.shape, layer.weight.shape
    ((7, 2, 4), (2, 4, 3), (4, 3, 5))
    """

    @spelled_out(RecurrentLayer.__init__)
    def __init__(
        self, input_size: int, output_size: int, kernel_size: int, *, rngs: nnx.Rngs, **options: Any
    ) -> None:
        self.kernel_size = check_integer("CausalConv: kernel_size", kernel_size, 1)
        super().__init__(input_size, output_size, rngs=rngs, **options)

    def _parameters(self) -> dict[str, Parameter]:
        start, _ = uniform(self.output_size, self.input_size * self.kernel_size)
        shape = self.output_size, self.input_size, self.kernel_size
        return {"weight": (start, shape), "bias": (start, shape[:1])}

    def _fresh(self, batch: int, dtype: DTypeLike) -> Array:
        return jnp.zeros((batch, self.kernel_size - 1, self.input_size), dtype)

    def _recurrent(self, state: Array) -> tuple[()]:
        return ()  # the window is of inputs

    def _run(self, p: Params, x: Array, window: Array, span: Span) -> tuple[Array, Array]:
        taps, window = span.taps(x, window)
        weight = jnp.swapaxes(p["weight"], 1, 2).reshape(self.output_size, -1)
        return span.linear(jnp.concatenate(taps, axis=-1), weight, p["bias"]), window
