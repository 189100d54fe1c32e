"""What a family of models is: the keys of its config, and a decoder made of parts, which have names in the files.

A family is a table: `decoder(config)` names the parts of each layer. A part has its tensors, its state and its computation.

Shapes: T time, N batch, D the model's width, V vocabulary.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jrnn.errors import ConfigError
from jrnn.models.model_config import DecoderKeys, read_config
from jrnn.nn.checks import Shape
from jrnn.nn.span import Pair, Span, along_last, layer_norm, rms_norm

Shapes = dict[str, Shape]
State = dict[str, Array]
Outputs = tuple[Array, State]  # what is computed, and the next state
# The arrays of a state that a layer's recurrence carries, and that a first state may hold: windows and memories of tokens
# are of a text.
RECURRENT = ("S", "ssm", "lru", "sum")
EMPTY = -1  # the position of an empty slot of a memory
NOTHING = -1e30  # the greatest exponent of a mean over nothing
# what is in the arrays of a state before the first token, if not zeros
FIRST = {
    "places": EMPTY,
    "top": NOTHING,
}


class Scoped(NamedTuple):
    """Where a part runs: the parameters whose names begin with a prefix, by the rest of their names, and the steps.

    Attributes:
        params: all parameters of the model.
        span: the steps.
        prefix: how the names of the part's own parameters begin.
        positions: [T, N], counted in each text; None if no part asks for them.
        embedded: [T, N, D], what the first layer got.
        shared: what a layer leaves to later ones.
        first: the layer's recurrent state before a text, by name, [N, ...]; empty if it is zeros.
    """

    params: Mapping[str, Array]
    span: Span
    prefix: str = ""
    positions: Any = None
    embedded: Any = None
    shared: Any = None
    first: Mapping[str, Array] = MappingProxyType({})

    def __getitem__(self, name: str) -> Array:  # type: ignore[override]
        return self.params[self.prefix + name]

    def get(self, name: str) -> Array | None:
        return self.params.get(self.prefix + name)

    def at(self, more: str) -> Scoped:
        return self._replace(prefix=f"{self.prefix}{more}." if more else self.prefix)

    def linear(self, name: str, x: Array) -> Array:
        """x weight^T + bias, where the bias is optional."""
        return self.span.linear(x, self[f"{name}.weight"], self.get(f"{name}.bias"))

    def scan(self, step: Callable[[Any, Any], Any], state: State, name: str, xs: Any) -> Any:
        """The layer's recurrence over xs from one array of its state; see `Span.scan`."""
        return self.span.scan(step, state[name], xs, self.first.get(name))

    def convolve(self, name: str, x: Array, window: Array) -> Pair:
        """The causal convolution of each channel, and the next window; see `Span.convolve`."""
        weight = self[f"{name}.weight"][:, 0]
        return self.span.convolve(x, window, weight, self.get(f"{name}.bias"))


class Merge(NamedTuple):
    """The tensors of the files that make one parameter: stacked on a new first axis, or joined on their first axis."""

    names: tuple[str, ...]
    stacks: bool = True

    def under(self, prefix: str) -> Merge:
        return Merge(tuple(under(prefix, dict.fromkeys(self.names))), self.stacks)

    def shape(self, shapes: Shapes) -> Shape:
        rows, *rest = shapes[self.names[0]]
        if self.stacks:
            return (len(self.names), rows, *rest)
        return (sum(shapes[name][0] for name in self.names), *rest)


class Block(abc.ABC):
    """A part of a layer, a frozen dataclass of its sizes. It needs `tensors` and `run`, and `holds` for its state."""

    places: bool = False  # whether it asks for positions

    @abc.abstractmethod
    def tensors(self) -> Shapes:
        """The shape of each tensor, by its name in the files without the part's own."""

    def merged(self) -> dict[str, Merge]:
        """The parameters that are made of several tensors."""
        return {}

    def holds(self, room: int) -> Shapes:
        """The shape of each array of the state, without N; `room`: for how many tokens, if it remembers them."""
        return {}

    @abc.abstractmethod
    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        """[T, N, D] -> [T, N, D] and the next state."""


