"""Which operator of a net, or which equation of a JAX function, is at fault where gradients disagree.

Both are found by bisecting. The operators from number k on are a net of their own, whose inputs are the blobs at that
border. Its gradients agree for every k behind the operator at fault and disagree for every k before it, because what is
wrong stays wrong on its way back. A fault in a function is usually a derivative rule of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.convert.flat import source_of
from jrnn.errors import describe_op
from jrnn.executor.jaxprs import Var, evaluate, read, scan_counts
from jrnn.gradcheck.compare import Effort, agreements, chosen, compare, disagree, net_error
from jrnn.gradcheck.report import BlobAgreement, Fault
from jrnn.gradcheck.subject import Subject, function_of, subject_of_net
from jrnn.gradcheck.three_ways import by_jax, element_differences
from jrnn.graph.scope import Workspace, reads, workspace_of
from jrnn.ir import Net, Op
from jrnn.lowering import run_net
from jrnn.ops.recurrent_network import initial_state
from jrnn.ops.recurrent_wiring import Wiring, parse
from jrnn.registry import lookup


def _bisect(count: int, is_wrong: Callable[[int], bool]) -> int:
    """The last of `count` places from which on the gradients are wrong; they are from 0 on, and right behind the last."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_wrong(middle) else (low, middle)
    return low


def first_fault(s: Subject, effort: Effort, blobs: list[BlobAgreement]) -> Fault | None:
    """The operator nearest to the outputs at which the gradients of a subject part; None where the net's own agree.

    That may be: the subject's function may be another than the net.
    """
    kind = "net" if any(not b.net_error <= effort.tolerance for b in blobs) else "difference"
    if not s.exact and not disagree(_suffix(s, 0), effort, kind):
        return None
    k = _bisect(len(s.net.ops), lambda k: disagree(_suffix(s, k), effort, kind))
    op, at = s.net.ops[k], _suffix(s, k)
    found, _ = agreements(at, replace(effort, second=False))
    wrong = [b for b in found if not b.agrees] or found
    b = max([b for b in wrong if b.name in op.inputs] or wrong, key=lambda b: max(b.net_error, b.difference_error))
    inside = _fault_in_step(op, at, effort) if workspace_of(op) is Workspace.STEP else None
    where = describe_op(k, op.type, op.outputs, s.net.name)
    return Fault(where, op.type, b.name, b.worst, b.values, inside, _cut(op))


def _cut(op: Op) -> str | None:
    """Which gradients an operator stops by design."""
    definition = lookup(op.type)
    if definition.gradient == "stops":
        return f"every gradient ends at a {op.type}"
    return definition.cuts(op) if definition.cuts else None


def _suffix(s: Subject, k: int) -> Subject:
    """The operators from number k on, with one gradient that arrives: that of all rows, mixed."""
    written = run_net(replace(s.net, ops=s.net.ops[:k], external_outputs=()), s.blobs, key=s.key, wide=True)
    known = {**s.blobs, **written}
    net = replace(s.net, ops=s.net.ops[k:], external_outputs=())
    given = {n: known[n] for n in dict.fromkeys((*reads(net), *s.seeds)) if n in known}
    net = replace(net, external_inputs=tuple(given))
    wrt = tuple(n for n, v in given.items() if isinstance(v, np.ndarray) and v.dtype == np.float64)
    mix = np.random.default_rng(0).standard_normal(s.rows)
    seeds = {y: np.tensordot(mix, v, 1)[None] for y, v in s.seeds.items()}
    return replace(s, net=net, blobs=given, wrt=wrt, seeds=seeds, function=function_of(net, seeds, given, s.key))


