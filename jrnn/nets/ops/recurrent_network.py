"""RecurrentNetwork: a step net run over time, and its gradient: the backward step net run over time in reverse.

Shapes: T time, N batch, L length of an initial state (normally 1). The first input is [T, N, ...]; an initial state is
[D], [N, D] or [L, N, D]; a state is [T+L, N, D]. Within the step net every linked blob has a leading dimension, its window.

`recurrent_wiring.parse` turns the operator's arguments into a `Wiring`, with these fields:

- links: at step t, the step net's blob `internal` is read from or written to `external[t+offset : t+offset+window]`.
  `external` is a sequence, or the blob of a state: T+L slots, of which the first L are the initial state.
- aliases: the output `dst` is `src[offset:]`, where `src` is a state.
- states: their blobs. `initial_ids` are the positions of their initial values in `inputs`. `smooth_states` have gradients.
- collected: maps each output that is not an alias to the blob of the step net that it collects over time.
- outputs_with_grads: the positions of the outputs that pass gradients, or None. `stop_outputs` stops those of the others.
- recompute: the blobs of the step net that the reverse pass computes again.

`run_forward` is the loop, an `executor.scan` over the step net. `recurrent_network_gradient.py` has the gradient operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jrnn.errors import OpError
from jrnn.loops import scan
from jrnn.nets.graph.ssa import undeclared_reads
from jrnn.nets.ir import Op
from jrnn.nets.lowering import RECOMPUTED, Context, execute
from jrnn.nets.ops.recurrent_wiring import Link, Wiring, parse
from jrnn.nets.ops.stopped_outputs import stop_outputs
from jrnn.nets.registry import op
from jrnn.nets.schedule import Schedule, schedule


class _Constant:
    """A numpy array that is compared by its elements, as parts of the structure of pytrees must be."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.value.shape, self.value.dtype.str, tuple(self.value.reshape(-1).tolist())


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class StepWorkspaces:
    """Local blobs of the step net, stored for the backward pass: `stacked` over time, or `constant` at every step.

    This is the value of a RecurrentNetwork's last output. For a blob that the step net overwrites, it has the last value.
    As a pytree it holds the stacked blobs alone: a constant, such as a shape, stays known in a loop around the network.
    """

    stacked: Mapping[str, Any] = field(default_factory=dict)
    constant: Mapping[str, Any] = field(default_factory=dict)

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.stacked,), tuple(
            (name, _Constant(value)) for name, value in self.constant.items()
        )

    @classmethod
    def tree_unflatten(cls, constant: Any, stacked: Any) -> StepWorkspaces:
        return cls(*stacked, {name: c.value for name, c in constant})

    def steps(self) -> Iterator[tuple[str, Any]]:
        """Each blob of each step, with the step in its name: `gates0`, `gates1`, ..."""
        count = max((len(v) for v in self.stacked.values()), default=0)
        for t in range(count):
            yield from ((f"{name}{t}", value[t]) for name, value in self.stacked.items())
            yield from ((f"{name}{t}", value) for name, value in self.constant.items())


@op("RecurrentNetworkBlobFetcher", gradient="stops")
def recurrent_network_blob_fetcher(workspaces, *, prefix: str = "rnn"):
    """The outside names of the blobs of every step, `<prefix>_<blob><step>`; `retrieve_step_blobs` returns the blobs."""
    return np.array([f"{prefix}_{name}".encode() for name, _ in workspaces.steps()], dtype=object)


def _cut(op: Op) -> str | None:
    given = op.integers("outputs_with_grads")
    if set(given) >= set(range(len(op.outputs) - 1)):  # all but the step workspaces
        return None
    named = ", ".join(repr(op.outputs[k]) for k in given if 0 <= k < len(op.outputs))
    return (
        f"argument outputs_with_grads {list(given)} lets only the gradients of {named} pass"
        if given
        else None
    )


@op("RecurrentNetwork", outputs=(1, None), cuts=_cut)
def recurrent_network(*inputs, op, context):
    w = parse(op, op.inputs, op.outputs)
    keep = _names_to_keep(w, context)
    run = run_forward(w, dict(zip(op.inputs, inputs)), keep, context)
    results = []
    for name in op.outputs:
        alias = next((a for a in w.aliases if a.dst == name), None)
        if alias is None and name in w.states:
            value = run.states[name][
                0:
            ]  # compat: an output with a state's name is all of its slots
        elif alias is None:
            value = run.collected.get(name, run.workspaces)  # the workspaces: the last output
        else:
            value = run.states[alias.src][alias.offset :]
        results.append(value)
    if w.outputs_with_grads is None:
        return tuple(results)
    arrays = [k for k, value in enumerate(results) if value is not run.workspaces]
    passes = [k in w.outputs_with_grads for k in arrays]
    for k, value in zip(
        arrays, stop_outputs([results[k] for k in arrays], passes, w.stopped_warning)
    ):
        results[k] = value
    return tuple(results)


