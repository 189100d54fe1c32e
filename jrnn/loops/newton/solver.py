"""Newton's method for all steps of a loop at once: iteration, certificate, fallback, and exact derivatives.

The states h of `h[t] = f(h[t-1], x[t])` are the root of the residuals `r[t] = f(h[t-1], x[t]) - h[t]`. An update d solves
`d[t] = J[t] d[t-1] + r[t]`, a linear recurrence with the Jacobians of f (`recurrence.py`). The result counts only with a
certificate (`certificate.py`), which bounds the error of each element; without one, the caller runs the loop.

Derivatives do not depend on the iteration. The tangents of the states solve one linear recurrence, cotangents its adjoint.

Sources: Lim et al., "Parallelizing non-linear sequential models over the sequence length" (DEER), 2024; Gonzalez et al.,
"Towards scalable and stable parallelization of nonlinear RNNs" (ELK), 2024.

Shapes: T time, A the batch axes of the Jacobian, M the size of its blocks (`structure.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.jaxprs import Program, primitives
from jrnn.loops.newton import recurrence
from jrnn.loops.newton.certificate import Enclosures, bounds, bounds_in_radii
from jrnn.loops.newton.options import Newton
from jrnn.loops.newton.structure import Group, groups

_ULPS = 32  # the default tolerance, in units of the last place
_PART = 1024.0
_REFUSED = "scan: executor 'newton' cannot run this step ({}); use 'auto' or 'scan'"


@dataclass(frozen=True)
class Solution:
    """The last carry and the outputs of a loop, as flat lists; the states of all steps; and per group, what was done."""

    carry: list[Any]
    ys: list[Any]
    states: list[Any]
    reports: list[Any]  # (iterations, residual, error, whether the states are certified)


def run(
    step: Callable,
    init: Sequence[Any],
    xs: Sequence[Any],
    length: int,
    reverse: bool,
    options: Newton,
    by_steps: bool = False,
) -> Solution:
    """Runs a loop of flat lists: `step(carry, x) -> [*carry, *y]`.

    Args:
        step: the step; it may close over values that are differentiated.
        init, xs: the initial carry, and stacks [T, ...].
        length: T, at least 1.
        reverse: whether time runs backwards.
        options: the options; `guess` is a list of stacks, or a name.
        by_steps: compute the states one after the other; the derivatives are the same.
    """
    closed = jax.make_jaxpr(lambda carry, x: step(list(carry), list(x)))(
        list(init), [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs]
    )
    why = why_no_jacobian(closed, init)
    if why is not None:
        raise ScanError(_REFUSED.format(why))
    found = groups(jaxprs.opened(closed, jaxprs.LOWERED_CALLS), 0, len(init))
    _check_sizes(found, init, length, options)
    program = jaxprs.opened(closed)
    xs = [x[::-1] for x in xs] if reverse else list(xs)
    guess = options.guess if isinstance(options.guess, str) else [g[::-1] if reverse else g for g in options.guess]

    carry, inputs = program.invars[: len(init)], program.invars[len(init) :]
    known = dict(zip(program.constvars, program.consts))
    stacked = dict(zip(inputs, xs))
    states: dict[int, Any] = {}
    reports = []
    for group in found:
        outs = [program.outvars[i] for i in group.carries]
        part = _Part.of(program, group, outs, known, stacked, length)
        first = None if isinstance(guess, str) else [guess[i] for i in group.carries]
        solved, report = _solve(part, [init[i] for i in group.carries], first, length, options, by_steps)
        reports.append(report)
        for i, out, state in zip(group.carries, outs, solved):
            states[i] = state
            stacked[carry[i]] = jaxprs.shifted(state, init[i], False)
            if not jaxprs.is_literal(out) and out not in known:
                stacked.setdefault(out, state)
    outs = program.outvars[len(init) :]
    eqns, _ = jaxprs.needed(program.eqns, outs, {*known, *stacked})
    ys = _over_time(eqns, outs, known, stacked, length)
    ordered = [states[i] for i in range(len(init))]
    last = [state[-1] for state in ordered]
    if reverse:
        ys, ordered = [y[::-1] for y in ys], [state[::-1] for state in ordered]
    return Solution(last, ys, ordered, reports)


def why_no_jacobian(closed: Any, carry: Sequence[Any]) -> str | None:
    """Returns the reason why a step has no Jacobian, or may not be evaluated for all steps at once; or None."""
    eqns = list(jaxprs.all_equations(closed.jaxpr))
    why = None
    if not carry:
        why = "nothing is carried"
    elif any(eqn.effects for eqn in closed.jaxpr.eqns):
        why = "it has side effects"
    elif any(map(primitives.draws_differently_under_vmap, eqns)):
        why = "only threefry keys draw the same numbers under vmap"
    elif any(eqn.primitive.name.startswith("custom_vjp_call") for eqn in eqns):
        why = "a function with jax.custom_vjp has no forward-mode derivative; define it with jax.custom_jvp"
    for value in carry:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            why = f"a carry is {value.dtype}, and only real floating-point carries have a Jacobian"
    return why


def jacobian_bytes(group: Group, length: int, itemsize: int, options: Newton) -> int:
    """Returns the bytes of the Jacobians of a group for all steps."""
    rows = 1 if options.jacobian == "diagonal" else group.block
    return length * itemsize * rows * sum(jaxprs.elements(shape) for shape in group.shapes)


def _check_sizes(found: Sequence[Group], init: Sequence[Any], length: int, options: Newton) -> None:
    for group in found:
        itemsize = max(4, *(init[i].dtype.itemsize for i in group.carries))
        needed = jacobian_bytes(group, length, itemsize, options)
        if needed > options.most_bytes:
            m = group.block
            raise ScanError(
                _REFUSED.format(
                    f"its Jacobians, {m} x {m} for each of {length} steps, need {needed:,} bytes, and "
                    f"Newton(most_bytes=...) allows {options.most_bytes:,}; Newton(jacobian='diagonal') needs 1/{m} of them"
                )
            )


def _over_time(eqns: Sequence[Any], outs: Sequence[Any], known: Any, stacked: Any, length: int) -> list[Any]:
    """Evaluates equations for all steps: the values of `outs`, [T, ...]."""
    env, stacks = dict(known), dict(stacked)
    jaxprs.over_time(eqns, env, stacks)
    return [jaxprs.stack(a, env, stacks, length) for a in outs]


# One group of carries -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """The part of a step that makes the new carries of a group; what does not need the old ones is computed.

    Attributes:
        group: the group.
        fn: `(consts, stack at one step, old carries) -> new carries`.
        consts: values of all steps.
        stacks: values of each step, [T, ...].
    """

    group: Group
    fn: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], list[Any]]
    consts: list[Any]
    stacks: list[Any]

    @staticmethod
    def of(program: Program, group: Group, outs: Sequence[Any], known: Any, stacked: Any, length: int) -> _Part:
        mine = [program.invars[i] for i in group.carries]
        body, _ = jaxprs.needed(program.eqns, outs, {*known, *stacked, *mine})
        moving = jaxprs.depends(body, mine)
        inner = [eqn for eqn in body if any(v in moving for v in eqn.outvars)]
        outer = [eqn for eqn in body if not any(v in moving for v in eqn.outvars)]
        free = dict.fromkeys([*jaxprs.free_variables(inner), *jaxprs.variables(outs)])
        made = {v for eqn in inner for v in eqn.outvars}
        wanted = [v for v in free if v not in made and v not in mine]
        timed = jaxprs.depends(outer, stacked)
        env = jaxprs.evaluate([e for e in outer if not any(v in timed for v in e.outvars)], dict(known))
        varying = [v for v in wanted if v in timed]
        fixed = [v for v in wanted if v not in timed]
        later = [e for e in outer if any(v in timed for v in e.outvars)]
        stacks = _over_time(later, varying, env, stacked, length)

        def fn(consts: Sequence[Any], stack: Sequence[Any], old: Sequence[Any]) -> list[Any]:
            env = dict(zip((*fixed, *varying, *mine), (*consts, *stack, *old)))
            jaxprs.evaluate(inner, env)
            return [jaxprs.value(env, a) for a in outs]

        return _Part(group, fn, [env[v] for v in fixed], stacks)

    def all_steps(self, consts: Any, stacks: Any, old: Sequence[Any]) -> list[Any]:
        """Returns the new carries of all steps from the old carries of all steps."""
        return jax.vmap(lambda stack, old: self.fn(consts, stack, old))(stacks, list(old))

    def join(self, leaves: Sequence[Any], lead: int = 1) -> jax.Array:
        """Returns carries as vectors [T, A, M], in float32 or wider."""
        dtype = jnp.result_type(jnp.float32, *leaves)
        return self.group.join([leaf.astype(dtype) for leaf in leaves], lead)

    def part(self, joined: jax.Array, like: Sequence[Any], lead: int = 1) -> list[Any]:
        """The inverse of `join`, with the dtypes of `like`."""
        return [leaf.astype(a.dtype) for leaf, a in zip(self.group.part(joined, lead), like)]

    def columns(self, consts: Any, stacks: Any, old: Sequence[Any], diagonal: bool = False) -> jax.Array:
        """Returns the Jacobians of all steps, [T, A, M, M]; or their diagonals, [T, A, M]."""
        group, size = self.group, self.group.block

        def one(stack: Any, old: Sequence[Any]) -> jax.Array:
            _, push = jax.linearize(lambda old: self.fn(consts, stack, old), list(old))

            def column(k: Any) -> jax.Array:
                unit = jnp.broadcast_to(jax.nn.one_hot(k, size), (*group.batch, size))
                return self.join(push(self.part(unit, old, 0)), 0)

            if diagonal:
                found = lax.map(lambda k: lax.dynamic_index_in_dim(column(k), k, -1, keepdims=False), jnp.arange(size))
                return jnp.moveaxis(found, 0, -1)
            return (
                jnp.stack([column(k) for k in range(size)], -1)
                if size <= 4
                else jnp.moveaxis(jax.vmap(column)(jnp.arange(size)), 0, -1)
            )

        return jax.vmap(one)(stacks, list(old))


def _solve(
    part: _Part, init: list[Any], guess: Any, length: int, options: Newton, by_steps: bool
) -> tuple[list[Any], Any]:
    """Returns the states of a group, with derivatives, and what was done."""
    diagonal = options.jacobian == "diagonal" and part.group.block > 1

    @jax.custom_jvp
    def states_of(consts: Any, stacks: Any, init: Any) -> Any:
        return (_by_steps if by_steps else _iterate)(part, consts, stacks, init, guess, length, options)

    @states_of.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        states, report = states_of(*primals)

        def step_from(consts: Any, stacks: Any, init: Any) -> list[Any]:
            return part.all_steps(consts, stacks, [jaxprs.shifted(s, h, False) for s, h in zip(states, init)])

        _, moved = jax.jvp(step_from, primals, tangents)
        consts, stacks, init = primals
        old = [jaxprs.shifted(s, h, False) for s, h in zip(states, init)]
        if diagonal:
            found = _pushed_step_by_step(part, consts, stacks, old, moved)
        else:
            d = recurrence.solved(part.columns(consts, stacks, old), part.join(moved))
            found = part.part(d, states)
        nothing = jax.tree.map(lambda v: jnp.zeros(v.shape, jax.typeof(v).to_tangent_aval().dtype), report)
        return (states, report), (found, nothing)

    return states_of(part.consts, part.stacks, init)


def _pushed_step_by_step(part: _Part, consts: Any, stacks: Any, old: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
    """Solves the recurrence of tangents without Jacobians, one step after the other."""

    def step(d: list[Any], given: Any) -> tuple[list[Any], list[Any]]:
        stack, old, b = given
        pushed = jax.jvp(lambda old: part.fn(consts, stack, old), (list(old),), (d,))[1]
        now = [p + v for p, v in zip(pushed, b)]
        return now, now

    return lax.scan(step, [jnp.zeros_like(m[0]) for m in moved], (stacks, list(old), list(moved)))[1]


def _by_steps(
    part: _Part, consts: Any, stacks: Any, init: list[Any], guess: Any, length: int, options: Newton
) -> tuple[list[Any], Any]:
    """Returns what `_iterate` does, without an iteration."""

    def step(h: list[Any], stack: Any) -> tuple[list[Any], list[Any]]:
        new = part.fn(consts, stack, h)
        return new, new

    zero = jnp.zeros(())
    return lax.scan(step, init, list(stacks), length)[1], (jnp.int32(0), zero, zero, jnp.asarray(True))


# Iteration ------------------------------------------------------------------------------------------------------------


def _iterate(
    part: _Part, consts: Any, stacks: Any, init: list[Any], guess: Any, length: int, options: Newton
) -> tuple[list[Any], Any]:
    """Returns the states, and (iterations, residual, error, whether the states are certified)."""
    diagonal = options.jacobian == "diagonal" and part.group.block > 1
    eps = max(float(jnp.finfo(h.dtype).eps) for h in init)
    tolerance = _ULPS * eps if options.tolerance is None else options.tolerance
    one = [jax.ShapeDtypeStruct(s.shape[1:], s.dtype) for s in stacks]
    enclosures = Enclosures.of(part.group, part.fn, consts, one, [jax.typeof(h) for h in init])
    dtype = jnp.result_type(jnp.float32, *init)

    def old_of(states: Sequence[Any]) -> list[Any]:
        return [jaxprs.shifted(s, h, False) for s, h in zip(states, init)]

    def at_all_times(fn: Callable, old: Sequence[Any], *more: Any) -> Any:
        return jax.vmap(lambda stack, old, *more: fn([*consts, *stack, *old], *more))(list(stacks), list(old), *more)

    def residuals(states: Sequence[Any]) -> tuple[list[Any], Any, Any, Any, Any]:
        """Returns the new carries, the residual, what rounding may change, the Jacobian or its diagonal, and scales.

        The scale of an element at a step is that of its terms, and of what it still holds of earlier steps, [T, A, M].
        """
        old = old_of(states)
        new = part.all_steps(consts, stacks, old)
        joined = part.join(states)
        if enclosures is None:  # then only residuals of 0 prove anything
            rounding = jnp.zeros_like(joined)
        else:
            rounding = at_all_times(enclosures.rounding, old).astype(dtype)
        slopes = part.columns(consts, stacks, old, diagonal)
        limits = jnp.finfo(dtype)
        own = jnp.nan_to_num(jnp.abs(joined) + rounding / eps, nan=jnp.inf)
        own = jnp.clip(
            own, limits.tiny * _PART, limits.max / _PART
        )  # XLA multiplies by the reciprocal, a normal number
        held = jnp.nan_to_num(jnp.clip(jnp.abs(slopes), 0, 1))
        if diagonal:
            scale = recurrence.largest_in_rounds(held[..., None, None], own[..., None])[..., 0]
        else:
            scale = recurrence.largest_in_rounds(held, own)
        return new, part.join(new) - joined, rounding, slopes, scale

    def update(states: list[Any], r: Any, slopes: Any, error: Any, damping: Any) -> tuple[Any, Any]:
        """Returns the update, and the estimated error."""
        slopes = (1 - damping) * slopes
        if not diagonal:
            d = recurrence.in_rounds(slopes, r)
            return d, d
        old = old_of(states)

        def rounds(b: Any) -> Any:
            return recurrence.in_rounds(slopes[..., None, None], b[..., None])[..., 0]

        # The update leaves out a part of the Jacobian, so the error has an iteration of its own, with all of it.
        shift = part.part(recurrence.before(error), states)
        pushed = jax.jvp(lambda old: part.all_steps(consts, stacks, old), (old,), (shift,))[1]
        return rounds(r), rounds(r + part.join(pushed) - slopes * recurrence.before(error))

    def iteration(state: Any) -> Any:
        k, phase, states, residual_before, damping, error_before, _ = state
        new, r, rounding, slopes, scale = residuals(states)
        d, error = update(states, r, slopes, error_before, damping)
        residual = _largest(r / scale)
        done = (residual <= tolerance) & (_largest(error / scale) <= max(tolerance, eps**0.75)) & (damping == 0)
        if options.damping is None:
            grew = ~(residual <= 2 * residual_before)
            damping = jnp.where(grew, (1 + damping) / 2, jnp.where(damping > 0.3, damping / 2, 0))
        else:
            damping = jnp.where(residual <= tolerance, 0.0, options.damping).astype(dtype)
        moved = part.part(part.join(states) + d, states)
        # Where an update overflows, the step itself is taken, or nothing is known.
        moved = [
            jnp.where(jnp.isfinite(m), m, jnp.where(jnp.isfinite(n), n, jnp.zeros_like(n))) for m, n in zip(moved, new)
        ]
        # The last update is made, too: it is known, and what is left after it is of the order of its square. Then one more
        # evaluation has the residuals of the states that are returned.
        moves = phase == 0
        states = [jnp.where(moves, m, s) for m, s in zip(moved, states)]
        k = k + (moves & ~done)
        phase = jnp.where(moves & ~done & (k < options.iterations), 0, phase + 1)
        return k, phase, states, residual, damping, error, (r, rounding, scale)

    if guess is not None:
        states = [jnp.asarray(g, h.dtype) for g, h in zip(guess, init)]
    elif options.guess == "sweep":
        states = part.all_steps(consts, stacks, [jnp.broadcast_to(h, (length, *h.shape)) for h in init])
    else:
        states = [jnp.zeros((length, *h.shape), h.dtype) for h in init]
    damping = jnp.asarray(0.0 if options.damping is None else options.damping, dtype)
    nothing = jnp.zeros_like(part.join(states))
    start = jnp.int32(0), jnp.int32(0), states, jnp.asarray(jnp.inf, dtype), damping, nothing, (nothing,) * 3
    k, _, states, *_, (r, rounding, scale) = lax.while_loop(lambda state: state[1] < 2, iteration, start)
    radius = max(tolerance, eps**0.5) * scale
    error = jnp.full_like(r, jnp.inf)
    if enclosures is not None:
        before, added = recurrence.before(radius), jnp.abs(r) + 2 * rounding
        if diagonal:
            error = bounds_in_radii(*at_all_times(enclosures.spread, old_of(states), before), added, radius)
        else:
            error = bounds(*at_all_times(enclosures.slopes, old_of(states), before), added)
    error = jnp.where(jnp.any(~(r == 0)), error, 0)
    return states, (k, _largest(r / scale), _largest(error / scale), jnp.all(error <= radius))


def _largest(v: jax.Array) -> jax.Array:
    """The largest absolute value; infinite if one is not a number."""
    return jnp.max(jnp.where(jnp.isnan(v), jnp.inf, jnp.abs(v)))