def _fault_in_step(op: Op, at: Subject, effort: Effort) -> Fault | str | None:
    """Where the gradient of a recurrent network's step is at fault: in an operator, or in the backward step net it holds."""
    w = parse(op, op.inputs, op.outputs)
    step = _step_of(w, at)
    found, _ = agreements(step, effort)
    if not all(b.agrees for b in found):
        return first_fault(step, effort, found)
    if w.backward_step_net is None:
        return None
    mine = by_jax(step)
    for name, by_net in _stored_gradients(w, step).items():
        if not net_error(mine[name][0], by_net) <= effort.tolerance:
            return f"the backward step net that it holds gives another gradient of {name!r} than its step net has"
    return "the operators of its step net agree; the loop around them does not"


def _step_of(w: Wiring, at: Subject) -> Subject:
    """The first step as a subject of its own, from drawn states: where all are zero, so are the gradients of weights."""
    rng = np.random.default_rng(0)
    sequence = at.blobs[w.inputs[0]]
    blobs = {**at.blobs, w.timestep: np.zeros(1, np.int32)}
    written = {o for op in w.step_net.ops for o in op.outputs}
    for link in w.links:
        if link.external in w.inputs:
            blobs[link.internal] = at.blobs[link.external][link.offset : link.offset + link.window]
        elif link.internal not in written:
            k = w.states.index(link.external)
            first = np.asarray(initial_state(w, k, at.blobs[w.inputs[w.initial_ids[k]]], sequence))
            first = first[link.offset : link.offset + link.window]
            blobs[link.internal] = rng.standard_normal(first.shape) if first.dtype == np.float64 else first
    smooth = {k.internal: None for k in w.links if k.external in w.smooth_states and k.internal in written}
    ends = (*smooth, *w.collected.values())
    net = replace(w.step_net, external_outputs=ends)
    read = set(reads(net))
    return _suffix(subject_of_net(net, {n: v for n, v in blobs.items() if n in read}, key=at.key), 0)


def _stored_gradients(w: Wiring, step: Subject) -> dict[str, Any]:
    """The gradients of references and sequences that the backward step net writes, for the step's own seeds."""
    assert w.backward_step_net is not None
    blobs = dict(step.blobs)
    ends = {k.external: k.internal for k in w.links if k.internal in step.seeds} | w.collected
    for link in w.backward_links:
        new = ends.get(link.external.removesuffix("_grad"))
        if new is not None and (link.offset > 0 or link.external.removesuffix("_grad") in w.collected):
            blobs[link.internal] = step.seeds[new][0]
    run = replace(step.net, ops=(*step.net.ops, *w.backward_step_net.ops), external_inputs=(), external_outputs=())
    got = run_net(run, blobs, key=step.key, wide=True)
    names = dict(zip((w.inputs[k] for k in w.params), w.param_grads))
    inner = {k.external: k.internal for k in w.links}
    names |= {inner[n]: k.internal for n in w.sequences for k in w.backward_links if k.external == n + "_grad"}
    return {n: got[g] for n, g in names.items() if g in got and n in step.wrt}


SCAN, CALLS = "scan", ("jit", "pjit", "closed_call")


@dataclass(frozen=True)
class _Program:
    """Equations with the values that they know, their inputs, and their outputs."""

    known: dict[Any, Any]
    invars: tuple[Var, ...]
    eqns: tuple[Any, ...]
    outvars: tuple[Any, ...]

    @classmethod
    def of(cls, closed: Any, outputs: Sequence[int] | None = None) -> _Program:
        """A traced function, with some of its outputs."""
        jaxpr = closed.jaxpr
        outvars = jaxpr.outvars if outputs is None else [jaxpr.outvars[k] for k in outputs]
        known = dict(zip(jaxpr.constvars, closed.consts))
        return cls(known, tuple(jaxpr.invars), tuple(jaxpr.eqns), tuple(outvars))

    def env(self, args: Sequence[Any], k: int) -> dict[Any, Any]:
        """The values of all variables before equation number k."""
        return evaluate(self.eqns[:k], self.known | dict(zip(self.invars, args)))


