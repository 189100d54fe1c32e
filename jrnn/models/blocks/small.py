"""Short convolutions, parts of RWKV that see a token and the one before it, parts side by side, and residual streams.

Shapes: T time, N batch, D width, K heads, S streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn.models.family import (
    Block,
    Merge,
    Norm,
    Outputs,
    Scoped,
    Shapes,
    State,
    convolution,
    linear,
    products,
    under,
)
from jrnn.models.model_config import ACTIVATIONS
from jrnn.nn.checks import Shape
from jrnn.nn.span import along_last, heads, rms_norm


@dataclass(frozen=True)
class ShortConv(Block):
    """c * convolve(b * x) between two products (LFM2)."""

    width: int
    taps: int
    bias: bool = False

    def tensors(self) -> Shapes:
        d = self.width
        shapes = products({"in_proj": 3 * d, "out_proj": d}, d, self.bias)
        return shapes | convolution("conv", d, self.taps, self.bias)

    def holds(self, room: int) -> Shapes:
        return {"conv": (self.taps - 1, self.width)}

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        b, c, u = jnp.split(w.linear("in_proj", x), 3, axis=-1)
        u, conv = w.convolve("conv", b * u, state["conv"])
        return w.linear("out_proj", c * u), {"conv": conv}


@dataclass(frozen=True)
class MatrixMixing(Block):
    """What the time mixings with a matrix in each head share; `key`, `value`: features of all heads."""

    width: int
    heads: int
    key: int
    value: int
    epsilon: float

    def holds(self, room: int) -> Shapes:
        return {
            "time": (1, self.width),
            "S": (self.heads, self.key // self.heads, self.value // self.heads),
        }

    def low_rank(self, name: str, rows: int, rank: int, bias: bool = True) -> Shapes:
        return linear(f"{name}.lora.0", rank, self.width) | linear(
            f"{name}.lora.2", rows, rank, bias=bias
        )


@dataclass(frozen=True)
class ChannelMixing(Block):
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
    shape: Shape

    def tensors(self) -> Shapes:
        d = self.width
        shapes = (
            {self.key[1]: self.shape}
            | linear(self.key[0], self.inner, d)
            | linear("value", d, self.inner)
        )
        if self.gate is None:
            return shapes
        return shapes | {self.gate[1]: self.shape} | linear(self.gate[0], d, d)

    def holds(self, room: int) -> Shapes:
        return {"channel": (1, self.width)}

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        (earlier, now), window = w.span.taps(x, state["channel"])
        a, b = (earlier, now) if len(self.shape) == 3 else (now, earlier)

        def product(name: str, share: str) -> Array:
            return w.linear(name, a + (b - a) * w[share].reshape(1, 1, -1))

        y = w.linear("value", ACTIVATIONS[self.act](product(*self.key)))
        return (y if self.gate is None else jax.nn.sigmoid(product(*self.gate)) * y), {
            "channel": window
        }


class Side(NamedTuple):
    """A part of `Both`: its name, factors of its input and output, and the name and columns of a product that gates it."""

    name: str
    part: Block
    into: float = 1.0
    out: float = 1.0
    gate: tuple[str, int] | None = None


@dataclass(frozen=True)
class Both(Block):
    """The sum of parts of the same input."""

    sides: tuple[Side, ...]

    @property
    def places(self) -> bool:  # type: ignore[override]
        return any(side.part.places for side in self.sides)

    def tensors(self) -> Shapes:
        shapes: Shapes = {}
        for side in self.sides:
            shapes |= under(side.name, side.part.tensors()) | (
                linear(side.gate[0], 1, side.gate[1]) if side.gate else {}
            )
        return shapes

    def merged(self) -> dict[str, Merge]:
        merged: dict[str, Merge] = {}
        for side in self.sides:
            for key, merge in under(side.name, side.part.merged()).items():
                merged[key] = merge.under(side.name)
        return merged

    def holds(self, room: int) -> Shapes:
        shapes: Shapes = {}
        for side in self.sides:
            shapes |= side.part.holds(room)
        return shapes

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        outputs = []
        after = {}
        for side in self.sides:
            y, own = side.part.run(w.at(side.name), x if side.into == 1 else x * side.into, state)
            y = y if side.out == 1 else y * side.out
            y = y if side.gate is None else y * jax.nn.sigmoid(w.linear(side.gate[0], x))
            outputs = [*outputs, y]
            after = after | own
        return sum(outputs[1:], outputs[0]), after


@dataclass(frozen=True)
class HyperStreams(Both):
    """S residual streams, [T, N, S D] (manifold-constrained hyper-connections, Xie et al., 2026).

    A part reads a mean of them, and its output is added to them.

    Attributes:
        sides: the norm before the part, and the part.
        name: "attn" or "ffn".
        count, rounds, epsilon: S; how often the streams' mixture is normalized; what is added to sums.
    """

    name: str
    count: int
    rounds: int
    epsilon: float

    def tensors(self) -> Shapes:
        s = self.count
        norm = self.sides[0].part
        own = {
            "fn": ((2 + s) * s, s * norm.tensors()["weight"][0]),
            "base": ((2 + s) * s,),
            "scale": (3,),
        }
        return super().tensors() | {f"hc_{self.name}_{key}": shape for key, shape in own.items()}

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        s = self.count
        streams = heads(x, self.count)
        norm, part = self.sides
        weights, base, scale = (w[f"hc_{self.name}_{key}"] for key in ("fn", "base", "scale"))
        z = w.span.linear(rms_norm(x, None, norm.part.epsilon), weights)
        scale = jnp.repeat(
            scale.astype(z.dtype), np.array([s, s, s * s]), total_repeat_length=(2 + s) * s
        )
        z = z * along_last(scale, z) + along_last(base.astype(z.dtype), z)
        read, write, mix = jnp.split(z, [s, 2 * s], axis=-1)
        mix = self._balanced(jax.nn.softmax(heads(mix, s), axis=-1) + self.epsilon)
        y = jnp.einsum("tns,tnsd->tnd", jax.nn.sigmoid(read) + self.epsilon, streams)
        y, after = part.part.run(w.at(part.name), norm.part(w.at(norm.name), y), state)
        y = 2 * jax.nn.sigmoid(write)[..., None] * y[:, :, None] + jnp.einsum(
            "tnij,tnid->tnjd", mix, streams
        )
        return y.reshape(x.shape), after

    def _balanced(self, mix: Array) -> Array:
        """Sinkhorn and Knopp: sums of rows and columns of about 1."""

        def divided(m: Array, axis: int) -> Array:
            return m / (jnp.sum(m, axis=axis, keepdims=True) + self.epsilon)

        return jax.lax.fori_loop(
            1, self.rounds, lambda _, m: divided(divided(m, -1), -2), divided(mix, -2)
        )


@dataclass(frozen=True)
class MeanNorm(Norm):
    """The norm of the mean of the streams."""

    def __call__(self, w: Scoped, x: Array) -> Array:
        return super().__call__(w, jnp.mean(x.reshape(*x.shape[:2], -1, self.size), axis=2))
