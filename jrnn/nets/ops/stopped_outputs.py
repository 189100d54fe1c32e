"""Outputs of an operator at which gradients stop, with a warning where that stops all of a loss's gradients.

`jax.lax.stop_gradient` would stop them silently. When the primitive on the tangents is transposed, it sees at which outputs
cotangents arrive, and warns if they arrive only at outputs that stop them.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import GradientWarning
from jrnn.jaxprs.jax_internals import Primitive, ad, batching, mlir


def stop_outputs(values: Sequence[Any], passes: Sequence[bool], warning: str) -> list[Any]:
    """Returns the values, and stops the gradients of values that `passes` excludes.

    Args:
        values: arrays of any dtype and shape.
        passes: for each value, whether its gradient passes.
        warning: the text of the warning, given while tracing, if gradients arrive only at outputs that stop them.
    """
    results = list(values)
    smooth = [k for k, v in enumerate(values) if jnp.issubdtype(jnp.result_type(v), jnp.inexact)]
    smooth_passes = tuple(passes[k] for k in smooth)
    if not all(smooth_passes):
        stopped = _stop(smooth_passes, warning, *(values[k] for k in smooth))
        for k, value in zip(smooth, stopped):
            results[k] = value
    return results


def warn_of_stopped(warning: str) -> None:
    warnings.warn(warning, GradientWarning, stacklevel=2)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _stop(passes: tuple[bool, ...], warning: str, *values: Any) -> tuple[Any, ...]:
    return values


@_stop.defjvp
def _(passes, warning, primals, tangents):
    return primals, tuple(_stop_p.bind(*tangents, passes=passes, warning=warning))


_stop_p = Primitive("jrnn_stop_outputs")  # linear: zeros for the tangents that do not pass
_stop_p.multiple_results = True


def _apply(*tangents: Any, passes: tuple[bool, ...], warning: str) -> list[Any]:
    return [t if p else jnp.zeros_like(t) for t, p in zip(tangents, passes)]


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    tangents = list(map(ad.instantiate_zeros, tangents))
    return _stop_p.bind(*primals, **params), _stop_p.bind(*tangents, **params)


def _transpose(
    cts: Sequence[Any], *tangents: Any, passes: tuple[bool, ...], warning: str
) -> list[Any]:
    arriving = [is_passed for ct, is_passed in zip(cts, passes) if not isinstance(ct, ad.Zero)]
    if arriving and not any(arriving):
        warn_of_stopped(warning)
    return [ct if p else ad.Zero(t.aval) for ct, p, t in zip(cts, passes, tangents)]


def _batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    return _stop_p.bind(*args, **params), list(dims)


_stop_p.def_impl(_apply)
_stop_p.def_abstract_eval(lambda *avals, **params: list(avals))
ad.primitive_jvps[_stop_p] = _jvp
ad.primitive_transposes[_stop_p] = _transpose
batching.primitive_batchers[_stop_p] = _batch
mlir.register_lowering(_stop_p, mlir.lower_fun(_apply, multiple_results=True))
