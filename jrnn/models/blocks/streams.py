"""Several residual streams around a part (manifold-constrained hyper-connections, Xie et al., 2026).

Shapes: T time, N batch, D width, S streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.models.blocks.small import Both
from jrnn.models.family import At, Norm, Shapes, State, Weights
from jrnn.nn.span import along_last, heads, rms_norm


@dataclass(frozen=True)
class Streams(Both):
    """S residual streams, [T, N, S D]: a part reads a mean of them, and its output is added to them.

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
        s, norm = self.count, self.sides[0].part
        own = {"fn": ((2 + s) * s, s * norm.tensors()["weight"][0]), "base": ((2 + s) * s,), "scale": (3,)}
        return super().tensors() | {f"hc_{self.name}_{key}": shape for key, shape in own.items()}

    def run(self, w: Weights, x: jax.Array, state: State, at: At) -> tuple[jax.Array, State]:
        s, streams, (norm, part) = self.count, heads(x, self.count), self.sides
        weights, base, scale = (w[f"hc_{self.name}_{key}"] for key in ("fn", "base", "scale"))
        z = at.span.linear(rms_norm(x, None, norm.part.epsilon), weights)
        scale = jnp.repeat(scale.astype(z.dtype), np.array([s, s, s * s]), total_repeat_length=(2 + s) * s)
        z = z * along_last(scale, z) + along_last(base.astype(z.dtype), z)
        read, write, mix = jnp.split(z, [s, 2 * s], axis=-1)
        mix = self._balanced(jax.nn.softmax(heads(mix, s), axis=-1) + self.epsilon)
        y = jnp.einsum("tns,tnsd->tnd", jax.nn.sigmoid(read) + self.epsilon, streams)
        y, after = part.part.run(w.at(part.name), norm.part(w.at(norm.name), y), state, at)
        y = 2 * jax.nn.sigmoid(write)[..., None] * y[:, :, None] + jnp.einsum("tnij,tnid->tnjd", mix, streams)
        return y.reshape(x.shape), after

    def _balanced(self, mix: jax.Array) -> jax.Array:
        """Sinkhorn and Knopp: sums of rows and columns of about 1."""

        def divided(m: jax.Array, axis: int) -> jax.Array:
            return m / (jnp.sum(m, axis=axis, keepdims=True) + self.epsilon)

        return jax.lax.fori_loop(1, self.rounds, lambda _, m: divided(divided(m, -1), -2), divided(mix, -2))


@dataclass(frozen=True)
class MeanNorm(Norm):
    """The norm of the mean of the streams."""

    def __call__(self, w: Weights, x: jax.Array) -> jax.Array:
        return super().__call__(w, jnp.mean(x.reshape(*x.shape[:2], -1, self.size), axis=2))
