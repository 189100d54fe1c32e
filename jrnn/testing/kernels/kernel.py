"""A kernel as a record: how to call it, what it takes, and the step that it must agree with.

Shapes: T time, N batch, H heads. Every array here is [T, N, H, ...] (inputs) or [N, H, ...] (states), with axes of size 1
where the kernel has none; `outside` gives arrays the kernel's own layout, and only its call sees that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jrnn.testing.subjects import PyTree

AXES = "TNH"
TYPES = ("float32", "bfloat16", "float16")
FEATURES = ("lengths", "resets", "segments", "mask")
Arrays = dict[str, Any]
Decay = str | Callable[[Any, float], Any]


@dataclass(frozen=True)
class Kernel:
    """A kernel that claims to compute the loop of a step, with arguments to run it on.

    Attributes:
        step: `step(carry, x) -> (carry, y)` for one token of one sequence and one head; with `params`,
            `step(params, carry, x)`.
        forward: `forward(params, x, state, **options) -> (y, state)` in the kernel's layout, for arrays of numpy. A state of
            None is the kernel's own first state; the last state is None if the kernel returns none.
        backward: `backward(params, x, state, dy, dlast, **options) -> (y, state, dparams, dx, dstate)`; None if the kernel
            has no gradients.
        params: weights that the step and the kernel take whole.
        x: inputs [T, N, H, ...], long enough for several chunks.
        state: a state that a sequence may begin in, [N, H, ...].
        start: the state before a sequence if none is given, which resets put back.
        layout: the kernel's leading axes in their order, such as "NTH"; those of a state are the same without T.
        chunk: C, how many steps the kernel computes at once.
        multiple_of: the kernel takes only multiples of so many steps.
        takes_state, needs_state, returns_state: whether the kernel takes a first state, whether it must be given one, and
            whether it returns the last one.
        lengths, resets, segments, mask: whether the kernel takes them.
        decay: where the decay of a step is: the name of an input, "exp(name)" for its logarithm, or a function
            `(xs, factor) -> xs` that sets it.
        decode: as `forward`, for one token, such as the kernel of decoding; None: the kernel itself.
        types: the types of numbers that the kernel takes.
        wide_states: whether states are float32 also where inputs have a narrower type.
    """

    step: Callable[..., tuple[Any, Any]]
    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., tuple[Any, ...]] | None
    params: PyTree
    x: PyTree
    state: PyTree
    start: PyTree
    layout: str = "TN"
    chunk: int = 16
    multiple_of: int = 1
    takes_state: bool = True
    needs_state: bool = True
    returns_state: bool = True
    lengths: bool = False
    resets: bool = False
    segments: bool = False
    mask: bool = False
    decay: Decay | None = None
    decode: Callable[..., tuple[Any, Any]] | None = None
    types: tuple[str, ...] = TYPES
    wide_states: bool = False

    @property
    def steps(self) -> int:
        """The length at which most properties are checked: several chunks, and where the kernel takes it, one step more."""
        one_more = 1 if self.multiple_of == 1 else 0
        return self.rounded(3 * self.chunk + one_more)

    def rounded(self, steps: int) -> int:
        """The next number of steps that the kernel takes."""
        return -(-steps // self.multiple_of) * self.multiple_of

    def outside(self, array: np.ndarray, axes: str = AXES) -> np.ndarray:
        """An array with the leading `axes` in the kernel's layout."""
        kept = [axis for axis in self.layout if axis in axes]
        absent = tuple(k for k, axis in enumerate(axes) if axis not in kept)
        present = [axis for axis in axes if axis in kept]
        array = np.squeeze(array, absent)
        order = [present.index(axis) for axis in kept]
        return np.transpose(array, (*order, *range(len(order), array.ndim)))

    def outside_all(self, tree: PyTree, axes: str = AXES) -> Any:
        return jax.tree.map(lambda leaf: self.outside(leaf, axes), tree)


def inside(array: Any, layout: str, axes: str = AXES) -> np.ndarray:
    """An array in a kernel's layout with the leading `axes`, those that it lacks of size 1."""
    kept = [axis for axis in layout if axis in axes]
    order = [kept.index(axis) for axis in axes if axis in kept]
    array = np.asarray(array)
    array = np.transpose(array, (*order, *range(len(order), array.ndim)))
    absent = [k for k, axis in enumerate(axes) if axis not in kept]
    return np.expand_dims(array, absent)
