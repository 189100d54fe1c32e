"""Steps of layers with matrix states, each written in several ways, and a comparison of their scans."""

import jax
import jax.numpy as jnp
import numpy as np

ein = jnp.einsum


def data(T, B, H=2, K=4, V=4, seed=0, strong=False):
    """Inputs [T, B, H, ...], numpy arrays; with `strong`, decays reach e^-20 and keys are not normalized."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=(T, B, H, *shape))

    def softplus(x):
        return np.logaddexp(0, x)

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    k, k2, a = normal(K), normal(K), normal(K)
    unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (k, k2, a)]
    off = 6.0 if strong else -2.0
    return {
        "q": normal(K) * 0.3,
        "k": k * 0.7 if strong else unit[0],
        "k2": unit[1],
        "a": unit[2],
        "v": normal(V),
        "v2": normal(V),
        "g": -softplus(3 * normal() + off),
        "gk": -softplus(3 * normal(K) + off),
        "gv": -softplus(3 * normal(V) + off),
        "b": 2 * sigmoid(normal()),
        "b2": sigmoid(normal()),
        "i": normal(),
        "r": rng.random((T, B, H)) < 0.1,
    }


def outer(k, v):
    return k[..., :, None] * v[..., None, :]


def read(S, q):
    return ein("bhk,bhkv->bhv", q, S)


def linear(S, x):
    S = S + outer(x["k"], x["v"])
    return S, read(S, x["q"])


def linear_by_vmap(S, x):
    def of_head(S, q, k, v):
        S = S + k[:, None] @ v[None, :]
        return S, q @ S

    return jax.vmap(jax.vmap(of_head))(S, x["q"], x["k"], x["v"])


def linear_read_before(S, x):
    y = (S * x["q"][..., None]).sum(-2)
    return S + ein("bhk,bhv->bhkv", x["k"], x["v"]), jnp.tanh(y) + x["v"]


def retention(S, x):
    S = (1 - 2.0 ** (-1 - jnp.arange(S.shape[1])))[None, :, None, None] * S + outer(x["k"], x["v"])
    return S, read(S, x["q"])


def mamba2(S, x):
    dt = jax.nn.softplus(x["i"])
    key, query = x["k"][:, :1], x["q"][:, :1]  # shared by the heads
    S = jnp.exp(dt * x["g"])[..., None, None] * S + outer(
        jnp.broadcast_to(key, x["k"].shape), x["v"] * dt[..., None]
    )
    return S, ein("bhkv,bk->bhv", S, query[:, 0]) * jax.nn.silu(x["v2"])


def gla(S, x):
    S = jnp.exp(x["gk"])[..., :, None] * S + outer(x["k"], x["v"])
    return S, read(S, x["q"])


def gla_transposed(S, x):
    S = S * jnp.exp(jnp.broadcast_to(x["gk"][..., None, :], S.shape)) + outer(x["v"], x["k"])
    return S, ein("bhvk,bhk->bhv", S, x["q"])


def rwkv6(S, x):
    kv = outer(x["k"], x["v"])
    y = ((S + 0.3 * kv) * x["q"][..., None]).sum(-2)
    return S * jnp.exp(x["gk"])[..., None] + kv, y


def hgrn2(S, x):
    f = jax.nn.sigmoid(x["gk"] + 3)
    S = f[..., None] * S + outer(1 - f, x["v"])
    return S, read(S, x["q"])


def delta(S, x):
    r = read(S, x["k"])
    S = S + outer(x["k"], (x["v"] - r) * x["b"][..., None])
    return S, read(S, x["q"])


def delta_as_matrix(S, x):
    A = jnp.eye(x["k"].shape[-1])[None, None] - x["b"][..., None, None] * outer(x["k"], x["k"])
    S = A @ S + outer(x["k"] * x["b"][..., None], x["v"])
    return S, (jnp.swapaxes(S, -1, -2) @ x["q"][..., None])[..., 0]


def delta_from_the_right(S, x):  # S[v, k]
    A = jnp.eye(x["k"].shape[-1])[None, None] - ein("bhi,bh,bhj->bhij", x["k"], x["b"], x["k"])
    S = S @ A + outer(x["v"], x["k"] * x["b"][..., None])
    return S, ein("bhvk,bhk->bhv", S, x["q"])


def gated_delta(S, x):
    S = S * jnp.exp(x["g"])[..., None, None]
    r = (x["v"] - (S * x["k"][..., None]).sum(-2)) * x["b"][..., None]
    return (S := S + outer(x["k"], r)), read(S, x["q"])


def kda(S, x):
    S = S * jnp.exp(x["gk"])[..., None]
    S = S + ein(
        "bhk,bhv->bhkv", x["b"][..., None] * x["k"], x["v"] - (x["k"][..., None] * S).sum(-2)
    )
    return S, read(S, x["q"])


def delta_product(S, x):
    S, between = S * jnp.exp(x["g"])[..., None, None], []
    for k, v, b in ((x["k"], x["v"], x["b"]), (x["k2"], x["v2"], x["b2"])):
        S = S + (v - (S * k[..., None]).sum(-2))[..., None, :] * k[..., None] * b[..., None, None]
        between.append(read(S, x["q"]))
    return S, tuple(between)


def delta_product_written_first(S, x):  # each update before the state
    for k, v, b in ((x["k"], x["v"], x["b"]), (x["k2"], x["v2"], x["b2"])):
        S = b[..., None, None] * outer(k, v - read(S, k)) + S
    return S, read(S, x["q"])


def delta_product_as_matrices(S, x):  # as its paper writes it
    for k, v, b in ((x["k"], x["v"], x["b"]), (x["k2"], x["v2"], x["b2"])):
        S = (jnp.eye(k.shape[-1])[None, None] - b[..., None, None] * outer(k, k)) @ S + outer(
            b[..., None] * k, v
        )
    return S, read(S, x["q"])


def delta_mask_product_delta(S, x):
    S = x["b"][..., None, None] * outer(x["k"], x["v"] - read(S, x["k"])) + S
    S = jnp.where(x["r"][..., None, None], 0.5 * S, S)
    S = (
        jnp.eye(x["k"].shape[-1])[None, None] - x["b2"][..., None, None] * outer(x["k2"], x["k2"])
    ) @ S
    S = x["b2"][..., None, None] * outer(x["a"], x["v2"] - read(S, x["a"])) + S
    return S, read(S, x["q"])


def rwkv7(S, x):  # S[v, k]
    sa = ein("bhvk,bhk->bhv", S, -x["a"])
    S = (
        S * jnp.exp(x["gk"])[..., None, :]
        + outer(sa, x["a"] * x["b2"][..., None])
        + outer(x["v"], x["k"])
    )
    return S, ein("bhvk,bhk->bhv", S, x["q"])


def rwkv7_as_matrix(S, x):
    A = jax.vmap(jax.vmap(jnp.diag))(jnp.exp(x["gk"])) - outer(x["a"], x["a"] * x["b2"][..., None])
    S = S @ A + outer(x["v"], x["k"])
    return S, ein("bhvk,bhk->bhv", S, x["q"])


def resetting(S, x):
    S = jnp.where(x["r"][..., None, None], 0.0, S)
    S = jnp.exp(x["g"])[..., None, None] * S + outer(x["k"], x["v"])
    return S, read(S, x["q"])


def grouped(S, x):  # three queries for each head
    S = gla(S, x)[0]
    q = jnp.stack([x["q"], x["k2"], x["a"]], 2)
    return S, ein("bhgk,bhkv->bhgv", q, S)


def mlstm(carry, x):
    S, n, m = carry
    f = jax.nn.log_sigmoid(x["g"] + 2)
    new = jnp.maximum(f + m, x["i"])
    keep, add = jnp.exp(f + m - new), jnp.exp(x["i"] - new)
    S = keep[..., None, None] * S + add[..., None, None] * outer(x["k"], x["v"])
    n = keep[..., None] * n + add[..., None] * x["k"]
    scale = jnp.maximum(jnp.abs((n * x["q"]).sum(-1)), jnp.exp(-new))
    return (S, n, new), read(S, x["q"]) / scale[..., None]


def shifted(carry, x):  # the token shift of RWKV
    S, before = carry
    k = 0.5 * x["k"] + 0.5 * before
    S = jnp.exp(x["gk"])[..., None] * S + outer(k, x["v"])
    return (S, x["k"]), read(S, x["q"])


def two_layers(carry, x):
    S, P = carry
    S, y = gla(S, x)
    P, z = delta(P, {**x, "v": jnp.tanh(y)})
    return (S, P), z


def decay_per_column(S, x):
    S = S * jnp.exp(x["gv"])[..., None, :] + outer(x["k"], x["v"])
    return S, read(S, x["q"])


def decay_per_row_and_column(S, x):  # S[v, k]
    S = S * (jnp.exp(x["gv"])[..., None] * jnp.exp(x["gk"])[..., None, :]) + outer(x["v"], x["k"])
    return S, ein("bhvk,bhk->bhv", S, x["q"])


def momentum(carry, x):  # Titans
    M, P = carry
    P = x["b2"][..., None, None] * P - x["b"][..., None, None] * outer(
        x["k"], read(M, x["k"]) - x["v"]
    )
    M = jnp.exp(x["g"])[..., None, None] * M + P
    return (M, P), read(M, x["q"])


def sum_of_states(carry, x):  # one reads the other as a whole
    M, P = carry
    P = x["b2"][..., None, None] * P + outer(x["k"], x["v"])
    M = jnp.exp(x["g"])[..., None, None] * M + P
    return (M, P), read(M, x["q"])


def several_rows_at_once(S, x):
    keys, values = (jnp.stack([x[a], x[b]], -2) for a, b in (("k", "k2"), ("v", "v2")))
    wrong = values - keys @ S
    S = jnp.exp(x["g"])[..., None, None] * S + 0.5 * jnp.swapaxes(keys, -1, -2) @ wrong
    return S, read(S, x["q"])


def two_reads_in_one_product(S, x):
    both = jnp.stack([x["k"], x["q"]], -2) @ S
    new = x["b"][..., None] * (x["v"] - both[..., 0, :])
    return S + outer(x["k"], new), both[..., 1, :] + (x["q"] * x["k"]).sum(-1, keepdims=True) * new


def product_of_reflections(S, x):
    eye = jnp.eye(x["k"].shape[-1])[None, None]
    first, second = (
        eye - b[..., None, None] * outer(k, k) for b, k in ((x["b"], x["k"]), (x["b2"], x["k2"]))
    )
    return (S := second @ first @ S + outer(x["k"], x["v"])), read(S, x["q"])


def read_by_all_heads(S, x):
    S = 0.9 * S + outer(x["k"], x["v"])
    return S, (ein("bhkv,bhk->bv", S, x["q"]), S.sum((1, 2, 3)))


def heads_in_a_loop(S, x):
    new = [0.9 * S[:, h] + x["k"][:, h, :, None] * x["v"][:, h, None] for h in range(S.shape[1])]
    return jnp.stack(new, 1), jnp.stack(
        [ein("bk,bkv->bv", x["q"][:, h], s) for h, s in enumerate(new)], 1
    )


def flat(S, x):
    shape = (*x["k"].shape, x["v"].shape[-1])
    S = jnp.exp(x["g"])[..., None, None] * S.reshape(shape) + outer(x["k"], x["v"])
    return S.reshape(*shape[:2], -1), read(S, x["q"])


def sums_of_sums_of_states(carry, x):
    N, M, P = carry
    P = 0.9 * P + outer(x["k"], x["v"])
    M = x["b2"][..., None, None] * M + P
    N = jnp.exp(x["g"])[..., None, None] * N - 0.5 * M
    return (N, M, P), read(N, x["q"])


def reset_by_cond(S, x):
    S = jax.lax.cond(x["r"].any(), lambda S: S * 0.0, lambda S: S, S)
    which = (x["g"][0, 0] < -3) + (x["g"][0, 1] < -3) * 1
    return linear(jax.lax.switch(which, [lambda S: S, lambda S: 0.5 * S, lambda S: -S], S), x)


def updates_in_a_loop(S, x):
    xs = [jnp.stack([x[a], x[b]]) for a, b in (("k", "k2"), ("v", "v2"), ("b", "b2"))]
    S, _ = jax.lax.scan(
        lambda S, y: (delta(S, {"q": y[0], "k": y[0], "v": y[1], "b": y[2]})[0], None), S, tuple(xs)
    )
    return S, read(S, x["q"])


STEPS = [
    linear, linear_by_vmap, linear_read_before, retention, mamba2, gla, gla_transposed, rwkv6, hgrn2, delta,
    delta_as_matrix, delta_from_the_right, gated_delta, kda, delta_product, delta_product_written_first,
    delta_product_as_matrices, delta_mask_product_delta, rwkv7, rwkv7_as_matrix, resetting,
    grouped, mlstm, shifted, two_layers, decay_per_column, decay_per_row_and_column, momentum, sum_of_states,
    sums_of_sums_of_states,
    several_rows_at_once, two_reads_in_one_product, product_of_reflections, read_by_all_heads, heads_in_a_loop, flat,
    reset_by_cond, updates_in_a_loop,
]  # fmt: skip


def first_carry(step, B, H, K, V, dtype):
    S = np.linspace(-0.1, 0.1, B * H * K * V).reshape(B, H, K, V)
    others = {
        mlstm: (S, 0.1 + S[..., 0] * 0, S[..., 0, 0] * 0),
        shifted: (S, S[..., 0]),
        flat: S.reshape(B, H, K * V),
        **dict.fromkeys((two_layers, momentum, sum_of_states), (S, S * 2)),
        sums_of_sums_of_states: (S, S * 2, S * 3),
    }
    carry = others.get(step, S)
    return jax.tree.map(lambda a: a.astype(np.dtype(dtype)), carry)
