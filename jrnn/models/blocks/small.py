"""Short convolutions, and parts side by side.

Shapes: T time, N batch, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrnn.models.family import At, Merge, Part, Shapes, State, Weights, linear, under


@dataclass(frozen=True)
class ShortConv(Part):
    """c * convolve(b * x) between two products (LFM2)."""

    width: int
    taps: int
    bias: bool = False

    def tensors(self) -> Shapes:
        d = self.width
        shapes = linear("in_proj", 3 * d, d, self.bias) | {"conv.weight": (d, 1, self.taps)}
        return shapes | ({"conv.bias": (d,)} if self.bias else {}) | linear("out_proj", d, d, self.bias)

    def holds(self) -> Shapes:
        return {"conv": (self.taps - 1, self.width)}

    def run(self, w: Weights, x: jax.Array, state: State, at: At) -> tuple[jax.Array, State]:
        b, c, u = jnp.split(w.linear(at.span, "in_proj", x), 3, axis=-1)
        u, conv = at.span.convolve(b * u, state["conv"], w["conv.weight"][:, 0], w.get("conv.bias"))
        return w.linear(at.span, "out_proj", c * u), {"conv": conv}


class Side(NamedTuple):
    """A part of `Both`: its name, and factors of its input and output."""

    name: str
    part: Part
    into: float = 1.0
    out: float = 1.0


@dataclass(frozen=True)
class Both(Part):
    """The sum of parts of the same input."""

    sides: tuple[Side, ...]

    @property
    def places(self) -> bool:  # type: ignore[override]
        return any(side.part.places for side in self.sides)

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return any(side.part.remembers for side in self.sides)

    def tensors(self) -> Shapes:
        return {key: v for side in self.sides for key, v in under(side.name, side.part.tensors()).items()}

    def merged(self) -> dict[str, Merge]:
        return {
            f"{side.name}.{key}": merge.under(f"{side.name}.")
            for side in self.sides
            for key, merge in side.part.merged().items()
        }

    def fresh(self, batch: int, dtype: Any, room: int) -> State:
        return {key: leaf for side in self.sides for key, leaf in side.part.fresh(batch, dtype, room).items()}

    def run(self, w: Weights, x: jax.Array, state: State, at: At) -> tuple[jax.Array, State]:
        total, after = None, {}
        for side in self.sides:
            y, own = side.part.run(w.at(side.name), x if side.into == 1 else x * side.into, state, at)
            y = y if side.out == 1 else y * side.out
            total, after = y if total is None else total + y, after | own
        assert total is not None
        return total, after
