"""Scans of JAX: the parameters of an equation, scans of pytrees as scans of flat lists, and loops over chunks of steps.

Shapes: T time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jrnn import jaxprs
from jrnn.jaxprs import Program
from jrnn.jaxprs.interned import interned
from jrnn.jaxprs.jax_internals import XLA_KEEPS_BARRIERS, ClosedJaxpr, scan_p
from jrnn.jaxprs.programs import Calls
from jrnn.loops.ir import tag
from jrnn.loops.ir.loop import Length, Loop, Values

# A pytree of arrays, such as a carry.
Tree = Any
# `(carry, x) -> (carry, y)`, for pytrees.
StepFn = Callable[[Tree, Tree], tuple[Tree, Tree]]
# `(carry, xs, steps) -> (carry, ys)` over some of the steps.
RunSome = Callable[[Tree, Tree, int], tuple[Tree, Tree]]
# Up to this number of checkpointed segments are unrolled, since a loop copies its buffers.
MAX_UNROLLED_SEGMENTS = 3


@dataclass(frozen=True)
class ScanParams:
    """The parameters of a scan's equation.

    Attributes:
        jaxpr: the step, a closed jaxpr from constants, carries and inputs to new carries and outputs.
        n_consts, n_carry: the numbers of constants and carries.
        length, reverse, unroll: as in `jax.lax.scan`.
        equation: the parameters as JAX has them, if it is an equation of JAX.
    """

    jaxpr: ClosedJaxpr
    n_consts: int
    n_carry: int
    length: Length
    reverse: bool
    unroll: int = 1
    equation: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(params: dict[str, Any]) -> ScanParams:
        """Returns the parameters of JAX's equation."""
        n_consts, n_carry = jaxprs.scan_counts(params)
        return ScanParams(
            jaxpr=interned(params["jaxpr"]),
            n_consts=n_consts,
            n_carry=n_carry,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
            equation=params,
        )

    @staticmethod
    def of_loop(loop: Loop, length: Length = None) -> ScanParams:
        """Returns the parameters of an equation that runs a loop, or some number of its steps."""
        return ScanParams(
            jaxpr=loop.closed(),
            n_consts=len(loop.consts),
            n_carry=len(loop.carry),
            length=length or loop.length,
            reverse=loop.reverse,
            unroll=loop.unroll,
        )

    def partition(self, values: Values) -> tuple[Values, Values, Values]:
        """Returns the constants, the carries and the inputs of a list of all."""
        end = self.n_consts + self.n_carry
        return values[: self.n_consts], values[self.n_consts : end], values[end:]

    def flat(
        self, run: Callable[..., Iterable[Any]], values: Values = ()
    ) -> Callable[..., list[Array]]:
        """Returns a function of a list of all, from one of constants, carries, inputs and the length.

        `values` has the values of constants that are not in the list, which come first.
        """

        def flat(*args: Array) -> list[Array]:
            consts, init, xs = self.partition(args)
            carry, ys = run([*values, *consts], init, xs, self.length)
            return [*carry, *ys]

        return flat

    def inlined(self, calls: Calls = jaxprs.CALLS) -> tuple[Loop, tuple[Any, ...]]:
        """Returns the loop with calls inlined, and the values of its first constants, which the step closes over."""
        program = jaxprs.inlined(self.jaxpr, calls)
        return self.loop(program), program.consts

    def loop(self, program: Program) -> Loop:
        """Returns the loop of the step as a program, whose own constants (`program.consts`) are first in `Loop.consts`."""
        consts, carry, xs = self.partition(program.invars)
        return Loop(
            eqns=program.eqns,
            consts=(*program.constvars, *consts),
            carry=tuple(carry),
            xs=tuple(xs),
            carry_out=program.outvars[: self.n_carry],
            ys=program.outvars[self.n_carry :],
            length=self.length,
            reverse=self.reverse,
            unroll=self.unroll,
        )


class FlatScan(NamedTuple):
    """A scan of flat lists.

    Attributes:
        step: `(carry, x) -> [*carry, *y]`, without the tag.
        init, xs: the leaves of the initial carry and of the inputs.
        length: T.
        carry, ys: the structures of the carry and of the outputs.
    """

    step: Callable[[Sequence[Array], Sequence[Array]], list[Array]]
    init: list[Array]
    xs: list[Array]
    length: Any
    carry: Tree
    ys: Tree

    @staticmethod
    def of(f: StepFn, init: Tree, xs: Tree, length: Any, reverse: bool) -> FlatScan:
        """Returns a scan of pytrees as one of lists. Raises the errors of `jax.lax.scan`."""
        last, ys = jax.eval_shape(lambda init, xs: lax.scan(f, init, xs, length, reverse), init, xs)
        leaves, of_carry = jax.tree.flatten(promoted(init, last))
        stacked, of_x = jax.tree.flatten(jax.tree.map(jnp.asarray, xs))

        def step(carry: Sequence[Array], x: Sequence[Array]) -> list[Array]:
            with tag.untagged():
                new, y = f(jax.tree.unflatten(of_carry, carry), jax.tree.unflatten(of_x, x))
            outs = []
            for value, h in zip(jax.tree.leaves(new), leaves):
                outs.append(jnp.asarray(value).astype(h.dtype))
            return outs + jax.tree.leaves(y)

        return FlatScan(
            step=step,
            init=leaves,
            xs=stacked,
            length=stacked[0].shape[0] if stacked else length,
            carry=of_carry,
            ys=jax.tree.structure(ys),
        )

    def closed(self) -> Any:
        """Returns the step as a closed jaxpr."""

        def first(x: Array) -> Array:
            return lax.index_in_dim(x, 0, keepdims=False)

        x_types = [jax.eval_shape(first, x) for x in self.xs]
        return jax.make_jaxpr(self.step)(self.init, x_types)


