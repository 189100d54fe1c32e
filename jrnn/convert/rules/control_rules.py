"""Rules for control flow: `cond` becomes If and `while` becomes While, whose nets hold a Do each; `scan` RecurrentNetwork.

Shapes: T time, N batch, D features. Caffe2 runs a step net over one sequence [T, N, D] of float32, with states [1, N, D].
So float sequences are concatenated along their features, carries and outputs of any shape are folded to [1, N, D],
booleans and int32 are carried as floats that hold them exactly, and other sequences are looked up by the timestep. A carry
that only counts is computed from the timestep, and one that never changes is read from outside.
"""

import math
from collections.abc import Sequence
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
from jrnn.nets.graph import live_ops
from jrnn.nets.ir import Net
from jrnn.nets.recurrent_networks import RecurrentState, recurrent_net


@rule("cond")
def cond_rule(e: Emitter, node: FlatEquation, index, *values):
    branches = [flatten(b) for b in node.params["branches"]]
    if is_static(index):
        return tuple(e.graph(branches[min(max(int(index), 0), len(branches) - 1)], values))
    outputs = [e.zeros(v.shape, v.dtype, "branched") for v in node.outputs]

    def run(k: int) -> None:
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
    changing = [new is not v for v, new in zip(carried, body.outputs)]
    state: list[Value] = [
        replace(e.copy(e.blob(value), e.claim("loop")), shape=v.shape) if changes else value
        for value, v, changes in zip(values[after:], carried, changing)
    ]
    names = {s.name for s, changes in zip(state, changing) if changes}
    with e.b.while_():
        with e.b.condition():
            e.copy(e.blob(e.graph(test, [*values[:first], *state])[0]))
        results = e.graph(body, [*values[first:after], *state])
        changed = [
            (e.blob(value), s.name)
            for value, s, changes in zip(results, state, changing)
            if changes
        ]
        # all new values are known before the first old one is overwritten
        changed = [(e.copy(m) if m.name in names else m, name) for m, name in changed]
        for m, name in changed:
            e.copy(m, name)
    return tuple(state)


# Scan ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _HeldValue:
    """A carry or an output that the recurrent network holds: its new value in the step, and how it is folded."""

    new: Var | np.ndarray
    shape: tuple[int, ...]
    dtype: np.dtype

    def width(self, batch: int) -> int:
        return math.prod(self.shape) // batch * (2 if self.dtype == INT32 else 1)


