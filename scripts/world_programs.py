"""Programs of other libraries, which scripts/world.py measures: each function returns a function and its argument.

A program with a gradient returns a scalar. Those in `NO_GRADIENT` return samples or states.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PROGRAMS: dict[str, Callable[[], tuple[Callable, Any]]] = {}
NO_GRADIENT, DOUBLE = ("gymnax_rollout",), ("jnkepler_planets",)


def program(fn: Callable) -> Callable:
    PROGRAMS[fn.__name__] = fn
    return fn


def linear_gaussian(steps: int = 300) -> tuple[Any, Any, Any, Any]:
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM

    model = LinearGaussianSSM(4, 2)
    params, props = model.initialize(jax.random.key(0), dynamics_weights=0.9 * jnp.eye(4) + 0.02)
    return model, params, props, model.sample(params, jax.random.key(1), steps)[1]


@program
def dynamax_filter():
    from dynamax.linear_gaussian_ssm import lgssm_filter

    _, params, _, ys = linear_gaussian()
    return lambda params: lgssm_filter(params, ys).marginal_loglik, params


@program
def dynamax_smoother():
    from dynamax.linear_gaussian_ssm import lgssm_smoother

    _, params, _, ys = linear_gaussian()

    def total(params: Any) -> Any:
        posterior = lgssm_smoother(params, ys)
        return jnp.sum(posterior.smoothed_means) + jnp.sum(posterior.smoothed_covariances)

    return total, params


@program
def dynamax_em():
    model, params, props, ys = linear_gaussian()

    def likelihood(params: Any) -> Any:
        posterior, likelihoods = jax.vmap(lambda y: model.e_step(params, y))(ys[None])
        params, _ = model.m_step(
            params, props, posterior, model.initialize_m_step_state(params, props)
        )
        return jnp.sum(likelihoods) + sum(jnp.sum(v) for v in jax.tree.leaves(params))

    return likelihood, params


@program
def dynamax_markov():
    from dynamax.hidden_markov_model import GaussianHMM

    model = GaussianHMM(num_states=5, emission_dim=2)
    params, _ = model.initialize(jax.random.PRNGKey(0), method="prior")
    data = jax.random.normal(jax.random.PRNGKey(1), (300, 2))
    return lambda params: model.marginal_log_prob(params, data), params


@program
def dynamax_extended():
    return nonlinear("extended_kalman_filter")


@program
def dynamax_unscented():
    return nonlinear("unscented_kalman_filter")


def nonlinear(name: str) -> tuple[Callable, Any]:
    """A pendulum that is seen through a sine."""
    from dynamax import nonlinear_gaussian_ssm as ssm

    def dynamics(z: Any) -> Any:
        return jnp.array([z[0] + 0.02 * z[1], z[1] - 0.2 * jnp.sin(z[0])])

    params = ssm.ParamsNLGSSM(
        initial_mean=jnp.ones(2),
        initial_covariance=0.1 * jnp.eye(2),
        dynamics_function=dynamics,
        dynamics_covariance=0.01 * jnp.eye(2),
        emission_function=lambda z: jnp.array([jnp.sin(z[0])]),
        emission_covariance=0.1 * jnp.eye(1),
    )
    more = (ssm.UKFHyperParams(),) if name.startswith("unscented") else ()
    ys = jnp.asarray(np.random.default_rng(0).normal(size=(300, 1)), jnp.float32)
    return lambda ys: getattr(ssm, name)(params, ys, *more).marginal_loglik, ys


@program
def numpyro_series():
    import numpyro
    import numpyro.distributions as dist
    from numpyro.contrib.control_flow import scan
    from numpyro.infer.util import log_density

    y = jnp.asarray(np.cumsum(np.random.default_rng(0).normal(size=2000)) / 5, jnp.float32)

    def model(y: Any) -> None:
        a, sigma = (
            numpyro.sample("a", dist.Normal(0, 1)),
            numpyro.sample("sigma", dist.HalfNormal(1)),
        )

        def transition(before: Any, _: Any) -> Any:
            now = numpyro.sample("y", dist.Normal(a * before[0] + 0.1 * before[1], sigma))
            return (now, before[0]), None

        with numpyro.handlers.condition(data={"y": y[2:]}):
            scan(transition, (y[1], y[0]), None, length=len(y) - 2)

    return lambda p: log_density(model, (y,), {}, p)[0], {
        "a": jnp.float32(0.5),
        "sigma": jnp.float32(1.0),
    }


@program
def tinygp_quasiseparable():
    from tinygp import GaussianProcess, kernels

    t = jnp.sort(jnp.asarray(np.random.default_rng(0).uniform(0, 10, 1000), jnp.float32))
    kernel = kernels.quasisep

    def likelihood(p: Any) -> Any:
        whole = kernel.Matern32(scale=p["scale"]) + kernel.SHO(
            omega=p["omega"], quality=p["quality"]
        )
        return GaussianProcess(whole, t, diag=0.1).log_probability(jnp.sin(t))

    return likelihood, {
        "scale": jnp.float32(1.5),
        "omega": jnp.float32(2.0),
        "quality": jnp.float32(3.0),
    }


@program
def blackjax_hamiltonian():
    import blackjax

    kernel = blackjax.hmc(
        lambda x: -0.5 * jnp.sum(x**2 / jnp.arange(1.0, 5.0)), 0.2, jnp.ones(4), 8
    )
    keys = jax.random.split(jax.random.key(0), 300)

    def total(start: Any) -> Any:
        def step(state: Any, key: Any) -> Any:
            state, _ = kernel.step(key, state)
            return state, state.position

        return jnp.sum(jax.lax.scan(step, kernel.init(start), keys)[1])

    return total, jnp.zeros(4)


@program
def jaxley_cell():
    import jaxley as jx
    from jaxley.channels import HH

    cell = jx.Cell([jx.Branch(jx.Compartment(), ncomp=2)] * 3, parents=[-1, 0, 0])
    cell.insert(HH())
    cell.branch(0).loc(0.0).record(verbose=False)
    cell.branch(0).loc(0.0).stimulate(jx.step_current(1.0, 2.0, 0.3, 0.025, 10.0), verbose=False)
    cell.make_trainable("HH_gNa", verbose=False)
    params = cell.get_parameters()
    return lambda params: jnp.sum(jx.integrate(cell, params=params, delta_t=0.025)), params


@program
def keras_lstm():
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    layer = keras.layers.LSTM(128, return_sequences=True)
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(32, 100, 128)), jnp.float32)  # [N, T, D]
    layer.build(xs.shape)
    fixed = [v.value for v in layer.non_trainable_variables]
    return lambda weights: jnp.mean(layer.stateless_call(weights, fixed, xs)[0] ** 2), [
        v.value for v in layer.trainable_variables
    ]


@program
def optax_ctc():
    import optax

    labels = jnp.asarray(np.random.default_rng(0).integers(1, 8, (4, 20)))
    none = jnp.zeros((4, 100)), jnp.zeros((4, 20))
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 100, 8)), jnp.float32)
    return lambda logits: jnp.sum(optax.ctc_loss(logits, none[0], labels, none[1])), logits


@program
def numpyro_markov():
    """The forward algorithm of a hidden Markov model of 3 states over 500 words, with numpyro's distributions."""
    import numpyro.distributions as dist

    words = jnp.asarray(np.random.default_rng(0).integers(0, 10, 500))

    def density(p: Any) -> Any:
        moves, emits = dist.Categorical(logits=p["moves"]), dist.Categorical(logits=p["emits"])

        def step(alpha: Any, word: Any) -> Any:
            reached = jax.nn.logsumexp(alpha[:, None] + jax.nn.log_softmax(moves.logits), axis=0)
            return reached + emits.log_prob(word), None

        alpha = jax.lax.scan(step, emits.log_prob(words[0]) - jnp.log(3.0), words[1:])[0]
        return jax.nn.logsumexp(alpha)

    return density, {
        "moves": jnp.eye(3),
        "emits": jnp.asarray(np.random.default_rng(1).normal(size=(3, 10)), jnp.float32),
    }


