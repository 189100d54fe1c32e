"""The recurrences of `jrnn.nn.families` in numpy: one sequence [T, D], one step after the other, as the papers write them.

Nothing is stabilized, hoisted or shared with the layers. `layer` gives sizes only.
"""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def normed(x, epsilon=1e-5):
    return (x - x.mean()) / np.sqrt(x.var() + epsilon)


def rms(x, epsilon=1e-5):
    return x / np.sqrt((x**2).mean() + epsilon)


def unit(x, epsilon=1e-6):
    return x / np.sqrt((x**2).sum() + epsilon)


def convolved(x, weight, bias=0.0):
    size = weight.shape[1]
    padded = np.concatenate([np.zeros((size - 1, x.shape[1])), x])
    return silu(np.stack([(padded[t : t + size].T * weight).sum(1) for t in range(len(x))]) + bias)


def mingru(layer, p, x):
    h, ys = np.zeros(layer.hidden_size), []
    for v in x:
        z = sigmoid(p["weight_z"] @ v + p["bias_z"])
        h = (1 - z) * h + z * (p["weight_h"] @ v + p["bias_h"])
        ys.append(h)
    return ys


def minlstm(layer, p, x):
    h, ys = np.zeros(layer.hidden_size), []
    for v in x:
        f, i = (sigmoid(p[f"weight_{gate}"] @ v + p[f"bias_{gate}"]) for gate in "fi")
        h = f / (f + i) * h + i / (f + i) * (p["weight_h"] @ v + p["bias_h"])
        ys.append(h)
    return ys


def indrnn(layer, p, x):
    h, ys = np.zeros(layer.hidden_size), []
    for v in x:
        h = np.maximum(p["weight"] @ v + p["recurrent"] * h + p["bias"], 0)
        ys.append(h)
    return ys


def lru(layer, p, x):
    h, ys = np.zeros(layer.hidden_size, complex), []
    for v in x:
        h = np.exp(-np.exp(p["nu_log"]) + 1j * np.exp(p["theta_log"])) * h
        h = h + np.exp(p["gamma_log"]) * ((p["B_re"] + 1j * p["B_im"]) @ v)
        ys.append(((p["C_re"] + 1j * p["C_im"]) @ h).real + p["D"] * v)
    return ys


def s5(layer, p, x):
    h, ys = np.zeros(layer.hidden_size, complex), []
    pole, dt = p["Lambda_re"] + 1j * p["Lambda_im"], np.exp(p["log_step"])
    for v in x:
        h = np.exp(pole * dt) * h + (np.exp(pole * dt) - 1) / pole * (
            (p["B_re"] + 1j * p["B_im"]) @ v
        )
        ys.append(2 * ((p["C_re"] + 1j * p["C_im"]) @ h).real + p["D"] * v)
    return ys


def rglru(layer, p, x):
    h, ys, k = np.zeros(x.shape[1]), [], layer.num_heads
    for v in x:
        parts = v.reshape(k, -1)
        r, i = (
            sigmoid(
                np.concatenate([p[f"weight_{g}"][j] @ parts[j] for j in range(k)]) + p[f"bias_{g}"]
            )
            for g in "ax"
        )
        a = sigmoid(p["Lambda"]) ** (8 * r)
        h = a * h + np.sqrt(1 - a**2) * (i * v)
        ys.append(h)
    return ys


def slstm(layer, p, x):
    h, ys, k = np.zeros(layer.hidden_size), [], layer.num_heads
    c, n = np.zeros_like(h), np.zeros_like(h)
    for v in x:
        parts = h.reshape(k, -1)
        z, i, f, o = (
            p[f"W_{g}"] @ v
            + np.concatenate([p[f"R_{g}"][j] @ parts[j] for j in range(k)])
            + p[f"b_{g}"]
            for g in "zifo"
        )
        c, n = sigmoid(f) * c + np.exp(i) * np.tanh(z), sigmoid(f) * n + np.exp(i)
        h = sigmoid(o) * c / n
        ys.append(np.concatenate([normed(part) for part in h.reshape(k, -1)]) * p["norm"])
    return ys


def mlstm(layer, p, x):
    k, ys = layer.num_heads, []
    width = layer.hidden_size // k
    S, n = np.zeros((k, width, width)), np.zeros((k, width))
    for v in x:
        q, key, value = ((p[f"W_{name}"] @ v).reshape(k, -1) for name in "qkv")
        i, f = np.exp(p["w_i"] @ v + p["b_i"]), sigmoid(p["w_f"] @ v + p["b_f"])
        outputs = []
        for j in range(k):
            S[j] = f[j] * S[j] + i[j] * np.outer(key[j], value[j]) / np.sqrt(width)
            n[j] = f[j] * n[j] + i[j] * key[j] / np.sqrt(width)
            outputs.append(normed(S[j].T @ q[j] / max(abs(n[j] @ q[j]), 1)))
        o = sigmoid(p["W_o"] @ v + p["b_o"])
        ys.append(p["weight_out"] @ (o * np.concatenate(outputs) * p["norm"]))
    return ys


def mamba(layer, p, x):
    i, rank, s = layer.hidden_size, layer.dt_rank, layer.state_size
    both = x @ p["in_proj"].T
    u, h, ys = convolved(both[:, :i], p["conv_weight"], p["conv_bias"]), np.zeros((i, s)), []
    for v, gate in zip(u, both[:, i:]):
        projected = p["x_proj"] @ v
        dt = softplus(p["dt_proj"] @ projected[:rank] + p["dt_bias"])
        h = np.exp(dt[:, None] * -np.exp(p["A_log"])) * h + np.outer(
            dt * v, projected[rank : rank + s]
        )
        ys.append(p["out_proj"] @ ((h @ projected[rank + s :] + p["D"] * v) * silu(gate)))
    return ys


