"""Which operator is at fault where gradients disagree, found by bisecting.

The operators from number k on are a net of their own, whose inputs are the blobs at that border. Its gradients agree for
every k behind the operator at fault and disagree for every k before it, for what is wrong stays wrong on its way back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jrnn.errors import describe_op
from jrnn.gradcheck.compare import Effort, agreements, gradients_part, net_error
from jrnn.gradcheck.report import BlobAgreement, Fault
from jrnn.gradcheck.subject import Subject, function_of, subject_of_net
from jrnn.gradcheck.three_ways import by_jax
from jrnn.graph.scope import Workspace, reads, workspace_of
from jrnn.ir import Op
from jrnn.lowering import run_net
from jrnn.ops.recurrent_network import initial_state
from jrnn.ops.recurrent_wiring import Wiring, parse
from jrnn.registry import lookup


def first_fault(s: Subject, effort: Effort, blobs: list[BlobAgreement]) -> Fault | None:
    """The operator nearest to the outputs at which the gradients of a subject part; None where the net's own agree.

    That may be: the subject's function may be another than the net.
    """
    kind = "net" if any(not b.net_error <= effort.tolerance for b in blobs) else "difference"
    if not s.exact and not gradients_part(_suffix(s, 0), effort, kind):
        return None
    low, high = 0, len(s.net.ops)  # wrong from `low` on; right from `high` on, where nothing is left to differentiate
    while high - low > 1:
        middle = (low + high) // 2
        if gradients_part(_suffix(s, middle), effort, kind):
            low = middle
        else:
            high = middle
    op, at = s.net.ops[low], _suffix(s, low)
    found, _ = agreements(at, replace(effort, second=False))
    wrong = [b for b in found if not b.agrees] or found
    b = max([b for b in wrong if b.name in op.inputs] or wrong, key=lambda b: max(b.net_error, b.difference_error))
    inside = _fault_in_step(op, at, effort) if workspace_of(op) is Workspace.STEP else None
    where = describe_op(low, op.type, op.outputs, s.net.name)
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