def square_root_filter() -> tuple[Any, Any]:
    """A function that builds a filter of cuthbert, and its parameters."""
    from cuthbert.gaussian import kalman

    rng = np.random.default_rng(0)
    ys = jnp.asarray(rng.normal(size=(301, 2)), jnp.float32)
    seen = jnp.eye(2, 4)

    def built(p: Any) -> Any:
        return kalman.build_filter(
            jnp.zeros(4),
            jnp.eye(4),
            lambda t: (p["transition"], jnp.zeros(4), p["noise"] * jnp.eye(4)),
            lambda t: (seen, jnp.zeros(2), jnp.eye(2), ys[t]),
        )

    return built, {"transition": 0.9 * jnp.eye(4) + 0.02, "noise": jnp.float32(0.5)}


@program
def cuthbert_filter():
    import cuthbert

    built, params = square_root_filter()

    def likelihood(p: Any) -> Any:
        model = built(p)
        states = cuthbert.filter(model, jnp.arange(1, 301), model.init_prepare())
        return states.log_normalizing_constant[-1]

    return likelihood, params


@program
def cuthbert_smoother():
    import cuthbert
    from cuthbert.gaussian import kalman

    built, params = square_root_filter()

    def total(p: Any) -> Any:
        model = built(p)
        smoother = kalman.build_smoother(
            lambda t: (p["transition"], jnp.zeros(4), p["noise"] * jnp.eye(4))
        )
        states = cuthbert.filter(model, jnp.arange(1, 301), model.init_prepare())
        return jnp.sum(cuthbert.smoother(smoother, states, None).mean ** 2)

    return total, params


