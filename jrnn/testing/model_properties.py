"""The properties that `check_model` checks: each is a function of a model that returns what is wrong, or None.

Shapes: T time, N batch, V vocabulary. Where two ways to compute the same are compared, all else is the same in both, so that
a fault shows in the property that it breaks, and in few others.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrnn.errors import LayerError
from jrnn.testing.invariance import Wrong, differs
from jrnn.testing.language_models import AdaptedModel
from jrnn.testing.properties import Property, need, registered
from jrnn.testing.subjects import Outputs, PyTree

MODEL_PROPERTIES: dict[str, Property] = {}
_property = registered(MODEL_PROPERTIES)
NAMES = {"state": "recurrent state", "window": "window of a convolution", "attention": "attention"}


def _run(
    model: AdaptedModel, tokens: np.ndarray, state: PyTree = None, one: bool = False, **options: Any
) -> Outputs:
    """The logits, as float64, and the state; `one`: by `model.step`."""
    call = model.call if model.step is None or not one else model.step
    logits, state = call(np.asarray(tokens, np.int32), state, **options)
    logits = np.asarray(logits).astype(np.float64)
    if logits.shape != (*tokens.shape, model.vocabulary):
        raise LayerError(
            f"logits are {list(logits.shape)} for tokens {list(tokens.shape)} and a vocabulary of {model.vocabulary}"
        )
    return logits, state


def _logits(model: AdaptedModel, tokens: np.ndarray, state: PyTree = None, **options: Any) -> Any:
    return _run(model, tokens, state, **options)[0]


def _own(model: AdaptedModel) -> Any:
    """The logits of the model's own tokens."""
    return _logits(model, model.tokens)


def _differ(computed: Any, wanted: Any, tolerance: float) -> Wrong:
    return differs("logits", computed, wanted, tolerance)


def _in_pieces(
    model: AdaptedModel,
    tokens: np.ndarray,
    sizes: Sequence[int],
    state: PyTree = None,
    one: bool = False,
) -> Any:
    pieces = []
    for part in np.split(tokens, np.cumsum(sizes)[:-1], axis=1):
        logits, state = _run(model, part, state, one)
        pieces.append(logits)
    return np.concatenate(pieces, axis=1)


