"""The chunk program for accelerators: all chunks are prepared at once, and a loop over chunks carries only S.

On a GPU the number of kernels determines the time of a chunk. What does not depend on S (scores, inverses, decays) is
computed for all chunks in batched products before the loop, and what S does not depend on (outputs) after it. JAX
differentiates this program, so its reverse pass has the same form:

        all chunks at once           one chunk after the other         all chunks at once
        scores, inverses, decays --> S of the next chunk from S -----> outputs

One check decides for all chunks: where a result is not finite, or products of decays are so large that a chunk would lose
digits, all steps run one by one, as `chunk_body.py` says. A check for each chunk would make the host wait for the device.

The products have the type of the step's (`matrix.py`: `batched_precision`). Queries, keys and values of 16 bits are
multiplied in their type, with sums in float32; states, decays and the inverse are float32. For float32, they have full
precision where the step gives none. A step's products of S and vectors have it on a GPU, because XLA computes them without
its units for matrices; at the default precision, a chunk's products would be rounded to TF32.

Shapes: T time, C steps of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs.tangents import with_derivative
from jrnn.loops.affine.chunkwise.chunk_body import (
    ChunkBody,
    ChunkInputs,
    no_tangent,
    of_smooth,
    with_tangents,
)
from jrnn.loops.affine.chunkwise.guarded import (
    Arrays,
    LinearMap,
    Pair,
    are_finite,
    or_else,
)
from jrnn.loops.affine.chunkwise.solve import SavedForBackward
from jrnn.loops.ir import Results, ScanParams
from jrnn.loops.passes.split_loop import split_around_carry

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

    def run(self, inputs: ChunkInputs) -> Results:
        """Returns the last states and the outputs, [T / C, C, ...]. Inputs of steps are [T / C, C, ...], too."""
        flat, tree = jax.tree.flatten(inputs)
        program = _FlatProgram(self, tree)
        results = with_derivative(program.results, program.rule)(*flat)
        n_states = len(inputs.states)
        return results[:n_states], results[n_states:]

    def run_by_products(self, inputs: ChunkInputs) -> tuple[Arrays, tuple[Arrays, Array]]:
        """Returns the last states and the outputs; the states before chunks, and the largest products of their decays."""
        states, consts, xs, valid = inputs
        n_states = len(states)
        n_consts = len(consts)
        xs_and_valid = list(xs) if valid is None else [*xs, valid]

        def chunk(*args: Array) -> Arrays:
            consts = args[:n_consts]
            states = args[n_consts:][:n_states]
            xs = args[n_consts + n_states :]
            valid_steps = None if valid is None else xs[-1]
            xs = xs[: len(self.body.loop.xs)]
            saved = SavedForBackward()
            chunk_inputs = ChunkInputs(states, consts, xs, valid_steps)
            results = self.body.run_by_products(chunk_inputs, saved)
            growths = [largest() for largest in saved.growth]
            growth = functools.reduce(jnp.maximum, growths, jnp.ones(()))
            return [*results, *states, growth]

        types = list(map(jax.typeof, [*consts, *states]))
        types += [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs_and_valid]
        program = jaxprs.trace(chunk, types)
        scan = ScanParams(
            jaxpr=None,
            n_consts=n_consts,
            n_carry=n_states,
            length=self.count,
            reverse=False,
        )
        # Only what is between the old and the new states stays in the loop.
        parts = split_around_carry(scan.loop(program))
        constants = [*program.consts, *consts]
        last, (*ys, growth) = parts.run(constants, states, xs_and_valid, self.count)
        n_outs = len(ys) - n_states
        before = ys[n_outs:]
        return [*last, *ys[:n_outs]], (before, growth)

    def run_by_steps(self, inputs: ChunkInputs) -> Pair:
        """Returns the results of `run_by_products`, without the growth, computed step by step."""
        states, consts, xs, valid = inputs
        n_states = len(states)

        def chunk(states: Arrays, inputs: Any) -> tuple[Arrays, Pair]:
            results = self.body.run_by_steps(ChunkInputs(states, consts, *inputs))
            return results[:n_states], (results[n_states:], states)

        stacked = (list(xs), valid)
        last, ys = jax.lax.scan(chunk, list(states), stacked, self.count)
        outs, before = ys
        return [*last, *outs], before

    def tangents_by_steps(
        self,
        before: Arrays,
        inputs: ChunkInputs,
        tangents: ChunkInputs,
    ) -> Arrays:
        """Returns the tangents of the results of `run_by_steps`.

        Args:
            before: the states before each chunk.
            inputs: the inputs of `run_by_steps`.
            tangents: their tangents, or None for arguments without one.
        """
        states, consts, xs, valid = inputs
        moved_states, moved_consts, moved_xs, _ = tangents
        moved = _filled(moved_states, states)
        moved_consts = _filled(moved_consts, consts)

        def chunk(moved: Arrays, inputs: Any) -> Pair:
            start, x, valid_steps, moved_x = inputs
            values = ChunkInputs(start, consts, x, valid_steps)
            along = ChunkInputs(moved, moved_consts, _filled(moved_x, x), None)
            results = self.body.tangents_by_steps(values, along)
            return results[: len(start)], results[len(start) :]

        stacked = (list(before), list(xs), valid, list(moved_xs))
        last, outs = jax.lax.scan(chunk, moved, stacked, self.count)
        return [*last, *outs]


@dataclass(frozen=True)
class _FlatProgram:
    """All chunks as a function of flat arrays, and its tangents.

    Attributes:
        chunks: the steps of all chunks.
        tree: the structure of the inputs.
    """

    chunks: AllChunks
    tree: Any

    def results(self, *args: Array) -> Arrays:
        results, (before, growth) = self._by_products(*args)
        return self._checked(results, before, growth, args)[0]

    def rule(
        self,
        args: Arrays,
        argnums: Sequence[int],
        moving: Arrays,
    ) -> tuple[Arrays, list[Array | None]]:
        """Returns the results and their tangents, as `with_derivative` asks for them."""

        def of_moving(*moving: Array) -> Any:
            return self._by_products(*jaxprs.replaced(args, argnums, moving))

        results, linear, (before, growth) = jax.linearize(
            of_moving, *jaxprs.take(args, argnums), has_aux=True
        )
        linear_residuals, linear_tree = jax.tree.flatten(linear)
        results, before, good = self._checked(results, before, growth, args)
        residuals = [*linear_residuals, *before, *args]
        n_linear = len(linear_residuals)
        n_before = len(before)

        def tangents_of_products(*operands: Array) -> Arrays:
            linear = linear_tree.unflatten(operands[:n_linear])
            tangents = linear(*operands[len(residuals) :])
            return with_tangents(tangents)

        def tangents_of_steps(*operands: Array) -> Arrays:
            before = operands[n_linear:][:n_before]
            args = operands[n_linear + n_before : len(residuals)]
            tangents = [None] * len(args)
            for argnum, tangent in zip(argnums, operands[len(residuals) :]):
                tangents[argnum] = tangent
            inputs = self.tree.unflatten(args)
            moved = self.tree.unflatten(tangents)
            return with_tangents(self.chunks.tangents_by_steps(before, inputs, moved))

        linear_map = LinearMap.of(tangents_of_products, tangents_of_steps, residuals, moving)
        return results, of_smooth(results, linear_map.run(good, [*residuals, *moving]))

    def _by_products(self, *args: Array) -> tuple[Arrays, tuple[Arrays, Array]]:
        return self.chunks.run_by_products(self.tree.unflatten(args))

    def _by_steps(self, *args: Array) -> Pair:
        return self.chunks.run_by_steps(self.tree.unflatten(args))

    def _checked(
        self,
        results: Arrays,
        before: Arrays,
        growth: Array,
        args: Arrays,
    ) -> tuple[Arrays, Arrays, Array]:
        """Returns the results, the states before chunks, and True if products computed them, not steps."""
        growth_check = jnp.where(growth <= _MOST_GROWTH, 0.0, jnp.inf)
        good = are_finite([growth_check, *results])
        results, before = or_else(good, (results, before), self._by_steps, args)
        return results, before, good


def _filled(tangents: Iterable[Array | None], values: Arrays) -> Arrays:
    """Returns the tangents of values, with zeros for None."""
    return [no_tangent(v) if t is None else t for t, v in zip(tangents, values)]
