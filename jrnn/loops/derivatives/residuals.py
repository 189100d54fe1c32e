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
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.jaxprs import Eqn, Var, primitives
from jrnn.jaxprs.jax_internals import cached, jaxpr_as_fun, without_remat3
from jrnn.jaxprs.tangents import Linearized, pushed, with_derivative
from jrnn.jaxprs.work import TooMuchWork
from jrnn.loops.costs import equation_costs, machines
from jrnn.loops.costs.machines import Machine
from jrnn.loops.ir import ScanParams, derived, observers, tag
from jrnn.loops.wrappers import recompute

# Steps with more equations are left to JAX: the time of the cut grows faster than the step.
_LONGEST = 2000

CACHE_SHARE = 1.0  # the part of the cache of a core that stacks may fill
_INFINITE = 1 << 60
_PICOSECONDS = 1e12  # a second

Flat = Sequence[Any]


@dataclass(frozen=True)
class Stacks:
    """Where the residuals of a step are stored: the most bytes of a step that fit in a core's cache, and the machine."""

    cached_bytes: float
    machine: Machine

    @staticmethod
    def of(platform: str, length: Any) -> Stacks:
        machine = machines.of(platform)
        if platform != "cpu":
            return Stacks(0.0, machine)
        steps = max(jaxprs.extent(length), 1)
        return Stacks(CACHE_SHARE * machine.core_cache_bytes / steps, machine)


@cached(256)
def step_with_fewer_residuals(
    scan: ScanParams, stacks: Stacks, recompute: Any, verify: bool
) -> Any:
    """Returns the step of a loop, whatever its length, with a rule that stores fewer residuals, or as it is."""
    jaxpr = scan.jaxpr
    avals = [v.aval for v in jaxprs.jaxpr_of(scan.jaxpr).invars]

    def derive(scan: ScanParams) -> Any:
        return with_fewer_residuals(scan, stacks, recompute)

    try:
        step = derive(scan)
        if step is None:
            return jaxpr
        with tag.untagged():
            smooth = jax.make_jaxpr(step)(*avals)
        same = [v.aval for v in smooth.jaxpr.invars] == avals and list(smooth.out_avals) == list(
            jaxpr.out_avals
        )
        if not same or not verify:
            return smooth if same else jaxpr
        agrees, _ = derived.validate(scan, f"residuals {recompute}", derive)
        return smooth if agrees else jaxpr
    except (ScanError, TooMuchWork):
        raise
    except Exception as error:
        observers.report_unexpected(error, " where a step is differentiated")
        return jaxpr


def with_fewer_residuals(
    scan: ScanParams, stacks: Stacks, option: str | tuple[str, ...] | None
) -> Callable[..., Flat] | None:
    """Returns the step with a derivative rule that stores fewer residuals, or None if its derivative must be left to JAX.

    Steps with side effects, control flow, `jax.checkpoint` or reverse-mode rules of their own are left to JAX. So are those
    that name values with `checkpoint_name`, unless `option` says what to compute again.

    Args:
        scan: the loop; its length and direction do not matter.
        stacks: where they are stored.
        option: the option `recompute`: None, "contractions", or names.
    """
    jaxpr = scan.jaxpr
    if not is_plain(jaxpr):
        if option is None or jaxprs.jaxpr_of(jaxpr).effects:
            return None
        policies = jax.checkpoint_policies
        policy = policies.dots_saveable if option == "contractions" else policies.nothing_saveable
        return jax.checkpoint(jaxpr_as_fun(jaxpr), policy=policy, prevent_cse=False)
    program = jaxprs.inlined(jaxpr)
    if option is None and any(eqn.primitive.name == "name" for eqn in program.eqns):
        return None  # a policy of `jax.checkpoint` around the loop chooses values by these names
    avals = [v.aval for v in program.invars]

    def run(*args):
        return program.run(*args)

    @functools.cache
    def derivative(argnums: tuple[int, ...]) -> Callable[[Flat, Flat], tuple[Flat, Flat]]:
        parts = Linearized.of(run, avals, argnums)
        if any(jaxprs.is_in(a, parts.later) for a in parts.program.outvars[: parts.n_out]):
            # One equation makes a result and its tangent, as the loop in a rule of `jax.custom_jvp`: JAX separates them.
            return functools.partial(_pushed, run, argnums)
        return _derivative(parts, _available(parts, scan, stacks, option))

    def rule(primals: Flat, argnums: tuple[int, ...], tangents: Flat) -> tuple[Flat, Flat]:
        return derivative(argnums)(primals, tangents)

    return with_derivative(run, rule)


def _pushed(
    run: Callable[..., Flat], argnums: tuple[int, ...], primals: Flat, tangents: Flat
) -> tuple[Flat, Flat]:
    return pushed(run, primals, argnums, tangents)


def is_plain(closed: Any) -> bool:
    """Returns True if the derivative of a step separates into equations of values and equations of tangents."""
    if jaxprs.shared_calls(closed, jaxprs.CALLS):
        return False  # calls that stay compute values and tangents together
    return _is_plain(jaxprs.jaxpr_of(closed), set())


