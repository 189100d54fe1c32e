"""PyTorch's RNN, LSTM and GRU as pure functions of a dict of parameters.

Shapes: T time, N batch, D input, H hidden, P output of a step (the projection's size, or H without one),
L layers, K directions.

    rnn, lstm, gru                   whole sequences through a stack
    rnn_step, lstm_step, gru_step    one step through a stack, for streaming
    rnn_cell, lstm_cell, gru_cell    one step of one cell

The parameters have PyTorch's names and shapes (`jrnn.nn.params`). They determine the structure: the sizes, the number of
layers, and whether there are biases, a reverse direction, a projection or layer normalization.

    RNN    h' = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu
    LSTM   i, f, o = sigmoid(...), g = tanh(...);  c' = f c + i g;  h' = o tanh(c'), then projected by W_hr
    GRU    r, z = sigmoid(...);  n = tanh(W_in x + b_in + r (W_hn h + b_hn));  h' = (1 - z) n + z h

With `norm_ih` and `norm_hh`, each product is normalized over its G H rows before the biases are added (Ba et al., 2016,
but the cell c is not normalized).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from jax import Array
from jax.typing import DTypeLike

from jrnn.nn.params import Params
from jrnn.nn.settings import Settings, read, spelled_out, warn_of_dropout
from jrnn.nn.stack import run_stack, step_cell, step_stack
from jrnn.nn.units import GRU, LSTM, Unit, as_given, rnn_unit

Options = dict[str, Any]
Pair = tuple[Array, Array]


def _apart(where: str, function: Callable[..., Any], options: Options) -> tuple[Settings, Options]:
    """The settings among the options, and the keyword arguments of a function."""
    names = []
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY:
            names.append(p.name)
    own = {}
    for name in names:
        if name in options:
            own[name] = options.pop(name)
    return read(where, options, names), own


def _run(
    unit: Unit, where: str, params: Params, x: Any, hx: Any, options: Options
) -> tuple[Any, Any]:
    settings, own = _apart(where, run_stack, options)
    warn_of_dropout(where, settings.dropout, 2 if "weight_ih_l1" in params else 1)
    output, states = run_stack(unit, where, params, x, hx, settings, **own)
    return output, as_given(states)


def _step(
    unit: Unit, where: str, params: Params, x: Any, hx: Any, options: Options
) -> tuple[Array, Any]:
    settings, own = _apart(where, step_stack, options)
    y, states = step_stack(unit, where, params, x, hx, settings, **own)
    return y, as_given(states)


@spelled_out(run_stack, Settings)
def rnn(
    params: Params, x: Any, hx: Any = None, *, nonlinearity: str = "tanh", **options: Any
) -> tuple[Any, Array]:
    """A stack of plain recurrent layers, [T, N, D] -> [T, N, K P] and the last states [L K, N, P].

    Args:
        params: parameters as in `jrnn.nn.params`.
        x: [T, N, D], [N, T, D] with batch_first, [T, D] for one sequence, or a `PackedSequence`.
        hx: the initial states [L K, N, P] ([L K, P] for one sequence); None is zeros.
        nonlinearity: "tanh" or "relu".
        lengths: [N] integers from 0 to T, in any order, where the sequences end. Past the end, outputs are 0 and the values
            of x are ignored, even NaN. The last state is the one at the end (hx for length 0).
        resets: booleans, [T, N], [N, T] with batch_first, or [T] for one sequence. For a `PackedSequence` they have the
            layout of the padded sequence. Where True, the state is replaced by `reset_state` before that step. Each piece
            between resets gives the outputs that it gives alone. As a reverse direction runs step t before step t - 1,
            its reset at t acts before step t - 1. Resets past the end of a sequence have no effect.
        reset_state: the states after resets, of the shapes of hx. None is zeros, not hx, which may come from an earlier
            piece of the sequence.
        mask: booleans, with the layouts of `resets`: True where a step counts. Where False, the states stay, outputs are 0,
            and the values of x are ignored, even NaN, in both directions. A reset there still holds.
        key: a PRNG key for dropout and zoneout; without it nothing is random.
        return_states: "last"; "all", the states after every step, [T, L K, N, P], which do not change past the end of a
            sequence; or "all+initial", [T + 1, L K, N, P], with the initial state first, or last for a reverse direction.
        embedding: [V, D], whose rows x names by integers: [T, N], [N, T] with batch_first, or [T]. Same values as
            `x = embedding[x]`, and less work on a CPU if there are fewer rows than integers.
        settings: see `jrnn.nn.Settings`.

    Returns:
        `(output, h_n)`; output is packed if x is.

    Raises:
        LayerError: if parameters, x, hx, lengths, resets, reset_state or embedding do not fit together.

    >>> import jax, jax.numpy as jnp
    >>> from jrnn.nn import Layout
    >>> params = Layout(rnn_unit("tanh"), input_size=3, hidden_size=4).init(jax.random.key(0))
    >>> output, h_n = rnn(params, jnp.ones((5, 2, 3)), lengths=[5, 0])
    >>> output.shape, h_n.shape, float(abs(h_n[0, 1]).max())
    ((5, 2, 4), (1, 2, 4), 0.0)
    >>> output, _ = rnn(params, jnp.ones((5, 3)), resets=jnp.array([False, False, False, True, False]))
    >>> bool(jnp.allclose(output[3:], output[:2]))
    True
    >>> table, tokens = jnp.eye(3), jnp.array([2, 0, 2, 1])
    >>> bool(jnp.allclose(rnn(params, tokens, embedding=table)[0], rnn(params, table[tokens])[0]))
    True
    """
    return _run(rnn_unit(nonlinearity), "rnn", params, x, hx, options)


@spelled_out(run_stack, Settings)
def lstm(params: Params, x: Any, hx: Any = None, **options: Any) -> tuple[Any, Pair]:
    """A stack of LSTM layers, [T, N, D] -> [T, N, K P] and the last states [L K, N, P], [L K, N, H].

    Takes the arguments of `rnn`; hx is a pair (h, c).

    Returns:
        `(output, (h_n, c_n))`.

    >>> import jax, jax.numpy as jnp
    >>> from jrnn.nn import Layout
    >>> params = Layout(LSTM, 3, 4, num_layers=2, bidirectional=True, proj_size=2).init(jax.random.key(0))
    >>> output, (h_n, c_n) = lstm(params, jnp.ones((2, 5, 3)), batch_first=True)
    >>> output.shape, h_n.shape, c_n.shape
    ((2, 5, 4), (4, 2, 2), (4, 2, 4))
    """
    return _run(LSTM, "lstm", params, x, hx, options)


@spelled_out(run_stack, Settings)
def gru(params: Params, x: Any, hx: Any = None, **options: Any) -> tuple[Any, Array]:
    """A stack of GRU layers, [T, N, D] -> [T, N, K H] and the last states [L K, N, H]; arguments as in `rnn`.

    >>> import jax, jax.numpy as jnp
    >>> from jrnn.nn import Layout
    >>> params = Layout(GRU, 3, 4).init(jax.random.key(0))
    >>> output, h_n = gru(params, jnp.ones((5, 3)))
    >>> bool((output[-1] == h_n[0]).all())
    True
    """
    return _run(GRU, "gru", params, x, hx, options)


@spelled_out(step_stack, Settings)
def rnn_step(
    params: Params, x: Any, hx: Any = None, *, nonlinearity: str = "tanh", **options: Any
) -> Pair:
    """One step through a stack of plain layers; see `lstm_step`. The states are one array [L, N, P]."""
    return _step(rnn_unit(nonlinearity), "rnn_step", params, x, hx, options)


@spelled_out(step_stack, Settings)
def lstm_step(params: Params, x: Any, hx: Any = None, **options: Any) -> tuple[Array, Pair]:
    """One step through a stack of LSTM layers, for streaming. Takes and returns the state.

    Step by step, a sequence has the same outputs as by `lstm` without dropout.

    Args:
        params: parameters of a stack without a reverse direction.
        x: [N, D], or [D] for one sequence.
        hx: the states as `lstm` takes and returns them; None is zeros.
        resets, mask: booleans [N], or one for one sequence: where to replace the state by `reset_state` before the step, and
            which sequences have this step. The states of others stay, and their outputs are 0.
        reset_state: as in `lstm`.
        settings: see `jrnn.nn.Settings`; zoneout computes its expectation.

    Returns:
        `(y, (h, c))`, y [N, P].

    Raises:
        LayerError: if x or hx do not fit, or the stack is bidirectional and thus needs the whole sequence.

    >>> import jax, jax.numpy as jnp
    >>> from jrnn.nn import Layout
    >>> params = Layout(LSTM, 3, 4, num_layers=2).init(jax.random.key(0))
    >>> xs = jax.random.normal(jax.random.key(1), (5, 1, 3))
    >>> state = None
    >>> for x in xs:
    ...     y, state = lstm_step(params, x, state)
    >>> bool(jnp.allclose(y, lstm(params, xs)[0][-1], atol=1e-6))
    True
    """
    return _step(LSTM, "lstm_step", params, x, hx, options)


@spelled_out(step_stack, Settings)
def gru_step(params: Params, x: Any, hx: Any = None, **options: Any) -> Pair:
    """One step through a stack of GRU layers; see `lstm_step`. The states are one array [L, N, H]."""
    return _step(GRU, "gru_step", params, x, hx, options)


def rnn_cell(
    params: Params,
    x: Any,
    hx: Any = None,
    *,
    nonlinearity: str = "tanh",
    dtype: DTypeLike | None = None,
) -> Array:
    """One step of one plain cell, [N, D], [N, H] -> [N, H], or without N.

    >>> import jax, jax.numpy as jnp
    >>> params = {"weight_ih": jnp.ones((4, 3)), "weight_hh": jnp.eye(4)}
    >>> rnn_cell(params, jnp.ones(3), nonlinearity="relu").tolist()
    [3.0, 3.0, 3.0, 3.0]
    """
    return step_cell(rnn_unit(nonlinearity), "rnn_cell", params, x, hx, dtype)[0]


def lstm_cell(params: Params, x: Any, hx: Any = None, *, dtype: DTypeLike | None = None) -> Pair:
    """One step of one LSTM cell, [N, D], (h [N, H], c [N, H]) -> (h, c), or without N."""
    return as_given(step_cell(LSTM, "lstm_cell", params, x, hx, dtype))


def gru_cell(params: Params, x: Any, hx: Any = None, *, dtype: DTypeLike | None = None) -> Array:
    """One step of one GRU cell, [N, D], [N, H] -> [N, H], or without N."""
    return step_cell(GRU, "gru_cell", params, x, hx, dtype)[0]
