"""Feed-forward parts: gated or plain, one for all tokens or several experts.

Shapes: T time, N batch, D width, I inner, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from jrnn.errors import ConfigError
from jrnn.models.family import Block, Merge, Outputs, Scoped, Shapes, State, linear, products
from jrnn.models.model_config import ACTIVATIONS, ScoreKeys
from jrnn.nn.span import along_last


@dataclass(frozen=True)
class Mlp(Block):
    """down(act(gate x) * up x), or down(act(up x)) without a gate.

    Attributes:
        width, inner: D, I.
        act: the activation.
        names: of gate, up and down. With the first two equal, one product makes both; a gate "" is none.
        bias: whether the products have biases.
        gate_scale: a factor of the gate before the activation.
        limit: the greatest value of the gate before the activation, and of the absolute value of up; None: there is none.
    """

    width: int
    inner: int
    act: str = "silu"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    bias: bool = False
    gate_scale: float = 1.0
    limit: float | None = None

    def tensors(self) -> Shapes:
        gate, up, down = self.names
        if not gate:
            rows = {up: self.inner}
        else:
            rows = {gate: self.inner, up: 2 * self.inner if gate == up else self.inner}
        return products(rows, self.width, self.bias) | linear(
            down, self.width, self.inner, bias=self.bias
        )

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        return self(w, x), {}

    def __call__(self, w: Scoped, x: Array) -> Array:
        gate, up, down = self.names
        u = w.linear(up, x)
        if gate == up:
            return self.after(w, u)
        return w.linear(down, self.inside(w.linear(gate, x) if gate else None, u))

    def after(self, w: Scoped, both: Array) -> Array:
        """The output from gate and up [.., 2 I]."""
        return w.linear(self.names[2], self.inside(*jnp.split(both, 2, axis=-1)))

    def inside(self, gate: Array | None, u: Array) -> Array:
        """What is between the products."""
        if gate is None:
            return ACTIVATIONS[self.act](u)
        gate = gate if self.gate_scale == 1 else gate * self.gate_scale
        if self.limit is not None:
            gate = jnp.minimum(gate, self.limit)
            u = jnp.clip(u, -self.limit, self.limit)
        return ACTIVATIONS[self.act](gate) * u


@dataclass(frozen=True)
class Router:
    """Chooses experts for each token.

    Attributes:
        count, chosen: E, and how many of them a token has.
        name: of its weight.
        score: what the products go through.
        bias: the name of what is added to scores for the choice alone, or None.
        groups, chosen_groups: experts are chosen from these groups only, by the two best scores of each.
        normalize: what is added to the sum of the chosen scores, by which they are divided; None: they are not.
        factor: of the weights.
    """

    count: int
    chosen: int
    name: str = "gate"
    score: str = "softmax"
    bias: str | None = None
    groups: int = 1
    chosen_groups: int = 1
    normalize: float | None = None
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.count:
            raise ConfigError(
                f"num_experts_per_tok is {self.chosen}; it must lie between 1 and {self.count}"
            )

    @classmethod
    def of_scores(cls, c: ScoreKeys, bias: str = "gate.e_score_correction_bias") -> Router:
        """The router of DeepSeek-V3: sigmoids, and a bias for the choice alone; from the keys of a config."""
        normalize = 1e-20 if c.norm_topk_prob else None
        given = ("gate", "sigmoid", bias, c.n_group, c.topk_group)
        return cls(
            c.num_local_experts, c.num_experts_per_tok, *given, normalize, c.routed_scaling_factor
        )

    def tensors(self, width: int) -> Shapes:
        return linear(self.name, self.count, width) | (
            {} if self.bias is None else {self.bias: (self.count,)}
        )

    def __call__(self, w: Scoped, tokens: Array) -> tuple[Array, Array]:
        """Tokens [M, D] -> weights and experts [M, chosen]."""
        scores = w.span.linear(tokens, w[f"{self.name}.weight"])
        scores = (
            jax.nn.softmax(scores, axis=-1) if self.score == "softmax" else jax.nn.sigmoid(scores)
        )
        order = scores
        if self.bias is not None:
            order = scores + along_last(w[self.bias].astype(scores.dtype), scores)
        if self.groups > 1:
            grouped = order.reshape(len(order), self.groups, -1)
            best = jax.lax.top_k(grouped, 2)[0].sum(-1)
            least = jax.lax.top_k(best, self.chosen_groups)[0][:, -1:]
            order = jnp.where((best >= least)[..., None], grouped, -jnp.inf).reshape(order.shape)
        chosen = jax.lax.top_k(order, self.chosen)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.normalize is not None:
            weights = weights / (weights.sum(-1, keepdims=True) + self.normalize)
        return (weights if self.factor == 1 else weights * self.factor), chosen


@dataclass(frozen=True)
class Experts(Block):
    """The chosen experts of each token, weighted.

    Attributes:
        one: an expert; of its names, "" is no gate.
        router: chooses.
        stacked: the names of weights [E, 2 I, D] and [E, D, I] in files that stack them; None: they are numbered.
        latent: features that the experts work on, between two products; None: D.
    """

    one: Mlp
    router: Router
    stacked: tuple[str, str] | None = None
    latent: int | None = None

    @property
    def _each(self) -> dict[str, tuple[int, int]]:
        """The weights of an expert."""
        one = self.one if self.latent is None else replace(self.one, width=self.latent)
        gate, up, down = one.names
        inside = {}
        for name in (gate, up):
            if name:
                inside[name] = (one.inner, one.width)
        return inside | {down: (one.width, one.inner)}

    def tensors(self) -> Shapes:
        d = self.one.width
        count = self.router.count
        shapes = self.router.tensors(d)
        if self.stacked is not None:
            both, down = self.stacked
            shapes |= {both: (count, 2 * self.one.inner, d), down: (count, d, self.one.inner)}
        for e in range(count) if self.stacked is None else ():
            for name, shape in self._each.items():
                shapes[f"experts.{e}.{name}.weight"] = shape
        if self.latent is not None:
            shapes |= linear("fc1_latent_proj", self.latent, d, bias=self.one.bias)
            shapes |= linear("fc2_latent_proj", d, self.latent, bias=self.one.bias)
        return shapes

    def merged(self) -> dict[str, Merge]:
        names = self._each if self.stacked is None else ()
        merged = {}
        for name in names:
            of_experts = [f"experts.{e}.{name}.weight" for e in range(self.router.count)]
            merged[f"experts.{name}"] = Merge(tuple(of_experts))
        return merged

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(w, tokens)
        given = tokens if self.latent is None else w.linear("fc1_latent_proj", tokens)
        y = self._sum(w, given, weights, chosen)
        return (y if self.latent is None else w.linear("fc2_latent_proj", y)).reshape(x.shape), {}

    def _sum(self, w: Scoped, tokens: Array, weights: Array, chosen: Array) -> Array:
        """The weighted sum of the outputs of the chosen experts, [M, D]."""
        if chosen.size <= self.router.count:  # a step: fewer matrices are read than there are
            return self._sorted(w, tokens, weights, chosen)
        run = partial(self._sorted, w), partial(self._in_rooms, w)
        return jax.lax.platform_dependent(tokens, weights, chosen, default=run[0], cpu=run[1])

    def _in_rooms(self, w: Scoped, tokens: Array, weights: Array, chosen: Array) -> Array:
        """Gives all groups the same capacity: XLA:CPU would multiply all rows by all groups' matrices otherwise."""
        mean = chosen.size / self.router.count
        room = -(-int(mean + 4 * math.sqrt(mean)) // 16) * 16
        dense = partial(self._dense, w)
        if room >= len(tokens):
            return dense(tokens, weights, chosen)
        most = jnp.max(jnp.bincount(chosen.reshape(-1), length=self.router.count))
        roomy = partial(self._sorted, w, room=room)
        return jax.lax.cond(most <= room, roomy, jax.checkpoint(dense), tokens, weights, chosen)

    def _inside(self, product: Callable[[Array, str], Array], x: Array) -> tuple[Array, str]:
        """What is between the products of experts, and the name of the last one."""
        gate, up, down = (f"experts.{name}" if name else "" for name in self.one.names)
        if self.stacked is None:
            return self.one.inside(product(x, gate) if gate else None, product(x, up)), down
        return self.one.inside(*jnp.split(product(x, self.stacked[0]), 2, axis=-1)), self.stacked[1]

    def _dense(self, w: Scoped, tokens: Array, weights: Array, chosen: Array) -> Array:
        """All experts of all tokens."""

        def product(x: Array, name: str) -> Array:
            options = {"preferred_element_type": tokens.dtype}
            return jnp.einsum(
                "md,erd->mer", x.astype(w.span.dtype), w[name].astype(w.span.dtype), **options
            )

        y, down = self._inside(product, tokens)
        shares = jnp.sum(
            jax.nn.one_hot(chosen, self.router.count, dtype=y.dtype) * weights[..., None], axis=1
        )
        y = (y * shares[..., None]).astype(w.span.dtype)
        last = w[down].astype(w.span.dtype)
        return jnp.einsum("mei,edi->md", y, last, preferred_element_type=tokens.dtype)

    def _sorted(
        self,
        w: Scoped,
        tokens: Array,
        weights: Array,
        chosen: Array,
        room: int | None = None,
    ) -> Array:
        """The tokens of each expert one after the other; `room`: for how many each has room, which must be enough."""
        each = chosen.shape[1]
        count = self.router.count
        experts = chosen.reshape(-1)
        order = jnp.argsort(experts)  # the choices of all tokens, sorted by expert
        sizes = jnp.bincount(experts, length=count)
        if room is not None:  # with the number of all choices where there is none
            places = (
                jnp.arange(len(order))
                + (room * jnp.arange(count) - jnp.cumsum(sizes) + sizes)[experts[order]]
            )
            order = jnp.full(count * room, len(order)).at[places].set(order)
        given = tokens.at[order // each].get(mode="fill", fill_value=0)

        def product(x: Array, name: str) -> Array:
            x = x.astype(w.span.dtype)
            wide = {"preferred_element_type": tokens.dtype}
            if room is not None:
                x = x.reshape(count, room, -1)
                return jnp.einsum("emc,erc->emr", x, w[name].astype(w.span.dtype), **wide).reshape(
                    count * room, -1
                )
            if len(order) <= count:
                return jnp.einsum(
                    "mc,mrc->mr", x, w[name][experts[order]].astype(w.span.dtype), **wide
                )
            return jax.lax.ragged_dot(
                x, jnp.swapaxes(w[name], 1, 2).astype(w.span.dtype), sizes, **wide
            )

        y = product(*self._inside(product, given))
        y = y * weights.reshape(-1).at[order].get(mode="fill", fill_value=0)[:, None]
        return jnp.zeros_like(tokens).at[order // each].add(y, mode="drop")
