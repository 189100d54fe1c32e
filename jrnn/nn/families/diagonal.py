"""LRU, S5 and RG-LRU: linear recurrences with diagonal matrices.

Source: Orvieto et al., Resurrecting recurrent neural networks for long sequences, 2023; Smith et al., Simplified state
space layers for sequence modeling, 2023; De et al., Griffin, 2024.

Shapes: T time, N batch, D input and output, H hidden, P complex states of S5, K heads.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.nn import initializers
from jax.typing import DTypeLike

from jrnn import jaxprs
from jrnn.errors import LayerError
from jrnn.nn.checks import Shape, check_integer
from jrnn.nn.params import Arrays, Params
from jrnn.nn.recurrent import ParameterTable, RecurrentLayer, constant, uniform
from jrnn.nn.settings import spelled_out
from jrnn.nn.span import Pair, PyTree, Span, along_last, heads


def _complex(re: Array, im: Array) -> Array:
    """A complex number of float32 parts or wider: there are none of 16-bit parts."""
    dtype = jaxprs.promoted_type(re.dtype, jnp.float32)
    return jax.lax.complex(re.astype(dtype), im.astype(dtype))


def _diagonal(h: Array, log_transition: Array, u: Array, span: Span) -> Pair:
    """h' = exp(log_transition dt) h + u over time; the states of all steps, and the last one.

    `u` [T, N, H] is what an input gives to the state of the next step with dt = 1. An input that stays for dt gives
    (exp(log_transition dt) - 1)/(exp(log_transition) - 1) times that (a zero-order hold).
    """
    if span.dt is None:
        transition = jnp.exp(log_transition)[None]
    else:
        exponent = span.dt[..., None] * log_transition[None, None]
        transition = jnp.exp(exponent)
        u = u * (jnp.expm1(exponent) / jnp.expm1(log_transition)[None, None])

    def step(h: Array, at: PyTree) -> Pair:
        u, own = at
        h = (transition if own is None else own) * h + u
        return h, h

    h, hs = span.scan(step, h, (u, None if span.dt is None else transition))
    return hs, h


class _ComplexState(RecurrentLayer):
    """A layer with a complex state [N, hidden_size], whose output has the size of its input."""

    hidden_size: int
    _timed = True

    def _fresh(self, batch: int, dtype: DTypeLike) -> Array:
        return jnp.zeros((batch, self.hidden_size), jaxprs.promoted_type(dtype, jnp.complex64))

    @jaxprs.with_promotion
    def _through(
        self,
        p: Params,
        x: Array,
        h: Array,
        log_transition: Array,
        scale: Array,
        span: Span,
    ) -> Pair:
        """Re(C h) for all steps of h' = exp(log_transition) h + scale B x, and the last h."""
        u = _complex(span.linear(x, p["B_re"]), span.linear(x, p["B_im"]))
        hs, h = _diagonal(h, log_transition, along_last(scale, u) * u, span)
        return span.linear(hs.real, p["C_re"]) - span.linear(hs.imag, p["C_im"]), h


