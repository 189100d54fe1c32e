"""Resets: a sequence with resets computes what its pieces compute, each on its own, in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from flax import nnx

import jrnn
from jrnn import nn
from jrnn.errors import LayerError
from jrnn.nn import functional, units

T, D, H = 7, 2, 3
LENGTHS = np.array([7, 0, 5])
RESETS = np.zeros((T, 3), bool)
RESETS[[2, 5], 0] = RESETS[[0, 3], 1] = RESETS[[0, 3, 5, 6], 2] = True  # also past the ends
PIECES = [(0, 0, 2), (0, 2, 5), (0, 5, 7), (2, 0, 3), (2, 3, 5)]  # sequence, start, end
CASES = {
    "rnn": (units.RNN_TANH, {"bidirectional": True, "num_layers": 2}),
    "lstm": (units.LSTM, {"num_layers": 2, "proj_size": 2}),
    "lstm, both ways": (units.LSTM, {"bidirectional": True}),
    "gru": (units.GRU, {"bidirectional": True, "num_layers": 2}),
}
pytestmark = pytest.mark.usefixtures("little_optimization")


def normal(seed, *shape):
    return np.random.RandomState(seed).standard_normal(shape).astype(jnp.zeros(()).dtype)


def one_or_pair(states):
    return tuple(states) if len(states) == 2 else states[0]


def apart(call, params, x, hx, reset_state, directions):
    """The outputs and last states of PIECES as sequences of their own, put together."""
    ends = np.array([end - start for _, start, end in PIECES])
    steps = np.minimum(np.arange(T)[:, None], ends - 1) + np.array(
        [start for _, start, _ in PIECES]
    )
    sequence = np.array([n for n, _, _ in PIECES])
    begins = np.array(
        [start == 0 and not RESETS[0, n] for n, start, _ in PIECES]
    )  # from hx, and not from reset_state
    finishes = np.array([end == LENGTHS[n] for n, _, end in PIECES])

    def first(start, fresh):
        for row in range(len(start)):
            own = finishes if directions == 2 and row % 2 else begins
            yield jnp.where(own[:, None], start[row, sequence], fresh[row, sequence])

    starts = jax.tree.map(lambda *leaves: jnp.stack(list(first(*leaves))), hx, reset_state)
    output, last = call(params, x[steps, sequence], starts, lengths=ends)
    whole = jnp.zeros((T, 3, output.shape[-1]), output.dtype)
    for k, (n, start, end) in enumerate(PIECES):
        whole = whole.at[start:end, n].set(output[: end - start, k])

    def end_of(states, start):
        for row in range(len(states)):
            piece = {0: 0, 2: 3} if directions == 2 and row % 2 else {0: 2, 2: 4}
            yield jnp.stack([states[row, piece[0]], start[row, 1], states[row, piece[2]]])

    return whole, jax.tree.map(lambda *leaves: jnp.stack(list(end_of(*leaves))), last, hx)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_a_sequence_is_that_of_its_pieces(case, x64):
    unit, options = CASES[case]
    layout = nn.Layout(unit, D, H, **options)
    call = getattr(functional, case[:4].strip(", "))
    params = layout.init(jax.random.key(0), jnp.float64)
    sizes = [(layout.num_layers * layout.directions, 3, size) for size in (layout.output_size, H)][
        : unit.states
    ]
    hx, reset_state = (
        one_or_pair([normal(seed + len(s), *s) for seed, s in enumerate(sizes, k)]) for k in (1, 7)
    )

    def in_one(*args):
        params, x, hx, reset_state = args
        return call(params, x, hx, lengths=LENGTHS, resets=RESETS, reset_state=reset_state)

    def loss(run):
        def weighed(*args):
            out = run(*args)
            return sum(
                jnp.sum(leaf * normal(k, *leaf.shape))
                for k, leaf in enumerate(jax.tree.leaves(out))
            ), out

        return jax.value_and_grad(weighed, argnums=(0, 1, 2, 3), has_aux=True)

    args = (params, normal(5, T, 3, D), hx, reset_state)
    actual = jax.jit(loss(in_one))(*args)
    with jrnn.plain_scans():
        expected = by_numpy(loss(lambda *args: apart(call, *args, layout.directions)))(*args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12, rtol=1e-12), actual, expected
    )
    assert jax.tree.leaves(actual)[0].dtype == "float64"
    assert all(np.any(gradient) for gradient in jax.tree.leaves(actual[1][3]))


def close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), actual, expected)


@pytest.mark.exhaustive
def test_every_layout_and_piecewise_call_agrees():
    module = nn.GRU(D, H, num_layers=2, rngs=nnx.Rngs(0))
    turned = nn.GRU(D, H, num_layers=2, batch_first=True, rngs=nnx.Rngs(0))
    x, hx, fresh = normal(0, T, 3, D), normal(1, 2, 3, H), normal(2, 2, 3, H)
    lengths = [7, 6, 4]
    traced = []

    @jax.jit
    def run(resets):
        traced.append(1)
        return module(
            x, hx, lengths=lengths, resets=resets, reset_state=fresh, return_states="all+initial"
        )

    assert float(jnp.abs(run(RESETS)[0] - run(~RESETS)[0]).max()) > 0.01
    assert len(traced) == 1
    output, states = jax.device_get(run(RESETS))

    @jax.jit
    def others():
        given = {"lengths": lengths, "resets": RESETS, "reset_state": fresh}
        by_row = given | {"resets": RESETS.T}
        packed, _ = module(
            nn.pack_padded_sequence(x, lengths), hx, resets=RESETS, reset_state=fresh
        )
        return (
            turned(x.swapaxes(0, 1), hx, **by_row),
            nn.chunked(module, x, hx, size=3, **given),
            nn.chunked(turned, x.swapaxes(0, 1), hx, size=3, **by_row),
            nn.pad_packed_sequence(packed)[0],
            module(x[:, 0], hx[:, 0], resets=RESETS[:, 0], reset_state=fresh[:, 0]),
            module(x[:0], hx, resets=RESETS[:0]),
        )

    by_batch, by_chunk, turned_by_chunk, packed, alone, empty = jax.device_get(others())
    close((by_batch[0].swapaxes(0, 1), by_batch[1]), (output, states[-1]))
    close(by_chunk, (output, states[-1]))
    close(turned_by_chunk, by_batch)
    close(packed, output)
    close(alone, (output[:, 0], states[-1, :, 0]))
    close(empty, (output[:0], hx))
    state = hx
    step = jax.jit(module.step)
    for t in range(4):  # serving one step at a time
        state = np.where(RESETS[t][None, :, None], fresh, state)
        y, state = step(x[t], state)
        close((y, state), (output[t], states[t + 1]))


def test_a_state_goes_back_to_zeros_where_none_is_given():
    lstm = nn.LSTM(D, H, rngs=nnx.Rngs(0))
    x, (_, hx) = normal(0, T, 3, D), lstm(normal(1, T, 3, D))
    resets = np.zeros((T, 3), bool)
    resets[4] = True
    close(lstm(x, hx, resets=resets)[0], jnp.concatenate([lstm(x[:4], hx)[0], lstm(x[4:])[0]]))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"resets": np.zeros((T, 3))}, r"GRU: resets is float\d\d; it must be booleans"),
        (
            {"resets": RESETS[:-1]},
            r"GRU: resets is \[6, 3\]; it must be \[7, 3\], one for each step",
        ),
        (
            {"resets": RESETS, "reset_state": np.zeros((2, 3, H))},
            r"the state h of reset_state is \[2, 3, 3\] but must",
        ),
        (
            {"resets": RESETS, "reset_state": (0, 0)},
            r"reset_state must be one array \[1, 3, 3\], but is 2 values",
        ),
        (
            {"reset_state": np.zeros((1, 3, H))},
            "GRU: reset_state is given without resets; give resets too",
        ),
    ],
)
def test_what_does_not_fit_is_named(given, message):
    with pytest.raises(LayerError, match=message):
        nn.GRU(D, H, rngs=nnx.Rngs(0))(normal(0, T, 3, D), **given)
