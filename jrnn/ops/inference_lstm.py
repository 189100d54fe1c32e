"""InferenceLSTM: a stack of LSTM layers in one operator, with PyTorch's weights and gate order.

Shapes: T time, N batch, D input, H hidden, R directions (1 or 2).
"""

import jax.numpy as jnp
from jax.nn import sigmoid

from jrnn.errors import OpError
from jrnn.executor import scan
from jrnn.ops.checks import check_rank, check_shape, describe
from jrnn.registry import op


def _run(x, hidden, cell, weights, reverse):
    """One layer in one direction: [T, N, D] -> [T, N, H], and the last hidden and cell state [N, H]."""
    w_input, w_hidden, *biases = weights
    gates = 4 * hidden.shape[-1]
    for name, w, rows in (("input", w_input, x.shape[-1]), ("hidden", w_hidden, hidden.shape[-1])):
        check_shape(w, (gates, rows), f"a layer's {name} weight")
    for bias in biases:
        check_shape(bias, (gates,), "a layer's bias")
    projected = x @ w_input.T + sum(biases)[None, None, :] if biases else x @ w_input.T  # [T, N, 4H]

    def step(carry, projected_t):
        h, c = carry
        i, f, g, o = jnp.split(projected_t + h @ w_hidden.T, 4, axis=-1)
        c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
        h = sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    (hidden, cell), ys = scan(step, (hidden, cell), projected, reverse=reverse)
    return ys, hidden, cell


@op("InferenceLSTM", outputs=3, gradient="stops")
def inference_lstm(
    x, hidden, cell, *weights, num_layers: int = 1, has_biases: bool = False, batch_first: bool = False,
    bidirectional: bool = False,
):  # fmt: skip
    """[T, N, D] -> [T, N, R * H], and the last states [num_layers * R, N, H].

    The initial states are [num_layers * R, N, H]. The weights are, for each layer and direction, that of the input [4H, D],
    that of the hidden state [4H, H] and with `has_biases` two biases [4H], gates in order i, f, g, o. With `batch_first`, x
    and the output are [N, T, ...].
    """
    check_rank(x, 3, "input")
    directions, each = (2 if bidirectional else 1), (4 if has_biases else 2)
    if len(weights) != num_layers * directions * each:
        raise OpError(
            f"was given {len(weights)} weights; {num_layers} layers of {directions} directions with {each} weights each "
            f"take {num_layers * directions * each}"
        )
    x = jnp.swapaxes(x, 0, 1) if batch_first else x
    for name, state in (("hidden", hidden), ("cell", cell)):
        if state.ndim != 3 or state.shape[:2] != (num_layers * directions, x.shape[1]):
            raise OpError(f"{name} is {describe(state)}; it must be [{num_layers * directions}, {x.shape[1]}, H]")
    last_hidden: list = []
    last_cell: list = []
    for layer in range(num_layers):
        outputs: list = []
        for direction in range(directions):
            k = layer * directions + direction
            found = _run(x, hidden[k], cell[k], weights[each * k : each * (k + 1)], reverse=direction == 1)
            for made, value in zip((outputs, last_hidden, last_cell), found):
                made.append(value)
        x = jnp.concatenate(outputs, axis=-1)
    return (jnp.swapaxes(x, 0, 1) if batch_first else x), jnp.stack(last_hidden), jnp.stack(last_cell)
