"""Stages of a step for GPUs, where the number of kernels determines the time of a step.

A stage is the work between two contractions: elementwise operations, reductions and views. XLA:GPU makes a kernel for each
result of a stage that is read elsewhere, computes parts of the stage again in each, and copies carries that it still reads.
Here one `optimization_barrier` follows the results of a stage, so that one kernel computes all results of one shape.

    h, x ----> [ h U: a product ] ----> [ gates, h2 = f(...) | barrier ] ----> [ h2 W: a product ] ----> ...
    level 0          level 1                  results of level 1                    level 2

The level of a value is the number of contractions, or other heavy operations, on the way to it. Results are values that
depend on the carry and are read by a contraction, by another stage, or as an output of the step. Views of results that
nothing in the stage reads trail behind the barrier: they cost nothing there, and would be kernels before it.

A product of several concatenated results (the cotangents of the gates) would need one more kernel to concatenate them.
The stage makes one stack of them instead. The product is computed for each part, and the stage that reads it adds the parts.
What is carried of such a stack is carried in the stack.

Shapes: N batch, H hidden, G parts, B the batch axis of a product (none, or the directions of a layer).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Env, Eqn, Var, primitives
from jrnn.loops.ir import Adapter, Length, Loop, Results, RunLoop, Values
from jrnn.loops.passes.sums import accumulator_dtype

# XLA:GPU splits a larger contracted axis K in products of few rows, compiled for an H100.
_MAX_WHOLE_K = 512


@dataclass
class _Stage:
    """The work between two contractions.

    Attributes:
        eqns: the contractions of a level, and what follows from them, in order.
        trailing: views of the results that are read outside the stage only, and equations without results.
        results: what is put behind a barrier, if there are several.
        product: a product of concatenated results of the stage before, which is computed part by part.
        parts: the number of concatenated results.
        stacked: the concatenated results of this stage that the next one's product reads, then the other results with the
            same type.
        carried: for each stacked result, the carry that it is at the next step, or None. Nothing if none is carried.
    """

    eqns: list[Eqn] = field(default_factory=list)
    trailing: list[Eqn] = field(default_factory=list)
    results: list[Var] = field(default_factory=list)
    product: Eqn | None = None
    parts: int = 0
    stacked: tuple[Var, ...] = ()
    carried: tuple[int | None, ...] = ()


def one_kernel_per_stage(loop: Loop, stack: bool = True) -> tuple[Loop, Adapter]:
    """Puts the results of each stage behind a barrier, so that XLA:GPU makes one kernel for the results of one shape.

    Invariant: every value is unchanged, except for the order in which the parts of a product are added.

    Args:
        loop: the residual loop of a split.
        stack: whether products of concatenated results may be computed part by part.

    Returns:
        The loop, which carries the carries that are in no stack and then the stacks, and its adapter.
    """
    stages = _stages(loop)
    if any(eqn.effects for eqn in loop.eqns):
        stack = False
        for stage in stages:
            stage.results = []  # a barrier would change the order of the effects
    halves = _add_products(stages, loop) if stack else set()

    # Stacks of results that the next step reads are carried as they are.
    position: dict[Var, int] = {}
    for i, out in enumerate(loop.carry_out):
        if not jaxprs.is_literal(out):
            position.setdefault(out, i)
    with_stacks = []
    stacked: set[int | None] = set()
    for stage in stages:
        stage.carried = tuple(map(position.get, stage.stacked))
        if any(i is not None for i in stage.carried):
            with_stacks.append(stage)
            stacked.update(stage.carried)
    unstacked = tuple(sorted({*range(len(loop.carry))}.difference(stacked)))
    inputs = (*loop.consts, *jaxprs.take(loop.carry, unstacked))
    outputs = (*jaxprs.take(loop.carry_out, unstacked), *loop.ys)

    def step(*args: Array) -> list[Array]:
        values = iter(args)
        env: Env = dict(zip(inputs, values))
        for stage in with_stacks:
            whole = next(values)
            for part, i in _carried_parts(stage.carried):
                env[loop.carry[i]] = whole[part]
        env.update(zip(loop.xs, values))
        new_stacks = []
        before: Any = None
        for stage in stages:
            for eqn in stage.eqns:
                if eqn is stage.product:
                    env[eqn.outvars[0]] = _by_parts(eqn, before, stage.parts, env)
                elif id(eqn) in halves:
                    env[eqn.outvars[0]] = _by_halves(eqn, env)
                else:
                    jaxprs.evaluate([eqn], env)
            if stage.results:
                before = _behind_barrier(stage, env)
            if stage in with_stacks:
                new_stacks.append(before)
            jaxprs.evaluate(stage.trailing, env)
        outs = [jaxprs.value(env, a) for a in outputs]
        return [*outs[: len(unstacked)], *new_stacks, *outs[len(unstacked) :]]

    avals = [v.aval for v in inputs]
    for stage in with_stacks:
        aval = stage.stacked[0].aval
        avals.append(aval.update(shape=(len(stage.stacked), *aval.shape)))
    avals += [v.aval for v in loop.xs]

    def adapter(run: RunLoop, consts: Values, init: Values, xs: Values, length: Length) -> Results:
        stacks = []
        for stage in with_stacks:
            (_, first), *_ = _carried_parts(stage.carried)
            unread = jnp.zeros_like(init[first])
            stacks.append(jnp.stack([unread if i is None else init[i] for i in stage.carried]))
        last, ys = run(consts, [*jaxprs.take(init, unstacked), *stacks], xs, length)
        carry = dict(zip(unstacked, last))
        for stage, stack in zip(with_stacks, last[len(unstacked) :]):
            for part, i in _carried_parts(stage.carried):
                carry[i] = stack[part]
        return jaxprs.take(carry, range(len(init))), list(ys)

    return loop.traced(step, avals, len(unstacked) + len(with_stacks)), adapter


def _carried_parts(positions: Sequence[int | None]) -> Iterator[tuple[int, int]]:
    """Yields each part of a stack that is carried, and the position of its carry."""
    for part, i in enumerate(positions):
        if i is not None:
            yield part, i


def _behind_barrier(stage: _Stage, env: Env) -> Array | None:
    """Puts the results of a stage behind a barrier. Makes one stack of the stacked ones, and returns it."""
    others = [v for v in stage.results if v not in stage.stacked]
    if not stage.stacked:
        env.update(zip(others, jax.lax.optimization_barrier(jaxprs.take(env, others))))
        return None
    stack = jnp.stack(jaxprs.take(env, stage.stacked))
    stack, rest = jax.lax.optimization_barrier((stack, jaxprs.take(env, others)))
    env.update(zip(others, rest))
    for part, v in enumerate(stage.stacked):
        env[v] = stack[part]
    return stack


def _stages(loop: Loop) -> list[_Stage]:
    """Divides a step into stages."""
    level = dict.fromkeys(loop.inputs, 0)
    for eqn in loop.eqns:
        before = max([level[v] for v in jaxprs.inputs(eqn)], default=0)
        at = before if primitives.is_cheap(eqn) else before + 1
        level.update(dict.fromkeys(eqn.outvars, at))
    stages = [_Stage() for _ in range(max(level.values(), default=0) + 1)]

    # What a stage must write: values that a heavy operation or another stage reads, and outputs.
    read_in_stage: set[Var] = set()
    read_elsewhere: set[Var] = set()
    written = set(jaxprs.variables(loop.outputs))
    trailing: set[Var] = set()
    for eqn in reversed(loop.eqns):
        if eqn.outvars and _is_view(eqn) and not jaxprs.any_in(eqn.outvars, read_in_stage):
            trailing.update(eqn.outvars)
        is_heavy = not eqn.outvars or not primitives.is_cheap(eqn)
        is_trailing = not is_heavy and eqn.outvars[0] in trailing
        for v in jaxprs.inputs(eqn):
            if is_heavy or (is_trailing and jaxprs.any_in(eqn.outvars, written)):
                written.add(v)
            elif is_trailing or level[v] < level[eqn.outvars[0]]:
                read_elsewhere.add(v)
            else:
                read_in_stage.add(v)

    results = loop.on_carry & (written | read_elsewhere)
    for eqn in loop.eqns:
        if not eqn.outvars:
            stages[-1].trailing.append(eqn)
            continue
        stage = stages[level[eqn.outvars[0]]]
        if eqn.outvars[0] in trailing:
            stage.trailing.append(eqn)
            continue
        stage.eqns.append(eqn)
        if primitives.is_cheap(eqn) and not _is_view(eqn):
            stage.results += [v for v in eqn.outvars if v in results and _is_plain(v)]
    for stage in stages:
        if not jaxprs.any_in(stage.results, written):
            stage.results = []
    # The first stage of the next step reads the results of the last stage, and computes them.
    if len(stages) > 1 and stages[0].results:
        stages[-1].results = []
    for stage in stages:
        if len(stage.results) == 1:
            stage.results = []
    return stages


def _is_plain(v: Var) -> bool:
    """Whether a value is an array with axes, and no key."""
    return v.aval.ndim > 0 and not jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)


def _is_view(eqn: Eqn) -> bool:
    return primitives.is_view(eqn) or eqn.primitive.name in ("concatenate", "convert_element_type")


def _by_parts(
    eqn: Eqn,
    left: Array,
    parts: int,
    env: Env,
) -> Array:
    """Multiplies the first `parts` of a stack [G, B, N, H] with the parts of a constant matrix, and adds the products."""
    (_, (axis,)), (batch, _) = eqn.params["dimension_numbers"]
    dtype = eqn.outvars[0].aval.dtype
    lead = tuple(range(1 + len(batch)))
    with jaxprs.in_scope(eqn):
        matrix = jnp.moveaxis(jaxprs.value(env, eqn.invars[1]), axis, 0)
        matrix = matrix.reshape(parts, left.shape[-1], *matrix.shape[1:])  # [parts, H, B, M]
        zeros = left.shape[0] - parts
        matrix = jnp.pad(matrix, ((0, zeros), *((0, 0),) * (matrix.ndim - 1)))
        matrix = jnp.moveaxis(matrix, 1, -2)
        matrix = jax.lax.optimization_barrier(matrix)  # otherwise XLA makes it again at each step
        each = jax.lax.dot_general(
            left,
            matrix,
            (((left.ndim - 1,), (matrix.ndim - 2,)), (lead, lead)),
            precision=eqn.params["precision"],
            preferred_element_type=accumulator_dtype(dtype),
        )
        return jnp.sum(each[:parts], axis=0).astype(dtype)


def _by_halves(eqn: Eqn, env: Env) -> Array:
    """Computes a product in two parts of the contracted axis."""
    left = env[eqn.invars[0]]
    left = left.reshape(*left.shape[:-1], 2, -1)
    return _by_parts(eqn, jnp.moveaxis(left, -2, 0), 2, env)


def _is_split_k(eqn: Eqn) -> bool:
    """Returns True if XLA:GPU would split the contracted axis K into four parts, and pad both operands at each step."""
    size = eqn.invars[0].aval.shape[-1]
    return size > _MAX_WHOLE_K and size % 16 != 0 and size % 2 == 0


def _is_matrix_product(eqn: Eqn, consts: set[Var]) -> bool:
    """Returns True for a product of a variable [B, N, K] with a constant matrix for each B, over K."""
    if eqn.primitive.name != "dot_general" or any(map(jaxprs.is_literal, eqn.invars)):
        return False
    (of_left, of_matrix), batch = eqn.params["dimension_numbers"]
    left, matrix = eqn.invars
    if left in consts or matrix not in consts or eqn.params.get("out_sharding") is not None:
        return False
    rank = left.aval.ndim
    if rank != matrix.aval.ndim or rank > 3:
        return False
    lead = tuple(range(rank - 2))
    over_last = tuple(of_left) == (len(lead) + 1,) and len(of_matrix) == 1
    return over_last and tuple(batch[0]) == tuple(batch[1]) == lead


def _add_products(stages: Sequence[_Stage], loop: Loop) -> set[int]:
    """Finds the matrix products to compute part by part, at most one for each stage.

    Returns the identities of the products to compute in two halves of K.
    """
    consts = set(loop.consts)
    halves: set[int] = set()
    for before, stage in pairwise(stages):
        for eqn in stage.eqns:
            if not _is_matrix_product(eqn, consts):
                continue
            if _is_split_k(eqn):
                halves.add(id(eqn))
            parts = _joined(eqn, loop.producers, before.results)
            if parts is None or stage.product is not None:
                continue
            types = {v: jaxprs.type_of(v) for v in before.results}
            alike = [v for v in types if types[v] == types[parts[0]] and v not in parts]
            if len(alike) <= len(parts):  # otherwise most of the product would multiply zeros
                stage.product = eqn
                stage.parts = len(parts)
                before.stacked = (*parts, *alike)
    return halves


def _joined(
    eqn: Eqn, producers: Mapping[Var, Eqn], results: Sequence[Var]
) -> tuple[Var, ...] | None:
    """Returns the results of a stage that are concatenated along the contracted axis of a matrix product, or None."""
    left = eqn.invars[0]
    join = jaxprs.made_by(left, producers, "concatenate")
    if join is None or join.params["dimension"] != left.aval.ndim - 1:
        return None
    parts = tuple(jaxprs.inputs(join))
    types = set(map(jaxprs.type_of, join.invars))
    are_different = 1 < len(parts) == len(join.invars) == len(set(parts))
    if not are_different or len(types) > 1 or not set(parts).issubset(results):
        return None
    return parts
