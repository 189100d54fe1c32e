"""Programs compiled as users compile them: python programs.py GROUP

XLA's flags and jrnn's options are the defaults, and plans are what the cost model chooses. Each result is compared with that
of `jrnn.plain_scans`, which is JAX's own loop; that alone is compiled with few optimizations. The last line of the output is
JSON: what is wrong, by program.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jrnn
from jrnn import nn

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "loops")]
T, N, D = 40, 3, 16
LAYERS = {
    "RNN": lambda **o: nn.RNN(D, 12, num_layers=2, **o),
    "LSTM": lambda **o: nn.LSTM(D, 12, bidirectional=True, **o),
    "GRU": lambda **o: nn.GRU(D, 12, **o),
    "MinGRU": lambda **o: nn.MinGRU(D, 12, **o),
    "MinLSTM": lambda **o: nn.MinLSTM(D, 12, **o),
    "IndRNN": lambda **o: nn.IndRNN(D, 12, **o),
    "LRU": lambda **o: nn.LRU(D, 12, **o),
    "S5": lambda **o: nn.S5(D, 12, **o),
    "RGLRU": lambda **o: nn.RGLRU(D, num_heads=2, **o),
    "SLSTM": lambda **o: nn.SLSTM(D, 12, num_heads=2, **o),
    "MLSTM": lambda **o: nn.MLSTM(D, 12, num_heads=2, **o),
    "Mamba": lambda **o: nn.Mamba(D, 12, **o),
    "Mamba2": lambda **o: nn.Mamba2(D, 12, num_heads=2, **o),
    "RetNet": lambda **o: nn.RetNet(D, num_heads=2, **o),
    "GLA": lambda **o: nn.GLA(D, num_heads=2, **o),
    "DeltaNet": lambda **o: nn.DeltaNet(D, num_heads=2, **o),
    "GatedDeltaNet": lambda **o: nn.GatedDeltaNet(D, num_heads=2, **o),
    "RWKV7": lambda **o: nn.RWKV7(D, num_heads=2, **o),
}


def outer(k, v):
    return k[..., :, None] * v[..., None, :]


def delta_product_written_first(S, x):
    for a, w, b in ((x["a"], x["v"], x["b"]), (x["k"], x["w"], x["b"])):
        S = b[..., None, None] * outer(a, w - jnp.einsum("nk,nkv->nv", a, S)) + S
    return S, jnp.einsum("nk,nkv->nv", x["q"], S)


def delta_product_as_matrices(S, x):
    eye = jnp.eye(S.shape[1])
    for a, w, b in ((x["a"], x["v"], x["b"]), (x["k"], x["w"], x["b"])):
        b = b[:, None, None]
        S = jnp.einsum("nij,njv->niv", eye - b * outer(a, a), S) + b * outer(a, w)
    return S, jnp.einsum("nk,nkv->nv", x["q"], S)


def growing_delta(S, x):
    a, b = x["a"], x["b"][:, None, None]
    S = 1.8 * (S - b * outer(a, jnp.einsum("nk,nkv->nv", a, S)))
    return S + outer(a, x["v"]), jnp.einsum("nk,nkv->nv", x["q"], S)


def momentum(weights, carry, h):
    """A delta rule with momentum, whose vectors are projected inside of the step; XLA aborted on its gradient."""
    S, M = carry
    q, k, v = (jnp.einsum("nd,hde->nhe", h, w) for w in weights)
    error = v - jnp.einsum("nhk,nhkv->nhv", k, S)
    M = 0.9 * M + outer(k, 0.1 * error)
    S = 0.99 * S + M
    return (S, M), jnp.einsum("nhk,nhkv->nhv", q, S)


def matrix_programs():
    """Train steps with matrix states, as functions of their arguments, with these."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    n, steps, k = 2, 128, 64
    unit = lambda v: v / jnp.linalg.norm(v, axis=-1, keepdims=True)  # noqa: E731
    xs = {name: normal(steps, n, k) for name in ("q", "v", "w")} | {
        name: unit(normal(steps, n, k)) for name in ("a", "k")
    }
    xs["b"] = jax.nn.sigmoid(normal(steps, n))
    weigh = normal(steps, n, k)
    for step in (delta_product_written_first, delta_product_as_matrices, growing_delta):
        for options in ({}, {"memory": 0.3}):

            def loss(xs, step=step, options=options):
                S, ys = jrnn.scan(step, jnp.zeros((n, k, k)), xs, **options)
                return jnp.sum(weigh * ys) + jnp.sum(S), ys

            yield (
                f"{step.__name__} {options}",
                lambda xs, loss=loss: jax.value_and_grad(loss, has_aux=True)(xs),
                (xs,),
            )
    weights, hs = [normal(2, 64, 16) / 8 for _ in "qkv"], normal(512, 4, 64)
    zeros = jnp.zeros((4, 2, 16, 16))

    def loss(weights, hs):
        return jnp.sum(jrnn.scan(functools.partial(momentum, weights), (zeros, zeros), hs)[1] ** 2)

    yield "momentum", jax.value_and_grad(loss, (0, 1)), (weights, hs)


