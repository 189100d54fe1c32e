"""Stages of a step for GPUs, where the number of kernels is the time of a step.

A stage is what lies between two contractions: elementwise work, reductions and views. XLA:GPU makes a kernel for each of its
results that is wanted elsewhere, computes parts of it again in each, and copies carries that it still reads. Here the
results of a stage pass through one `optimization_barrier`, so that those of one shape are made by one kernel, once.

A product of several results joined to one array (the cotangents of the gates) would need one more kernel to join them.
They are made as one stack instead, and the product is taken for each part and summed by the stage that reads it.

Shapes: N batch, H hidden, G parts, B of a batched product (nothing, or the directions of a layer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.executor import jaxprs, primitives
from jrnn.executor.jaxprs import Atom, Env, Var
from jrnn.executor.loop import Loop
from jrnn.executor.passes.sums import accumulator

_CUT_ABOVE = 512  # the contracted size above which XLA:GPU cuts products of few rows, by compiling for an H100


def one_kernel_a_stage(loop: Loop, stack: bool = True) -> Staged:
    """Fences off the results of each stage, so that XLA:GPU makes those of one shape in one kernel.

    Invariant: every value stays what it was, up to the order in which the parts of a product are added.

    Args:
        loop: a loop without work that could be done before or after it.
        stack: whether products of joined results may be taken part by part.
    """
    stages = _stages(loop)
    results = {level: found for level in range(stages.last + 1) if (found := stages.results(level))}
    if any(eqn.effects for eqn in loop.eqns):
        results, stack = {}, False  # their order would change
    if stages.last and 0 in results:
        results.pop(stages.last, None)  # what the first stage of the next step reads is better made there
    results = {level: found for level, found in results.items() if len(found) > 1}
    products = _products(loop, stages, results) if stack else {}
    orders = {p.level - 1: p.order for p in products.values()}
    halves = {id(eqn) for eqn in loop.eqns if stack and _is_cut(eqn, set(loop.consts)) and id(eqn) not in products}
    places = {level: tuple(_place(v, loop.carry_out) for v in order) for level, order in orders.items()}
    places = {level: found for level, found in places.items() if any(i is not None for i in found)}
    inside = {i: (level, g) for level, found in places.items() for g, i in enumerate(found) if i is not None}
    kept = tuple(i for i in range(len(loop.carry)) if i not in inside)

    def step(*args: Any) -> list[Any]:
        given = iter(args)
        env = {v: next(given) for v in (*loop.consts, *(loop.carry[i] for i in kept))}
        old = {level: next(given) for level in places}
        env |= {loop.carry[i]: old[level][g] for i, (level, g) in inside.items()}
        env |= dict(zip(loop.xs, given))
        stacks: dict[int, Any] = {}
        for level in range(stages.last + 1):
            for eqn in stages.eqns(level, late=False):
                if id(eqn) in products:
                    with jaxprs.in_scope(eqn):
                        env[eqn.outvars[0]] = products[id(eqn)].value(stacks[level - 1], env)
                elif id(eqn) in halves:
                    with jaxprs.in_scope(eqn):
                        env[eqn.outvars[0]] = _in_halves(eqn, env)
                else:
                    jaxprs.evaluate([eqn], env)
            if level in results:
                stacks[level] = _fenced(results[level], orders.get(level, ()), env)
            jaxprs.evaluate(stages.eqns(level, late=True), env)
        carry = [jaxprs.value(env, loop.carry_out[i]) for i in kept]
        return [*carry, *(stacks[level] for level in places), *(jaxprs.value(env, a) for a in loop.ys)]

    types = [v.aval.update(shape=(len(orders[level]), *v.aval.shape)) for level in places for v in orders[level][:1]]
    avals = [*(v.aval for v in loop.consts), *(loop.carry[i].aval for i in kept), *types, *(v.aval for v in loop.xs)]
    made = loop.traced(step, avals, len(kept) + len(places))
    return Staged(made, kept, tuple(places.values()), len(loop.carry))


def _place(v: Var, carry_out: Sequence[Atom]) -> int | None:
    """The first position of a variable among the new carries, or None."""
    return next((i for i, out in enumerate(carry_out) if out is v), None)


@dataclass(frozen=True)
class Staged:
    """A loop that carries stacks of results, and where in them the carries of the loop as it was are.

    Attributes:
        loop: the loop; its carries are those that are kept, then the stacks.
        kept: positions of the carries that are in no stack.
        stacked: for each stack, the position of the carry that each part is, or None.
        carries: how many carries there were.
    """

    loop: Loop
    kept: tuple[int, ...]
    stacked: tuple[tuple[int | None, ...], ...]
    carries: int

    def initial(self, init: Sequence[Any]) -> list[Any]:
        """The carries of `loop` from those of the loop as it was; parts that are no carries are never read."""
        stacks = [
            jnp.stack(
                [
                    jnp.zeros_like(init[next(j for j in places if j is not None)]) if i is None else init[i]
                    for i in places
                ]
            )
            for places in self.stacked
        ]
        return [*(init[i] for i in self.kept), *stacks]

    def carry(self, last: Sequence[Any]) -> list[Any]:
        """The carries of the loop as it was from those of `loop`."""
        found = dict(zip(self.kept, last))
        for places, stack in zip(self.stacked, last[len(self.kept) :]):
            found |= {i: stack[g] for g, i in enumerate(places) if i is not None}
        return [found[i] for i in range(self.carries)]


def _fenced(results: Sequence[Var], order: Sequence[Var], env: Env) -> Any:
    """Puts the results behind a barrier, those of `order` as one stack, which is returned."""
    others = [v for v in results if v not in order]
    stack = [jnp.stack([env[v] for v in order])] if order else []
    *made, rest = jax.lax.optimization_barrier((*stack, [env[v] for v in others]))
    env.update(zip(others, rest))
    if not order:
        return None
    env.update((v, made[0][g]) for g, v in enumerate(order))
    return made[0]


@dataclass(frozen=True)
class _Stages:
    """The equations of a step by their level: how many contractions (or other heavy operations) lie on the way to them.

    Attributes:
        loop: the loop.
        level: of each variable; inputs have level 0.
        late: variables that are views of results of a stage, read only where the results are.
        moving: what depends on the carry.
        written: variables that a heavy operation reads, or that are outputs.
        crossing: variables that another stage reads.
    """

    loop: Loop
    level: Mapping[Var, int]
    late: frozenset[Var]
    moving: frozenset[Var]
    written: frozenset[Var]
    crossing: frozenset[Var]

    @property
    def last(self) -> int:
        return max(self.level.values(), default=0)

    def eqns(self, level: int, late: bool) -> list[Any]:
        def here(eqn: Any) -> bool:
            if not eqn.outvars:
                return level == self.last and late
            return self.level[eqn.outvars[0]] == level and (eqn.outvars[0] in self.late) == late

        return [eqn for eqn in self.loop.eqns if here(eqn)]

    def results(self, level: int) -> list[Var]:
        """What the stage of a level must write: computed from the carry, and read elsewhere."""
        found = [
            v
            for eqn in self.eqns(level, late=False)
            if primitives.is_cheap(eqn) and not _is_view(eqn)
            for v in eqn.outvars
            if v in self.moving and (v in self.written or v in self.crossing) and _is_plain_array(v)
        ]
        return found if any(v in self.written for v in found) else []


def _stages(loop: Loop) -> _Stages:
    level = dict.fromkeys(loop.inputs, 0)
    for eqn in loop.eqns:
        at = max((level[v] for v in jaxprs.inputs(eqn)), default=0) + (not primitives.is_cheap(eqn))
        level.update((v, at) for v in eqn.outvars)
    here: set[Var] = set()  # read within their own stage
    crossing: set[Var] = set()
    written, late = {a for a in loop.outputs if not jaxprs.is_literal(a)}, set()
    for eqn in reversed(loop.eqns):
        if eqn.outvars and _is_view(eqn) and not any(v in here for v in eqn.outvars):
            late.update(eqn.outvars)
        heavy = not eqn.outvars or not primitives.is_cheap(eqn)
        joined = not heavy and eqn.outvars[0] in late
        for v in jaxprs.inputs(eqn):
            if heavy or (joined and any(out in written for out in eqn.outvars)):
                written.add(v)
            elif joined or level[v] < level[eqn.outvars[0]]:
                crossing.add(v)
            else:
                here.add(v)
    moving = jaxprs.depends(loop.eqns, loop.carry)
    return _Stages(loop, level, *map(frozenset, (late, moving, written, crossing)))


def _is_view(eqn: Any) -> bool:
    return primitives.is_view(eqn) or eqn.primitive.name in ("concatenate", "convert_element_type")


@dataclass(frozen=True)
class _Product:
    """A product of joined results of a stage with a constant matrix.

    Attributes:
        eqn: the product, a `dot_general`.
        level: its level.
        order: the parts in their order, then other results of the stage of the same type.
        parts: how many of these are joined.
    """

    eqn: Any
    level: int
    order: tuple[Var, ...]
    parts: int

    def value(self, stack: Any, env: Env) -> Any:
        """The product from the stack [G, B, N, H] of all of `order`; the matrix is zero for those that are not joined."""
        more = len(self.order) - self.parts
        return _by_parts(self.eqn, stack, self.parts, more, env)


def _by_parts(eqn: Any, left: Any, parts: int, more: int, env: Env) -> Any:
    """A product with a constant matrix from [G, B, N, K / G], part by part; of `more` parts the matrix is zero."""
    ((_, (axis,)), (batch, _)), (out,) = eqn.params["dimension_numbers"], eqn.outvars
    matrix = jnp.moveaxis(jaxprs.value(env, eqn.invars[1]), axis, 0)
    matrix = matrix.reshape(parts, left.shape[-1], *matrix.shape[1:])  # [G, K / G, B, M]
    matrix = jnp.pad(matrix, ((0, more), *((0, 0),) * (matrix.ndim - 1)))
    matrix = jax.lax.optimization_barrier(jnp.moveaxis(matrix, 1, -2))  # else XLA makes it again at each step
    lead = tuple(range(1 + len(batch)))
    each = jax.lax.dot_general(
        left,
        matrix,
        (((left.ndim - 1,), (matrix.ndim - 2,)), (lead, lead)),
        precision=eqn.params["precision"],
        preferred_element_type=accumulator(out.aval.dtype),
    )
    return jnp.sum(each[:parts], axis=0).astype(out.aval.dtype)


def _is_cut(eqn: Any, consts: set[Var]) -> bool:
    """Whether XLA:GPU would cut the contracted axis into four parts, and pad both operands for that at each step."""
    if not _is_matrix_product(eqn, consts):
        return False
    size = eqn.invars[0].aval.shape[-1]
    return size > _CUT_ABOVE and size % 16 != 0 and size % 2 == 0


def _in_halves(eqn: Any, env: Env) -> Any:
    """A product with a constant matrix, cut in two so that XLA:GPU does not cut it."""
    left = env[eqn.invars[0]]
    return _by_parts(eqn, jnp.moveaxis(left.reshape(*left.shape[:-1], 2, -1), -2, 0), 2, 0, env)


def _is_matrix_product(eqn: Any, consts: set[Var]) -> bool:
    """Whether it is a product of a variable [B, N, K] with a constant matrix for each B, over K."""
    if eqn.primitive.name != "dot_general" or any(map(jaxprs.is_literal, eqn.invars)):
        return False
    (contracted, batch), (left, matrix) = eqn.params["dimension_numbers"], eqn.invars
    lead = tuple(range(left.aval.ndim - 2))
    plain = tuple(contracted[0]) == (len(lead) + 1,) and len(contracted[1]) == 1 and left.aval.ndim == matrix.aval.ndim
    of_two = len(lead) < 2 and tuple(batch[0]) == tuple(batch[1]) == lead and left not in consts and matrix in consts
    return plain and of_two and eqn.params.get("out_sharding") is None


def _products(loop: Loop, stages: _Stages, results: Mapping[int, Sequence[Var]]) -> dict[int, _Product]:
    """The products that are taken part by part, at most one of a level, by the identities of their equations."""
    made = jaxprs.producers(loop.eqns)
    found: dict[int, _Product] = {}
    for eqn in loop.eqns:
        level = stages.level[eqn.outvars[0]] if eqn.outvars else 0
        if level in {p.level for p in found.values()}:
            continue
        parts = _joined(eqn, made, results.get(level - 1, ()), set(loop.consts))
        if parts is None:
            continue
        alike = [v for v in results[level - 1] if _type(v) == _type(parts[0]) and v not in parts]
        if len(alike) <= len(parts):  # else most of the product would be of zeros
            found[id(eqn)] = _Product(eqn, level, (*parts, *alike), len(parts))
    return found


def _joined(eqn: Any, made: Mapping[Var, Any], results: Sequence[Var], consts: set[Var]) -> tuple[Var, ...] | None:
    """The results of a stage that an equation multiplies, joined along the axis that it contracts, with a matrix."""
    if not _is_matrix_product(eqn, consts):
        return None
    join = made.get(eqn.invars[0])
    if join is None or join.primitive.name != "concatenate" or join.params["dimension"] != eqn.invars[0].aval.ndim - 1:
        return None
    parts: tuple[Atom, ...] = tuple(join.invars)
    if len(parts) < 2 or len(set(map(_type, parts))) > 1 or any(v not in results for v in parts):
        return None
    return parts if len(set(parts)) == len(parts) else None


def _is_plain_array(v: Var) -> bool:
    return v.aval.ndim > 0 and not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)


def _type(atom: Atom) -> tuple[Any, Any]:
    return atom.aval.shape, atom.aval.dtype
