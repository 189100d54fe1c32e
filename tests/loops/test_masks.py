"""`mask`, `lengths` and `resets` with every executor and every form of `recompute`: like masked loops written by hand.

What is masked holds NaN, which reaches neither values nor gradients.

Shapes: T time, N batch, H hidden.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from cases import draw
from jax.ad_checkpoint import checkpoint_name

from jrnn.errors import ScanError
from jrnn.loops import COMPARED_EXECUTORS, scan
from jrnn.loops.ir import observers

pytestmark = pytest.mark.usefixtures("rewritten")

T, N, H = 6, 3, 4
LENGTHS = np.array([4, 6, 0])
MASK = np.ones((T, N), bool)
MASK[[0, 1, 5], 1] = MASK[2, 0] = MASK[:, 2] = False
RESETS = np.zeros((T, N), bool)
RESETS[[1, 5], 0] = RESETS[[0, 3], 1] = True
MASKS = {
    "lengths": dict(lengths=LENGTHS),
    "resets": dict(resets=RESETS),
    "mask": dict(mask=MASK),
    "all": dict(lengths=LENGTHS, resets=RESETS, mask=MASK),
}
SHAPES = dict(w=(H, H), u=(H, H), h0=(N, H), s0=(N, H, H), x=(T, N, H))


def affine(p):
    def step(h, x):
        gate = jax.nn.sigmoid(x @ p["w"])
        h = gate * h + checkpoint_name(x @ p["u"], "input")
        return h, jnp.tanh(h) / x

    return step


def bent(p):
    def step(h, x):
        h = jnp.tanh(checkpoint_name(x @ p["w"], "input") + p["u"][:1] * h) + 0.3 * h
        return h, jnp.sin(h) / x

    return step


def matrix(p):
    """A matrix state, whose loop runs in chunks."""

    def step(s, x):
        s = (
            jax.nn.sigmoid(x @ p["w"][:, :1])[:, :, None] * s
            + checkpoint_name(x @ p["u"], "input")[:, :, None] * x[:, None]
        )
        return s, jnp.einsum("nk,nkv->nv", x, s) / x

    return step


def first(make, p):
    return p["s0" if make is matrix else "h0"]


def by_hand(make, p, reverse=False, lengths=(T,) * N, resets=None, mask=None):
    """Each sequence by itself, step by step: what is masked is never read."""
    step, start, carries, outs = make(p), first(make, p), [], []
    for n in range(N):
        h, ys = start[n : n + 1], [jnp.zeros((1, H))] * T
        for t in range(T)[::-1] if reverse else range(T):
            if t >= lengths[n]:
                continue
            h = start[n : n + 1] if resets is not None and resets[t, n] else h
            if mask is None or mask[t, n]:
                h, ys[t] = step(h, p["x"][t, n : n + 1])
        carries.append(h)
        outs.append(jnp.stack(ys))
    return jnp.concatenate(carries), jnp.concatenate(outs, axis=1)


def loss(run, p):
    last, ys = run(p)
    return jnp.sum(jnp.sin(ys)) + jnp.sum(last**3)


@functools.cache
def expected(make, names, reverse):
    with jax.enable_x64(True):
        p = jax.tree.map(jnp.asarray, draw(3, **SHAPES))
        return p, by_numpy(both(lambda p: by_hand(make, p, reverse, **MASKS[names])))(p)


def both(run):
    """The values, and the gradient."""
    return lambda p: (run(p), jax.grad(functools.partial(loss, run))(p))


def spoiled(x, masks):
    dead = ~masks.get("mask", np.ones((T, N), bool)) | (
        np.arange(T)[:, None] >= masks.get("lengths", np.full(N, T))
    )
    return jnp.where(dead[:, :, None], jnp.nan, x)


def agrees(make, names, reverse, **options):
    p, wanted = expected(make, names, reverse)
    p = {**p, "x": spoiled(p["x"], MASKS[names])}

    def ours(p):
        return scan(make(p), first(make, p), p["x"], reverse=reverse, **MASKS[names], **options)

    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-10)
    jax.tree.map(close, jax.jit(both(ours))(p), wanted)


BY_LOOP = [(name, bent) for name in COMPARED_EXECUTORS if name != "associative"] + [
    ("associative", affine)
]


@pytest.mark.sample("scan-mask")
@pytest.mark.parametrize("names", MASKS)
@pytest.mark.parametrize("executor, make", BY_LOOP, ids=[name for name, _ in BY_LOOP])
def test_every_executor(executor, make, names, x64):
    agrees(make, names, names == "all", executor=executor)


@pytest.mark.sample("['input']-all")
@pytest.mark.parametrize("names", MASKS)
@pytest.mark.parametrize("recompute", ["contractions", "sqrt", 4, ["input"]], ids=str)
def test_every_form_of_recompute(recompute, names, x64):
    agrees(bent, names, names == "mask", recompute=recompute)


@pytest.mark.sample("resets")
@pytest.mark.parametrize("names", MASKS)
def test_chunks(names, x64, in_chunks_always):
    with observers.collected() as plans:
        agrees(matrix, names, names == "all")
    assert "chunks" in [plan.strategy for plan in plans], plans.notes


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["contractions", "sqrt", 4, ["input"]], ids=str)
@pytest.mark.parametrize("executor, make", [("auto", matrix), ("scan", bent)])
def test_every_form_of_recompute_with_every_executor(
    executor, make, recompute, x64, in_chunks_always
):
    agrees(make, "all", executor == "scan", executor=executor, recompute=recompute)


def test_a_mask_for_a_carry_without_a_batch():
    last, ys = scan(lambda c, x: (c + x, c + x), 0, np.arange(5), mask=np.arange(5) % 2 == 1)
    assert int(last) == 4 and ys.tolist() == [0, 1, 0, 4, 0]
    last, ys = scan(lambda c, x: (c + x, c), 0, jnp.zeros(0, int), mask=jnp.zeros(0, bool))
    assert int(last) == 0 and ys.shape == (0,)


@pytest.mark.parametrize(
    "mask, message",
    [
        (MASK.astype(int), r"mask must be booleans, but are int\d+; give mask.astype\(bool\)"),
        (MASK.T, r"mask must be \[T, ...\] with T = 6, but are \[3, 6\]; put time first"),
        (
            np.zeros((T, 4), bool),
            r"with mask\[0\] of shape \[4\] every leaf of the carry must begin with that shape",
        ),
    ],
)
def test_mask_must_fit(mask, message):
    with pytest.raises(ScanError, match=message):
        scan(lambda h, x: (h + x, h), jnp.zeros((N, H)), jnp.ones((T, N, H)), mask=mask)