def traced_loops(fn: Callable[..., Any], *args: Any) -> list[Loop]:
    """Returns the loops of the scans that a function calls, in their order. Nothing is lowered."""
    loops = []
    for eqn in jax.make_jaxpr(fn)(*args).jaxpr.eqns:
        if eqn.primitive is scan_p:
            loop, _ = ScanParams.of(eqn.params).inlined(jaxprs.LOWERED_CALLS)
            loops.append(loop)
    return loops


def promoted(init: Tree, last: Tree) -> Tree:
    """Returns the leaves of `init` with the dtypes and weak types of the leaves of `last`."""

    def is_weak(aval: Any) -> bool:
        return getattr(aval, "weak_type", False)

    def leaf(x: Array, last: Any) -> Array:
        aval = jax.typeof(x)
        if aval.dtype == last.dtype and is_weak(aval) == is_weak(last):
            return jnp.asarray(x)
        return lax.convert_element_type(x, last.dtype)

    return jax.tree.map(leaf, init, last)


def recomputed(run: RunSome) -> RunSome:
    """Returns the same run of some steps, of which the reverse pass stores the arguments alone, and computes it again.

    It is for the body of a loop, where XLA cannot merge the second computation with the first: `prevent_cse` is not needed.
    """
    return jax.checkpoint(run, prevent_cse=False, static_argnums=2)


def scan_in_chunks(
    run: RunSome,
    carry: Tree,
    xs: Tree,
    steps: int,
    size: int,
    reverse: bool,
) -> tuple[Tree, Tree]:
    """Runs a loop as a loop over chunks of steps, which needs memory for one chunk at a time.

    If `run` is `recomputed`, the reverse pass reads the carries between chunks alone.

    Args:
        run: runs some of the steps.
        carry, xs: the inputs of the whole loop, pytrees.
        steps: T.
        size: the number of steps in a chunk; the last chunk may have fewer.
        reverse: whether time runs backwards.

    Returns:
        The last carry, and the stacked outputs.
    """
    count, remainder = divmod(steps, size)
    whole = steps - remainder
    head = jax.tree.map(lambda x: jnp.reshape(x[:whole], (count, size, *x.shape[1:])), xs)
    tail = jax.tree.map(lambda x: x[whole:], xs)

    def run_chunk(carry: Tree, chunk: Tree) -> tuple[Tree, Tree]:
        return run(carry, chunk, size)

    def run_head(carry: Tree) -> tuple[Tree, Tree]:
        carry, ys = jax.lax.scan(run_chunk, carry, head, length=count, reverse=reverse)
        return carry, jax.tree.map(lambda y: jnp.reshape(y, (whole, *y.shape[2:])), ys)

    if not remainder:
        return run_head(carry)
    if reverse:
        carry, tail_ys = run(carry, tail, remainder)
        carry, head_ys = run_head(carry)
    else:
        carry, head_ys = run_head(carry)
        carry, tail_ys = run(carry, tail, remainder)
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), head_ys, tail_ys)


def scan_in_segments(
    run: RunSome, carry: Tree, xs: Tree, steps: int, size: int, reverse: bool
) -> tuple[Tree, Tree]:
    """Runs a loop in segments. All but the last one are a `jax.checkpoint`, whose first carry alone is a residual.

    The reverse pass begins with the last segment, so that computing its steps a second time would save nothing. Where XLA
    drops the barriers of a checkpoint, all segments are in a loop, and all are computed again.

    Args:
        run: runs some of the steps.
        carry, xs: the inputs of the whole loop, pytrees.
        steps: T.
        size: the most steps of a segment.
        reverse: whether time runs backwards.

    Returns:
        The last carry, and the stacked outputs.
    """

    def inputs(start: int, stop: int) -> Tree:
        """Returns the inputs from a step to another, counted in the direction of time."""
        span = slice(steps - stop, steps - start) if reverse else slice(start, stop)
        return jax.tree.map(lambda x: x[span], xs)

    def in_loop(carry: Tree, stop: int) -> tuple[Tree, Tree]:
        return scan_in_chunks(recomputed(run), carry, inputs(0, stop), stop, size, reverse)

    count = math.ceil(steps / size)
    if not XLA_KEEPS_BARRIERS and count > 1:
        return in_loop(carry, steps)
    if steps - steps // count * (count - 1) <= size:
        size = steps // count  # the last segment is the longest
    recomputed_steps = size * (count - 1)
    outputs = []
    if count - 1 > MAX_UNROLLED_SEGMENTS:
        carry, ys = in_loop(carry, recomputed_steps)
        outputs.append(ys)
    else:
        segment = jax.checkpoint(lambda carry, xs: run(carry, xs, size))
        for start in range(0, recomputed_steps, size):
            carry, ys = segment(carry, inputs(start, start + size))
            outputs.append(ys)
    last = inputs(recomputed_steps, steps)
    carry, ys = run(carry, last, steps - recomputed_steps)
    outputs.append(ys)
    if reverse:
        outputs.reverse()
    return carry, jax.tree.map(lambda *ys: jnp.concatenate(ys), *outputs)
