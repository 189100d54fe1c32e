"""Text from a language model, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import DataError
from jrnn.train.models.model import Model, Params
from jrnn.train.text import Chunk
from jrnn.train.toml_codec import require


@dataclass(frozen=True)
class SampleConfig:
    """The text that is written when training ends."""

    length: int = 400
    temperature: float = 0.7
    prompt: str = "The "

    def __post_init__(self):
        require(self.length >= 1, "sample.length must be at least 1", self.length)
        require(self.temperature >= 0, "sample.temperature must not be negative (0: the likeliest)", self.temperature)
        require(self.prompt != "", "sample.prompt must hold at least one character", self.prompt)


def generate(model: Model, params: Params, prompt: np.ndarray, settings: SampleConfig, seed: int = 0) -> np.ndarray:
    """`prompt` and `settings.length` more tokens, as numbers; DataError where the prompt is empty."""
    if not len(prompt):
        raise DataError("the prompt is empty; it must hold at least one character")
    forced = np.full(len(prompt) + settings.length, -1, np.int32)
    forced[: len(prompt)] = prompt

    @jax.jit
    def run(params: Params, forced: Any, key: Any) -> Any:
        def body(loop, at):
            carry, drawn = loop
            given, key = at
            token = jnp.where(given >= 0, given, drawn)
            logits, carry = model.predict(params, carry, Chunk(token[None, None], None, False))
            logits = logits[0, 0]
            if settings.temperature == 0:
                drawn = jnp.argmax(logits)
            else:
                drawn = jax.random.categorical(key, logits / settings.temperature)
            return (carry, drawn.astype(jnp.int32)), token

        keys = jax.random.split(key, len(forced))
        start = (model.initial_carry(1), jnp.zeros((), jnp.int32))
        return jax.lax.scan(body, start, (forced, keys))[1]

    return np.asarray(run(params, forced, jax.random.key(seed)))
