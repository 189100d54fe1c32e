"""Programs of other libraries, plain and under `jrnn.optimize_scans()`: time, lowering, compilation, memory, difference.

    python -m venv world && world/bin/pip install . dynamax numpyro tinygp jaxley blackjax optax keras
    world/bin/python scripts/world.py [NAME ...]        # taskset -c 0 for one core

A line for each program, forward and with the gradient. Times are processor time, the least of some runs in turns. A library
that is not installed is left out. It exits with 1 if a program differs by more than 1e-3, or takes more than 1.15 of the
plain time.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jrnn

PROGRAMS: dict[str, Callable[[], tuple[Callable, Any]]] = {}
TURNS, SLOWER, APART = 9, 1.15, 1e-3


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
        found = lgssm_smoother(params, ys)
        return jnp.sum(found.smoothed_means) + jnp.sum(found.smoothed_covariances)

    return total, params


@program
def dynamax_em():
    model, params, props, ys = linear_gaussian()

    def likelihood(params: Any) -> Any:
        found, likelihoods = jax.vmap(lambda y: model.e_step(params, y))(ys[None])
        params, _ = model.m_step(params, props, found, model.initialize_m_step_state(params, props))
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
        a, sigma = numpyro.sample("a", dist.Normal(0, 1)), numpyro.sample("sigma", dist.HalfNormal(1))

        def transition(before: Any, _: Any) -> Any:
            now = numpyro.sample("y", dist.Normal(a * before[0] + 0.1 * before[1], sigma))
            return (now, before[0]), None

        with numpyro.handlers.condition(data={"y": y[2:]}):
            scan(transition, (y[1], y[0]), None, length=len(y) - 2)

    return lambda p: log_density(model, (y,), {}, p)[0], {"a": jnp.float32(0.5), "sigma": jnp.float32(1.0)}


@program
def tinygp_quasiseparable():
    from tinygp import GaussianProcess, kernels

    t = jnp.sort(jnp.asarray(np.random.default_rng(0).uniform(0, 10, 1000), jnp.float32))
    kernel = kernels.quasisep

    def likelihood(p: Any) -> Any:
        whole = kernel.Matern32(scale=p["scale"]) + kernel.SHO(omega=p["omega"], quality=p["quality"])
        return GaussianProcess(whole, t, diag=0.1).log_probability(jnp.sin(t))

    return likelihood, {"scale": jnp.float32(1.5), "omega": jnp.float32(2.0), "quality": jnp.float32(3.0)}


@program
def blackjax_hamiltonian():
    import blackjax

    kernel = blackjax.hmc(lambda x: -0.5 * jnp.sum(x**2 / jnp.arange(1.0, 5.0)), 0.2, jnp.ones(4), 8)
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


def compiled(fn: Callable, args: Any) -> tuple[Any, float, float]:
    start = time.process_time()
    lowered = jax.jit(fn).lower(args)
    middle = time.process_time()
    return lowered.compile(), middle - start, time.process_time() - middle


def measured(fn: Callable, args: Any) -> tuple[str, bool]:
    """Returns a line of ratios, marked over plain, and whether they are within the limits."""

    def again(args: Any) -> Any:
        return fn(args)

    plain, marked = compiled(fn, args), compiled(jrnn.optimize_scans(again), args)
    least = [float("inf")] * 2
    outs = [jax.tree.leaves(made[0](args)) for made in (plain, marked)]
    for _ in range(TURNS):
        for i, (made, *_) in enumerate((plain, marked)):
            start = time.process_time()
            jax.block_until_ready(made(args))
            least[i] = min(least[i], time.process_time() - start)
    apart = max(
        float(jnp.max(jnp.abs(a - b)) / (1e-30 + jnp.max(jnp.abs(a))))
        for a, b in zip(*outs)
        if a.size and a.dtype.kind == "f"
    )
    memory = [max(made[0].memory_analysis().temp_size_in_bytes, 1) for made in (plain, marked)]
    ratio = least[1] / least[0]
    text = (
        f"{least[0] * 1e3:8.3f} ms, marked {least[1] * 1e3:8.3f}: {ratio:.2f}; lowering {marked[1] / plain[1]:.1f}, "
        f"compilation {marked[2] / plain[2]:.1f}, memory {memory[1] / memory[0]:.2f}, difference {apart:.0e}"
    )
    return text, ratio <= SLOWER and apart <= APART


def main(names: list[str]) -> int:
    fine = True
    for name in names or PROGRAMS:
        try:
            fn, args = PROGRAMS[name]()
        except ImportError as error:
            print(f"{name:22} left out: {error}", flush=True)
            continue
        for mode, whole in (("forward", fn), ("gradient", jax.grad(fn))):
            text, within = measured(whole, args)
            fine &= within
            print(f"{name:22} {mode:8} {text}{'' if within else ' !!'}", flush=True)
    return not fine


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