def fault_in_function(s: Subject, effort: Effort) -> Fault | None:
    """The equation nearest to the outputs whose gradient disagrees with central differences, or None."""
    point = s.point
    traced = jax.make_jaxpr(lambda *values: list(s.function(dict(zip(point, values))).values()))(*point.values())
    program = _Program.of(traced)
    seeds = [np.tensordot(np.random.default_rng(0).standard_normal(s.rows), s.seeds[y], 1)[None] for y in s.seeds]
    return _fault_in_equations(program, list(point.values()), seeds, effort)


def _fault_in_equations(
    program: _Program, args: Sequence[Any], seeds: Sequence[np.ndarray], effort: Effort
) -> Fault | None:
    if not disagree(_function_suffix(program, args, seeds, 0), effort, "difference"):
        return None
    k = _bisect(len(program.eqns), lambda k: disagree(_function_suffix(program, args, seeds, k), effort, "difference"))
    eqn = program.eqns[k]
    at = _function_suffix(program, args, seeds, k)
    mine = by_jax(at)
    where = {n: chosen(np.abs(np.asarray(mine[n])), effort.max_elements) for n in at.wrt}
    differences = element_differences(at, where)
    found = [compare(at, n, mine[n], mine[n], where[n], differences[n]) for n in at.wrt]  # there is no net's gradient
    b = max(found, key=lambda b: b.difference_error)
    inside = None
    if eqn.primitive.name in (SCAN, *CALLS):
        env = program.env(args, k)
        inside = _fault_inside(eqn, [jnp.asarray(read(env, v)) for v in eqn.invars], effort)
        if inside is not None and eqn.primitive.name in CALLS:
            return inside
    rule = eqn.params.get("name") or getattr(eqn.params.get("call_jaxpr"), "debug_info", None)
    called = getattr(rule, "func_name", rule)
    source = source_of(eqn)
    label = f"{eqn.primitive.name}{f' of {called}' if called else ''}{f' ({source})' if source else ''}"
    return Fault(label, eqn.primitive.name, b.name, b.worst, (b.values[0], None, b.values[2]), inside)


def _function_suffix(program: _Program, args: Sequence[Any], seeds: Sequence[np.ndarray], k: int) -> Subject:
    """The equations from number k on as a subject without a net."""
    env = program.env(args, k)
    needed = dict.fromkeys(v for eqn in program.eqns[k:] for v in eqn.invars if isinstance(v, Var))
    needed.update(dict.fromkeys(v for v in program.outvars if isinstance(v, Var)))
    known = {f"input {i}": v for i, v in enumerate(v for v in needed if v in env)}
    blobs = {n: np.asarray(env[v]) for n, v in known.items()}
    wrt = tuple(n for n, x in blobs.items() if x.dtype == np.float64)
    smooth = {f"output {i}": s for i, s in enumerate(seeds)}

    def function(point: Any) -> dict[str, Any]:
        inner = evaluate(program.eqns[k:], {**env, **{known[n]: x for n, x in point.items()}})
        found = [read(inner, v) for v in program.outvars]
        return dict(zip(smooth, found))

    return Subject(Net("function"), blobs, wrt, smooth, function)


def _fault_inside(eqn: Any, values: Sequence[Any], effort: Effort) -> Fault | None:
    """The equation at fault within a call, or within the first step of a scan, near the point where that step is."""
    rng = np.random.default_rng(0)
    closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if eqn.primitive.name == SCAN:
        fixed = sum(scan_counts(eqn.params))
        values = [v if i < fixed else v[0] for i, v in enumerate(values)]
        values = [v + 0.1 * rng.standard_normal(v.shape) if v.dtype == np.float64 else v for v in values]
    smooth = [i for i, v in enumerate(closed.out_avals) if v.dtype == np.float64]
    seeds = [rng.standard_normal((1, *closed.out_avals[i].shape)) for i in smooth]
    return _fault_in_equations(_Program.of(closed, smooth), values, seeds, effort)