class LRU(_ComplexState):
    """h' = lambda h + gamma B x, y = Re(C h) + D x, with lambda = exp(-exp(nu_log) + i exp(theta_log)).

    Args:
        input_size: features of the input and output, D.
        hidden_size: complex units, H; None: D.
        r_min, r_max: the absolute value of lambda lies in this ring at first.
        max_phase: the phase of lambda lies in [0, max_phase] at first.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = LRU(3, 8, r_min=0.9, r_max=0.999, rngs=nnx.Rngs(0))
    >>> y, h = layer(jnp.ones((5, 2, 3)))
    >>> y.shape, h.shape, h.dtype
    ((5, 2, 3), (2, 8), dtype('complex64'))
    """

    @spelled_out(RecurrentLayer.__init__)
    def __init__(
        self,
        input_size: int,
        hidden_size: int | None = None,
        *,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 2 * math.pi,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        if not 0 <= r_min < r_max <= 1:
            raise LayerError(
                f"LRU: r_min is {r_min} and r_max {r_max}; they must satisfy 0 <= r_min < r_max <= 1"
            )
        self.hidden_size = input_size if hidden_size is None else hidden_size
        self.ring = (r_min, r_max)
        self.max_phase = max_phase
        super().__init__(input_size, input_size, rngs=rngs, **options)

    def _parameters(self) -> ParameterTable:
        d = self.input_size
        h = self.hidden_size
        shapes = {"B_re": (h, d), "B_im": (h, d), "C_re": (d, h), "C_im": (d, h)}
        normal = {}
        for n, s in shapes.items():
            normal[n] = (initializers.normal((1 if n[0] == "C" else 0.5) ** 0.5 / s[1] ** 0.5), s)
        later = {
            "nu_log": constant(0.0, h),
            "theta_log": constant(0.0, h),
            "gamma_log": constant(0.0, h),
        }
        return later | normal | {"D": (initializers.normal(1.0), (d,))}

    def _initial(self, key: Array, dtype: DTypeLike) -> Arrays:
        of_radius, of_phase, key = jax.random.split(key, 3)
        low, high = self.ring
        # |lambda|^2 is uniform between the squares, so that lambda is uniform in the ring. 0 and 1 have no logarithm.
        square = jax.random.uniform(
            of_radius, (self.hidden_size,), minval=low**2 + 1e-6, maxval=high**2 - 1e-6
        )
        phase = self.max_phase * jax.random.uniform(of_phase, (self.hidden_size,), minval=1e-6)
        drawn = {
            "nu_log": jnp.log(-0.5 * jnp.log(square)),
            "theta_log": jnp.log(phase),
            "gamma_log": 0.5 * jnp.log1p(-square),
        }
        return super()._initial(key, dtype) | {
            name: value.astype(dtype) for name, value in drawn.items()
        }

    def _run(self, p: Params, x: Array, h: Array, span: Span) -> Pair:
        log_lambda = _complex(-jnp.exp(p["nu_log"]), jnp.exp(p["theta_log"])).astype(h.dtype)
        y, h = self._through(p, x, h, log_lambda, jnp.exp(p["gamma_log"]), span)
        return y + along_last(p["D"], x) * x, h


class S5(_ComplexState):
    """h' = exp(Lambda dt) h + (exp(Lambda dt) - 1)/Lambda B x, y = 2 Re(C h) + D x: a diagonal state space with many inputs.

    Lambda starts with the eigenvalues of the HiPPO-LegS matrix without its part of rank one. Of each pair of conjugate
    states, one is computed.

    Args:
        input_size: features of the input and output, D.
        hidden_size: complex states, P; they stand for 2 P real ones; None: D.
        dt_min, dt_max: the time steps dt of the states lie between these at first.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = S5(3, 8, rngs=nnx.Rngs(0))
    >>> y, h = layer(jnp.ones((5, 2, 3)), resets=jnp.zeros((5, 2), bool).at[3].set(True))
    >>> y.shape, h.shape, bool(jnp.allclose(y[3:], y[:2], atol=1e-6))
    ((5, 2, 3), (2, 8), True)
    """

    @spelled_out(RecurrentLayer.__init__)
    def __init__(
        self,
        input_size: int,
        hidden_size: int | None = None,
        *,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        if not 0 < dt_min < dt_max:
            raise LayerError(
                f"S5: dt_min is {dt_min} and dt_max {dt_max}; they must satisfy 0 < dt_min < dt_max"
            )
        self.hidden_size = check_integer(
            "S5: hidden_size", input_size if hidden_size is None else hidden_size, 1
        )
        self.dt_range = (dt_min, dt_max)
        super().__init__(input_size, input_size, rngs=rngs, **options)

    def _parameters(self) -> ParameterTable:
        d = self.input_size
        h = self.hidden_size
        names = ("Lambda_re", "Lambda_im", "log_step")
        matrices = {"B_re": (h, d), "B_im": (h, d), "C_re": (d, h), "C_im": (d, h)}
        later = {name: constant(0.0, h) for name in names} | {
            n: constant(0.0, *s) for n, s in matrices.items()
        }
        return later | {"D": (initializers.normal(1.0), (d,))}

    def _initial(self, key: Array, dtype: DTypeLike) -> Arrays:
        of_b, of_c, of_step, key = jax.random.split(key, 4)
        d = self.input_size
        h = self.hidden_size
        eigenvalues, vectors = hippo(2 * h)
        b = vectors.conj().T @ (jax.random.normal(of_b, (2 * h, d)) / math.sqrt(d))
        parts = jax.random.normal(of_c, (2, d, 2 * h)) / math.sqrt(2 * h)
        c = (parts[0] + 1j * parts[1]) / math.sqrt(2) @ vectors
        low, high = map(math.log, self.dt_range)
        drawn = {
            "Lambda_re": jnp.asarray(eigenvalues.real),
            "Lambda_im": jnp.asarray(eigenvalues.imag),
            "log_step": jax.random.uniform(of_step, (h,), minval=low, maxval=high),
            "B_re": b.real,
            "B_im": b.imag,
            "C_re": c.real,
            "C_im": c.imag,
        }
        return super()._initial(key, dtype) | {
            name: value.astype(dtype) for name, value in drawn.items()
        }

    def _run(self, p: Params, x: Array, h: Array, span: Span) -> Pair:
        poles = _complex(jnp.minimum(p["Lambda_re"], -1e-4), p["Lambda_im"]).astype(h.dtype)
        exponent = poles * jnp.exp(p["log_step"])
        y, h = self._through(p, x, h, exponent, (jnp.exp(exponent) - 1) / poles, span)
        return 2 * y + along_last(p["D"], x) * x, h


def hippo(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The eigenvalues [size/2] with positive imaginary parts and their vectors [size, size/2], of HiPPO-LegS's normal part.

    This matrix is -1/2 I - 1/2 sqrt((2 n + 1)(2 k + 1)) for n > k, and its negative above the diagonal.

    >>> eigenvalues, vectors = hippo(4)
    >>> eigenvalues.real.round(6).tolist(), bool((eigenvalues.imag > 0).all())
    ([-0.5, -0.5], True)
    """
    root = np.sqrt(2 * np.arange(size) + 1.0)
    skew = np.tril(-np.outer(root, root), -1) / 2
    frequencies, vectors = np.linalg.eigh(-1j * (skew - skew.T))
    return -0.5 + 1j * frequencies[size // 2 :], vectors[:, size // 2 :]


class RGLRU(RecurrentLayer):
    """h' = a h + sqrt(1 - a^2) (i x) with a = sigmoid(Lambda)^(8 r): the real-gated linear recurrent unit of Griffin.

    r = sigmoid(W_a x + b_a) and i = sigmoid(W_x x + b_x), where the weights are block-diagonal, one block a head.

    Args:
        input_size: features of the input, state and output, D.
        num_heads: blocks of the weights of the gates, K; it must divide D.
        options: keyword arguments of `RecurrentLayer`.

    >>> layer = RGLRU(4, num_heads=2, rngs=nnx.Rngs(0))
    >>> y, h = layer(jnp.ones((5, 2, 4)))
    >>> y.shape, bool((y[-1] == h).all())
    ((5, 2, 4), True)
    """

    @spelled_out(RecurrentLayer.__init__)
    def __init__(
        self, input_size: int, *, num_heads: int = 1, rngs: nnx.Rngs, **options: Any
    ) -> None:
        self.num_heads = check_heads("RGLRU", num_heads, input_size, "input_size")
        super().__init__(input_size, input_size, rngs=rngs, **options)

    def _parameters(self) -> ParameterTable:
        d = self.input_size
        k = self.num_heads
        start, _ = uniform(d // k, d // k)

        def decay(key: Array, shape: Shape, dtype: DTypeLike = jnp.float32) -> Array:
            # a^8 is uniform in [0.9, 0.999]
            root = jax.random.uniform(key, shape, minval=0.9, maxval=0.999) ** (1 / 8)
            return (jnp.log(root) - jnp.log1p(-root)).astype(dtype)

        blocks = (start, (k, d // k, d // k))
        biases = {"bias_a": constant(0.0, d), "bias_x": constant(0.0, d)}
        return {"weight_a": blocks, "weight_x": blocks, "Lambda": (decay, (d,))} | biases

    def _fresh(self, batch: int, dtype: DTypeLike) -> Array:
        return jnp.zeros((batch, self.input_size), dtype)

    def _run(self, p: Params, x: Array, h: Array, span: Span) -> Pair:
        def gate(name: str) -> Array:
            weight = p[f"weight_{name}"].astype(span.dtype)
            parts = heads(x, self.num_heads)
            z = jnp.einsum("tnki,koi->tnko", parts, weight, preferred_element_type=h.dtype).reshape(
                x.shape
            )
            return jax.nn.sigmoid(z + along_last(p[f"bias_{name}"], z))

        log_a = along_last(8.0 * jax.nn.log_sigmoid(p["Lambda"]), x) * gate("a")
        h, y = span.scan(
            rg_lru, h, (jnp.exp(log_a), jnp.sqrt(-jnp.expm1(2 * log_a)) * gate("x") * x)
        )
        return y, h


def rg_lru(h: Array, at: PyTree) -> Pair:
    """h' = a h + u, where u is the gated and scaled input."""
    a, u = at
    h = a * h + u
    return h, h


def check_heads(where: str, num_heads: Any, size: int, of: str) -> int:
    """The number of heads, which must divide the size."""
    count = check_integer(f"{where}: num_heads", num_heads, 1)
    if size % count:
        raise LayerError(f"{where}: num_heads is {count}, which does not divide {of}, {size}")
    return count
