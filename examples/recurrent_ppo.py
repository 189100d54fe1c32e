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
    """The world after actions [N] of 0 or 1; then a new episode begins where one ended.

    Also the states that the actions led to, whether the pole fell there (`terminated`), and whether only the time limit
    ended the episode (`truncated`).
    """
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
    terminated = (jnp.abs(state[:, 0]) > 2.4) | (jnp.abs(state[:, 2]) > 0.2095)
    truncated = ~terminated & (age + 1 >= LONGEST)
    done = terminated | truncated
    fresh, zero = begin(key)
    world = (jnp.where(done[:, None], fresh, state), jnp.where(done, zero, age + 1))
    return world, state, terminated, truncated


def policy(params, seen, state, resets):
    """Seen [T, N, 2] -> logits [T, N, 2], values [T, N], and the last state."""
    hidden, state = nn.functional.gru(params["gru"], seen, state, resets=resets)
    head = hidden @ params["head"]
    return head[..., :2], head[..., 2], state


def observe(states):
    return states[:, ::2] * jnp.array([[1.0, 10.0]])


def rollout(params, world, state, key):
    """STEPS steps of all environments: the world and state after them, and what was seen, done and earned, [T, N]."""

    def step(carry, key):
        world, state = carry
        seen, first = observe(world[0]), world[1] == 0
        logits, value, state = policy(params, seen[None], state, first[None])
        act, new = jax.random.split(key)
        action = jax.random.categorical(act, logits[0])
        score = jnp.take_along_axis(jax.nn.log_softmax(logits[0]), action[:, None], axis=1)[:, 0]
        world, reached, terminated, truncated = advance(world, action, new)
        # An episode goes on in the state that it reached, before the GRU's state is reset.
        _, after, _ = policy(params, observe(reached)[None], state, jnp.zeros_like(first)[None])
        ends = (value[0], after[0], terminated, truncated)
        return (world, state), (seen, first, action, score, ends)

    return jax.lax.scan(step, (world, state), jax.random.split(key, STEPS))


def advantages(value, after, terminated, truncated):
    """Generalized advantage estimation, backwards in time; each step earns 1.

    What follows a step is worth the value of the state that it reached, unless the pole fell there: a time limit is no end.
    Sums of later gains stop at both.
    """

    def step(later, at):
        value, after, terminated, truncated = at
        gain = 1 + jnp.where(terminated, 0.0, DISCOUNT * after) - value
        gain += jnp.where(terminated | truncated, 0.0, SMOOTHING * DISCOUNT * later)
        return gain, gain

    ends = (value, after, terminated, truncated)
    return jax.lax.scan(step, jnp.zeros_like(value[0]), ends, reverse=True)[1]


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
        (world, later), (seen, first, action, score, ends) = rollout(params, world, state, key)
        value, _, terminated, truncated = ends
        gain = advantages(*ends)
        episodes = jnp.maximum((terminated | truncated).sum(), 1)

        def epoch(carry, _):
            params, opt_state = carry
            gradient = jax.grad(loss)(params, state, seen, first, action, score, gain, gain + value)
            change, opt_state = optimizer.update(gradient, opt_state)
            return (optax.apply_updates(params, change), opt_state), None

        (params, opt_state), _ = jax.lax.scan(epoch, (params, opt_state), None, length=EPOCHS)
        return (params, opt_state, world, later), STEPS * ENVIRONMENTS / episodes

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
