"""The properties that `check_kernel` checks: each is the calls that are tried, and what must hold of every one.

Nearly all compare with the step, so a property is mostly a list of trials: lengths, decays, resets, padding, cuts. Each
tries what the properties that it rests on leave out.

Shapes: T time, N batch, H heads, C the kernel's chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jrnn.testing.kernels.decays import with_decay
from jrnn.testing.kernels.kernel import TYPES, Kernel
from jrnn.testing.kernels.trial import (
    GRADIENTS,
    Trial,
    as_exact_as_the_step,
    as_the_step,
    twice_the_same,
)
from jrnn.testing.properties import Property, need
from jrnn.testing.subjects import PyTree

KERNEL_PROPERTIES: dict[str, Property] = {}
ALL = ("y", "last", *GRADIENTS)
# What is not compared again where one of these properties does not hold.
FAULTS_OF = {
    "final state": ("last",),
    "gradients": ("params", "x"),
    "gradient of the first state": ("state",),
}
DECAYS = {"decay 1": 1.0, "decay 0": 0.0, "decay 1e-6": 1e-6, "decay 1e-30": 1e-30, "growth": 1.1}


def example_trial(kernel: Kernel) -> Trial:
    """The plainest call: one sequence and one head, several chunks, the state that the kernel begins in by itself."""
    trial = Trial(kernel, kernel.x, kernel.start, gives_state=kernel.needs_state)
    return _of(trial, kernel.steps, 1, 1)


def _of(trial: Trial, steps: int, rows: int, heads: int) -> Trial:
    """The trial with other sizes, from the kernel's arrays."""
    kernel = trial.kernel
    x = jax.tree.map(lambda leaf: leaf[:steps, :rows, :heads], kernel.x)
    state = jax.tree.map(lambda leaf: leaf[:rows, :heads], kernel.start)
    return replace(trial, x=x, state=state)


def _rows(trial: Trial) -> int:
    return jax.tree.leaves(trial.kernel.x)[0].shape[1]


def _heads(trial: Trial) -> int:
    return jax.tree.leaves(trial.kernel.x)[0].shape[2]


def _with_rows(trial: Trial) -> Trial:
    return _of(trial, trial.size[0], _rows(trial), 1)


def _first_state(trial: Trial) -> Trial:
    """The trial from the state that was given for such checks."""
    rows, heads = trial.sizes[1:]
    state = jax.tree.map(lambda leaf: leaf[:rows, :heads], trial.kernel.state)
    return replace(trial, state=state, gives_state=True, from_state=True)


def _from_any_state(trial: Trial) -> Trial:
    """The trial from the given state if the kernel takes one, with all results compared."""
    trial = replace(trial, compared=ALL)
    return _first_state(trial) if trial.kernel.takes_state else trial


Check = Callable[[Trial, float], "str | None"]
Variations = Callable[[Trial], Iterable[Trial]]


def _property(name: str, rule: str, *rests_on: str, check: Check = as_the_step) -> Callable:
    """A decorator of a function that yields a property's trials, made from the plainest one."""

    def register(variations: Variations) -> Variations:
        def without_known_faults(trial: Trial, failed: Collection[str]) -> Iterator[Trial]:
            return _without(failed, variations(_shorter_if(failed, trial)))

        KERNEL_PROPERTIES[name] = Property(
            name, rule, check, rests_on, variations=without_known_faults
        )
        return variations

    return register


def _shorter_if(failed: Collection[str], trial: Trial) -> Trial:
    """The trial at a length of whole chunks, if the kernel is wrong at others."""
    if "odd lengths" not in failed:
        return trial
    return _of(trial, trial.kernel.rounded(3 * trial.kernel.chunk), 1, 1)


def _without(failed: Collection[str], trials: Iterable[Trial]) -> Iterator[Trial]:
    """The trials without what is known to be wrong, so that each fault is reported once.

    Raises NotApplicable if nothing is left.
    """
    wrong = [name for name in FAULTS_OF if name in failed]
    hidden = {field for name in wrong for field in FAULTS_OF[name]}
    seen = False
    for trial in trials:
        compared = tuple(field for field in trial.compared if field not in hidden)
        is_odd = trial.size[0] % trial.kernel.chunk != 0
        if is_odd and "odd lengths" in failed:
            wrong.append("odd lengths")
        elif trial.from_state and "first state" in failed:
            wrong.append("first state")
        elif trial.size[1] > 1 and "batch" in failed:
            wrong.append("batch")
        elif compared:
            seen = True
            yield replace(trial, compared=compared)
    need(seen or not wrong, f"{wrong[-1]} does not hold" if wrong else "")


# Lengths, states, gradients ------------------------------------------------------------------------------------------------


def _whole_lengths(kernel: Kernel) -> list[int]:
    return [kernel.rounded(kernel.chunk), kernel.rounded(3 * kernel.chunk)]


def _odd_lengths(kernel: Kernel) -> list[int]:
    chunk = kernel.chunk
    return sorted({1, max(chunk - 1, 1), chunk + 1, 3 * chunk + 1})


