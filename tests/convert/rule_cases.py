"""What the rules are tried on: name -> (function, arguments), for primitives that few models of the zoo need."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from zoo import normal

X, Y = normal(3, 4), normal(3, 4, seed=1)
SMALL = jnp.tanh(X)  # within (-1, 1)
I, J = jnp.arange(-6, 6).reshape(3, 4), jnp.array([[2, 1, 3, 5]])
B = X > 0
BITS = jnp.array([[2**30, -5, 7, -(2**31)], [3, 3, -1, 2**31 - 1]], jnp.int32)

CASES = {
    "trigonometry": (lambda x: (jnp.tan(x), jnp.arcsin(x), jnp.arccos(x), jnp.arctan(x)), (SMALL,)),
    "hyperbolic": (lambda x: (lax.sinh(x), lax.cosh(x), lax.cbrt(x), lax.exp2(x), lax.ceil(x)), (X,)),
    "powers": (
        lambda x: (x**-1, x**4, x**5, x**-3, jnp.abs(x) ** 1.5, jnp.abs(x) ** x, lax.rsqrt(x * x + 1), lax.square(x)),
        (X + 3,),
    ),
    "signs": (lambda x, i: (-x, -i, jnp.abs(i), jnp.sign(i), lax.square(i)), (X, I)),
    "logic": (lambda a, b: (a & b, a | ~b, a ^ b, a != b, a == b, jnp.all(a, 0), jnp.any(b)), (B, Y > 0)),
    "comparisons": (lambda i, j: (i < j, i <= j, i > j, i >= j, i == j, i != j), (I, jnp.broadcast_to(J, I.shape))),
    "integer division": (lambda i, j: (lax.div(i, j), lax.rem(i, j), i // j, i % j), (I, J)),
    "extremes": (lambda x, i: (x.min(1), x.max(), i.min(0), lax.clamp(-0.5, x, 0.5), jnp.clip(i, -1, 2)), (X, I)),
    "finite": (lambda x: jnp.isfinite(jnp.array([1.0, 2.0, 3.0]) / x), (jnp.array([0.0, 1.0, 2.0]),)),
    "arguments of extremes": (lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 0)), (X,)),
    "orders": (lambda x, b: (x.T, x[::-1], x[:, ::2], b.T, jnp.stack([b, ~b], 1), lax.rev(x, (0, 1))), (X, B)),
    "squeezes": (lambda x: (jnp.squeeze(x[:, :1], 1), lax.expand_dims(x, (1,)), x.reshape(-1)), (X,)),
    "splits": (lambda x, i: (*jnp.split(x, [1, 3], axis=1), *jnp.split(i, 2, axis=1)), (X, I)),
    "padding": (
        lambda x, v: (lax.pad(x, v, ((1, 2, 0), (-1, 0, 0))), jnp.pad(x, 1), lax.pad(x, 2.0, ((0, -1, 0), (0, 3, 0)))),
        (X, jnp.float32(3)),
    ),
    "picks": (
        lambda x, i, k: (x[i], x[:, i], x[i, i], jnp.take(x, k, axis=1), x[k], jnp.take(x, i + 2, axis=0, mode="clip")),
        (X, jnp.array([0, 2]), jnp.int32(1)),
    ),
    "moving slices": (
        lambda x, k: (
            lax.dynamic_slice(x, (k, k), (2, 3)),
            lax.dynamic_update_slice(x, x[:1, :2] * 2, (k, k)),
            lax.dynamic_update_slice(x, x[:1] * 2, (2, 0)),
        ),
        (X, jnp.int32(5)),
    ),
    "sums": (lambda x, i: (x.sum(), x.mean(0), i.sum(1), jnp.cumsum(x, 1), lax.cumsum(x, 0, reverse=True)), (X, I)),
    "products": (
        lambda x, y: (x @ y.T, x.T @ y, jnp.dot(x[0], y[1]), x @ y[0], jnp.einsum("ij,ik->jk", x, y), jnp.outer(x[0], y[0])),
        (X, Y),
    ),
    "batched products": (
        lambda x, y: (jnp.einsum("bij,bik->bjk", x, y), jnp.einsum("bij,bkj->ibk", x, y), jnp.einsum("bij,cbj->ci", x, y)),
        (normal(2, 2, 3), normal(2, 2, 3, seed=1)),
    ),
    "casts": (lambda x, i, b: (x.astype(jnp.int32), i.astype(jnp.float32), b.astype(jnp.int32), i.astype(bool)), (X, I, B)),
    "stops": (lambda x: x * lax.stop_gradient(x) + lax.optimization_barrier(x), (X,)),
    "pooling": (
        lambda x: (
            lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 1, 2), ((0, 0), (1, 0), (0, 0))),
            lax.reduce_window(x, 0.0, lax.add, (1, 3, 1), (1, 2, 1), "VALID"),
            lax.reduce_window(x, 0.0, lax.add, (1, 2, 2), (1, 1, 1), "SAME"),
        ),
        (normal(2, 5, 4),),
    ),
    "convolutions": (
        lambda x, w: (
            lax.conv_general_dilated(x, w, (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
            lax.conv_general_dilated(x[:, None], w[None], (1, 1), ((0, 0), (2, 1)), rhs_dilation=(1, 2),
                                     dimension_numbers=("NHWC", "HWIO", "NCHW")),
        ),
        (normal(2, 7, 3), normal(3, 3, 5)),
    ),
    "rounding": (
        lambda x: (jnp.round(x * 4), lax.round(x * 4, lax.RoundingMethod.AWAY_FROM_ZERO), jnp.round(0 * x + 0.5)),
        (X,),
    ),
    "remainders of floats": (lambda x, y: (lax.rem(x * 5, y), x % y, jnp.fmod(x, y)), (X, Y)),
    "inverse functions": (
        lambda x, y: (jnp.arcsinh(x), jnp.arccosh(1 + x * x), jnp.arctanh(jnp.tanh(x)), jnp.arctan2(x, y)),
        (X, Y),
    ),
    "reductions by halves": (
        lambda x, i: (x.prod(), i.prod(1), lax.reduce_xor(i, (0,)), lax.reduce_or(i, (1,)), lax.reduce_and(i, (1,))),
        (X, I),
    ),
    "running results": (
        lambda x, i: (jnp.cumprod(x, 1), lax.cummax(x, 0), lax.cummin(x, 1, reverse=True), lax.cumlogsumexp(x, 1),
                      jnp.cumsum(i, 1), lax.cummax(i, 1)),
        (X, I),
    ),
    "bits": (
        lambda i, j: (i & j, i | j, i ^ j, ~i, i << j, i >> j, lax.shift_right_logical(i, j)),
        (BITS, jnp.array([[0, 1, 31, 31], [2, 30, 5, 1]], jnp.int32)),
    ),
    "comparisons of booleans": (lambda a, b: (lax.lt(a, b), lax.le(a, b), lax.gt(a, b), lax.ge(a, b)), (B, Y > 0)),
    "powers of integers": (lambda x, i: (i**2, i**3, jnp.power(x, i), x**3.0, jnp.power(jnp.abs(x), x)), (X, I)),
    "choices": (lambda i, x, y: lax.select_n(i, x, y, x * 2), (jnp.array([[0, 1, 2, 0]] * 3), X, Y)),
    "sorting": (
        lambda x, i: (jnp.sort(x), jnp.sort(x, 0), jnp.argsort(x), jnp.sort(x > 0), lax.sort((i % 2, x, i), num_keys=2)),
        (X, I),
    ),
    "sorting integers": (lambda i: (jnp.sort(i), jnp.argsort(i), lax.top_k(i, 2)), (BITS,)),
    "greatest": (lambda x: (lax.top_k(x, 2), lax.top_k(x[0], 3), jnp.median(x)), (X,)),
    "arguments of extremes of integers": (lambda i, b: (jnp.argmax(i, 1), jnp.argmin(b, 0)), (I, B)),
    "products of integers": (lambda i, j: (i @ j.T, jnp.einsum("ij,ik->jk", i, j), i[0] @ j[0]), (I, I + 1)),
    "writing at indices": (
        lambda x, i: (x.at[i].set(0.0), x.at[1:3].set(1.0), x.at[i].add(x[i] * 2), x.at[:, 1].add(1.0),
                      x.at[1, 1:3].set(2.0), x.at[::2].set(5.0), x.at[0, 0].mul(3.0), x.at[i, i].set(9.0),
                      x.at[i].subtract(1.0)),
        (X, jnp.array([2, 0])),
    ),
    "writing at equal indices": (
        lambda x, i: (x.at[i].add(1.0), x.at[i, i].add(2.0), x.at[0].max(0.0), x.at[1:, 2:].min(0.0), x.at[:2, :2].set(0.0)),
        (X, jnp.array([2, 2, 1])),
    ),
    "writing integers": (
        lambda i, b, k: (i.at[k].set(7), i.at[:, k].add(1), b.at[k].set(True), i.at[k, k].set(3)),
        (I, B, jnp.int32(1)),
    ),
    "windows at indices": (
        lambda x, k: (
            jax.vmap(lambda row, k: lax.dynamic_slice(row, (k,), (2,)))(x, k),
            jax.vmap(lambda k: lax.dynamic_slice(x, (k, 0), (2, 3)))(k),
            jax.vmap(lambda row, k: row.at[k].set(0.0))(x, k),
            jax.vmap(lambda row, k: lax.dynamic_update_slice(row, jnp.ones(2), (k,)))(x, k),
            jax.ops.segment_sum(x, k, num_segments=4),
        ),
        (X, jnp.array([0, 1, 1])),
    ),
    "padding between": (
        lambda x, i: (lax.pad(x, 1.0, ((1, -1, 2), (0, 1, 1))), lax.pad(i, 7, ((0, 0, 0), (-1, 2, 3)))),
        (X, I),
    ),
    "convolutions of volumes": (
        lambda x, w: lax.conv_general_dilated(x, w, (1, 2, 1), "SAME", rhs_dilation=(1, 1, 2)),
        (normal(2, 3, 4, 5, 4), normal(4, 3, 2, 2, 2)),
    ),
    "transposed convolutions": (
        lambda x, w, v: (
            lax.conv_transpose(x, w, (2, 2), "SAME"),
            lax.conv_transpose(x[:, 0], w[0], (2,), "VALID"),
            lax.conv_general_dilated(x, v, (1, 1), ((0, 3), (1, 1)), lhs_dilation=(2, 3), feature_group_count=2),
        ),
        (normal(2, 4, 5, 3), normal(3, 3, 3, 4), normal(6, 2, 3, 3)),
    ),
    "dilated and cut convolutions": (
        lambda x, w: (
            lax.conv_general_dilated(x, w, (2, 1), ((3, 3), (4, 1)), lhs_dilation=(2, 3)),
            lax.conv_general_dilated(x, w, (1, 1), ((-1, 0), (1, -1))),
        ),
        (normal(2, 4, 4, 5), normal(6, 4, 2, 3)),
    ),
    "gradients of convolutions": (
        lambda x, w: jax.grad(
            lambda x, w: jnp.sum(jnp.sin(lax.conv_general_dilated(x, w, (2, 1), "SAME", feature_group_count=2))), (0, 1)
        )(x, w),
        (normal(2, 4, 5, 5), normal(6, 2, 3, 3)),
    ),
    "pooling of volumes": (
        lambda x: (
            lax.reduce_window(x, -jnp.inf, lax.max, (2, 2, 2), (1, 2, 1), "SAME"),
            lax.reduce_window(x, 0.0, lax.add, (2, 2, 2), (1, 2, 1), "VALID"),
            lax.reduce_window(x, jnp.inf, lax.min, (2, 1, 2), (1, 1, 1), "SAME"),
            lax.reduce_window(x, 0.0, lax.add, (1, 2, 2), (1, 1, 1), "VALID", base_dilation=(1, 2, 1)),
        ),
        (normal(3, 4, 5),),
    ),
    "gradients": (lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(x) * x**3) + jnp.sum(x[0] * x[1]))(x), (X,)),
    "notes": (
        lambda x: (
            checkpoint_name(lax.reduce_precision(jax.device_put(jnp.copy(x)), 8, 23), "kept") + lax.square(x),
            lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(jax.devices()[0])) * 2,
        ),
        (X,),
    ),
    "gelu": (lambda x: (jax.nn.gelu(x), jax.nn.gelu(x, approximate=False), lax.erfc(x)), (X,)),
    "gradients of series": (
        jax.grad(lambda x: jnp.sum(jnp.tanh(x)) + jnp.sum(jax.nn.gelu(x, approximate=False))),
        (X,),
    ),
    "inverse error function": (lambda x: (lax.erf_inv(jnp.tanh(x)), jnp.log2(x * x + 1.0)), (X,)),
    "copies": (lambda x: jnp.array(x, copy=True) + jnp.polyval(jnp.ones(4), x), (X,)),
    "vmap": (jax.vmap(lambda x, k: lax.dynamic_index_in_dim(x, k, keepdims=False)), (X, jnp.array([0, 3, 2]))),
}  # fmt: skip