@program
def probdiffeq_grid():
    """Lotka and Volterra's equations on a fixed grid of 200 points, by a filter."""
    from probdiffeq import ivpsolve, probdiffeq

    rule = probdiffeq.ode(
        lambda u, *, t: jnp.stack(
            [0.5 * u[0] - 0.05 * u[0] * u[1], -0.5 * u[1] + 0.05 * u[0] * u[1]]
        )
    )
    expand = probdiffeq.jetexpand_ode_padded_scan(num=2)
    grid = jnp.linspace(0.0, 10.0, 200)

    def last(u: Any) -> Any:
        coefficients, _ = expand(rule, (u,), t=0.0)
        model = probdiffeq.state_space_model_dense()
        prior = model.prior_wiener_integrated(coefficients)
        solver = probdiffeq.solver_mle(
            strategy=probdiffeq.strategy_filter(), constraint=model.constraint_ode_ts0(rule)
        )
        solution = ivpsolve.solve_fixed_grid(solver=solver)(prior, grid=grid)
        return jnp.sum(jax.tree.leaves(solution.u.mean)[0])

    return last, jnp.array([20.0, 20.0])


@program
def pyhgf_filter():
    """A hierarchical Gaussian filter of three levels over 300 observations: a carry of many scalars."""
    from pyhgf.model import HGF

    model = HGF(
        n_levels=3,
        model_type="continuous",
        initial_mean={"1": 1.0, "2": 0.0, "3": 0.0},
        initial_precision={"1": 1e4, "2": 1e1, "3": 1e1},
        tonic_volatility={"1": -13.0, "2": -2.0, "3": -2.0},
        volatility_coupling={"1": 1.0, "2": 1.0},
    ).create_belief_propagation_fn()
    data = jnp.asarray(1 + 0.02 * np.random.default_rng(0).normal(size=(300, 1)), jnp.float32)
    inputs = data, jnp.ones((300, 1)), jnp.ones((300, 1), int)
    start = jax.tree.map(
        lambda a: jnp.float32(a) if isinstance(a, float) else jnp.asarray(a), model.attributes
    )

    def surprise(tonic: Any) -> Any:
        nodes = {k: dict(v) for k, v in start.items()}
        for node in (1, 2):
            nodes[node]["tonic_volatility"] = tonic[node - 1]
        _, path = jax.lax.scan(model.scan_fn, nodes, inputs)
        return 1e4 * jnp.mean((data[:, 0] - path[1]["expected_mean"]) ** 2)

    return surprise, jnp.array([-8.0, -2.0])


