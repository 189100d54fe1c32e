"""The arguments of a RecurrentNetwork, parsed into records: links, aliases, states, references.

A *link* binds a blob of the step net to a slice of a sequence: at step t, `internal` is `external[t+offset : t+offset+
window]`. `external` is a sequence input, or the blob of a *state*: T+L slots; the first L are the initial state. An
*alias* makes an output from a state: `dst = states[offset:]`. Beyond Caffe2, `external` may be an output of the operator,
which then collects a blob that is not a state.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jrnn.errors import NetError, OpError
from jrnn.nets.graph.history import upgrade_arguments
from jrnn.nets.ir import Ints, Names, Net, Op
from jrnn.nets.ops.values import raise_if


@dataclass(frozen=True)
class Link:
    internal: str
    external: str
    offset: int
    window: int


@dataclass(frozen=True)
class Alias:
    src: str
    dst: str
    offset: int


@dataclass(frozen=True)
class Wiring:
    """The parsed arguments of one recurrent network; `inputs` are the inputs of the forward operator."""

    step_net: Net
    inputs: Names
    outputs: Names
    timestep: str
    links: tuple[Link, ...]
    aliases: tuple[Alias, ...]
    states: Names
    initial_ids: Ints
    backward_step_net: Net | None
    backward_links: tuple[Link, ...]
    params: Ints
    param_grads: Names
    outputs_with_grads: Ints | None
    recompute: Names

    @property
    def sequences(self) -> Names:
        """The inputs that are read step by step."""
        external = {link.external for link in self.links}
        return tuple(filter(external.__contains__, dict.fromkeys(self.inputs)))

    @property
    def collected(self) -> dict[str, str]:
        """Outputs that are not aliases of states -> the blobs of the step net that they collect over time."""
        ends = set(self.outputs) - set(self.inputs) - set(self.states)
        return {link.external: link.internal for link in self.links if link.external in ends}

    @property
    def smooth_sequences(self) -> Names:
        """The sequences that get a gradient."""
        return tuple(name for name in self.sequences if self.gradient_links(name))

    @property
    def smooth_states(self) -> Names:
        """The states that gradients pass through: all of them without a backward pass."""
        if not self.backward_links:
            return self.states
        return tuple(filter(self.gradient_links, self.states))

    def gradient_links(self, name: str) -> list[Link]:
        """The links of the backward step net to the gradient of a sequence, a state or an output."""
        return [link for link in self.backward_links if link.external == name + "_grad"]

    @property
    def stopped_warning(self) -> str:
        """The warning for a loss whose gradients arrive only at outputs that stop them."""
        passing = self.outputs_with_grads or ()
        names = ", ".join(f"{k} ({self.outputs[k]!r})" for k in passing)
        return (
            f"the RecurrentNetwork that writes {self.outputs[0]!r} stops all gradients of this loss: its argument "
            f"outputs_with_grads lets only gradients of output {names} pass, and the loss depends on other outputs; "
            f"list these too, of {dict(enumerate(self.outputs[:-1]))}, or build the layer without outputs_with_grads"
        )

    def state_links(self, state: str) -> list[Link]:
        return [link for link in self.links if link.external == state]


def _net(op: Op, name: str) -> Net | None:
    value = op.arg(name)
    if value is None or isinstance(value, Net):
        return value
    raise OpError(f"argument {name!r} must be a net, is {value!r:.80}")


def _links(op: Op, prefix: str) -> tuple[Link, ...]:
    internal = op.names(prefix + "link_internal")
    external = op.names(prefix + "link_external")
    offset = op.integers(prefix + "link_offset")
    window = op.integers(prefix + "link_window") or (1,) * len(internal)
    counts = {
        "internal": len(internal),
        "external": len(external),
        "offset": len(offset),
        "window": len(window),
    }
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{prefix}link_{part} {count}" for part, count in counts.items())
        raise OpError(f"the lists of links must have one length; they have: {sizes}")
    return tuple(map(Link, internal, external, offset, window))


def parse(op: Op, inputs: Iterable[str], outputs: Iterable[str]) -> Wiring:
    """Parses a RecurrentNetwork of any version, or its gradient, given the forward inputs and outputs."""
    inputs = tuple(inputs)
    try:
        op = upgrade_arguments(op, inputs)
    except NetError as e:
        raise OpError(str(e)) from None
    step_net = _net(op, "step_net")
    raise_if(step_net is None, "argument 'step_net' (Net) is required")
    aliases = map(Alias, op.names("alias_src"), op.names("alias_dst"), op.integers("alias_offset"))
    wiring = Wiring(
        step_net=step_net,
        inputs=inputs,
        outputs=tuple(outputs),
        timestep=next(iter(op.names("timestep")), "timestep"),
        links=_links(op, ""),
        aliases=tuple(aliases),
        states=op.names("recurrent_states"),
        initial_ids=op.integers("initial_recurrent_state_ids"),
        backward_step_net=_net(op, "backward_step_net"),
        backward_links=_links(op, "backward_"),
        params=op.integers("param"),
        param_grads=op.names("param_grads"),
        outputs_with_grads=op.integers("outputs_with_grads") or None,
        recompute=op.names("recompute_blobs_on_backward"),
    )
    _check(wiring)
    return wiring


def _check_positions(argument: str, positions: Iterable[int], count: int) -> None:
    """Raises OpError for a position outside of a list of `count` blobs."""
    for k in positions:
        if not 0 <= k < count:
            raise OpError(f"argument {argument!r} holds {k}, but there are {count} to choose from")


def _check(w: Wiring) -> None:
    if len(w.states) != len(w.initial_ids):
        raise OpError(
            f"needs {len(w.states)} initial_recurrent_state_ids, one per state, has {len(w.initial_ids)}"
        )
    _check_positions("initial_recurrent_state_ids", w.initial_ids, len(w.inputs))
    _check_positions("param", w.params, len(w.inputs))
    _check_positions("outputs_with_grads", w.outputs_with_grads or (), len(w.outputs))
    known = {*w.states, *w.inputs, *w.outputs}
    for link in w.links:
        if link.external not in known:
            raise OpError(
                f"link of {link.internal!r} goes to {link.external!r}, which is no input, state or output"
            )
        if link.external in w.collected and (link.offset, link.window) != (0, 1):
            raise OpError(
                f"link of {link.internal!r} to output {link.external!r} has offset {link.offset} and window "
                f"{link.window}; an output is collected slot by slot, with offset 0 and window 1"
            )
        if link.window < 1:
            raise OpError(
                f"link of {link.internal!r} has link_window {link.window}; a window holds at least one step"
            )
    for alias in w.aliases:
        if alias.src not in w.states:
            raise OpError(
                f"alias {alias.dst!r} is of {alias.src!r}, which is not among the states {list(w.states)}"
            )
        if alias.dst not in w.outputs:
            raise OpError(f"alias {alias.dst!r} is not among the outputs {list(w.outputs)}")
