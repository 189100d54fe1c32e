"""The steps of one chunk: C steps of a loop with affine matrix carries, as a few products of matrices or one by one.

Between chunks only S is carried. For the reverse pass only S at the chunk boundaries is stored, next to the inputs: the
tangent of a chunk is one operation, which has nothing else to store.

Products such as `q . k` are no values of the recurrence. If one of them overflows, or an input is NaN or infinite, the
results of a chunk are not all finite. Then the chunk runs step by step, so that every result is one of the recurrence. The
same holds for tangents and cotangents (`guarded.py`).

        states, inputs ---> by products ---> all finite? --yes--> new states, outputs
                       \\--> step by step <-----no

XLA:CPU decides the form of the program. It compiles a copy of an array of several axes, into the stack of all chunks, many
times slower than a copy of a row: arrays that pass the border of a chunk have one axis. It fuses a reshape with what
computes its operand, and runs a kernel with one long axis many times slower: barriers stand in front of reshapes.

Shapes: T time, C steps of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs.tangents import is_smooth, with_derivative
from jrnn.loops.affine.chunkwise.chunk import Chunk
from jrnn.loops.affine.chunkwise.guarded import (
    Arrays,
    LinearMap,
    Pair,
    are_finite,
    hidden_p,
    or_else,
    traced_with,
)
from jrnn.loops.affine.chunkwise.labeled import Factors, variables
from jrnn.loops.affine.chunkwise.solve import SavedForBackward
from jrnn.loops.affine.chunkwise.step_values import StepValues
from jrnn.loops.affine.matrix import AffineForm
from jrnn.loops.ir import Loop, Results

Shape = tuple[int, ...]


class ChunkInputs(NamedTuple):
    """What a chunk is computed from, or the tangents of it; with one more axis in front of `xs` and `valid`, all chunks.

    Attributes:
        states: the carries before the chunk.
        consts: the values that are the same at all steps.
        xs: the inputs of the steps, [C, ...].
        valid: [C] booleans, or None if all steps are valid.
    """

    states: Arrays
    consts: Arrays
    xs: Arrays
    valid: Array | None


@dataclass(frozen=True)
class ChunkBody:
    """The steps of one chunk, for carries that run in chunks together.

    Attributes:
        forms: of the carries.
        loop: the loop of these carries, whose ys are what each step computes.
        steps: C.
        batched: all chunks are prepared at once, on an accelerator: products have the type of the step's, and the number of
            kernels determines the time.
    """

    forms: tuple[AffineForm, ...]
    loop: Loop
    steps: int
    batched: bool = False

    def run(self, inputs: ChunkInputs) -> Arrays:
        """Returns the new states and the outputs. If they are not all finite, it returns the results of `run_by_steps`.

        Arrays of states, inputs of steps and results have one axis here.
        """
        flat, tree = jax.tree.flatten(inputs)
        shapes = [v.aval.shape for v in self.loop.carry]
        shapes += map(jnp.shape, inputs.consts)
        shapes += [(self.steps, *v.aval.shape) for v in self.loop.xs]
        shapes.append((self.steps,))
        program = _FlatProgram(self, tree, shapes)
        return with_derivative(program.results, program.rule)(*flat)

    def in_order(self, inputs: ChunkInputs) -> ChunkInputs:
        """Returns the inputs in the order in which the steps run."""
        xs, valid = self._flipped((inputs.xs, inputs.valid))
        return inputs._replace(xs=xs, valid=valid)

    def outs_in_order(self, results: Arrays) -> Arrays:
        """Returns the results, with the outputs in the order of time."""
        n = len(self.loop.carry)
        return [*results[:n], *self._flipped(results[n:])]

    def _flipped(self, stacked: Any) -> Any:
        if not self.loop.reverse:
            return stacked
        return jax.tree.map(lambda x: x[::-1], stacked)

    def run_by_products(self, inputs: ChunkInputs, saved: SavedForBackward) -> Arrays:
        """Returns the new states and the outputs, as products of matrices."""
        loop = self.loop
        env = dict(zip(loop.consts, inputs.consts))
        stacked = dict(zip(loop.xs, inputs.xs))
        read: list[jaxprs.Var] = []
        for form in self.forms:
            read += variables(form.terms)
        jaxprs.over_time(loop.eqns, read, env, stacked)

        new: list[Array] = []
        readouts: dict[jaxprs.Var, Array] = {}
        remaining = iter(inputs.states)
        for form in self.forms:
            forms = form.forms
            states_of_form = [next(remaining) for _ in form.positions]
            factors = Factors(
                env=env,
                stacked=stacked,
                find=forms.find,
                dtype=states_of_form[0].dtype,
                contracted=forms.size[forms.contracted],
                precision=form.batched_precision if self.batched else form.precision,
            )
            step_values = StepValues(form, factors, self.steps, inputs.valid)
            chunk = Chunk(step_values, saved, self.batched)
            values, after = chunk.run(states_of_form)
            readouts.update(values)
            new += after
        stacked = {**stacked, **readouts}
        return new + jaxprs.stacks(loop.eqns, loop.ys, env, stacked, self.steps)

    def run_by_steps(self, inputs: ChunkInputs) -> Arrays:
        """Returns the new states and the outputs, from the steps one by one."""
        states, consts, xs, valid = inputs

        def step(states: Arrays, inputs: Any) -> Pair:
            return self._step(states, consts, *inputs)

        stacked = (list(xs), valid)
        states, outs = jax.lax.scan(step, list(states), stacked, self.steps)
        return [*states, *outs]

    def _step(
        self,
        states: Arrays,
        consts: Arrays,
        xs: Arrays,
        is_valid: Array | None,
    ) -> Pair:
        """Returns the new states, with the dtypes of the old ones, and the outputs of a step."""
        loop = self.loop
        old = [s.astype(v.aval.dtype) for s, v in zip(states, loop.carry)]
        outs = loop.step(*consts, *old, *xs)
        new = [a.astype(s.dtype) for a, s in zip(outs, states)]
        if is_valid is not None:
            new = [jnp.where(is_valid, a, s) for a, s in zip(new, states)]
        return new, outs[len(new) :]

    def tangents_by_steps(self, inputs: ChunkInputs, tangents: ChunkInputs) -> Arrays:
        """Returns the tangents of `run_by_steps`. No state is stored: each step computes the states before it again."""
        first, consts, xs, valid = inputs
        moved, moved_consts, moved_xs, _ = tangents
        number = jnp.arange(self.steps)

        def state_before(t: Array) -> Arrays:
            def step(states: Arrays, inputs: Any) -> tuple[Arrays, None]:
                u, x, is_valid = inputs
                runs = u < t if is_valid is None else is_valid & (u < t)
                return self._step(states, consts, x, runs)[0], None

            return jax.lax.scan(step, first, (number, xs, valid))[0]

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def step(moved: Arrays, inputs: Any) -> Pair:
            t, x, is_valid, moved_x = inputs
            run = functools.partial(self._step, is_valid=is_valid)
            values = (state_before(t), consts, x)
            return jax.jvp(run, values, (moved, moved_consts, moved_x))[1]

        stacked = (number, xs, valid, moved_xs)
        moved, outs = jax.lax.scan(step, moved, stacked)
        return [*moved, *outs]


@dataclass(frozen=True)
class _FlatProgram:
    """A chunk as a function of flat arrays with one axis, and its tangents. Each program is traced once.

    Attributes:
        body: the steps.
        tree: the structure of the inputs.
        shapes: the shapes of the inputs.
        programs: the program, with the key None, and the programs of tangents, by the arguments that have them.
        saved_shapes: the shapes of the values that the program saves.
    """

    body: ChunkBody
    tree: Any
    shapes: list[Shape]
    programs: dict[Any, Any] = field(default_factory=dict)
    saved_shapes: list[Shape] = field(default_factory=list)

    def results(self, *args: Array) -> Arrays:
        return self.run(args)[0]

    def run(self, args: Arrays) -> tuple[Arrays, Arrays, Array]:
        """Returns the results, the values that are saved, and whether products computed the results."""
        if None not in self.programs:
            self.programs[None] = traced_with(self._checked, args)
        *arrays, good = hidden_p.bind(*args, program=self.programs[None])
        n = len(arrays) - len(self.saved_shapes)
        return arrays[:n], arrays[n:], good

    def rule(
        self,
        args: Arrays,
        argnums: Sequence[int],
        tangents: Arrays,
    ) -> tuple[Arrays, list[Array | None]]:
        """Returns the results and their tangents, as `with_derivative` asks for them."""
        results, saved_values, good = self.run(args)
        # JAX asks a second time with states that move. If they always do, the program is the same.
        n_states = len(self.body.loop.carry)
        tangent_of = dict(enumerate(map(jnp.zeros_like, args[:n_states])))
        tangent_of.update(zip(argnums, tangents))
        key = tuple(sorted(tangent_of))
        moving = [_reshaped(tangent_of[i], self.shapes[i]) for i in key]
        residuals = [*args, *saved_values]
        if key not in self.programs:
            products = functools.partial(self._tangents_of_products, key)
            steps = functools.partial(self._tangents_of_steps, key)
            self.programs[key] = LinearMap.of(products, steps, residuals, moving)
        moved = self.programs[key].run(good, [*residuals, *moving])
        return results, of_smooth(results, _rows(moved))

    def _checked(self, *args: Array) -> Arrays:
        values = self._with_axes(args)
        results, saved_values = self._by_products(values)
        self.saved_shapes[:] = map(jnp.shape, saved_values)
        good = are_finite(results)
        results = or_else(good, results, self._by_steps, values)
        return [*_rows(results), *_rows(saved_values), good]

    def _tangents_of_products(self, argnums: Sequence[int], *operands: Array) -> Arrays:
        values, moved = self._with_tangents(argnums, operands)
        rows = operands[len(values) :]
        saved = [x.reshape(shape) for x, shape in zip(rows, self.saved_shapes)]

        def run(values: Arrays) -> Arrays:
            return self._by_products(values, saved)[0]

        return with_tangents(jax.jvp(run, [values], [moved])[1])

    def _tangents_of_steps(self, argnums: Sequence[int], *operands: Array) -> Arrays:
        values, moved = self._with_tangents(argnums, operands)
        tangents = self.body.tangents_by_steps(self._inputs(values), self._inputs(moved))
        return with_tangents(self.body.outs_in_order(tangents))

    def _with_tangents(self, argnums: Sequence[int], operands: Arrays) -> Results:
        """Returns the arguments and their tangents; the tangents at `argnums` are the last operands."""
        moving = dict(zip(argnums, operands[-len(argnums) :]))
        values = self._with_axes(operands[: self.tree.num_leaves])
        tangents = [moving.get(i, no_tangent(v)) for i, v in enumerate(values)]
        return values, tangents

    def _by_products(self, values: Arrays, saved_values: Arrays | None = None) -> Results:
        """Returns the results, and the values that are saved for the reverse pass."""
        saved = SavedForBackward(saved_values)
        results = self.body.run_by_products(self._inputs(values), saved)
        return self.body.outs_in_order(results), saved.values

    def _by_steps(self, *values: Array) -> Arrays:
        return self.body.outs_in_order(self.body.run_by_steps(self._inputs(values)))

    def _inputs(self, values: Arrays) -> ChunkInputs:
        return self.body.in_order(self.tree.unflatten(values))

    def _with_axes(self, args: Arrays) -> Arrays:
        return list(map(_reshaped, args, self.shapes))


def _rows(arrays: Arrays) -> Arrays:
    return [x.reshape(-1) for x in arrays]


def _reshaped(x: Array, shape: Shape) -> Array:
    """Returns the array with a shape.

    The barrier keeps XLA from fusing the reshape. It is for one array, because a neighbor may have no tangent.
    """
    return x if x.shape == shape else jax.lax.optimization_barrier(x).reshape(shape)


def no_tangent(x: Array) -> Any:
    """Returns zeros that are a tangent of an array, which for integers have a dtype of their own."""
    if is_smooth(x):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def with_tangents(tangents: Arrays) -> Arrays:
    """Returns the tangents of floating-point arrays alone."""
    return [t for t in tangents if t.dtype != jax.dtypes.float0]


def of_smooth(results: Arrays, tangents: Iterable[Array]) -> list[Array | None]:
    """Returns the tangent of each result, from the floating-point results' tangents, and None for the others."""
    remaining = iter(tangents)
    return [next(remaining) if is_smooth(result) else None for result in results]
