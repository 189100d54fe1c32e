"""LSTMUnit and GRUUnit, the parts of a recurrent step after the matrix product, with their gradients; and InferenceLSTM.

Shapes: T time, N batch, D hidden. States are [1, N, D], gates [1, N, 4D] or [1, N, 3D], sequence lengths int32 [N] and the
timestep int32 [1]. A finished sequence keeps its state, or with `drop_states` gets zeros.
"""

import jax.numpy as jnp
from jax.nn import sigmoid

from jrnn.errors import OpError
from jrnn.jaxprs.unit_formulas import interpolated, lstm
from jrnn.loops import scan
from jrnn.nets.ops.values import check_rank, check_shape, describe
from jrnn.nets.registry import op


def _check_state(name, state, gates, count):
    check_rank(gates, 3, "gates")
    check_rank(state, 3, name)
    if gates.shape != (1, state.shape[1], count * state.shape[2]) or state.shape[0] != 1:
        raise OpError(
            f"gates is {describe(gates)}, {name} {describe(state)}; give [1, N, {count} * D] and [1, N, D]"
        )


def _valid(rest, sequence_lengths, batch):
    """A mask [N, 1] of the sequences that have not ended, from the optional inputs; None without lengths."""
    rest = [x for x in rest if x is not None]
    if sequence_lengths and len(rest) != 2:
        raise OpError(
            f"has {len(rest)} input after the gates; sequence_lengths=1 (the default) takes lengths and timestep"
        )
    if not sequence_lengths:
        return None
    lengths, timestep = rest
    check_shape(lengths, (batch,), "seq_lengths")
    return (lengths > timestep.reshape(-1)[:1])[:, None]


def _rows(x):
    """[1, N, D] -> [N, D], as steps of JAX have it."""
    return x.reshape(x.shape[1:])


def _gates(gates, count):
    """[1, N, count D] -> count arrays [N, D]."""
    return [_rows(gate) for gate in jnp.split(gates, count, axis=-1)]


def _masked(valid, x, otherwise):
    return x if valid is None else jnp.where(valid, x, otherwise)


def _ended(valid, new, old, drop_states):
    """The state [1, N, D]: the new one for sequences that go on, the old one or zeros for ended sequences."""
    return _masked(valid, new, 0 if drop_states else old)[None]


def _lstm_gates(gates, forget_bias):
    i, f, o, g = _gates(gates, 4)
    return sigmoid(i), sigmoid(f + forget_bias), sigmoid(o), jnp.tanh(g)


@op("LSTMUnit", outputs=2, gradient="LSTMUnitGradient(*, y, y1, dy, dy1) -> hidden, cell, gates")
def lstm_unit(
    hidden, cell, gates, lengths_or_timestep, timestep=None, /, *,
    forget_bias: float = 0.0, drop_states: bool = False, sequence_lengths: bool = True,
):  # fmt: skip
    """c' = f * c + i * g and h' = o * tanh(c'); gates are i, f, o, g, in this order along the last axis."""
    _check_state("cell", cell, gates, 4)
    check_shape(hidden, cell.shape, "hidden")
    valid = _valid((lengths_or_timestep, timestep), sequence_lengths, cell.shape[1])
    i, f, o, g = _gates(gates, 4)
    states = _rows(hidden), _rows(cell)
    new_states = lstm(i, f + forget_bias, o, g, states[1])
    return tuple(_ended(valid, new, old, drop_states) for new, old in zip(new_states, states))


@op("LSTMUnitGradient", outputs=3)
def lstm_unit_gradient(
    hidden, cell, gates, *rest, forget_bias: float = 0.0, drop_states: bool = False, sequence_lengths: bool = True
):  # fmt: skip
    """Reads LSTMUnit's inputs, both outputs and their gradients; writes the gradients of hidden, cell and gates."""
    *times, _, c, dh, dc = rest
    valid = _valid(times, sequence_lengths, cell.shape[1])
    cell, c, dh, dc = map(_rows, (cell, c, dh, dc))
    i, f, o, g = _lstm_gates(gates, forget_bias)
    tanh_c = jnp.tanh(c)
    through = dc + dh * o * (1 - tanh_c * tanh_c)
    parts = (
        through * g * i * (1 - i),
        through * cell * f * (1 - f),
        dh * tanh_c * o * (1 - o),
        through * i * (1 - g * g),
    )
    dgates = jnp.concatenate(parts, axis=-1)
    ended_h, ended_c = (jnp.zeros_like(dh), jnp.zeros_like(dc)) if drop_states else (dh, dc)
    gradients = (jnp.zeros_like(dh), ended_h), (through * f, ended_c), (dgates, 0)
    return tuple(_masked(valid, new, ended)[None] for new, ended in gradients)


