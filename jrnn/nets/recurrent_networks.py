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

from jrnn.errors import NetError, check_known, near
from jrnn.nets.autodiff import BackwardPass, backward_pass
from jrnn.nets.builder import NetBuilder
from jrnn.nets.gradient_maker import GradientSlice
from jrnn.nets.graph.rename import rename_in_op
from jrnn.nets.graph.scope import reads
from jrnn.nets.graph.ssa import writers
from jrnn.nets.ir import Blobs, Names, NameSet, Net, Op, Values, written_by
from jrnn.nets.lowering import run_net
from jrnn.nets.ops.recurrent_network import StepWorkspaces

Bindings = Sequence[tuple[str, str]]  # a blob of the step net, and one outside of it

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
    inputs: Bindings,
    initial_states: Bindings,
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
    wires = _Wires.of(
        step_net=step_net,
        inputs=inputs,
        initial_states=initial_states,
        links=links,
        prefix=prefix,
        outputs=outputs,
        without_gradient=without_gradient,
    )

    # The arguments of the forward pass. A state has two outputs: `all`, from slot 1 on, and `last`, slot -1.
    states = []
    state_outputs: list[str] = []
    slots = []
    slots_twice: list[str] = []
    initial = []
    links_forward = []  # (blob of the step net, outer blob, offset)
    for state in wires.states:
        result = RecurrentState(state.new + "_all", state.new + "_last")
        states.append(result)
        state_outputs += (result.all, result.last)
        slots.append(state.slots)
        slots_twice += (state.slots, state.slots)
        initial.append(state.initial)
        links_forward.append((state.previous, state.slots, 0))
        links_forward.append((state.new, state.slots, 1))
    for inner, sequence in inputs:
        links_forward.append((inner, sequence, 0))
    collected = []
    for name in outputs:
        collected.append(name + "_all")
        links_forward.append((name, name + "_all", 0))
    references = wires.references(timestep)
    op_inputs = (*dict.fromkeys(sequence for _, sequence in inputs), *initial, *references)
    op_outputs = (*state_outputs, *collected, prefix + "/step_workspaces")

    # The backward step, and the outputs through which gradients flow.
    backward: Values = {}
    step = replace(step_net, type="simple")
    if not forward_only:
        seeds = {name: name + "_grad" for name in wires.seeds}
        differentiated = backward_pass(step.ops, seeds, step.name)
        step = replace(step, ops=differentiated.forward)
        recompute = tuple(recompute_blobs_on_backward)
        backward = _backward_args(
            step=step,
            result=differentiated,
            wires=wires,
            references=references,
            op_inputs=op_inputs,
            recompute=set(recompute),
        )
        with_gradients = list(outputs_with_grads or ())
        if outputs_with_grads is None:
            for k, state in enumerate(wires.states):
                if state.previous not in wires.stopped:
                    with_gradients += (2 * k, 2 * k + 1)
        for k, name in enumerate(outputs):
            if name not in wires.stopped:
                with_gradients.append(len(state_outputs) + k)
        backward["outputs_with_grads"] = with_gradients
        backward["recompute_blobs_on_backward"] = recompute

    args = {
        "alias_src": slots_twice,
        "alias_dst": state_outputs,
        "alias_offset": [1, -1] * len(states),
        "recurrent_states": slots,
        "initial_recurrent_state_ids": list(map(op_inputs.index, initial)),
        **_link_args("link", links_forward),
        "enable_rnn_executor": 1,
        "step_net": step,
        "timestep": timestep or "timestep",
    }
    b.add(Op.of("RecurrentNetwork", op_inputs, op_outputs, **args, **backward))
    return states + list(map(RecurrentState, collected))


