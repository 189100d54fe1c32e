"""Loops for `jrnn.scan(..., axis_name=...)`. As a program: what they compute on 8 devices, and the bytes sent, as JSON.

Shapes: T time, D devices of the axis of time.
"""

import functools
import json

import chunk_layers
import jax
import jax.numpy as jnp
import numpy as np
from by_numpy import by_numpy
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jrnn

B, H, K = 2, 2, 4


def min_gru(w, h, x):
    z = jax.nn.sigmoid(x["k"] @ w)
    return (h := (1 - z) * h + z * x["v"]), h * x["q"]


def rotation(w, carry, x):  # two carries that read each other elementwise
    a, b = carry
    a, b = a * x["k2"] - b * x["a"] + x["v"] @ w, a * x["a"] + b * x["k2"]
    return (a, b), a * b


def rnn(w, h, x):
    return (h := jnp.tanh(x["k"] + h @ w)), h


def counting(
    w, carry, x
):  # integers, a carry that is only kept, a random key, and an affine carry that reads them
    t, before, key, h = carry
    key, drawn = jax.random.split(key)
    h = h * jnp.cos(before @ w) + t * x["v"] + jax.random.normal(drawn, h.shape)
    return (t + 1, x["k"], key, h), (h, t)


LAYERS = {name: getattr(chunk_layers, name) for name in ("linear", "gla", "gated_delta", "mlstm")}
CELLS = (*LAYERS, "min_gru", "rotation", "rnn", "counting")


def example(name, steps):
    """The step of a cell with its weights, its first carry, and its inputs."""
    xs = {key: jnp.asarray(value) for key, value in chunk_layers.data(steps, B, H, K, K).items()}
    w = jnp.asarray(np.random.default_rng(1).normal(size=(K, K)) / 2)
    if name in LAYERS:
        return (
            (lambda w, c, x: LAYERS[name](c, x)),
            w,
            chunk_layers.first_carry(LAYERS[name], B, H, K, K, "float64"),
            xs,
        )
    h = jnp.linspace(-1, 1, B * H * K).reshape(B, H, K)
    first = {"rotation": (h, 2 * h), "counting": (jnp.int32(3), h, jax.random.key(0), h)}
    return (
        {f.__name__: f for f in (min_gru, rotation, rnn, counting)}[name],
        w,
        first.get(name, h),
        xs,
    )


def is_smooth(leaf):
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def smooth(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if is_smooth(leaf)]


def with_smooth(tree, leaves):
    left = iter(leaves)
    return jax.tree.map(lambda leaf: next(left) if is_smooth(leaf) else leaf, tree)


def everything(run, name, steps, of=None, jit=jax.jit):
    """Values and gradients with respect to weights, the first carry and inputs; or what `of(loss)` makes of them."""
    step, w, first, xs = example(name, steps)

    def loss(w, first_, xs_):
        out = run(step, w, with_smooth(first, first_), with_smooth(xs, xs_))
        weights = (jnp.cos(jnp.arange(v.size)).reshape(v.shape) for v in smooth(out))
        return sum(jnp.sum(a * v + jnp.sin(v)) for a, v in zip(weights, smooth(out))), out

    args = w, smooth(first), smooth(xs)
    if of is not None:
        return jit(lambda *args: of(lambda *args: loss(*args)[0], args))(*args)
    (_, out), gradients = jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*args)
    return jax.tree.map(
        lambda v: v if not jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else jax.random.key_data(v),
        out,
    ), (gradients)


def whole(step, w, first, xs, **masks):
    run = functools.partial(jrnn.scan, **masks) if masks else jax.lax.scan
    return run(functools.partial(step, w), first, xs)


def off(a, b):
    """The largest difference, in parts of the largest number."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    return float(
        max(np.max(np.abs(np.asarray(x) - y)) / max(1.0, np.max(np.abs(y))) for x, y in pairs)
    )


def sharded(mesh, check, **options):
    """The scan over the devices of a mesh: time over the axis "time", sequences over "batch", if there is one."""
    batch = "batch" if "batch" in mesh.axis_names else None

    def run(step, w, first, xs):
        lengths, resets = options.get("lengths"), options.get("resets")
        rest = {k: v for k, v in options.items() if k not in ("lengths", "resets")}

        def shard(w, first, xs, lengths, resets):
            step_ = functools.partial(step, w)
            return jrnn.scan(
                step_, first, xs, lengths=lengths, resets=resets, axis_name="time", **rest
            )

        state, stack = P(batch), P("time", batch)
        in_specs, out_specs = (P(), state, stack, state, stack), (state, stack)
        return jax.shard_map(
            shard, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check
        )(w, first, xs, lengths, resets)

    return run


def turning(w, h, x):
    """Complex literals, and factors that do not vary between devices."""
    return (h := h * jnp.exp(1j * w * jnp.arange(3.0)) + x), h


def sent(run, name, steps):
    from program_depth import DeepModule

    step, w, first, xs = example(name, steps)
    loss = lambda w, first, xs: sum(jnp.sum(jnp.sin(v)) for v in smooth(run(step, w, first, xs)))  # noqa: E731
    text = jax.jit(jax.grad(loss, (0, 1))).lower(w, first, xs).compile().as_text()
    return DeepModule(text).sent()


def main():
    jax.config.update("jax_enable_x64", True)
    assert jax.device_count() == 8
    kinds = (AxisType.Auto,)
    eight = jax.make_mesh((8,), ("time",), axis_types=kinds)
    four = jax.make_mesh((4, 2), ("time", "batch"), axis_types=kinds * 2)
    steps, actual = 16, {}
    resets = jnp.asarray(np.random.default_rng(2).random((steps, B)) < 0.2)
    masks = dict(lengths=jnp.array([16, 9]), resets=resets)
    jax.config.update("jax_disable_most_optimizations", True)
    places = {
        "linear": (four, False),
        "gla": (eight, True),
        "gated_delta": (four, True),
        "min_gru": (eight, False),
    }
    for name, (mesh, check) in {**places, "rnn": (four, True)}.items():
        wanted = everything(functools.partial(whole, **masks), name, steps, jit=by_numpy)
        actual[name] = off(everything(sharded(mesh, check, **masks), name, steps), wanted)
    complex_case = (
        turning,
        jnp.ones(3),
        jnp.zeros((B, 3), complex),
        jnp.ones((steps, B, 3), complex),
    )
    actual["complex literals"] = off(sharded(four, True)(*complex_case), whole(*complex_case))
    jax.config.update("jax_disable_most_optimizations", False)
    sizes = ("gated_delta", sharded(eight, False)), ("min_gru", sharded(eight, True))
    actual["sent"] = [[sent(run, name, steps) for steps in (16, 64)] for name, run in sizes]
    print(json.dumps(actual))


if __name__ == "__main__":
    main()