@op("GRUUnit", gradient="GRUUnitGradient(*, y, dy) -> hidden, gates")
def gru_unit(
    hidden, gates, lengths_or_timestep, timestep=None, /, *, drop_states: bool = False, sequence_lengths: bool = True
):  # fmt: skip
    """h' = u * h + (1 - u) * o; gates are reset, update, output, and the reset gate is applied before."""
    _check_state("hidden", hidden, gates, 3)
    valid = _valid((lengths_or_timestep, timestep), sequence_lengths, hidden.shape[1])
    _, update, output = _gates(gates, 3)
    u = sigmoid(update)
    before = _rows(hidden)
    return _ended(valid, interpolated(u, jnp.tanh(output), before), before, drop_states)


@op("GRUUnitGradient", outputs=2)
def gru_unit_gradient(
    hidden, gates, *rest, drop_states: bool = False, sequence_lengths: bool = True
):
    """Reads GRUUnit's inputs, its output and its output's gradient; writes the gradients of hidden and gates."""
    *times, _, dh = rest
    valid = _valid(times, sequence_lengths, hidden.shape[1])
    reset, update, output = _gates(gates, 3)
    hidden = _rows(hidden)
    dh = _rows(dh)
    u = sigmoid(update)
    o = jnp.tanh(output)
    dupdate = dh * (hidden - o) * u * (1 - u)
    doutput = dh * (1 - u) * (1 - o * o)
    dgates = jnp.concatenate([jnp.zeros_like(reset), dupdate, doutput], axis=-1)
    after_end = jnp.zeros_like(dh) if drop_states else dh
    return _masked(valid, dh * u, after_end)[None], _masked(valid, dgates, 0)[None]


def _run(x, hidden, cell, weights, reverse):
    """One layer in one direction: [T, N, D] -> [T, N, H], and the last hidden and cell state [N, H]."""
    w_input, w_hidden, *biases = weights
    gates = 4 * hidden.shape[-1]
    check_shape(w_input, (gates, x.shape[-1]), "a layer's input weight")
    check_shape(w_hidden, (gates, hidden.shape[-1]), "a layer's hidden weight")
    for bias in biases:
        check_shape(bias, (gates,), "a layer's bias")
    projected = x @ w_input.T  # [T, N, 4H]
    if biases:
        projected = projected + sum(biases)[None, None, :]

    def step(carry, projected_t):
        h, c = carry
        i, f, g, o = jnp.split(projected_t + h @ w_hidden.T, 4, axis=-1)
        h, c = lstm(i, f, o, g, c)
        return (h, c), h

    (hidden, cell), ys = scan(step, (hidden, cell), projected, reverse=reverse)
    return ys, hidden, cell


@op("InferenceLSTM", outputs=3, gradient="stops")
def inference_lstm(
    x, hidden, cell, *weights, num_layers: int = 1, has_biases: bool = False, batch_first: bool = False,
    bidirectional: bool = False,
):  # fmt: skip
    """[T, N, D] -> [T, N, R * H], and the last states [num_layers * R, N, H].

    The initial states are [num_layers * R, N, H]. Each layer and direction has a weight [4H, D] of the input, a weight
    [4H, H] of the hidden state, and with `has_biases` two biases [4H], with gates in order i, f, g, o. With `batch_first`,
    x and the output are [N, T, ...].
    """
    check_rank(x, 3, "input")
    directions = 2 if bidirectional else 1
    each = 4 if has_biases else 2
    if len(weights) != num_layers * directions * each:
        raise OpError(
            f"was given {len(weights)} weights; {num_layers} layers of {directions} directions with {each} weights each "
            f"take {num_layers * directions * each}"
        )
    if batch_first:
        x = jnp.swapaxes(x, 0, 1)
    for name, state in (("hidden", hidden), ("cell", cell)):
        if state.ndim != 3 or state.shape[:2] != (num_layers * directions, x.shape[1]):
            raise OpError(
                f"{name} is {describe(state)}; it must be [{num_layers * directions}, {x.shape[1]}, H]"
            )
    last_hidden: list = []
    last_cell: list = []
    for layer in range(num_layers):
        outputs: list = []
        for direction in range(directions):
            k = layer * directions + direction
            own_weights = weights[each * k : each * (k + 1)]
            ys, h, c = _run(x, hidden[k], cell[k], own_weights, reverse=direction == 1)
            outputs.append(ys)
            last_hidden.append(h)
            last_cell.append(c)
        x = jnp.concatenate(outputs, axis=-1)
    if batch_first:
        x = jnp.swapaxes(x, 0, 1)
    return x, jnp.stack(last_hidden), jnp.stack(last_cell)
