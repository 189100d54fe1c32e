"""Where a device's segment stands in time, and what devices send each other.

Shapes: D devices, T steps of a segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.jaxprs.mesh_axes import cast, varying_axes
from jrnn.loops.ir import tag

_GATHERED = 2**20  # bytes of the summaries of all devices up to which every device gets them all

Values = list[Any]


@dataclass(frozen=True)
class TimeShard:
    """Where a device's segment stands in time.

    Attributes:
        axis: the name of the mesh axis.
        count: D.
        reverse: whether the last device's segment runs first.
    """

    axis: Any
    count: int
    reverse: bool

    @property
    def position(self) -> Any:
        """The number of this device's segment, in the order in which they run."""
        # Not kept: a rule for derivatives is traced later, and may not use old tracers.
        index = lax.axis_index(self.axis)
        return self.count - 1 - index if self.reverse else index

    @staticmethod
    def here(axis: Any, reverse: bool) -> TimeShard:
        try:
            if not isinstance(axis, (str, tuple)):  # JAX takes an integer for a position
                raise NameError
            return TimeShard(axis, lax.axis_size(axis), reverse)
        except (NameError, TypeError, ValueError):
            rule = "is no axis here; call scan inside of jax.shard_map, over a mesh with this axis"
            raise ScanError(f"scan: axis_name={axis!r:.80} {rule}") from None

    def lengths(self, lengths: Any, steps: int) -> Any:
        """Returns the lengths within this device's segment, from those of whole sequences."""
        index = lax.axis_index(self.axis)
        return None if lengths is None else jnp.clip(jnp.asarray(lengths) - index * steps, 0, steps)

    @property
    def _axes(self) -> Any:
        return varying_axes(lax.axis_index(self.axis))

    @property
    def is_checked(self) -> bool:
        """Whether types say over which axes values vary: inside `jax.shard_map` with `check_vma`."""
        return bool(self._axes)

    def varying(self, value: Any) -> Any:
        """Returns a value typed as one that differs from device to device."""
        return cast(value, self._axes)

    def sent_to_next(self, values: Values) -> Values:
        """Sends values to the device of the next segment. The first gets those of the last, which do not count."""
        pairs = [(d, (d + 1) % self.count) for d in range(self.count)]
        pairs = [(b, a) for a, b in pairs] if self.reverse else pairs
        return [_sent(v, lambda x: lax.ppermute(x, self.axis, pairs)) for v in values]

    def from_last(self, values: Values) -> Values:
        """Returns the values of the last segment's device on every device."""
        last = self.position == self.count - 1
        return [
            _sent(v, lambda x: lax.psum(jnp.where(last, x, jnp.zeros_like(x)), self.axis))
            for v in values
        ]

    def at(self, position: Any, values: Values, otherwise: Values) -> Values:
        """Returns values on the device at a position, and others elsewhere."""
        return [jnp.where(self.position == position, a, b) for a, b in zip(values, otherwise)]

    def everywhere(self, good: Any) -> Any:
        """Returns True on every device of the mesh if a condition holds on all of them."""
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        others = [a for a in jax.sharding.get_abstract_mesh().manual_axes if a not in axes]
        return lax.psum(jnp.where(good, 0, 1), (*axes, *others)) == 0

    def one_after_another(
        self, first: Values, end: Callable[[Values], Values], alone: bool
    ) -> Values:
        """Returns the starts of segments that run one after the other.

        Args:
            first: the start of the first segment.
            end: from the start of a segment to its end.
            alone: only the device whose turn it is computes; otherwise all do, and one result counts.
        """

        def turn(start: Values, number: Any) -> tuple[Values, None]:
            if alone:
                end_of_turn = lax.cond(self.position == number - 1, end, list, start)
            else:
                end_of_turn = end(start)
            return self.at(number, self.sent_to_next(end_of_turn), start), None

        with tag.untagged():
            return lax.scan(turn, list(first), jnp.arange(1, self.count))[0]

    def affine_starts(
        self, first: Values, a: Any, b: Values, apply: Callable[[Any, Values, Values], Values]
    ) -> Values:
        """Returns the starts of affine segments.

        Args:
            first: the start of the first segment.
            a, b: the summaries of this device's segment.
            apply: `(a, start, b) -> end`.
        """
        if sum(map(jaxprs.nbytes, jax.tree.leaves((a, b)))) * self.count > _GATHERED:
            return self.one_after_another(first, lambda start: apply(a, start, b), alone=False)

        def gathered(x: Any) -> Any:
            stack = lax.all_gather(x, self.axis)
            return stack[::-1] if self.reverse else stack

        def step(start: Values, summary: Any) -> tuple[Values, Values]:
            return apply(summary[0], start, summary[1]), start

        with tag.untagged():
            starts = lax.scan(step, list(first), jax.tree.map(gathered, (a, b)))[1]
        return [lax.dynamic_index_in_dim(s, self.position, keepdims=False) for s in starts]


def _sent(value: Any, send: Callable[[Any], Any]) -> Any:
    """Sends an array of any dtype."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            send(jax.random.key_data(value)), impl=jax.random.key_impl(value)
        )
    return send(value.astype(jnp.int8)).astype(bool) if value.dtype == bool else send(value)
