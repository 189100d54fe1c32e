"""RecurrentNetwork: a step net run over time, and its gradient: the backward step net run over time in reverse.

Shapes: T time, N batch, L length of an initial state (normally 1). The first input is [T, N, ...]; an initial state is
[D], [N, D] or [L, N, D]; a state is [T+L, N, D]. Within the step net every linked blob has a leading dimension, its window.

`recurrent_wiring.parse` turns the operator's arguments into a `Wiring`, with these fields:

- links: at step t, the step net's blob `internal` is read from or written to `external[t+offset : t+offset+window]`.
  `external` is a sequence, or the blob of a state: T+L slots; the first L are the initial state.
- aliases: the output `dst` is `src[offset:]`, where `src` is a state.
- states: their blobs. `initial_ids` are the positions of their initial values in `inputs`. `smooth_states` have gradients.
- collected: maps each output that is not an alias to the blob of the step net that it collects over time.
- outputs_with_grads: the positions of the outputs that pass gradients, or None. `stop_outputs` stops the others.
- recompute: the blobs of the step net that the reverse pass computes again.

`run_forward` is the loop, an `executor.scan` over the step net. `recurrent_network_gradient.py` has the gradient operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jrnn.errors import OpError
from jrnn.jaxprs.queries import is_floating
from jrnn.loops import scan
from jrnn.nets.graph.ssa import undeclared_reads
from jrnn.nets.ir import Blobs, Names, NameSet, Op, Shape, Values, written_by
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

    stacked: Blobs = field(default_factory=dict)
    constant: Blobs = field(default_factory=dict)

    def tree_flatten(self) -> tuple[Any, Any]:
        constant = [(name, _Constant(value)) for name, value in self.constant.items()]
        return (self.stacked,), tuple(constant)

    @classmethod
    def tree_unflatten(cls, constant: Any, stacked: Any) -> StepWorkspaces:
        return cls(*stacked, {name: c.value for name, c in constant})

    def steps(self) -> Iterator[tuple[str, Any]]:
        """Each blob of each step, with the step in its name: `gates0`, `gates1`, ..."""
        count = max(map(len, self.stacked.values()), default=0)
        for t in range(count):
            for name, value in self.stacked.items():
                yield f"{name}{t}", value[t]
            for name, value in self.constant.items():
                yield f"{name}{t}", value


@op("RecurrentNetworkBlobFetcher", gradient="stops")
def recurrent_network_blob_fetcher(workspaces, *, prefix: str = "rnn"):
    """The outside names of the blobs of every step, `<prefix>_<blob><step>`; `retrieve_step_blobs` returns the blobs."""
    return np.array([f"{prefix}_{name}".encode() for name, _ in workspaces.steps()], dtype=object)


def _cut(op: Op) -> str | None:
    """Describes the gradients that outputs_with_grads stops; None if it stops none."""
    passing = op.integers("outputs_with_grads")
    all_results = range(len(op.outputs) - 1)  # without the step workspaces
    if not passing or set(passing).issuperset(all_results):
        return None
    named = ", ".join(repr(op.outputs[k]) for k in passing if 0 <= k < len(op.outputs))
    return f"argument outputs_with_grads {list(passing)} lets only the gradients of {named} pass"


@op("RecurrentNetwork", outputs=(1, None), cuts=_cut)
def recurrent_network(*inputs, op, context):
    w = parse(op, op.inputs, op.outputs)
    keep = _names_to_keep(w, context)
    run = run_forward(w, dict(zip(op.inputs, inputs)), keep, context)
    results = []
    for name in op.outputs:
        alias = next((a for a in w.aliases if a.dst == name), None)
        if alias is None and name in w.states:
            # compat: an output with a state's name is all of its slots
            value = run.states[name][0:]
        elif alias is None:
            value = run.collected.get(name, run.workspaces)  # the workspaces: the last output
        else:
            value = run.states[alias.src][alias.offset :]
        results.append(value)
    if w.outputs_with_grads is None:
        return tuple(results)
    arrays = [k for k, value in enumerate(results) if value is not run.workspaces]
    passes = [k in w.outputs_with_grads for k in arrays]
    stopped = stop_outputs([results[k] for k in arrays], passes, w.stopped_warning)
    for k, value in zip(arrays, stopped):
        results[k] = value
    return tuple(results)


def _names_to_keep(w: Wiring, context: Context) -> Names:
    """The local blobs of the step net to store: all of them when run eagerly, else the blobs that the backward net reads."""
    last = w.outputs[-1]
    if last in context.unread or last in w.collected or any(a.dst == last for a in w.aliases):
        return ()  # nothing reads the step workspaces, or the operator has no such output
    written = written_by(w.step_net.ops)
    if context.eager:
        return tuple(written)
    if w.backward_step_net is None:
        return ()
    reads = {*w.backward_step_net.external_inputs, *undeclared_reads(w.backward_step_net)}
    reads -= {link.internal for link in w.links}
    return tuple(filter(reads.__contains__, written))


def initial_states(w: Wiring, blobs: Blobs) -> dict[str, jax.Array]:
    """The first L slots of every state; see `initial_state`."""
    sequence = blobs[w.inputs[0]]
    states = {}
    for k, state in enumerate(w.states):
        states[state] = initial_state(w, k, blobs[w.inputs[w.initial_ids[k]]], sequence)
    return states


def initial_state(w: Wiring, k: int, value: Any, sequence: Any) -> jax.Array:
    """The first L slots of state `k`, for a first input [T, N, ...].

    [D] is broadcast over the batch; [N, D] is one slot, [L, N, D] L slots. Beyond Caffe2, [L, ...] may have any rank, [] is
    one slot of one number, and any dtype is allowed. A floating-point state has at least the precision of a floating-point
    sequence, so that float32 constants work in float64 too.
    """
    name = w.inputs[w.initial_ids[k]]
    batch = sequence.shape[1] if sequence.ndim > 1 else 1
    value = jnp.asarray(value)
    if is_floating(value) and is_floating(sequence):
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

    states: Blobs
    collected: Blobs
    workspaces: StepWorkspaces


def run_forward(w: Wiring, blobs: Blobs, keep: Names, context: Context) -> Forward:
    """Runs the step net over time, and stores the blobs `keep` of every step."""
    steps = blobs[w.inputs[0]].shape[0]
    first = initial_states(w, blobs)
    for link in w.links:
        if link.external in blobs and link.external not in first:
            _check_reach(link, blobs[link.external].shape[0], steps)

    # The links of each state, and what the step net must compute.
    written = written_by(w.step_net.ops)
    reads: dict[str, list[Link]] = {state: [] for state in w.states}
    writes: dict[str, list[Link]] = {state: [] for state in w.states}
    results: NameSet = {}
    for state in w.states:
        for link in w.state_links(state):
            if link.internal in written:
                writes[state].append(link)
                results[link.internal] = None
            else:
                reads[state].append(link)
        if not writes[state]:
            raise OpError(
                f"state {state!r} is never written: no blob that the step net writes is linked to it"
            )
    scheduled = schedule(w.step_net, dict.fromkeys([*results, *w.collected.values(), *keep]))

    def gather(env: Blobs) -> tuple[StepWorkspaces, Values]:
        """What a step gives besides its states: the blobs to store, and the collected outputs."""
        stacked = {}
        constant = {}
        for name in keep:
            if isinstance(env[name], np.ndarray):
                constant[name] = env[name]  # does not depend on the data, as shapes do not
            else:
                stacked[name] = env[name]
        collected = {name: _one_slot(name, env[blob]) for name, blob in w.collected.items()}
        return StepWorkspaces(stacked, constant), collected

    def is_shifted(state: str) -> bool:
        """Whether a state is read within its last L slots, the carry, and written once, in the slot after them."""
        length = len(first[state])
        if [(link.offset, link.window) for link in writes[state]] != [(length, 1)]:
            return False
        return all(0 <= r.offset <= length - r.window for r in reads[state])

    loop = _Loop(
        w=w,
        scheduled=scheduled,
        first=first,
        blobs=blobs,
        steps=steps,
        gather=gather,
        context=context,
    )
    if all(map(is_shifted, w.states)):  # the common case
        states, (workspaces, collected) = _run_slot_by_slot(loop, reads, writes)
    else:
        states, (workspaces, collected) = _run_on_buffers(loop)
    return Forward(states, collected, workspaces)


@dataclass(frozen=True)
class _Loop:
    """What both ways to run a step net over time need.

    Attributes:
        w: the arguments of the operator.
        scheduled: the operators of a step.
        first: the first L slots of each state.
        blobs: the inputs of the operator.
        steps: T.
        gather: from the blobs of a step, what it gives besides its states.
        context: the context of the operator.
    """

    w: Wiring
    scheduled: Schedule
    first: Blobs
    blobs: Blobs
    steps: int
    gather: Callable[[Blobs], tuple[StepWorkspaces, Values]]
    context: Context

    def scan(self, step: Callable[..., Any], init: Any, sequences: Blobs) -> Any:
        """Runs `step(carry, (t, slices of sequences))` over time."""
        xs = (jnp.arange(self.steps, dtype=jnp.int32), sequences)
        recompute = [RECOMPUTED] if self.w.recompute else None
        return scan(step, init, xs, length=self.steps, recompute=recompute)


def _one_slot(name: str, value: Any) -> Any:
    if value.ndim == 0 or value.shape[0] != 1:
        raise OpError(
            f"output {name!r} collects a blob {list(value.shape)} of every step; it must be [1, ...]"
        )
    return jnp.asarray(value)[0]


def sequence_views(w: Wiring, blobs: Blobs, steps: int):
    """Returns the sequences to scan over, and a function that makes the step net's blobs from their slices and t."""
    plain = {}
    links = [link for link in w.links if link.external in blobs]
    for link in links:
        sequence = blobs[link.external]
        if (link.offset, link.window) == (0, 1) and sequence.shape[0] == steps:
            plain[link.internal] = sequence

    def views(xs: Blobs, t: Any) -> Values:
        env = {name: x[None] for name, x in xs.items()}
        for link in links:
            if link.internal not in plain:
                env[link.internal] = slots(blobs[link.external], link, t)
        env[w.timestep] = t[None]
        return env

    return plain, views


