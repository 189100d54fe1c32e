"""recurrent_net: a step net becomes a RecurrentNetwork operator, together with its generated backward step net.

Builds what Caffe2's builder of wire version 6 builds: the same arguments, blob names and backward operators. `_Wires` checks
what the caller gives and names the blobs; `backward_pass` of `autodiff.py` differentiates one step; `_backward_args` writes
the arguments by which the operator runs it over time. `unrolled_net` copies the step net once a step instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jrnn.autodiff import BackwardPass, backward_pass
from jrnn.builder import NetBuilder
from jrnn.errors import NetError, near
from jrnn.gradient_maker import GradientSlice
from jrnn.graph.rename import rename_in_op
from jrnn.ir import Net, Op


@dataclass(frozen=True)
class RecurrentState:
    """The outputs of one state: `all` [T, N, ...] after every step, `last` [1, N, ...] after the last one.

    Of a blob that is collected over time and is no state, `last` is empty.
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
        b: the builder of the net around it.
        step_net: one step. Its external inputs that are not the step's input, a state or the timestep are *references*
            to blobs of `b`, such as weights, the same at every step.
        inputs: pairs (blob of the step net [1, N, ...], sequence in `b` [T, N, ...]). Caffe2 runs nets with one pair.
        initial_states: pairs (blob of the step net that holds the previous state, first value in `b`). A first value is
            [D], [N, D] or [1, N, D]; beyond Caffe2 also [1, N, ...], or a number for a state [1], of any data type.
        links: from the blob of the previous state to the blob of the new state.
        outputs: blobs of the step net [1, ...] that are no states, to be collected over time. Caffe2 has no such outputs.
        timestep: the step net's blob of the time index, int32 [1].
        scope: prefix of the operator's own blobs; a fresh one by default.
        outputs_with_grads: which of the states' outputs (all_0, last_0, all_1, ...) pass gradients on, by position; all
            by default. A gradient that arrives at any other stops there. Collected outputs always pass theirs on. Caffe2's
            builder lists output 0 alone by default, and its gradient maker needs a gradient of each that is listed.
        without_gradient: blobs of the step net, among the inputs, previous states and outputs, at which the backward pass
            stops; those that hold integers must be named here.
        recompute_blobs_on_backward: blobs of the step net that are computed again in the backward pass, not stored; this
            holds for JAX's gradient too.
        forward_only: leave the backward step net out.

    Returns:
        The outputs of each state, in the order of `initial_states`, and then those collected.

    Raises:
        NetError: for names that are not where they should be.
        GradientError: where an operator of the step net has no gradient.
    """
    prefix = scope or b.fresh("recurrent")
    wires = _Wires.of(step_net, inputs, initial_states, links, prefix, outputs, without_gradient)
    references = wires.references(timestep)
    op_inputs = (*dict.fromkeys(blob for _, blob in wires.inputs), *wires.initial, *references)
    states = [RecurrentState(new + "_all", new + "_last") for new in wires.new]
    collected = [RecurrentState(name + "_all") for name in outputs]
    of_states = [name for s in states for name in (s.all, s.last)]
    op_outputs = (*of_states, *(c.all for c in collected), prefix + "/step_workspaces")
    forward = [(n, s, k) for prev, new, s in wires.rows for n, k in ((prev, 0), (new, 1))]
    forward += [(inner, sequence, 0) for inner, sequence in wires.inputs]
    forward += [(name, c.all, 0) for name, c in zip(outputs, collected)]
    backward: dict[str, Any] = {}
    step = replace(step_net, type="simple")
    if not forward_only:
        result = backward_pass(step.ops, {name: name + "_grad" for name in wires.seeds}, step.name)
        step = replace(step, ops=result.forward)
        recompute = tuple(recompute_blobs_on_backward)
        backward = _backward_args(step, result, wires, references, op_inputs, set(recompute))
        given = [len(of_states) + k for k, name in enumerate(outputs) if name not in wires.stopped]
        passing = outputs_with_grads
        if passing is None:
            passing = [2 * k + end for k, p in enumerate(wires.previous) if p not in wires.stopped for end in range(2)]
        backward |= {"outputs_with_grads": (*passing, *given), "recompute_blobs_on_backward": recompute}
    args = {
        "alias_src": [s for s in wires.states for _ in range(2)],
        "alias_dst": of_states,
        "alias_offset": [1, -1] * len(states),
        "recurrent_states": wires.states,
        "initial_recurrent_state_ids": [op_inputs.index(blob) for blob in wires.initial],
        "link_internal": [internal for internal, _, _ in forward],
        "link_external": [external for _, external, _ in forward],
        "link_offset": [offset for _, _, offset in forward],
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
    """Appends to `b` the operators of every step of a sequence of `steps` steps, instead of a recurrent network.

    Blobs that the step net writes stand under `timestep_0/`, `timestep_1/`, ... A first value must be [1, N, ...]: nothing
    spreads a smaller one over the batch. Where `outputs_with_grads` is given, the other outputs get a gradient of
    zeros, for operators that need one of each output. The rest is as with `recurrent_net`.

    Raises:
        NetError: for names that are not where they should be, or less than one step.
    """
    if steps < 1:
        raise NetError(f"unrolled steps of {step_net.name!r}: there must be at least one, not {steps}")
    wires = _Wires.of(step_net, inputs, initial_states, links, step_net.name)
    slices = {
        inner: b.add(Op.of("Split", [sequence], [f"{sequence}_timestep_{t}" for t in range(steps)], axis=0))
        for inner, sequence in wires.inputs
    }
    written = dict.fromkeys(o for op in step_net.ops for o in op.outputs)
    now = dict(zip(wires.previous, wires.initial))
    made: list[list[str]] = []
    for t in range(steps):
        names = {name: f"timestep_{t}/{name}" for name in written} | now
        names |= {inner: blobs[t] for inner, blobs in slices.items()}
        if timestep in step_net.external_inputs:
            index = Op.of("ConstantFill", [], [f"timestep_{t}/{timestep}"], shape=[1], value=t, dtype=2)
            names[timestep] = b.add(index)[0]
        for op in step_net.ops:
            b.add(rename_in_op(op, names, names))
        made.append([names[new] for new in wires.new])
        now = dict(zip(wires.previous, made[-1]))
    states = [
        RecurrentState(b.add(Op.of("Concat", blobs, [f"{new}_concat", f"{new}_concat_info"], axis=0))[0], blobs[-1])
        for new, blobs in zip(wires.new, zip(*made))
    ]
    for k, name in enumerate(name for s in states for name in (s.all, s.last)):
        if outputs_with_grads is not None and k not in outputs_with_grads:
            b.add(Op.of("ZeroGradient", [name]))
    return states


@dataclass(frozen=True)
class _Wires:
    """Which blob of the step net is which state: previous value, new value, and the name of the blob of all its slots."""

    step_net: Net
    inputs: tuple[tuple[str, str], ...]
    previous: tuple[str, ...]
    initial: tuple[str, ...]
    new: tuple[str, ...]
    states: tuple[str, ...]
    outputs: tuple[str, ...]
    stopped: frozenset[str]

    @classmethod
    def of(
        cls,
        step_net: Net,
        inputs: Sequence[tuple[str, str]],
        initial_states: Sequence[tuple[str, str]],
        links: Mapping[str, str],
        prefix: str,
        outputs: Iterable[str] = (),
        without_gradient: Iterable[str] = (),
    ) -> _Wires:
        if not inputs:
            raise NetError(f"recurrent network {prefix!r} has no sequence to run over; give at least one input")
        if not initial_states:
            raise NetError(f"recurrent network {prefix!r} has no state; what depends on one step alone needs no loop")
        written = {o for op in step_net.ops for o in op.outputs}
        for previous, _ in initial_states:
            if previous not in links:
                raise NetError(f"recurrent network {prefix!r}: state {previous!r} has no link{near(previous, links)}")
        for previous, new in links.items():
            if previous not in dict(initial_states):
                raise NetError(f"recurrent network {prefix!r}: linked state {previous!r} has no initial value")
            if new not in written:
                raise NetError(
                    f"recurrent network {prefix!r}: state {previous!r} is linked to {new!r}, which the step net does not "
                    f"write{near(new, written)}"
                )
        for name in outputs:
            if name not in written or name in links.values():
                why = "is the new value of a state" if name in written else f"is not written{near(name, written)}"
                raise NetError(f"recurrent network {prefix!r}: output {name!r} of the step net {why}")
        states = tuple(p for p, _ in initial_states)
        choices = [*(inner for inner, _ in inputs), *states, *outputs]
        for name in without_gradient:
            if name not in choices:
                raise NetError(
                    f"recurrent network {prefix!r}: {name!r}, to be without gradient, is no input, previous state or "
                    f"output{near(name, choices)}"
                )
        return cls(
            step_net,
            tuple((inner, sequence) for inner, sequence in inputs),
            states,
            tuple(v for _, v in initial_states),
            tuple(links[p] for p in states),
            tuple(f"{prefix}/{p}_states" for p in states),
            tuple(outputs),
            frozenset(without_gradient),
        )

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        return list(zip(self.previous, self.new, self.states))

    @property
    def seeds(self) -> list[str]:
        """Blobs of the step net at which gradients arrive from outside of the step."""
        new = [new for previous, new, _ in self.rows if previous not in self.stopped]
        return [*new, *(name for name in self.outputs if name not in self.stopped)]

    def references(self, timestep: str | None) -> tuple[str, ...]:
        """External inputs of the step net that are blobs of the net around it."""
        own = {*(inner for inner, _ in self.inputs), *self.previous, timestep}
        found = [n for n in self.step_net.external_inputs if n not in own]
        clash = [n for n in found if n in self.initial or n in dict(self.inputs).values()]
        if clash:
            raise NetError(
                f"the step net {self.step_net.name!r} reads {clash[0]!r} from outside, which is also a sequence or an "
                "initial state of the recurrent network; give the step net a copy of it under another name"
            )
        return tuple(found)


def _backward_args(
    step: Net,
    result: BackwardPass,
    wires: _Wires,
    references: Sequence[str],
    op_inputs: Sequence[str],
    recompute: set[str],
) -> dict[str, Any]:
    """The arguments that describe the backward step."""
    gradients: dict[str, str] = {}
    for name, gradient in result.gradients.items():
        if not isinstance(gradient, GradientSlice):
            gradients[name] = gradient
        elif name in {*references, *wires.previous, *dict(wires.inputs)}:
            raise NetError(
                f"the gradient of {name!r} in step net {step.name!r} is sparse, which does not add up over time; give the "
                "operator that reads it dense_gradient=1, or read it outside of the recurrent network"
            )
    again = [op for op in step.ops if recompute.intersection(op.outputs)]
    for op in again:
        rest = [o for o in op.outputs if o not in recompute]
        if rest:
            raise NetError(f"{op.type} writes {list(op.outputs)}; to recompute one, recompute all of them, also {rest}")
    ops = (*_needed(again, result.ops), *result.ops)
    undefined = _undefined(ops)
    own = {*wires.previous, *wires.new, *dict(wires.inputs), *step.external_inputs}
    written = dict.fromkeys(o for op in step.ops for o in op.outputs)
    scratch = [n for n in written if n in undefined and n not in own and n not in step.external_outputs]
    external = (*scratch, *(n + "_grad" for n in wires.seeds), *step.external_inputs, *step.external_outputs)
    made = {o for op in ops for o in op.outputs}
    links = []
    for previous, new, states in wires.rows:
        if previous in wires.stopped:
            continue
        # the gradient of a state that nothing reads is zero: its blob is never written, and a link to it has no effect
        links.append((new + "_grad", states + "_grad", 1))
        usual = previous + "_grad"
        links.append((usual if usual in made else gradients.get(previous, usual), states + "_grad", 0))
    for inner, sequence in wires.inputs:
        if inner not in wires.stopped:
            links.append((gradients.get(inner, inner + "_grad"), sequence + "_grad", 0))
    links += [(name + "_grad", name + "_all_grad", 0) for name in wires.outputs if name not in wires.stopped]
    with_gradient = [n for n in references if n in gradients]
    return {
        "param": [op_inputs.index(n) for n in with_gradient],
        "backward_link_internal": [internal for internal, _, _ in links],
        "backward_link_external": [external for _, external, _ in links],
        "backward_link_offset": [offset for _, _, offset in links],
        "param_grads": [gradients[n] for n in with_gradient],
        "backward_step_net": Net("RecurrentBackwardStep", ops, tuple(dict.fromkeys(external)), (), "simple"),
    }


def _needed(again: Sequence[Op], ops: Iterable[Op]) -> list[Op]:
    """Of the operators to be run again, those that the backward pass reads, directly or through others of them."""
    wanted, kept = _undefined(ops), []
    for op in reversed(again):
        if wanted.intersection(op.outputs):
            kept.append(op)
            wanted.update(op.inputs)
    return kept[::-1]


def _undefined(ops: Iterable[Op]) -> set[str]:
    written: set[str] = set()
    found: set[str] = set()
    for op in ops:
        found.update(n for n in op.inputs if n not in written)
        written.update(op.outputs)
    return found
