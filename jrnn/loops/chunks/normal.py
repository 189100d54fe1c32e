"""A step in the form that is read for affine states: control flow is opened, and carries are cut apart.

A short inner loop is unrolled. A condition whose branches are affine in what they read becomes a selection. A carry that the
step only reads in slices, or in another shape, is held as these slices, or in this shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var
from jrnn.loops.loop import Loop, Results, ScanParams

_LONGEST = 8  # steps of an inner loop that is unrolled; slices of a carry

# If their operands are finite, so are their derivatives: a branch that is not taken adds 0 to a gradient, and no NaN.
_SAFE = frozenset((
    "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "dot_general", "mul",
    "neg", "pvary", "reduce_sum", "reshape", "select_n", "slice", "squeeze", "sub", "transpose",
))  # fmt: skip


def opened(closed: Any) -> jaxprs.Program:
    """Returns the program of a closed jaxpr with calls, short inner loops and affine conditions opened."""
    program = jaxprs.opened(closed, jaxprs.CALLS_AND_CHECKPOINTS)
    if not any(map(_expansion, program.eqns)):
        return program

    def rule(eqn: Eqn, *operands: Any) -> list[Any] | None:
        expansion = _expansion(eqn)
        return expansion and expansion(*operands)

    return opened(jax.make_jaxpr(functools.partial(program.run, rule=rule))(*(v.aval for v in program.invars)))


def _expansion(eqn: Eqn) -> Callable[..., list[Any]] | None:
    """Returns a function that computes the results of an equation that is opened; None for other equations."""
    name, params = eqn.primitive.name, eqn.params
    if name in _PARTS:
        return functools.partial(_PARTS[name], **params)
    if eqn.effects:
        return None
    if name == "scan" and jaxprs.is_known(params["length"]) and params["length"] <= _LONGEST:
        return functools.partial(_unrolled, params)
    if name == "cond" and len(params["branches"]) <= _LONGEST:
        bodies = [jaxprs.opened(b, jaxprs.CALLS_AND_CHECKPOINTS) for b in params["branches"]]
        if all(e.primitive.name in _SAFE for body in bodies for e in body.eqns):
            return functools.partial(_selected, params["branches"])
    return None


def _selected(branches: Sequence[Any], which: Any, *given: Any) -> list[Any]:
    *first, results = [jex.jaxpr_as_fun(b)(*given) for b in branches]
    for i, case in reversed(list(enumerate(first))):
        results = [jax.lax.select_n(which == i, other, here) for here, other in zip(case, results)]
    return results


def _unrolled(params: dict[str, Any], *args: Any) -> list[Any]:
    scan, stacks = ScanParams.of(params), []
    consts, carry, xs = scan.apart(args)
    count = range(scan.length)
    for t in reversed(count) if scan.reverse else count:
        results = jex.jaxpr_as_fun(scan.jaxpr)(*consts, *carry, *(x[t] for x in xs))
        carry = results[: scan.n_carry]
        stacks.append(results[scan.n_carry :])
    stacks = stacks[::-1] if scan.reverse else stacks
    return [*carry, *(jnp.stack(ys) for ys in zip(*stacks))]


def _split(x: Any, sizes: Sequence[int], axis: int) -> list[Any]:
    ends = np.cumsum(sizes).tolist()
    return [jax.lax.slice_in_dim(x, end - n, end, axis=axis) for n, end in zip(map(int, sizes), ends)]


def _unstack(x: Any, axis: int) -> list[Any]:
    return [jax.lax.squeeze(part, [axis]) for part in _split(x, [1] * x.shape[axis], axis)]


def _stack(*xs: Any, axis: int) -> list[Any]:
    return [jax.lax.concatenate([jax.lax.expand_dims(x, [axis]) for x in xs], axis)]


# They are slices and a concatenation to the rules of forms.
_PARTS: dict[str, Callable[..., list[Any]]] = {"split": _split, "unstack": _unstack, "stack": _stack}


# Carries that are held in parts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """How a carry is held: in a shape, and cut into slices along an axis of it, if `parts` is not 1."""

    whole: tuple[int, ...]
    shape: tuple[int, ...]
    axis: int = 0
    parts: int = 1

    @property
    def is_whole(self) -> bool:
        return self.parts == 1 and self.shape == self.whole

    def apart(self, value: Any) -> list[Any]:
        value = jnp.reshape(value, self.shape)
        return [value] if self.parts == 1 else list(jnp.split(value, self.parts, self.axis))

    def together(self, parts: Sequence[Any]) -> Any:
        return jnp.reshape(jnp.concatenate(parts, self.axis) if len(parts) > 1 else parts[0], self.whole)


@dataclass(frozen=True)
class Parts:
    """How a loop holds the carries of the loop that it was made from: a `Conversion` of plans."""

    held: tuple[Held, ...]

    def before(self, init: Sequence[Any]) -> list[Any]:
        return [part for held, value in zip(self.held, init) for part in held.apart(value)]

    def after(self, last: Sequence[Any], ys: Sequence[Any]) -> Results:
        parts = iter(last)
        return [held.together([next(parts) for _ in range(held.parts)]) for held in self.held], list(ys)

    def each(self, values: Iterable[Any]) -> list[Any]:
        """Returns what is said of each carry for each of its parts."""
        return [value for held, value in zip(self.held, values) for _ in range(held.parts)]


def in_parts(loop: Loop) -> tuple[Loop, Parts]:
    """Returns the loop with carries in other shapes and in slices, and how each is held."""
    eqns, _ = jaxprs.needed(loop.eqns, loop.outputs, set(loop.inputs))
    loop = replace(loop, eqns=tuple(eqns))
    whole = Parts(tuple(Held(v.aval.shape, v.aval.shape) for v in loop.carry))
    parts = Parts(tuple(_held(loop, v, out) for v, out in zip(loop.carry, loop.carry_out)))
    if parts == whole:
        return loop, whole
    last = jaxprs.producers(loop.eqns)

    def step(*args: Any) -> list[Any]:
        given = iter(args)
        env = {v: next(given) for v in loop.consts}
        for v, held in zip(loop.carry, parts.held):
            values = [next(given) for _ in range(held.parts)]
            if held.is_whole:
                env[v] = values[0]
                continue
            for eqn in (e for e in loop.eqns if v in jaxprs.inputs(e)):
                env[eqn.outvars[0]] = values[eqn.params["start_indices"][held.axis] if held.parts > 1 else 0]
        env.update((v, next(given)) for v in loop.xs)
        jaxprs.evaluate([e for e in loop.eqns if not any(v in env for v in e.outvars)], env)
        new: list[Any] = []
        for out, held in zip(loop.carry_out, parts.held):
            new += [jaxprs.value(env, a) for a in ([out] if held.is_whole else last[out].invars)]
        return [*new, *(jaxprs.value(env, y) for y in loop.ys)]

    avals = [v.aval for v in jax.make_jaxpr(parts.before)([v.aval for v in loop.carry]).jaxpr.outvars]
    program = jaxprs.trace(step, [*(v.aval for v in loop.consts), *avals, *(v.aval for v in loop.xs)])
    if program.constvars:  # such as arrays that are literals of the step
        return loop, whole
    scan = ScanParams(None, len(loop.consts), len(avals), loop.length, loop.reverse, loop.unroll)
    return scan.loop(program), parts


def _held(loop: Loop, v: Var, out: Any) -> Held:
    shape = v.aval.shape
    whole = Held(shape, shape)
    reads = [e for e in loop.eqns if v in jaxprs.inputs(e)]
    last = jaxprs.producers(loop.eqns).get(out) if not jaxprs.is_literal(out) else None
    if not reads or last is None or v in loop.carry_out or v in loop.ys:
        return whole
    if all(e.primitive.name == "reshape" for e in reads) and last.primitive.name == "reshape":
        shapes = {e.outvars[0].aval.shape for e in reads} | {last.invars[0].aval.shape}
        return Held(shape, *shapes) if len(shapes) == 1 else whole
    if (
        all(e.primitive.name == "slice" and {*(e.params["strides"] or (1,))} == {1} for e in reads)
        and last.primitive.name == "concatenate"
    ):
        axis = last.params["dimension"]
        of_one = [a.aval.shape[axis] == 1 for a in last.invars]
        one = (*shape[:axis], 1, *shape[axis + 1 :])
        if all(of_one) and 1 < shape[axis] <= _LONGEST and all(e.outvars[0].aval.shape == one for e in reads):
            return Held(shape, shape, axis, shape[axis])
    return whole
