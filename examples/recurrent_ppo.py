"""Recurrent proximal policy optimization, all of it in one `jit`: CartPole whose velocities are hidden.

The policy sees where the cart and the pole are, and must remember what they did. Environments, rollouts, advantages
and updates are scans inside one compiled function. `resets` tell the GRU where an episode begins.

    python examples/recurrent_ppo.py --updates 150
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jrnn import nn

ENVIRONMENTS, STEPS, HIDDEN, EPOCHS = 64, 64, 32, 4
DISCOUNT, SMOOTHING, CLIP, LONGEST = 0.99, 0.95, 0.2, 500


def begin(key):
    """States [N, 4]: position, velocity, angle, angular velocity; and the age of each episode [N]."""
    return jax.random.uniform(key, (ENVIRONMENTS, 4), minval=-0.05, maxval=0.05), jnp.zeros(
        ENVIRONMENTS, jnp.int32
    )


def advance(world, action, key):
    """The world after actions [N] of 0 or 1, and whether each episode ended; then a new one begins."""
    state, age = world
    x, v, angle, spin = state.T
    force = jnp.where(action == 1, 10.0, -10.0)
    push = (force + 0.05 * spin**2 * jnp.sin(angle)) / 1.1
    turn = (9.8 * jnp.sin(angle) - jnp.cos(angle) * push) / (
        0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1)
    )
    speed = push - 0.05 * turn * jnp.cos(angle) / 1.1
    state = jnp.stack(
        [x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * spin, spin + 0.02 * turn], axis=1
    )
    done = (jnp.abs(state[:, 0]) > 2.4) | (jnp.abs(state[:, 2]) > 0.2095) | (age + 1 >= LONGEST)
    fresh, zero = begin(key)
    return (jnp.where(done[:, None], fresh, state), jnp.where(done, zero, age + 1)), done


def policy(params, seen, state, resets):
    """Seen [T, N, 2] -> logits [T, N, 2], values [T, N], and the last state."""
    hidden, state = nn.functional.gru(params["gru"], seen, state, resets=resets)
    head = hidden @ params["head"]
    return head[..., :2], head[..., 2], state


def observe(world):
    return world[0][:, ::2] * jnp.array([[1.0, 10.0]])


def rollout(params, world, state, key):
    """STEPS steps of all environments: the world and state after them, and what was seen, done and earned, [T, N]."""

    def step(carry, key):
        world, state = carry
        seen, first = observe(world), world[1] == 0
        logits, value, state = policy(params, seen[None], state, first[None])
        act, new = jax.random.split(key)
        action = jax.random.categorical(act, logits[0])
        score = jnp.take_along_axis(jax.nn.log_softmax(logits[0]), action[:, None], axis=1)[:, 0]
        world, done = advance(world, action, new)
        return (world, state), (seen, first, action, score, value[0], done)

    return jax.lax.scan(step, (world, state), jax.random.split(key, STEPS))


def advantages(values, last, done):
    """Generalized advantage estimation, backwards in time; each step earns 1."""

    def step(carry, at):
        after, gain = carry
        value, done = at
        going = jnp.where(done, 0.0, DISCOUNT)
        gain = 1 + going * after - value + SMOOTHING * going * gain
        return (value, gain), gain

    return jax.lax.scan(step, (last, jnp.zeros_like(last)), (values, done), reverse=True)[1]


def loss(params, state, seen, resets, action, old, gain, target):
    logits, values, _ = policy(params, seen, state, resets)
    scores = jax.nn.log_softmax(logits)
    ratio = jnp.exp(jnp.take_along_axis(scores, action[..., None], axis=-1)[..., 0] - old)
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    surrogate = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain)
    entropy = -jnp.sum(jnp.exp(scores) * scores, axis=-1)
    return jnp.mean(-surrogate + 0.005 * (values - target) ** 2 - 0.01 * entropy)


@partial(jax.jit, static_argnames="updates")
def train(key, updates):
    """The parameters, and the mean length of episodes in each update [updates]."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(5e-3, eps=1e-5))
    gru_key, head_key, world_key, key = jax.random.split(key, 4)
    gru = nn.GRU(2, HIDDEN, rngs=nnx.Rngs(gru_key))
    params = {"gru": gru.params(), "head": 0.1 * jax.random.normal(head_key, (HIDDEN, 3))}

    def update(carry, key):
        params, opt_state, world, state = carry
        (world, after), (seen, first, action, score, value, done) = rollout(
            params, world, state, key
        )
        _, last, _ = policy(params, observe(world)[None], after, (world[1] == 0)[None])
        gain = advantages(value, last[0], done)

        def epoch(carry, _):
            params, opt_state = carry
            gradient = jax.grad(loss)(params, state, seen, first, action, score, gain, gain + value)
            change, opt_state = optimizer.update(gradient, opt_state)
            return (optax.apply_updates(params, change), opt_state), None

        (params, opt_state), _ = jax.lax.scan(epoch, (params, opt_state), None, length=EPOCHS)
        return (params, opt_state, world, after), STEPS * ENVIRONMENTS / jnp.maximum(done.sum(), 1)

    start = (params, optimizer.init(params), begin(world_key), jnp.zeros((1, ENVIRONMENTS, HIDDEN)))
    (params, *_), lengths = jax.lax.scan(update, start, jax.random.split(key, updates))
    return params, lengths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--updates", type=int, default=150)
    args = parser.parse_args()
    _, lengths = train(jax.random.key(0), args.updates)
    for k in range(9, args.updates, 10):
        print(
            f"update {k + 1:4d}  steps of an episode {lengths[k]:6.1f}  {'#' * round(float(lengths[k]) / 10)}"
        )
