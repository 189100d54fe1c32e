"""Feed-forward parts: gated or plain, one for all tokens or several experts.

Shapes: T time, N batch, D width, I inner, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jrnn.errors import ConfigError
from jrnn.models.config import ACTIVATIONS, ScoreKeys
from jrnn.models.family import At, Merge, Part, Shapes, State, Weights, linear, products, under
from jrnn.nn.span import Span, along_last


@dataclass(frozen=True)
class Mlp(Part):
    """down(act(gate x) * up x), or down(act(up x)) without a gate.

    Attributes:
        width, inner: D, I.
        act: the activation.
        names: of gate, up and down. With the first two equal, one product makes both; a gate "" is none.
        bias: whether the products have biases.
        gate_scale, down_scale: factors of the gate before the activation, and of the output.
        limit: the greatest value of the gate before the activation, and of the absolute value of up; None: there is none.
    """

    width: int
    inner: int
    act: str = "silu"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    bias: bool = False
    gate_scale: float = 1.0
    down_scale: float = 1.0
    limit: float | None = None

    def tensors(self) -> Shapes:
        gate, up, down = self.names
        rows = {up: self.inner} if not gate else {gate: self.inner, up: 2 * self.inner if gate == up else self.inner}
        return products(rows, self.width, self.bias) | linear(down, self.width, self.inner, self.bias)

    def run(self, w: Weights, x: jax.Array, state: State, at: At) -> tuple[jax.Array, State]:
        return self(w, x, at.span), {}

    def __call__(self, w: Weights, x: jax.Array, span: Span) -> jax.Array:
        gate, up, _ = self.names
        if gate == up:
            return self.after(w, w.linear(span, up, x), span)
        u = w.linear(span, up, x)
        return self._down(w, w.linear(span, gate, x) if gate else None, u, span)

    def after(self, w: Weights, both: jax.Array, span: Span) -> jax.Array:
        """The output from gate and up [.., 2 I]."""
        return self._down(w, *jnp.split(both, 2, axis=-1), span)

    def _down(self, w: Weights, gate: jax.Array | None, u: jax.Array, span: Span) -> jax.Array:
        y = w.linear(span, self.names[2], self.inside(gate, u))
        return y if self.down_scale == 1 else y * self.down_scale

    def inside(self, gate: jax.Array | None, u: jax.Array) -> jax.Array:
        """What is between the products."""
        if gate is None:
            return ACTIVATIONS[self.act](u)
        gate = gate if self.gate_scale == 1 else gate * self.gate_scale
        if self.limit is not None:
            gate, u = jnp.minimum(gate, self.limit), jnp.clip(u, -self.limit, self.limit)
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
            raise ConfigError(f"num_experts_per_tok is {self.chosen}; it must lie between 1 and {self.count}")

    @classmethod
    def of_scores(cls, c: ScoreKeys, bias: str = "gate.e_score_correction_bias") -> Router:
        """The router of DeepSeek-V3: sigmoids, and a bias for the choice alone; from the keys of a config."""
        normalize = 1e-20 if c.norm_topk_prob else None
        given = ("gate", "sigmoid", bias, c.n_group, c.topk_group)
        return cls(c.num_local_experts, c.num_experts_per_tok, *given, normalize, c.routed_scaling_factor)

    def tensors(self, width: int) -> Shapes:
        return linear(self.name, self.count, width) | ({} if self.bias is None else {self.bias: (self.count,)})

    def __call__(self, w: Weights, tokens: jax.Array, span: Span) -> tuple[jax.Array, jax.Array]:
        """Tokens [M, D] -> weights and experts [M, chosen]."""
        scores = span.linear(tokens, w[f"{self.name}.weight"])
        scores = jax.nn.softmax(scores, axis=-1) if self.score == "softmax" else jax.nn.sigmoid(scores)
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
class Experts(Part):
    """The chosen experts of each token, weighted, and a part that all tokens share.

    Attributes:
        one: an expert; of its names, "" is no gate.
        router: chooses.
        stacked: the names of weights [E, 2 I, D] and [E, D, I] in files that stack them; None: they are numbered.
        shared: an `Mlp` for all tokens, or None; shared_name: its name; shared_gate: the name of a product that gates it.
        latent: features that the experts work on, between two products; None: D.
    """

    one: Mlp
    router: Router
    stacked: tuple[str, str] | None = None
    shared: Mlp | None = None
    shared_name: str = "shared_expert"
    shared_gate: str | None = None
    latent: int | None = None

    @property
    def _each(self) -> dict[str, tuple[int, int]]:
        """The weights of an expert."""
        one = self.one if self.latent is None else replace(self.one, width=self.latent)
        return {
            name: (one.width, one.inner) if name == one.names[2] else (one.inner, one.width)
            for name in one.names
            if name
        }

    def tensors(self) -> Shapes:
        d, count = self.one.width, self.router.count
        shapes = self.router.tensors(d)
        if self.stacked is not None:
            both, down = self.stacked
            shapes |= {both: (count, 2 * self.one.inner, d), down: (count, d, self.one.inner)}
        for e in range(count) if self.stacked is None else ():
            shapes |= {f"experts.{e}.{name}.weight": shape for name, shape in self._each.items()}
        if self.latent is not None:
            shapes |= linear("fc1_latent_proj", self.latent, d, self.one.bias)
            shapes |= linear("fc2_latent_proj", d, self.latent, self.one.bias)
        if self.shared is not None:
            shapes |= under(self.shared_name, self.shared.tensors())
        return shapes if self.shared_gate is None else shapes | linear(self.shared_gate, 1, d)

    def merged(self) -> dict[str, Merge]:
        if self.stacked is not None:
            return {}
        return {
            f"experts.{name}": Merge(tuple(f"experts.{e}.{name}.weight" for e in range(self.router.count)))
            for name in self._each
        }

    def run(self, w: Weights, x: jax.Array, state: State, at: At) -> tuple[jax.Array, State]:
        span, tokens = at.span, x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(w, tokens, span)
        given = tokens if self.latent is None else w.linear(span, "fc1_latent_proj", tokens)
        y = self._sum(w, given, weights, chosen, span)
        y = (y if self.latent is None else w.linear(span, "fc2_latent_proj", y)).reshape(x.shape)
        if self.shared is not None:
            shared = self.shared(w.at(self.shared_name), x, span)
            if self.shared_gate is not None:
                shared = shared * jax.nn.sigmoid(w.linear(span, self.shared_gate, x))
            y = y + shared
        return y, {}

    def _sum(self, w: Weights, tokens: jax.Array, weights: jax.Array, chosen: jax.Array, span: Span) -> jax.Array:
        """The weighted sum of the outputs of the chosen experts, [M, D]."""
        each = chosen.shape[1]
        order = jnp.argsort(chosen.reshape(-1))  # the choices of all tokens, sorted by expert
        sizes = jnp.bincount(chosen.reshape(-1), length=self.router.count)
        given = tokens[order // each]

        def product(x: jax.Array, name: str) -> jax.Array:
            if len(order) <= self.router.count:  # a step: fewer matrices are read than there are
                weight, x = w[name][chosen.reshape(-1)[order]].astype(span.dtype), x.astype(span.dtype)
                return jnp.einsum("mc,mrc->mr", x, weight, preferred_element_type=tokens.dtype)
            weight = jnp.swapaxes(w[name], 1, 2).astype(span.dtype)
            return jax.lax.ragged_dot(x.astype(span.dtype), weight, sizes, preferred_element_type=tokens.dtype)

        gate, up, down = (f"experts.{name}" if name else "" for name in self.one.names)
        if self.stacked is not None:
            both, down = self.stacked
            g, u = jnp.split(product(given, both), 2, axis=-1)
        else:
            g, u = product(given, gate) if gate else None, product(given, up)
        y = product(self.one.inside(g, u), down)
        y = y * weights.reshape(-1)[order][:, None]
        return jnp.zeros_like(tokens).at[order // each].add(y)
