"""What a step stores for the reverse pass, chosen by a minimum cut.

JAX's partial evaluation stores every value that a derivative reads. Here the step gets its own derivative rule: the same
equations as JAX's, in two parts with a minimum cut between them. The reverse loop computes the other values again from the
stored ones. Contractions are always stored. So are results that jump where an operand changes by a rounding error, such as
comparisons: computed again from operands that are computed again, they might differ from the first computation.

Shapes: T time.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Program, Var, primitives
from jrnn.loops.costs import equation_costs, machines
from jrnn.loops.costs.machines import Machine
from jrnn.loops.wrappers import recompute

# Steps with more equations are left to JAX: the time of the cut grows faster than the step.
_LONGEST = 2000

NEAR = 1.0  # the part of the cache of a core that stacks may fill
_INFINITE = 1 << 60
_PICOSECONDS = 1e12  # a second

Flat = Sequence[Any]


@dataclass(frozen=True)
class Stacks:
    """Where the stacks of a step are kept: the most bytes of a step that stay in a cache of the core, and the machine."""

    near: float
    machine: Machine

    @staticmethod
    def of(platform: str, length: Any) -> Stacks:
        machine = machines.of(platform)
        near = NEAR * machine.near / max(jaxprs.extent(length), 1) if platform == "cpu" else 0.0
        return Stacks(near, machine)


def storing_less(
    jaxpr: Any,
    n_consts: int,
    n_carry: int,
    stacks: Stacks,
    option: str | tuple[str, ...] | None,
    checkpoint: Callable[..., Callable],
) -> Callable[..., Flat] | None:
    """Returns the step with a derivative rule that stores less, or None if its derivative must be left to JAX.

    Steps with side effects, control flow, `jax.checkpoint` or reverse-mode rules of their own are left to JAX. So are those
    that name values with `checkpoint_name`, unless `option` says what to compute again.

    Args:
        jaxpr: the step, from constants, carries and inputs to new carries and outputs.
        n_consts, n_carry: the numbers of constants and carries.
        stacks: where they are kept.
        option: the option `recompute`: None, "contractions", or names.
        checkpoint: `jax.checkpoint`, whose equations can be transposed.
    """
    if not _is_plain(jaxpr):
        if option is None or jaxprs.jaxpr_of(jaxpr).effects:
            return None
        policies = jax.checkpoint_policies
        policy = policies.dots_saveable if option == "contractions" else policies.nothing_saveable
        return jax.checkpoint(jax.extend.core.jaxpr_as_fun(jaxpr), policy=policy, prevent_cse=False)
    program = jaxprs.opened(jaxpr)
    if option is None and any(eqn.primitive.name == "name" for eqn in program.eqns):
        return None  # a policy of `jax.checkpoint` around the loop chooses values by these names
    avals = [v.aval for v in program.invars]

    def run(*args: Any) -> Flat:
        env = dict(zip(program.constvars, program.consts)) | dict(zip(program.invars, args))
        jaxprs.evaluate(program.eqns, env)
        return [jaxprs.value(env, a) for a in program.outvars]

    @functools.cache
    def derivative(moving: tuple[bool, ...]) -> Callable[[Flat, Flat], tuple[Flat, Flat]]:
        return _derivative(run, avals, moving, n_consts, n_carry, stacks, option, checkpoint)

    def rule(primals: Flat, tangents: Flat) -> tuple[Flat, Flat]:
        moving = tuple(_moves(p, t) for p, t in zip(primals, tangents))
        return derivative(moving)(primals, [t for t, m in zip(tangents, moving) if m])

    smooth = jax.custom_jvp(run)
    smooth.defjvp(rule, symbolic_zeros=True)
    return smooth


def _moves(primal: Any, tangent: Any) -> bool:
    return not isinstance(tangent, SymbolicZero) and jnp.issubdtype(jax.typeof(primal).dtype, jnp.inexact)


def _is_plain(closed: Any) -> bool:
    """Returns True if the derivative of a step separates into equations of values and equations of tangents."""
    jaxpr = jaxprs.jaxpr_of(closed)
    if jaxpr.effects or len(jaxpr.eqns) > _LONGEST:
        return False
    calls = ((eqn, jaxprs.called(eqn, jaxprs.CALLS)) for eqn in jaxpr.eqns)
    return all(
        _is_plain(body) if body is not None else eqn.primitive.name == "custom_jvp_call" or primitives.is_known(eqn)
        for eqn, body in calls
    )


class _Linearized(NamedTuple):
    """A step with its tangents, as equations of two kinds.

    Attributes:
        program: the step, from arguments and tangents to results and tangents.
        n_in, n_out: the numbers of arguments and results.
        step: the equations of values.
        linear: the equations of tangents that the results' tangents need.
        later: the variables that depend on tangents.
        outs: the tangent of each result; None if it is zero.
        wanted: the values that `linear` and the tangents read.
    """

    program: Program
    n_in: int
    n_out: int
    step: list[Any]
    linear: list[Any]
    later: Collection[Var]
    outs: list[Atom | None]
    wanted: list[Var]

    @property
    def moved(self) -> list[Atom]:
        return [a for a in self.outs if a is not None]


def _linearized(run: Callable[..., Flat], avals: Sequence[Any], moving: tuple[bool, ...]) -> _Linearized:
    """Separates a step whose arguments have tangents where `moving` says so."""
    program = _with_tangents(run, avals, moving)
    n_in = len(avals)
    smooth = [jnp.issubdtype(a.dtype, jnp.inexact) for a in jax.eval_shape(run, *avals)]
    later = jaxprs.depends(program.eqns, program.invars[n_in:])
    tangents = iter(program.outvars[len(smooth) :])
    made = jaxprs.producers(program.eqns)
    outs = [
        None if a is None or jaxprs.is_zero(a, made) else a for a in (next(tangents) if s else None for s in smooth)
    ]
    moved = [a for a in outs if a is not None]
    step = [e for e in program.eqns if not any(v in later for v in e.outvars)]
    linear, _ = jaxprs.needed(program.eqns, moved, set(program.invars[:n_in]))
    linear = [e for e in linear if any(v in later for v in e.outvars)]
    wanted = [v for v in jaxprs.free_variables(linear) if v not in later]
    # The tangents that do not depend on tangents, from unusual custom rules.
    wanted += [a for a in jaxprs.variables(moved) if a not in later]
    return _Linearized(program, n_in, len(smooth), step, linear, later, outs, wanted)


def _at_hand(parts: _Linearized, n_consts: int, n_carry: int, stacks: Stacks, option: Any) -> set[Var]:
    """Returns the values that the reverse pass has: what the loop stacks anyway, and what is stored for it."""
    program, first_x = parts.program, n_consts + n_carry
    arguments = program.invars[: parts.n_in]
    consts, carry, xs = arguments[:n_consts], arguments[n_consts:first_x], arguments[first_x:]
    carry_out, ys = program.outvars[:n_carry], program.outvars[n_carry : parts.n_out]
    had = {*consts, *program.constvars, *xs, *jaxprs.variables(ys)}
    # A new carry that is an output is stacked anyway, and that stack, shifted by a step, has the old carries.
    had |= {v for v, out in zip(carry, carry_out) if jaxprs.is_in(out, had)}
    varying = jaxprs.depends(parts.step, (*carry, *xs))
    read_later = [v for v in parts.wanted if v in varying]
    stacks = replace(stacks, near=math.inf if sum(map(jaxprs.nbytes, read_later)) <= stacks.near else 0.0)
    chosen = _choose(parts.step, read_later, had, carry, varying, stacks, option)
    if option == "contractions":  # stores no more than without the option
        plain = _choose(parts.step, read_later, had, carry, varying, stacks, None)
        chosen = min(chosen, plain, key=lambda found: sum(map(jaxprs.nbytes, found)))
    return {*arguments, *program.constvars, *(v for v in had if v in varying), *chosen}


def _derivative(
    run: Callable[..., Flat],
    avals: Sequence[Any],
    moving: tuple[bool, ...],
    n_consts: int,
    n_carry: int,
    stacks: Stacks,
    option: Any,
    checkpoint: Callable[..., Callable],
) -> Callable[[Flat, Flat], tuple[Flat, Flat]]:
    """Returns the rule `(arguments, tangents of the moving ones) -> (results, their tangents)` of a step."""
    parts = _linearized(run, avals, moving)
    program, later, n_in = parts.program, parts.later, parts.n_in
    if any(jaxprs.is_in(a, later) for a in program.outvars[: parts.n_out]):
        # One equation makes a result and its tangent, such as the loop in a rule of `jax.custom_jvp`: JAX separates them.
        return lambda primals, tangents: jax.jvp(*_of_moving(run, primals, moving), list(tangents))
    again, _ = jaxprs.needed(parts.step, parts.wanted, _at_hand(parts, n_consts, n_carry, stacks, option))
    reverse_part = (*again, *parts.linear)
    fixed = {v for e in reverse_part for v in e.outvars} | later
    read = list(dict.fromkeys(v for v in [*jaxprs.free_variables(reverse_part), *parts.wanted] if v not in fixed))
    returned = program.outvars[: parts.n_out]
    forward_part, _ = jaxprs.needed(parts.step, [*returned, *read], set(program.invars))

    def of_tangents(values: Flat, tangents: Flat) -> Flat:
        env = dict(zip((*read, *program.invars[n_in:]), (*values, *tangents)))
        for eqn in reverse_part:
            if eqn.outvars[0] in later and primitives.is_retyping(eqn):
                env[eqn.outvars[0]] = jaxprs.read(env, eqn.invars[0])  # gradients have the weak types of `jax.lax.scan`
            else:
                jaxprs.evaluate([eqn], env)
        return [jaxprs.value(env, a) for a in parts.moved]

    def rule(primals: Flat, tangents: Flat) -> tuple[Flat, Flat]:
        env = dict(zip(program.constvars, program.consts)) | dict(zip(program.invars, primals))
        jaxprs.evaluate(forward_part, env)
        results = [jaxprs.value(env, a) for a in returned]
        # With the checkpoint, JAX can store only the arguments, and not what `reverse_part` computes again.
        given = iter(checkpoint(of_tangents)([env[v] for v in read], tangents))
        zero = [SymbolicZero(jax.typeof(r).to_tangent_aval()) for r in results]
        return results, [z if a is None else next(given) for z, a in zip(zero, parts.outs)]

    return rule


def _of_moving(run: Callable[..., Flat], args: Flat, moving: Sequence[bool]) -> tuple[Callable[..., Flat], Flat]:
    """Returns a step as a function of the arguments that move, and these arguments."""

    def of(*values: Any) -> Flat:
        given = iter(values)
        return run(*(next(given) if m else a for a, m in zip(args, moving)))

    return of, [a for a, m in zip(args, moving) if m]


def _with_tangents(run: Callable[..., Flat], avals: Sequence[Any], moving: Sequence[bool]) -> Program:
    """Traces a step with its tangents.

    The program takes the arguments and the tangents of those that move. It returns the results and the tangents of the
    floating-point ones.
    """
    n = len(avals)

    def both(*args: Any) -> Flat:
        outs, tangents = jax.jvp(*_of_moving(run, args[:n], moving), list(args[n:]))
        return [*outs, *(t for o, t in zip(outs, tangents) if jnp.issubdtype(o.dtype, jnp.inexact))]

    program = jaxprs.trace(both, [*avals, *(a.to_tangent_aval() for a, m in zip(avals, moving) if m)])
    return replace(program, eqns=tuple(map(_named_as_in_step, program.eqns)))


def _named_as_in_step(eqn: Eqn) -> Any:
    """The equation without the outermost transformation in its name stack, which is the `jax.jvp` of `_with_tangents`."""
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=eqn.source_info.name_stack[1:]))


def _choose(
    step: Sequence[Any],
    wanted: Sequence[Var],
    had: Collection[Var],
    carry: Sequence[Var],
    varying: Collection[Var],
    stacks: Stacks,
    option: Any,
) -> list[Var]:
    """Returns the variables to store so that all wanted ones can be computed."""
    never = recompute.not_stored(option, step, had)
    eqns, _ = jaxprs.needed(step, wanted, had)
    storing = {v: 0 for v in had if v in varying}
    storing.update({v: 0 if v in had else _storing(v, stacks) for v in carry})
    edges, remaking = [], dict.fromkeys(storing, _INFINITE)
    exact = set(storing)  # never computed again, or computed again without rounding
    for eqn in eqns:
        of_exact = all(v in exact or v not in varying for v in jaxprs.inputs(eqn))
        jumps = primitives.is_discontinuous(eqn)
        if jumps and not of_exact:
            never = never.difference(eqn.outvars)
            remade = False
        else:
            cheap = primitives.is_cheap(eqn) and not _is_index(eqn)
            remade = cheap or any(v in never for v in eqn.outvars)
        if not remade or (of_exact and (jumps or primitives.is_view(eqn))):
            exact.update(eqn.outvars)
        for v in eqn.outvars:
            if v not in varying or v in had:
                continue
            storing[v] = _INFINITE if v in never else _storing(v, stacks)
            if remade:
                edges += [(u, v) for u in jaxprs.inputs(eqn) if u in varying]
                remaking[v] = (
                    round(equation_costs.element_seconds(eqn, stacks.machine) * _PICOSECONDS) if option is None else 0
                )
            else:
                remaking[v] = _INFINITE
    return [v for v in min_cut(storing, edges, remaking, wanted) if v not in had]


def _is_index(eqn: Eqn) -> bool:
    """Returns True for arithmetic of integers, which XLA:CPU would repeat for each element that is found at an index."""
    return any(jnp.issubdtype(v.aval.dtype, jnp.integer) for v in eqn.outvars) and not primitives.is_view(eqn)


def _storing(v: Var, stacks: Stacks) -> int:
    """Returns the picoseconds to fill the stack of a value with zeros, to write the value, and to read it again."""
    machine = stacks.machine
    each = 3 / machine.cached if stacks.near else 2 / machine.written + 1 / machine.read
    return round(_PICOSECONDS * (machine.array + jaxprs.nbytes(v) * each))


def min_cut(
    costs: Mapping[Hashable, int],
    edges: Iterable[tuple[Hashable, Hashable]],
    remaking: Mapping[Hashable, int],
    sinks: Iterable[Hashable],
) -> list[Hashable]:
    """Returns the nodes to store so that storing them and computing the others again is cheapest; of equals, the nearest to
    the sinks.

    The cut is found with Dinic's algorithm: blocking flows along shortest paths.

    Args:
        costs: the cost of storing each node; `_INFINITE` forbids it.
        edges: pairs of nodes, an operand and a result.
        remaking: the cost of computing a node again from its operands; `_INFINITE` if it cannot be. By default 0.
        sinks: nodes that are wanted.

    >>> min_cut({"x": 5, "a": 2, "b": 2}, [("x", "a"), ("x", "b")], {"x": 1 << 60}, ["a", "b"])
    ['a', 'b']
    >>> min_cut({"x": 5, "a": 4, "b": 4}, [("x", "a"), ("x", "b")], {"x": 1 << 60, "a": 1, "b": 1}, ["a", "b"])
    ['x']
    """
    # Every node becomes an arc from its entry to its exit with its cost as capacity. An arc from the start to its entry has
    # the cost of computing it again. An operand's exit leads to the result's entry.
    entry = {node: 2 * i + 2 for i, node in enumerate(costs)}
    start, end = 0, 1
    heads: list[int] = []
    room: list[int] = []
    arcs: list[list[int]] = [[] for _ in range(2 * len(costs) + 2)]

    def arc(tail: int, head: int, size: int) -> None:
        for a, b, capacity in ((tail, head, size), (head, tail, 0)):
            arcs[a].append(len(heads))
            heads.append(b)
            room.append(capacity)

    for node, at in entry.items():
        arc(at, at + 1, costs[node])
        if remaking.get(node):
            arc(start, at, remaking[node])
    for tail, head in edges:
        arc(entry[tail] + 1, entry[head], _INFINITE)
    for node in sinks:
        arc(entry[node] + 1, end, _INFINITE)

    while (levels := _levels(start, heads, room, arcs))[end] is not None:
        _block(start, end, levels, heads, room, arcs)

    reaches_end = {end}
    queue = deque([end])
    while queue:
        for a in arcs[queue.popleft()]:
            tail = heads[a]
            if room[a ^ 1] > 0 and tail not in reaches_end:
                reaches_end.add(tail)
                queue.append(tail)
    return [node for node, at in entry.items() if at + 1 in reaches_end and at not in reaches_end]


def _levels(start: int, heads: list[int], room: list[int], arcs: list[list[int]]) -> list[int | None]:
    """Returns the distance of each vertex from the start over arcs with room, or None."""
    levels: list[int | None] = [None] * len(arcs)
    levels[start] = 0
    queue = deque([start])
    while queue:
        tail = queue.popleft()
        for a in arcs[tail]:
            if room[a] > 0 and levels[heads[a]] is None:
                levels[heads[a]] = levels[tail] + 1  # type: ignore[operator]
                queue.append(heads[a])
    return levels


def _block(
    start: int, end: int, levels: list[int | None], heads: list[int], room: list[int], arcs: list[list[int]]
) -> None:
    """Sends flow along shortest paths until each of them has an arc without room."""
    untried = [0] * len(arcs)  # for each vertex, the position of the first of its arcs that may have room
    path: list[int] = []
    at = start
    while True:
        if at == end:
            least = min(room[a] for a in path)
            assert least < _INFINITE, "a wanted value can be neither stored nor computed again"
            for a in path:
                room[a] -= least
                room[a ^ 1] += least
            first = next(i for i, a in enumerate(path) if not room[a])
            at = heads[path[first] ^ 1]
            del path[first:]
        elif untried[at] < len(arcs[at]):
            a = arcs[at][untried[at]]
            level = levels[at]
            if room[a] > 0 and level is not None and levels[heads[a]] == level + 1:
                path.append(a)
                at = heads[a]
            else:
                untried[at] += 1
        elif path:
            at = heads[path.pop() ^ 1]
            untried[at] += 1
        else:
            return
