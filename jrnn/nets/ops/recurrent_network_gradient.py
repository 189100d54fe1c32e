"""The gradient of RecurrentNetwork: the backward step net, run over time in reverse.

Shapes: T time, N batch, L length of an initial state. The gradients of a state's slots t+1 ... t+L are carried from step to
step; step t reads them through backward links with a positive offset, and adds to slot t and later through those with
offset 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jrnn.errors import GradientError, NetError, OpError
from jrnn.loops import scan
from jrnn.nets.graph.history import check_gradient_version
from jrnn.nets.ir import Op
from jrnn.nets.lowering import Context, execute
from jrnn.nets.ops.recurrent_network import (
    StepWorkspaces,
    initial_state,
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
    results = {a.dst for a in w.aliases} | set(w.collected)
    arriving = [k for k, name in enumerate(w.outputs) if name in results and g.has_grad_output(k)]
    if arriving and w.outputs_with_grads is not None:
        arriving = [
            k for k in arriving if k in w.outputs_with_grads
        ]  # a gradient of any other output stops here
        if not arriving:
            warn_of_stopped(w.stopped_warning)
    if not arriving:
        return
    initial = [k for s, k in zip(w.states, w.initial_ids) if s in w.smooth_states]
    targets = [w.inputs.index(n) for n in w.smooth_sequences] + [*w.params, *initial]
    names = []
    parts: dict[
        int, list[str]
    ] = {}  # of a blob with two roles, such as the initial value of two states
    for k in targets:
        if targets.count(k) == 1:
            names.append(g.grad_input(k))
        else:
            names.append(g.temporary(f"{w.inputs[k]}_grad_part_{len(parts.get(k, ()))}"))
            parts.setdefault(k, []).append(names[-1])
    inputs = [
        *(g.grad_output(k) for k in arriving),
        *(g.input(k) for k in range(len(w.inputs))),
        *(g.output(k) for k in range(len(w.outputs))),
    ]
    written = tuple(g.op.arg("outputs_with_grads", ()))
    changed = {} if tuple(arriving) == written else {"outputs_with_grads": arriving}
    g.emit("RecurrentNetworkGradient", inputs, names, **changed)
    for k, names in parts.items():
        g.emit(ACCUMULATE, names, [g.grad_input(k)], copy_args=False)


@dataclass(frozen=True)
class _Backward:
    """The inputs of the reverse loop, computed before it starts."""

    w: Wiring
    inputs: Mapping[str, Any]
    states: Mapping[str, Any]  # the T+L slots of each state
    first: Mapping[str, Any]  # the first L
    workspaces: StepWorkspaces
    forward: Schedule | None  # what the step net computes again, because it is not stored
    backward: Schedule | None
    unprovided: tuple[
        str, ...
    ]  # local blobs whose gradients the backward net reads but nothing writes: they are zero
    reads: tuple[Link, ...]
    writes: tuple[Link, ...]
    param_grads: tuple[str, ...]

    @classmethod
    def of(
        cls, w: Wiring, inputs: Mapping[str, Any], outputs: Mapping[str, Any], context: Context
    ) -> _Backward:
        sequence = inputs[w.inputs[0]]
        first = {
            s: initial_state(w, k, inputs[w.inputs[w.initial_ids[k]]], sequence)
            for k, s in enumerate(w.states)
        }
        states = {s: _restored(w, s, first[s], outputs) for s in w.states}
        if any(v is None for v in states.values()):
            again = run_forward(w, inputs, (), context).states
            states = {s: again[s][0:] for s in w.states}
        workspaces = outputs.get(w.outputs[-1]) if w.outputs else None
        if not isinstance(workspaces, StepWorkspaces):
            workspaces = StepWorkspaces()
        of_states = {s + "_grad" for s in w.states}
        reads = tuple(k for k in w.backward_links if k.external in of_states and k.offset > 0)
        param_grads = w.param_grads or tuple(w.inputs[k] + "_grad" for k in w.params)
        net = w.backward_step_net
        backward = None
        missing = []
        unprovided = ()
        if net is not None:
            written = {o for step_op in net.ops for o in step_op.outputs}
            results = [*param_grads, *(k.internal for k in w.backward_links if k not in reads)]
            backward = schedule(net, [n for n in dict.fromkeys(results) if n in written])
            local = {o for step_op in w.step_net.ops for o in step_op.outputs}
            linked = {k.internal for k in w.links}
            at_hand = {*workspaces.stacked, *workspaces.constant, *linked}
            given = {k.internal for k in reads} | {name + "_grad" for name in w.collected.values()}
            unprovided = tuple(
                n
                for n in backward.required
                if n.endswith("_grad")
                and n not in given | local
                and n.removesuffix("_grad") in local | linked
            )
            needed = [*backward.required, *(n.removesuffix("_grad") for n in unprovided)]
            missing = [n for n in dict.fromkeys(needed) if n in local and n not in at_hand]
        forward = schedule(w.step_net, missing) if missing else None
        writes = tuple(k for k in w.backward_links if k.external in of_states and k not in reads)
        return cls(
            w,
            inputs,
            states,
            first,
            workspaces,
            forward,
            backward,
            unprovided,
            reads,
            writes,
            param_grads,
        )

    def run(self, arriving: Mapping[str, Any], context: Context) -> tuple:
        """Gradients of the sequences, the parameters and the initial states, in that order."""
        w = self.w
        steps = self.inputs[self.w.inputs[0]].shape[0]
        sequences, views = sequence_views(w, self.inputs, steps)
        start, every_step = self._arriving(arriving, steps)
        of_sequences = {
            n: [k.internal for k in w.backward_links if k.external == n + "_grad"]
            for n in w.smooth_sequences
        }
        of_outputs = {
            k.internal: arriving[n]
            for n in w.collected
            if n in arriving
            for k in w.backward_links
            if k.external == n + "_grad"
        }

        def step(carry, xs):
            gradients, totals = carry
            t, now, kept, from_outside, of_output = xs
            env = {**self.workspaces.constant, **kept, **views(now, t)}
            env.update(
                (k.internal, slots(self.states[k.external], k, t))
                for k in w.links
                if k.external in self.states
            )
            if w.recompute:  # otherwise recomputed blobs would be hoisted out of the loop and stored for all steps
                arrays = {n: v for n, v in env.items() if isinstance(v, jax.Array)}
                arrays, gradients = lax.optimization_barrier((arrays, gradients))
                env |= arrays
            here = context.step(t, w.outputs[-1])
            if self.forward is not None:
                env = execute(self.forward, env, here)
            gradients = {
                s: _add(g, 0, from_outside[s][None]) if s in from_outside else g
                for s, g in gradients.items()
            }
            for k in self.reads:
                g = gradients[k.external.removesuffix("_grad")]
                env[k.internal] = g[k.offset - 1 : k.offset - 1 + k.window]
            env.update((n, jnp.zeros_like(env[n.removesuffix("_grad")])) for n in self.unprovided)
            env.update((n, g[None]) for n, g in of_output.items())
            if self.backward is not None:
                env = execute(self.backward, env, here)
            totals = [a + env[n] if n in env else a for a, n in zip(totals, self.param_grads)]
            out = {
                n: sum(env[i].reshape(self.inputs[n].shape[1:]) for i in inner if i in env)
                for n, inner in of_sequences.items()
                if any(i in env for i in inner)
            }
            return ({s: self._earlier(s, g, env) for s, g in gradients.items()}, totals), out

        xs = (
            jnp.arange(steps, dtype=jnp.int32),
            sequences,
            dict(self.workspaces.stacked),
            every_step,
            of_outputs,
        )
        totals = [jnp.zeros_like(self.inputs[w.inputs[k]]) for k in w.params]
        (gradients, totals), out = scan(step, (start, totals), xs, length=steps, reverse=True)
        first = [
            self._of_initial(k, gradients[s])
            for k, s in enumerate(w.states)
            if s in w.smooth_states
        ]
        return (
            *(out.get(n, jnp.zeros_like(self.inputs[n])) for n in w.smooth_sequences),
            *totals,
            *first,
        )

    def _arriving(self, arriving: Mapping[str, Any], steps: int):
        """Gradients that arrive from outside: of the slots after the last step, and of slot t+1 for every step t."""
        start = {}
        for s in self.w.smooth_states:
            reach = max(
                [1, *(k.offset + k.window - 1 for k in self.reads if k.external == s + "_grad")]
            )
            length = self.first[s].shape[0]
            if reach != length:
                raise GradientError(
                    f"state {s!r} has {length} initial slots, but its backward links reach {reach} ahead; the gradient "
                    "of a state whose initial slots are overwritten is not defined"
                )
            start[s] = jnp.zeros((length, *self.first[s].shape[1:]), self.first[s].dtype)
        every_step: dict[str, Any] = {}
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
                start[s] = _add(start[s], 1, g[steps:]) if len(g) > steps else start[s]
            else:
                raise GradientError(
                    f"output {alias.dst!r} begins at slot {alias.offset}; only 1 and -1 have gradients"
                )
        return start, every_step

    def _earlier(self, state: str, gradients: Any, env: Mapping[str, Any]) -> Any:
        """The gradients of slots t, t+1, ... from those of t+1, t+2, ...: drops the last and adds those of step t."""
        slot = (1, *gradients.shape[1:])
        mine = [k for k in self.writes if k.external == state + "_grad" and k.internal in env]
        if len(gradients) == 1 and len(mine) == 1:
            return env[mine[0].internal].reshape(slot)
        gradients = jnp.concatenate([jnp.zeros(slot, gradients.dtype), gradients[:-1]])
        for k in mine:
            gradients = _add(gradients, 0, env[k.internal].reshape(k.window, *gradients.shape[1:]))
        return gradients

    def _of_initial(self, k: int, gradients: Any) -> Any:
        value = self.inputs[self.w.inputs[self.w.initial_ids[k]]]
        return gradients[0].sum(axis=0) if value.ndim == 1 else gradients.reshape(value.shape)


def _add(gradients: Any, start: int, more: Any) -> Any:
    if gradients.shape == more.shape:
        return gradients + more
    return gradients.at[start : start + len(more)].add(more)


def _restored(w: Wiring, state: str, first: Any, outputs: Mapping[str, Any]) -> Any:
    """The slots of a state, assembled from an output that holds most of them; None without such an output."""
    for alias in w.aliases:
        if (
            alias.src == state
            and 0 <= alias.offset <= len(first)
            and outputs.get(alias.dst) is not None
        ):
            return jnp.concatenate([first[: alias.offset], outputs[alias.dst]])
    return None
