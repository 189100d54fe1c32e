"""Rules for control flow: `cond` becomes If and `while` becomes While, whose nets hold a Do each; `scan` RecurrentNetwork.

Shapes: T time, N batch, D features. Caffe2 runs a step net over one sequence [T, N, D] of float32, with states [1, N, D].
So float sequences are concatenated along their features, carries and outputs of any shape are folded to [1, N, D],
booleans and int32 are carried as floats that hold them exactly, and other sequences are looked up by the timestep. A carry
that only counts is computed from the timestep, and one that never changes is read from outside.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jrnn.convert.emitter import BOOL, FLOAT, INT32, Blob, Emitter, Value, rule
from jrnn.convert.rules.elementwise_rules import binary, is_static
from jrnn.convert.rules.reduction_rules import from_halves, halves
from jrnn.convert.rules.shape_rules import cut, join, pick, reverse
from jrnn.errors import ConversionError, GradientError
from jrnn.jaxprs import scan_counts
from jrnn.jaxprs.flat import FlatEquation, Graph, Var, flatten, live
from jrnn.nets.builder import NetBuilder
from jrnn.nets.graph.ssa import with_live_ops
from jrnn.nets.ir import Net, Shape, written_by
from jrnn.nets.recurrent_networks import RecurrentState, recurrent_net


@rule("cond")
def cond_rule(e: Emitter, node: FlatEquation, index, *values):
    branches = [flatten(b) for b in node.params["branches"]]
    if is_static(index):
        return tuple(e.graph(branches[min(max(int(index), 0), len(branches) - 1)], values))
    outputs = [e.zeros(v.shape, v.dtype, "branched") for v in node.outputs]

    def run(k: int) -> None:
        """Appends one branch, which writes the outputs."""
        for value, out in zip(e.graph(branches[k], values), outputs):
            e.copy(e.blob(value), out.name)

    def choose(first: int) -> None:
        """Appends an If for the branches from `first` on."""
        if first + 1 == len(branches):
            return run(first)
        is_later = e.was_bool(index) if len(branches) == 2 else None
        if is_later is None:
            is_later = binary(e, "GT", index, np.asarray(first, index.dtype), BOOL)
        with e.b.if_(e.blob(is_later).name):
            choose(first + 1)
        with e.b.else_():
            run(first)

    choose(0)
    return tuple(outputs)


@rule("while")
def _(e: Emitter, node: FlatEquation, *values):
    p = node.params
    test = flatten(p["cond_jaxpr"])
    body = flatten(p["body_jaxpr"])
    first = p["cond_nconsts"]
    after = p["cond_nconsts"] + p["body_nconsts"]
    carried = body.inputs[p["body_nconsts"] :]

    # A carry that a step changes is copied to a blob that the loop overwrites.
    state: list[Value] = list(values[after:])
    names: dict[int, str] = {}
    for k, (var, new) in enumerate(zip(carried, body.outputs)):
        if new is not var:
            names[k] = e.claim("loop")
            state[k] = replace(e.copy(e.blob(state[k]), names[k]), shape=var.shape)

    with e.b.while_():
        with e.b.condition():
            e.copy(e.blob(e.graph(test, [*values[:first], *state])[0]))
        results = e.graph(body, [*values[first:after], *state])
        # All new values are known before the first old one is overwritten.
        changed = {name: e.blob(results[k]) for k, name in names.items()}
        for name, blob in changed.items():
            if blob.name in changed:
                changed[name] = e.copy(blob)
        for name, blob in changed.items():
            e.copy(blob, name)
    return tuple(state)


# Scan ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _NetworkState:
    """A carry or an output that the recurrent network holds: its new value in the step, and how it is folded."""

    new: Var | np.ndarray
    shape: Shape
    dtype: np.dtype

    def width(self, batch: int) -> int:
        """D of the folded floats [1, N, D]: an int32 takes two."""
        width = math.prod(self.shape) // batch
        return 2 * width if self.dtype == INT32 else width


def _fold(e: Emitter, value: Value, batch: int) -> Blob:
    """A value as floats [1, N, D]; an int32 as two floats that hold its halves."""
    if value.dtype == INT32:
        return join(e, [_fold(e, e.cast(v, FLOAT), batch) for v in halves(e, value)], 2)
    return e.reshaped(e.cast(e.blob(value), FLOAT), (1, batch, math.prod(value.shape) // batch))


def _unfold(e: Emitter, name: str, state: _NetworkState, batch: int, lead: Shape = ()) -> Value:
    """The blob `name` of folded floats [1 or T, N, D] as values of a state, [*lead, ...]."""
    blob = Blob.of(name, (*(lead or (1,)), batch, state.width(batch)), FLOAT)
    if state.dtype == INT32:
        half = blob.shape[2] // 2
        high = e.cast(cut(e, blob, 2, 0, half), INT32)
        low = e.cast(cut(e, blob, 2, half, 2 * half), INT32)
        return e.reshaped(from_halves(e, high, low), (*lead, *state.shape))
    return e.cast(e.reshaped(blob, (*lead, *state.shape)), state.dtype)


@dataclass(frozen=True)
class _Roles:
    """What becomes of the carries and outputs of a scan.

    Attributes:
        body: the step, without the nodes that nothing that is read needs.
        consts, carried, sequences: its inputs.
        constants: the numbers of the carries that no step changes.
        counters: the numbers of the carries that only count, with what a step adds.
        network_carries: the numbers of the other carries that are needed; `states` begins with them.
        states: what the recurrent network holds, carries and outputs.
        place: the number of an output that is read -> the number of the state that it shows.
    """

    body: Graph
    consts: Sequence[Var]
    carried: Sequence[Var]
    sequences: Sequence[Var]
    constants: set[int]
    counters: dict[int, int]
    network_carries: list[int]
    states: list[_NetworkState]
    place: dict[int, int]


def _roles(node: FlatEquation, read: Sequence[bool]) -> _Roles:
    body = flatten(node.params["jaxpr"])
    first, count = scan_counts(node.params)
    carried = body.inputs[first : first + count]
    new = body.outputs[:count]

    # Carries that the recurrent network need not hold.
    constants = set()
    counters = {}
    for k, var in enumerate(carried):
        growth = _growth(body, var, new[k])
        if new[k] is var:
            constants.add(k)
        elif growth is not None:
            counters[k] = growth

    # What it holds: the other carries that are needed, and the outputs that are read.
    needed, nodes = _needed(body, carried, read, {*constants, *counters})
    network_carries = [k for k in needed if k not in constants and k not in counters]
    states = [
        _NetworkState(new[k], carried[k].shape, np.dtype(carried[k].dtype)) for k in network_carries
    ]
    place: dict[int, int] = {}
    for k, out in enumerate(body.outputs[count:]):
        if not read[count + k]:
            continue
        place[k] = _position(states, out)
        if place[k] == len(states):
            shape = node.outputs[count + k].shape[1:]
            states.append(_NetworkState(out, shape, np.dtype(out.dtype)))
    for state in states:
        if state.dtype not in (FLOAT, BOOL, INT32) or not math.prod(state.shape):
            raise ConversionError(
                f"a scan that carries {state.dtype}{list(state.shape)}: only float32, int32 and bool with elements can be "
                "carried"
            )
    return _Roles(
        body=replace(body, nodes=nodes),
        consts=body.inputs[:first],
        carried=carried,
        sequences=body.inputs[first + count :],
        constants=constants,
        counters=counters,
        network_carries=network_carries,
        states=states,
        place=place,
    )


def _position(states: Sequence[_NetworkState], new: Var | np.ndarray) -> int:
    """The number of the first state with this new value; after the last one if there is none."""
    for k, state in enumerate(states):
        if state.new is new:
            return k
    return len(states)


@dataclass(frozen=True)
class _StepNet:
    """The step net of a scan: its builder, its inputs, and the names of its states, old and new."""

    builder: NetBuilder
    input_t: str
    timestep: str
    previous: list[str]
    next: list[str]

    @property
    def net(self) -> Net:
        net = self.builder.build(outputs=self.next)
        return with_live_ops(net, self.next)


def _step(
    e: Emitter,
    roles: _Roles,
    values: Sequence[Value],
    xs: Mapping[Var, Value],
    floats: Mapping[Var, Blob],
    prefix: str,
    batch: int,
) -> _StepNet:
    """Emits the step from the `values` of the scan, its sequences `xs`, and the sequences `floats` that are floats."""
    body = roles.body
    states = roles.states
    first = len(roles.consts)
    used = body.used()
    builder = NetBuilder(prefix, parent=e.b)
    input_t = builder.input(e.claim("input_t"))
    timestep = builder.input(e.claim("timestep"))
    previous = [builder.input(e.claim("previous")) for _ in states]
    with e.inside(builder):
        # The inputs of the step.
        clock = Blob.of(timestep, (1,), INT32)
        env: dict[Var, Value] = dict(zip(roles.consts, values))
        for k in roles.constants:
            env[roles.carried[k]] = values[first + k]
        for k, amount in roles.counters.items():
            if roles.carried[k] in used:
                env[roles.carried[k]] = _counted(e, clock, values[first + k], amount)
        env.update(_sequences(e, clock, xs, floats, input_t, batch))
        for k, state, name in zip(roles.network_carries, states, previous):
            env[roles.carried[k]] = _unfold(e, name, state, batch)
        inputs = []
        for var in body.inputs:
            unused = np.zeros(var.shape, var.dtype) if var.dtype else None
            inputs.append(env.get(var, unused))

        # The new states, each in a blob of its own that the step writes.
        new: list[str] = []
        outputs = tuple(state.new for state in states)
        for value in e.graph(replace(body, outputs=outputs), inputs):
            blob = _fold(e, value, batch)
            if blob.name in new or blob.name not in written_by(builder.ops):
                blob = e.copy(blob)
            new.append(blob.name)
    return _StepNet(
        builder=builder,
        input_t=input_t,
        timestep=timestep,
        previous=previous,
        next=new,
    )


@rule("scan")
def scan_rule(e: Emitter, node: FlatEquation, *values):
    p = node.params
    steps = p["length"]
    read = list(e.read)
    if steps == 0:
        raise ConversionError("a scan of zero steps: remove it")
    roles = _roles(node, read)
    first = len(roles.consts)
    count = len(roles.carried)
    states = roles.states

    # The sequences that the step reads, and the step.
    used = roles.body.used()
    xs = {}
    for var, x in zip(roles.sequences, values[first + count :]):
        if var in used:
            xs[var] = reverse(e, x, 0) if p["reverse"] else x
    floats = {}
    for var, x in xs.items():
        if isinstance(x, Blob) and x.dtype == FLOAT:
            floats[var] = e.blob(x)
    shapes = [x.shape[1:] for x in floats.values()]
    batch = _batch([*shapes, *(state.shape for state in states)])
    prefix = e.claim("recurrent")
    step = _step(
        e=e,
        roles=roles,
        values=values,
        xs=xs,
        floats=floats,
        prefix=prefix,
        batch=batch,
    )

    # The initial states; an output that is not a carry starts at zero.
    names_read = set(step.builder.external_inputs)
    initial_states = []
    for k, (name, state) in enumerate(zip(step.previous, states)):
        if k < len(roles.network_carries):
            value = values[first + roles.network_carries[k]]
        else:
            value = np.zeros(state.shape, state.dtype)
        initial_states.append((name, _start(e, value, state, batch, names_read).name))
    sequence = _sequence(e, list(floats.values()), steps, batch, names_read)

    # The outputs of the network that are read: all values of a state are output 2 k, the last ones output 2 k + 1.
    outputs_read = [2 * i for i in roles.place.values()]
    outputs_read += [2 * i + 1 for i, k in enumerate(roles.network_carries) if read[k]]
    with_grads = {i for i in outputs_read if states[i // 2].dtype == FLOAT}
    net = step.net

    def append(forward_only: bool) -> list[RecurrentState]:
        return recurrent_net(
            b=e.b,
            step_net=net,
            inputs=[(step.input_t, sequence.name)],
            initial_states=initial_states,
            links=dict(zip(step.previous, step.next)),
            timestep=step.timestep,
            scope=prefix,
            outputs_with_grads=sorted(with_grads),
            forward_only=forward_only,
        )

    try:
        outputs = append(forward_only=not with_grads)
    except GradientError as error:  # an operator of the step has no gradient
        where = next((e.origins[o] for o in error.outputs if o in e.origins), "scan")
        e.without_gradient.append(f"{where}: {error}")
        outputs = append(forward_only=True)

    results: list[Value] = []
    for k, value in enumerate(values[first : first + count]):
        if k in roles.counters:
            value = binary(e, "Add", value, np.asarray(roles.counters[k] * steps, value.dtype))
        elif k in roles.network_carries:
            i = roles.network_carries.index(k)
            value = _unfold(e, outputs[i].last, states[i], batch) if read[k] else None
        results.append(value)
    for k in range(len(node.outputs) - count):
        ys = None
        if k in roles.place:
            i = roles.place[k]
            ys = _unfold(e, outputs[i].all, states[i], batch, (steps,))
            if p["reverse"]:
                ys = reverse(e, ys, 0)
        results.append(ys)
    return tuple(results)


def _growth(body: Graph, before: Var, after: Var | np.ndarray) -> int | None:
    """How much an integer carry grows at every step, or None if that is not a known number."""
    maker = body.makers().get(after) if isinstance(after, Var) else None
    if maker is None or maker.name != "add" or before.shape or before.dtype.kind != "i":
        return None
    a, b = maker.inputs
    amount: Var | np.ndarray | None = None
    if a is before:
        amount = b
    elif b is before:
        amount = a
    return int(amount) if isinstance(amount, np.ndarray) else None


def _needed(
    body: Graph, carried: Sequence[Var], read: Sequence[bool], plain: set[int]
) -> tuple[list[int], tuple[FlatEquation, ...]]:
    """The carries and the nodes that a scan's used outputs depend on.

    A carry whose number is in `plain` is known without its new value.
    """
    outputs_read = []
    for k in range(len(carried), len(body.outputs)):
        if read[k]:
            outputs_read.append(body.outputs[k])
    needed = {k for k in range(len(carried)) if read[k]}
    while True:
        outs = [body.outputs[k] for k in needed if k not in plain]
        outs += outputs_read
        nodes = live(body.nodes, outs)
        seen = replace(body, nodes=nodes, outputs=tuple(outs)).used()
        more = needed | {k for k, var in enumerate(carried) if var in seen}
        if more == needed:
            return sorted(needed), nodes
        needed = more


def _batch(shapes: Sequence[Shape]) -> int:
    """N: the first dimension of the sequences and states, if it divides the size of all of them, else 1."""
    batch = next((shape[0] for shape in shapes if len(shape) > 1), 1)
    if batch and all(math.prod(shape) % batch == 0 for shape in shapes):
        return batch
    return 1


def _counted(e: Emitter, clock: Blob, start: Value, amount: int) -> Value:
    """start + amount * timestep, a scalar of the type of `start`."""
    now = e.cast(e.reshaped(clock, ()), start.dtype)
    if amount != 1:
        now = binary(e, "Mul", now, np.asarray(amount, start.dtype))
    if is_static(start) and not start:
        return now
    return binary(e, "Add", now, start)


def _sequences(
    e: Emitter,
    clock: Blob,
    xs: Mapping[Var, Value],
    floats: Mapping[Var, Blob],
    input_t: str,
    batch: int,
) -> dict[Var, Value]:
    """The current element of each sequence."""
    widths = [math.prod(x.shape[1:]) // batch for x in floats.values()]
    parts: list[Value] = [Blob.of(input_t, (1, batch, sum(widths)), FLOAT)]
    if len(widths) > 1:
        outputs = [((1, batch, width), FLOAT) for width in widths]
        parts = e.ops("Split", [input_t], outputs, axis=2, split=widths)
    env: dict[Var, Value] = {v: e.reshaped(part, v.shape) for v, part in zip(floats, parts)}
    for var, x in xs.items():
        if var in env:
            continue
        if _is_range(x):
            env[var] = _counted(e, clock, x[0], int(x[1] - x[0]))
        else:
            env[var] = e.reshaped(pick(e, x, 0, clock), x.shape[1:])
    return env


def _is_range(x: Value) -> bool:
    """Whether a sequence has known integers at equal distances."""
    is_vector = is_static(x) and x.dtype.kind == "i" and x.ndim == 1
    return is_vector and len(set(np.diff(x).tolist())) == 1


def _sequence(e: Emitter, floats: list[Blob], steps: int, batch: int, names_read: set[str]) -> Blob:
    """The float sequences as one, [T, N, D], in a blob that the step net does not read by name."""
    parts = [e.reshaped(x, (steps, batch, math.prod(x.shape[1:]) // batch)) for x in floats]
    if parts:
        sequence = join(e, parts, 2)
    else:
        sequence = e.zeros((steps, batch, 1), FLOAT, "no_input")
    return e.copy(sequence) if sequence.name in names_read else sequence


def _start(
    e: Emitter, value: Value, state: _NetworkState, batch: int, names_read: set[str]
) -> Blob:
    """The initial state, in a blob that the step net does not read by name."""
    if is_static(value) and not value.any():
        return e.zeros((1, batch, state.width(batch)), FLOAT, "initial")
    blob = _fold(e, value, batch)
    return e.copy(blob) if blob.name in names_read else blob