def _all_lengths(kernel: Kernel) -> list[int]:
    odd = _odd_lengths(kernel) if kernel.multiple_of == 1 else []
    return sorted({*_whole_lengths(kernel), *odd})


def _of_lengths(trial: Trial, lengths: Iterable[int]) -> Iterator[Trial]:
    for steps in lengths:
        yield _of(trial, steps, 1, 1)


@_property("values", "outputs of whole chunks are the step's")
def _(trial: Trial) -> Iterator[Trial]:
    return _of_lengths(trial, _whole_lengths(trial.kernel))


@_property("odd lengths", "outputs of 1, C - 1, C + 1 and 3 C + 1 steps are the step's", "values")
def _(trial: Trial) -> Iterator[Trial]:
    _need_any_length(trial.kernel)
    return _of_lengths(trial, _odd_lengths(trial.kernel))


def _need_any_length(kernel: Kernel) -> None:
    need(kernel.multiple_of == 1, f"the kernel takes only multiples of {kernel.multiple_of} steps")


@_property("final state", "the last state is the step's, at every length", "values")
def _(trial: Trial) -> Iterator[Trial]:
    need(trial.kernel.returns_state, "the kernel returns no state")
    return _of_lengths(replace(trial, compared=("last",)), _all_lengths(trial.kernel))


@_property("first state", "from a first state, outputs and the last state are the step's", "values")
def _(trial: Trial) -> Iterator[Trial]:
    need(trial.kernel.takes_state, "the kernel takes no first state")
    trial = replace(trial, compared=("y", "last"))
    if not trial.kernel.needs_state:  # the state it would begin in by itself
        yield replace(trial, gives_state=True)
    for changed in _of_lengths(trial, [trial.kernel.rounded(1), trial.size[0]]):
        yield _first_state(changed)


@_property(
    "gradients", "gradients with respect to every input and to params are the step's", "values"
)
def _(trial: Trial) -> Iterator[Trial]:
    need(trial.kernel.backward is not None, "the kernel has no gradients")
    trial = replace(trial, compared=("params", "x"))
    for changed in _of_lengths(trial, _all_lengths(trial.kernel)):
        yield replace(changed, of="y", note="for the gradient of y")
        if trial.kernel.returns_state:
            yield replace(changed, of="last", note="for the gradient of the last state")


@_property(
    "gradient of the first state",
    "the gradient with respect to the first state is the step's",
    *("first state", "gradients"),
)
def _(trial: Trial) -> Iterator[Trial]:
    need(trial.kernel.takes_state, "the kernel takes no first state")
    need(trial.kernel.backward is not None, "the kernel has no gradients")
    trial = replace(trial, compared=GRADIENTS)
    for steps in sorted(
        {trial.kernel.rounded(1), trial.kernel.rounded(trial.kernel.chunk), trial.size[0]}
    ):
        yield _first_state(_of(trial, steps, 1, 1))


@_property("determinism", "two runs give the same bits", check=twice_the_same)
def _(trial: Trial) -> Iterator[Trial]:
    yield _from_any_state(_with_rows(trial))


@_property("batch", "sequences of a batch are independent", "values")
def _(trial: Trial) -> Iterator[Trial]:
    need("N" in trial.kernel.layout, "the kernel has no axis of a batch (`layout`)")
    need(_rows(trial) > 1, "xs have one sequence")
    yield _from_any_state(_with_rows(trial))


@_property("heads", "heads are independent", "values")
def _(trial: Trial) -> Iterator[Trial]:
    need("H" in trial.kernel.layout, "the kernel has no axis of heads (`layout`)")
    need(_heads(trial) > 1, "xs have one head")
    yield _from_any_state(_of(trial, trial.size[0], 1, _heads(trial)))


# Decays ------------------------------------------------------------------------------------------------------------------


