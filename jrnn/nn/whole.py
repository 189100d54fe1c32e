"""A recurrent layer as one equation of a jaxpr, for those who write it down as one operator of another system.

Shapes: T time, N batch, H hidden, K directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jrnn.jax_names import Primitive
from jrnn.nn.layers import zoneout_rates
from jrnn.nn.params import Weights
from jrnn.nn.settings import Settings
from jrnn.nn.units import State, Unit

# `with whole_layers(True):` traces layers that others know as one equation `recurrent_layer` each: for what reads a jaxpr.
# The equation cannot be run, differentiated or batched.
whole_layers = jax.make_user_context(False)

recurrent_layer = Primitive("recurrent_layer")
recurrent_layer.multiple_results = True


@recurrent_layer.def_abstract_eval
def _(x, *rest, unit, directions, **_):
    """x [T, N, D], the states [N, H] of each direction, and more -> y [T, N, K H] and the last states."""
    states = rest[: directions * unit.states]
    return [x.update(shape=(*x.shape[:2], directions * states[0].shape[-1])), *states]


def is_known(unit: Unit, weights: Weights, settings: Settings, key: Any, dtype: Any) -> bool:
    """Whether a layer is what other systems call an RNN, LSTM or GRU: no projection, norm or noise, in float32."""
    more = (weights.norm_ih, weights.norm_hh, weights.weight_hr)
    zoned = any(zoneout_rates(settings, (None,) * unit.states))
    return dtype == "float32" and key is None and not zoned and all(part is None for part in more)


def as_equation(
    unit: Unit, weights: Sequence[Weights], x: jax.Array, states: Sequence[State], lengths: jax.Array | None
) -> tuple[list[State], jax.Array]:
    """All directions of one layer; the arguments are those of `run_layer`, for each direction."""
    bias = weights[0].bias_ih is not None
    arrays = [getattr(w, name).astype(x.dtype) for w in weights for name in Weights._fields[: 4 if bias else 2]]
    flat = [leaf for state in states for leaf in state]
    more = [] if lengths is None else [lengths]
    y, *last = recurrent_layer.bind(
        x, *flat, *arrays, *more, unit=unit, directions=len(weights), bias=bias, lengths=bool(more)
    )
    size = unit.states
    return [tuple(last[k * size : (k + 1) * size]) for k in range(len(weights))], y