def layer_programs():
    """Each layer forward and with its gradient; half of them also forward mode, the others under `vmap`."""
    for number, (name, make) in enumerate(LAYERS.items()):
        layer = make(rngs=nnx.Rngs(0))
        graph, state = nnx.split(layer)
        x = jnp.asarray(np.random.default_rng(1).normal(size=(T, N, D)), jnp.float32)

        def loss(state, x, graph=graph):
            y, _ = nnx.merge(graph, state)(x)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

        def program(state, x, loss=loss, number=number):
            value = jax.value_and_grad(loss, (0, 1), has_aux=True)(state, x)
            run = lambda x: loss(state, x)[1]  # noqa: E731
            more = (
                jax.jvp(run, (x,), (x,))[1] if number % 2 else jax.vmap(run)(jnp.stack([x, 2 * x]))
            )
            return value, more

        yield name, program, (state, x)


def random_programs(seed, count):
    from random_steps import difference, drawn

    return {
        f"seed {s}": told
        for s in range(seed, seed + count)
        if (told := difference(drawn(s), s)) is not None
    }


def random_states(seed, count):
    from random_compositions import fault

    return {
        f"seed {s}": told
        for s in range(seed, seed + count)
        if (told := fault(s, False)[0]) is not None
    }


def small_loops(seed, count):
    from random_small_loops import fault

    return {
        f"seed {s}": told for s in range(seed, seed + count) if (told := fault(s, True)) is not None
    }


def compared(programs):
    """What differs from the results in float64 by more than 4 times what JAX's own loop does in the same type."""
    wrong = {}
    for name, program, args in programs:
        ours = jax.jit(program)(*args)
        theirs = by_jax(program, args)
        far = {path for path, a, b in pairs(ours, theirs) if not off(a, b) < 1e-5}
        if far:
            with jax.enable_x64(True):
                exact = by_jax(
                    program,
                    jax.tree.map(
                        lambda v: jnp.asarray(v, float) if v.dtype == jnp.float32 else v, args
                    ),
                )
            own = {path: off(b, true) for path, b, true in pairs(theirs, exact)}
            for path, a, true in pairs(ours, exact):
                if (
                    path in far
                    and not off(a, true) <= 4 * own[path] + 16 * np.finfo(np.float32).eps
                ):
                    wrong[f"{name} {path}"] = (
                        f"off by {off(a, true):.1e}, JAX's loop by {own[path]:.1e}"
                    )
    return wrong


def by_jax(program, args):
    from quick_compilation import OPTIONS

    with jrnn.plain_scans():
        return jax.jit(lambda *args: program(*args), compiler_options=OPTIONS)(*args)


def pairs(a, b):
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        yield jax.tree_util.keystr(path), np.asarray(x, np.float64), np.asarray(y, np.float64)


def off(a, b):
    """The largest difference where the second is finite, in parts of its largest element."""
    finite = np.isfinite(b)
    if not np.isfinite(a[finite]).all():
        return np.inf
    return np.max(np.abs(a - b)[finite], initial=0) / max(
        np.max(np.abs(b[finite]), initial=0), 1e-30
    )


def in_a_process(group, *args):
    """Compares a group of programs in a process with XLA's default flags; raises AssertionError with what is wrong."""
    environment = {
        k: v for k, v in os.environ.items() if k != "XLA_FLAGS" and not k.startswith("JAX_")
    }
    environment["PYTHONPATH"] = str(Path(jrnn.__file__).parents[1])
    command = [sys.executable, __file__, group, *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-3000:]}"
    assert json.loads(done.stdout.splitlines()[-1]) == {}, f"to see it again: {' '.join(command)}"


def main(group, seed="0", count="0"):
    groups = {
        "layers": lambda: compared(layer_programs()),
        "states": lambda: compared(matrix_programs()),
        "random programs": lambda: random_programs(int(seed), int(count)),
        "random states": lambda: random_states(int(seed), int(count)),
        "small loops": lambda: small_loops(int(seed), int(count)),
    }
    print(json.dumps(groups[group]()))


if __name__ == "__main__":
    main(*sys.argv[1:])