def _is_plain(jaxpr: Any, plain: set[int]) -> bool:
    """Returns True if a jaxpr is plain, and then adds its identity to `plain`."""
    if id(jaxpr) in plain:
        return True
    if jaxpr.effects or len(jaxpr.eqns) > _LONGEST:
        return False
    for eqn in jaxpr.eqns:
        body = jaxprs.called(eqn, jaxprs.CALLS)
        if body is not None:
            eqn_is_plain = _is_plain(jaxprs.jaxpr_of(body), plain)
        else:
            eqn_is_plain = eqn.primitive.name == "custom_jvp_call" or primitives.is_known(eqn)
        if not eqn_is_plain:
            return False
    plain.add(id(jaxpr))
    return True


def _available(parts: Linearized, scan: ScanParams, stacks: Stacks, option: Any) -> set[Var]:
    """Returns the values that are available in the reverse pass: what the loop stacks anyway, and what is stored for it."""
    program = parts.program
    arguments = parts.program.invars[: parts.n_in]
    consts, carry, xs = scan.partition(arguments)
    carry_out = program.outvars[: len(carry)]
    ys = program.outvars[len(carry) : parts.n_out]
    available = {*consts, *program.constvars, *xs, *jaxprs.variables(ys)}
    # A new carry that is an output is stacked anyway, and that stack, shifted by a step, has the old carries.
    available |= {v for v, out in zip(carry, carry_out) if jaxprs.is_in(out, available)}
    varying = jaxprs.depends(parts.step, (*carry, *xs))
    needed_by_reverse = [v for v in parts.primals_read if v in varying]
    is_cached = sum(map(jaxprs.nbytes, needed_by_reverse)) <= stacks.cached_bytes
    stacks = replace(stacks, cached_bytes=math.inf if is_cached else 0.0)
    chosen = _choose(parts.step, needed_by_reverse, available, carry, varying, stacks, option)
    if option == "contractions":  # stores no more than without the option
        plain = _choose(parts.step, needed_by_reverse, available, carry, varying, stacks, None)
        chosen = min(chosen, plain, key=lambda stored: sum(map(jaxprs.nbytes, stored)))
    return {*arguments, *program.constvars, *(v for v in available if v in varying), *chosen}


def _derivative(
    parts: Linearized, available: Collection[Var]
) -> Callable[[Flat, Flat], tuple[Flat, Flat]]:
    """Returns the rule `(arguments, tangents of the moving ones) -> (results, their tangents)` of a step."""
    program = parts.program
    later = parts.later
    n_in = parts.n_in
    recomputed, _ = jaxprs.needed(parts.step, parts.primals_read, available)
    reverse_part = (*recomputed, *parts.linear)
    fixed = set(jaxprs.results(reverse_part)) | later
    primals_read = dict.fromkeys([*jaxprs.free_variables(reverse_part), *parts.primals_read])
    read = [v for v in primals_read if v not in fixed]
    returned = program.outvars[: parts.n_out]
    forward_part, _ = jaxprs.needed(parts.step, [*returned, *read], set(program.invars))

    def retyping(eqn: Eqn, *operands: Any) -> Flat | None:
        """Leaves tangents with the weak types that gradients of `jax.lax.scan` have."""
        return operands if eqn.outvars[0] in later and primitives.is_retyping(eqn) else None

    def of_tangents(values: Flat, tangents: Flat) -> Flat:
        env = dict(zip((*read, *program.invars[n_in:]), (*values, *tangents)))
        jaxprs.evaluate(reverse_part, env, rule=retyping)
        return [jaxprs.value(env, a) for a in parts.moved]

    def rule(primals: Flat, tangents: Flat) -> tuple[Flat, Flat]:
        env = dict(zip(program.constvars, program.consts)) | dict(zip(program.invars, primals))
        jaxprs.evaluate(forward_part, env)
        results = [jaxprs.value(env, a) for a in returned]
        # With the checkpoint, JAX can store only the arguments, and not what `reverse_part` computes again.
        out_tangents = iter(_checkpoint(of_tangents)([env[v] for v in read], tangents))
        return results, [None if a is None else next(out_tangents) for a in parts.outs]

    return rule


def _checkpoint(fn: Callable) -> Callable:
    """`jax.checkpoint` without the option `jax_remat3`, whose equations cannot be transposed."""

    @functools.wraps(fn)
    def checkpointed(*args: Any) -> Any:
        with without_remat3():
            return jax.checkpoint(fn, prevent_cse=False)(*args)

    return checkpointed


