"""A neural ordinary differential equation: learns the motion of a damped pendulum from its path.

The solver is a scan of Runge-Kutta steps, so gradients go through it as through any loop. The learned field is then
followed three times as long as the paths that it has seen.

    python examples/neural_ode.py --steps 400
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import jrnn

STEP, SEEN, PATHS, HIDDEN = 0.1, 50, 32, 32


def pendulum(_, state):
    """Angle and speed, [..., 2], to their derivatives."""
    angle, speed = state[..., 0], state[..., 1]
    return jnp.stack([speed, -jnp.sin(angle) - 0.2 * speed], axis=-1)


def network(params, state):
    hidden = jnp.tanh(state @ params["in"] + params["bias"])
    return hidden @ params["out"]


def solve(field, params, start, steps):
    """The path from start [N, 2] by the classical method of order 4, [steps, N, 2]."""

    def step(state, _):
        a = field(params, state)
        b = field(params, state + STEP / 2 * a)
        c = field(params, state + STEP / 2 * b)
        d = field(params, state + STEP * c)
        state = state + STEP / 6 * (a + 2 * b + 2 * c + d)
        return state, state

    return jrnn.scan(step, start, None, length=steps)[1]


def init(key):
    a, b = jax.random.split(key)
    weights = {
        "in": jax.random.normal(a, (2, HIDDEN)),
        "out": 0.1 * jax.random.normal(b, (HIDDEN, 2)),
    }
    return weights | {"bias": jnp.zeros((1, HIDDEN))}


def train(steps, seed=0):
    """Returns the parameters, the losses, and the mean error of a path three times as long as those seen."""
    start_key, new_key, key = jax.random.split(jax.random.key(seed), 3)
    starts, new = (
        jax.random.uniform(k, (PATHS, 2), minval=-1.5, maxval=1.5) for k in (start_key, new_key)
    )
    paths = solve(pendulum, None, starts, SEEN)
    params = init(key)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, steps))

    def loss(params):
        return jnp.mean((solve(network, params, starts, SEEN) - paths) ** 2)

    def update(carry, _):
        params, opt_state = carry
        value, gradient = jax.value_and_grad(loss)(params)
        change, opt_state = optimizer.update(gradient, opt_state)
        return (optax.apply_updates(params, change), opt_state), value

    (params, _), losses = jax.jit(lambda c: jax.lax.scan(update, c, None, length=steps))(
        (params, optimizer.init(params))
    )
    error = jnp.abs(
        solve(network, params, new, 3 * SEEN) - solve(pendulum, None, new, 3 * SEEN)
    ).mean()
    return params, losses, float(error)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    _, losses, error = train(args.steps)
    print(
        f"loss {losses[0]:.4f} at first, {losses[-1]:.6f} at the end; error of new and longer paths {error:.4f}"
    )
