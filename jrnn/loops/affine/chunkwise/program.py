"""The chunk program: C steps of a loop with affine matrix carries as a few products of matrices.

Between chunks only S is carried. For the reverse pass only S at the
chunk boundaries is stored, next to the inputs: the tangent of a chunk is one operation, which has nothing else to store.

Products such as `q . k` are no values of the recurrence. If one of them overflows, or an input is NaN or infinite, the
results of a chunk are not all finite. Then the chunk runs step by step, so that every result is one of the recurrence. The
same holds for tangents and cotangents (`guarded.py`).

Shapes: T time, C steps of a chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs.tangents import is_smooth, with_derivative
from jrnn.loops.affine.chunkwise.chunk import Chunk
from jrnn.loops.affine.chunkwise.guarded import hidden_p, linear_map, traced_with
from jrnn.loops.affine.chunkwise.labeled import Factors, variables
from jrnn.loops.affine.chunkwise.solve import SavedForBackward
from jrnn.loops.affine.matrix import AffineForm
from jrnn.loops.affine.rounds import all_finite
from jrnn.loops.ir import Loop

PRECISION = jax.lax.Precision.HIGHEST


@dataclass(frozen=True)
class ChunkBody:
    """The steps of one chunk, for carries that run in chunks together.

    Attributes:
        forms: of the carries.
        loop: the loop of these carries, whose ys are what each step computes.
        steps: C.
        batched: all chunks are prepared at once, on an accelerator: products have full precision if the step gives none, and
            the number of kernels determines the time.
    """

    forms: tuple[AffineForm, ...]
    loop: Loop
    steps: int
    batched: bool = False

    def run(
        self, states: Sequence[Any], consts: Sequence[Any], xs: Sequence[Any], valid: Any
    ) -> list[Any]:
        """Returns the new states and the outputs. If they are not all finite, they are those of `run_by_steps`.

        Args:
            states, consts, xs: values of the variables. Arrays of states, inputs and results have one axis here, because
                XLA:CPU compiles a copy of such an array, into the stack of all chunks, many times faster. They have the axes
                of the variables in front of each condition: XLA:CPU joins a reshape with what computes its operand, and a
                kernel with one long axis in place of several runs many times slower.
            valid: [C] booleans, or None if all steps are valid.
        """
        flat, tree = jax.tree.flatten((list(states), list(consts), list(xs), valid))
        shapes = [*(v.aval.shape for v in self.loop.carry), *map(jnp.shape, consts)]
        shapes += [*((self.steps, *v.aval.shape) for v in self.loop.xs), (self.steps,)]
        program = _FlatProgram(self, tree, shapes)
        return with_derivative(lambda *args: program.run(args)[0], program.rule)(*flat)

    def in_order(self, args: Any) -> Any:
        """Returns the arguments of steps in the order in which the steps run."""
        states, consts, xs, valid = args
        return (
            states,
            consts,
            [self._flipped(x) for x in xs],
            None if valid is None else self._flipped(valid),
        )

    def outs_in_order(self, results: Sequence[Any]) -> list[Any]:
        n = len(self.loop.carry)
        return [*results[:n], *map(self._flipped, results[n:])]

    def _flipped(self, x: Any) -> Any:
        return x[::-1] if self.loop.reverse else x

    def run_by_products(
        self,
        states: Sequence[Any],
        consts: Sequence[Any],
        xs: Sequence[Any],
        valid: Any,
        saved: SavedForBackward,
    ) -> list[Any]:
        loop = self.loop
        env = dict(zip(self.loop.consts, consts))
        stacked = dict(zip(self.loop.xs, xs))
        jaxprs.over_time(
            loop.eqns, [v for form in self.forms for v in variables(form.terms)], env, stacked
        )
        new = []
        readouts = {}
        remaining = iter(states)
        for form in self.forms:
            forms = form.forms
            states_of_form = [next(remaining) for _ in form.positions]
            contracted = forms.size[forms.contracted]
            precision = form.precision or (PRECISION if self.batched else None)
            factors = Factors(
                env, stacked, forms.find, states_of_form[0].dtype, contracted, precision
            )
            values, after = Chunk(form, factors, self.steps, valid, saved, self.batched).run(
                states_of_form
            )
            readouts.update(values)
            new += after
        return [*new, *jaxprs.stacks(loop.eqns, loop.ys, env, {**stacked, **readouts}, self.steps)]

    def run_by_steps(
        self, states: Sequence[Any], consts: Sequence[Any], xs: Sequence[Any], valid: Any
    ) -> list[Any]:
        states, outs = jax.lax.scan(
            lambda s, x: self._step(s, consts, *x), list(states), (list(xs), valid), self.steps
        )
        return [*states, *outs]

    def _step(
        self, states: Sequence[Any], consts: Sequence[Any], xs: Sequence[Any], is_valid: Any
    ) -> tuple[Any, list[Any]]:
        loop = self.loop
        old = [s.astype(v.aval.dtype) for s, v in zip(states, loop.carry)]
        outs = loop.step(*consts, *old, *xs)
        new = [a.astype(s.dtype) for a, s in zip(outs, states)]
        new = new if is_valid is None else [jnp.where(is_valid, a, s) for a, s in zip(new, states)]
        return new, outs[len(new) :]

    def tangents_by_steps(self, args: Any, tangents: Any) -> list[Any]:
        """Returns the tangents of `run_by_steps`. No state is stored: each step computes those before it again."""
        first, consts, xs, valid = args
        moved, moved_consts, moved_xs, _ = tangents
        number = jnp.arange(self.steps)

        def state_before(t: Any) -> Any:
            def step(states: Any, inputs: Any) -> Any:
                u, x, is_valid = inputs
                return self._step(
                    states, consts, x, u < t if is_valid is None else is_valid & (u < t)
                )[0], None

            return jax.lax.scan(step, first, (number, xs, valid))[0]

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def step(moved: Any, inputs: Any) -> Any:
            t, x, is_valid, moved_x = inputs
            at = (state_before(t), consts, x)
            return jax.jvp(
                lambda *at: self._step(*at, is_valid), at, (moved, moved_consts, moved_x)
            )[1]

        moved, outs = jax.lax.scan(step, moved, (number, xs, valid, moved_xs))
        return [*moved, *outs]


@dataclass(frozen=True)
class _FlatProgram:
    """A chunk as a function of flat arrays with one axis, and its tangents. Each program is traced once.

    Attributes:
        body: the steps.
        tree: the structure of the arguments of `ChunkBody.run`.
        shapes: the shapes of the arguments.
        programs: the program, with the key None, and those of tangents, by what moves.
        saved: the shapes of the values that the program saves.
    """

    body: ChunkBody
    tree: Any
    shapes: list[Any]
    programs: dict[Any, Any] = field(default_factory=dict)
    saved: list[Any] = field(default_factory=list)

    def run(self, args: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
        """Returns the results, the values that are saved, and whether the results are those of products."""
        if None not in self.programs:
            self.programs[None] = traced_with(self._checked, args)
        *arrays, good = hidden_p.bind(*args, program=self.programs[None])
        n = len(arrays) - len(self.saved)
        return arrays[:n], arrays[n:], good

    def rule(
        self, args: Sequence[Any], argnums: Sequence[int], moving: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        results, saved_values, good = self.run(args)
        # JAX asks a second time with states that move. If they always do, the program is the same.
        states = {i: jnp.zeros_like(args[i]) for i in range(len(self.body.loop.carry))}
        moved = dict(sorted({**states, **dict(zip(argnums, moving))}.items()))
        moving = [
            t if t.shape == self.shapes[i] else _unfused(t).reshape(self.shapes[i])
            for i, t in moved.items()
        ]
        residuals = [*args, *saved_values]
        key = tuple(moved)
        if key not in self.programs:
            maps = (functools.partial(fn, key) for fn in (self._of_products, self._of_steps))
            self.programs[key] = [traced_with(fn, [*residuals, *moving]) for fn in maps]
        tangents = iter(_closed(linear_map(*self.programs[key], good, residuals, moving)))
        return results, [next(tangents) if is_smooth(r) else None for r in results]

    def _checked(self, *args: Any) -> list[Any]:
        values = self._opened(args)
        results, saved_values = self._evaluate(values)
        self.saved[:] = map(jnp.shape, saved_values)
        good = all_finite([jax.lax.stop_gradient(x) for x in results if is_smooth(x)])
        results = jax.lax.cond(
            good, lambda results, _: results, lambda _, args: self._by_steps(args), results, values
        )
        return [*_closed(results), *_closed(saved_values), good]

    def _of_products(self, argnums: Sequence[int], *operands: Any) -> list[Any]:
        values, moved = self._at(argnums, operands)
        again = [x.reshape(shape) for x, shape in zip(operands[len(values) :], self.saved)]
        tangents = jax.jvp(lambda args: self._evaluate(args, again)[0], [values], [moved])[1]
        return [t for t in tangents if t.dtype != jax.dtypes.float0]

    def _of_steps(self, argnums: Sequence[int], *operands: Any) -> list[Any]:
        at, along = (
            self.body.in_order(self.tree.unflatten(each)) for each in self._at(argnums, operands)
        )
        tangents = self.body.outs_in_order(self.body.tangents_by_steps(at, along))
        return [t for t in tangents if t.dtype != jax.dtypes.float0]

    def _at(self, argnums: Sequence[int], operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the arguments and their tangents."""
        moving = dict(zip(argnums, operands[-len(argnums) :]))
        values = self._opened(operands[: self.tree.num_leaves])
        return values, [moving.get(i, no_tangent(v)) for i, v in enumerate(values)]

    def _evaluate(
        self, args: Sequence[Any], saved_values: Sequence[Any] | None = None
    ) -> tuple[list[Any], list[Any]]:
        saved = SavedForBackward(saved_values)
        body = self.body
        return body.outs_in_order(
            body.run_by_products(*body.in_order(self.tree.unflatten(args)), saved)
        ), saved.values

    def _by_steps(self, args: Sequence[Any]) -> list[Any]:
        return self.body.outs_in_order(
            self.body.run_by_steps(*self.body.in_order(self.tree.unflatten(args)))
        )

    def _opened(self, args: Sequence[Any]) -> list[Any]:
        return [
            x if x.shape == shape else _unfused(x).reshape(shape)
            for x, shape in zip(args, self.shapes)
        ]


def _closed(results: Sequence[Any]) -> list[Any]:
    return [x.reshape(-1) for x in results]


def _unfused(x: Any) -> Any:
    """Returns an array that XLA does not join with what reads it. It is one array, since others may have no tangent."""
    return jax.lax.optimization_barrier(x)


def no_tangent(x: Any) -> Any:
    return jnp.zeros_like(x) if is_smooth(x) else np.zeros(x.shape, jax.dtypes.float0)