@program
def jnkepler_planets():
    """Three planets by a symplectic integrator with a checkpoint in its step, 300 steps, float64."""
    from jnkepler.jaxttv.symplectic import integrate_xv

    at = jnp.array([[0.1, 0.0, 0.0], [0.0, 0.16, 0.0], [-0.25, 0.0, 0.01]])
    speed = jnp.array([[0.0, 0.054, 0.0], [-0.043, 0.0, 0.0], [0.0, -0.034, 0.0]])
    times = jnp.arange(0.0, 90.0, 0.3)
    return lambda masses: jnp.sum(integrate_xv(at, speed, masses, times)[1] ** 2), jnp.array(
        [1.0, 3e-5, 4e-5, 3e-5]
    )


@program
def spyx_spikes():
    """Two layers of leaky neurons with a surrogate gradient, 100 steps of 16 sequences."""
    import spyx.nn as snn
    from flax import nnx

    rngs = nnx.Rngs(0)
    layers = (
        nnx.Linear(64, 64, rngs=rngs),
        snn.LIF((64,), rngs=rngs),
        nnx.Linear(64, 10, rngs=rngs),
        snn.LI((10,), rngs=rngs),
    )
    graph, params, rest = nnx.split(snn.Sequential(*layers), nnx.Param, ...)
    xs = (jax.random.uniform(jax.random.key(0), (100, 16, 64)) > 0.7) * 1.0  # [T, N, D]
    return lambda params: jnp.mean(snn.run(nnx.merge(graph, params, rest), xs)[0] ** 2), params


@program
def gymnax_rollout():
    """500 steps of a pole on a cart by a small policy."""
    import gymnax

    env, env_params = gymnax.make("CartPole-v1")
    keys = jax.random.split(jax.random.key(0), 500)

    def rollout(policy: Any) -> Any:
        seen, state = env.reset(jax.random.key(1), env_params)

        def step(carry: Any, key: Any) -> Any:
            seen, state = carry
            action = jnp.argmax(jnp.tanh(seen @ policy["in"]) @ policy["out"])
            seen, state, reward, *_ = env.step(key, state, action, env_params)
            return (seen, state), (seen, reward)

        return jax.lax.scan(step, (seen, state), keys)[1]

    rng = np.random.default_rng(0)
    return rollout, {
        "in": jnp.asarray(rng.normal(size=(4, 16)), jnp.float32),
        "out": jnp.asarray(rng.normal(size=(16, 2)), jnp.float32),
    }


@program
def distrax_markov():
    import distrax

    data = jnp.asarray(np.random.default_rng(0).normal(size=300), jnp.float32)

    def likelihood(p: Any) -> Any:
        model = distrax.HMM(
            distrax.Categorical(logits=p["start"]),
            distrax.Categorical(logits=p["moves"]),
            distrax.Normal(p["means"], jnp.ones(4)),
        )
        return model.forward_backward(data)[3]

    return likelihood, {"start": jnp.zeros(4), "moves": jnp.eye(4), "means": jnp.arange(4.0)}


@program
def flax_lstm():
    from flax import linen

    rnn = linen.RNN(linen.OptimizedLSTMCell(64))
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(32, 50, 64)), jnp.float32)  # [N, T, D]
    return lambda params: jnp.mean(rnn.apply(params, xs) ** 2), rnn.init(jax.random.key(0), xs)


@program
def haiku_lstm():
    import haiku

    def net(xs: Any) -> Any:
        core = haiku.LSTM(64)
        return jnp.mean(haiku.dynamic_unroll(core, xs, core.initial_state(32))[0] ** 2)

    model = haiku.without_apply_rng(haiku.transform(net))
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(50, 32, 64)), jnp.float32)  # [T, N, D]
    return lambda params: model.apply(params, xs), model.init(jax.random.key(0), xs)


@program
def diffrax_orbit():
    """A pendulum by Tsit5 with fixed steps, and checkpoints for its gradient."""
    import diffrax

    term = diffrax.ODETerm(lambda t, y, args: jnp.stack([y[1], -args * jnp.sin(y[0])]))

    def last(gravity: Any) -> Any:
        solution = diffrax.diffeqsolve(
            term, diffrax.Tsit5(), 0.0, 10.0, 0.05, jnp.array([1.0, 0.0]), gravity, max_steps=256
        )
        return jnp.sum(solution.ys)

    return last, jnp.float32(9.8)
