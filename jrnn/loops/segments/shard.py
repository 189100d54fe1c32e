"""Where a device's segment stands in time, and what devices send each other.

Shapes: D devices, T steps of a segment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.jaxprs.mesh_axes import cast, varying_axes
from jrnn.loops.ir import tag

# Every device gets the summaries of all devices if they have no more bytes together.
MAX_GATHERED_BYTES = 2**20

Values = list[Array]
AxisNames = str | tuple[str, ...]


@dataclass(frozen=True)
class TimeShard:
    """Where a device's segment stands in time.

    Attributes:
        axis: the name of the mesh axis.
        count: D.
        reverse: whether the last device's segment runs first.
    """

    axis: AxisNames
    count: int
    reverse: bool

    @property
    def position(self) -> Array:
        """The number of this device's segment, in the order in which they run."""
        # Not kept: a rule for derivatives is traced later, and may not use old tracers.
        index = lax.axis_index(self.axis)
        return self.count - 1 - index if self.reverse else index

    @staticmethod
    def here(axis: AxisNames, reverse: bool) -> TimeShard:
        """Returns where this device's segment stands; raises a ScanError if there is no such axis."""
        try:
            if not isinstance(axis, (str, tuple)):  # JAX takes an integer for a position
                raise NameError
            return TimeShard(axis, lax.axis_size(axis), reverse)
        except (NameError, TypeError, ValueError):
            rule = "is no axis here; call scan inside of jax.shard_map, over a mesh with this axis"
            raise ScanError(f"scan: axis_name={axis!r:.80} {rule}") from None

    def lengths(self, lengths: Array | None, steps: int) -> Array | None:
        """Returns the lengths within this device's segment, from the lengths of whole sequences."""
        if lengths is None:
            return None
        first_step = lax.axis_index(self.axis) * steps
        return jnp.clip(jnp.asarray(lengths) - first_step, 0, steps)

    @property
    def _axes(self) -> frozenset[str]:
        return varying_axes(lax.axis_index(self.axis))

    @property
    def is_checked(self) -> bool:
        """Whether types say over which axes values vary: inside `jax.shard_map` with `check_vma`."""
        return bool(self._axes)

    def varying(self, value: Array) -> Array:
        """Returns a value typed as one that differs from device to device."""
        return cast(value, self._axes)

    def sent_to_next(self, values: Values) -> Values:
        """Sends values to the device of the next segment. The first one gets the last one's, which do not count."""
        step = -1 if self.reverse else 1
        pairs = [(d, (d + step) % self.count) for d in range(self.count)]

        def send(value):
            return lax.ppermute(value, self.axis, pairs)

        return list(map(functools.partial(_sent, send), values))

    def from_last(self, values: Values) -> Values:
        """Returns the values of the last segment's device on every device."""
        is_last = self.position == self.count - 1

        def send(value):
            return lax.psum(jnp.where(is_last, value, jnp.zeros_like(value)), self.axis)

        return list(map(functools.partial(_sent, send), values))

    def at(
        self,
        position: Array | int,
        values: Values,
        otherwise: Values,
    ) -> Values:
        """Returns values on the device at a position, and others elsewhere."""
        return [jnp.where(self.position == position, a, b) for a, b in zip(values, otherwise)]

    def everywhere(self, condition: Array) -> Array:
        """Returns True on every device of the mesh if a condition holds on all of them."""
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        others = [a for a in jax.sharding.get_abstract_mesh().manual_axes if a not in axes]
        return lax.psum(jnp.where(condition, 0, 1), (*axes, *others)) == 0

    def one_after_another(
        self,
        first: Values,
        end: Callable[[Values], Values],
        alone: bool,
    ) -> Values:
        """Returns the starts of segments that run one after the other.

        Args:
            first: the start of the first segment.
            end: from the start of a segment to its end.
            alone: only the device whose turn it is computes; otherwise all do, and one result counts.
        """

        def turn(start, number):
            if alone:
                end_of_turn = lax.cond(self.position == number - 1, end, list, start)
            else:
                end_of_turn = end(start)
            return self.at(number, self.sent_to_next(end_of_turn), start), None

        with tag.untagged():
            start, _ = lax.scan(turn, list(first), jnp.arange(1, self.count))
        return start

    def affine_starts(
        self,
        first: Values,
        a: Values,
        b: Values,
        apply: Callable[[Values, Values, Values], Values],
    ) -> Values:
        """Returns the starts of affine segments.

        Args:
            first: the start of the first segment.
            a, b: the summaries of this device's segment.
            apply: `(a, start, b) -> end`.
        """
        summary_bytes = sum(map(jaxprs.nbytes, jax.tree.leaves((a, b))))
        if summary_bytes * self.count > MAX_GATHERED_BYTES:
            return self.one_after_another(first, lambda start: apply(a, start, b), alone=False)

        def gathered(x):
            stacked = lax.all_gather(x, self.axis)
            return stacked[::-1] if self.reverse else stacked

        def step(start, summary):
            a, b = summary
            return apply(a, start, b), start

        with tag.untagged():
            _, starts = lax.scan(step, list(first), jax.tree.map(gathered, (a, b)))
        return [lax.dynamic_index_in_dim(s, self.position, keepdims=False) for s in starts]


def _sent(send: Callable[[Array], Array], value: Array) -> Array:
    """Sends an array of any dtype."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = send(jax.random.key_data(value))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    if value.dtype == bool:
        return send(value.astype(jnp.int8)).astype(bool)
    return send(value)
