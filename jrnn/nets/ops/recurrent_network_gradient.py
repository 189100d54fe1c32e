"""The gradient of RecurrentNetwork: the backward step net, run over time in reverse.

Shapes: T time, N batch, L length of an initial state. The gradients of a state's slots t+1 ... t+L are carried from step to
step; step t reads them through backward links with a positive offset, and adds to slot t and later through links with
offset 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrnn.errors import GradientError, NetError, OpError
from jrnn.loops import scan
from jrnn.nets.graph.history import check_gradient_version
from jrnn.nets.ir import Blobs, Names, Op, Values, written_by
from jrnn.nets.lowering import Context, execute
from jrnn.nets.ops.recurrent_network import (
    StepWorkspaces,
    initial_states,
    run_forward,
    sequence_views,
    slots,
)
from jrnn.nets.ops.recurrent_wiring import Link, Wiring, parse
from jrnn.nets.ops.stopped_outputs import warn_of_stopped
from jrnn.nets.registry import ACCUMULATE, gradient, op
from jrnn.nets.schedule import Schedule, schedule


@op("RecurrentNetworkGradient", outputs=(1, None))
def recurrent_network_gradient(*blobs, op, context):
    try:
        check_gradient_version(op)
    except NetError as e:
        raise OpError(str(e)) from None
    w = gradient_wiring(op)
    count = len(op.integers("outputs_with_grads"))
    split = count + len(w.inputs)
    inputs = dict(zip(w.inputs, blobs[count:split]))
    outputs = dict(zip(w.outputs, blobs[split:]))
    arriving = {w.outputs[k]: g for k, g in zip(w.outputs_with_grads or (), blobs)}
    return _Backward.of(w, inputs, outputs, context).run(arriving, context)


def gradient_wiring(op: Op) -> Wiring:
    """The wiring of the forward operator, from the arguments and inputs of its gradient operator."""
    count = len(op.integers("outputs_with_grads"))
    ends = set(op.names("alias_dst"))
    split = next((k for k in range(count, len(op.inputs)) if op.inputs[k] in ends), len(op.inputs))
    return parse(op, op.inputs[count:split], op.inputs[split:])


@gradient("RecurrentNetwork")
def recurrent_network_gradient_maker(g):
    w = parse(g.op, g.op.inputs, g.op.outputs)
    if w.backward_step_net is None and not w.backward_links:
        raise GradientError(
            "was built forward_only, without a backward step net; build it with forward_only=False"
        )
    results = {alias.dst for alias in w.aliases} | set(w.collected)
    arriving = [k for k, name in enumerate(w.outputs) if name in results and g.has_grad_output(k)]
    if arriving and w.outputs_with_grads is not None:
        # A gradient of any other output stops here.
        arriving = list(filter(w.outputs_with_grads.__contains__, arriving))
        if not arriving:
            warn_of_stopped(w.stopped_warning)
    if not arriving:
        return

    # The inputs that get gradients. A blob with two roles, such as the initial value of two states, gets a sum of parts.
    smooth_states = w.smooth_states
    targets = [*map(w.inputs.index, w.smooth_sequences), *w.params]
    for state, position in zip(w.states, w.initial_ids):
        if state in smooth_states:
            targets.append(position)
    names = []
    parts: dict[int, list[str]] = {}
    for k in targets:
        if targets.count(k) == 1:
            names.append(g.grad_input(k))
        else:
            parts_of_blob = parts.setdefault(k, [])
            names.append(g.temporary(f"{w.inputs[k]}_grad_part_{len(parts_of_blob)}"))
            parts_of_blob.append(names[-1])

    inputs = [
        *map(g.grad_output, arriving),
        *map(g.input, range(len(w.inputs))),
        *map(g.output, range(len(w.outputs))),
    ]
    given = tuple(g.op.arg("outputs_with_grads", ()))
    changes = {} if tuple(arriving) == given else {"outputs_with_grads": arriving}
    g.emit("RecurrentNetworkGradient", inputs, names, **changes)
    for k, names_of_parts in parts.items():
        g.emit(ACCUMULATE, names_of_parts, [g.grad_input(k)], copy_args=False)


@dataclass(frozen=True)
class _Backward:
    """The inputs of the reverse loop, computed before it starts."""

    w: Wiring
    inputs: Blobs
    states: Blobs  # the T+L slots of each state
    first: Blobs  # the first L
    workspaces: StepWorkspaces
    forward: Schedule | None  # what the step net computes again, because it is not stored
    backward: Schedule | None
    # Gradients of local blobs that the backward net reads but nothing writes: they are zero.
    unprovided: Names
    reads: tuple[Link, ...]
    writes: tuple[Link, ...]
    param_grads: Names

    @classmethod
    def of(cls, w: Wiring, inputs: Blobs, outputs: Blobs, context: Context) -> _Backward:
        first = initial_states(w, inputs)
        states = {state: _restored(w, state, first[state], outputs) for state in w.states}
        if any(value is None for value in states.values()):
            again = run_forward(w, inputs, (), context).states
            states = {state: again[state][0:] for state in w.states}
        workspaces = outputs.get(w.outputs[-1]) if w.outputs else None
        if not isinstance(workspaces, StepWorkspaces):
            workspaces = StepWorkspaces()

        # The links to gradients of states: what a step reads, and what it writes.
        reads: list[Link] = []
        writes: list[Link] = []
        of_states = {state + "_grad" for state in w.states}
        for link in w.backward_links:
            if link.external not in of_states:
                continue
            if link.offset > 0:
                reads.append(link)
            else:
                writes.append(link)

        param_grads = w.param_grads or tuple(w.inputs[k] + "_grad" for k in w.params)
        backward = None
        forward = None
        unprovided: list[str] = []
        if w.backward_step_net is not None:
            written = written_by(w.backward_step_net.ops)
            results = dict.fromkeys(param_grads)
            results.update((k.internal, None) for k in w.backward_links if k not in reads)
            backward = schedule(w.backward_step_net, list(filter(written.__contains__, results)))

            # What the backward net reads: local blobs that are not stored are computed again.
            local = written_by(w.step_net.ops)
            linked = {link.internal for link in w.links}
            available = {*workspaces.stacked, *workspaces.constant, *linked}
            given = {link.internal for link in reads}
            given.update(name + "_grad" for name in w.collected.values())
            needed = list(backward.required)
            for name in backward.required:
                blob = name.removesuffix("_grad")
                is_gradient = blob != name and (blob in local or blob in linked)
                if is_gradient and name not in given and name not in local:
                    unprovided.append(name)
                    needed.append(blob)
            missing = [n for n in dict.fromkeys(needed) if n in local and n not in available]
            if missing:
                forward = schedule(w.step_net, missing)
        return cls(
            w=w,
            inputs=inputs,
            states=states,
            first=first,
            workspaces=workspaces,
            forward=forward,
            backward=backward,
            unprovided=tuple(unprovided),
            reads=tuple(reads),
            writes=tuple(writes),
            param_grads=param_grads,
        )

    def run(self, arriving: Blobs, context: Context) -> tuple:
        """Gradients of the sequences, the parameters and the initial states, in that order."""
        w = self.w
        steps = self.inputs[w.inputs[0]].shape[0]
        sequences, views = sequence_views(w, self.inputs, steps)
        start, every_step = self._arriving(arriving, steps)
        of_outputs = {}
        for name in w.collected:
            for link in w.gradient_links(name):
                if name in arriving:
                    of_outputs[link.internal] = arriving[name]
        smooth_sequences = w.smooth_sequences

        def step(carry, xs):
            gradients, totals = carry
            t, now, stored, from_outside, of_output = xs

            # The blobs of the forward step.
            env = {**self.workspaces.constant, **stored, **views(now, t)}
            for link in w.links:
                if link.external in self.states:
                    env[link.internal] = slots(self.states[link.external], link, t)
            if w.recompute:  # otherwise recomputed blobs would be hoisted out of the loop and stored for all steps
                arrays = {name: x for name, x in env.items() if isinstance(x, jax.Array)}
                arrays, gradients = lax.optimization_barrier((arrays, gradients))
                env |= arrays
            here = context.step(t, w.outputs[-1])
            if self.forward is not None:
                env = execute(self.forward, env, here)

            # The gradients that arrive, and the backward step.
            gradients = dict(gradients)
            for state, g in gradients.items():
                if state in from_outside:
                    gradients[state] = _add(g, 0, from_outside[state][None])
            for link in self.reads:
                g = gradients[link.external.removesuffix("_grad")]
                env[link.internal] = g[link.offset - 1 : link.offset - 1 + link.window]
            for name in self.unprovided:
                env[name] = jnp.zeros_like(env[name.removesuffix("_grad")])
            for name, g in of_output.items():
                env[name] = g[None]
            if self.backward is not None:
                env = execute(self.backward, env, here)

            new_totals = []
            for total, name in zip(totals, self.param_grads):
                new_totals.append(total + env[name] if name in env else total)
            out = {}
            for name in smooth_sequences:
                shape = self.inputs[name].shape[1:]
                inner = [k.internal for k in w.gradient_links(name) if k.internal in env]
                if inner:
                    out[name] = sum(env[blob].reshape(shape) for blob in inner)
            earlier = {state: self._earlier(state, g, env) for state, g in gradients.items()}
            return (earlier, new_totals), out

        xs = (
            jnp.arange(steps, dtype=jnp.int32),
            sequences,
            dict(self.workspaces.stacked),
            every_step,
            of_outputs,
        )
        totals = [jnp.zeros_like(self.inputs[w.inputs[k]]) for k in w.params]
        (gradients, totals), out = scan(step, (start, totals), xs, length=steps, reverse=True)

        results = []
        for name in smooth_sequences:
            results.append(out.get(name, jnp.zeros_like(self.inputs[name])))
        results += totals
        smooth_states = w.smooth_states
        for k, state in enumerate(w.states):
            if state in smooth_states:
                results.append(self._of_initial(k, gradients[state]))
        return tuple(results)

    def _arriving(self, arriving: Blobs, steps: int):
        """Gradients that arrive from outside: of the slots after the last step, and of slot t+1 for every step t."""
        start = {}
        for s in self.w.smooth_states:
            links = [link for link in self.reads if link.external == s + "_grad"]
            reach = max((link.offset + link.window - 1 for link in links), default=1)
            length = self.first[s].shape[0]
            if reach != length:
                raise GradientError(
                    f"state {s!r} has {length} initial slots, but its backward links reach {reach} ahead; the gradient "
                    "of a state whose initial slots are overwritten is not defined"
                )
            start[s] = jnp.zeros((length, *self.first[s].shape[1:]), self.first[s].dtype)
        every_step: Values = {}
        for alias in self.w.aliases:
            if alias.dst not in arriving:
                continue
            g = arriving[alias.dst]
            s = alias.src
            if s not in start:
                continue
            if alias.offset == -1:
                start[s] = start[s].at[-1].add(g[0])
            elif alias.offset == 1:
                every_step[s] = every_step[s] + g[:steps] if s in every_step else g[:steps]
                if len(g) > steps:
                    start[s] = _add(start[s], 1, g[steps:])
            else:
                raise GradientError(
                    f"output {alias.dst!r} begins at slot {alias.offset}; only 1 and -1 have gradients"
                )
        return start, every_step

    def _earlier(self, state: str, gradients: Any, env: Blobs) -> Any:
        """The gradients of slots t, t+1, ... from slots t+1, t+2, ...: drops the last, and adds what step t writes."""
        slot = (1, *gradients.shape[1:])
        links = [k for k in self.writes if k.external == state + "_grad" and k.internal in env]
        if len(gradients) == 1 and len(links) == 1:
            return env[links[0].internal].reshape(slot)
        gradients = jnp.concatenate([jnp.zeros(slot, gradients.dtype), gradients[:-1]])
        for link in links:
            more = env[link.internal].reshape(link.window, *gradients.shape[1:])
            gradients = _add(gradients, 0, more)
        return gradients

    def _of_initial(self, k: int, gradients: Any) -> Any:
        """The gradient of an initial value from the gradients of the first slots; one for the batch gets a sum."""
        value = self.inputs[self.w.inputs[self.w.initial_ids[k]]]
        if value.ndim == 1:
            return gradients[0].sum(axis=0)
        return gradients.reshape(value.shape)


def _add(gradients: Any, start: int, more: Any) -> Any:
    """Adds `more` to the slots from `start` on."""
    if gradients.shape == more.shape:
        return gradients + more
    return gradients.at[start : start + len(more)].add(more)


def _restored(w: Wiring, state: str, first: Any, outputs: Blobs) -> Any:
    """The slots of a state, assembled from an output that holds most of them; None without such an output."""
    for alias in w.aliases:
        output = outputs.get(alias.dst)
        is_of_state = alias.src == state and 0 <= alias.offset <= len(first)
        if is_of_state and output is not None:
            return jnp.concatenate([first[: alias.offset], output])
    return None