def _fold(e: Emitter, value: Value, batch: int) -> Blob:
    """A value as floats [1, N, D]; an int32 as two floats that hold its halves."""
    if value.dtype == INT32:
        return join(e, [_fold(e, e.cast(v, FLOAT), batch) for v in halves(e, value)], 2)
    return e.reshaped(e.cast(e.blob(value), FLOAT), (1, batch, math.prod(value.shape) // batch))


def _unfold(
    e: Emitter, name: str, state: _HeldValue, batch: int, lead: tuple[int, ...] = ()
) -> Value:
    """The blob `name` of folded floats [1 or T, N, D] as values of a state, [*lead, ...]."""
    blob = Blob.of(name, (*(lead or (1,)), batch, state.width(batch)), FLOAT)
    if state.dtype == INT32:
        half = blob.shape[2] // 2
        high, low = (e.cast(cut(e, blob, 2, k * half, (k + 1) * half), INT32) for k in (0, 1))
        return e.reshaped(from_halves(e, high, low), (*lead, *state.shape))
    return e.cast(e.reshaped(blob, (*lead, *state.shape)), state.dtype)


@dataclass(frozen=True)
class _Roles:
    """What becomes of the carries and outputs of a scan.

    Attributes:
        body: the step, without the nodes that nothing that is read needs.
        consts, carried, sequences: its inputs.
        constants: the numbers of the carries that no step changes.
        counters: those of the carries that only count, with what a step adds.
        held: the numbers of the other carries that are needed; `states` begins with them.
        states: what the recurrent network holds, carries and outputs.
        place: for the number of an output that is read, that of the state that it shows.
    """

    body: Graph
    consts: Sequence[Var]
    carried: Sequence[Var]
    sequences: Sequence[Var]
    constants: set[int]
    counters: dict[int, int]
    held: list[int]
    states: list[_HeldValue]
    place: dict[int, int]


def _roles(node: FlatEquation, read: Sequence[bool]) -> _Roles:
    body = flatten(node.params["jaxpr"])
    first, count = scan_counts(node.params)
    carried = body.inputs[first : first + count]
    new = body.outputs[:count]
    outs = body.outputs[count:]
    constants = {k for k, v in enumerate(carried) if new[k] is v}
    counters = {k: n for k, v in enumerate(carried) if (n := _growth(body, v, new[k])) is not None}
    kept, nodes = _needed(body, carried, read, {*constants, *counters})
    held = [k for k in kept if k not in constants and k not in counters]
    states = [_HeldValue(new[k], carried[k].shape, np.dtype(carried[k].dtype)) for k in held]
    place: dict[int, int] = {}
    for k, v in enumerate(outs):
        if not read[count + k]:
            continue
        place[k] = next((i for i, s in enumerate(states) if s.new is v), len(states))
        if place[k] == len(states):
            states.append(_HeldValue(v, node.outputs[count + k].shape[1:], np.dtype(v.dtype)))
    for s in states:
        if s.dtype not in (FLOAT, BOOL, INT32) or not math.prod(s.shape):
            raise ConversionError(
                f"a scan that carries {s.dtype}{list(s.shape)}: only float32, int32 and bool with elements can be carried"
            )
    sequences = body.inputs[first + count :]
    body = replace(body, nodes=nodes)
    return _Roles(
        body, body.inputs[:first], carried, sequences, constants, counters, held, states, place
    )


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
        return replace(net, ops=tuple(net.ops[k] for k in live_ops(net, self.next)))


def _step(e: Emitter, roles: _Roles, values, xs, floats, prefix: str, batch: int) -> _StepNet:
    """Emits the step: `values` are those of the scan, `xs` its sequences, and `floats` those of them that are floats."""
    body = roles.body
    states = roles.states
    first = len(roles.consts)
    used = body.used()
    builder = NetBuilder(prefix, parent=e.b)
    input_t = builder.input(e.claim("input_t"))
    timestep = builder.input(e.claim("timestep"))
    previous = [builder.input(e.claim("previous")) for _ in states]
    with e.inside(builder):
        clock = Blob.of(timestep, (1,), INT32)
        env: dict[Var, Value] = dict(zip(roles.consts, values))
        env.update((roles.carried[k], values[first + k]) for k in roles.constants)
        for k, amount in roles.counters.items():
            if roles.carried[k] in used:
                env[roles.carried[k]] = _counted(e, clock, values[first + k], amount)
        env.update(_sequences(e, clock, xs, floats, input_t, batch))
        env.update(
            (roles.carried[k], _unfold(e, name, s, batch))
            for k, s, name in zip(roles.held, states, previous)
        )
        given = [env.get(v, np.zeros(v.shape, v.dtype) if v.dtype else None) for v in body.inputs]
        new: list[str] = []
        for value in e.graph(replace(body, outputs=tuple(s.new for s in states)), given):
            blob = _fold(e, value, batch)
            written = any(blob.name in op.outputs for op in builder.ops)
            new.append((blob if written and blob.name not in new else e.copy(blob)).name)
    return _StepNet(builder, input_t, timestep, previous, new)


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

    used = roles.body.used()
    xs = {v: x for v, x in zip(roles.sequences, values[first + count :]) if v in used}
    xs = {v: reverse(e, x, 0) if p["reverse"] else x for v, x in xs.items()}
    floats = {v: e.blob(x) for v, x in xs.items() if isinstance(x, Blob) and x.dtype == FLOAT}
    batch = _batch([x.shape[1:] for x in floats.values()] + [s.shape for s in states])
    prefix = e.claim("recurrent")
    step = _step(e, roles, values, xs, floats, prefix, batch)

    taken = set(step.builder.external_inputs)
    initial = [values[first + k] for k in roles.held]
    initial += [np.zeros(s.shape, s.dtype) for s in states[len(initial) :]]
    starts = [_start(e, value, s, batch, taken) for value, s in zip(initial, states)]
    sequence = _sequence(e, list(floats.values()), steps, batch, taken)
    wanted = [2 * i for i in roles.place.values()] + [
        2 * i + 1 for i, k in enumerate(roles.held) if read[k]
    ]
    with_grads = {i for i in wanted if states[i // 2].dtype == FLOAT}
    net = step.net

    def append(forward_only: bool) -> list[RecurrentState]:
        return recurrent_net(
            e.b,
            net,
            [(step.input_t, sequence.name)],
            [(name, start.name) for name, start in zip(step.previous, starts)],
            dict(zip(step.previous, step.next)),
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
        elif k in roles.held:
            i = roles.held.index(k)
            value = _unfold(e, outputs[i].last, states[i], batch) if read[k] else None
        results.append(value)
    for k in range(len(node.outputs) - count):
        i = roles.place.get(k)
        y = None if i is None else _unfold(e, outputs[i].all, states[i], batch, (steps,))
        results.append(y if i is None or not p["reverse"] else reverse(e, y, 0))
    return tuple(results)


def _growth(body: Graph, before: Var, after: Var | np.ndarray) -> int | None:
    """How much an integer carry grows at every step, or None if that is not a known number."""
    maker = body.makers().get(after) if isinstance(after, Var) else None
    if maker is None or maker.name != "add" or before.shape or before.dtype.kind != "i":
        return None
    a, b = maker.inputs
    amount = b if a is before else a if b is before else None
    return int(amount) if isinstance(amount, np.ndarray) else None


def _needed(body: Graph, carried: Sequence[Var], read: Sequence[bool], plain: set[int]):
    """The carries and the nodes that are needed to compute what is read of a scan."""
    new = body.outputs[: len(carried)]
    kept = {k for k in range(len(carried)) if read[k]}
    while True:
        outs = [new[k] for k in kept if k not in plain]
        outs += [v for v, r in zip(body.outputs[len(carried) :], read[len(carried) :]) if r]
        nodes = live(body.nodes, outs)
        seen = replace(body, nodes=nodes, outputs=tuple(outs)).used()
        more = kept | {k for k, v in enumerate(carried) if v in seen}
        if more == kept:
            return sorted(kept), nodes
        kept = more


def _batch(shapes: Sequence[tuple[int, ...]]) -> int:
    """N: the first dimension of the sequences and states, if it divides the size of all of them, else 1."""
    n = next((shape[0] for shape in shapes if len(shape) > 1), 1)
    return n if n and all(math.prod(shape) % n == 0 for shape in shapes) else 1


def _counted(e: Emitter, clock: Blob, start: Value, amount: int) -> Value:
    """start + amount * timestep, a scalar of the type of `start`."""
    now = e.cast(e.reshaped(clock, ()), start.dtype)
    if amount != 1:
        now = binary(e, "Mul", now, np.asarray(amount, start.dtype))
    return now if is_static(start) and not start else binary(e, "Add", now, start)


def _sequences(e: Emitter, clock: Blob, xs, floats, input_t: str, batch: int) -> dict[Var, Value]:
    """The current element of each sequence."""
    widths = [math.prod(x.shape[1:]) // batch for x in floats.values()]
    parts: list[Value] = [Blob.of(input_t, (1, batch, sum(widths)), FLOAT)]
    if len(widths) > 1:
        parts = e.ops(
            "Split",
            [input_t],
            [((1, batch, width), FLOAT) for width in widths],
            axis=2,
            split=widths,
        )
    env: dict[Var, Value] = {v: e.reshaped(part, v.shape) for v, part in zip(floats, parts)}
    for v, x in xs.items():
        if v in env:
            continue
        if (
            is_static(x)
            and x.dtype.kind == "i"
            and x.ndim == 1
            and len(set(np.diff(x).tolist())) == 1
        ):
            env[v] = _counted(e, clock, x[0], int(x[1] - x[0]))
        else:
            env[v] = e.reshaped(pick(e, x, 0, clock), x.shape[1:])
    return env


def _sequence(e: Emitter, floats: list[Blob], steps: int, batch: int, taken: set[str]) -> Blob:
    """The float sequences as one, [T, N, D], in a blob that the step net does not read by name."""
    parts = [e.reshaped(x, (steps, batch, math.prod(x.shape[1:]) // batch)) for x in floats]
    sequence = join(e, parts, 2) if parts else e.zeros((steps, batch, 1), FLOAT, "no_input")
    return e.copy(sequence) if sequence.name in taken else sequence


def _start(e: Emitter, value: Value, state: _HeldValue, batch: int, taken: set[str]) -> Blob:
    """The initial state, in a blob that the step net does not read by name."""
    if is_static(value) and not value.any():
        return e.zeros((1, batch, state.width(batch)), FLOAT, "initial")
    blob = _fold(e, value, batch)
    return e.copy(blob) if blob.name in taken else blob
