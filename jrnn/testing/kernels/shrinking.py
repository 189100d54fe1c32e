"""Makes a failing trial smaller: fewer steps, sequences and heads, smaller arrays, fewer numbers that are not zero.

Shapes: T time, N batch, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jrnn.testing.kernels.decays import is_decay
from jrnn.testing.kernels.oracle import is_float, one_token
from jrnn.testing.kernels.trial import Trial, arrays_of
from jrnn.testing.properties import smallest_of

Fails = Callable[[Trial], bool]
MOST_LENGTHS = 16  # of a kernel that is tried at every one
MOST_NUMBERS = 150  # of an array that are tried one by one
MOST_SHOWN = 40  # in a message


def smallest_trial(trial: Trial, fails: Fails) -> Trial:
    """The smallest trial that still fails in the same way, as far as one change after another finds it."""
    for candidates in (_shorter, _later, _with_fewer_rows, _with_fewer_heads, _with_smaller_arrays):
        trial = smallest_of(trial, candidates(trial), fails)
    return _with_zeros(trial, fails)


def _takes(trial: Trial, steps: int) -> bool:
    return trial.kernel.rounded(steps) == steps and all(cut < steps for cut in trial.cuts)


def _shorter(trial: Trial) -> Iterator[Trial]:
    """The first steps of a trial, shortest first; of a long one at lengths around those of whole chunks."""
    steps = trial.size[0]
    chunk = trial.kernel.chunk
    lengths = range(1, steps)
    if steps > MOST_LENGTHS:
        near = {1, 2, chunk - 1, chunk, chunk + 1, chunk + 2, 2 * chunk, 2 * chunk + 1, 3 * chunk}
        lengths = sorted(near & set(lengths))
    for length in lengths:
        cuts = tuple(cut for cut in trial.cuts if cut < length) if trial.decodes else trial.cuts
        part = replace(_steps(trial, slice(length)), cuts=cuts)
        if _takes(part, length):
            yield part


def _later(trial: Trial) -> Iterator[Trial]:
    """The last steps of a trial, shortest first."""
    steps = trial.size[0]
    if trial.cuts or steps > MOST_LENGTHS:
        return
    for length in range(1, steps):
        if _takes(trial, length):
            yield _steps(trial, slice(steps - length, steps))


def _steps(trial: Trial, part: slice) -> Trial:
    return replace(
        trial,
        x=jax.tree.map(lambda leaf: leaf[part], trial.x),
        resets=None if trial.resets is None else trial.resets[part],
        valid=None if trial.valid is None else trial.valid[part],
    )


def _with_fewer_rows(trial: Trial) -> Iterator[Trial]:
    for n in range(trial.size[1]):
        row = slice(n, n + 1)
        yield replace(
            trial,
            x=jax.tree.map(lambda leaf, row=row: leaf[:, row], trial.x),
            state=jax.tree.map(lambda leaf, row=row: leaf[row], trial.state),
            resets=None if trial.resets is None else trial.resets[:, row],
            valid=None if trial.valid is None else trial.valid[:, row],
        )


def _with_fewer_heads(trial: Trial) -> Iterator[Trial]:
    for h in range(trial.sizes[2]):
        head = slice(h, h + 1)
        yield replace(
            trial,
            x=jax.tree.map(lambda leaf, head=head: leaf[:, :, head], trial.x),
            state=jax.tree.map(lambda leaf, head=head: leaf[:, head], trial.state),
        )


def _with_smaller_arrays(trial: Trial) -> Iterator[Trial]:
    """All features of one size cut to one; then the sizes apart."""
    leaves = [leaf.shape[3:] for leaf in jax.tree.leaves(trial.x)]
    leaves += [leaf.shape[2:] for leaf in jax.tree.leaves(trial.state)]
    sizes = sorted({size for shape in leaves for size in shape if size > 1})
    for cut in [sizes, *([size] for size in sizes)]:
        smaller = _cut(trial, set(cut))
        if cut and _runs(smaller):
            yield smaller


def _cut(trial: Trial, sizes: set[int]) -> Trial:
    """A trial with the first element along every axis of features of these sizes."""

    def cut(skipped: int) -> Callable[[Any], Any]:
        def of(leaf: Any) -> Any:
            index = []
            for axis, size in enumerate(leaf.shape):
                index.append(slice(1) if axis >= skipped and size in sizes else slice(None))
            return leaf[tuple(index)]

        return of

    state = jax.tree.map(cut(2), trial.state)
    kernel = replace(
        trial.kernel,
        x=jax.tree.map(cut(3), trial.kernel.x),
        params=jax.tree.map(cut(0), trial.kernel.params),
        start=jax.tree.map(cut(2), trial.kernel.start),
        state=jax.tree.map(cut(2), trial.kernel.state),
    )
    return replace(trial, kernel=kernel, x=jax.tree.map(cut(3), trial.x), state=state)


def _runs(trial: Trial) -> bool:
    """Whether the step takes arrays of these sizes, and gives a state of its size."""
    kernel = trial.kernel
    try:
        new, _ = one_token(kernel.step, kernel.params, trial.x, trial.state)
    except Exception:  # whatever the user's step raises
        return False
    shapes = [leaf.shape for leaf in jax.tree.leaves(new)]
    return shapes == [leaf.shape[2:] for leaf in jax.tree.leaves(trial.state)]


def _with_zeros(trial: Trial, fails: Fails) -> Trial:
    """The trial with zeros wherever it still fails, and then with ones for the other numbers if it does so with these.

    Decays stay what they are: they are what such a trial is about.
    """
    for field in ("x", "state") if trial.gives_state else ("x",):
        for k, leaf in enumerate(jax.tree.leaves(getattr(trial, field))):
            if not is_float(leaf) or (field == "x" and is_decay(trial.kernel, k)):
                continue
            trial = smallest_of(trial, [_with_leaf(trial, field, k, np.zeros_like(leaf))], fails)
            for at in np.argwhere(_leaf(trial, field, k)).tolist()[:MOST_NUMBERS]:
                fewer = np.array(_leaf(trial, field, k))
                fewer[tuple(at)] = 0
                trial = smallest_of(trial, [_with_leaf(trial, field, k, fewer)], fails)
            ones = np.sign(np.abs(_leaf(trial, field, k)))
            trial = smallest_of(trial, [_with_leaf(trial, field, k, ones)], fails)
    return trial


def _leaf(trial: Trial, field: str, k: int) -> Any:
    return jax.tree.leaves(getattr(trial, field))[k]


def _with_leaf(trial: Trial, field: str, k: int, leaf: np.ndarray) -> Trial:
    leaves, structure = jax.tree.flatten(getattr(trial, field))
    leaves[k] = leaf
    return replace(trial, **{field: jax.tree.unflatten(structure, leaves)})


def counterexample_of(trial: Trial, fault: str) -> tuple[str, dict[str, np.ndarray]]:
    """A counterexample in words, with its arrays where they are small, and the arrays by name."""
    arrays = dict(arrays_of(trial))
    shown = []
    for name, array in arrays.items():
        if name in ("lengths", "mask", "resets", "segments"):
            continue  # the words say it
        if sum(a.size for a in arrays.values()) <= MOST_SHOWN:
            numbers = np.vectorize("{:.4g}".format, otypes=[object])(np.squeeze(array))
            shown.append(
                f"{name} = {np.array2string(numbers, separator=', ', formatter={'all': str})}"
            )
        else:
            shown.append(f"{name} {list(array.shape)}")
    text = ", ".join(filter(None, [trial.in_words(), fault]))
    return " ".join(f"{text}; with {', '.join(shown)}".split()), arrays
