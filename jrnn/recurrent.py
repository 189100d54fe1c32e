"""recurrent_net: a step net becomes a RecurrentNetwork operator, with its backward step net generated beside it.

Builds what Caffe2's builder of wire version 6 builds: the same arguments, blob names and backward operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .autodiff import BackwardPass, GradientSlice, backward_pass
from .builder import NetBuilder
from .errors import NetError, near
from .ir import Net, Op


@dataclass(frozen=True)
class RecurrentState:
    """The outputs of one state: `all` [T, N, ...] after every step, `last` [1, N, ...] after the last one."""

    all: str
    last: str


def recurrent_net(
    b: NetBuilder,
    step_net: Net,
    inputs: Sequence[tuple[str, str]],
    initial_states: Sequence[tuple[str, str]],
    links: Mapping[str, str],
    *,
    timestep: str | None = None,
    scope: str | None = None,
    outputs_with_grads: Sequence[int] = (0,),
    recompute_blobs_on_backward: Iterable[str] = (),
    forward_only: bool = False,
) -> list[RecurrentState]:
    """Appends to `b` an operator that runs `step_net` over time.

    Args:
        b: the builder of the net around it.
        step_net: one step. Its external inputs that are not the step's input, a state or the timestep are *references*
            to blobs of `b`, such as weights, the same at every step.
        inputs: one pair (blob of the step net [1, N, ...], sequence in `b` [T, N, ...]).
        initial_states: pairs (blob of the step net that holds the previous state, first value in `b`). A first value is
            [D], [N, D] or [1, N, D].
        links: from the blob of the previous state to the blob of the new state.
        timestep: the step net's blob of the time index, int32 [1].
        scope: prefix of the operator's own blobs; a fresh one by default.
        outputs_with_grads: which of the outputs (all_0, last_0, all_1, ...) pass gradients on. A gradient that arrives
            at any other output stops there: this is Caffe2's rule.
        recompute_blobs_on_backward: blobs of the step net that are computed again in the backward pass, not stored.
        forward_only: leave the backward step net out.

    Returns:
        The outputs of each state, in the order of `initial_states`.

    Raises:
        NetError: for names that are not where they should be.
        GradientError: where an operator of the step net has no gradient.
    """
    prefix = scope or b.fresh("recurrent")
    wires = _Wires.of(step_net, inputs, initial_states, links, prefix)
    references = wires.references(timestep)
    op_inputs = (inputs[0][1], *(blob for _, blob in initial_states), *references)
    states = [RecurrentState(new + "_all", new + "_last") for new in wires.new]
    op_outputs = [name for s in states for name in (s.all, s.last)] + [prefix + "/step_workspaces"]
    forward = [(n, s, k) for prev, new, s in wires.rows for n, k in ((prev, 0), (new, 1))] + [(*inputs[0], 0)]
    backward: dict = {}
    step = replace(step_net, type="simple")
    if not forward_only:
        result = backward_pass(step.ops, {new: new + "_grad" for new in wires.new}, step.name)
        step = replace(step, ops=result.forward)
        backward = _backward_args(step, result, wires, references, op_inputs, set(recompute_blobs_on_backward))
        backward |= {"outputs_with_grads": tuple(outputs_with_grads)}
        backward |= {"recompute_blobs_on_backward": tuple(recompute_blobs_on_backward)}
    args = {
        "alias_src": [s for s in wires.states for _ in range(2)],
        "alias_dst": op_outputs[:-1],
        "alias_offset": [1, -1] * len(states),
        "recurrent_states": wires.states,
        "initial_recurrent_state_ids": [op_inputs.index(blob) for _, blob in initial_states],
        "link_internal": [internal for internal, _, _ in forward],
        "link_external": [external for _, external, _ in forward],
        "link_offset": [offset for _, _, offset in forward],
        "enable_rnn_executor": 1,
        "step_net": step,
        "timestep": timestep or "timestep",
    }
    b.add(Op.of("RecurrentNetwork", op_inputs, op_outputs, **args, **backward))
    return states


@dataclass(frozen=True)
class _Wires:
    """Which blob of the step net is which state: previous value, new value, and the name of the blob of all its slots."""

    step_net: Net
    input: tuple[str, str]
    previous: tuple[str, ...]
    initial: tuple[str, ...]
    new: tuple[str, ...]
    states: tuple[str, ...]

    @classmethod
    def of(cls, step_net: Net, inputs, initial_states, links, prefix: str) -> _Wires:
        if len(inputs) != 1:
            raise NetError(f"recurrent network {prefix!r} takes one sequence, was given {len(inputs)}: {list(inputs)}")
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
        previous = tuple(p for p, _ in initial_states)
        return cls(
            step_net,
            tuple(inputs[0]),
            previous,
            tuple(v for _, v in initial_states),
            tuple(links[p] for p in previous),
            tuple(f"{prefix}/{p}_states" for p in previous),
        )

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        return list(zip(self.previous, self.new, self.states))

    def references(self, timestep: str | None) -> tuple[str, ...]:
        """External inputs of the step net that are blobs of the net around it."""
        own = {self.input[0], *self.previous, timestep}
        found = [n for n in self.step_net.external_inputs if n not in own]
        clash = [n for n in found if n in self.initial or n == self.input[1]]
        if clash:
            raise NetError(
                f"the step net {self.step_net.name!r} reads {clash[0]!r} from outside, which is also a sequence or an "
                "initial state of the recurrent network; give the step net a copy of it under another name"
            )
        return tuple(found)


def _backward_args(step: Net, result: BackwardPass, wires: _Wires, references, op_inputs, recompute: set[str]) -> dict:
    """The arguments that describe the backward step."""
    gradients = result.gradients
    for name in references:
        if isinstance(gradients.get(name), GradientSlice):
            raise NetError(
                f"the gradient of {name!r} in step net {step.name!r} is sparse, which does not add up over time; give the "
                "operator that reads it dense_gradient=1, or read it outside of the recurrent network"
            )
    again = [op for op in step.ops if recompute.intersection(op.outputs)]
    for op in again:
        rest = [o for o in op.outputs if o not in recompute]
        if rest:
            raise NetError(f"{op.type} writes {list(op.outputs)}; to recompute one, recompute all of them, also {rest}")
    ops = (*again, *result.ops)
    undefined = _undefined(ops)
    own = {*wires.previous, *wires.new, wires.input[0], *step.external_inputs}
    written = dict.fromkeys(o for op in step.ops for o in op.outputs)
    scratch = [n for n in written if n in undefined and n not in own and n not in step.external_outputs]
    external = (*scratch, *(n + "_grad" for n in wires.new), *step.external_inputs, *step.external_outputs)
    made = {o for op in ops for o in op.outputs}
    links = []
    for previous, new, states in wires.rows:
        # the gradient of a state that nothing reads is zero: its blob is never written, and a link to it has no effect
        links.append((new + "_grad", states + "_grad", 1))
        usual = previous + "_grad"
        links.append((usual if usual in made else gradients.get(previous, usual), states + "_grad", 0))
    links.append((gradients.get(wires.input[0], wires.input[0] + "_grad"), wires.input[1] + "_grad", 0))
    with_gradient = [n for n in references if n in gradients]
    return {
        "param": [op_inputs.index(n) for n in with_gradient],
        "backward_link_internal": [internal for internal, _, _ in links],
        "backward_link_external": [external for _, external, _ in links],
        "backward_link_offset": [offset for _, _, offset in links],
        "param_grads": [gradients[n] for n in with_gradient],
        "backward_step_net": Net("RecurrentBackwardStep", ops, tuple(dict.fromkeys(external)), (), "simple"),
    }


def _undefined(ops: Iterable[Op]) -> set[str]:
    written: set[str] = set()
    found: set[str] = set()
    for op in ops:
        found.update(n for n in op.inputs if n not in written)
        written.update(op.outputs)
    return found
