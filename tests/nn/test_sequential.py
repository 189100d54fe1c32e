"""A stack of layers, norms, convolutions and functions as one layer, against its parts called by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jrnn import nn
from jrnn.errors import LayerError
from jrnn.testing import check_layer

T, N, D = 7, 3, 4
RESETS = np.zeros((T, N), bool)
RESETS[[2, 5, 3, 6], [0, 0, 1, 2]] = True
MASK = np.ones((T, N), bool)
MASK[[0, 3, 6, 1], [0, 1, 1, 2]] = False
LENGTHS = np.array([7, 7, 5])
pytestmark = pytest.mark.usefixtures("little_optimization")


def made(**options):
    rngs, wide = nnx.Rngs(0), {"param_dtype": float}
    return nn.Sequential(
        nn.CausalConv(D, 6, kernel_size=3, rngs=rngs, **wide),
        nnx.LayerNorm(6, rngs=rngs, **wide),
        jax.nn.gelu,
        nn.LSTM(6, 5, num_layers=2, rngs=rngs, **wide),
        nnx.Linear(5, 6, rngs=rngs, **wide),
        nn.S5(6, 4, rngs=rngs, **wide),
        nnx.Dropout(0.5, deterministic=True),
        **options,
    )


def inputs(fill=0.0):
    live = MASK & (np.arange(T)[:, None] < LENGTHS)
    return np.where(
        live[..., None], np.random.RandomState(0).standard_normal((T, N, D)), fill
    ), live


def close(a, b, atol=1e-12):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=atol), a, b)


def by_hand(model, x):
    """The parts, one after the other, of sequences without padding."""
    conv, norm, act, lstm, linear, s5, _ = model.parts
    x, window = conv(x)
    x, (h, c) = lstm(act(norm(x)))
    x, state = s5(linear(x))
    return x, (window, tuple(jnp.moveaxis(leaf, 1, 0) for leaf in (h, c)), state)


def test_a_causal_convolution_reads_the_last_inputs(x64):
    layer, (x, _) = (
        nn.CausalConv(D, 5, kernel_size=3, rngs=nnx.Rngs(0), param_dtype=float),
        inputs(),
    )
    y, window = layer(x, resets=RESETS, lengths=LENGTHS)
    weight, bias = np.asarray(layer.weight[...]), np.asarray(layer.bias[...])
    for n in range(N):
        past = np.zeros((2, D))
        for t in range(LENGTHS[n]):
            past = np.zeros((2, D)) if RESETS[t, n] else past
            seen = np.concatenate([past, x[None, t, n]])
            close(y[t, n], np.einsum("pdk,kd->p", weight, seen) + bias)
            past = seen[1:]
        close(window[n], past)


def test_it_is_its_parts(x64):
    model, (x, _) = made(), inputs()
    close(model(x), by_hand(model, x))
    y, state = model(x[:, 0])
    again, _ = model(x[:, 0], state)
    whole, states = model(x)
    close((y, again), (whole[:, 0], model(x, states)[0][:, 0]))


@pytest.mark.sample("True")
@pytest.mark.parametrize("rough", [False, True])
def test_lengths_masks_and_resets_reach_all_parts(rough, x64):
    """The square root has an infinite derivative at 0 and is NaN below; what does not count reaches nothing."""
    model, (x, live) = made(), inputs(np.nan)
    options = {"lengths": LENGTHS, "mask": MASK, "resets": RESETS}
    if rough:
        model = nn.Sequential(
            jnp.sqrt, nn.GRU(D, 3, rngs=nnx.Rngs(0), param_dtype=float), jnp.square
        )
        x = np.abs(x)
    y, state = model(x, **options)
    assert not np.asarray(y)[~live].any()
    graph, params = nnx.split(model)

    def loss(params, x):
        y, state = nnx.merge(graph, params)(x, **options)
        return jnp.sum(jnp.sin(y)) + sum(jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(state))

    def alone(params, x):
        total = 0.0
        for n in range(N):
            kept = np.flatnonzero(live[:, n])
            starts = np.cumsum(RESETS[:, n])[kept]
            resets = np.diff(starts, prepend=0) > 0
            y, state = nnx.merge(graph, params)(x[kept, n], resets=resets)
            total += jnp.sum(jnp.sin(y)) + sum(
                jnp.sum(jnp.abs(leaf)) for leaf in jax.tree.leaves(state)
            )
        return total

    assert (RESETS & ~live)[6, 2]  # past the end of the last sequence, where it has no effect
    (value, gradients), (wanted, slopes) = (
        jax.value_and_grad(f, (0, 1))(params, x) for f in (loss, alone)
    )
    close(value, wanted)
    close(jax.tree.leaves(gradients), jax.tree.leaves(slopes))


def test_pieces_steps_and_compiled_steps_are_the_whole(x64):
    model, (x, live) = made(), inputs(np.nan)
    resets = RESETS & live
    whole, last = model(x, mask=live, resets=resets)
    first, state = model(x[:3], mask=live[:3], resets=resets[:3])
    close(np.concatenate([first, model(x[3:], state, mask=live[3:], resets=resets[3:])[0]]), whole)
    compiled = nn.compiled_step(model)
    for step in (model.step, compiled):
        state, ys = model.initial_state(N), []
        for t in range(T):
            y, state = step(x[t], state, resets=resets[t], mask=live[t])
            ys.append(y)
        close((np.stack(ys), state), (whole, last))
    y, state = model.step(x[1, 0])
    close(y, model.step(x[1])[0][0])


def test_times_noise_and_layouts(x64):
    model, (x, _) = made(batch_first=True), inputs()
    dt = np.random.RandomState(1).uniform(0, 2, (T, N))
    y, state = model(x.swapaxes(0, 1), dt=dt.T, mask=MASK.T)
    time_first = made()
    close(y.swapaxes(0, 1), time_first(x, dt=dt, mask=MASK)[0])
    assert np.abs(time_first(x, dt=dt)[0] - time_first(x)[0]).max() > 1e-3
    nested = nn.Sequential(
        nn.Sequential(*time_first.parts[:3]), nn.Sequential(*time_first.parts[3:])
    )
    close(nested(x, dt=dt)[0], time_first(x, dt=dt)[0])
    noisy = nn.Sequential(
        nn.GRU(D, 4, 2, dropout=0.5, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    )
    draws = [noisy(x, rngs=nnx.Rngs(dropout=k))[0] for k in (3, 3, 4)]
    close(draws[0], draws[1])
    assert np.abs(draws[0] - draws[2]).max() > 0.01
    close(noisy.step(x[0])[0], nnx.view(noisy, deterministic=True)(x[:1])[0][0])


@pytest.mark.exhaustive
def test_it_conforms():
    rngs = nnx.Rngs(0)
    parts = nn.CausalConv(2, 3, 2, rngs=rngs), nnx.LayerNorm(3, rngs=rngs), nn.GRU(3, 2, rngs=rngs)
    x = np.random.RandomState(0).standard_normal((3, 3, 2)).astype(np.float32)
    report = check_layer(nn.Sequential(*parts), x)
    assert {f.property for f in report.findings} <= {"dtype"}, report


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nn.Sequential(nn.GRU), "part 0 is .*; a part is a layer, a module or a function"),
        (
            lambda: nn.Sequential(nn.GRU(2, 3, batch_first=True, rngs=nnx.Rngs(0))),
            "part 0 has batch_first=True; give it to Sequential, and to no part",
        ),
        (
            lambda: nn.Sequential(nn.GRU(2, 3, rngs=nnx.Rngs(0)))(
                np.ones((2, 1, 2)), np.ones((1, 1, 3))
            ),
            "the state is a .* but must be a tuple of 1, as initial_state",
        ),
        (
            lambda: nn.Sequential(nn.GRU(2, 3, rngs=nnx.Rngs(0)))(
                np.ones((2, 1, 2)), dt=np.ones((2, 1))
            ),
            "dt is given, but no part has a time between steps",
        ),
        (
            lambda: nn.Sequential(nn.GRU(2, 3, bidirectional=True, rngs=nnx.Rngs(0))).step(
                np.ones((1, 2))
            ),
            "a bidirectional stack needs the whole sequence",
        ),
        (
            lambda: nn.Sequential(jnp.tanh)(np.ones((2, 1, 2)), mask=np.ones((2, 2), bool)),
            r"mask is \[2, 2\]; it must be",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(LayerError, match=message):
        call()