def _choose(
    step: Sequence[Any],
    needed: Sequence[Var],
    available: Collection[Var],
    carry: Sequence[Var],
    varying: Collection[Var],
    stacks: Stacks,
    option: Any,
) -> list[Var]:
    """Returns the variables to store so that all needed ones can be computed."""
    never = recompute.not_stored(option, step, available)
    eqns, _ = jaxprs.needed(step, needed, available)
    store_costs = {v: 0 for v in available if v in varying}
    store_costs.update({v: 0 if v in available else _store_cost(v, stacks) for v in carry})
    edges = []
    recompute_costs = dict.fromkeys(store_costs, _INFINITE)
    alone = not any(map(equation_costs.is_call, eqns))
    # A reverse step that reads less may be one kernel.
    limited = alone and stacks.machine.one_kernel_bytes < math.inf
    exact = set(store_costs)  # never computed again, or computed again without rounding
    for eqn in eqns:
        of_exact = all(v in exact or v not in varying for v in jaxprs.inputs(eqn))
        jumps = primitives.is_discontinuous(eqn)
        if jumps and not of_exact:
            never = never.difference(eqn.outvars)
            is_recomputed = False
        else:
            out = eqn.outvars[0].aval
            is_mask = jumps and limited and bool(out.shape) and out.dtype == bool
            cheap = primitives.is_cheap(eqn) and not _is_index(eqn) and not is_mask
            is_recomputed = cheap or jaxprs.any_in(eqn.outvars, never)
        if not is_recomputed or (of_exact and (jumps or primitives.is_view(eqn))):
            exact.update(eqn.outvars)
        for v in eqn.outvars:
            if v not in varying or v in available:
                continue
            store_costs[v] = _INFINITE if v in never else _store_cost(v, stacks)
            if is_recomputed:
                edges += [(u, v) for u in jaxprs.inputs(eqn) if u in varying]
                seconds = 0.0
                if option is None:
                    seconds = equation_costs.element_seconds(eqn, stacks.machine, alone)
                recompute_costs[v] = round(seconds * _PICOSECONDS)
            else:
                recompute_costs[v] = _INFINITE
    return [v for v in min_cut(store_costs, edges, recompute_costs, needed) if v not in available]


def _is_index(eqn: Eqn) -> bool:
    """Returns True for arithmetic of integers, which XLA:CPU would repeat for each element that is found at an index."""
    if primitives.is_view(eqn):
        return False
    return any(jnp.issubdtype(v.aval.dtype, jnp.integer) for v in eqn.outvars)


def _store_cost(v: Var, stacks: Stacks) -> int:
    """Returns the picoseconds to fill the stack of a value with zeros, to write the value, and to read it again."""
    machine = stacks.machine
    byte_seconds = 2 / machine.write_rate + 1 / machine.read_rate
    if stacks.cached_bytes:
        byte_seconds = 3 / machine.cache_rate
    return round(_PICOSECONDS * (machine.array + jaxprs.nbytes(v) * byte_seconds))


def min_cut(
    costs: Mapping[Hashable, int],
    edges: Iterable[tuple[Hashable, Hashable]],
    recompute_costs: Mapping[Hashable, int],
    sinks: Iterable[Hashable],
) -> list[Hashable]:
    """Returns the nodes to store so that storing them and computing the others again is cheapest; of equals, the nearest to
    the sinks.

    Args:
        costs: the cost of storing each node; `_INFINITE` forbids it.
        edges: pairs of nodes, an operand and a result.
        recompute_costs: the cost of computing a node again from its operands; `_INFINITE` if it cannot be. By default 0.
        sinks: nodes that are needed.

    >>> min_cut({"x": 5, "a": 2, "b": 2}, [("x", "a"), ("x", "b")], {"x": 1 << 60}, ["a", "b"])
    ['a', 'b']
    >>> min_cut({"x": 5, "a": 4, "b": 4}, [("x", "a"), ("x", "b")], {"x": 1 << 60, "a": 1, "b": 1}, ["a", "b"])
    ['x']
    """
    from scipy.sparse import csgraph, csr_array  # it takes a while to load

    # Every node becomes an arc from its entry to its exit with its cost as capacity. An arc from the start to its entry has
    # the cost of computing it again. An operand's exit leads to the result's entry.
    entry = {node: 2 * i + 2 for i, node in enumerate(costs)}
    if not entry:
        return []
    start = 0
    end = 1
    arcs = {(at, at + 1): costs[node] for node, at in entry.items()}
    for node, at in entry.items():
        if recompute_costs.get(node):
            arcs[start, at] = recompute_costs[node]
    for tail, head in edges:
        arcs[entry[tail] + 1, entry[head]] = _INFINITE
    for node in sinks:
        arcs[entry[node] + 1, end] = _INFINITE
    finite = sum(size for size in arcs.values() if size < _INFINITE)
    unit = max(1, -(-finite // 2**30))  # SciPy's capacities have 32 bits
    most = np.iinfo(np.int32).max
    sizes = np.array([min(-(-size // unit), most) for size in arcs.values()], np.int32)
    graph = csr_array((sizes, tuple(zip(*arcs))), (2 * len(entry) + 2,) * 2)
    result = csgraph.maximum_flow(graph, start, end)
    assert result.flow_value < most, "a needed value can be neither stored nor computed again"
    unused_capacity = graph - result.flow
    unused_capacity.eliminate_zeros()
    backward = unused_capacity.T.tocsr()
    order = csgraph.breadth_first_order(backward, end, return_predecessors=False)
    reaches_end = set(order.tolist())
    return [node for node, at in entry.items() if at + 1 in reaches_end and at not in reaches_end]
