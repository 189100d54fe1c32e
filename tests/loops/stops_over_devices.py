"""Loops whose devices stop at different steps, inside of `jax.shard_map` with `check_vma=True`, next to `jax.vmap`.

python tests/loops/stops_over_devices.py [NAME...]

Prints the largest difference of values and gradients for each case, as JSON. It needs two devices.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jrnn

T, N, H = 12, 2, 3
W = jnp.linspace(-0.9, 0.8, H * H).reshape(H, H)
XS = (
    jnp.linspace(-1, 1, 2 * T * N * H).reshape(2, T, N, H)
    * jnp.array([0.1, 1.0])[:, None, None, None]
)
LARGE = 1 << 14  # elements of a carry that is not selected, but updated in a branch


def stopping(until, w, xs, common=0.0):
    def step(h, x):
        h = jnp.tanh(h @ w + x + (common and common * jax.lax.pmean(h.mean(), "a")))
        return h, (h, h.sum(-1))

    return jrnn.scan(step, xs[0] * 0.1, xs, until=until)


def bounded(w, xs):
    return jrnn.while_loop(
        lambda h: jnp.sum(h**2) < 20, lambda h: h @ (2 * w) + 0.3, xs[0], max_steps=9
    )


def masked(w, xs):
    """A step that is not run adds nothing, in place."""
    steps = jnp.where(xs.max() > 0.5, 4, 9)

    def step(h, x):
        return h.at[jnp.int32(5 * x[0, 0] ** 2)].add(jnp.sum(jnp.sin(x @ w))), None

    return jrnn.scan(step, jnp.zeros(LARGE) + 0 * xs.sum(), xs, lengths=steps)[0]


CASES = {
    "each_alone": functools.partial(stopping, lambda h: jnp.abs(h).max() > 0.5),
    "each_sequence": functools.partial(stopping, lambda h: jnp.abs(h).max(-1) > 0.5),
    "never": functools.partial(stopping, lambda h: jnp.array(False)),
    "with_a_collective": functools.partial(stopping, lambda h: jnp.abs(h).max() > 0.5, common=0.3),
    "while_loop": bounded,
    "masked": masked,
}


def difference(f):
    def loss(run):
        return lambda w, xs: sum(jnp.sum(jnp.sin(v)) for v in jax.tree.leaves(run(w, xs)))

    def shard(w, xs):
        return jax.tree.map(lambda v: v[None], f(w, xs[0]))

    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    over_devices = jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("a")), out_specs=P("a"))
    over_examples = jax.vmap(f, in_axes=(None, 0), axis_name="a")
    ours, theirs = (
        (jax.jit(run)(W, XS), jax.jit(jax.grad(loss(run), (0, 1)))(W, XS))
        for run in (over_devices, over_examples)
    )
    return max(
        float(jnp.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    )


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    W, XS = W.astype(float), XS.astype(float)
    print(json.dumps({name: difference(CASES[name]) for name in sys.argv[1:] or CASES}))
