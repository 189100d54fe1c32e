"""A Kalman filter whose noises are learned by gradient, from noisy positions of things that move.

The filter is a scan over a mean and a covariance. The likelihood of each position under its own prediction is a
function of the two noises, so their gradient is all that is needed to find them.

    python examples/kalman.py --steps 200
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import jrnn

LENGTH, SEQUENCES = 100, 16
MOVE = jnp.array([[1.0, 1.0], [0.0, 1.0]])  # position and velocity, one step later
DRIVE = jnp.array(
    [[0.25, 0.5], [0.5, 1.0]]
)  # the covariance of a random acceleration during a step
TRUE = {"drive": jnp.float32(0.1), "noise": jnp.float32(2.0)}  # standard deviations


def sample(key, std):
    """The positions [T] and the measured ones [T] of one thing."""
    start, drive, noise = jax.random.split(key, 3)

    def step(state, push):
        state = MOVE @ state + jnp.array([0.5, 1.0]) * push
        return state, state[0]

    pushes = std["drive"] * jax.random.normal(drive, (LENGTH,))
    _, positions = jax.lax.scan(step, jax.random.normal(start, (2,)), pushes)
    return positions, positions + std["noise"] * jax.random.normal(noise, (LENGTH,))


def kalman(std, measured):
    """Filters one sequence [T]: the estimated positions [T] and the log-likelihood of each measurement [T]."""

    def step(state, z):
        mean, covariance = state
        mean, covariance = MOVE @ mean, MOVE @ covariance @ MOVE.T + std["drive"] ** 2 * DRIVE
        variance = covariance[0, 0] + std["noise"] ** 2  # of the measurement, as predicted
        surprise, gain = z - mean[0], covariance[:, 0] / variance
        mean, covariance = mean + gain * surprise, covariance - jnp.outer(gain, covariance[0])
        return (mean, covariance), (
            mean[0],
            -0.5 * (surprise**2 / variance + jnp.log(2 * jnp.pi * variance)),
        )

    return jrnn.scan(step, (jnp.zeros(2), 10 * jnp.eye(2)), measured)[1]


def train(steps, seed=0):
    """Returns the learned standard deviations, the losses, and the errors of the filter and of the raw measurements."""
    positions, measured = jax.vmap(lambda k: sample(k, TRUE))(
        jax.random.split(jax.random.key(seed), SEQUENCES)
    )
    logs = {
        "drive": jnp.float32(0.0),
        "noise": jnp.float32(0.0),
    }  # of the standard deviations, which are positive
    optimizer = optax.adam(0.05)

    def loss(logs):
        std = jax.tree.map(jnp.exp, logs)
        return -jnp.mean(jax.vmap(lambda z: kalman(std, z)[1])(measured))

    def update(carry, _):
        logs, opt_state = carry
        value, gradient = jax.value_and_grad(loss)(logs)
        change, opt_state = optimizer.update(gradient, opt_state)
        return (optax.apply_updates(logs, change), opt_state), value

    (logs, _), losses = jax.jit(lambda c: jax.lax.scan(update, c, None, length=steps))(
        (logs, optimizer.init(logs))
    )
    std = jax.tree.map(jnp.exp, logs)
    filtered = jax.vmap(lambda z: kalman(std, z)[0])(measured)
    errors = [float(jnp.sqrt(jnp.mean((x - positions) ** 2))) for x in (filtered, measured)]
    return std, losses, errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    std, losses, (filtered, raw) = train(args.steps)
    for name, value in std.items():
        print(f"{name}: learned {value:.3f}, true {TRUE[name]:.3f}")
    print(f"error of the position: {filtered:.2f} filtered, {raw:.2f} as measured")