def _step_context(w: Wiring, t: Any, context: Context) -> Context:
    if w.recompute:
        # `scan` raises if no value has this name, as when no listed blob is computed.
        checkpoint_name(t, RECOMPUTED)
    return context.step(t, w.outputs[-1], w.recompute)


def _run_slot_by_slot(
    loop: _Loop, reads: Mapping[str, list[Link]], writes: Mapping[str, list[Link]]
) -> tuple[Values, Any]:
    """The common case: the carry has the last L slots of each state, and each step makes the next one."""
    w = loop.w
    sequences, views = sequence_views(w, loop.blobs, loop.steps)
    smooth_states = w.smooth_states

    def step(carry, xs):
        t, now = xs
        env = views(now, t)
        for state in w.states:
            for link in reads[state]:
                env[link.internal] = carry[state][link.offset : link.offset + link.window]
        env = execute(loop.scheduled, env, _step_context(w, t, loop.context))

        new = {state: _new_slot(writes[state][0], env, carry[state]) for state in w.states}
        for state in w.states:
            if state not in smooth_states:
                new[state] = lax.stop_gradient(new[state])
        after = dict(new)  # `new` itself: outputs and residuals share one stack
        for state in w.states:
            if carry[state].shape[0] > 1:
                after[state] = jnp.concatenate([carry[state][1:], new[state]])
        return after, (new, loop.gather(env))

    last, (stacked, gathered) = loop.scan(step, loop.first, sequences)
    states = {}
    for state in w.states:
        states[state] = _States(loop.first[state], stacked[state][:, 0], last[state])
    return states, gathered


