"""A hidden Markov model learned by gradient: the forward algorithm is a scan, and its gradient is the backward
algorithm.

The log-likelihood of a sequence is a scan over log-sums. Its gradient with respect to the scores of the emissions is
the probability of each state at each step, so no second pass is written by hand.

    python examples/hmm.py --steps 300
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import jrnn

STATES, SYMBOLS, LENGTH, SEQUENCES = 3, 6, 60, 32


def truth():
    """Three states that last about ten steps each; each prefers two symbols of its own."""
    stay = 0.9 * jnp.eye(STATES) + 0.05 * (1 - jnp.eye(STATES))
    show = jnp.repeat(0.45 * jnp.eye(STATES) + 0.025 * (1 - jnp.eye(STATES)), 2, axis=1)
    return {
        "first": jnp.log(jnp.full(STATES, 1 / STATES)),
        "stay": jnp.log(stay),
        "show": jnp.log(show),
    }


def sample(params, key):
    """States and symbols of one sequence, [LENGTH] each."""

    def step(state, key):
        move, show = jax.random.split(key)
        symbol = jax.random.categorical(show, params["show"][state])
        return jax.random.categorical(move, params["stay"][state]), (state, symbol)

    first, key = jax.random.split(key)
    state = jax.random.categorical(first, params["first"])
    return jax.lax.scan(step, state, jax.random.split(key, LENGTH))[1]


def normalized(params):
    return {name: jax.nn.log_softmax(value, axis=-1) for name, value in params.items()}


def log_likelihood(params, scores):
    """Of the log-probability of each symbol in each state, scores [T, N, K] -> [N]."""

    def step(alpha, score):
        alpha = jax.nn.logsumexp(alpha[:, :, None] + params["stay"][None], axis=1) + score
        return alpha, None

    alpha = params["first"][None] + scores[0]
    return jax.nn.logsumexp(jrnn.scan(step, alpha, scores[1:])[0], axis=-1)


def scores_of(params, symbols):
    """Symbols [T, N] -> [T, N, K]."""
    return params["show"].T[symbols]


def posterior(params, symbols):
    """The probability of each state at each step, [T, N, K]: a gradient."""
    params = normalized(params)
    return jax.grad(lambda scores: log_likelihood(params, scores).sum())(scores_of(params, symbols))


def train(steps, seed=0):
    """Returns the learned parameters, the losses in nats a symbol, the true model's loss, and the states and symbols."""
    data_key, key = jax.random.split(jax.random.key(seed))
    states, symbols = jax.vmap(lambda k: sample(truth(), k), out_axes=1)(
        jax.random.split(data_key, SEQUENCES)
    )
    keys = jax.random.split(key, 3)
    shapes = {"first": (STATES,), "stay": (STATES, STATES), "show": (STATES, SYMBOLS)}
    params = {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items())}
    optimizer = optax.adam(0.1)

    def loss(params):
        params = normalized(params)
        return -jnp.mean(log_likelihood(params, scores_of(params, symbols))) / LENGTH

    def update(carry, _):
        params, opt_state = carry
        value, gradient = jax.value_and_grad(loss)(params)
        change, opt_state = optimizer.update(gradient, opt_state)
        return (optax.apply_updates(params, change), opt_state), value

    (params, _), losses = jax.jit(lambda c: jax.lax.scan(update, c, None, length=steps))(
        (params, optimizer.init(params))
    )
    return params, losses, loss(truth()), states, symbols


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    params, losses, best, states, symbols = train(args.steps)
    print(
        f"nats a symbol: {losses[0]:.3f} at first, {losses[-1]:.3f} learned, {best:.3f} with the true model"
    )
    print(jnp.round(jnp.exp(normalized(params)["show"]), 2))
