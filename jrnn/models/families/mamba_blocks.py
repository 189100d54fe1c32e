"""What mamba, falcon_mamba and mamba2 share: residual blocks of a norm and a mixer, with their names in the files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax

from jrnn.models.family import Shapes, State, Weights, in_layer, of_layer
from jrnn.nn.span import Span, rms_norm

RENAMED = (("backbone.embedding.", "backbone.embeddings."),)  # in the files of the first releases
Mixer = Callable[[Any, Weights, jax.Array, State, Span], tuple[jax.Array, State]]


class Config(Protocol):
    """The keys that the blocks read."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_norm_epsilon: float
    conv_kernel: int
    use_bias: bool
    use_conv_bias: bool

    @property
    def inner(self) -> int: ...


def tensors(c: Config, rows: int, channels: int, mixer: Shapes) -> Shapes:
    """The shapes of all tensors but the output layer.

    Args:
        c: the config.
        rows: of the input projection.
        channels: of the convolution.
        mixer: the further tensors of a mixer.
    """
    block = {
        "norm.weight": (c.hidden_size,),
        "mixer.in_proj.weight": (rows, c.hidden_size),
        "mixer.conv1d.weight": (channels, 1, c.conv_kernel),
        "mixer.out_proj.weight": (c.hidden_size, c.inner),
    }
    block |= {f"mixer.{name}": shape for name, shape in mixer.items()}
    if c.use_bias:
        block |= {"mixer.in_proj.bias": (rows,), "mixer.out_proj.bias": (c.hidden_size,)}
    if c.use_conv_bias:
        block["mixer.conv1d.bias"] = (channels,)
    shapes: Shapes = {"backbone.embeddings.weight": (c.vocab_size, c.hidden_size)}
    for k in range(c.num_hidden_layers):
        shapes |= {f"backbone.layers.{k}.{name}": shape for name, shape in block.items()}
    return shapes | {"backbone.norm_f.weight": (c.hidden_size,)}


def blocks(mixer: Mixer) -> Callable[[Any, Weights, jax.Array, State, Span], tuple[jax.Array, State]]:
    """Returns the `run` of a family: x + mixer(norm(x)) for each layer, and a norm."""

    def run(c: Config, w: Weights, x: jax.Array, state: State, span: Span) -> tuple[jax.Array, State]:
        after: State = {}
        for k in range(c.num_hidden_layers):
            block = w.at(f"backbone.layers.{k}")
            y = rms_norm(x, block["norm.weight"], c.layer_norm_epsilon)
            y, own = mixer(c, block.at("mixer"), y, in_layer(k, state), span)
            after |= of_layer(k, own)
            x = x + y
        return rms_norm(x, w["backbone.norm_f.weight"], c.layer_norm_epsilon), after

    return run