def _halves(model: AdaptedModel) -> Outputs:
    return model.tokens[:, : model.size[0] // 2], model.tokens[:, model.size[0] // 2 :]


def _others(model: AdaptedModel, tokens: np.ndarray) -> Any:
    """Replaces each token by another one."""
    return (tokens + 1) % model.vocabulary


# Time --------------------------------------------------------------------------------------------------------------------


@_property("causality", "a later token changes no earlier logits")
def _(model: AdaptedModel, tolerance: float) -> Wrong:
    whole = _own(model)
    for t in range(1, model.size[0]):
        tokens = np.concatenate([model.tokens[:, :t], _others(model, model.tokens[:, t:])], axis=1)
        if wrong := _differ(_logits(model, tokens)[:, :t], whole[:, :t], tolerance):
            return f"with other tokens from step {t} on, {wrong}"
    return None


@_property(
    "pieces", "a prompt read in pieces, the state handed on, gives what one call gives", "causality"
)
def _(model: AdaptedModel, tolerance: float) -> Wrong:
    sizes = (2, 2, model.size[0] - 4)
    wrong = _differ(_in_pieces(model, model.tokens, sizes), _own(model), tolerance)
    return wrong and f"in pieces of {sizes} tokens, {wrong}"


@_property("decoding", "token by token gives what one call gives", "causality")
def _(model: AdaptedModel, tolerance: float) -> Wrong:
    whole = _own(model)
    if wrong := _differ(
        _in_pieces(model, model.tokens, (1,) * model.size[0], one=True), whole, tolerance
    ):
        return f"token by token from the first on, {wrong}"
    prompt, rest = _halves(model)
    computed = _in_pieces(model, rest, (1,) * rest.shape[1], _run(model, prompt)[1], one=True)
    if _differ(computed, _logits(model, rest, _run(model, prompt)[1]), tolerance) is None:
        return None  # the state after the prompt may be wrong, which "pieces" finds
    wrong = _differ(computed, whole[:, -rest.shape[1] :], tolerance)
    return wrong and f"token by token after a prompt of {prompt.shape[1]} tokens, {wrong}"


@_property("resume", "a state that was saved and loaded goes on as the state itself")
def _(model: AdaptedModel, tolerance: float) -> Wrong:
    need(model.stored is not None, "no way to save states was given (`stored`)")
    prompt, rest = _halves(model)
    _, state = _run(model, prompt)
    loaded = model.stored(state)
    wrong = _differ(_logits(model, rest, loaded), _logits(model, rest, state), tolerance)
    return wrong and f"after {prompt.shape[1]} tokens, with the loaded state, {wrong}"


@_property(
    "rollback", "a state that was kept is as it was after further tokens were read and taken back"
)
def _(model: AdaptedModel, tolerance: float) -> Wrong:
    prompt, rest = _halves(model)
    _, state = _run(model, prompt)
    wanted = _logits(model, rest, state)
    _, state = _run(model, prompt)
    kept = model.snapshot(state)
    for _ in range(2):
        _, state = _run(model, _others(model, rest[:, :1]), state, one=True)
    wrong = _differ(_logits(model, rest, kept), wanted, tolerance)
    return wrong and f"after 2 tokens were taken back, {wrong}"


# Documents in one row ----------------------------------------------------------------------------------------------------


class _Leak(NamedTuple):
    kind: str
    text: str
    hides: bool  # whether other kinds of leaks cannot be seen behind it


def _leak(model: AdaptedModel, tolerance: float, handed: bool) -> _Leak | None:
    """Whether the last document of a row depends on the ones before it, and through which state.

    A row is a document of two tokens, as many documents of one token as the windows of convolutions reach back, and the last
    document of three. Two rows differ in the first document, or in the documents of one token, and have the same last one.
    What only the near ones change is a window. What the first one changes is a recurrent state or attention: it is the
    recurrent state of the lowest layer whose state is another, if the rest of that layer's state is the same.

    Args:
        handed: whether the first document is read in a call before.
    """
    middle = max(model.reach, 1)
    row = np.random.default_rng(1).integers(model.vocabulary, size=2 + middle + 3)
    resets = np.zeros((2, len(row)), bool)
    resets[:, 2:-2] = True

    def ends(changed: slice) -> tuple[Any, Any, Any]:
        """The logits of the last document in two rows, where the second has other tokens before it; and the state."""
        tokens = np.stack([row, row])
        state = None
        start = 0
        tokens[1, changed] = _others(model, row[changed])
        if handed:
            _, state = _run(model, tokens[:, :2])
            start = 2
        logits, state = _run(model, tokens[:, start:], state, resets=resets[:, start:])
        return logits[:1, -3:], logits[1:, -3:], state

    first, far, state = ends(slice(2))
    where = "handed on from an earlier call" if handed else "in one call"
    if wrong := _differ(far, first, tolerance):
        kind = "state" if "state" in model.remembers else "attention"
        if {"state", "attention"} <= {*model.remembers} and model.leaves is not None:
            kind = "state" if _lowest(model.leaves(state), tolerance) == {"state"} else "attention"
        return _Leak(
            kind, f"with another document {middle} documents before, {where}, {wrong}", hides=True
        )
    first, near, _ = ends(slice(2, -3))
    if wrong := _differ(near, first, tolerance):
        kind = "window" if "window" in model.remembers else model.remembers[0]
        return _Leak(kind, f"with another document before, {where}, {wrong}", hides=False)
    return None


def _lowest(leaves: Mapping[str, tuple[str, Any]], tolerance: float) -> set[str]:
    """The kinds of leaves that differ between the first two rows, in the lowest layer in which some do."""
    layers: dict[int, set[str]] = {}
    for name, (kind, leaf) in leaves.items():
        if differs(
            name, np.asarray(leaf[1], np.float64), np.asarray(leaf[0], np.float64), tolerance
        ):
            layers.setdefault(int(name.partition(".")[0]), set()).add(kind)
    return layers[min(layers)] if layers else set()


def _keeps_apart(kind: str) -> None:
    @_property(f"packed {kind}", f"no {NAMES[kind]} leaks from one document of a row into the next")
    def _(model: AdaptedModel, tolerance: float) -> Wrong:
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


def _rows_differ(rows: Any, tolerance: float) -> Wrong:
    """What differs between the first row of logits and others."""
    return _differ(rows, np.repeat(rows[:1], len(rows), axis=0), tolerance)


@_property(
    "resets",
    "a reset at any step, the first and the last too, begins a text in its row alone",
    "causality",
)
def _(model: AdaptedModel, tolerance: float) -> Wrong:
    need(model.resets, "the model takes no resets")
    steps = model.size[0]
    half = model.size[0] // 2

    def flagged(tokens: np.ndarray, t: int, rows: Any = slice(None), state: PyTree = None) -> Any:
        resets = np.zeros(tokens.shape, bool)
        resets[rows, t] = True
        return _logits(model, tokens, state, resets=resets)

    whole = _own(model)
    if wrong := _differ(flagged(model.tokens, 0), whole, tolerance):
        return f"with a reset before the first step of a text, {wrong}"
    if wrong := _differ(flagged(model.tokens, half, 0)[1:], whole[1:], tolerance):
        return f"with a reset in sequence 0 before step {half}, in the others {wrong}"
    tokens = np.concatenate(
        [model.tokens[:, :half], np.tile(model.tokens[:1, half:], (model.size[1], 1))], axis=1
    )
    computed = flagged(tokens, half)[:, half:]
    alone = _logits(model, tokens[:, half:])
    if (leaks := _rows_differ(computed, tolerance)) is None and (
        wrong := _differ(computed, alone, tolerance)
    ):
        return f"with a reset before step {half}, {wrong} as of the sequence alone"
    if leaks is None and (wrong := _rows_differ(flagged(tokens, steps - 1)[:, -1:], tolerance)):
        return f"with a reset before the last step, it depends on the steps before: {wrong}"
    if model.resets_of_states:
        _, state = _run(model, tokens[:, :half])
        if wrong := _differ(flagged(tokens[:, half:], 0, state=state), computed, tolerance):
            return f"with a reset before the first step of a second call, {wrong} as with a reset inside a call"
    return None


# The batch and padding ---------------------------------------------------------------------------------------------------


def _padded(model: AdaptedModel, left: bool) -> Outputs:
    """The first half of the tokens with padding on one side, and its mask."""
    real, rest = _halves(model)
    parts = (real, np.ones_like(real)), (np.zeros_like(rest),) * 2
    tokens, mask = (
        np.concatenate(arrays, axis=1) for arrays in zip(*(parts[::-1] if left else parts))
    )
    return tokens, mask


def _padding(model: AdaptedModel, tolerance: float, left: bool) -> Wrong:
    need(model.masks, "the model takes no attention_mask")
    tokens, mask = _padded(model, left)
    real, rest = _halves(model)
    more = rest[:, :2]
    wanted, state = _run(model, real)
    later = _in_pieces(model, more, (1, 1), state, one=True)
    for fill in (0, model.vocabulary - 1):
        what = f"with {rest.shape[1]} tokens {fill} as padding"
        computed, state = _run(model, np.where(mask == 1, tokens, fill), attention_mask=mask)
        computed = computed[:, -real.shape[1] :] if left else computed[:, : real.shape[1]]
        if wrong := _differ(computed, wanted, tolerance):
            return f"{what}, {wrong}"
        if left or model.ends:
            computed = _in_pieces(model, more, (1, 1), state, one=True)
            if wrong := _differ(computed, later, tolerance):
                return f"{what}, in the steps after it, {wrong}"
    return None


@_property("right padding", "padding after a text changes nothing", "causality")
def _(model: AdaptedModel, tolerance: float) -> Wrong:
    return _padding(model, tolerance, False)


@_property("left padding", "padding before a text changes nothing")
def _(model: AdaptedModel, tolerance: float) -> Wrong:
    return _padding(model, tolerance, True)


@_property(
    "batch", "a sequence gives in a batch what it gives alone, whatever padding the others have"
)
def _(model: AdaptedModel, tolerance: float) -> Wrong:
    whole = _own(model)
    for n in range(model.size[1]):
        row = model.tokens[n : n + 1]
        if model.masks:
            alone = _logits(model, row, attention_mask=np.ones_like(row))
        else:
            alone = _logits(model, row)
        if wrong := _differ(whole[n : n + 1], alone, tolerance):
            return f"for sequence {n} of the batch, {wrong} alone"
    if not model.masks:
        return None
    for left, whole_row in itertools.product((False, True), (0, 1)):
        tokens, mask = _padded(model, left)
        # The other rows are padded.
        tokens[whole_row::2] = model.tokens[whole_row::2]
        mask[whole_row::2] = 1

        def read(
            rows: slice, tokens: np.ndarray = tokens, mask: Any = mask, left: bool = left
        ) -> Any:
            """The logits of the tokens that are real, and of one more token where the state is that after them."""
            computed, state = _run(model, tokens[rows], attention_mask=mask[rows])
            computed = np.where(mask[rows, :, None] == 1, computed, 0)
            if not (left or model.ends):
                return computed
            return np.concatenate(
                [computed, _run(model, model.tokens[rows, :1], state, one=True)[0]], axis=1
            )

        together = read(slice(None))
        for n in range(2):
            if wrong := _differ(together[n : n + 1], read(slice(n, n + 1)), tolerance):
                side = "left" if left else "right"
                return f"with padding on the {side} of every second sequence, for sequence {n}, {wrong} alone"
    return None


# Devices, files, repetition ----------------------------------------------------------------------------------------------


@_property(
    "devices",
    "with time divided among devices, logits are the same as on one device",
    "causality",
    "pieces",
)
def _(model: AdaptedModel, tolerance: float) -> Wrong:
    need(
        model.over_devices is not None,
        "no way to divide time among devices was given (`over_devices`)",
    )
    count = jax.device_count()
    need(count > 1, "there is only one device")
    tokens = np.resize(model.tokens, (model.size[1], count * -(-model.size[0] // count)))
    computed = np.asarray(model.over_devices(tokens)).astype(np.float64)
    wrong = _differ(computed, _logits(model, tokens), tolerance)
    return wrong and f"over {count} devices, {wrong}"


@_property("save and load", "a model that was saved and loaded gives the same logits")
def _(model: AdaptedModel, tolerance: float) -> Wrong:
    need(model.reloaded is not None, "no way to save the model was given (`reloaded`)")
    wrong = _differ(_logits(model.reloaded(), model.tokens), _own(model), tolerance)
    return wrong and f"of the loaded model, {wrong}"


@_property("determinism", "logits are finite, and two calls give the same bits")
def _(model: AdaptedModel, tolerance: float) -> Wrong:
    first = _own(model)
    if not np.isfinite(first).all():
        at = list(map(int, np.argwhere(~np.isfinite(first))[0]))
        return f"logits{at} is {first[tuple(at)]}"
    wrong = _differ(_own(model), first, 0.0)
    return wrong and f"in the second call, {wrong}"
