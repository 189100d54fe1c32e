"""Random loops over small matrices, as JAX traces them and with linear algebra as arithmetic, compared in float64.

    python tests/loops/random_small_loops.py --seed 0 --count 1000

A step is a scientific one (`STEPS`) or some of `OPERATIONS` in a row. Values, gradients and second derivatives are compared,
by numpy, which compiles nothing. A tenth of the programs gets NaN. `--as-users` compiles marked loops by XLA instead.

Shapes: n states, m observations.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from jax.lax.linalg import triangular_solve
from quick_compilation import OPTIONS

import jrnn
from jrnn.jaxprs import by_numpy
from jrnn.loops.passes.arithmetic.rewrite import rewritten
from jrnn.loops.strategies.try_arithmetic import fits_arithmetic

Rng = np.random.Generator
Step = Callable[..., Any]


def positive(a: Any) -> Any:
    return a @ jnp.conj(a).T / a.shape[0] + 0.3 * jnp.eye(a.shape[0])


# Operations: of two matrices [n, n], with random choices -----------------------------------------------------------------


def _triangular(rng: Rng) -> Step:
    flags = dict(
        zip(
            ("left_side", "lower", "transpose_a", "conjugate_a", "unit_diagonal"),
            map(bool, rng.integers(2, size=5)),
        )
    )
    return lambda a, b: triangular_solve(
        jnp.tanh(a.real).astype(a.dtype) + 3 * jnp.eye(a.shape[0]), b, **flags
    )


def _picked(rng: Rng) -> Step:
    at = rng.integers(-4, 6, size=rng.integers(2, 6))
    how = rng.choice(["set", "add", "multiply"])
    return lambda a, b: getattr(a.at[at], how)(
        b[0] * 0.5, unique_indices=bool(how == "multiply" and len({*at % 1}) == len(at))
    )


def _sorted(rng: Rng) -> Step:
    axis = int(rng.integers(2))  # drawn once: a step is traced several times
    return lambda a, b: jnp.sort(a.real, axis=axis).astype(a.dtype) + b


OPERATIONS: dict[str, Callable[[Rng], Step]] = {
    "product": lambda rng: lambda a, b: a @ b,
    "product of a transpose": lambda rng: lambda a, b: a.T @ b,
    "einsum": lambda rng: lambda a, b: jnp.einsum("ij,kj,ik->ij", a, b, a),
    "vector": lambda rng: lambda a, b: a * (b @ a[0]),
    "batched": lambda rng: lambda a, b: jax.vmap(lambda v: a @ jnp.outer(v, v))(b).sum(0),
    "cholesky": lambda rng: lambda a, b: jnp.linalg.cholesky(positive(a)) + b,
    "indefinite": lambda rng: lambda a, b: jnp.nan_to_num(jnp.linalg.cholesky(a + jnp.conj(a).T), nan=0.5) + b,
    "cho_solve": lambda rng: lambda a, b: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(positive(a)), True), b),
    "triangular": _triangular,
    "solve": lambda rng: lambda a, b: jnp.linalg.solve(a + 2 * jnp.eye(a.shape[0]), b),
    "batched solve": lambda rng: lambda a, b: jnp.linalg.solve(jnp.stack([a, b]) + 2 * jnp.eye(a.shape[0]), b).sum(0),
    "inverse": lambda rng: lambda a, b: jnp.linalg.inv(positive(a)) @ b,
    "determinant": lambda rng: lambda a, b: b * jnp.tanh(jnp.linalg.det(a)),
    "slogdet": lambda rng: lambda a, b: b * jnp.linalg.slogdet(positive(a))[1],
    "qr": lambda rng: lambda a, b: jnp.linalg.qr(a + 2 * jnp.eye(a.shape[0]))[0] @ b,
    "r": lambda rng: lambda a, b: jnp.linalg.qr(jnp.concatenate([a, jnp.eye(a.shape[0]), b]))[1],
    "sort": _sorted,
    "argsort": lambda rng: lambda a, b: b[jnp.argsort(a[0].real)],
    "median": lambda rng: lambda a, b: b * jnp.median(a.real, axis=0),
    "largest": lambda rng: lambda a, b: b * jax.lax.top_k(a[0].real, min(2, a.shape[0]))[0].sum(),
    "scatter": _picked,
    "branch": lambda rng: lambda a, b: jax.lax.cond(a[0, 0].real > 0, lambda: a @ b, lambda: jnp.linalg.inv(positive(b))),
    "loop": lambda rng: lambda a, b: jax.lax.scan(lambda c, x: (jnp.tanh(c @ a + x), None), b, jnp.stack([a, b]))[0],
    "call": lambda rng: lambda a, b: jax.checkpoint(jax.jit(lambda a, b: jnp.linalg.solve(positive(a), b)))(a, b),
    "norm": lambda rng: lambda a, b: a / (1 + jnp.sqrt(jnp.sum(jnp.abs(a) ** 2))) + 0.1 * b,
}  # fmt: skip


def composed(rng: Rng, n: int, kind: Any) -> tuple[Step, Any, Any]:
    """Some operations in a row, on the carry, what they made, and the input."""
    chosen = [
        (OPERATIONS[name](rng), *rng.integers(9, size=2))
        for name in rng.choice([*OPERATIONS], rng.integers(1, 5))
    ]

    def step(carry: Any, x: Any) -> Any:
        values = [carry, x]
        for operation, i, j in chosen:
            values.append(operation(values[i % len(values)], values[j % len(values)]))
        new = values[-1]
        return 0.5 * new / (1 + jnp.sqrt(jnp.sum(jnp.abs(new) ** 2))) + 0.2 * x, (
            new[0],
            jnp.trace(values[-2]),
        )

    return step, normal(rng, kind, n, n), normal(rng, kind, 4, n, n)


# Steps of science: (step, carry, xs) --------------------------------------------------------------------------------------


def normal(rng: Rng, kind: Any, *shape: int) -> np.ndarray:
    drawn = rng.normal(size=shape)
    return drawn + 1j * rng.normal(size=shape) if kind is complex else drawn


def kalman(rng: Rng, n: int, kind: Any) -> tuple[Step, Any, Any]:
    m, joseph = int(rng.integers(1, n + 1)), rng.random() < 0.5
    f, h = np.eye(n) + normal(rng, float, n, n) / 10, normal(rng, float, m, n)

    def step(belief: Any, y: Any) -> Any:
        mean, cov = f @ belief[0], f @ belief[1] @ f.T + 0.1 * jnp.eye(n)
        s = h @ cov @ h.T + 0.2 * jnp.eye(m)
        gain = (
            jax.scipy.linalg.solve(s, h @ cov, assume_a="pos").T
            if joseph
            else cov @ h.T @ jnp.linalg.inv(s)
        )
        error = y - h @ mean
        left = jnp.eye(n) - gain @ h
        cov = left @ cov @ left.T + 0.2 * gain @ gain.T if joseph else left @ cov
        return (mean + gain @ error, cov), jax.scipy.stats.multivariate_normal.logpdf(
            error, jnp.zeros(m), s
        )

    return step, (normal(rng, float, n), np.eye(n)), normal(rng, float, 4, m)


def riccati(rng: Rng, n: int, kind: Any) -> tuple[Step, Any, Any]:
    a, b = normal(rng, float, n, n) / 2, normal(rng, float, n, 2)

    def step(p: Any, q: Any) -> Any:
        gain = jnp.linalg.solve(jnp.eye(2) + b.T @ p @ b, b.T @ p @ a)
        return a.T @ p @ (a - b @ gain) + jnp.diag(q**2), gain

    return step, np.eye(n), normal(rng, float, 4, n)


def rigid_body(rng: Rng, n: int, kind: Any) -> tuple[Step, Any, Any]:
    inertia = np.asarray(positive(normal(rng, float, 3, 3)))

    def step(state: Any, torque: Any) -> Any:
        rotation, omega = state
        omega = omega + 0.1 * jnp.linalg.solve(inertia, torque - jnp.cross(omega, inertia @ omega))
        x, y, z = 0.1 * omega
        spin = jnp.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
        turned = rotation @ jnp.linalg.solve(jnp.eye(3) - spin / 2, jnp.eye(3) + spin / 2)
        return (turned, omega), turned @ omega

    return step, (np.eye(3), normal(rng, float, 3)), normal(rng, float, 4, 3)


def unscented(rng: Rng, n: int, kind: Any) -> tuple[Step, Any, Any]:
    w = normal(rng, float, n, n) / 2

    def step(belief: Any, y: Any) -> Any:
        mean, cov = belief
        root = jnp.linalg.cholesky((n + 1) * cov)
        points = jnp.tanh(jnp.concatenate([mean[None], mean + root.T, mean - root.T]) @ w) + mean
        middle = points.mean(0)
        apart = points - middle
        cov = apart.T @ apart / (2 * n) + 0.1 * jnp.eye(n)
        gain = jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(cov + jnp.eye(n)), cov).T
        return (middle + gain @ (y - middle), cov - gain @ cov), middle

    return step, (normal(rng, float, n), np.eye(n)), normal(rng, float, 4, n)


def markov(rng: Rng, n: int, kind: Any) -> tuple[Step, Any, Any]:
    transition = jax.nn.log_softmax(normal(rng, float, n, n), axis=1)

    def step(alpha: Any, seen: Any) -> Any:
        alpha = jax.nn.logsumexp(alpha[:, None] + transition, axis=0) + seen
        best = jax.lax.top_k(alpha, min(2, n))[0]
        return alpha, jnp.exp(alpha - best[0]) @ jnp.exp(transition)

    return step, normal(rng, float, n), normal(rng, float, 4, n)


def implicit(rng: Rng, n: int, kind: Any) -> tuple[Step, Any, Any]:
    """An implicit Euler step by two Newton steps."""
    w = normal(rng, float, n, n) / 2

    def step(y: Any, forcing: Any) -> Any:
        field = lambda z: z - y - 0.1 * (jnp.tanh(w @ z) + forcing)  # noqa: E731
        newton = lambda _, z: z - jnp.linalg.solve(jax.jacfwd(field)(z), field(z))  # noqa: E731
        return (z := jax.lax.fori_loop(0, 2, newton, y)), jnp.sort(z)

    return step, normal(rng, float, n), normal(rng, float, 4, n)


STEPS = (kalman, riccati, rigid_body, unscented, markov, implicit)


# Comparison ---------------------------------------------------------------------------------------------------------------


def program(seed: int) -> tuple[Callable, list[Any], str]:
    """Returns a function of the leaves of the carry and the inputs, these, and what it is."""
    rng = np.random.default_rng(seed)
    kind = complex if rng.random() < 0.15 else float
    family = composed if rng.random() < 0.6 else STEPS[rng.integers(len(STEPS))]
    step, carry, xs = family(rng, int(rng.integers(1, 6)), kind)
    leaves, tree = jax.tree.flatten((carry, xs))
    leaves = [np.asarray(leaf) for leaf in leaves]
    if rng.random() < 0.1:
        leaves[-1].reshape(-1)[rng.integers(leaves[-1].size)] = np.nan
    reverse, mapped, order = (
        rng.random() < 0.3,
        rng.random() < 0.2,
        ("value", "gradient", "second")[rng.integers(3)],
    )

    def run(*leaves: Any) -> Any:
        carry, xs = jax.tree.unflatten(tree, leaves)
        return jax.tree.leaves(jax.lax.scan(step, carry, xs, reverse=reverse))

    def loss(*leaves: Any) -> Any:
        parts = (
            jnp.sum(jnp.cos(jnp.arange(v.size)).reshape(v.shape) * jnp.tanh(v.real))
            for v in run(*leaves)
        )
        return sum(parts)

    gradient = jax.grad(loss, tuple(range(len(leaves))))
    whole = {
        "value": run,
        "gradient": gradient,
        "second": lambda *leaves: jax.jvp(gradient, leaves, tuple(map(jnp.cos, leaves)))[1],
    }[order]
    if mapped:
        leaves = [np.stack([leaf, 0.5 * leaf]) for leaf in leaves]
        whole = jax.vmap(whole)
    return (
        whole,
        leaves,
        f"{family.__name__} {order}{' mapped' * mapped}{' reverse' * reverse} {kind.__name__}",
    )


def fault(seed: int, compiled: bool = False) -> str | None:
    """Returns how the results of a program differ, or None if they agree."""
    with jax.enable_x64(True), np.errstate(all="ignore"):
        whole, leaves, what = program(seed)
        try:
            with jax.numpy_rank_promotion("allow"):
                closed = jax.make_jaxpr(lambda *leaves: jax.tree.leaves(whole(*leaves)))(*leaves)
        except NotImplementedError:  # no derivative
            return None
        nearby = [
            leaf * (1 + 1e-13 * np.random.default_rng(seed).normal(size=leaf.shape))
            for leaf in leaves
        ]
        if compiled:
            reference = jax.jit(whole, compiler_options=OPTIONS)
            theirs, near = (reference(*given) for given in (leaves, nearby))
            ours = jrnn.optimize_scans(jax.jit(lambda *leaves: whole(*leaves)))(*leaves)
            theirs, near, ours = (
                list(map(np.asarray, jax.tree.leaves(v))) for v in (theirs, near, ours)
            )
        else:
            theirs, near = (
                by_numpy.evaluate_by_numpy(closed.jaxpr, closed.consts, given)
                for given in (leaves, nearby)
            )
            changed = rewritten(closed, fits_arithmetic)
            ours = by_numpy.evaluate_by_numpy(changed.jaxpr, changed.consts, leaves)
    for a, b, c in zip(ours, theirs, near, strict=True):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"seed {seed}, {what}: {a.dtype}{a.shape} instead of {b.dtype}{b.shape}"
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return f"seed {seed}, {what}: {a.ravel()} instead of {b.ravel()}"
        finite = np.isfinite(b) & np.isfinite(c)
        a, b, c = a[finite], b[finite], c[finite]
        size = np.max(np.abs(b), initial=1.0)
        condition = max(1.0, np.max(np.abs(b - c), initial=0.0) / size / 1e-13)
        off = np.max(np.abs(a - b), initial=0.0) / size
        if not off <= 1e-10 * condition:
            return f"seed {seed}, {what}: off by {off:.1e}, condition {condition:.1e}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument(
        "--as-users", action="store_true", help="compile marked loops, with XLA's default flags"
    )
    asked = parser.parse_args()
    faults = 0
    for seed in range(asked.seed, asked.seed + asked.count):
        told = fault(seed, asked.as_users)
        if told is not None:
            faults += 1
            print(told, flush=True)
        if (seed - asked.seed) % 100 == 99:
            jax.clear_caches()
            print(f"{seed - asked.seed + 1} programs, {faults} differ", flush=True)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