def _decays(name: str, factor: float) -> None:
    @_property(name, f"with decays of {factor:g}, results and gradients are the step's", "values")
    def _(trial: Trial) -> Iterator[Trial]:
        kernel = trial.kernel
        need(kernel.decay is not None, "which input holds decays was not given (`decay`)")
        changed = with_decay(kernel, trial.x, factor)
        trial = replace(trial, compared=ALL)
        yield replace(trial, x=changed, note=f"with a decay of {factor:g} at every step")
        for step in sorted({kernel.chunk // 2, kernel.chunk}):
            here = np.arange(trial.size[0]) == step
            x = _chosen(here, changed, trial.x)
            yield replace(trial, x=x, note=f"with a decay of {factor:g} at one step")


def _chosen(steps: np.ndarray, x: PyTree, other: PyTree) -> Any:
    """Some steps of x, the rest of another one."""

    def chosen(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.where(steps.reshape(steps.shape + (1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(chosen, x, other)


for _name, _factor in DECAYS.items():
    _decays(_name, _factor)


# Documents, resets, padding -----------------------------------------------------------------------------------------------


def _borders(trial: Trial) -> Iterator[Trial]:
    """Trials with documents that end within chunks, at their borders, at the first and last step, and everywhere."""
    steps = trial.size[0]
    chunk = trial.kernel.chunk
    places: list[list[int]] = [
        [at] for at in sorted({1, chunk - 1, chunk, chunk + 1, steps - 1, 0})
    ]
    places.append([chunk // 2, chunk + chunk // 2, 2 * chunk + 1])
    places.append(list(range(steps)))
    trial = replace(trial, compared=ALL)
    for at in places:
        resets = np.zeros(trial.size, bool)
        resets[[t for t in at if 0 <= t < steps]] = True
        yield replace(trial, resets=resets)
        if trial.kernel.takes_state and len(at) > 1:
            yield _first_state(replace(trial, resets=resets))
    several = _with_rows(trial)
    if several.size[1] > 1:
        resets = np.zeros(several.size, bool)
        resets[chunk + 1, 0] = True
        yield replace(several, resets=resets)


@_property("resets", "a reset before a step begins a new sequence there, at any place", "values")
def _(trial: Trial) -> Iterator[Trial]:
    need(trial.kernel.resets, "the kernel takes no resets")
    return _borders(trial)


@_property("documents", "nothing leaks from one packed document into the next", "values")
def _(trial: Trial) -> Iterator[Trial]:
    need(trial.kernel.segments, "the kernel takes no segments")
    for changed in _borders(trial):
        assert changed.resets is not None
        resets = changed.resets.copy()
        resets[0] = (
            False  # a number says where the next document begins, not where the first one does
        )
        yield replace(changed, resets=resets, as_segments=True)


def _padded(trial: Trial, valid: np.ndarray, as_lengths: bool) -> Iterator[Trial]:
    trial = replace(trial, valid=valid, as_lengths=as_lengths, compared=ALL)
    yield trial
    yield replace(trial, fill=float("nan"))
    if trial.kernel.takes_state:
        yield _first_state(replace(trial, fill=float("nan")))


def _lengths_of_rows(trial: Trial) -> Iterator[np.ndarray]:
    steps, rows = trial.size
    chunk = trial.kernel.chunk
    yield np.resize([chunk + 1, steps, max(chunk - 1, 1)], rows)
    yield np.resize([1, chunk, steps - 1], rows)


@_property(
    "right padding", "padding after a sequence, NaN too, changes no result or gradient", "values"
)
def _(trial: Trial) -> Iterator[Trial]:
    kernel = trial.kernel
    need(kernel.lengths or kernel.mask, "the kernel takes no lengths and no mask")
    trial = _with_rows(trial)
    for lengths in _lengths_of_rows(trial):
        valid = np.arange(trial.size[0])[:, None] < lengths
        yield from _padded(trial, valid, kernel.lengths)


@_property(
    "left padding", "padding before a sequence, NaN too, changes no result or gradient", "values"
)
def _(trial: Trial) -> Iterator[Trial]:
    need(trial.kernel.mask, "the kernel takes no mask")
    trial = _with_rows(trial)
    for lengths in _lengths_of_rows(trial):
        valid = np.arange(trial.size[0])[:, None] >= trial.size[0] - lengths
        yield from _padded(trial, valid, False)


@_property("length 0", "a sequence of length 0 leaves its state as it was", "right padding")
def _(trial: Trial) -> Iterator[Trial]:
    kernel = trial.kernel
    need(kernel.lengths, "the kernel takes no lengths")
    trial = _with_rows(trial)
    lengths = np.resize([0, trial.size[0]], trial.size[1])
    valid = np.arange(trial.size[0])[:, None] < lengths
    yield from _padded(trial, valid, True)


# Calls -------------------------------------------------------------------------------------------------------------------


def _handed_on(trial: Trial) -> Trial:
    """A trial for calls that hand the state on: a chunk and two steps."""
    kernel = trial.kernel
    need(kernel.takes_state, "the kernel takes no first state")
    need(kernel.returns_state, "the kernel returns no state")
    steps = kernel.rounded(kernel.chunk + 2) if kernel.multiple_of == 1 else trial.size[0]
    return _first_state(replace(_of(trial, steps, 1, 1), compared=("y", "last")))


@_property(
    "pieces",
    "a call cut in two, at any place, gives what the step gives",
    *("odd lengths", "first state", "final state"),
)
def _(trial: Trial) -> Iterator[Trial]:
    trial = _handed_on(trial)
    unit = trial.kernel.multiple_of
    for cut in range(unit, trial.size[0], unit):
        yield replace(trial, cuts=(cut,))


@_property(
    "decoding",
    "one token at a time gives what the step gives, also after a prompt",
    *("odd lengths", "first state", "final state"),
)
def _(trial: Trial) -> Iterator[Trial]:
    if trial.kernel.decode is None:
        _need_any_length(trial.kernel)
    trial = _handed_on(trial)
    yield replace(trial, cuts=tuple(range(1, trial.size[0])), decodes=True)


def _types(dtype: str) -> None:
    rule = f"in {dtype}, results and gradients are about as exact as the step's in this type"

    @_property(dtype, rule, "values", check=as_exact_as_the_step)
    def _(trial: Trial) -> Iterator[Trial]:
        need(dtype in trial.kernel.types, f"the kernel takes no {dtype}")
        trial = replace(trial, dtype=dtype)
        yield _from_any_state(trial)


for _name in TYPES:
    _types(_name)
