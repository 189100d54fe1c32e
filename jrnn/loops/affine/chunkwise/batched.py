"""The chunk program for accelerators: all chunks are prepared at once, and a loop over chunks carries only S.

On a GPU the number of kernels determines the time of a chunk. What does not depend on S (scores, inverses, decays) is
computed for all chunks in batched products before the loop, and what S does not depend on (outputs) after it. JAX
differentiates this program, so its reverse pass has the same form.

One check decides for all chunks: where a result is not finite, or products of decays are so large that a chunk would lose
digits, all steps run one by one, as `program.py` says. A check for each chunk would make the host wait for the device.

The products have full precision where the step gives none. A step's products of S and vectors have it on a GPU, because XLA
computes them without its units for matrices; at the default precision, those of a chunk would be rounded to TF32.

Shapes: T time, C steps of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.jaxprs.tangents import is_smooth, with_derivative
from jrnn.loops.affine.chunkwise.guarded import linear_map, traced_with
from jrnn.loops.affine.chunkwise.program import ChunkBody, no_tangent
from jrnn.loops.affine.chunkwise.solve import SavedForBackward
from jrnn.loops.affine.rounds import all_finite
from jrnn.loops.ir import Results, ScanParams
from jrnn.loops.passes.split_loop import split_around_carry

Flat = Sequence[Any]
# With decays of 1.2 at each of 128 steps, float32 gradients had 1,000 times the errors of the steps in chunks of 64.
_MOST_GROWTH = 8.0


@dataclass(frozen=True)
class AllChunks:
    """The steps of all chunks.

    Attributes:
        body: the steps of one chunk.
        count: the number of chunks.
    """

    body: ChunkBody
    count: int

    def run(self, states: Flat, consts: Flat, xs: Flat, valid: Any) -> Results:
        """Returns the last states and the outputs [T / C, C, ...].

        Args:
            states, consts: values of the variables.
            xs: values of the inputs, [T / C, C, ...].
            valid: [T / C, C] booleans, or None if all steps are valid.
        """
        flat, tree = jax.tree.flatten((list(states), list(consts), list(xs), valid))
        n_states = len(states)
        n_args = len(flat)

        def by_products(*args: Any) -> tuple[list[Any], tuple[list[Any], Any]]:
            return self.run_by_products(*tree.unflatten(args))

        def checked(results: Flat, before: Flat, growth: Any, args: Flat) -> tuple[Flat, Flat, Any]:
            growth_check = jnp.where(growth <= _MOST_GROWTH, 0.0, jnp.inf)
            good = all_finite(
                [jax.lax.stop_gradient(x) for x in (growth_check, *results) if is_smooth(x)]
            )
            by_steps = lambda _, args: self.run_by_steps(*tree.unflatten(args))  # noqa: E731
            return *jax.lax.cond(
                good, lambda results, _: results, by_steps, (results, before), args
            ), good

        def rule(args: Flat, argnums: Sequence[int], moving: Flat) -> tuple[Flat, Flat]:
            def of_moving(*moving: Any) -> tuple[list[Any], tuple[list[Any], Any]]:
                return by_products(*jaxprs.replaced(args, argnums, moving))

            results, linear, (before, growth) = jax.linearize(
                of_moving, *(args[i] for i in argnums), has_aux=True
            )
            residuals, of_linear = jax.tree.flatten(linear)
            primal, before, good = checked(results, before, growth, args)
            smooth = list(map(is_smooth, primal))

            def of_products(*operands: Any) -> list[Any]:
                moved = operands[-len(moving) :]
                tangents = of_linear.unflatten(operands[: len(residuals)])(*moved)
                return [t for t, s in zip(tangents, smooth) if s]

            def of_steps(*operands: Any) -> list[Any]:
                before = operands[len(residuals) :][:n_states]
                args = operands[-len(moving) - n_args :][:n_args]
                moved = operands
                tangents = [None] * n_args
                for argnum, tangent in zip(argnums, moved[-len(moving) :]):
                    tangents[argnum] = tangent
                each = self.tangents_by_steps(before, tree.unflatten(args), tangents)
                return [t for t, s in zip(each, smooth) if s]

            operands = [*residuals, *before, *args]
            both = (traced_with(fn, [*operands, *moving]) for fn in (of_products, of_steps))
            tangents = iter(linear_map(*both, good, operands, moving))
            return primal, [next(tangents) if s else None for s in smooth]

        def primal(*args: Any) -> Flat:
            results, (before, growth) = by_products(*args)
            return checked(results, before, growth, args)[0]

        results = with_derivative(primal, rule)(*flat)
        return results[:n_states], results[n_states:]

    def run_by_products(
        self, states: Flat, consts: Flat, xs: Flat, valid: Any
    ) -> tuple[list[Any], Any]:
        """Returns the last states and the outputs; the states before chunks, and the largest products of their decays."""
        n_states = len(states)
        n_consts = len(consts)
        xs_and_valid = list(xs) if valid is None else [*xs, valid]

        def chunk(*args: Any) -> list[Any]:
            consts = args[:n_consts]
            states = args[n_consts:][:n_states]
            xs = args[n_consts + n_states :]
            valid_steps = None if valid is None else xs[-1]
            saved = SavedForBackward()
            results = self.body.run_by_products(
                states, consts, xs[: len(self.body.loop.xs)], valid_steps, saved
            )
            growth = [largest() for largest in saved.growth]
            return [*results, *states, functools.reduce(jnp.maximum, growth, jnp.ones(()))]

        each = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs_and_valid)
        program = jaxprs.trace(chunk, [*map(jax.typeof, consts), *map(jax.typeof, states), *each])
        loop = ScanParams(None, n_consts, n_states, self.count, False).loop(program)
        # Only what is between the old and the new states stays in the loop.
        parts = split_around_carry(loop)
        last, ys = parts.run([*program.consts, *consts], list(states), xs_and_valid, self.count)
        n_outs = len(ys) - n_states - 1
        return [*last, *ys[:n_outs]], (ys[n_outs:-1], ys[-1])

    def run_by_steps(
        self, states: Flat, consts: Flat, xs: Flat, valid: Any
    ) -> tuple[list[Any], list[Any]]:
        """Returns what `run_by_products` returns, from the steps one by one."""
        n_states = len(states)

        def chunk(states: Any, inputs: Any) -> Any:
            results = self.body.run_by_steps(states, consts, *inputs)
            return results[:n_states], (results[n_states:], states)

        last, (outs, before) = jax.lax.scan(chunk, list(states), (list(xs), valid), self.count)
        return [*last, *outs], before

    def tangents_by_steps(self, before: Flat, args: Any, tangents: Sequence[Any]) -> list[Any]:
        """Returns the tangents of the results of `run_by_steps`.

        Args:
            before: the states before each chunk.
            args: the arguments of `run_by_steps`.
            tangents: of their leaves, or None for those that have none.
        """
        states, consts, xs, valid = args
        remaining = iter(tangents)
        moved, moved_consts = (
            [_tangent(next(remaining), v) for v in values] for values in (states, consts)
        )
        moved_xs = [next(remaining) for _ in xs]

        def chunk(moved: Any, inputs: Any) -> Any:
            start, x, valid_steps, moved_x = inputs
            moved_x = [_tangent(t, v) for t, v in zip(moved_x, x)]
            at = (start, consts, x, valid_steps)
            along = (moved, moved_consts, moved_x, None)
            results = self.body.tangents_by_steps(at, along)
            return results[: len(start)], results[len(start) :]

        last, outs = jax.lax.scan(
            chunk, moved, (list(before), list(xs), valid, moved_xs), self.count
        )
        return [*last, *outs]


def _tangent(tangent: Any, value: Any) -> Any:
    return no_tangent(value) if tangent is None else tangent
