"""The properties that `check_model` checks: each is a function of a model that returns what is wrong, or None.

Shapes: T time, N batch, V vocabulary. Where two ways to compute the same are compared, all else is the same in both, so that
a fault shows in the property that it breaks, and in few others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrnn.errors import LayerError
from jrnn.testing.language_models import AdaptedModel
from jrnn.testing.properties import Property, differs, need, registered

MODEL_PROPERTIES: dict[str, Property] = {}
_property = registered(MODEL_PROPERTIES)
PADS = 3  # padding tokens
NAMES = {"state": "recurrent state", "window": "window of a convolution", "attention": "attention"}


def _run(model: AdaptedModel, tokens: Any, state: Any = None, one: bool = False, **options: Any) -> tuple[Any, Any]:
    """The logits, as float64, and the state; `one`: by `model.step`."""
    call = model.call if model.step is None or not one else model.step
    logits, state = call(np.asarray(tokens, np.int32), state, **options)
    logits = np.asarray(logits).astype(np.float64)
    if logits.shape != (*tokens.shape, model.vocabulary):
        raise LayerError(
            f"logits are {list(logits.shape)} for tokens {list(tokens.shape)} and a vocabulary of {model.vocabulary}"
        )
    return logits, state


def _logits(model: AdaptedModel, tokens: Any, state: Any = None, **options: Any) -> Any:
    return _run(model, tokens, state, **options)[0]


def _in_pieces(model: AdaptedModel, tokens: Any, sizes: Sequence[int], state: Any = None, one: bool = False) -> Any:
    found = []
    for part in np.split(tokens, np.cumsum(sizes)[:-1], axis=1):
        logits, state = _run(model, part, state, one)
        found.append(logits)
    return np.concatenate(found, axis=1)


def _others(model: AdaptedModel, tokens: Any) -> Any:
    """Other tokens in the place of each."""
    return (tokens + 1) % model.vocabulary


# Time --------------------------------------------------------------------------------------------------------------------


@_property("causality", "a later token changes no earlier logits")
def _(model: AdaptedModel, tolerance: float) -> str | None:
    whole = _logits(model, model.tokens)
    for t in range(1, model.size[0]):
        tokens = np.concatenate([model.tokens[:, :t], _others(model, model.tokens[:, t:])], axis=1)
        if wrong := differs("logits", _logits(model, tokens)[:, :t], whole[:, :t], tolerance):
            return f"with other tokens from step {t} on, {wrong}"
    return None


@_property("pieces", "a prompt read in pieces, the state handed on, gives what one call gives", "causality")
def _(model: AdaptedModel, tolerance: float) -> str | None:
    sizes = (2, 2, model.size[0] - 4)
    wrong = differs("logits", _in_pieces(model, model.tokens, sizes), _logits(model, model.tokens), tolerance)
    return wrong and f"in pieces of {sizes} tokens, {wrong}"


@_property("decoding", "token by token gives what one call gives", "causality")
def _(model: AdaptedModel, tolerance: float) -> str | None:
    ones, whole = (1,) * model.size[0], _logits(model, model.tokens)
    if wrong := differs("logits", _in_pieces(model, model.tokens, ones, one=True), whole, tolerance):
        return f"token by token from the first on, {wrong}"
    prompt, rest = np.split(model.tokens, [2], axis=1)
    found = _in_pieces(model, rest, ones[2:], _run(model, prompt)[1], one=True)
    if differs("logits", found, _logits(model, rest, _run(model, prompt)[1]), tolerance) is None:
        return None  # the state after the prompt may be wrong, which "pieces" finds
    wrong = differs("logits", found, whole[:, 2:], tolerance)
    return wrong and f"token by token after a prompt of 2 tokens, {wrong}"


@_property("resume", "a state that was saved and loaded goes on as the state itself")
def _(model: AdaptedModel, tolerance: float) -> str | None:
    need(model.stored is not None, "no way to save states was given (`stored`)")
    assert model.stored is not None
    prompt, rest = np.split(model.tokens, 2, axis=1) if model.size[0] % 2 == 0 else np.split(model.tokens, [3], axis=1)
    _, state = _run(model, prompt)
    loaded = model.stored(state)
    wrong = differs("logits", _logits(model, rest, loaded), _logits(model, rest, state), tolerance)
    return wrong and f"after {prompt.shape[1]} tokens, with the loaded state, {wrong}"


@_property("rollback", "a state that was kept is as it was after further tokens were read and taken back")
def _(model: AdaptedModel, tolerance: float) -> str | None:
    prompt, rest = np.split(model.tokens, [4], axis=1)
    _, state = _run(model, prompt)
    wanted = _logits(model, rest, state)
    _, state = _run(model, prompt)
    kept = model.snapshot(state)
    for _ in range(2):
        _, state = _run(model, _others(model, rest[:, :1]), state, one=True)
    wrong = differs("logits", _logits(model, rest, kept), wanted, tolerance)
    return wrong and f"after 2 tokens were taken back, {wrong}"


# Documents in one row ----------------------------------------------------------------------------------------------------


class _Leak(NamedTuple):
    kind: str
    text: str
    hides: bool  # whether other kinds of leaks cannot be seen behind it


def _leak(model: AdaptedModel, tolerance: float, handed: bool) -> _Leak | None:
    """Whether the last document of a row depends on the ones before it, and by what.

    A row is a document of two tokens, more documents of one token than the windows of convolutions reach back, and the last
    document of three. Three rows differ in the first document, or in those of one token, and have the same last one.
    What only the near ones change is a window. What the first one changes is a recurrent state or attention: it is the
    recurrent state of the lowest layer whose state is another, if the rest of that layer's state is the same.

    Args:
        handed: whether the first document is read in a call before.
    """
    middle = max(model.reach, 1)
    row = np.random.default_rng(1).integers(model.vocabulary, size=(1, 2 + middle + 3))
    tokens = np.tile(row, (3, 1))
    tokens[1, :2] = _others(model, tokens[1, :2])
    tokens[2, 2:-3] = _others(model, tokens[2, 2:-3])
    resets = np.zeros(tokens.shape, bool)
    resets[:, 2:-2] = True
    state = None
    if handed:
        _, state = _run(model, tokens[:, :2])
        tokens, resets = tokens[:, 2:], resets[:, 2:]
    found, state = _run(model, tokens, state, resets=resets)
    first, far, near = (found[k : k + 1, -3:] for k in range(3))
    where = "handed on from an earlier call" if handed else "in one call"
    if wrong := differs("logits", far, first, tolerance):
        kind = "state" if "state" in model.remembers else "attention"
        if {"state", "attention"} <= {*model.remembers} and model.leaves is not None:
            kind = "state" if _lowest(model.leaves(state), tolerance) == {"state"} else "attention"
        return _Leak(kind, f"with another document {middle} documents before, {where}, {wrong}", hides=True)
    if wrong := differs("logits", near, first, tolerance):
        kind = "window" if "window" in model.remembers else model.remembers[0]
        return _Leak(kind, f"with another document before, {where}, {wrong}", hides=False)
    return None


def _lowest(leaves: Mapping[str, tuple[str, Any]], tolerance: float) -> set[str]:
    """The kinds of leaves that differ between the first two rows, in the lowest layer in which some do."""
    layers: dict[int, set[str]] = {}
    for name, (kind, leaf) in leaves.items():
        if differs(name, np.asarray(leaf[1], np.float64), np.asarray(leaf[0], np.float64), tolerance):
            layers.setdefault(int(name.partition(".")[0]), set()).add(kind)
    return layers[min(layers)] if layers else set()


def _keeps_apart(kind: str) -> None:
    @_property(f"packed {kind}", f"no {NAMES[kind]} leaks from one document of a row into the next")
    def _(model: AdaptedModel, tolerance: float) -> str | None:
        need(model.resets, "the model takes no resets")
        need(kind in model.remembers, f"the model has no {NAMES[kind]}")
        for handed in (False, True) if model.resets_of_states else (False,):
            leak = _leak(model, tolerance, handed)
            if leak is not None and leak.kind == kind:
                return leak.text
            need(leak is None or not leak.hides, f"what packed {leak and leak.kind} found hides it")
        return None


for _kind in NAMES:
    _keeps_apart(_kind)


@_property("resets", "a reset at any step, the first and the last too, begins a text in its row alone", "causality")
def _(model: AdaptedModel, tolerance: float) -> str | None:
    need(model.resets, "the model takes no resets")
    steps, half = model.size[0], model.size[0] // 2

    def flagged(tokens: Any, t: int, rows: Any = slice(None), state: Any = None) -> Any:
        resets = np.zeros(tokens.shape, bool)
        resets[rows, t] = True
        return _logits(model, tokens, state, resets=resets)

    whole = _logits(model, model.tokens)
    if wrong := differs("logits", flagged(model.tokens, 0), whole, tolerance):
        return f"with a reset before the first step of a text, {wrong}"
    if wrong := differs("logits", flagged(model.tokens, half, 0)[1:], whole[1:], tolerance):
        return f"with a reset in sequence 0 before step {half}, in the others {wrong}"
    last = flagged(model.tokens[:, :-1], steps - 2)[:, -1]
    if wrong := differs("logits", last, flagged(model.tokens, steps - 2)[:, -2], tolerance):
        return f"with a reset before the last of {steps - 1} steps, {wrong} as in a longer row"
    tokens = np.concatenate([model.tokens[:, :half], np.tile(model.tokens[:1, half:], (model.size[1], 1))], axis=1)
    found, alone = flagged(tokens, half)[:, half:], _logits(model, tokens[:, half:])
    leaks = differs("logits", found, np.repeat(found[:1], len(found), axis=0), tolerance)
    if leaks is None and (wrong := differs("logits", found, alone, tolerance)):
        return f"with a reset before step {half}, {wrong} as of the sequence alone"
    if model.resets_of_states:
        _, state = _run(model, tokens[:, :half])
        if wrong := differs("logits", flagged(tokens[:, half:], 0, state=state), found, tolerance):
            return f"with a reset before the first step of a second call, {wrong} as with a reset inside a call"
    return None


# The batch and padding ---------------------------------------------------------------------------------------------------


def _padded(model: AdaptedModel, left: bool) -> tuple[Any, Any]:
    """The tokens with the last ones replaced by padding, and its mask."""
    real = model.tokens[:, :-PADS]
    mask, pads = np.ones_like(real), np.zeros_like(real[:, :PADS])
    parts = ((pads, pads), (real, mask)) if left else ((real, mask), (pads, pads))
    tokens, mask = (np.concatenate(arrays, axis=1) for arrays in zip(*parts))
    return tokens, mask


def _padding(model: AdaptedModel, tolerance: float, left: bool) -> str | None:
    need(model.masks, "the model takes no attention_mask")
    tokens, mask = _padded(model, left)
    more = model.tokens[:, :2]
    wanted, state = _run(model, model.tokens[:, :-PADS])
    later = _in_pieces(model, more, (1, 1), state, one=True)
    for fill in (0, model.vocabulary - 1):
        filled = np.where(mask == 1, tokens, fill)
        found, state = _run(model, filled, attention_mask=mask)
        found = found[:, PADS:] if left else found[:, :-PADS]
        if wrong := differs("logits", found, wanted, tolerance):
            return f"with {PADS} tokens {fill} as padding, {wrong}"
        if left or model.ends:
            found = _in_pieces(model, more, (1, 1), state, one=True)
            if wrong := differs("logits", found, later, tolerance):
                return f"with {PADS} tokens {fill} as padding, in the steps after it, {wrong}"
    return None


@_property("right padding", "padding after a text changes nothing", "causality")
def _(model: AdaptedModel, tolerance: float) -> str | None:
    return _padding(model, tolerance, False)


@_property("left padding", "padding before a text changes nothing")
def _(model: AdaptedModel, tolerance: float) -> str | None:
    return _padding(model, tolerance, True)


@_property("batch", "a sequence gives in a batch what it gives alone, whatever padding the others have")
def _(model: AdaptedModel, tolerance: float) -> str | None:
    whole = _logits(model, model.tokens)
    for n in range(model.size[1]):
        alone = _logits(model, model.tokens[n : n + 1])
        if wrong := differs("logits", whole[n : n + 1], alone, tolerance):
            return f"for sequence {n} of the batch, {wrong} alone"
    if not model.masks:
        return None
    for left in (False, True):
        tokens, mask = _padded(model, left)
        tokens[::2], mask[::2] = model.tokens[::2], 1  # every second row is padded
        found = _logits(model, tokens, attention_mask=mask)
        for n in range(2):
            alone = _logits(model, tokens[n : n + 1], attention_mask=mask[n : n + 1])
            live = mask[n : n + 1, :, None] == 1
            if wrong := differs("logits", np.where(live, found[n : n + 1], 0), np.where(live, alone, 0), tolerance):
                side = "left" if left else "right"
                return f"with padding on the {side} of every second sequence, for sequence {n}, {wrong} alone"
    return None


# Devices, files, repetition ----------------------------------------------------------------------------------------------


@_property("devices", "with time divided among devices, logits are those of one device", "causality", "pieces")
def _(model: AdaptedModel, tolerance: float) -> str | None:
    need(model.over_devices is not None, "no way to divide time among devices was given (`over_devices`)")
    assert model.over_devices is not None
    count = jax.device_count()
    need(count > 1, "there is only one device")
    tokens = np.resize(model.tokens, (model.size[1], count * -(-model.size[0] // count)))
    found = np.asarray(model.over_devices(tokens)).astype(np.float64)
    wrong = differs("logits", found, _logits(model, tokens), tolerance)
    return wrong and f"over {count} devices, {wrong}"


@_property("save and load", "a model that was saved and loaded gives the same logits")
def _(model: AdaptedModel, tolerance: float) -> str | None:
    need(model.reloaded is not None, "no way to save the model was given (`reloaded`)")
    assert model.reloaded is not None
    wrong = differs("logits", _logits(model.reloaded(), model.tokens), _logits(model, model.tokens), tolerance)
    return wrong and f"of the loaded model, {wrong}"


@_property("determinism", "logits are finite, and two calls give the same bits")
def _(model: AdaptedModel, tolerance: float) -> str | None:
    first = _logits(model, model.tokens)
    if not np.isfinite(first).all():
        at = [int(i) for i in np.argwhere(~np.isfinite(first))[0]]
        return f"logits{at} is {first[tuple(at)]}"
    wrong = differs("logits", _logits(model, model.tokens), first, 0.0)
    return wrong and f"in the second call, {wrong}"
