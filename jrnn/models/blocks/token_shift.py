"""Parts of RWKV that see mixtures of a token and the one before it: channel mixing, and what versions 6 and 7 share.

Shapes: T time, N batch, D width, K heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jrnn.models.config import ACTIVATIONS
from jrnn.models.family import At, Part, Shapes, State, Weights, linear


@dataclass(frozen=True)
class MatrixMixing(Part):
    """What the time mixings with a matrix in each head share; `key`, `value`: features of all heads."""

    width: int
    heads: int
    key: int
    value: int
    epsilon: float

    def holds(self) -> Shapes:
        return {"time": (1, self.width), "S": (self.heads, self.key // self.heads, self.value // self.heads)}

    def low_rank(self, name: str, rows: int, rank: int, bias: bool = True) -> Shapes:
        return linear(f"{name}.lora.0", rank, self.width) | linear(f"{name}.lora.2", rows, rank, bias)


@dataclass(frozen=True)
class ChannelMixing(Part):
    """A feed-forward part of mixtures of the token and the one before it.

    Attributes:
        width, inner, act: D, features inside, the activation.
        key, gate: the names of a product and of its mixture; `gate`, if any, gates the output.
        shape: of mixtures. With three axes, in version 4, they are shares of now instead of before.
    """

    width: int
    inner: int
    act: str
    key: tuple[str, str]
    gate: tuple[str, str] | None
    shape: tuple[int, ...]

    def tensors(self) -> Shapes:
        d = self.width
        shapes = {self.key[1]: self.shape} | linear(self.key[0], self.inner, d) | linear("value", d, self.inner)
        return shapes if self.gate is None else shapes | {self.gate[1]: self.shape} | linear(self.gate[0], d, d)

    def holds(self) -> Shapes:
        return {"channel": (1, self.width)}

    def run(self, w: Weights, x: jax.Array, state: State, at: At) -> tuple[jax.Array, State]:
        (earlier, now), window = at.span.taps(x, state["channel"])
        a, b = (earlier, now) if len(self.shape) == 3 else (now, earlier)

        def product(name: str, share: str) -> jax.Array:
            return w.linear(at.span, name, a + (b - a) * w[share].reshape(1, 1, -1))

        y = w.linear(at.span, "value", ACTIVATIONS[self.act](product(*self.key)))
        return (y if self.gate is None else jax.nn.sigmoid(product(*self.gate)) * y), {"channel": window}