def mamba2(layer, p, x):
    i, k, s = layer.hidden_size, layer.num_heads, layer.state_size
    all_ = x @ p["in_proj"].T
    gates, xbc, dts = all_[:, :i], all_[:, i:-k], all_[:, -k:]
    S, ys = np.zeros((k, s, i // k)), []
    for gate, v, dt in zip(gates, convolved(xbc, p["conv_weight"], p["conv_bias"]), dts):
        u, b, c = v[:i].reshape(k, -1), v[i : i + s], v[i + s :]
        dt, outputs = softplus(dt + p["dt_bias"]), []
        for j in range(k):
            S[j] = np.exp(-dt[j] * np.exp(p["A_log"][j])) * S[j] + dt[j] * np.outer(b, u[j])
            outputs.append(S[j].T @ c + p["D"][j] * u[j])
        ys.append(p["out_proj"] @ (rms(np.concatenate(outputs) * silu(gate)) * p["norm"]))
    return ys


def _projections(layer, p, v):
    return ((p[name] @ v).reshape(layer.num_heads, -1) for name in ("W_q", "W_k", "W_v"))


def retnet(layer, p, x):
    heads, ys = layer.num_heads, []
    half = layer.key_size // heads // 2
    turn = 10000.0 ** -(np.arange(half) / half)
    S = np.zeros((heads, half, layer.value_size // heads), complex)  # keys as complex numbers
    for t, v in enumerate(x):
        q, k, value = _projections(layer, p, v)
        q, k = ((z[:, :half] + 1j * z[:, half:]) * np.exp(1j * t * turn) for z in (q, k))
        outputs = []
        for j in range(heads):
            S[j] = (1 - 2.0 ** (-5 - j)) * S[j] + np.outer(k[j], value[j]) / np.sqrt(2 * half)
            outputs.append(normed((S[j].T @ q[j].conj()).real))
        ys.append(p["W_o"] @ (silu(p["W_g"] @ v) * np.concatenate(outputs)))
    return ys


def gla(layer, p, x):
    heads, ys = layer.num_heads, []
    S = np.zeros((heads, layer.key_size // heads, layer.value_size // heads))
    for v in x:
        q, k, value = _projections(layer, p, v)
        a = (sigmoid(p["W_a2"] @ (p["W_a1"] @ v) + p["b_a"]) ** (1 / 16)).reshape(heads, -1)
        outputs = []
        for j in range(heads):
            S[j] = np.diag(a[j]) @ S[j] + np.outer(k[j], value[j])
            outputs.append(rms(S[j].T @ q[j] / np.sqrt(q.shape[1])) * p["norm"])
        ys.append(p["W_o"] @ (silu(p["W_r"] @ v + p["b_r"]) * np.concatenate(outputs)))
    return ys


def deltanet(layer, p, x, gated=False):
    heads, ys = layer.num_heads, []
    qkv = convolved(
        np.concatenate([x @ p[name].T for name in ("W_q", "W_k", "W_v")], 1), p["conv_weight"]
    )
    S = np.zeros((heads, layer.key_size // heads, layer.value_size // heads))
    for v, all_ in zip(x, qkv):
        q, k, value = (
            z.reshape(heads, -1) for z in np.split(all_, [layer.key_size, 2 * layer.key_size])
        )
        beta, outputs = sigmoid(p["W_beta"] @ v), []
        for j in range(heads):
            if gated:
                S[j] *= np.exp(
                    -np.exp(p["A_log"][j]) * softplus((p["W_a"] @ v)[j] + p["dt_bias"][j])
                )
            kj = unit(k[j])
            S[j] = (np.eye(len(kj)) - beta[j] * np.outer(kj, kj)) @ S[j] + beta[j] * np.outer(
                kj, value[j]
            )
            outputs.append(rms(S[j].T @ unit(q[j]) / np.sqrt(len(kj))) * p["norm"])
        ys.append(p["W_o"] @ (np.concatenate(outputs) * (silu(p["W_g"] @ v) if gated else 1)))
    return ys


def gateddeltanet(layer, p, x):
    return deltanet(layer, p, x, gated=True)


def rwkv7(layer, p, x):
    heads, ys, before = layer.num_heads, [], np.zeros(x.shape[1])
    width = x.shape[1] // heads
    S = np.zeros((heads, width, width))
    for v in x:
        m = {name: v + (before - v) * p[f"mu_{name}"] for name in "rwkvag"}
        before = v
        r, k, value = (p[f"W_{name}"] @ m[name] for name in "rkv")
        w = np.exp(-np.exp(-0.5) * sigmoid(p["lambda_w"] + p["B_w"] @ np.tanh(p["A_w"] @ m["w"])))
        a = sigmoid(p["lambda_a"] + p["B_a"] @ (p["A_a"] @ m["a"]))
        g = p["B_g"] @ sigmoid(p["A_g"] @ m["g"])
        kk, k = k * p["xi"], k * (1 + (a - 1) * p["alpha"])
        outputs = []
        for j in range(heads):
            at = slice(j * width, (j + 1) * width)
            unit_kk = unit(kk[at], 1e-12)
            S[j] = S[j] @ (np.diag(w[at]) - np.outer(unit_kk, unit_kk * a[at])) + np.outer(
                value[at], k[at]
            )
            y = normed(S[j] @ r[at], 64e-5) * p["norm"][at] + p["norm_bias"][at]
            outputs.append(y + (r[at] * k[at] * p["rho"][at]).sum() * value[at])
        ys.append(p["W_o"] @ (g * np.concatenate(outputs)))
    return ys
