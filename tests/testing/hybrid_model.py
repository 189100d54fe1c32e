"""A language model in numpy that is small enough to read: a convolution, a gated recurrence, and attention.

test_check_model.py runs it with the faults of planted_faults.toml, each of which replaces a part of a line.

Shapes: T time, N batch, D width, V vocabulary, K taps, S tokens so far.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

V, D, K = 11, 4, 4
SHAPES = {
    "embedding": (V, D),
    "taps": (K, D),
    "gate": (D, D),
    "query": (D, D),
    "key": (D, D),
    "head": (D, V),
}
calls = itertools.count(1)


def rows(flags):
    """Flags [N], that combine with arrays [N, D]."""
    return flags[:, None]


class Hybrid:
    """`call(tokens, state, attention_mask, resets) -> (logits, state)`, one step after the other."""

    def __init__(self, weights=None):
        rng = np.random.default_rng(0)
        self.weights = weights or {
            name: rng.standard_normal(shape) * 0.7 for name, shape in SHAPES.items()
        }

    def first(self, N):
        """The state before the first token: `document` is the one of each key, -1 for padding, `now` the one of the step."""
        state = {
            "window": np.zeros((N, K - 1, D)),
            "h": np.zeros((N, D)),
            "keys": np.zeros((N, 0, D)),
        }
        return state | {
            "document": np.zeros((N, 0), int),
            **{n: np.zeros(N, int) for n in ("now", "position", "seen")},
        }

    def call(self, tokens, state, attention_mask=None, resets=None):
        (N, T), w = tokens.shape, self.weights
        live = np.ones((N, T), bool) if attention_mask is None else attention_mask == 1
        given = self.first(N) if state is None else state
        window, h, keys, document, now, position, seen = (np.array(leaf) for leaf in given.values())
        before, logits = h, np.zeros((N, T, V))
        for t in range(T):
            on = live[:, t]
            new = on & (np.zeros(N, bool) if resets is None else resets[:, t])
            window = np.where(new[:, None, None], 0, window)
            h = np.where(rows(new), 0, h)
            position = np.where(new, 0, position)
            now = now + new
            x = w["embedding"][tokens[:, t]] + np.sin(rows(position) + np.arange(D))
            past = np.concatenate([window, x[:, None]], axis=1)
            u = np.tanh((past * w["taps"]).sum(1))
            rate = 0.8 / (1 + np.exp(-u @ w["gate"]))
            before = np.where(rows(on), h, before)
            h = np.where(rows(on), rate * h + (1 - rate) * u, h)
            window = np.where(on[:, None, None], past[:, 1:], window)
            keys = np.concatenate([keys, (x @ w["key"])[:, None]], axis=1)
            document = np.concatenate([document, rows(np.where(on, now, -1))], axis=1)
            reads = document == rows(now)
            scores = np.where(reads, (keys @ (h @ w["query"])[..., None])[..., 0], -np.inf)
            scores = np.exp(scores - scores.max(1, keepdims=True, initial=-1e9))
            shares = scores / np.maximum(scores.sum(1, keepdims=True), 1e-9)
            y = h + (shares[..., None] * keys).sum(1)
            logits[:, t] = y @ w["head"]
            position, seen = position + on, seen + on
        after = dict(zip(given, (window, h, keys, document, now, position, seen)))
        return logits, after

    def leaves(self, state):
        """What later tokens can read of a state."""
        keys = state["keys"] * (state["document"] == rows(state["now"]))[..., None]
        return {
            "0.window": ("window", state["window"]),
            "0.h": ("state", state["h"]),
            "1.keys": ("attention", keys),
        }

    def stored(self, state):
        with tempfile.TemporaryFile() as file:
            np.savez(file, **state)
            file.seek(0)
            return dict(np.load(file))

    def save_pretrained(self, folder):
        np.savez(Path(folder) / "weights.npz", **self.weights)

    @classmethod
    def from_pretrained(cls, folder):
        return cls(dict(np.load(Path(folder) / "weights.npz")))

    def over_devices(self, tokens):
        """In two parts, with the state handed from one to the other."""
        state, pieces = None, []
        for part in np.split(tokens, 2, axis=1):
            logits, state = self.call(part, state)
            pieces.append(logits)
        return np.concatenate(pieces, axis=1)


class AsTransformers(Hybrid):
    """The same as transformers' models are called: a cache is written in place, and positions that begin anew are resets."""

    config = SimpleNamespace(vocab_size=V, conv_kernel=K)

    def __call__(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=True,
    ):
        mask = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        logits, after = self.call(
            input_ids, past_key_values, mask, None if use_cache else position_ids == 0
        )
        cache = {} if past_key_values is None else past_key_values
        cache.update(after)
        return SimpleNamespace(logits=logits, past_key_values=cache)