def _names_to_keep(w: Wiring, context: Context) -> tuple[str, ...]:
    """The local blobs of the step net to store: all of them when run eagerly, else those that the backward net reads."""
    last = w.outputs[-1]
    if last in context.unread or last in w.collected or any(a.dst == last for a in w.aliases):
        return ()  # nothing reads the step workspaces, or the operator has no such output
    written = dict.fromkeys(o for step_op in w.step_net.ops for o in step_op.outputs)
    if context.eager:
        return tuple(written)
    linked = {link.internal for link in w.links}
    if w.backward_step_net is None:
        return ()
    reads = {*w.backward_step_net.external_inputs, *undeclared_reads(w.backward_step_net)}
    return tuple(n for n in written if n in reads and n not in linked)


def initial_state(w: Wiring, k: int, value: Any, sequence: Any) -> jax.Array:
    """The first L slots of state `k`, for a first input [T, N, ...].

    [D] is broadcast over the batch; [N, D] is one slot, [L, N, D] L slots. Beyond Caffe2, [L, ...] may have any rank, [] is
    one slot of one number, and any dtype is allowed. A floating-point state has at least the precision of a floating-point
    sequence, so that float32 constants work in float64 too.
    """
    name = w.inputs[w.initial_ids[k]]
    batch = sequence.shape[1] if sequence.ndim > 1 else 1
    value = jnp.asarray(value)
    if all(jnp.issubdtype(v.dtype, jnp.floating) for v in (value, sequence)):
        value = value.astype(jnp.promote_types(value.dtype, sequence.dtype))
    if value.ndim == 0:
        return value[None]
    if value.ndim == 1:
        return jnp.broadcast_to(value, (1, batch, value.shape[0]))
    if value.ndim <= 3 and value.shape[-2] != batch:
        raise OpError(
            f"initial state {name!r} is {list(value.shape)}, but the batch has {batch} sequences"
        )
    return value if value.ndim >= 3 else value[None]


def slots(sequence: Any, link: Link, t: Any) -> Any:
    """The slice that a link reads at step t: `sequence[t+offset : t+offset+window]`."""
    return lax.dynamic_slice_in_dim(sequence, t + link.offset, link.window, axis=0)


def _check_reach(link: Link, length: int, steps: int) -> None:
    if not (link.offset >= 0 and steps - 1 + link.offset + link.window <= length):
        raise OpError(
            f"link of {link.internal!r} reads steps {link.offset} to {steps - 1 + link.offset + link.window - 1} of "
            f"{link.external!r}, which has {length}"
        )


@dataclass(frozen=True)
class Forward:
    """The result of a run over time: the T+L slots of each state (an array or `_States`), other outputs, workspaces."""

    states: Mapping[str, Any]
    collected: Mapping[str, Any]
    workspaces: StepWorkspaces


def run_forward(
    w: Wiring, blobs: Mapping[str, Any], keep: tuple[str, ...], context: Context
) -> Forward:
    """Runs the step net over time, and stores the blobs `keep` of every step."""
    sequence = blobs[w.inputs[0]]
    steps = sequence.shape[0]
    first = {
        s: initial_state(w, k, blobs[w.inputs[w.initial_ids[k]]], sequence)
        for k, s in enumerate(w.states)
    }
    for link in w.links:
        if link.external in blobs and link.external not in first:
            _check_reach(link, blobs[link.external].shape[0], steps)
    written = {o for step_op in w.step_net.ops for o in step_op.outputs}
    reads = {
        s: [link for link in w.state_links(s) if link.internal not in written] for s in w.states
    }
    writes = {s: [link for link in w.state_links(s) if link.internal in written] for s in w.states}
    for s in w.states:
        if not writes[s]:
            raise OpError(
                f"state {s!r} is never written: no blob that the step net writes is linked to it"
            )
    results = [link.internal for s in w.states for link in writes[s]]
    p = schedule(w.step_net, dict.fromkeys([*results, *w.collected.values(), *keep]))

    def gather(env: Mapping[str, Any]) -> tuple[StepWorkspaces, dict[str, Any]]:
        constant = {
            n: env[n] for n in keep if isinstance(env[n], np.ndarray)
        }  # independent of the data, as shapes are
        workspace = StepWorkspaces({n: env[n] for n in keep if n not in constant}, constant)
        return workspace, {n: _one_slot(n, env[i]) for n, i in w.collected.items()}

    # The common case: each state is read within its last L slots, the carry, and written once, in the slot after them.
    slot_by_slot = all(
        [(link.offset, link.window) for link in writes[s]] == [(len(first[s]), 1)]
        and all(r.offset >= 0 and r.offset + r.window <= len(first[s]) for r in reads[s])
        for s in w.states
    )
    if slot_by_slot:
        states, (workspaces, collected) = _run_slot_by_slot(
            w, reads, writes, p, first, blobs, steps, gather, context
        )
    else:
        states, (workspaces, collected) = _run_on_buffers(
            w, p, first, blobs, steps, gather, context
        )
    return Forward(states, collected, workspaces)


def _one_slot(name: str, value: Any) -> Any:
    if value.ndim == 0 or value.shape[0] != 1:
        raise OpError(
            f"output {name!r} collects a blob {list(value.shape)} of every step; it must be [1, ...]"
        )
    return jnp.asarray(value)[0]