def unrolled_net(
    b: NetBuilder,
    step_net: Net,
    inputs: Bindings,
    initial_states: Bindings,
    links: Mapping[str, str],
    *,
    steps: int,
    timestep: str | None = None,
    outputs_with_grads: Sequence[int] | None = None,
) -> list[RecurrentState]:
    """Appends to `b` a copy of the step net's operators for each of `steps` steps, instead of a recurrent network.

    Blobs that step t writes are named `timestep_<t>/...`. An initial value must be [1, N, ...]; it is not broadcast over the
    batch. If `outputs_with_grads` is given, the other outputs get a gradient of zeros, because some gradient operators
    need a gradient of every output. The other arguments and the result are as in `recurrent_net`.

    Raises:
        NetError: if blobs are missing, misplaced or not linked, or `steps` is below 1.
    """
    if steps < 1:
        raise NetError(
            f"unrolled net of {step_net.name!r}: steps is {steps}; it must be at least 1"
        )
    wires = _Wires.of(
        step_net=step_net,
        inputs=inputs,
        initial_states=initial_states,
        links=links,
        prefix=step_net.name,
    )
    slices: dict[str, Names] = {}
    for inner, sequence in inputs:
        parts = [f"{sequence}_timestep_{t}" for t in range(steps)]
        slices[inner] = b.add(Op.of("Split", [sequence], parts, axis=0))

    written = written_by(step_net.ops)
    # The blobs that hold the states before step t, and the blobs of each new state after all steps.
    now = {state.previous: state.initial for state in wires.states}
    blobs_of: dict[str, list[str]] = {state.new: [] for state in wires.states}
    for t in range(steps):
        names = {name: f"timestep_{t}/{name}" for name in written} | now
        for inner, blobs in slices.items():
            names[inner] = blobs[t]
        if timestep in step_net.external_inputs:
            index = f"timestep_{t}/{timestep}"
            b.add(Op.of("ConstantFill", [], [index], shape=[1], value=t, dtype=2))
            names[timestep] = index
        for op in step_net.ops:
            b.add(rename_in_op(op, names, names))
        for state in wires.states:
            now[state.previous] = names[state.new]
            blobs_of[state.new].append(names[state.new])

    states = []
    results: list[str] = []
    for new, parts in blobs_of.items():
        state_outputs = [f"{new}_concat", f"{new}_concat_info"]
        b.add(Op.of("Concat", parts, state_outputs, axis=0))
        states.append(RecurrentState(state_outputs[0], parts[-1]))
        results += (state_outputs[0], parts[-1])
    for k, name in enumerate(results):
        if outputs_with_grads is not None and k not in outputs_with_grads:
            b.add(Op.of("ZeroGradient", [name]))
    return states


