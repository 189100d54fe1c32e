"""Gated linear attention in chunks, by numpy with its own reverse pass: the kernel into which faults are planted.

Of each head, S <- a S + k v^T and y = q S. Within a chunk, rows[i, j + 1] is the product of the decays after token j up to
token i, and rows[i, 0] that of all decays up to token i, which the state before the chunk has.

Shapes: N batch, H heads, T time, L steps of a chunk, K keys, V values.
"""

import jax.numpy as jnp
import numpy as np

CHUNK = 4
runs = iter(range(10**6))


def step(state, x):
    """One token of one head, for JAX."""
    state = x["a"] * state + x["k"][:, None] * x["v"]
    return state, x["q"] @ state


def decode(xs, state):
    """One token of each head."""
    q, k, v, a = (np.asarray(xs[name], np.float32)[:, 0] for name in "qkva")
    state = a[..., None, None] * state + k[..., :, None] * v[..., None, :]
    return np.einsum("nhk,nhkv->nhv", q, state)[:, None].astype(xs["v"].dtype), state


def prepared(xs, resets, segments, lengths, mask):
    """The inputs [N, H, T, ...], and where they count: padding keeps the state, and a reset has a decay of 0."""
    q, k, v, a = (np.moveaxis(np.asarray(xs[name], np.float32), 1, 2) for name in "qkva")
    steps = a.shape[2]
    valid = np.ones((len(a), steps), bool) if mask is None else np.asarray(mask)
    if lengths is not None:
        valid = valid & (np.arange(steps) < np.asarray(lengths)[:, None])
    new = np.zeros_like(valid) if resets is None else np.asarray(resets)
    if segments is not None:
        ids = np.asarray(segments)
        new[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    valid = valid[:, None, :]
    new = new[:, None, :]
    k = np.where(valid[..., None], k, 0)
    v = np.where(valid[..., None], v, 0)
    q = np.where(valid[..., None], q, 0)
    a = np.where(valid, a, 1)
    a = np.where(new, 0, a)
    return q, k, v, a, valid, new


def decay_rows(a):
    """The products of decays [N, H, L, L + 1], without a division."""
    steps = a.shape[2]
    row = np.zeros((*a.shape[:2], steps + 1), a.dtype)
    row[..., 0] = 1
    rows = []
    for i in range(steps):
        row = a[..., i, None] * row
        row[..., i + 1] = 1
        rows.append(row)
    return np.stack(rows, axis=2)


def chunks(steps):
    return [slice(at, min(at + CHUNK, steps)) for at in range(0, steps, CHUNK)]


def states_of(q, k, v, a, first):
    """The state before each chunk, and the one after the last."""
    states = [first]
    for part in chunks(a.shape[2]):
        last = decay_rows(a[:, :, part])[:, :, -1]
        weighted = k[:, :, part] * last[..., 1:, None]
        added = np.einsum("nhjk,nhjv->nhkv", weighted, v[:, :, part])
        states.append(last[..., 0, None, None] * states[-1] + added)
    return states


def first_state(state, q, v):
    zeros = np.zeros((*q.shape[:2], q.shape[3], v.shape[3]), np.float32)
    return zeros if state is None else np.asarray(state, np.float32)


def kernel(xs, state=None, *, resets=None, segments=None, lengths=None, mask=None):
    """q, k [N, T, H, K], v [N, T, H, V] and a [N, T, H] -> (y [N, T, H, V], state [N, H, K, V])."""
    q, k, v, a, valid, new = prepared(xs, resets, segments, lengths, mask)
    states = states_of(q, k, v, a, first_state(state, q, v))
    outputs = []
    for before, part in zip(states, chunks(a.shape[2])):
        rows = decay_rows(a[:, :, part])
        scores = np.einsum("nhik,nhjk->nhij", q[:, :, part], k[:, :, part])
        within = np.einsum("nhij,nhjv->nhiv", scores * rows[..., 1:], v[:, :, part])
        across = np.einsum("nhik,nhkv->nhiv", q[:, :, part], before)
        outputs.append(within + rows[..., 0, None] * across)
    y = np.concatenate(outputs, axis=2)
    last = states[-1]
    kind = xs["v"].dtype
    return np.moveaxis(y, 2, 1).astype(kind), last.astype(kind)


def gradients(xs, state, dys, dstate, *, resets=None, segments=None, lengths=None, mask=None):
    q, k, v, a, valid, new = prepared(xs, resets, segments, lengths, mask)
    states = states_of(q, k, v, a, first_state(state, q, v))
    dy = np.moveaxis(np.asarray(dys, np.float32), 1, 2)
    d_state = np.asarray(dstate, np.float32)
    dq = np.zeros_like(q)
    dk = np.zeros_like(k)
    dv = np.zeros_like(v)
    da = np.zeros_like(a)
    for before, part in reversed(list(zip(states, chunks(a.shape[2])))):
        rows = decay_rows(a[:, :, part])
        last = rows[:, :, -1]
        qs, ks, vs, dys = q[:, :, part], k[:, :, part], v[:, :, part], dy[:, :, part]
        scores = np.einsum("nhik,nhjk->nhij", qs, ks)
        d_weights = np.einsum("nhiv,nhjv->nhij", dys, vs)
        d_scores = d_weights * rows[..., 1:]
        d_rows = np.zeros_like(rows)
        d_rows[..., 1:] = d_weights * scores
        d_rows[..., 0] = np.einsum("nhiv,nhik,nhkv->nhi", dys, qs, before)
        d_rows[:, :, -1, 1:] += np.einsum("nhjk,nhkv,nhjv->nhj", ks, d_state, vs)
        d_rows[:, :, -1, 0] += np.einsum("nhkv,nhkv->nh", d_state, before)
        dq[:, :, part] = np.einsum("nhij,nhjk->nhik", d_scores, ks)
        dq[:, :, part] += rows[..., 0, None] * np.einsum("nhiv,nhkv->nhik", dys, before)
        dk[:, :, part] = np.einsum("nhij,nhik->nhjk", d_scores, qs)
        dk[:, :, part] += last[..., 1:, None] * np.einsum("nhkv,nhjv->nhjk", d_state, vs)
        dv[:, :, part] = np.einsum("nhij,nhij,nhiv->nhjv", scores, rows[..., 1:], dys)
        dv[:, :, part] += last[..., 1:, None] * np.einsum("nhkv,nhjk->nhjv", d_state, ks)
        da[:, :, part] = of_decays(a[:, :, part], rows, d_rows)
        d_outputs = np.einsum("nhi,nhik,nhiv->nhkv", rows[..., 0], qs, dys)
        d_state = last[..., 0, None, None] * d_state + d_outputs
    da = np.where(valid & ~new, da, 0)
    back = {name: np.moveaxis(leaf, 2, 1) for name, leaf in zip("qkva", (dq, dk, dv, da))}
    kind = xs["v"].dtype
    return {name: leaf.astype(kind) for name, leaf in back.items()}, d_state.astype(kind)


def of_decays(a, rows, d_rows):
    """The gradient of the decays: each row is the one before, times a decay, with a 1 for the new token."""
    da = np.zeros_like(a)
    d_row = np.zeros_like(rows[:, :, 0])
    for i in reversed(range(a.shape[2])):
        d_row = d_row + d_rows[:, :, i]
        d_row[..., i + 1] = 0
        before = rows[:, :, i - 1] if i else np.eye(rows.shape[3], dtype=a.dtype)[0]
        da[..., i] = np.sum(d_row * before, axis=-1)
        d_row = a[..., i, None] * d_row
    return da


def in_jax(xs, state=None, *, resets=None):
    """The same chunks by JAX, in a loop over them: JAX has its gradient."""
    q, k, v, a = (jnp.moveaxis(xs[name], 1, 2) for name in "qkva")
    if resets is not None:
        a = jnp.where(resets[:, None], 0, a)
    state = jnp.zeros((*q.shape[:2], q.shape[3], v.shape[3]), q.dtype) if state is None else state
    outputs = []
    for part in chunks(a.shape[2]):
        qs, ks, vs, decays = q[:, :, part], k[:, :, part], v[:, :, part], a[:, :, part]
        row = jnp.eye(decays.shape[2] + 1, dtype=a.dtype)
        now = jnp.broadcast_to(row[0], (*decays.shape[:2], len(row)))
        rows = []
        for i in range(decays.shape[2]):
            now = decays[..., i, None] * now + row[i + 1]
            rows.append(now)
        rows = jnp.stack(rows, axis=2)
        scores = jnp.einsum("nhik,nhjk->nhij", qs, ks) * rows[..., 1:]
        across = jnp.einsum("nhik,nhkv->nhiv", qs, state)
        outputs.append(jnp.einsum("nhij,nhjv->nhiv", scores, vs) + rows[..., 0, None] * across)
        last = rows[:, :, -1]
        added = jnp.einsum("nhjk,nhj,nhjv->nhkv", ks, last[..., 1:], vs)
        state = last[..., 0, None, None] * state + added
    return jnp.moveaxis(jnp.concatenate(outputs, axis=2), 2, 1), state
