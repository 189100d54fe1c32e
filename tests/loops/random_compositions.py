"""Random compositions of updates of matrix states in chunks: python random_compositions.py --seed N --count K [--numpy]

Each program is a layer that follows from its seed: one to three updates of a state in either written order, decays of every
kind, momentum, masks, windows, normalizers, projections inside or outside of the step, axes in any order. The results and
the gradients with respect to everything are compared with those of `jax.lax.scan` in float64. A fault is an error above 4
times that of `jax.lax.scan` in the same type, and above `ROUNDINGS` roundings of the largest element; a result that is
finite there alone; or an error that is raised. With --numpy nothing is compiled.

Shapes: T time, N batch, H heads, S [N, H, K, V] in any order.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]

import jax
import jax.numpy as jnp
import numpy as np
from quick_compilation import OPTIONS

import jrnn
from jrnn.jaxprs.by_numpy import evaluate_by_numpy
from jrnn.loops.affine.chunkwise.chunked import Chunkwise
from jrnn.loops.costs.times import Estimate
from jrnn.loops.ir import observers
from jrnn.loops.strategies import plan_chunks

ROUNDINGS = 16
ein = jnp.einsum


def outer(k, v):
    return k[..., :, None] * v[..., None, :]


def added(r, S, u):
    return S + u if r.random() < 0.5 else u + S


def decay(r, S, x, p):
    kind = r.choice(["head", "row", "column", "element", "constant"])
    size = {
        "head": (),
        "row": S.shape[2:3],
        "column": S.shape[3:],
        "element": S.shape[2:],
        "constant": (),
    }[kind]
    strength = float(r.choice([0.02, 0.3, 3.0]))
    if kind == "constant":
        return float(r.choice([0.0, 0.5, 0.99, 1.0, 1.01, -0.9])) * S
    g = jax.nn.sigmoid(project(r, x, p, f"g{kind}", size) * strength + int(r.choice([-4, 0, 4])))
    g = g if r.random() < 0.85 else 1 + 0.02 * g
    spread = {
        "head": (..., None, None),
        "row": (..., slice(None), None),
        "column": (..., None, slice(None)),
        "element": ...,
    }
    return S * g[spread[kind]]


def project(r, x, p, name, size):
    """[N, H, *size] of the input, either given or projected inside of the step."""
    if name in p:
        return ein("nd,dh...->nh...", x["x"], p[name])
    return x[name]


def unit(k):
    return k * jax.lax.rsqrt(jnp.sum(k * k, -1, keepdims=True) + 1e-6)


def write(r, S, x, p):
    return added(r, S, outer(project(r, x, p, "k", None), project(r, x, p, "v", None)))


def delta(r, S, x, p):
    a, w = unit(project(r, x, p, r.choice(["k", "a"]), None)), project(r, x, p, "w", None)
    b = jax.nn.sigmoid(x["b"])[..., None, None] * float(r.choice([1.0, 2.0]))
    form = r.integers(4)
    if form == 0:
        return S - b * outer(a, ein("nhk,nhkv->nhv", a, S) - w)
    if form == 1:
        return b * outer(a, w - ein("nhk,nhkv->nhv", a, S)) + S
    if form == 2:
        turn = jnp.eye(S.shape[2], dtype=S.dtype)[None, None] - b * outer(a, a)
        return ein("nhij,nhjv->nhiv", turn, S) + b * outer(a, w)
    return added(
        r, S - b * (a[..., None] * jnp.sum(a[..., None] * S, 2, keepdims=True)), b * outer(a, w)
    )


def mask(r, S, x, p):
    return jnp.where(x["m"][..., None, None], S, 0)


UPDATES = (decay, decay, write, write, delta, delta, delta, mask)


class Used(dict):
    """Inputs that remember which of them were read."""

    def __init__(self, values):
        super().__init__(values)
        self.names = set()

    def __getitem__(self, name):
        self.names.add(name)
        return jnp.asarray(super().__getitem__(name))


def composition(seed):
    """A layer `(params, init, xs) -> results`, made from a scan; and its arguments in float64."""
    r = np.random.default_rng(seed)
    n, h = (int(r.integers(1, 3)) for _ in range(2))
    k, v = (int(r.choice([16, 32])) for _ in range(2))
    n = max(n, -(-2048 // (h * k * v)))
    steps, order = int(r.integers(128, 200)), [int(i) for i in r.permutation(4)]
    updates = [UPDATES[i] for i in r.integers(len(UPDATES), size=r.integers(1, 4))]
    if not any(u in (write, delta) for u in updates):
        updates.append(write)
    momentum, normalizer, window = r.random() < 0.15, r.random() < 0.2, r.random() < 0.2
    before, gated, reverse = r.random() < 0.3, r.random() < 0.3, r.random() < 0.2
    draws = [int(i) for i in r.integers(2**31, size=len(updates) + 2)]
    sizes = {
        "q": (k,),
        "k": (k,),
        "a": (k,),
        "v": (v,),
        "w": (v,),
        "ghead": (),
        "grow": (k,),
        "gcolumn": (v,),
        "gelement": (k, v),
    }
    inside = [name for name in sizes if name != "gelement" and r.random() < 0.3]
    d = 8
    params = {name: r.normal(size=(d, h, *sizes[name])) / np.sqrt(d) for name in inside}
    xs = {
        name: r.normal(size=(steps, n, h, *size))
        for name, size in sizes.items()
        if name not in inside
    }
    xs |= {
        "x": r.normal(size=(steps, n, d)),
        "b": r.normal(size=(steps, n, h)),
        "m": r.random((steps, n, h)) < 0.95,
    }
    shape = np.array([n, h, k, v])[order]
    init = {"S": r.normal(size=shape) * r.choice([0, 1])}
    init |= {"M": np.zeros(shape)} if momentum else {}
    init |= {"n": np.zeros((n, h, k))} if normalizer else {}
    init |= {"window": np.zeros((n, h, k))} if window else {}

    def step(p, carry, x):
        new, S = dict(carry), carry["S"].transpose(np.argsort(order))
        q = project(None, x, p, "q", None)
        if window:
            new["window"], q = q, q + 0.5 * carry["window"]
        old = S
        for update, draw in zip(updates, draws):
            S = update(np.random.default_rng(draw), S, x, p)
        if momentum:
            M = carry["M"].transpose(np.argsort(order)) * 0.9 + (S - old) * 0.1
            S, new["M"] = old + M, M.transpose(order)
        y = ein("nhk,nhkv->nhv", q, old if before else S)
        if normalizer:
            new["n"] = 0.9 * carry["n"] + jnp.abs(project(None, x, p, "k", None))
            y = y / (1 + jnp.abs(jnp.sum(q * new["n"], -1, keepdims=True)))
        if gated:
            y = y * jax.nn.silu(project(None, x, p, "v", None))
        return new | {"S": S.transpose(order)}, y

    used = Used({name: value[0] for name, value in xs.items()})
    jax.eval_shape(lambda: step(params, jax.tree.map(jnp.asarray, init), used))
    xs = {name: value for name, value in xs.items() if name in {*used.names, "m"}}

    def layer(scan, params, init, xs):
        last, ys = scan(functools.partial(step, params), init, xs, reverse=reverse)
        return ys, last

    return layer, (params, init, xs)


def everything(layer, scan, args):
    """The results and the gradient of a weighted sum of them with respect to all arguments."""

    def loss(args, mask):
        args[2]["m"] = mask
        results = layer(scan, *args)
        weighed = [
            jnp.cos(jnp.arange(v.size, dtype=v.dtype)).reshape(v.shape) * v
            for v in jax.tree.leaves(results)
        ]
        return sum(map(jnp.sum, weighed)), results

    mask = args[2]["m"]
    given = (args[0], args[1], {name: v for name, v in args[2].items() if name != "m"})
    return jax.grad(loss, has_aux=True)(given, mask)


def run(layer, scan, args, by_numpy):
    whole = lambda *args: everything(layer, scan, args)  # noqa: E731
    if not by_numpy:
        options = OPTIONS if scan is jax.lax.scan else None
        return jax.tree.map(np.asarray, jax.jit(whole, compiler_options=options)(*args))
    closed, shape = jax.make_jaxpr(whole, return_shape=True)(*args)
    leaves = evaluate_by_numpy(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), leaves)


def fault(seed, by_numpy):
    """What is wrong with our results, or None; and whether the layer ran in chunks."""
    layer, args = composition(seed)
    dtype = "bfloat16" if seed % 5 == 4 else "float32"

    def typed(dtype):
        return jax.tree.map(
            lambda v: jnp.asarray(v, dtype) if v.dtype == np.float64 else jnp.asarray(v), args
        )

    narrow = typed(dtype)
    theirs = run(layer, jax.lax.scan, narrow, by_numpy)
    with observers.collected() as plans:
        try:
            ours = run(layer, jrnn.scan, narrow, by_numpy)
        except Exception as error:
            return f"raises {type(error).__name__}: {error}", False
        if by_numpy:
            jax.make_jaxpr(lambda *args: everything(layer, jrnn.scan, args))(*narrow)
    with jax.enable_x64(True):
        exact = run(
            layer,
            jax.lax.scan,
            jax.tree.map(lambda v: jnp.asarray(v, float) if v.dtype != bool else v, narrow),
            True,
        )
    eps = float(jnp.finfo(dtype).eps)
    for (path, mine), other, true in zip(
        jax.tree_util.tree_leaves_with_path(ours),
        *map(jax.tree.leaves, (theirs, exact)),
        strict=True,
    ):
        mine, other, true = (np.asarray(x, np.float64) for x in (mine, other, true))
        name = jax.tree_util.keystr(path)
        if not np.all(np.isfinite(other)):
            continue  # the loop itself overflows
        if not np.all(np.isfinite(mine)):
            return f"{name} is not finite", bool(plans.notes)
        off, own, size = (np.max(np.abs(v), initial=0) for v in (mine - true, other - true, true))
        if off > 4 * own + ROUNDINGS * eps * size:
            return (
                f"{name} is off by {off:.1e}, lax.scan by {own:.1e}, of {size:.1e} ({dtype})",
                True,
            )
    return None, any(plan.strategy == "chunks" for plan in plans)


def often_in_chunks():
    """Plans chunks wherever they can be derived, unless they are estimated to take more than 30 ms or 50 MB."""
    estimate = Chunkwise.estimate
    plan_chunks.chunks_may_pay = lambda *args: True

    def estimate_of(node, estimator):
        cost = estimate(node, estimator)
        is_cheap = cost.seconds < 0.03 and cost.memory < 50e6
        return Estimate(0.0, 0) if is_cheap else cost

    Chunkwise.estimate = estimate_of


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--numpy", action="store_true", help="compile nothing")
    parser.add_argument(
        "--as-planned", action="store_true", help="run in chunks only what the cost model chooses"
    )
    given = parser.parse_args()
    if not given.as_planned:
        often_in_chunks()
    faults = divided = 0
    for seed in range(given.seed, given.seed + given.count):
        what, in_chunks = fault(seed, given.numpy)
        divided += in_chunks
        if what is not None:
            faults += 1
            print(f"seed {seed}: {what}", flush=True)
    print(f"{given.count} compositions, {divided} in chunks, {faults} faults")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