def retrieve_step_blobs(
    net: Net, blobs: Blobs, *, prefix: str = "rnn", key: Any = None
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
    ops = list(net.ops)
    for k, network in enumerate(networks, 1):
        ops.append(Op.of(FETCHER, [network.outputs[-1]], [f"{prefix}_{k}"], prefix=prefix))
    results = run_net(replace(net, ops=tuple(ops)), blobs, key=key)
    values: dict[str, np.ndarray] = {}
    for network in networks:
        workspaces = results[network.outputs[-1]]
        if isinstance(workspaces, StepWorkspaces):  # networks of old wire versions have none
            for name, value in workspaces.steps():
                values[f"{prefix}_{name}"] = np.asarray(value)
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
    inputs: Bindings
    states: list[_State]
    outputs: Sequence[str]
    stopped: frozenset[str]  # the blobs of the step net at which the backward pass stops

    @classmethod
    def of(
        cls,
        step_net: Net,
        inputs: Bindings,
        initial_states: Bindings,
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
        written = written_by(step_net.ops)
        previous = [name for name, _ in initial_states]
        for name in previous:
            check_known(name, links, NetError, f"{where}: state {name!r} has no link")
        for name, new in links.items():
            if name not in previous:
                raise NetError(f"{where}: linked state {name!r} has no initial value")
            check_known(
                new,
                written,
                NetError,
                f"{where}: state {name!r} is linked to {new!r}, which the step net does not write",
            )
        for name in outputs:
            if name not in written:
                why = f"is not written{near(name, written)}"
            elif name in links.values():
                why = "is the new value of a state"
            else:
                continue
            raise NetError(f"{where}: output {name!r} of the step net {why}")
        stopped = frozenset(without_gradient)
        choices = [*dict(inputs), *previous, *outputs]
        for name in sorted(stopped.difference(choices)):
            raise NetError(
                f"{where}: without_gradient lists {name!r}, which is not an input, previous state or output"
                f"{near(name, choices)}"
            )
        states = []
        for name, initial in initial_states:
            slots = f"{prefix}/{name}_states"
            states.append(_State(previous=name, new=links[name], initial=initial, slots=slots))
        return cls(
            step_net=step_net, inputs=inputs, states=states, outputs=outputs, stopped=stopped
        )

    @property
    def seeds(self) -> list[str]:
        """Blobs of the step net at which gradients arrive from outside the step."""
        seeds = [state.new for state in self.states if state.previous not in self.stopped]
        seeds += [name for name in self.outputs if name not in self.stopped]
        return seeds

    @property
    def own_names(self) -> set[str]:
        """Blobs of the step net that the operator fills: the step's inputs and the previous states."""
        return {*dict(self.inputs), *(state.previous for state in self.states)}

    def references(self, timestep: str | None) -> Names:
        """External inputs of the step net that are blobs of the outer net."""
        own = {*self.own_names, timestep}
        references = [name for name in self.step_net.external_inputs if name not in own]
        others = {*dict(self.inputs).values(), *(state.initial for state in self.states)}
        for name in references:
            if name in others:
                raise NetError(
                    f"the step net {self.step_net.name!r} reads the outer blob {name!r}, which is also a sequence or an "
                    "initial state of the recurrent network; give the step net a copy of it under another name"
                )
        return tuple(references)


def _backward_args(
    step: Net,
    result: BackwardPass,
    wires: _Wires,
    references: Sequence[str],
    op_inputs: Sequence[str],
    recompute: set[str],
) -> Values:
    """The RecurrentNetwork arguments that describe the backward step, from the backward pass `result` of `step`."""
    gradients: dict[str, str] = {}
    for name, gradient in result.gradients.items():
        if not isinstance(gradient, GradientSlice):
            gradients[name] = gradient
        elif name in references or name in wires.own_names:
            raise NetError(
                f"the gradient of {name!r} in step net {step.name!r} is sparse and cannot be accumulated over time; give "
                "the operator that reads it dense_gradient=1, or read it outside the recurrent network"
            )

    # The operators of the backward step: the recomputed ones, and then the gradient operators.
    recomputed = [op for op in step.ops if recompute.intersection(op.outputs)]
    for op in recomputed:
        rest = [name for name in op.outputs if name not in recompute]
        if rest:
            raise NetError(
                f"{op.type} writes {list(op.outputs)} at once; recompute_blobs_on_backward must also list {rest}"
            )
    ops = (*writers(recomputed, reads(Net(ops=result.ops))), *result.ops)

    # Its external inputs: blobs of the forward step that must be stored, and the arriving gradients.
    undefined = set(reads(Net(ops=ops)))
    own = {
        *wires.own_names,
        *(state.new for state in wires.states),
        *step.external_inputs,
        *step.external_outputs,
    }
    external: NameSet = {}
    for name in written_by(step.ops):
        if name in undefined and name not in own:
            external[name] = None
    for name in wires.seeds:
        external[name + "_grad"] = None
    external.update(dict.fromkeys((*step.external_inputs, *step.external_outputs)))

    # Its links to blobs of the outer net.
    computed = written_by(ops)
    links = []
    for state in wires.states:
        if state.previous not in wires.stopped:
            # If nothing reads a state, nothing writes its gradient. The gradient is zero, and its link has no effect.
            usual = state.previous + "_grad"
            state_gradient = usual
            if usual not in computed:
                state_gradient = gradients.get(state.previous, usual)
            links.append((state.new + "_grad", state.slots + "_grad", 1))
            links.append((state_gradient, state.slots + "_grad", 0))
    for inner, sequence in wires.inputs:
        if inner not in wires.stopped:
            links.append((gradients.get(inner, inner + "_grad"), sequence + "_grad", 0))
    for name in wires.outputs:
        if name not in wires.stopped:
            links.append((name + "_grad", name + "_all_grad", 0))

    params = []
    param_grads = []
    for name in references:
        if name in gradients:
            params.append(op_inputs.index(name))
            param_grads.append(gradients[name])
    backward_step = Net(
        name="RecurrentBackwardStep", ops=ops, external_inputs=tuple(external), type="simple"
    )
    return {
        "param": params,
        **_link_args("backward_link", links),
        "param_grads": param_grads,
        "backward_step_net": backward_step,
    }


def _link_args(name: str, links: Sequence[tuple[str, str, int]]) -> Values:
    """The arguments for links (blob of the step net, outer blob, offset)."""
    internal, external, offsets = zip(*links) if links else ((), (), ())
    return {
        f"{name}_internal": internal,
        f"{name}_external": external,
        f"{name}_offset": offsets,
    }
