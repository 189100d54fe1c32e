"""One loss, three gradients: JAX's, the generated net's, and central differences, in float64, side by side.

The first two are exact and must agree to rounding; differences are only as good as their step, and catch what both of the
others might have in common: a wrong forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from .autodiff import GradientSlice, add_gradients
from .errors import GradientError, near
from .ir import Net
from .lowering import to_jax

STEP = 6e-6  # about the cube root of float64's epsilon, where rounding and truncation of a central difference meet


@dataclass(frozen=True)
class BlobAgreement:
    """How well the three gradients of one blob agree.

    `net_error` is the largest absolute difference between JAX's and the net's gradient, `difference_error` that between
    JAX's and the central differences over `checked` elements; both are divided by the gradient's own largest element where
    that is above 1. `worst` is the index where they are farthest apart, with the three values there.
    """

    name: str
    shape: tuple[int, ...]
    net_error: float
    difference_error: float
    checked: int
    worst: tuple[int, ...]
    values: tuple[float, float, float]
    agrees: bool


@dataclass(frozen=True)
class GradientReport:
    """The loss, and an agreement for every blob that was differentiated."""

    loss: float
    blobs: tuple[BlobAgreement, ...]
    tolerance: float
    difference_tolerance: float

    @property
    def agrees(self) -> bool:
        return all(b.agrees for b in self.blobs)

    def __str__(self) -> str:
        width = max([4, *(len(b.name) for b in self.blobs)])
        lines = [f"{'blob':<{width}}  {'shape':<14} {'jax - net':>10} {'jax - diff':>10}  worst: jax, net, difference"]
        for b in self.blobs:
            values = ", ".join(f"{v:.6g}" for v in b.values)
            lines.append(
                f"{b.name:<{width}}  {b.shape!s:<14} {b.net_error:>10.1e} {b.difference_error:>10.1e}  "
                f"{list(b.worst)}: {values}{'' if b.agrees else '   DISAGREES'}"
            )
        return "\n".join(lines)


def forward_part(net: Net, loss: str) -> Net:
    """The operators of a training net before the one that seeds the gradient of `loss`; the whole net where none does."""
    seed = f"{loss}_autogen_grad"
    k = next((k for k, op in enumerate(net.ops) if seed in op.outputs), len(net.ops))
    return replace(net, ops=net.ops[:k], external_outputs=())


def check_gradients(
    net: Net,
    blobs: Mapping[str, Any],
    loss: str,
    *,
    wrt: Iterable[str] | None = None,
    key: Any = None,
    tolerance: float = 1e-10,
    difference_tolerance: float = 1e-6,
    max_elements: int = 200,
) -> GradientReport:
    """Computes the gradient of a loss in three ways, in float64, and compares them element by element.

    Args:
        net: the forward net, or a training net, whose backward pass is left aside.
        blobs: what the net reads; floating point blobs are converted to float64.
        loss: a blob of one element.
        wrt: blobs to differentiate by; every floating point one given that the loss depends on, by default.
        key: a `jax.random.key` for random operators; each evaluation draws the same numbers.
        tolerance: for JAX's gradient against the net's, relative to the gradient's largest element where that is above 1.
        difference_tolerance: the same for JAX's gradient against central differences.
        max_elements: how many elements of a blob are checked by differences, spread evenly.

    Raises:
        GradientError: for a loss of more than one element, an unknown blob, or an operator without gradient.
        NetError, OpError: as `run_net` does.

    >>> from jrnn.ir import Net, Op
    >>> net = Net("n", (Op.of("Tanh", ["x"], ["y"]), Op.of("SumElements", ["y"], ["loss"])))
    >>> check_gradients(net, {"x": np.array([0.5, -1.0], np.float32)}, "loss").agrees
    True
    """
    net = forward_part(net, loss)
    with jax.enable_x64(True):
        given = {n: _as_float64(v) for n, v in blobs.items()}
        read = {i for op in net.ops for i in op.inputs}
        floating = [n for n, v in given.items() if v.dtype == np.float64]
        for name in wrt or ():
            if name not in floating:
                raise GradientError(
                    f"cannot differentiate by {name!r}, not a floating point blob{near(name, floating)}"
                )
        names = list(wrt) if wrt is not None else [n for n in floating if n in read]
        fixed = {n: v for n, v in given.items() if n not in names}
        point = {n: jnp.asarray(given[n]) for n in names}

        forward = to_jax(net, [loss])
        value = jax.jit(lambda p: forward({**fixed, **p}, key=key)[loss])
        at_point = value(point)
        if at_point.size != 1:
            raise GradientError(f"loss {loss!r} has shape {list(at_point.shape)}; it must have one element")
        by_jax = jax.jit(jax.grad(lambda p: forward({**fixed, **p}, key=key)[loss].reshape(())))(point)
        by_net = _net_gradients(net, loss, fixed, point, key)
        sampled = {n: _sample(point[n].size, max_elements) for n in names}
        differences = _central_differences(value, point, sampled)
        found = [
            _compare(n, by_jax[n], by_net[n], sampled[n], differences[n], tolerance, difference_tolerance)
            for n in names
        ]
        return GradientReport(float(at_point.reshape(())), tuple(found), tolerance, difference_tolerance)


def _as_float64(value: Any) -> Any:
    value = np.asarray(value)
    return value.astype(np.float64) if value.dtype.kind == "f" else value


def _net_gradients(net: Net, loss: str, fixed, point, key) -> dict[str, np.ndarray]:
    full, gradients = add_gradients(net, [loss])
    reached = {n: gradients[n] for n in point if n in gradients}
    blobs = [b for g in reached.values() for b in (g if isinstance(g, GradientSlice) else (g,))]
    fn = to_jax(full, dict.fromkeys(blobs))
    got = jax.jit(lambda p: fn({**fixed, **p}, key=key))(point)
    found = {n: np.zeros(v.shape) for n, v in point.items()}
    for n, g in reached.items():
        if isinstance(g, GradientSlice):
            np.add.at(found[n], np.asarray(got[g.indices]), np.asarray(got[g.values]))
        else:
            found[n] = np.asarray(got[g])
    return found


def _sample(size: int, most: int) -> np.ndarray:
    """Up to `most` indices, evenly spread."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64)) if size else np.zeros(0, np.int64)


