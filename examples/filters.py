"""A filter of audio that is learned from its output, and the advantages of a rollout: loops whose step takes nanoseconds.

A second of sound has 16,000 samples or more, and a rollout thousands of steps. A step is a few multiplications, so a loop
waits for its own trips more than for its arithmetic. `jrnn.scan` runs several steps in one trip, without an option.

    python examples/filters.py --steps 200
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import jrnn

SAMPLES = 16_000
TRUE = jnp.array([0.2, 0.3, 0.1, -1.6, 0.8])  # b0, b1, b2, a1, a2


def biquad(coefficients, signal):
    """A filter of order 2 in the transposed direct form II, signal [T] -> [T]."""
    b0, b1, b2, a1, a2 = coefficients

    def step(delays, x):
        y = b0 * x + delays[0]
        return (b1 * x - a1 * y + delays[1], b2 * x - a2 * y), y

    return jrnn.scan(step, (jnp.float32(0), jnp.float32(0)), signal)[1]


def advantages(rewards, values, last_value, done, discount=0.99, decay=0.95):
    """Generalized advantage estimation, rewards, values and done [T] -> [T]. Episodes end where `done` is 1."""
    following = jnp.concatenate([values[1:], last_value[None]])
    goes_on = discount * (1 - done)

    def step(later, x):
        error, factor = x
        now = error + factor * decay * later
        return now, now

    errors = rewards + goes_on * following - values
    return jrnn.scan(step, jnp.float32(0), (errors, goes_on), reverse=True)[1]


def learn(steps):
    """Learns the coefficients of a filter from noise that it filtered. Returns them and the losses."""
    noise = jax.random.normal(jax.random.key(0), (SAMPLES,))
    wanted = biquad(TRUE, noise)
    optimizer = optax.adam(optax.exponential_decay(0.05, steps, 0.05))

    def loss(coefficients):
        return jnp.mean((biquad(coefficients, noise) - wanted) ** 2)

    @jax.jit
    def update(coefficients, state):
        value, gradient = jax.value_and_grad(loss)(coefficients)
        change, state = optimizer.update(gradient, state)
        return optax.apply_updates(coefficients, change), state, value

    coefficients = jnp.array([0.5, 0.0, 0.0, -0.8, 0.3])
    state, losses = optimizer.init(coefficients), []
    for _ in range(steps):
        coefficients, state, value = update(coefficients, state)
        losses.append(float(value))
    return coefficients, losses


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    coefficients, losses = learn(parser.parse_args().steps)
    print("coefficients", *(f"{c:.3f}" for c in coefficients), "of", *(f"{c:.3f}" for c in TRUE))
    print(f"mean squared error {losses[0]:.3f} -> {losses[-1]:.2e}")
    reward, done = jnp.ones(4096), (jnp.arange(4096) % 100 == 99).astype(jnp.float32)
    print("advantages", advantages(reward, jnp.zeros(4096), jnp.float32(0), done)[:3])
    print(jrnn.explain(biquad, TRUE, jnp.zeros(SAMPLES)))


if __name__ == "__main__":
    main()