def linear(name: str, rows: int, *columns: int, bias: bool = False) -> Shapes:
    """The tensors of a product; without columns, of a norm."""
    return {f"{name}.weight": (rows, *columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def convolution(name: str, channels: int, taps: int, bias: bool = False) -> Shapes:
    """The tensors of `Scoped.convolve`."""
    return linear(name, channels, 1, taps, bias=bias)


def products(rows: Mapping[str, int], columns: int, bias: bool = False) -> Shapes:
    """The tensors of several products of the same input; `rows`: by their names."""
    shapes: Shapes = {}
    for name, size in rows.items():
        shapes |= linear(name, size, columns, bias=bias)
    return shapes


def under(name: str, shapes: Mapping[str, Any]) -> dict[str, Any]:
    """What is named below a part."""
    return {f"{name}.{key}" if name else key: value for key, value in shapes.items()}


@dataclass(frozen=True)
class Norm(Block):
    """x / rms(x) times a gain; `centered`: a layer norm; `offset`: the gain is 1 + weight; `bias`: a bias is added."""

    size: int
    epsilon: float
    offset: bool = False
    centered: bool = False
    bias: bool = False

    def tensors(self) -> Shapes:
        return {"weight": (self.size,)} | ({"bias": (self.size,)} if self.bias else {})

    def __call__(self, w: Scoped, x: Array) -> Array:
        gain = w["weight"].astype(x.dtype)
        gain = 1.0 + gain if self.offset else gain
        if self.centered:
            y = layer_norm(x, gain, epsilon=self.epsilon)
        else:
            y = rms_norm(x, gain, self.epsilon)
        return y + along_last(w["bias"].astype(x.dtype), x) if self.bias else y

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        return self(w, x), {}


@dataclass(frozen=True)
class Branch:
    """x <- keep x + scale after(part(before(x))).

    Attributes:
        name: the part's name in a layer.
        part: what is computed.
        before, after: the names of norms in the layer, or None.
        norm: what these norms are; None: as the decoder's last.
        keep, scale: factors.
        of_normed: whether what is kept is before(x) instead of x.
    """

    name: str
    part: Block
    before: str | None = None
    after: str | None = None
    norm: Norm | None = None
    keep: float = 1.0
    scale: float = 1.0
    of_normed: bool = False


Mixers = dict[str, tuple[str, Block]]  # the name in a layer, and the part, of each type of layer


def pairs(
    mixers: Iterable[tuple[str, Block]], name: str, feeds: Iterable[Block],
    before: str = "input_layernorm", between: str = "post_attention_layernorm",
) -> Iterator[tuple[Branch, ...]]:  # fmt: skip
    """Layers of a mixer and a feed-forward part of that name, each after a norm."""
    return (
        (Branch(*mixer, before), Branch(name, feed, between)) for mixer, feed in zip(mixers, feeds)
    )


class Names(NamedTuple):
    """What a family's files call what every decoder has."""

    embedding: str = "model.embed_tokens.weight"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head.weight"


DEFAULT_NAMES = Names()


@dataclass(frozen=True)
class Decoder:
    """A language model: an embedding, layers of branches, a norm, and an output layer.

    Attributes:
        width, vocabulary: D, V.
        layers: the branches of each layer.
        norm: the last norm.
        tied: whether the output layer is the embedding.
        names: the names in the files.
        embed: what the embedded values go through.
        logits: what the logits go through.
    """

    width: int
    vocabulary: int
    layers: tuple[tuple[Branch, ...], ...]
    norm: Norm
    tied: bool = False
    names: Names = DEFAULT_NAMES
    embed: Callable[[Array], Array] = lambda x: x
    logits: Callable[[Array], Array] = lambda y: y

    @classmethod
    def of(
        cls,
        c: DecoderKeys,
        layers: Iterable[tuple[Branch, ...]],
        norm: Norm | None = None,
        **more: Any,
    ) -> Decoder:
        """With what a config has; `more`: the other attributes."""
        norm = norm or Norm(c.hidden_size, c.rms_norm_eps)
        return cls(c.hidden_size, c.vocab_size, tuple(layers), norm, c.tie_word_embeddings, **more)

    def _parts(self) -> Iterator[tuple[str, Block]]:
        """The parts and norms of all layers, by their names in the files."""
        for k, layer in enumerate(self.layers):
            for branch in layer:
                norm = branch.norm or self.norm
                parts = [(branch.before, norm), (branch.after, norm), (branch.name, branch.part)]
                for name, part in parts:
                    if name is not None:
                        yield f"{self.names.layers}.{k}.{name}".removesuffix("."), part

    def shapes(self) -> Shapes:
        """The shape of every tensor of the files."""
        shapes: Shapes = {self.names.embedding: (self.vocabulary, self.width)}
        for name, part in self._parts():
            shapes |= under(name, part.tensors())
        shapes |= under(self.names.norm, self.norm.tensors())
        return shapes if self.tied else shapes | {self.names.head: (self.vocabulary, self.width)}

    def parameters(self) -> dict[str, Merge | None]:
        """The names of parameters, with the tensors that make each, or None for the tensor of that name."""
        merged: dict[str, Merge] = {}
        for name, part in self._parts():
            for key, merge in part.merged().items():
                merged[f"{name}.{key}"] = merge.under(name)
        parameters: dict[str, Merge | None] = dict.fromkeys(self.shapes())
        for merge in merged.values():
            for name in merge.names:
                parameters.pop(name, None)
        return parameters | merged

    @cached_property
    def remembers(self) -> str | None:
        """The name of an array [N, S] of the state that grows with the tokens, if a layer attends to all of them."""
        for k, layer in enumerate(self.layers):
            if any(branch.part.holds(0) != branch.part.holds(1) for branch in layer):
                return f"{k}.places"
        return None

    @cached_property
    def places(self) -> bool:
        for layer in self.layers:
            for branch in layer:
                if branch.part.places:
                    return True
        return False

    def fresh(self, batch: int, dtype: Any, room: int, first: Mapping[str, Array]) -> State:
        """The state before the first token, arrays [N, ...] by layer and name, as `3.conv`.

        Args:
            first: arrays [1, ...] of the names in `first_shapes`, in the place of zeros.
        """
        state: State = {"position": jnp.zeros(batch, jnp.int32)} if self.places else {}
        for k, layer in enumerate(self.layers):
            for branch in layer:
                for name, shape in branch.part.holds(room).items():
                    key = f"{k}.{name}"
                    kind = jnp.int32 if name == "places" else dtype
                    value = FIRST.get(name, 0)
                    if name == "top" and f"{k}.sum" in first:
                        value = 0  # else the sum would count as nothing
                    value = first[key].astype(dtype) if key in first else jnp.asarray(value, kind)
                    state[key] = jnp.broadcast_to(value, (batch, *shape))
        return state

    def first_shapes(self) -> Shapes:
        """The shape [1, ...] of each array of a first state, by layer and name."""
        shapes: Shapes = {}
        for k, layer in enumerate(self.layers):
            for branch in layer:
                for name, shape in branch.part.holds(0).items():
                    if name in RECURRENT:
                        shapes[f"{k}.{name}"] = (1, *shape)
        return shapes

    def run(self, w: Scoped, x: Array, state: State) -> Outputs:
        """Embedded tokens [T, N, D] -> hidden values [T, N, D] after the last norm, and the next state."""
        x = self.embed(x)
        after = dict(state)
        positions = None
        if self.places:
            positions, after["position"] = w.span.positions(state["position"])
        w = w._replace(positions=positions, embedded=x, shared={})
        for k, layer in enumerate(self.layers):
            prefix = f"{k}."
            own = {}
            first = {}
            for name, leaf in state.items():
                if name.startswith(prefix):
                    own[name.removeprefix(prefix)] = leaf
                    if name in w.first:
                        value = w.first[name].astype(leaf.dtype)
                        first[name.removeprefix(prefix)] = jnp.broadcast_to(value, leaf.shape)
            here = w.at(f"{self.names.layers}.{k}")._replace(first=first)
            for branch in layer:
                x, new = _run(branch, branch.norm or self.norm, here, x, own)
                after |= {prefix + name: leaf for name, leaf in new.items()}
        return self.norm(w.at(self.names.norm), x), after


def _run(branch: Branch, norm: Norm, w: Scoped, x: Array, state: State) -> Outputs:
    y = x if branch.before is None else norm(w.at(branch.before), x)
    kept = y if branch.of_normed else x
    y, state = branch.part.run(w.at(branch.name), y, state)
    y = y if branch.after is None else norm(w.at(branch.after), y)
    y = y if branch.scale == 1 else y * branch.scale
    if branch.keep == 0:
        return y, state
    return (kept if branch.keep == 1 else kept * branch.keep) + y, state


@dataclass(frozen=True, eq=False)  # compared by identity: there is one of each
class Family:
    """A family of models, by the `model_type` of config.json.

    Attributes:
        name: the `model_type`.
        config: a frozen dataclass, whose fields are the keys of config.json that count.
        decoder: the model of a config; raises a ConfigError if it is not supported.
        aliases: other names of keys, and the names that they have here.
        only: keys that change what is computed and are not supported, with the values that change nothing.
        renamed: beginnings of names in older files, and what they are now.
        unused: beginnings or ends of names of tensors that are not read.
        defaults: of keys, where they differ from the defaults of `config`.
    """

    name: str
    config: type
    decoder: Callable[[Any], Decoder]
    aliases: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def read(self, given: Mapping[str, Any], where: str, by_hand: bool) -> Any:
        """The config from the keys of config.json, checked by making its decoder; `by_hand`: see `read_config`."""
        config = read_config(self, given, where, by_hand)
        try:
            decoder_of(self, config)
        except ConfigError as error:
            raise error.at(where) from None
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}: these sizes make no {self.name} model: {error}") from error
        return config


@lru_cache(maxsize=64)
def decoder_of(family: Family, config: Any) -> Decoder:
    """The decoder of a config; the same object for the same config."""
    return family.decoder(config)
