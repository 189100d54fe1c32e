"""Layers in continuous time with a time between steps, against loops of numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jrnn
from jrnn import nn
from jrnn.errors import LayerError

T, N, D = 6, 3, 4
LENGTHS = np.array([6, 0, 4])
RESETS = np.zeros((T, N), bool)
RESETS[[2, 3], [0, 2]] = True
pytestmark = pytest.mark.usefixtures("little_compilation")


def decay(p, h, x, dt):
    """A leaky integrator that decays while nothing is observed."""
    h = jnp.exp(-dt[:, None] * p["rate"][None]) * h + x
    return h, jnp.tanh(h)


def decaying(**options):
    start = {"rate": np.linspace(0.2, 1.0, D)}
    return nn.Recurrent(decay, D, lambda n: jnp.zeros((n, D), float), start, **options)


LAYERS = {
    "LRU": lambda **o: nn.LRU(D, 5, param_dtype=float, **o),
    "S5": lambda **o: nn.S5(D, 5, dt_min=0.1, dt_max=1.0, param_dtype=float, **o),
    "Mamba": lambda **o: nn.Mamba(D, 6, state_size=3, param_dtype=float, **o),
    "Mamba2": lambda **o: nn.Mamba2(D, 6, num_heads=2, state_size=3, param_dtype=float, **o),
    "Recurrent": decaying,
}


def given(name):
    layer, random = LAYERS[name](rngs=nnx.Rngs(0)), np.random.RandomState(0)
    params = {
        n: np.asarray(v) + 0.1 * random.standard_normal(v.shape) for n, v in layer.params().items()
    }
    layer.load(params)
    return layer, params, random.standard_normal((T, N, D)), random.uniform(0.0, 3.0, (T, N))


def lru(p, h, x, dt):
    rate = -np.exp(p["nu_log"]) + 1j * np.exp(p["theta_log"])
    u = np.exp(p["gamma_log"]) * (x @ (p["B_re"] + 1j * p["B_im"]).T)
    h = np.exp(rate * dt) * h + (np.exp(rate * dt) - 1) / (np.exp(rate) - 1) * u
    return h, (h @ (p["C_re"] + 1j * p["C_im"]).T).real + p["D"] * x


def s5(p, h, x, dt):
    poles, step = (
        np.minimum(p["Lambda_re"], -1e-4) + 1j * p["Lambda_im"],
        np.exp(p["log_step"]) * dt,
    )
    h = np.exp(poles * step) * h + (np.exp(poles * step) - 1) / poles * (
        x @ (p["B_re"] + 1j * p["B_im"]).T
    )
    return h, 2 * (h @ (p["C_re"] + 1j * p["C_im"]).T).real + p["D"] * x


def integrator(p, h, x, dt):
    h = np.exp(-dt * p["rate"]) * h + x
    return h, np.tanh(h)


def silu(x):
    return x / (1 + np.exp(-x))


def mamba(p, state, x, dt):
    window, h = state
    x, gate = np.split(p["in_proj"] @ x, 2)
    window = np.concatenate([window, x[None]])
    x = silu((window * p["conv_weight"].T).sum(0) + p["conv_bias"])
    own, b, c = np.split(p["x_proj"] @ x, [1, 4])
    own = np.log1p(np.exp(p["dt_proj"] @ own + p["dt_bias"])) * dt
    h = np.exp(-own[:, None] * np.exp(p["A_log"])) * h + (own * x)[:, None] * b
    return (window[1:], h), p["out_proj"] @ ((h @ c + p["D"] * x) * silu(gate))


def mamba2(p, state, x, dt):
    window, S = state
    gate, xbc, own = np.split(p["in_proj"] @ x, [6, 18])
    window = np.concatenate([window, xbc[None]])
    x, b, c = np.split(silu((window * p["conv_weight"].T).sum(0) + p["conv_bias"]), [6, 9])
    own, x = np.log1p(np.exp(own + p["dt_bias"])) * dt, x.reshape(2, 3)
    S = (
        np.exp(-own * np.exp(p["A_log"]))[:, None, None] * S
        + own[:, None, None] * b[:, None] * x[:, None]
    )
    y = (np.einsum("s,ksp->kp", c, S) + p["D"][:, None] * x).reshape(6) * silu(gate)
    return (window[1:], S), p["out_proj"] @ (y / np.sqrt((y * y).mean() + 1e-5) * p["norm"])


STEPS = {"LRU": lru, "S5": s5, "Mamba": mamba, "Mamba2": mamba2, "Recurrent": integrator}


def loop(name, layer, params, x, dt):
    """The outputs of each row and its last state, step by step."""
    ys, ends = np.zeros((T, N, D)), []
    for n in range(N):
        fresh = jax.tree.map(lambda leaf, n=n: np.asarray(leaf[n]), layer.initial_state(N))
        state = fresh
        for t in range(LENGTHS[n]):
            state, ys[t, n] = STEPS[name](
                params, fresh if RESETS[t, n] else state, x[t, n], dt[t, n]
            )
        ends.append(state)
    return ys, jax.tree.map(lambda *leaves: np.stack(leaves), *ends)


def close(a, b, atol=1e-12):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=atol), a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_steps_have_their_own_times(name, x64):
    layer, params, x, dt = given(name)
    filler = np.where(
        np.arange(T)[:, None] < LENGTHS, dt, np.nan
    )  # the times of padding do not matter
    y, last = layer(x, lengths=LENGTHS, resets=RESETS, dt=filler)
    close((y, last), loop(name, layer, params, x, dt))
    steps, state = [], layer.initial_state(N)
    for t in range(T):
        y_t, state = layer.step(x[t], state, resets=RESETS[t], mask=t < LENGTHS, dt=dt[t])
        steps.append(y_t)
    close((np.stack(steps), state), (y, last))
    mask = np.ones((T, N), bool)
    mask[[1, 4]] = False
    _, holes = layer(x, mask=mask, dt=np.where(mask, dt, np.nan))
    close(holes, layer(x[mask[:, 0]], dt=dt[mask[:, 0]])[1])


@pytest.mark.parametrize("name", ["LRU", "S5", "Mamba", "Recurrent"])
def test_times_are_solved_in_parallel(name, x64):
    layer, params, x, dt = given(name)
    parallel = LAYERS[name](rngs=nnx.Rngs(0), executor="associative")
    parallel.load(params)
    options = {"dt": dt, "lengths": LENGTHS, "resets": RESETS}
    close(parallel(x, **options), layer(x, **options))
    explained = jrnn.explain(lambda x, dt: parallel.apply(params, x, dt=dt), x, dt)
    assert "on cpu: associative" in str(explained)


@pytest.mark.parametrize("name", LAYERS)
def test_a_time_of_one_is_a_step(name, x64):
    layer, _, x, _ = given(name)
    if name == "Recurrent":
        return close(layer(x, dt=np.ones((T, N)))[0][0], np.tanh(x[0]))
    close(layer(x, dt=np.ones((T, N))), layer(x))


@pytest.mark.parametrize("name", ["LRU", "S5"])
def test_an_input_that_stays_is_one_step_of_its_time(name, x64):
    layer, _, x, _ = given(name)
    _, three = layer(np.repeat(x[:1], 3, 0))
    _, one = layer(x[:1], dt=np.full((1, N), 3.0))
    close(one, three)


def test_gradients_of_the_times_are_differences(x64):
    for name in LAYERS:
        layer, params, x, dt = given(name)
        direction = np.random.RandomState(1).standard_normal((T, N))
        f = jax.jit(
            lambda dt, layer=layer, params=params, x=x: jnp.sum(
                jnp.sin(layer.apply(params, x, resets=RESETS, dt=dt)[0])
            )
        )
        slope = np.vdot(jax.grad(f)(dt), direction)
        np.testing.assert_allclose(
            slope, (f(dt + 1e-6 * direction) - f(dt - 1e-6 * direction)) / 2e-6, rtol=1e-6
        )


def test_what_does_not_fit_is_named():
    x = np.zeros((T, N, D))
    with pytest.raises(
        LayerError, match="MinGRU: dt is given, but this layer has no time between steps; give LRU"
    ):
        nn.MinGRU(D, rngs=nnx.Rngs(0))(x, dt=np.ones((T, N)))
    layer = nn.S5(D, rngs=nnx.Rngs(0))
    with pytest.raises(
        LayerError,
        match=r"S5: dt is float\d\d\[6\]; it must be numbers \[6, 3\], one for each step",
    ):
        layer(x, dt=np.ones(T))
    with pytest.raises(
        LayerError, match=r"S5: dt has a value of -1.0; the time since the last step is at least 0"
    ):
        layer(x, dt=-np.ones((T, N)))
    own = nn.Recurrent(lambda p, h, x: (h, x), D, lambda n: jnp.zeros((n, 1)), {}, rngs=nnx.Rngs(0))
    with pytest.raises(
        LayerError, match="Recurrent: dt is given, but .* a Recurrent whose step takes it"
    ):
        own(x, dt=np.ones((T, N)))
    with pytest.raises(TypeError, match="dt"):
        decaying(rngs=nnx.Rngs(0))(x)
