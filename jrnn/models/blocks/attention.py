"""Attention to all tokens or in a window, with the options of the families.

Shapes: T time, N batch, D width, Q query heads, K key heads, C features of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.models.config import DecoderKeys, Rope, divides
from jrnn.models.family import At, Norm, Part, Shapes, State, Weights, linear, products, under
from jrnn.models.memory import attend, memory, turn
from jrnn.nn.span import heads


@dataclass(frozen=True)
class Attention(Part):
    """Softmax attention with grouped keys.

    Attributes:
        width: D.
        heads, key_heads, size: Q, K, C.
        bias, out_bias: whether q, k and v, and the output, have biases.
        rope: rotary positions, or None.
        norm: of q and k, of C features, or of all heads together if `norm_whole`; None: none.
        norms: their names.
        gated: whether the projection of q also makes gates of the outputs.
        window: how many positions a query sees; None: all.
        scale: of the products; None: C^(-1/2).
        key_scale: of the keys.
        out: the name of the output's projection; out_width: its rows, if not D.
    """

    width: int
    heads: int
    key_heads: int
    size: int
    bias: bool = False
    out_bias: bool = False
    rope: Rope | None = None
    norm: Norm | None = None
    norm_whole: bool = False
    norms: tuple[str, str] = ("q_norm", "k_norm")
    gated: bool = False
    window: int | None = None
    scale: float | None = None
    key_scale: float = 1.0
    out: str = "o_proj"
    out_width: int | None = None

    places = True

    @classmethod
    def of(cls, c: DecoderKeys, bias: bool = False, **more: Any) -> Attention:
        """With the sizes of a config; `bias`: of all products."""
        return cls(c.hidden_size, c.num_attention_heads, c.key_heads, c.head, bias, bias, **more)

    def __post_init__(self) -> None:
        divides("num_key_value_heads", self.key_heads, "num_attention_heads", self.heads)

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return self.window is None

    def tensors(self) -> Shapes:
        q, kv = self.heads * self.size, self.key_heads * self.size
        rows = {"q_proj": q * (2 if self.gated else 1), "k_proj": kv, "v_proj": kv}
        shapes = products(rows, self.width, self.bias)
        if self.norm is not None:
            for name, size in zip(self.norms, (q, kv) if self.norm_whole else (self.size, self.size)):
                shapes |= under(name, {"weight": (size,)})
        return shapes | linear(self.out, self.out_width or self.width, q, self.out_bias)

    def fresh(self, batch: int, dtype: Any, room: int) -> State:
        return memory(batch, room if self.window is None else self.window - 1, self.key_heads, self.size, dtype)

    def run(self, w: Weights, x: jax.Array, state: State, at: At) -> tuple[jax.Array, State]:
        q, k, v = (w.linear(at.span, f"{name}_proj", x) for name in "qkv")
        return self.mix(w, q, k, v, state, at)

    def mix(
        self, w: Weights, q: jax.Array, k: jax.Array, v: jax.Array, state: State, at: At
    ) -> tuple[jax.Array, State]:
        """From the projections q [T, N, Q C] or [T, N, 2 Q C], k and v [T, N, K C] to the output."""
        gate = None
        if self.gated:
            q, gate = jnp.split(heads(q, self.heads), 2, axis=-1)
            q = q.reshape(*q.shape[:2], -1)
        q, k = self._normed(w, self.norms[0], q, self.heads), self._normed(w, self.norms[1], k, self.key_heads)
        if self.key_scale != 1:
            k = k * self.key_scale
        if self.rope is not None:
            q, k = (turn(part, at.positions, *self.rope) for part in (q, k))
        y, after = attend(q, k, heads(v, self.key_heads), state, at.span, at.positions, self.window, scale=self.scale)
        y = y if gate is None else y * jax.nn.sigmoid(gate)
        return w.linear(at.span, self.out, y.reshape(*y.shape[:2], -1)), after

    def _normed(self, w: Weights, name: str, x: jax.Array, count: int) -> jax.Array:
        """[T, N, heads C] -> [T, N, heads, C]."""
        if self.norm is None:
            return heads(x, count)
        if self.norm_whole:
            return heads(self.norm(w.at(name), x), count)
        return self.norm(w.at(name), heads(x, count))


@dataclass(frozen=True)
class Latent(Part):
    """Latent attention (DeepSeek-V2): keys and values come from one product of low rank.

    Attributes:
        width: D.
        heads: Q.
        rank, query_rank: of the keys and values, and of the queries or None.
        nope, shared, value: features of a head's own key, of the key that all heads share, and of a value.
        epsilon: of the norms.
        bias: whether the products to low rank have biases.
        rope: rotary positions of pairs of neighboring features of the shared key, or None.
        gate: the name of a product that gates each head, or None.
        out: the name of the output's product.
    """

    width: int
    heads: int
    rank: int
    query_rank: int | None
    nope: int
    shared: int
    value: int
    epsilon: float = 1e-6
    bias: bool = False
    rope: Rope | None = None
    gate: str | None = None
    out: str = "o_proj"

    places = True
    remembers = True

    @property
    def size(self) -> int:
        """Features of a head's key, and of a value with zeros after it."""
        return max(self.nope + self.shared, self.value)

    def tensors(self) -> Shapes:
        d, key = self.width, self.nope + self.shared
        if self.query_rank is None:
            shapes = linear("q_proj", self.heads * key, d)
        else:
            shapes = linear("q_a_proj", self.query_rank, d, self.bias) | {"q_a_layernorm.weight": (self.query_rank,)}
            shapes |= linear("q_b_proj", self.heads * key, self.query_rank)
        shapes |= linear("kv_a_proj_with_mqa", self.rank + self.shared, d, self.bias)
        shapes |= {"kv_a_layernorm.weight": (self.rank,)}
        shapes |= linear("kv_b_proj", self.heads * (self.nope + self.value), self.rank)
        shapes |= {} if self.gate is None else linear(self.gate, self.heads, d)
        return shapes | linear(self.out, d, self.heads * self.value, self.bias)

    def fresh(self, batch: int, dtype: Any, room: int) -> State:
        return memory(batch, room, self.heads, self.size, dtype)

    def run(self, w: Weights, x: jax.Array, state: State, at: At) -> tuple[jax.Array, State]:
        span = at.span
        if self.query_rank is None:
            query, q = x, w.linear(span, "q_proj", x)
        else:
            query = Norm(self.query_rank, self.epsilon)(w.at("q_a_layernorm"), w.linear(span, "q_a_proj", x))
            q = w.linear(span, "q_b_proj", query)
        low, shared = jnp.split(w.linear(span, "kv_a_proj_with_mqa", x), [self.rank], axis=-1)
        low = Norm(self.rank, self.epsilon)(w.at("kv_a_layernorm"), low)
        k, v = jnp.split(heads(w.linear(span, "kv_b_proj", low), self.heads), [self.nope], axis=-1)
        q, shared = heads(q, self.heads), shared[:, :, None]
        if self.rope is not None:
            q, turned = jnp.split(q, [self.nope], axis=-1)
            turned, shared = (turn(paired(part), at.positions, *self.rope) for part in (turned, shared))
            q = jnp.concatenate([q, turned], axis=-1)
        shared = jnp.broadcast_to(shared, (*k.shape[:-1], self.shared))
        q, k, v = (self._padded(part) for part in (q, jnp.concatenate([k, shared], -1), v))
        scale = (self.nope + self.shared) ** -0.5
        y, after = attend(q, k, v, state, span, at.positions, scale=scale, **self.choice(w, x, query, at))
        y = y[..., : self.value]
        y = y if self.gate is None else y * jax.nn.sigmoid(w.linear(span, self.gate, x))[..., None]
        return w.linear(span, self.out, y.reshape(*x.shape[:2], -1)), after

    def choice(self, w: Weights, x: jax.Array, query: jax.Array, at: At) -> dict[str, Any]:
        """The last arguments of `attend`; `query`: the queries before their last product."""
        return {}

    def _padded(self, x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * 3 + [(0, self.size - x.shape[-1])])


def paired(x: jax.Array) -> jax.Array:
    """Features 0, 2, 4, ... and then 1, 3, 5, ..., so that `turn` turns neighbors."""
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
