"""The rule for `scan`: it becomes a RecurrentNetwork.

Shapes: T time, N batch, D features. Caffe2 runs a step net over one sequence [T, N, ...] of float32, with states [1, N, D].
So sequences of floats are joined along their features, carries and outputs of any shape are folded to [1, N, D], booleans
and int32 are carried as floats that hold them exactly, and other sequences are looked up by the timestep. A carry that only
counts is computed from the timestep, and one that never changes is read from outside.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jrnn.builder import NetBuilder
from jrnn.convert.emit import BOOL, FLOAT, INT32, Blob, Emitter, Value
from jrnn.convert.flat import Graph, Node, Var, flatten, live
from jrnn.convert.rules.elementwise import binary
from jrnn.convert.rules.shapes import cut, join, pick
from jrnn.convert.rules.table import rule
from jrnn.errors import ConversionError, GradientError
from jrnn.graph import live_ops
from jrnn.recurrent import RecurrentState, recurrent_net

_HALF = 2**16  # an int32 is carried as two floats below this, which hold it exactly


@dataclass(frozen=True)
class _State:
    """A carry or an output that the recurrent network holds: the variable, and how its value is folded."""

    new: Var | np.ndarray
    shape: tuple[int, ...]
    dtype: np.dtype

    def width(self, batch: int) -> int:
        return math.prod(self.shape) // batch * (2 if self.dtype == INT32 else 1)


def _fold(e: Emitter, value: Value, batch: int) -> Blob:
    """A value as floats [1, N, D]."""
    if value.dtype == INT32:
        unit = np.asarray(_HALF, np.int32)
        high = binary(e, "Div", value, unit)
        low = binary(e, "Sub", value, binary(e, "Mul", high, unit))
        return join(e, [_fold(e, e.cast(v, FLOAT), batch) for v in (high, low)], 2)
    blob = e.blob(value)
    return e.reshaped(e.cast(blob, FLOAT), (1, batch, math.prod(blob.shape) // batch))


def _unfold(e: Emitter, blob: Blob, state: _State, lead: tuple[int, ...] = ()) -> Value:
    """Folded floats [T, N, D] as values of a state, [*lead, ...]."""
    if state.dtype == INT32:
        half = blob.shape[2] // 2
        high, low = (e.cast(cut(e, blob, 2, k * half, (k + 1) * half), INT32) for k in (0, 1))
        unit = np.asarray(_HALF, np.int32)
        return e.reshaped(e.blob(binary(e, "Add", binary(e, "Mul", high, unit), low)), (*lead, *state.shape))
    return e.cast(e.reshaped(blob, (*lead, *state.shape)), state.dtype)


@rule("scan")
def _(e: Emitter, node: Node, *values):
    p = node.params
    steps, read = p["length"], list(e.read)
    if steps == 0:
        raise ConversionError("a scan of no steps; leave it out")
    body = flatten(p["jaxpr"])
    first, after = _bounds(body, node)
    carried, sequences = body.inputs[first:after], body.inputs[after:]
    new, outs = body.outputs[: len(carried)], body.outputs[len(carried) :]
    constants = {k for k, v in enumerate(carried) if new[k] is v}
    counters = {k: n for k, v in enumerate(carried) if (n := _count(body, v, new[k])) is not None}
    plain = {*constants, *counters}
    kept, nodes = _needed(body, carried, read, plain)
    body = replace(body, nodes=nodes)
    used = body.users()

    held = [k for k in kept if k not in plain]
    states = [_State(new[k], carried[k].shape, np.dtype(carried[k].dtype)) for k in held]
    shown = [k for k, v in enumerate(outs) if read[len(carried) + k]]
    place: dict[int, int] = {}  # which state shows each output
    for k in shown:
        same = [i for i, s in enumerate(states) if s.new is outs[k]]
        if not same:
            states.append(_State(outs[k], node.outputs[len(carried) + k].shape[1:], np.dtype(outs[k].dtype)))
        place[k] = same[0] if same else len(states) - 1
    for s in states:
        if s.dtype not in (FLOAT, BOOL, INT32) or not math.prod(s.shape):
            raise ConversionError(
                f"a scan carries {s.dtype}{list(s.shape)}; float32, int32 and bool with elements convert"
            )

    xs = dict(zip(sequences, values[after:]))
    xs = {v: _reversed(e, x) if p["reverse"] else x for v, x in xs.items() if v in used}
    floats = {v: e.blob(x) for v, x in xs.items() if isinstance(x, Blob) and x.dtype == FLOAT}
    batch = _batch([x.shape[1:] for x in floats.values()], [s.shape for s in states])
    prefix = e.claim("recurrent")
    step = NetBuilder(prefix, parent=e.b)
    input_t, timestep = step.input(e.claim("input_t")), step.input(e.claim("timestep"))
    previous = [step.input(e.claim("previous")) for _ in states]
    with e.inside(step):
        clock = _Clock(e, timestep)
        env: dict[Var, Value] = dict(zip(body.inputs[:first], values[:first]))
        env.update((carried[k], values[first + k]) for k in constants)
        env.update((carried[k], clock.count(values[first + k], n)) for k, n in counters.items() if carried[k] in used)
        env.update(_sequences(e, clock, xs, floats, input_t, batch))
        for k, s, name in zip(held, states, previous):
            env[carried[k]] = _unfold(e, Blob.of(name, (1, batch, s.width(batch)), FLOAT), s)
        body_inputs = [env.get(v, np.zeros(v.shape, v.dtype) if v.dtype else None) for v in body.inputs]
        results = e.graph(replace(body, outputs=tuple(s.new for s in states)), body_inputs)
        made: list[Blob] = []
        for value in results:
            blob = _fold(e, value, batch)
            written = any(blob.name in op.outputs for op in step.ops)
            made.append(blob if written and blob.name not in {b.name for b in made} else e.copy(blob))

    taken = set(step.external_inputs)
    initial = [values[first + k] for k in held]
    initial += [np.zeros(s.shape, s.dtype) for s in states[len(held) :]]
    starts = [_start(e, value, s, batch, taken) for value, s in zip(initial, states)]
    sequence = _joined(e, floats, steps, batch)
    if sequence.name in taken:
        sequence = e.copy(sequence)
    indices = [2 * place[k] for k in shown] + [2 * i + 1 for i, k in enumerate(held) if read[k]]
    found = _append(e, step, (input_t, sequence), previous, starts, made, timestep, prefix, indices, states)

    results_out: list[Value] = []
    for k in range(len(carried)):
        if k in counters:
            results_out.append(_plus(e, values[first + k], counters[k] * steps))
        elif k not in held:
            results_out.append(values[first + k])
        else:
            i = held.index(k)
            width = states[i].width(batch)
            results_out.append(
                _unfold(e, Blob.of(found[i].last, (1, batch, width), FLOAT), states[i]) if read[k] else None
            )
    for k in range(len(outs)):
        if k not in place:
            results_out.append(None)
            continue
        s = states[place[k]]
        y = _unfold(e, Blob.of(found[place[k]].all, (steps, batch, s.width(batch)), FLOAT), s, (steps,))
        results_out.append(_reversed(e, y) if p["reverse"] else y)
    return tuple(results_out)


def _bounds(body: Graph, node: Node) -> tuple[int, int]:
    """Where the carries begin and end among the inputs: what is stacked over time has one dimension more outside.

    The parameter that says so has another form in every few versions of JAX.
    """
    carries = sum(len(v.shape) == len(inner.shape) for v, inner in zip(node.outputs, body.outputs))
    sequences = sum(len(v.shape) != len(inner.shape) for v, inner in zip(node.inputs, body.inputs))
    after = len(body.inputs) - sequences
    return after - carries, after


def _count(body: Graph, before: Var, after: Var | np.ndarray) -> int | None:
    """How much an integer carry grows at every step, where it is a known number."""
    maker = body.makers().get(after) if isinstance(after, Var) else None
    if maker is None or maker.name != "add" or before.shape or before.dtype.kind != "i":
        return None
    a, b = maker.inputs
    amount = b if a is before else a if b is before else None
    return int(amount) if isinstance(amount, np.ndarray) else None


def _needed(body: Graph, carried: Sequence[Var], read: Sequence[bool], plain: set[int]):
    """The carries and the nodes that what is read of a scan depends on."""
    new = body.outputs[: len(carried)]
    kept = {k for k in range(len(carried)) if read[k]}
    while True:
        outs = [new[k] for k in kept if k not in plain]
        outs += [v for v, r in zip(body.outputs[len(carried) :], read[len(carried) :]) if r]
        nodes = live(body.nodes, outs)
        seen = {a for n in nodes for a in n.inputs if isinstance(a, Var)} | {v for v in outs if isinstance(v, Var)}
        more = kept | {k for k, v in enumerate(carried) if v in seen}
        if more == kept:
            return sorted(kept), nodes
        kept = more


def _batch(sequences: Sequence[tuple[int, ...]], states: Sequence[tuple[int, ...]]) -> int:
    """N: the first dimension of what is read or carried, where all of that can be folded with it, else 1."""
    wide = [shape for shape in (*sequences, *states) if len(shape) > 1]
    n = wide[0][0] if wide else 1
    return n if n and all(math.prod(shape) % n == 0 for shape in (*sequences, *states)) else 1


def _reversed(e: Emitter, x: Value) -> Value:
    return x[::-1] if isinstance(x, np.ndarray) else pick(e, x, 0, np.arange(x.shape[0])[::-1])


def _plus(e: Emitter, value: Value, amount: int) -> Value:
    added = np.asarray(amount, value.dtype)
    return value + added if isinstance(value, np.ndarray) else binary(e, "Add", value, added)


class _Clock:
    """Values that follow from the timestep alone."""

    def __init__(self, e: Emitter, timestep: str):
        self.e, self.vector = e, Blob.of(timestep, (1,), INT32)

    def count(self, start: Value, amount: int) -> Value:
        """start + amount * timestep, a scalar of the type of `start`."""
        now = self.e.cast(self.e.reshaped(self.vector, ()), start.dtype)
        if amount != 1:
            now = binary(self.e, "Mul", now, np.asarray(amount, start.dtype))
        return now if isinstance(start, np.ndarray) and not start else binary(self.e, "Add", now, start)

    def look_up(self, x: Value) -> Value:
        """x[timestep]."""
        found = pick(self.e, x, 0, self.vector)
        return self.e.reshaped(found, x.shape[1:])


def _sequences(e: Emitter, clock: _Clock, xs, floats, input_t: str, batch: int) -> dict[Var, Value]:
    """What the step sees of each sequence."""
    widths = [math.prod(x.shape[1:]) // batch for x in floats.values()]
    here: list[Value] = [Blob.of(input_t, (1, batch, sum(widths)), FLOAT)]
    if len(widths) > 1:
        names = [e.claim("Split") for _ in widths]
        e.b.op("Split", [input_t], names, axis=2, split=widths)
        here = [Blob.of(name, (1, batch, width), FLOAT) for name, width in zip(names, widths)]
    env: dict[Var, Value] = {v: e.reshaped(part, v.shape) for v, part in zip(floats, here)}
    for v, x in xs.items():
        if v in env:
            continue
        if isinstance(x, np.ndarray) and x.dtype.kind == "i" and x.ndim == 1 and len(set(np.diff(x).tolist())) == 1:
            env[v] = clock.count(x[0], int(x[1] - x[0]))
        else:
            env[v] = clock.look_up(x)
    return env


def _joined(e: Emitter, floats, steps: int, batch: int) -> Blob:
    """The sequence that the recurrent network reads, [T, N, D]."""
    if not floats:
        return e.zeros((steps, batch, 1), FLOAT, "no_input")
    parts = [e.reshaped(x, (steps, batch, math.prod(x.shape[1:]) // batch)) for x in floats.values()]
    return join(e, parts, 2) if len(parts) > 1 else parts[0]


def _start(e: Emitter, value: Value, state: _State, batch: int, taken: set[str]) -> Blob:
    """The initial state, a blob that the step net does not read under the same name."""
    if isinstance(value, np.ndarray) and not value.any():
        return e.zeros((1, batch, state.width(batch)), FLOAT, "initial")
    blob = _fold(e, value, batch)
    return e.copy(blob) if blob.name in taken else blob


def _append(e, step, input, previous, starts, made, timestep, prefix, indices, states) -> list[RecurrentState]:
    """Appends the operator, with the backward step net where all operators of the step have gradients."""
    net = step.build(outputs=[b.name for b in made])
    net = replace(net, ops=tuple(net.ops[k] for k in live_ops(net, net.external_outputs)))
    with_grads = [k for k in indices if states[k // 2].dtype == FLOAT]

    def build(forward_only: bool) -> list[RecurrentState]:
        return recurrent_net(
            e.b,
            net,
            [(input[0], input[1].name)],
            [(name, start.name) for name, start in zip(previous, starts)],
            dict(zip(previous, (b.name for b in made))),
            timestep=timestep,
            scope=prefix,
            outputs_with_grads=sorted(set(with_grads)),
            forward_only=forward_only,
        )

    try:
        return build(forward_only=not with_grads)
    except GradientError:
        return build(forward_only=True)
