"""Random loops under the executor "newton", compared with `jax.lax.scan`: python random_newton.py --seed N --count K

Each problem is a random step of one to three carries: contractions, growth, counters, gates, jumps, kinks and products, with
first carries of unlike sizes. Ours and JAX's are compared in float64. A result that was certified and is off, or an error
that JAX does not raise, is reported with its number; --count 1 replays it.
"""

from __future__ import annotations

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jrnn import Newton
from jrnn.loops import scan_statistics

WIDTH = 3
ELEMENTWISE = (
    lambda r, h, x: jnp.tanh(r.uniform(0.2, 2) * h) * r.uniform(0.2, 1) + x,
    lambda r, h, x: r.choice([0.3, 0.9, 0.99, 1.0, 1.05]) * h + x,
    lambda r, h, x: h + r.choice([0.0, 1.0, 1e-3]),
    lambda r, h, x: jax.nn.sigmoid(x) * h + (1 - jax.nn.sigmoid(x + 0.1 * h)) * jnp.tanh(x),
    lambda r, h, x: jnp.clip(r.uniform(0.5, 1.5) * h + x, -1, 1),
    lambda r, h, x: 0.5 * jnp.sign(h) + 0.3 * x,
    lambda r, h, x: jnp.where(h > 0, 0.5 + 0.4 * h, 0.3 * h - 0.5) + x,
    lambda r, h, x: jax.nn.relu(h * 0.8 + x) - 0.1 * h,
    lambda r, h, x: jnp.maximum(jnp.abs(h) * 0.7, x),
    lambda r, h, x: jnp.sin(r.uniform(0.5, 4) * h) + 0.5 * x,
    lambda r, h, x: jnp.floor(h) * 0.5 + 0.4 * h + x,
    lambda r, h, x: h / (1 + h * h) + x,
    lambda r, h, x: 0.9 * h - 0.1 * h**3 * jnp.exp(-h * h) + 0.2 * x,
    lambda r, h, x: jnp.exp(-jnp.abs(h)) * x + 0.5 * h,
    lambda r, h, x: 3.7 * h * (1 - h) * 0.25 + 0.01 * x,
    lambda r, h, x: jnp.sqrt(jnp.abs(h) + 0.1) * jnp.cos(x),
    lambda r, h, x: jnp.round(h, 1) * 0.5 + x,
)
MIXED = (
    lambda r, h, x: jnp.tanh(
        h @ jnp.asarray(r.normal(size=(WIDTH, WIDTH)) * r.choice([0.2, 0.6, 1.5])) + x
    ),
    lambda r, h, x: 0.6 * h + 0.3 * h[..., ::-1] + x,
    lambda r, h, x: jnp.tanh(jnp.mean(h) + 0.5 * h) + x,
    lambda r, h, x: jax.nn.softmax(h + x),
    lambda r, h, x: 0.5 * jnp.roll(h, 1) + x * jnp.max(jnp.abs(h)) / (1 + jnp.max(jnp.abs(h))),
)


def problem(seed):
    """A step, its first carry and its inputs."""
    r = np.random.default_rng(seed)
    count = r.integers(1, 4)
    rules = [(MIXED if r.random() < 0.25 else ELEMENTWISE) for _ in range(count)]
    rules = [rule[r.integers(len(rule))] for rule in rules]
    reads = [r.integers(0, count) if r.random() < 0.5 else None for _ in range(count)]
    draws = [int(r.integers(2**31)) for _ in range(count)]

    def step(carry, x):
        new = []
        for i, (rule, read, draw) in enumerate(zip(rules, reads, draws)):
            given = x[i] if read is None else x[i] + 0.1 * jnp.tanh(carry[read])
            new.append(rule(np.random.default_rng(draw), carry[i], given))
        return tuple(new), sum(map(jnp.sum, new))

    sizes = 10.0 ** r.choice([-6, 0, 0, 0, 3, 6], size=(count, WIDTH))
    first = tuple(
        jnp.asarray(v)
        for v in r.normal(size=(count, WIDTH)) * sizes * (r.random((count, WIDTH)) < 0.7)
    )
    scale = 10.0 ** r.choice([-3, 0, 0, 2])
    xs = jnp.asarray(r.normal(size=(int(r.choice([3, 16, 64])), count, WIDTH)) * scale)
    options = [
        Newton(),
        Newton(iterations=3),
        Newton(guess="sweep"),
        Newton(damping=0.3),
        Newton(jacobian="diagonal"),
    ]
    return step, first, xs, options[r.integers(len(options))]


def fault(seed, jit=jax.jit):
    """What is wrong with a result, or None; and how many steps ran one after the other."""
    step, first, xs, options = problem(seed)
    loop = jit(lambda h, x: jax.lax.scan(step, h, x))
    theirs = loop(first, xs)
    try:
        ours, statistics = jit(lambda h, x: scan_statistics(step, h, x, executor=options))(
            first, xs
        )
    except Exception as error:
        return f"raises {type(error).__name__}: {error}", 0
    kind, near = (
        ("certified and wrong", theirs) if statistics.sequential_steps == 0 else ("wrong", None)
    )
    if near is None:  # a chaotic loop compiled in another place is another trajectory
        near = loop(jax.tree.map(lambda v: v * (1 + 4e-16), first), xs)
    every = (
        jax.tree_util.tree_leaves_with_path(ours),
        jax.tree.leaves(theirs),
        jax.tree.leaves(near),
    )
    for (path, a), b, c in zip(*every, strict=True):
        a, b, c = map(np.asarray, (a, b, c))
        largest = np.max(_magnitudes(b), -1, initial=1e-3, keepdims=True)
        with np.errstate(invalid="ignore"):
            sensitive = np.max(_magnitudes(b - c), -1, initial=0, keepdims=True)
            same = (
                np.abs(a - b) <= 1e-6 * np.abs(b) + 1e-9 * largest + 100 * sensitive
            ) & np.isfinite(b) | (a == b)
        if not np.all(same | (np.isnan(a) & np.isnan(b))):
            return (
                f"{kind}: {jax.tree_util.keystr(path)} is off by {np.nanmax(np.abs(a - b)):.1e}",
                0,
            )
    return None, int(statistics.sequential_steps)


def _magnitudes(v):
    """Magnitudes of elements, with 0 for those that are not finite."""
    return np.where(np.isfinite(v), np.abs(v), 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    given = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    faults, solved = 0, 0
    for seed in range(given.seed, given.seed + given.count):
        what, sequential = fault(seed)
        solved += what is None and sequential == 0
        if what is not None:
            faults += 1
            print(f"seed {seed}: {what}", flush=True)
    print(f"{given.count} problems, {solved} solved at once, {faults} faults")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