def _new_slot(link: Link, env: Blobs, before: Any) -> Any:
    """The new slot of a state, in the shape of the slots before."""
    new = jnp.asarray(env[link.internal])
    slot = (1, *before.shape[1:])
    if _larger_than_1(new.shape) == _larger_than_1(slot):
        # compat: a slot is a view of memory, in which dimensions of 1 do not matter
        new = new.reshape(slot)
    if new.shape != slot or new.dtype != before.dtype:
        raise OpError(
            f"state {link.external!r} is {before.dtype}[1,{','.join(map(str, before.shape[1:]))}], but the step net writes "
            f"{link.internal!r} as {new.dtype}{list(new.shape)}"
        )
    return new


def _larger_than_1(shape: Shape) -> list[int]:
    return [size for size in shape if size != 1]


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


def _run_on_buffers(loop: _Loop) -> tuple[Values, Any]:
    """The general case: links are windows on whole states, as in Caffe2. After a write, every window has the new value."""
    w = loop.w
    sequences, views = sequence_views(w, loop.blobs, loop.steps)
    buffers = {}
    for state, first in loop.first.items():
        later = jnp.zeros((loop.steps, *first.shape[1:]), first.dtype)
        buffers[state] = jnp.concatenate([first, later])
    for link in w.links:
        if link.external in buffers:
            _check_reach(link, buffers[link.external].shape[0], loop.steps)

    def step(carry, xs):
        t, now = xs
        carry = dict(carry)
        env = views(now, t)

        def read_windows(state: str) -> None:
            for link in w.state_links(state):
                env[link.internal] = slots(carry[state], link, t)

        for state in w.states:
            read_windows(state)
        for scheduled_op in loop.scheduled.steps:
            one_step = Schedule((scheduled_op,), ())
            env.update(execute(one_step, env, _step_context(w, t, loop.context)))
            for link in w.links:
                state = link.external
                if state not in carry or link.internal not in scheduled_op.op.outputs:
                    continue
                new = env[link.internal]
                if link.window == 1:
                    new = _new_slot(link, env, carry[state])
                start = t + link.offset
                carry[state] = lax.dynamic_update_slice_in_dim(carry[state], new, start, axis=0)
                read_windows(state)
        return carry, loop.gather(env)

    return loop.scan(step, buffers, sequences)
