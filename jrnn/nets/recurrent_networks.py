"""Step nets over time: `recurrent_net` appends a RecurrentNetwork, `unrolled_net` appends a copy of the net for each step.

`recurrent_net` writes the arguments, blob names and backward operators that Caffe2's builder writes in version 6 of the
format (`graph/history.py` has the others). `_Wires` checks what the caller gives and names the blobs. `backward_pass` of
`autodiff.py` differentiates one step. `_backward_args` makes the arguments with which the operator runs the backward step
over time. `ops/recurrent_network.py` says what the arguments mean.

`NetBuilder.add` appends an operator and returns its outputs. `reads(net)` are the blobs that a net reads from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jrnn.errors import NetError, near
from jrnn.nets.autodiff import BackwardPass, backward_pass
from jrnn.nets.builder import NetBuilder
from jrnn.nets.gradient_maker import GradientSlice
from jrnn.nets.graph.rename import rename_in_op
from jrnn.nets.graph.scope import reads
from jrnn.nets.graph.ssa import writers
from jrnn.nets.ir import Net, Op
from jrnn.nets.lowering import run_net
from jrnn.nets.ops.recurrent_network import StepWorkspaces

FETCHER = "RecurrentNetworkBlobFetcher"


@dataclass(frozen=True)
class RecurrentState:
    """The outputs of one state: `all` [T, N, ...] after every step, `last` [1, N, ...] after the last one.

    For a collected output, which is not a state, `last` is empty.
    """

    all: str
    last: str = ""


def recurrent_net(
    b: NetBuilder,
    step_net: Net,
    inputs: Sequence[tuple[str, str]],
    initial_states: Sequence[tuple[str, str]],
    links: Mapping[str, str],
    *,
    outputs: Sequence[str] = (),
    timestep: str | None = None,
    scope: str | None = None,
    outputs_with_grads: Sequence[int] | None = None,
    without_gradient: Iterable[str] = (),
    recompute_blobs_on_backward: Iterable[str] = (),
    forward_only: bool = False,
) -> list[RecurrentState]:
    """Appends to `b` an operator that runs `step_net` over time.

    Args:
        b: the builder of the net that the operator joins.
        step_net: one step. Its external inputs, except for the step's inputs, the states and the timestep, are
            *references* to blobs of `b`, such as weights: they are the same at every step.
        inputs: pairs (blob of the step net [1, N, ...], sequence in `b` [T, N, ...]). Caffe2 runs only nets with one pair.
        initial_states: pairs (blob of the step net that holds the previous state, initial value in `b`). An initial value
            is [D], [N, D] or [1, N, D]. Beyond Caffe2 it may be [1, N, ...], or a scalar for a state [1]; any dtype.
        links: maps the blob of each previous state to the blob of the new state.
        outputs: blobs of the step net [1, ...] to collect over time in addition to the states. Caffe2 has no such outputs.
        timestep: the step net's blob of the time index, int32 [1].
        scope: prefix of the operator's own blobs; a fresh one by default.
        outputs_with_grads: positions of the states' outputs (all_0, last_0, all_1, ...) through which gradients flow; all
            by default. A gradient that arrives at another one stops there. Gradients always flow through collected
            outputs. Caffe2's builder lists only output 0 by default, and its gradient maker needs a gradient of every
            listed output.
        without_gradient: inputs, previous states and outputs of the step net at which the backward pass stops. Blobs of
            integers must be listed here.
        recompute_blobs_on_backward: blobs of the step net that the backward pass recomputes instead of storing; this
            applies to JAX's gradient too.
        forward_only: omit the backward step net.

    Returns:
        The outputs of each state, in the order of `initial_states`, and then the collected outputs.

    Raises:
        NetError: if blobs are missing, misplaced or not linked.
        GradientError: if an operator of the step net has no gradient.
    """
    prefix = scope or b.fresh("recurrent")
    wires = _Wires.of(step_net, inputs, initial_states, links, prefix, outputs, without_gradient)
    references = wires.references(timestep)
    op_inputs = (
        *dict.fromkeys(blob for _, blob in inputs),
        *(s.initial for s in wires.states),
        *references,
    )
    states = [RecurrentState(s.new + "_all", s.new + "_last") for s in wires.states]
    collected = [RecurrentState(name + "_all") for name in outputs]
    of_states = [name for s in states for name in (s.all, s.last)]
    op_outputs = (*of_states, *(c.all for c in collected), prefix + "/step_workspaces")
    links_forward = [
        link for s in wires.states for link in ((s.previous, s.slots, 0), (s.new, s.slots, 1))
    ]
    links_forward += [
        (inner, sequence, 0) for inner, sequence in inputs
    ]  # (blob of the step net, outer blob, offset)
    links_forward += [(name, c.all, 0) for name, c in zip(outputs, collected)]
    backward: dict[str, Any] = {}
    step = replace(step_net, type="simple")
    if not forward_only:
        result = backward_pass(step.ops, {name: name + "_grad" for name in wires.seeds}, step.name)
        step = replace(step, ops=result.forward)
        recompute = tuple(recompute_blobs_on_backward)
        backward = _backward_args(step, result, wires, references, op_inputs, set(recompute))
        passing = outputs_with_grads
        if passing is None:
            stops = [
                s.previous in wires.stopped for s in wires.states for _ in range(2)
            ]  # twice: all and last
            passing = [k for k, stop in enumerate(stops) if not stop]
        passing = (
            *passing,
            *(len(of_states) + k for k, name in enumerate(outputs) if name not in wires.stopped),
        )
        backward |= {"outputs_with_grads": passing, "recompute_blobs_on_backward": recompute}
    args = {
        "alias_src": [
            s.slots for s in wires.states for _ in range(2)
        ],  # of `all`, from slot 1, and `last`, slot -1
        "alias_dst": of_states,
        "alias_offset": [1, -1] * len(states),
        "recurrent_states": [s.slots for s in wires.states],
        "initial_recurrent_state_ids": [op_inputs.index(s.initial) for s in wires.states],
        **_link_args("link", links_forward),
        "enable_rnn_executor": 1,
        "step_net": step,
        "timestep": timestep or "timestep",
    }
    b.add(Op.of("RecurrentNetwork", op_inputs, op_outputs, **args, **backward))
    return states + collected


def unrolled_net(
    b: NetBuilder,
    step_net: Net,
    inputs: Sequence[tuple[str, str]],
    initial_states: Sequence[tuple[str, str]],
    links: Mapping[str, str],
    *,
    steps: int,
    timestep: str | None = None,
    outputs_with_grads: Sequence[int] | None = None,
) -> list[RecurrentState]:
    """Appends to `b` a copy of the step net's operators for each of `steps` steps, instead of a recurrent network.

    Blobs that step t writes are named `timestep_<t>/...`. An initial value must be [1, N, ...]; it is not broadcast over the
    batch. If `outputs_with_grads` is given, the other outputs get a gradient of zeros, because some gradient operators
    need a gradient of every output. The other arguments and the result are those of `recurrent_net`.

    Raises:
        NetError: if blobs are missing, misplaced or not linked, or `steps` is below 1.
    """
    if steps < 1:
        raise NetError(
            f"unrolled net of {step_net.name!r}: steps is {steps}; it must be at least 1"
        )
    wires = _Wires.of(step_net, inputs, initial_states, links, step_net.name)
    slices = {
        inner: b.add(
            Op.of("Split", [sequence], [f"{sequence}_timestep_{t}" for t in range(steps)], axis=0)
        )
        for inner, sequence in inputs
    }
    written = dict.fromkeys(o for op in step_net.ops for o in op.outputs)
    now = {
        s.previous: s.initial for s in wires.states
    }  # the blobs that hold the states before step t
    blobs_of: dict[str, list[str]] = {s.new: [] for s in wires.states}
    for t in range(steps):
        names = {name: f"timestep_{t}/{name}" for name in written} | now
        names |= {inner: blobs[t] for inner, blobs in slices.items()}
        if timestep in step_net.external_inputs:
            index = Op.of(
                "ConstantFill", [], [f"timestep_{t}/{timestep}"], shape=[1], value=t, dtype=2
            )
            names[timestep] = b.add(index)[0]
        for op in step_net.ops:
            b.add(rename_in_op(op, names, names))
        now = {s.previous: names[s.new] for s in wires.states}
        for s in wires.states:
            blobs_of[s.new].append(names[s.new])
    states = [
        RecurrentState(
            b.add(Op.of("Concat", blobs, [f"{new}_concat", f"{new}_concat_info"], axis=0))[0],
            blobs[-1],
        )
        for new, blobs in blobs_of.items()
    ]
    for k, name in enumerate(name for s in states for name in (s.all, s.last)):
        if outputs_with_grads is not None and k not in outputs_with_grads:
            b.add(Op.of("ZeroGradient", [name]))
    return states


def retrieve_step_blobs(
    net: Net, blobs: Mapping[str, Any], *, prefix: str = "rnn", key: Any = None
) -> dict[str, np.ndarray]:
    """Runs a net, and returns the blobs that its recurrent networks' step nets wrote, for debugging.

    Args:
        net, blobs, key: as for `run_net`.
        prefix: prefix of the names.

    Returns:
        `<prefix>_<b><t>`, as Caffe2 names it, for each blob b of a step net and each step t. If a step overwrites a blob,
        its last value is returned. If two recurrent networks share a name, the later network's blob is returned.

    Raises:
        NetError, OpError: as `run_net` does.
    """
    networks = [op for op in net.ops if op.type == "RecurrentNetwork"]
    fetchers = tuple(
        Op.of(FETCHER, [op.outputs[-1]], [f"{prefix}_{k}"], prefix=prefix)
        for k, op in enumerate(networks, 1)
    )
    got = run_net(replace(net, ops=net.ops + fetchers), blobs, key=key)
    values: dict[str, np.ndarray] = {}
    for op in networks:
        workspaces = got[op.outputs[-1]]
        if isinstance(workspaces, StepWorkspaces):  # networks of old wire versions have none
            values |= {f"{prefix}_{name}": np.asarray(value) for name, value in workspaces.steps()}
    return values


class _State(NamedTuple):
    previous: str  # blob of the step net
    new: str  # blob of the step net
    initial: str  # blob of the outer net
    slots: str  # blob of the operator that holds the state before and after every step


@dataclass(frozen=True)
class _Wires:
    """Which blobs of the step net and the outer net belong together."""

    step_net: Net
    inputs: Sequence[tuple[str, str]]
    states: list[_State]
    outputs: Sequence[str]
    stopped: frozenset[str]  # the blobs of the step net at which the backward pass stops

    @classmethod
    def of(
        cls,
        step_net: Net,
        inputs: Sequence[tuple[str, str]],
        initial_states: Sequence[tuple[str, str]],
        links: Mapping[str, str],
        prefix: str,
        outputs: Sequence[str] = (),
        without_gradient: Iterable[str] = (),
    ) -> _Wires:
        where = f"recurrent network {prefix!r}"
        if not inputs:
            raise NetError(f"{where} has no sequence to run over; give at least one input")
        if not initial_states:
            raise NetError(f"{where} has no state; a net without states needs no loop")
        written = {o for op in step_net.ops for o in op.outputs}
        previous = [p for p, _ in initial_states]
        for name in previous:
            if name not in links:
                raise NetError(f"{where}: state {name!r} has no link{near(name, links)}")
        for name, new in links.items():
            if name not in previous:
                raise NetError(f"{where}: linked state {name!r} has no initial value")
            if new not in written:
                raise NetError(
                    f"{where}: state {name!r} is linked to {new!r}, which the step net does not write{near(new, written)}"
                )
        for name in outputs:
            if name not in written or name in links.values():
                why = (
                    "is the new value of a state"
                    if name in written
                    else f"is not written{near(name, written)}"
                )
                raise NetError(f"{where}: output {name!r} of the step net {why}")
        stopped = frozenset(without_gradient)
        choices = [*(inner for inner, _ in inputs), *previous, *outputs]
        for name in sorted(stopped.difference(choices)):
            raise NetError(
                f"{where}: without_gradient lists {name!r}, which is not an input, previous state or output"
                f"{near(name, choices)}"
            )
        states = [
            _State(p, links[p], initial, f"{prefix}/{p}_states") for p, initial in initial_states
        ]
        return cls(step_net, inputs, states, outputs, stopped)

    @property
    def seeds(self) -> list[str]:
        """Blobs of the step net at which gradients arrive from outside the step."""
        new = [s.new for s in self.states if s.previous not in self.stopped]
        return [*new, *(name for name in self.outputs if name not in self.stopped)]

    def references(self, timestep: str | None) -> tuple[str, ...]:
        """External inputs of the step net that are blobs of the outer net."""
        own = {*dict(self.inputs), *(s.previous for s in self.states), timestep}
        read = [n for n in self.step_net.external_inputs if n not in own]
        others = {*dict(self.inputs).values(), *(s.initial for s in self.states)}
        clash = [n for n in read if n in others]
        if clash:
            raise NetError(
                f"the step net {self.step_net.name!r} reads the outer blob {clash[0]!r}, which is also a sequence or an "
                "initial state of the recurrent network; give the step net a copy of it under another name"
            )
        return tuple(read)


def _backward_args(
    step: Net,
    result: BackwardPass,
    wires: _Wires,
    references: Sequence[str],
    op_inputs: Sequence[str],
    recompute: set[str],
) -> dict[str, Any]:
    """The RecurrentNetwork arguments that describe the backward step, from the backward pass `result` of `step`."""
    gradients: dict[str, str] = {}
    for name, gradient in result.gradients.items():
        if not isinstance(gradient, GradientSlice):
            gradients[name] = gradient
        elif name in {*references, *(s.previous for s in wires.states), *dict(wires.inputs)}:
            raise NetError(
                f"the gradient of {name!r} in step net {step.name!r} is sparse and cannot be accumulated over time; give "
                "the operator that reads it dense_gradient=1, or read it outside the recurrent network"
            )
    recomputed = [op for op in step.ops if recompute.intersection(op.outputs)]
    for op in recomputed:
        rest = [o for o in op.outputs if o not in recompute]
        if rest:
            raise NetError(
                f"{op.type} writes {list(op.outputs)} at once; recompute_blobs_on_backward must also list {rest}"
            )
    ops = (*writers(recomputed, reads(Net(ops=result.ops))), *result.ops)
    undefined = set(reads(Net(ops=ops)))
    of_states = (name for s in wires.states for name in (s.previous, s.new))
    own = {*of_states, *dict(wires.inputs), *step.external_inputs}
    written = dict.fromkeys(o for op in step.ops for o in op.outputs)
    stored = [
        n for n in written if n in undefined and n not in own and n not in step.external_outputs
    ]
    external = (
        *stored,
        *(n + "_grad" for n in wires.seeds),
        *step.external_inputs,
        *step.external_outputs,
    )
    computed = {o for op in ops for o in op.outputs}
    links = []
    for s in wires.states:
        if s.previous not in wires.stopped:
            # If nothing reads a state, nothing writes its gradient. The gradient is zero, and its link has no effect.
            usual = s.previous + "_grad"
            gradient = usual if usual in computed else gradients.get(s.previous, usual)
            links += [(s.new + "_grad", s.slots + "_grad", 1), (gradient, s.slots + "_grad", 0)]
    for inner, sequence in wires.inputs:
        if inner not in wires.stopped:
            links.append((gradients.get(inner, inner + "_grad"), sequence + "_grad", 0))
    links += [
        (name + "_grad", name + "_all_grad", 0)
        for name in wires.outputs
        if name not in wires.stopped
    ]
    with_gradient = [n for n in references if n in gradients]
    return {
        "param": [op_inputs.index(n) for n in with_gradient],
        **_link_args("backward_link", links),
        "param_grads": [gradients[n] for n in with_gradient],
        "backward_step_net": Net(
            "RecurrentBackwardStep", ops, tuple(dict.fromkeys(external)), (), "simple"
        ),
    }


def _link_args(name: str, links: Sequence[tuple[str, str, int]]) -> dict[str, list[Any]]:
    """The arguments for links (blob of the step net, outer blob, offset)."""
    return {
        f"{name}_{part}": [link[k] for link in links]
        for k, part in enumerate(("internal", "external", "offset"))
    }