def sequence_views(w: Wiring, blobs: Mapping[str, Any], steps: int):
    """Returns the sequences to scan over, and a function that makes the step net's blobs from their slices and t."""
    plain = {
        link.internal: blobs[link.external]
        for link in w.links
        if link.external in blobs
        and (link.offset, link.window) == (0, 1)
        and blobs[link.external].shape[0] == steps
    }
    rest = [link for link in w.links if link.external in blobs and link.internal not in plain]

    def views(xs: Mapping[str, Any], t: Any) -> dict[str, Any]:
        slices = {n: x[None] for n, x in xs.items()} | {
            k.internal: slots(blobs[k.external], k, t) for k in rest
        }
        return {**slices, w.timestep: t[None]}

    return plain, views


def _step_context(w: Wiring, t: Any, context: Context) -> Context:
    if w.recompute:
        checkpoint_name(
            t, RECOMPUTED
        )  # `scan` raises if no value has this name, as when no listed blob is computed
    return context.step(t, w.outputs[-1], w.recompute)


def _run_slot_by_slot(
    w: Wiring, reads, writes, p: Schedule, first, blobs, steps: int, gather, context: Context
):
    sequences, views = sequence_views(w, blobs, steps)

    def step(carry, xs):
        t, now = xs
        env = views(now, t)
        for s in w.states:
            env.update((r.internal, carry[s][r.offset : r.offset + r.window]) for r in reads[s])
        env = execute(p, env, _step_context(w, t, context))
        new = {s: _new_slot(writes[s][0], env, carry[s]) for s in w.states}
        new = {s: v if s in w.smooth_states else lax.stop_gradient(v) for s, v in new.items()}
        after = {
            s: jnp.concatenate([carry[s][1:], new[s]]) if carry[s].shape[0] > 1 else new[s]
            for s in w.states
        }
        return after, (new, gather(env))  # `new` itself: outputs and residuals share one stack

    xs = (jnp.arange(steps, dtype=jnp.int32), sequences)
    last, (states, gathered) = scan(
        step, first, xs, length=steps, recompute=[RECOMPUTED] if w.recompute else None
    )
    return {s: _States(first[s], states[s][:, 0], last[s]) for s in w.states}, gathered


def _new_slot(link: Link, env: Mapping[str, Any], before: Any) -> Any:
    new = jnp.asarray(env[link.internal])
    slot = (1, *before.shape[1:])
    if [d for d in new.shape if d != 1] == [d for d in slot if d != 1]:
        new = new.reshape(
            slot
        )  # compat: a slot is a view of memory, in which dimensions of 1 do not matter
    if new.shape != slot or new.dtype != before.dtype:
        raise OpError(
            f"state {link.external!r} is {before.dtype}[1,{','.join(map(str, before.shape[1:]))}], but the step net writes "
            f"{link.internal!r} as {new.dtype}{list(new.shape)}"
        )
    return new


class _States:
    """The slots of a state. A slice concatenates the initial slots with the others only if it needs both."""

    def __init__(self, first: Any, rest: Any, last: Any):
        self.first = first
        self.rest = rest
        self.last = last

    def __getitem__(self, index: slice) -> Any:
        length = self.first.shape[0]
        steps = self.rest.shape[0]
        start = index.start if index.start >= 0 else length + steps + index.start
        if start == length + steps - 1:
            return self.last[-1:]  # from the carry, so that XLA can remove an unused stack
        if start >= length:
            return self.rest[start - length :]
        return jnp.concatenate([self.first[start:], self.rest])


def _run_on_buffers(w: Wiring, p: Schedule, first, blobs, steps: int, gather, context: Context):
    """The general case: links are windows on whole states, as in Caffe2. After a write, every window has the new value."""
    sequences, views = sequence_views(w, blobs, steps)
    buffers = {
        s: jnp.concatenate([v, jnp.zeros((steps, *v.shape[1:]), v.dtype)]) for s, v in first.items()
    }
    for link in w.links:
        if link.external in buffers:
            _check_reach(link, buffers[link.external].shape[0], steps)

    def step(carry, xs):
        t, now = xs
        carry = dict(carry)
        env = views(now, t)
        env.update(
            (link.internal, slots(carry[s], link, t)) for s in w.states for link in w.state_links(s)
        )
        for one in p.steps:
            env = execute(Schedule((one,), ()), env, _step_context(w, t, context))
            for link in w.links:
                if link.external in carry and link.internal in one.op.outputs:
                    new = (
                        _new_slot(link, env, carry[link.external])
                        if link.window == 1
                        else env[link.internal]
                    )
                    carry[link.external] = lax.dynamic_update_slice_in_dim(
                        carry[link.external], new, t + link.offset, axis=0
                    )
                    env.update(
                        (o.internal, slots(carry[link.external], o, t))
                        for o in w.state_links(link.external)
                    )
        return carry, gather(env)

    xs = (jnp.arange(steps, dtype=jnp.int32), sequences)
    return scan(step, buffers, xs, length=steps, recompute=[RECOMPUTED] if w.recompute else None)
