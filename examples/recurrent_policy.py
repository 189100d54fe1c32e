"""A policy with memory, trained by reinforcement learning (advantage actor-critic) on a task written in JAX.

An episode shows one of 4 cues at its first step only, then nothing for a random number of steps, then a signal: the action
at the signal earns 1 if it is the cue, and 0 otherwise. Without memory the mean reward is at most 0.25.

Every sequence of a rollout holds many episodes, which begin at different steps. `resets` tell the GRU where, so that one
call computes all of them, and the state that is carried from rollout to rollout goes back to zeros there.

    python examples/recurrent_policy.py --updates 300
"""

import argparse
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jrnn import nn

CUES = 4
HIDDEN = 32
ENVIRONMENTS = 128
STEPS = 32  # of a rollout
SHORTEST, LONGEST = 5, 12  # steps of an episode
DISCOUNT = 0.95


class World(NamedTuple):
    """N environments.

    Attributes:
        cue: [N], what the episode asks for.
        left: [N], the steps that are left; at 1 the signal is shown.
        first: [N] booleans, whether this is the first step of an episode.
    """

    cue: jax.Array
    left: jax.Array
    first: jax.Array


def begin(key, count):
    cue_key, length_key = jax.random.split(key)
    cue = jax.random.randint(cue_key, (count,), 0, CUES)
    length = jax.random.randint(length_key, (count,), SHORTEST, LONGEST + 1)
    return World(cue, length, jnp.ones(count, bool))


def observe(world):
    """The cue at the first step, the signal at the last, and zeros between. # [N, CUES + 1]"""
    shown = jnp.where(world.first, world.cue, jnp.where(world.left == 1, CUES, -1))
    return jax.nn.one_hot(shown, CUES + 1)


def advance(world, action, key):
    """The world after an action [N], the reward [N], and whether the episode ended [N]; then a new one begins."""
    done = world.left == 1
    reward = (done & (action == world.cue)).astype(jnp.float32)
    going = World(world.cue, world.left - 1, jnp.zeros_like(world.first))
    new = begin(key, len(done))
    return jax.tree.map(lambda a, b: jnp.where(done, a, b), new, going), reward, done


def init(key):
    gru_key, head_key = jax.random.split(key)
    head = 0.1 * jax.random.normal(head_key, (HIDDEN, CUES + 1))
    return {"gru": nn.GRU(CUES + 1, HIDDEN, rngs=nnx.Rngs(gru_key)).params(), "head": head}


def policy(params, observations, state, resets):
    """[T, N, CUES + 1] -> the logits of the actions [T, N, CUES], the values [T, N], and the last state [1, N, HIDDEN]."""
    output, state = nn.functional.gru(params["gru"], observations, state, resets=resets)
    head = output @ params["head"]
    return head[..., :CUES], head[..., CUES], state


def rollout(params, world, state, key):
    """STEPS steps of every environment: the world and state after them, and what was seen, done and earned, [T, N]."""

    def step(carry, key):
        world, state = carry
        action_key, world_key = jax.random.split(key)
        seen = observe(world)
        logits, _, state = policy(params, seen[None], state, world.first[None])
        action = jax.random.categorical(action_key, logits[0])
        after, reward, done = advance(world, action, world_key)
        return (after, state), (seen, world.first, action, reward, done)

    return jax.lax.scan(step, (world, state), jax.random.split(key, STEPS))


def loss(params, state, seen, resets, action, reward, done):
    logits, values, _ = policy(params, seen, state, resets)

    def back(after, step):
        reward, done = step
        now = reward + jnp.where(done, 0, DISCOUNT * after)
        return now, now

    # What an episode earns after the rollout is predicted by the value of the last step.
    last = jax.lax.stop_gradient(values[-1])
    _, returns = jax.lax.scan(back, last, (reward[:-1], done[:-1]), reverse=True)
    log_probabilities = jax.nn.log_softmax(logits[:-1])
    chosen = jnp.take_along_axis(log_probabilities, action[:-1, :, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1)
    advantage = returns - values[:-1]
    policy_loss = -chosen * jax.lax.stop_gradient(advantage)
    return jnp.mean(policy_loss + 0.5 * advantage**2 - 0.01 * entropy)


def train(updates, seed=0, report_every=20):
    """Trains a policy, prints the mean reward of episodes as it learns, and returns it, one for each report."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))
    key, params_key, world_key = jax.random.split(jax.random.key(seed), 3)
    params = init(params_key)
    state = jnp.zeros((1, ENVIRONMENTS, HIDDEN))
    learner = (params, optimizer.init(params), begin(world_key, ENVIRONMENTS), state)

    @jax.jit
    def update(learner, key):
        params, opt_state, world, state = learner
        (world, last), (seen, resets, action, reward, done) = rollout(params, world, state, key)
        gradient = jax.grad(loss)(params, state, seen, resets, action, reward, done)
        change, opt_state = optimizer.update(gradient, opt_state)
        params = optax.apply_updates(params, change)
        return (params, opt_state, world, last), jnp.sum(reward), jnp.sum(done)

    curve, earned, episodes, start = [], 0.0, 0, time.perf_counter()
    for k in range(1, updates + 1):
        key, update_key = jax.random.split(key)
        learner, reward, done = update(learner, update_key)
        earned, episodes = earned + float(reward), episodes + int(done)
        if k % report_every == 0:
            mean = earned / episodes
            curve.append(mean)
            seconds = time.perf_counter() - start
            print(f"update {k:4d}  {seconds:5.1f} s  reward {mean:.2f}  {'#' * round(40 * mean)}")
            earned, episodes = 0.0, 0
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))
