"""What random steps are made of: operations, carries, inputs and outputs of many kinds (see `random_steps.py`).

Every value that operations work on is a floating-point array [N, H]. `p` holds the parameters of a program (`params`).

Shapes: T time, N batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jrnn

N, H = 2, 4
FIXED = np.linspace(-1, 1, H * H).reshape(H, H)  # closed over as a numpy array


def params(rng: np.random.RandomState, steps: int, dtype: Any, extreme: bool) -> dict[str, Any]:
    """Weights and carries, and the inputs [T, ...] under "xs".

    Extreme ones have entries of 1e30, 1e-30 and 0, but not those of matrices: whether a product of matrices overflows
    depends on the order of its additions.
    """

    def draw(*shape: int, matrix: bool = False) -> jax.Array:
        values = rng.randn(*shape) * 0.7
        if extreme and not matrix:
            values *= rng.choice([1.0, 1.0, 1e30, 1e-30, 0.0], shape)
        return jnp.asarray(values, dtype)

    keys = jax.random.split(jax.random.key(rng.randint(99)), max(steps, 1))[:steps]
    xs = dict(
        x=draw(steps, N, H),
        scalar=draw(steps),
        ids=jnp.asarray(rng.randint(0, 7, (steps, N)), jnp.int32),
        bytes=jnp.asarray(rng.randint(0, 255, (steps, 1, H)), jnp.uint8),
        flags=jnp.asarray(rng.rand(steps, N, 1) > 0.5),
        narrow=draw(steps, N, H).astype(jnp.bfloat16),
        empty=draw(steps, N, 0),
        keys=keys,
        none=None,
    )
    matrices = dict(w=(H, H), gates=(H, 4 * H), table=(7, H), many=(3, H, H), kernel=(3, 1, 1))
    weights = {name: draw(*shape, matrix=True) for name, shape in matrices.items()}
    return dict(weights, b=draw(1, H), h=draw(N, H), key=jax.random.key(3), xs=xs)


def _sin(a: Any) -> Any:
    """The sine, but not of numbers so large that their last bit decides."""
    return jnp.sin(jnp.clip(a, -9, 9))


def _cos(a: Any) -> Any:
    return jnp.cos(jnp.clip(a, -9, 9))


# Operations: `(p, a, b) -> value` ------------------------------------------------------------------------------------

Operation = Callable[[Any, Any, Any], Any]
OPERATIONS: dict[str, Operation] = dict(
    tanh=lambda p, a, b: jnp.tanh(a),
    sigmoid=lambda p, a, b: jax.nn.sigmoid(a),
    product=lambda p, a, b: a * b,
    difference=lambda p, a, b: a - b,
    quotient=lambda p, a, b: a / (1 + b * b),
    literals=lambda p, a, b: 0.5 * a + 2.0 - np.float32(0.25),
    bell=lambda p, a, b: jnp.exp(-jnp.square(a)) + jnp.log1p(jnp.abs(b)),
    powers=lambda p, a, b: jnp.tanh(a) ** 3 + (1 + jnp.abs(b)) ** 0.5,
    logarithms=lambda p, a, b: jnp.logaddexp(a, b),
    angle=lambda p, a, b: jnp.arctan2(a, 1 + b * b),
    rounded=lambda p, a, b: jnp.round(a) + jnp.sign(b) + jnp.floor(a * 2),
    special=lambda p, a, b: lax.erf(a) + lax.lgamma(1 + jnp.abs(jnp.tanh(b))),
    guarded=lambda p, a, b: jnp.where(a > 0, jnp.sqrt(jnp.where(a > 0, a, 1)), b),
    unguarded=lambda p, a, b: jnp.where(jnp.isfinite(a / b), jnp.tanh(a / b), 1.0),
    selected=lambda p, a, b: jnp.where(a > b, a, _sin(b)),
    larger=lambda p, a, b: jnp.maximum(a, b) - jnp.minimum(a, 0.0),
    clipped=lambda p, a, b: jnp.clip(a, -0.5, jnp.abs(b)),
    stopped=lambda p, a, b: lax.stop_gradient(a) * _cos(b),
    convex=lambda p, a, b: jax.nn.sigmoid(a) * b + (1 - jax.nn.sigmoid(a)) * p["h"],
    large_and_back=lambda p, a, b: (a * 1e20) * 1e-20 + b,
    # functions with derivative rules, over nested jit
    relu=lambda p, a, b: jax.nn.relu(a),
    gelu=lambda p, a, b: jax.nn.gelu(a) + jax.nn.silu(b),
    softmax=lambda p, a, b: jax.nn.softmax(a) * jax.nn.softplus(b),
    leaky=lambda p, a, b: jax.nn.leaky_relu(a) + jax.nn.elu(b) + jax.nn.relu6(b),
    normalized=lambda p, a, b: jax.nn.standardize(a) + jax.nn.logsumexp(b, axis=-1, keepdims=True),
    # loops that stop early
    bounded_while_loop=lambda p, a, b: jrnn.while_loop(
        lambda s: jnp.max(s) < 2, lambda s: 1.5 * s + 0.3, jnp.tanh(a), max_steps=4
    ),
    until=lambda p, a, b: jrnn.scan(
        lambda c, x: (c * jnp.tanh(b) + x, None),
        a,
        jnp.ones(3, a.dtype),
        until=lambda c: jnp.sum(c) > 4,
    )[0],
    # contractions
    product_with_weights=lambda p, a, b: a @ p["w"],
    transposed_weights=lambda p, a, b: a @ p["w"].T,
    many_weights=lambda p, a, b: jnp.einsum("nh,ghk->nk", a, p["many"]),
    numpy_weights=lambda p, a, b: jnp.tanh(a) @ FIXED,
    weights_of_weights=lambda p, a, b: a @ jnp.tanh(p["w"] @ p["w"]) + p["b"],
    of_both=lambda p, a, b: jnp.einsum("nh,mh,mk->nk", a, jnp.tanh(b), jnp.tanh(b)),
    batched=lambda p, a, b: (
        jax.vmap(jnp.dot, (0, None))(a, p["w"]) + jax.vmap(jnp.vdot)(a, b)[:, None]
    ),
    narrow_product=lambda p, a, b: (
        lax.dot(
            a.astype(jnp.bfloat16), p["w"].astype(jnp.bfloat16), preferred_element_type=jnp.float32
        )
        * b
    ),
    integers=lambda p, a, b: a * (jnp.int32([[1, 2]]) @ jnp.ones((2, 1), jnp.int32)),
    empty_product=lambda p, a, b: a + a[:, :0] @ p["w"][:0],
    attention=lambda p, a, b: jax.nn.softmax(a @ p["table"].T) @ p["table"],
    convolution=lambda p, a, b: lax.conv_general_dilated(
        a[..., None], p["kernel"], (1,), "SAME", dimension_numbers=_NWC
    )[..., 0],
    runge_kutta=lambda p, a, b: _runge_kutta(lambda h: jnp.tanh(h @ p["w"] + b @ p["w"]), a),
    solved=lambda p, a, b: (
        jnp.linalg.solve(4 * jnp.eye(H, dtype=a.dtype) + jnp.tanh(p["w"]), a.T).T
    ),
    # slices, views, orders
    gates=lambda p, a, b: _gated(
        *jnp.split(a @ p["gates"] + jnp.tile(p["b"], (1, 4)), 4, axis=-1), b
    ),
    sliced_gates=lambda p, a, b: _gated(
        *(_slice(a @ p["gates"], i * H) + _slice(b @ p["gates"], i * H) for i in range(4)), b
    ),
    overlapping=lambda p, a, b: (
        jnp.tanh(_slice(a @ p["gates"], 2)) * jnp.tanh(_slice(a @ p["gates"], 4))
    ),
    strided=lambda p, a, b: jnp.tanh((a @ p["gates"])[:, ::4]) - (b @ p["gates"])[:, 1::4],
    joined=lambda p, a, b: (
        jnp.concatenate([a, b], -1)[:, 2 : 2 + H] + jnp.concatenate([a[:1], b[1:]])
    ),
    halves=lambda p, a, b: jnp.concatenate([jnp.tanh(a[:, : H // 2]), _sin(a[:, H // 2 :])], -1),
    padded=lambda p, a, b: jnp.pad(a[:, 1:], ((0, 0), (0, 1))) + jnp.roll(b, 1, axis=-1) + a[::-1],
    reshaped=lambda p, a, b: a.reshape(-1).reshape(H, N).T + b[:, None, :].squeeze(1),
    single=lambda p, a, b: a[:, :1] + jnp.broadcast_to(b[:1, 1:2], (N, H)),
    sorted=lambda p, a, b: (
        jnp.sort(a, axis=-1) + jnp.take_along_axis(b, jnp.argsort(a, axis=-1), -1)
    ),
    top=lambda p, a, b: (
        lax.top_k(a, 1)[0] * b + jax.nn.one_hot(jnp.argmax(b, -1), H, dtype=a.dtype)
    ),
    running=lambda p, a, b: (
        jnp.cumsum(a, axis=-1) * 0.3 + lax.cummax(b, axis=1) + jnp.cumprod(jnp.tanh(b), axis=-1)
    ),
    pooled=lambda p, a, b: (
        lax.reduce_window(a, -np.inf, lax.max, (1, 2), (1, 1), "SAME") + jnp.mean(b)
    ),
    reduced=lambda p, a, b: (
        a - jnp.max(a, axis=-1, keepdims=True) + jnp.prod(jnp.tanh(b), axis=0, keepdims=True)
    ),
    # intermediate arrays that are larger than what goes in and out
    one_hot=lambda p, a, b: (
        jax.nn.one_hot(_index(b[:, 0]), 280, dtype=a.dtype) @ jnp.tile(p["table"], (40, 1)) + a
    ),
    tiled=lambda p, a, b: jnp.tile(jnp.tanh(b), (1, 40)) @ jnp.tile(p["w"], (40, 1)) * 0.01 + a,
    outer=lambda p, a, b: jnp.einsum(
        "nij,nj->ni", jnp.tanh(a)[:, :, None] * jnp.tanh(b)[:, None, :], jnp.tanh(b)
    ),
    spread=lambda p, a, b: (
        jnp.sum(jnp.broadcast_to(jnp.tanh(b)[..., None], (N, H, 50)) * 0.02, -1) * a
    ),
    many_rows=lambda p, a, b: (
        jnp.sum(p["table"][jnp.tile(_index(b[:, :1]), (1, 30))], 1) * 0.03 + a
    ),
    # indices
    lookup=lambda p, a, b: p["table"][_index(a[:, 0])] + b,
    dynamic_slice=lambda p, a, b: lax.dynamic_slice(
        jnp.tile(a, (1, 2)), (np.int32(0), _index(b[0, 0])), (N, H)
    ),
    dynamic_update=lambda p, a, b: lax.dynamic_update_slice(
        a, b[:, :1], (np.int32(0), _index(b[0, 0]) % H)
    ),
    scatter=lambda p, a, b: (
        a.at[:, 0].set(b[:, 1]).at[0].add(b[1]).at[_index(b[:, 0]) % N].max(jnp.tanh(b))
    ),
    # control flow
    cond=lambda p, a, b: lax.cond(a[0, 0] > 0, lambda a: jnp.tanh(a @ p["w"]), lambda a: a + b, a),
    switch=lambda p, a, b: lax.switch(_index(a[0, 0]) % 3, (_sin, _cos, lambda a: a * b), a),
    while_loop=lambda p, a, b: lax.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ p["w"])), (0, a)
    )[1],
    fori_loop=lambda p, a, b: lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h * b + i), a),
    nested_scan=lambda p, a, b: p["scan"](
        lambda h, x: (jnp.tanh(h @ p["w"] + x), h), a, b[:, None]
    )[0],
    nested_lax_scan=lambda p, a, b: lax.scan(lambda h, x: (h * x, h @ p["w"]), a, b.T[:, :, None])[
        1
    ].sum(0),
    mapped=lambda p, a, b: (
        lax.map(lambda row: jnp.tanh(row @ p["w"]), a) + lax.associative_scan(jnp.add, b)
    ),
    # derivative rules
    custom_jvp=lambda p, a, b: _doubled_tangent(a, b),
    custom_vjp=lambda p, a, b: _tripled_cotangent(a * 2) + b,
    custom_vjp_of_many=lambda p, a, b: _product_of_own(a, p["w"]) + b,
    custom_vjp_with_static=lambda p, a, b: _scaled_cotangent(2.0, a) + b,
    custom_gradient=lambda p, a, b: (
        jax.custom_gradient(lambda a: (_sin(a), lambda ct: ct * 2))(a) * b
    ),
    custom_solve=lambda p, a, b: lax.custom_linear_solve(
        lambda v: v * (1 + b * b), a, lambda f, v: v / (1 + b * b), _solve
    ),
    custom_vmap=lambda p, a, b: _mapped_by_itself(a) + b,
    # transformations inside
    checkpoint=lambda p, a, b: jax.checkpoint(lambda a: jnp.tanh(_sin(a @ p["w"]) + b))(a),
    checkpoint_dots=lambda p, a, b: jax.checkpoint(
        _layer(p, b), policy=jax.checkpoint_policies.dots_saveable
    )(a),
    checkpoint_names=lambda p, a, b: jax.checkpoint(
        lambda a: _sin(checkpoint_name(jnp.tanh(a @ p["w"]), "kept")) * b,
        policy=jax.checkpoint_policies.save_only_these_names("kept"),
    )(a),
    named=lambda p, a, b: checkpoint_name(jnp.tanh(a @ p["w"]), "given") * b,
    jitted=lambda p, a, b: jax.jit(_layer(p, b))(a),
    gradient=lambda p, a, b: jax.grad(lambda a: jnp.sum(jnp.tanh(a @ p["w"]) * b))(a),
    tangent=lambda p, a, b: jax.jvp(_layer(p, b), (a,), (b,))[1],
    over_mapped_axis=lambda p, a, b: jax.vmap(
        lambda a, b: a - lax.pmean(b, "rows") + lax.axis_index("rows"), axis_name="rows"
    )(a, b),
    gathered=lambda p, a, b: jax.vmap(
        lambda a: lax.all_gather(a, "rows")[1] * lax.psum(a, "rows"), axis_name="rows"
    )(a),
    in_scope=lambda p, a, b: jax.named_scope("cell")(_layer(p, b))(a),
    barrier=lambda p, a, b: sum(lax.optimization_barrier((a, b))),
    # types
    bfloat16=lambda p, a, b: (
        (a.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(b.dtype) + b
    ),
    float16=lambda p, a, b: jnp.tanh(a).astype(jnp.float16).astype(a.dtype) * b,
    float32=lambda p, a, b: jnp.tanh(a.astype(jnp.float32)).astype(b.dtype) * b,
    complex=lambda p, a, b: (
        jnp.abs(jnp.exp(1j * jnp.tanh(a)) * (1 + jnp.tanh(b))) + lax.complex(a, b).imag
    ),
    fourier=lambda p, a, b: jnp.fft.rfft(a, axis=-1).real[:, :1] * b,
    whole_numbers=lambda p, a, b: (jnp.tanh(a) * 5).astype(jnp.int32).astype(a.dtype) * b,
    bits=lambda p, a, b: jnp.where(
        lax.population_count(lax.shift_left(_index(a), np.int32(1))) > 1, a, b
    ),
    masks=lambda p, a, b: jnp.where((a > 0) & ~(b > 0) | (a > b), a, -b) * jnp.any(a > 1),
    # random numbers and side effects
    random=lambda p, a, b: (
        a * jax.random.normal(jax.random.fold_in(p["key"], _index(b[0, 0])), a.shape, a.dtype)
    ),
    dropout=lambda p, a, b: jnp.where(jax.random.bernoulli(p["key"], 0.5, a.shape), a, 0),
    debug_callback=lambda p, a, b: _told(p, a, ordered=False),
    ordered_callback=lambda p, a, b: _told(p, a, ordered=True),
    debug_print=lambda p, a, b: jax.debug.print("{}", a[0, 0]) or a,
    pure_callback=lambda p, a, b: b + _called_back(a),
    ref_read=lambda p, a, b: p["ref"][...] * a,
    ref_added=lambda p, a, b: p["ref"].__setitem__(..., p["ref"][...] + a * b) or b,
    ref_part=lambda p, a, b: p["ref"].__setitem__(0, a[1]) or p["ref"][1:] + b,
    local_ref=lambda p, a, b: _through_ref(a) * b,
)

_NWC = ("NWC", "WIO", "NWC")


def _index(a: Any) -> Any:
    """An index from 0 to 4 that depends on values."""
    return (jnp.nan_to_num(jnp.tanh(lax.stop_gradient(a))) * 2 + 2.5).astype(jnp.int32)


def _slice(a: Any, lo: int) -> Any:
    return a[:, lo : lo + H]


def _gated(i: Any, f: Any, o: Any, g: Any, c: Any) -> Any:
    return jax.nn.sigmoid(o) * jnp.tanh(jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g))


def _runge_kutta(f: Callable, h: Any) -> Any:
    k1 = f(h)
    k2 = f(h + 0.05 * k1)
    k3 = f(h + 0.05 * k2)
    k4 = f(h + 0.1 * k3)
    return h + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def _layer(p: Any, b: Any) -> Callable:
    return lambda a: jnp.tanh(a @ p["w"]) * b


def _solve(matvec: Callable, v: Any) -> Any:
    return v / matvec(jnp.ones_like(v))


def _called_back(a: Any) -> Any:
    if (
        a.dtype == np.float64
    ):  # callbacks run in threads that do not know of an x64 setting of this one
        return jnp.tanh(a)
    return jax.pure_callback(np.tanh, a, lax.stop_gradient(a), vmap_method="expand_dims")


def _told(p: Any, a: Any, ordered: bool) -> Any:
    jax.debug.callback(p["tell"], jnp.sum(a), ordered=ordered)
    return a


def _through_ref(a: Any) -> Any:
    ref = jax.new_ref(jnp.zeros_like(a))
    ref[...] = _sin(a)
    ref[0] = a[1]
    return ref[...]


@jax.custom_jvp
def _doubled_tangent(a: Any, b: Any) -> Any:
    return _sin(a) * b


@_doubled_tangent.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (a, b), (da, db) = primals, tangents
    return _sin(a) * b, 2 * _cos(a) * b * da + _sin(a) * db


@jax.custom_vjp
def _tripled_cotangent(a: Any) -> Any:
    return jnp.round(a)


_tripled_cotangent.defvjp(lambda a: (jnp.round(a), None), lambda _, ct: (ct * 3,))


@jax.custom_vjp
def _product_of_own(a: Any, w: Any) -> Any:
    return jnp.tanh(a @ w)


def _product_of_own_fwd(a: Any, w: Any) -> Any:
    return jnp.tanh(a @ w), (a, w)


def _product_of_own_bwd(kept: Any, ct: Any) -> Any:
    a, w = kept
    return jnp.clip(ct @ w.T, -1, 1), a.T @ ct * 0.5


_product_of_own.defvjp(_product_of_own_fwd, _product_of_own_bwd)


def _scaled(scale: float, a: Any) -> Any:
    return _sin(a)


_scaled_cotangent = jax.custom_vjp(_scaled, nondiff_argnums=(0,))
_scaled_cotangent.defvjp(
    lambda scale, a: (_sin(a), a), lambda scale, a, ct: (scale * ct * _cos(a),)
)


@jax.custom_batching.custom_vmap
def _mapped_by_itself(a: Any) -> Any:
    return _sin(a)


@_mapped_by_itself.def_vmap
def _(size: int, batched: Any, a: Any) -> Any:
    return _sin(a), batched[0]


# Carries: `init(p)`, and `step(p, c, v) -> (new c, value or None)` from a value v ------------------------------------

CARRIES: dict[str, tuple[Callable, Callable]] = dict(
    state=(lambda p: p["h"], lambda p, c, v: (v, c)),
    affine=(lambda p: p["h"], lambda p, c, v: (jax.nn.sigmoid(v) * c + v, c)),
    unbounded=(lambda p: p["h"], lambda p, c, v: (v * c + 0.5, c)),
    halved=(lambda p: p["h"], lambda p, c, v: (c / 2 - v, c)),
    reset=(lambda p: p["h"], lambda p, c, v: (jnp.where(v > 0.5, v, 0.9 * c), c)),
    sum=(lambda p: p["h"], lambda p, c, v: (c + v, None)),
    sum_read=(lambda p: p["h"], lambda p, c, v: (c + v, c)),
    sum_of_many=(lambda p: p["h"], lambda p, c, v: (_sin(v) + (c + v * 2) + p["h"], None)),
    sum_of_difference=(lambda p: p["h"], lambda p, c, v: (c + (v - p["h"]), None)),
    sum_of_products=(lambda p: p["w"], lambda p, c, v: (c + v.T @ jnp.tanh(v), None)),
    sum_of_products_with_weights=(lambda p: p["h"], lambda p, c, v: (c + v @ p["w"].T, None)),
    sum_of_rows=(lambda p: p["h"][0], lambda p, c, v: (c + v.sum(0), None)),
    sum_of_one=(lambda p: p["h"][0, 0], lambda p, c, v: (c + jnp.mean(v), None)),
    sum_of_constants=(
        lambda p: p["h"],
        lambda p, c, v: (c + p["b"] * np.ones((N, 1), p["b"].dtype), None),
    ),
    sum_of_literals=(lambda p: 1.0, lambda p, c, v: (c + 0.25, None)),
    difference=(lambda p: p["h"], lambda p, c, v: (c - v, None)),
    largest=(lambda p: p["h"], lambda p, c, v: (jnp.maximum(c, v), c)),
    pair=(
        lambda p: (p["h"], {"b": p["h"] + 1}),
        lambda p, c, v: ((c[1]["b"], {"b": c[0] * 0.5 + v}), c[0]),
    ),
    rotation=(
        lambda p: (p["h"], p["h"]),
        lambda p, c, v: ((0.6 * c[0] - 0.8 * c[1], 0.8 * c[0] + 0.6 * c[1] + v), c[0]),
    ),
    fixed=(lambda p: p["h"], lambda p, c, v: (c, c)),
    fixed_unread=(lambda p: p["w"], lambda p, c, v: (c, None)),
    constant=(lambda p: p["h"], lambda p, c, v: (p["h"] * 2, c)),
    numpy=(
        lambda p: np.ones((N, H), p["h"].dtype),
        lambda p, c, v: (np.full((N, H), 0.5, p["h"].dtype), c),
    ),
    last_input=(lambda p: p["h"], lambda p, c, v: (p["x"], c)),
    count=(lambda p: jnp.int32(0), lambda p, c, v: (c + 1, v * c.astype(v.dtype))),
    count_unread=(lambda p: jnp.int32(0), lambda p, c, v: (c + 3, None)),
    byte=(lambda p: jnp.uint8(7), lambda p, c, v: (c * jnp.uint8(3) + jnp.uint8(200), v / (1 + c))),
    wide=(lambda p: np.int64(2**40), lambda p, c, v: (c + (v[0, 0] > 0), None)),
    flag=(lambda p: jnp.array(False), lambda p, c, v: (~c, jnp.where(c, v, -v))),
    key=(
        lambda p: p["key"],
        lambda p, c, v: (jax.random.split(c)[0], v * jax.random.uniform(c, v.shape, v.dtype)),
    ),
    narrow=(
        lambda p: p["h"].astype(jnp.bfloat16),
        lambda p, c, v: (jnp.tanh(v).astype(jnp.bfloat16), c.astype(v.dtype)),
    ),
    narrow_affine=(
        lambda p: jnp.zeros((N, H), jnp.float16),
        lambda p, c, v: (c * 0.5 + jnp.tanh(v).astype(jnp.float16), None),
    ),
    weak=(lambda p: 1.0, lambda p, c, v: (c * 0.5 + 1.0, v * c)),
    weak_count=(lambda p: 0, lambda p, c, v: (c + 1, v * c)),
    weak_sum=(lambda p: 0.0, lambda p, c, v: (c + jnp.sum(v), None)),
    empty=(lambda p: p["h"][:, :0], lambda p, c, v: (c * 2 + v[:, :0], v + jnp.sum(c))),
    none=(lambda p: {"a": None, "b": ()}, lambda p, c, v: (c, None)),
    complex=(
        lambda p: p["h"] + 0.5j,
        lambda p, c, v: (c * jnp.exp(1j * jnp.tanh(v)) * 0.5 + v, jnp.abs(c)),
    ),
    buffer=(
        lambda p: (jnp.tile(p["h"], (2, 1)), jnp.int32(0)),
        lambda p, c, v: (_buffered(c, v), c[0][N:]),
    ),
    window=(
        lambda p: jnp.tile(p["h"], (2, 1)),
        lambda p, c, v: (jnp.concatenate([c[N:], v]), c[:N]),
    ),
)


def _buffered(c: Any, v: Any) -> Any:
    buffer, i = c
    return lax.dynamic_update_slice(buffer, v[:1], (i, jnp.int32(0))), (i + 1) % (2 * N)


# Inputs: `(p, x) -> value or None` of one step's part of xs -----------------------------------------------------------

INPUTS: dict[str, Callable[[Any, Any], Any]] = dict(
    scalar=lambda p, x: p["h"] * x,
    ids=lambda p, x: p["table"][x],
    bytes=lambda p, x: (x + jnp.uint8(100)).astype(p["h"].dtype) / 200 + 0 * p["h"],
    flags=lambda p, x: jnp.where(x, p["h"], 0),
    narrow=lambda p, x: (x * jnp.bfloat16(1.5)).astype(p["h"].dtype),
    empty=lambda p, x: p["h"] + x.sum(),
    keys=lambda p, x: jax.random.normal(x, p["h"].shape, p["h"].dtype),
    none=lambda p, x: None,
)

# Outputs: `(p, v, w) -> anything` of two values -----------------------------------------------------------------------

OUTPUTS: dict[str, Callable[[Any, Any, Any], Any]] = dict(
    value=lambda p, v, w: v,
    layer=lambda p, v, w: jax.nn.softmax(jnp.tanh(v @ p["w"]) @ p["w"]) * w,
    loss=lambda p, v, w: jnp.mean((v - w) ** 2),
    input=lambda p, v, w: (p["x"], v),
    constants=lambda p, v, w: (p["w"], 1.5, np.arange(3), jnp.zeros((0, 2)), None),
    integers=lambda p, v, w: (jnp.argmax(v, -1), v > w),
    narrow=lambda p, v, w: {"a": v.astype(jnp.bfloat16), "b": (w + 1j * v).real},
    key=lambda p, v, w: jax.random.fold_in(p["key"], 1),
    stopped=lambda p, v, w: lax.stop_gradient(v) * w,
    sliced=lambda p, v, w: (v[:, :2], w[:0], _sin(v).sum(0)),
)