def _central_differences(value, point, sampled: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """(f(x + h) - f(x - h)) / 2h at the sampled elements of each blob, all from one compiled function."""
    flat, unflatten = ravel_pytree(point)
    names = sorted(point)  # the order in which ravel_pytree puts the leaves of a dict
    starts = dict(zip(names, np.cumsum([0, *(point[n].size for n in names)])))
    where = np.concatenate([starts[n] + sampled[n] for n in names]) if names else np.zeros(0, np.int64)
    steps = STEP * np.maximum(1.0, np.abs(np.asarray(flat)[where]))

    def difference(k, h):
        return (value(unflatten(flat.at[k].add(h))) - value(unflatten(flat.at[k].add(-h)))).reshape(()) / (2 * h)

    # one element after the other, eight at a time: a whole batch would hold the net's blobs once for every element
    found = np.asarray(jax.jit(lambda w, s: jax.lax.map(lambda a: difference(*a), (w, s), batch_size=8))(where, steps))
    ends = np.cumsum([len(sampled[n]) for n in names])[:-1]
    return dict(zip(names, np.split(found, ends)))


def _compare(name, by_jax, by_net, where, differences, tolerance, difference_tolerance) -> BlobAgreement:
    by_jax, by_net = np.asarray(by_jax), np.asarray(by_net)
    if by_jax.shape != by_net.shape:
        raise GradientError(f"gradient of {name!r}: JAX's is {list(by_jax.shape)}, the net's {list(by_net.shape)}")
    scale = max(1.0, float(np.max(np.abs(by_jax), initial=0.0)))
    off_net = np.abs(by_jax - by_net).reshape(-1) / scale
    off_difference = np.abs(by_jax.reshape(-1)[where] - differences) / scale
    net_error, difference_error = (float(np.max(e, initial=0.0)) for e in (off_net, off_difference))
    agrees = net_error <= tolerance and difference_error <= difference_tolerance  # false for NaN
    values, worst = (0.0, 0.0, 0.0), ()
    if len(where):
        # of the elements that differences were taken of, the one where either of the others is farthest off
        k = int(np.argmax(off_net[where] / tolerance + off_difference / difference_tolerance))
        worst = tuple(int(i) for i in np.unravel_index(where[k], by_jax.shape))
        values = (float(by_jax[worst]), float(by_net[worst]), float(differences[k]))
    return BlobAgreement(name, by_jax.shape, net_error, difference_error, len(where), worst, values, agrees)
