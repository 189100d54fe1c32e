"""A scan of pytrees as one of flat lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jrnn.loops.loop import mark


class FlatScan(NamedTuple):
    """A scan of flat lists.

    Attributes:
        step: `(carry, x) -> [*carry, *y]`, without the mark.
        init, xs: the leaves of the initial carry and of the inputs.
        length: T.
        carry, ys: the structures of the carry and of the outputs.
    """

    step: Callable[[Any, Any], list[Any]]
    init: list[Any]
    xs: list[Any]
    length: Any
    carry: Any
    ys: Any

    @staticmethod
    def of(f: Callable, init: Any, xs: Any, length: Any, reverse: bool) -> FlatScan:
        """Returns a scan of pytrees as one of lists. Raises the errors of `jax.lax.scan`."""
        last, ys = jax.eval_shape(lambda init, xs: lax.scan(f, init, xs, length, reverse), init, xs)
        leaves, tree = jax.tree.flatten(promoted(init, last))
        stacks, of_x = jax.tree.flatten(jax.tree.map(jnp.asarray, xs))

        def step(carry: Any, x: Any) -> list[Any]:
            with mark.unmarked():
                new, y = f(jax.tree.unflatten(tree, carry), jax.tree.unflatten(of_x, x))
            typed = (jnp.asarray(v).astype(h.dtype) for v, h in zip(jax.tree.leaves(new), leaves))
            return [*typed, *jax.tree.leaves(y)]

        return FlatScan(step, leaves, stacks, stacks[0].shape[0] if stacks else length, tree, jax.tree.structure(ys))

    def closed(self) -> Any:
        """Returns the step as a closed jaxpr."""
        of_step = [jax.eval_shape(lambda v: lax.index_in_dim(v, 0, keepdims=False), x) for x in self.xs]
        return jax.make_jaxpr(self.step)(self.init, of_step)


def promoted(init: Any, last: Any) -> Any:
    """Returns the leaves of `init` with the dtypes and weak types of the leaves of `last`."""

    def leaf(x: Any, a: Any) -> Any:
        given = jax.typeof(x)
        same = given.dtype == a.dtype and getattr(given, "weak_type", False) == getattr(a, "weak_type", False)
        return jnp.asarray(x) if same else lax.convert_element_type(x, a.dtype)

    return jax.tree.map(leaf, init, last)
