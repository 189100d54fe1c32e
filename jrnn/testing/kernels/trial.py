"""One call of a kernel, or several that a sequence is divided into, and the comparison of its results with the step's.

A trial is plain data, so that a failing one can be made smaller.

Shapes: T time, N batch, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import LayerError
from jrnn.testing.invariance import Wrong, differs, named
from jrnn.testing.kernels.kernel import Kernel
from jrnn.testing.kernels.oracle import (
    Inputs,
    Results,
    Sizes,
    in_type,
    is_float,
    one_token,
    plain,
    results_of_step,
    sizes_of,
)
from jrnn.testing.subjects import PyTree

# What is compared, by the fields of Results; the gradients need `backward`.
NAMES = {
    "y": "y",
    "last": "the last state",
    "params": "the gradient of params",
    "x": "the gradient of xs",
    "state": "the gradient of the first state",
}
GRADIENTS = ("params", "x", "state")
SEEDS = np.array([-1, -0.5, 0.5, 1, 1.5], np.float32)  # what gradients begin with
# How much larger the error of a kernel may be than that of the step in the same type, and how many roundings are allowed.
SLACK = 4


@dataclass(frozen=True)
class Trial:
    """One call of a kernel.

    Attributes:
        kernel: what is called, with `params` in its type.
        x: inputs [T, N, H, ...].
        state: the state before the first step, [N, H, ...]; the kernel's `start` if `gives_state` is False.
        gives_state: whether the kernel is given it, or begins by itself.
        from_state: whether it is the kernel's `state`, not its `start`.
        resets: bool [T, N], or None; `as_segments`: told to the kernel as numbers of documents.
        valid: bool [T, N], False at padding, or None; `as_lengths`: told to the kernel as lengths.
        fill: what stands in the padding of floating-point inputs; None: what is there.
        cuts: the steps before which a new call begins, which is handed the state.
        decodes: whether each call is one of `kernel.decode`.
        compared: fields of Results.
        of: which results gradients are of: "y", "last" or "both".
        dtype: of floating-point inputs.
        note: what is special about the inputs, in words.
    """

    kernel: Kernel
    x: PyTree
    state: PyTree
    gives_state: bool
    from_state: bool = False
    resets: np.ndarray | None = None
    as_segments: bool = False
    valid: np.ndarray | None = None
    as_lengths: bool = False
    fill: float | None = None
    cuts: tuple[int, ...] = ()
    decodes: bool = False
    compared: tuple[str, ...] = ("y",)
    of: str = "both"
    dtype: str = "float32"
    note: str = ""

    @property
    def size(self) -> tuple[int, int]:
        """T and N."""
        return self.sizes[:2]

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.x)

    @property
    def fields(self) -> tuple[str, ...]:
        """What is compared, without what the kernel does not have."""
        kernel = self.kernel
        has = {
            "y": True,
            "last": kernel.returns_state,
            "params": kernel.backward is not None and kernel.params is not None,
            "x": kernel.backward is not None,
            "state": kernel.backward is not None and self.gives_state,
        }
        return tuple(name for name in self.compared if has[name])

    def in_words(self) -> str:
        """What is special about the call, for the beginning of a counterexample."""
        words = [self.note] if self.note else []
        if self.dtype != "float32":
            words.append(f"in {self.dtype}")
        if self.resets is not None:
            what = "documents that begin at" if self.as_segments else "resets before"
            places = []
            for n in np.flatnonzero(self.resets.any(axis=0)).tolist():
                steps = np.flatnonzero(self.resets[:, n]).tolist()
                places.append(f"steps {steps}" + (f" of sequence {n}" if self.size[1] > 1 else ""))
            words.append(f"with {what} {', '.join(places)}")
        if self.valid is not None:
            steps, rows = self.size
            counts = self.valid.sum(axis=0).tolist()
            side = "lengths" if self.as_lengths else "the last steps valid,"
            held = "" if self.fill is None else f" and {self.fill} in the padding"
            words.append(f"with {side} {counts} of {steps} steps{held}")
        if self.decodes or len(self.cuts) == self.size[0] - 1 > 1:
            words.append("one step at a time")
        elif self.cuts:
            words.append(f"cut before step {', '.join(map(str, self.cuts))}")
        return ", ".join(words)


def inputs_of(trial: Trial) -> Inputs:
    """The arguments of a trial for the step: its inputs rounded to the type of the trial."""
    kernel = trial.kernel
    steps, rows = trial.size
    state_type = jnp.float32 if kernel.wide_states else jnp.dtype(trial.dtype)
    start = trimmed(kernel.start, trial.state)
    state = in_type(trial.state if trial.gives_state else start, state_type)
    none = np.zeros((steps, rows), bool)
    valid = ~none if trial.valid is None else trial.valid
    x = in_type(trial.x, jnp.dtype(trial.dtype))
    _, y = one_token(kernel.step, kernel.params, x, state)
    dy = jax.tree.map(lambda leaf: _seeds((*trial.sizes, *leaf.shape)), y)
    dy = jax.tree.map(lambda leaf: _zeroed(leaf, ~valid, 0.0), dy)
    dlast = jax.tree.map(lambda leaf: _seeds(leaf.shape), state)
    if trial.of == "last":
        dy = jax.tree.map(np.zeros_like, dy)
    if trial.of == "y" or not kernel.returns_state:
        dlast = jax.tree.map(np.zeros_like, dlast)
    return Inputs(
        params=in_type(kernel.params, jnp.dtype(trial.dtype)),
        x=x,
        state=state,
        start=in_type(start, state_type),
        resets=none if trial.resets is None else trial.resets,
        valid=valid,
        dy=dy,
        dlast=dlast,
    )


def trimmed(tree: PyTree, like: PyTree) -> Any:
    """The first elements of arrays, as many along each axis as others have."""
    return jax.tree.map(lambda leaf, other: leaf[tuple(map(slice, other.shape))], tree, like)


def _seeds(shape: tuple[int, ...]) -> np.ndarray:
    """Numbers that are the same for the same place along time, whatever its length."""
    return np.random.default_rng(0).choice(SEEDS, shape)


def _zeroed(array: np.ndarray, where: np.ndarray, fill: float) -> np.ndarray:
    """An array [T, N, ...] with another number at some steps, where it holds floating-point numbers."""
    array = np.array(array)
    if is_float(array):
        array[where] = fill
    return array


def results_of_kernel(trial: Trial, inputs: Inputs) -> Results:
    """The results of a trial's calls in the kernel's layout, as arrays of its types."""
    kernel = trial.kernel
    valid = inputs.valid
    x = inputs.x
    if trial.fill is not None:
        fill = trial.fill
        x = jax.tree.map(lambda leaf: _zeroed(leaf, ~valid, fill), x)
    state = kernel.outside_all(inputs.state, "NH") if trial.gives_state else None
    if not trial.cuts and not trial.decodes:
        x = kernel.outside_all(x)
        options = _options(trial, inputs)
        if not set(trial.fields) & set(GRADIENTS):
            return Results(*kernel.forward(inputs.params, x, state, **options))
        assert kernel.backward is not None
        dy = kernel.outside_all(inputs.dy)
        dlast = kernel.outside_all(inputs.dlast, "NH")
        return Results(*kernel.backward(inputs.params, x, state, dy, dlast, **options))
    run = kernel.decode if trial.decodes and kernel.decode is not None else kernel.forward
    pieces = []
    ends = [*trial.cuts, trial.size[0]]
    begin = 0
    for end in ends:
        part = jax.tree.map(lambda leaf, begin=begin, end=end: leaf[begin:end], x)
        y, state = run(inputs.params, kernel.outside_all(part), state)
        state = _as(inputs.state, state, "the last state")
        pieces.append(jax.tree.map(np.asarray, y))
        begin = end
    axis = kernel.layout.index("T")
    return Results(jax.tree.map(lambda *parts: np.concatenate(parts, axis), *pieces), state)


def _options(trial: Trial, inputs: Inputs) -> dict[str, np.ndarray]:
    """The options that tell a kernel of resets and padding, in its layout."""
    kernel = trial.kernel
    options = {}
    if trial.resets is not None and trial.as_segments:
        documents = np.cumsum(trial.resets, axis=0, dtype=np.int32)
        options["segments"] = kernel.outside(documents, "TN")
    elif trial.resets is not None:
        options["resets"] = kernel.outside(trial.resets, "TN")
    if trial.valid is not None and trial.as_lengths:
        options["lengths"] = kernel.outside(trial.valid.sum(axis=0, dtype=np.int32), "N")
    elif trial.valid is not None:
        options["mask"] = kernel.outside(trial.valid, "TN")
    return options


def _as(like: PyTree, tree: PyTree, what: str) -> Any:
    """A tree of the same arrays with the structure of another one."""
    leaves = jax.tree.leaves(tree)
    structure = jax.tree.structure(like)
    if len(leaves) != structure.num_leaves:
        raise LayerError(f"{what} has {len(leaves)} arrays, not {structure.num_leaves}")
    return jax.tree.unflatten(structure, [np.asarray(leaf) for leaf in leaves])


def as_the_step(trial: Trial, tolerance: float) -> Wrong:
    """What differs from the results of the step in float64, in words."""
    inputs = inputs_of(trial)
    wanted = results_of_step(trial.kernel.step, inputs, room_of(trial), np.float64)
    return _differs(trial, inputs, wanted, dict.fromkeys(NAMES, tolerance))


def as_exact_as_the_step(trial: Trial, tolerance: float) -> Wrong:
    """What is less exact than the step in the type of the trial, in words."""
    inputs = inputs_of(trial)
    step = trial.kernel.step
    wanted = results_of_step(step, inputs, room_of(trial), np.float64)
    narrow = results_of_step(step, inputs, room_of(trial), jnp.dtype(trial.dtype))
    unit = float(jnp.finfo(trial.dtype).eps)
    limits = {}
    for name in NAMES:
        largest = max(1.0, _largest(getattr(wanted, name)))
        apart = jax.tree.map(np.subtract, getattr(narrow, name), getattr(wanted, name))
        limits[name] = SLACK * max(unit, _largest(apart) / largest)
    wrong = _differs(trial, inputs, wanted, limits)
    return wrong and f"{wrong}, which is {SLACK} times less exact than the step in {trial.dtype}"


def _largest(tree: PyTree) -> float:
    largest = 0.0
    for leaf in jax.tree.leaves(tree):
        if is_float(leaf):
            largest = max(largest, float(np.max(np.abs(leaf), initial=0.0)))
    return largest


def room_of(trial: Trial) -> Sizes:
    """The sizes of the arrays of the step's program: the largest that are tried, but for those of features."""
    steps, rows, heads = sizes_of(trial.kernel.x)
    own = trial.sizes
    return max(steps, own[0]), max(rows, own[1]), max(heads, own[2])


