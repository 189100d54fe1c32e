"""Layers with matrix states, written as steps of one token, next to flash-linear-attention and transformers."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn.loops.ir import observers

pytestmark = pytest.mark.usefixtures("rewritten", "in_chunks_always")

GOLDEN = Path(__file__).parents[1] / "golden" / "fla.npz"
SCALE = 0.5  # 1 / sqrt(K)
exp = jnp.exp


def outer(k, v):
    return k[..., :, None] * v[..., None, :]


def read(S, q):
    return jnp.einsum("bhk,bhkv->bhv", q, S)


def delta(S, k, v, b, seen=None):
    return S + outer(k, b[..., None] * (v - read(S, k if seen is None else seen)))


def linear_attention(S, x):
    S = S + outer(x["k"], x["v"])
    return S, read(S, SCALE * x["q"])


def retention(S, x):
    decay = 1 - 2.0 ** (-5 - jnp.arange(S.shape[1]))
    S = decay[None, :, None, None] * S + outer(x["k"], x["v"])
    return S, read(S, SCALE * x["q"])


def simple_gla(S, x):
    S = exp(x["g"])[..., None, None] * S + outer(x["k"], x["v"])
    return S, read(S, SCALE * x["q"])


def gla(S, x):
    S = exp(x["gk"])[..., None] * S + outer(x["k"], x["v"])
    return S, read(S, SCALE * x["q"])


def hgrn2(S, x):
    f = jax.nn.sigmoid(x["raw"])
    S = f[..., None] * S + outer(1 - f, x["v"])
    return S, read(S, SCALE * x["q"])


def rwkv6(S, x, u):
    kv = outer(x["k"], x["v"])
    return exp(x["gk"])[..., None] * S + kv, read(S + u[None, :, :, None] * kv, SCALE * x["q"])


def delta_rule(S, x):
    S = delta(S, x["k"], x["v"], x["b"])
    return S, read(S, SCALE * x["q"])


def gated_delta_rule(S, x):
    return delta_rule(exp(x["g"])[..., None, None] * S, x)


def gated_delta_product(S, x):
    S = delta(exp(x["g"])[..., None, None] * S, x["k"], x["v"], x["b"])
    S = delta(S, x["k2"], x["v2"], x["b2"])
    return S, read(S, x["q"])


def kda(S, x):
    return delta_rule(exp(x["gk"])[..., None] * S, x)


def comba(S, x):
    S = delta(exp(x["g"])[..., None, None] * S, x["k"], x["v"], x["b"], seen=x["p"])
    return S, read(S, SCALE * x["q"])


def dplr(S, x):
    S = exp(x["gk"])[..., None] * S + outer(x["p"], read(S, x["a"])) + outer(x["k"], x["v"])
    return S, read(S, SCALE * x["q"])


def iplr(S, x):
    eye = jnp.eye(x["a"].shape[-1])
    S = (eye[None, None] + outer(x["p"], x["a"])) @ S + outer(x["k"], x["v"])
    return S, read(S, SCALE * x["q"])


def mlstm(carry, x):
    S, n, m = carry
    f = jax.nn.log_sigmoid(x["f"])
    new = jnp.maximum(f + m, x["i"])
    keep, add = exp(f + m - new)[..., None], exp(x["i"] - new)[..., None]
    S = keep[..., None] * S + add[..., None] * outer(x["k"], x["v"])
    n = keep * n + add * x["k"]
    q = SCALE * x["q"]
    scale = jnp.maximum(jnp.abs(jnp.sum(n * q, -1)), exp(-new)) + 1e-6
    return (S, n, new), read(S, q) / scale[..., None]


STEPS = [
    linear_attention, retention, simple_gla, gla, hgrn2, rwkv6, delta_rule, gated_delta_rule, gated_delta_product, kda,
    comba, dplr, iplr, mlstm,
]  # fmt: skip


@functools.cache
def golden():
    with np.load(GOLDEN) as arrays:
        return dict(arrays)


@pytest.mark.grid(every=5)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_step_is_the_layer_of_its_authors(x64, step):
    name, arrays = step.__name__, golden()
    expected = {key.partition("|")[2]: v for key, v in arrays.items() if key.startswith(f"{name}|")}
    w, w_state = arrays["input|w"], arrays["input|w_state"]
    given = {key.removeprefix("grad_"): None for key in expected if key.startswith("grad_")}
    given = {key: arrays[f"input|{key}"] for key in given}

    def run(given):
        xs = {key: v for key, v in given.items() if v.ndim > 2 and len(v) == len(w)}
        S = given.get("S", np.zeros_like(w_state))
        init = (S, given["n"], np.zeros(S.shape[:2])) if step is mlstm else S
        of = functools.partial(step, u=given["u"]) if step is rwkv6 else step
        last, out = jrnn.scan(of, init, xs)
        results = {"out": out, "state": jax.tree.leaves(last)[0]}
        return jnp.sum(out * w) + ("state" in expected) * jnp.sum(
            results["state"] * w_state
        ), results

    with observers.collected() as plans:
        (_, results), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(given)
    assert [p for p in plans if p.strategy == "chunks"], plans.notes
    results |= {f"grad_{key}": v for key, v in grads.items()}
    for key, value in expected.items():
        np.testing.assert_allclose(
            results[key], value, rtol=1e-10, atol=1e-10 * np.abs(value).max(), err_msg=key
        )
