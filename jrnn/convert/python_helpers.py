"""Functions that a written Python file takes along where it calls them; each stands by itself on jax, jnp and lax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def fully_connected(x, w, b, axis=1):
    """x [..., in] times w [out, in] transposed, plus b; the dimensions of x from `axis` on are one."""
    return x.reshape(*x.shape[:axis], -1) @ w.reshape(w.shape[0], -1).T + b.reshape((1,) * axis + (-1,))


def matrix_product(a, b, axis_a=1, axis_b=1, trans_a=False, trans_b=False):
    """a and b as matrices, cut at their axes, each transposed first where asked."""
    a = a.reshape(-1, a[(0,) * axis_a].size)
    b = b.reshape(-1, b[(0,) * axis_b].size)
    return (a.T if trans_a else a) @ (b.T if trans_b else b)


def along(a, b, axis):
    """b with dimensions of size 1, so that its own stand beside those of a from `axis` on."""
    axis = a.ndim - b.ndim if axis < 0 else axis
    return b.reshape((1,) * axis + b.shape + (1,) * (a.ndim - axis - b.ndim))


def softmax(x, axis=1):
    """Softmax over all dimensions from `axis` on together."""
    return jax.nn.softmax(x.reshape(*x.shape[:axis], -1), axis=-1).reshape(x.shape)


def layer_norm(x, gamma=None, beta=None, axis=1, epsilon=1e-5):
    """x with mean 0 and variance 1 over the dimensions from `axis` on; and the mean and the standard deviation."""
    axes = tuple(range(axis, x.ndim))
    mean = x.mean(axes, keepdims=True)
    std = jnp.sqrt(jnp.square(x - mean).mean(axes, keepdims=True) + epsilon)
    y = (x - mean) / std
    if gamma is not None:
        lead = (1,) * axis
        y = y * gamma.reshape(lead + x.shape[axis:]) + beta.reshape(lead + x.shape[axis:])
    keep = (*x.shape[:axis], 1)
    return y, mean.reshape(keep), std.reshape(keep)


def lstm_unit(hidden, cell, gates, lengths=None, timestep=None, forget_bias=0.0, drop_states=False):
    """One LSTM step from gates i, f, o, g; sequences that have ended keep their state, or drop it."""
    i, f, o, g = jnp.split(gates, 4, axis=-1)
    new = jax.nn.sigmoid(f + forget_bias) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    out = jax.nn.sigmoid(o) * jnp.tanh(new)
    if lengths is not None:
        going = (lengths > timestep)[None, :, None]
        out = jnp.where(going, out, 0.0 if drop_states else hidden)
        new = jnp.where(going, new, 0.0 if drop_states else cell)
    return out, new


def gru_unit(hidden, gates, lengths=None, timestep=None, drop_states=False):
    """One GRU step from gates reset (used before), update, output."""
    _, update, output = jnp.split(gates, 3, axis=-1)
    u = jax.nn.sigmoid(update)
    new = u * hidden + (1 - u) * jnp.tanh(output)
    if lengths is not None:
        new = jnp.where((lengths > timestep)[None, :, None], new, 0.0 if drop_states else hidden)
    return new


def cut(x, starts, ends):
    """x[start:end] along every dimension; an end of -1 is the end, -k leaves k - 1 elements out."""
    limits = [end if end >= 0 else size + 1 + end for end, size in zip(ends, x.shape)]
    return x[tuple(slice(start, end) for start, end in zip(starts, limits))]


def mask_sequences(x, lengths, fill):
    """x [N, T, ...] with `fill` from step lengths[n] on."""
    valid = jnp.arange(x.shape[1])[None, :] < lengths[:, None]
    return jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, fill)


def top_k(x, k, axis=-1):
    """The k largest elements along an axis, their indices along it, and their indices in the flat x."""
    places = jnp.moveaxis(jnp.arange(x.size).reshape(x.shape), axis, -1)
    values, index = lax.top_k(jnp.moveaxis(x, axis, -1), k)
    flat = jnp.take_along_axis(places, index, -1)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(index, -1, axis), flat.reshape(-1)


def convolution(x, w, b=None, strides=None, pads=None, dilations=None, group=1, last=False):
    """Convolution of x [N, C, ...] with w [out, C / group, ...]; with `last`, channels are the last dimension of both."""
    rank = x.ndim - 2
    pads = pads or (0,) * (2 * rank)
    letters = "DHW"[-rank:]
    image, filters = ("N" + letters + "C", "O" + letters + "I") if last else ("NC" + letters, "OI" + letters)
    y = lax.conv_general_dilated(
        x,
        w,
        strides or (1,) * rank,
        list(zip(pads[:rank], pads[rank:])),
        rhs_dilation=dilations,
        dimension_numbers=(image, filters, image),
        feature_group_count=group,
    )
    return y if b is None else y + b.reshape((1, *(1,) * rank, -1) if last else (1, -1, *(1,) * rank))


def transposed_convolution(x, w, b=None, strides=None, pads=None, adjs=None, group=1):
    """Transposed convolution of x [N, C, ...] with w [C, out / group, ...]."""
    rank, kernel = x.ndim - 2, w.shape[2:]
    pads, adjs = pads or (0,) * (2 * rank), adjs or (0,) * rank
    w = jnp.flip(w, tuple(range(2, w.ndim))).reshape(group, w.shape[0] // group, *w.shape[1:])
    w = jnp.swapaxes(w, 1, 2).reshape(-1, w.shape[1], *kernel)
    pairs = [(kernel[k] - 1 - pads[k], kernel[k] - 1 - pads[k + rank] + adjs[k]) for k in range(rank)]
    y = lax.conv_general_dilated(
        x, w, (1,) * rank, pairs, lhs_dilation=strides or (1,) * rank, feature_group_count=group
    )
    return y if b is None else y + b.reshape((1, -1, *(1,) * rank))


def max_pool(x, kernels, strides=None, pads=None):
    """The largest element of each window of x [N, C, ...]."""
    rank = len(kernels)
    pads = pads or (0,) * (2 * rank)
    pairs = ((0, 0), (0, 0), *zip(pads[:rank], pads[rank:]))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, *kernels), (1, 1, *(strides or (1,) * rank)), pairs)


def average_pool(x, kernels, strides=None, pads=None, count_include_pad=False):
    """The mean of each window of x [N, C, ...], of what lies in x unless padding counts too."""
    rank = len(kernels)
    pads = pads or (0,) * (2 * rank)
    pairs = ((0, 0), (0, 0), *zip(pads[:rank], pads[rank:]))
    window, steps = (1, 1, *kernels), (1, 1, *(strides or (1,) * rank))
    total = lax.reduce_window(x, 0.0, lax.add, window, steps, pairs)
    if count_include_pad:
        size = 1
        for n in kernels:
            size *= n
        return total / size
    return total / lax.reduce_window(jnp.ones_like(x), 0.0, lax.add, window, steps, pairs)


def initial_state(x, batch):
    """A first state [D], [N, D] or [1, N, D] as [1, N, D]."""
    return jnp.broadcast_to(x, (1, batch, x.shape[-1])) if x.ndim == 1 else x.reshape(1, *x.shape[-2:])