def _differs(trial: Trial, inputs: Inputs, wanted: Results, limits: dict[str, float]) -> Wrong:
    computed = results_of_kernel(trial, inputs)
    kernel = trial.kernel
    padding = ~inputs.valid
    for field in trial.fields:
        axes = "" if field == "params" else "TNH" if field in ("y", "x") else "NH"
        expected = getattr(wanted, field)
        got = _as(expected, getattr(computed, field), NAMES[field])
        expected = kernel.outside_all(expected, axes) if axes else expected
        if field == "y" and padding.any():
            outside = kernel.outside(np.broadcast_to(padding[..., None], trial.sizes))
            got = jax.tree.map(lambda leaf, at=outside: _zeroed(leaf, at, 0.0), got)
            expected = jax.tree.map(lambda leaf, at=outside: _zeroed(leaf, at, 0.0), expected)
        if field in GRADIENTS:
            got = jax.tree.map(_gradient_or_zeros, got, expected)
            expected = jax.tree.map(_gradient_or_zeros, expected, expected)
        wrong = differs(NAMES[field], jax.tree.map(plain, got), expected, limits[field])
        if wrong:
            return wrong
    return None


def _gradient_or_zeros(gradient: Any, wanted: Any) -> Any:
    """Integers have no gradient: what libraries return for it means nothing."""
    return gradient if is_float(wanted) else np.zeros(np.shape(wanted))


def twice_the_same(trial: Trial, tolerance: float) -> Wrong:
    """What differs between two runs, to the bit."""
    inputs = inputs_of(trial)
    first = results_of_kernel(trial, inputs)
    second = results_of_kernel(trial, inputs)
    for field in trial.fields:
        again = jax.tree.map(plain, getattr(second, field))
        wrong = differs(NAMES[field], again, jax.tree.map(plain, getattr(first, field)), 0.0)
        if wrong:
            return f"in the second run, {wrong}"
    return None


def arrays_of(trial: Trial) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a trial in the kernel's layout, by name."""
    kernel = trial.kernel
    inputs = inputs_of(trial)
    yield from named("xs", kernel.outside_all(inputs.x))
    if trial.gives_state:
        yield from named("state", kernel.outside_all(inputs.state, "NH"))
    if kernel.params is not None:
        yield from named("params", inputs.params)
    if set(trial.fields) & set(GRADIENTS):
        yield from named("dys", kernel.outside_all(inputs.dy))
        if kernel.returns_state:
            yield from named("dstate", kernel.outside_all(inputs.dlast, "NH"))
    yield from _options(trial, inputs).items()
