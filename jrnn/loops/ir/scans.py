"""Scans of pytrees: as scans of flat lists, and as loops over chunks of steps.

Shapes: T time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import XLA_KEEPS_BARRIERS, scan_p
from jrnn.loops.ir import tag
from jrnn.loops.ir.loop import Loop, ScanParams

# `(carry, xs, steps) -> (carry, ys)` over some of the steps.
RunSome = Callable[[Any, Any, Any], tuple[Any, Any]]
_UNROLLED = (
    3  # so many pieces before the last one are no loop, which would copy what it reads and writes
)


# A pytree of arrays, such as a carry.
Tree = Any
# `(carry, x) -> (carry, y)`, for pytrees.
StepFn = Callable[[Tree, Tree], tuple[Tree, Tree]]


class FlatScan(NamedTuple):
    """A scan of flat lists.

    Attributes:
        step: `(carry, x) -> [*carry, *y]`, without the tag.
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
    def of(f: Callable[..., Any], init: Any, xs: Any, length: Any, reverse: bool) -> FlatScan:
        """Returns a scan of pytrees as one of lists. Raises the errors of `jax.lax.scan`."""
        last, ys = jax.eval_shape(lambda init, xs: lax.scan(f, init, xs, length, reverse), init, xs)
        leaves, tree = jax.tree.flatten(promoted(init, last))
        stacks, of_x = jax.tree.flatten(jax.tree.map(jnp.asarray, xs))

        def step(carry: Any, x: Any) -> list[Any]:
            with tag.untagged():
                new, y = f(jax.tree.unflatten(tree, carry), jax.tree.unflatten(of_x, x))
            typed = (jnp.asarray(v).astype(h.dtype) for v, h in zip(jax.tree.leaves(new), leaves))
            return [*typed, *jax.tree.leaves(y)]

        return FlatScan(
            step,
            leaves,
            stacks,
            stacks[0].shape[0] if stacks else length,
            tree,
            jax.tree.structure(ys),
        )

    def closed(self) -> Any:
        """Returns the step as a closed jaxpr."""
        of_step = [
            jax.eval_shape(lambda v: lax.index_in_dim(v, 0, keepdims=False), x) for x in self.xs
        ]
        return jax.make_jaxpr(self.step)(self.init, of_step)


def traced_loops(fn: Callable[..., Any], *args: Any) -> list[Loop]:
    """Returns the loops of the scans that a function calls, in their order. Nothing is lowered."""
    loops = []
    for eqn in jax.make_jaxpr(fn)(*args).jaxpr.eqns:
        if eqn.primitive is scan_p:
            scan = ScanParams.of(eqn.params)
            loops.append(scan.loop(jaxprs.inlined(scan.jaxpr, jaxprs.LOWERED_CALLS)))
    return loops


def promoted(init: Any, last: Any) -> Any:
    """Returns the leaves of `init` with the dtypes and weak types of the leaves of `last`."""

    def leaf(x: Any, a: Any) -> Any:
        x_type = jax.typeof(x)
        same = x_type.dtype == a.dtype and getattr(x_type, "weak_type", False) == getattr(
            a, "weak_type", False
        )
        return jnp.asarray(x) if same else lax.convert_element_type(x, a.dtype)

    return jax.tree.map(leaf, init, last)


def scan_in_chunks(
    run: RunSome,
    carry: Any,
    xs: Any,
    steps: int,
    size: int,
    reverse: bool,
    wrap: Callable[..., Any] = lambda f: f,
) -> tuple[Any, Any]:
    """Runs a loop as a loop over chunks of steps, which needs memory for one chunk at a time.

    Args:
        run: runs some of the steps.
        carry, xs: the inputs of the whole loop, pytrees.
        steps: T.
        size: the number of steps in a chunk; the last chunk may have fewer.
        reverse: whether time runs backwards.
        wrap: wraps the function that runs one chunk, such as `jax.checkpoint`.

    Returns:
        The last carry, and the stacked outputs.
    """
    whole = steps // size
    head = jax.tree.map(lambda x: jnp.reshape(x[: whole * size], (whole, size, *x.shape[1:])), xs)
    tail = jax.tree.map(lambda x: x[whole * size :], xs)

    def run_head(carry: Any) -> tuple[Any, Any]:
        body = wrap(lambda carry, chunk: run(carry, chunk, size))
        carry, ys = jax.lax.scan(body, carry, head, length=whole, reverse=reverse)
        return carry, jax.tree.map(lambda y: jnp.reshape(y, (whole * size, *y.shape[2:])), ys)

    remainder = steps - whole * size
    if not remainder:
        return run_head(carry)
    run_tail = wrap(lambda carry, chunk: run(carry, chunk, remainder))
    if reverse:
        carry, tail_ys = run_tail(carry, tail)
        carry, head_ys = run_head(carry)
    else:
        carry, head_ys = run_head(carry)
        carry, tail_ys = run_tail(carry, tail)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), head_ys, tail_ys)


def scan_in_pieces(
    run: RunSome, carry: Any, xs: Any, steps: int, size: int, reverse: bool
) -> tuple[Any, Any]:
    """Runs a loop in pieces, of which all but the last are a `jax.checkpoint`: of these only the first carry is a residual.

    The reverse pass begins with the last piece, so that computing its steps a second time would save nothing. Where XLA
    drops the barriers of a checkpoint, all pieces are in a loop, and all are computed again.

    Args:
        run: runs some of the steps.
        carry, xs: the inputs of the whole loop, pytrees.
        steps: T.
        size: the most steps of a piece.
        reverse: whether time runs backwards.

    Returns:
        The last carry, and the stacked outputs.
    """

    def part(start: int, stop: int) -> Any:
        """Returns the inputs from a step to another, counted in the direction of time."""
        ends = (steps - stop, steps - start) if reverse else (start, stop)
        return jax.tree.map(lambda x: x[slice(*ends)], xs)

    def in_loop(carry: Any, stop: int) -> tuple[Any, Any]:
        # Inside a loop, XLA cannot merge the second computation with the first, so `prevent_cse` is not needed.
        wrap = functools.partial(jax.checkpoint, prevent_cse=False)
        return scan_in_chunks(run, carry, part(0, stop), stop, size, reverse, wrap)

    count = math.ceil(steps / size)
    if not XLA_KEEPS_BARRIERS and count > 1:
        return in_loop(carry, steps)
    if steps - steps // count * (count - 1) <= size:
        size = steps // count  # the last piece is the longest
    again = size * (count - 1)
    outputs = []
    if count - 1 > _UNROLLED:
        carry, ys = in_loop(carry, again)
        outputs.append(ys)
    else:
        piece = jax.checkpoint(lambda carry, xs: run(carry, xs, size))
        for start in range(0, again, size):
            carry, ys = piece(carry, part(start, start + size))
            outputs.append(ys)
    carry, ys = run(carry, part(again, steps), steps - again)
    outputs.append(ys)
    return carry, jax.tree.map(
        lambda *parts: jnp.concatenate(parts), *(outputs[::-1] if reverse else outputs)
    )
