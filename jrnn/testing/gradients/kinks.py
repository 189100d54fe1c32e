"""Kinks near a point: where a function has no derivative, so that central differences mean nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn.jaxprs import Eqn, bind, interpreted, scan_parts, trace
from jrnn.jaxprs.flat import body_of, source_of
from jrnn.testing.gradients.report import Blobs

NEAR = 1e-4  # of the distance to a kink, relative to the larger of 1 and the number; differences move a point by 6e-6
_STEPS = 64  # of a loop that are looked at
_PAIRS = {"max": "maximum", "min": "minimum", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def near_kinks(function: Callable, point: Blobs) -> list[str]:
    """Describes the three kinks nearest to a point, the nearest first, each with its line; only those within NEAR.

    >>> import jax.numpy as jnp
    >>> near_kinks(lambda p: {"y": jnp.abs(p["x"])}, {"x": jnp.array([0.5, 1e-7])})[0][:32]
    'abs has an argument 1.0e-07 away'
    """
    names = list(point)
    program = trace(
        lambda *values: list(function(dict(zip(names, values))).values()), list(point.values())
    )
    distances: list[tuple[Eqn, float]] = []
    interpreted(program, point.values(), lambda eqn, args: _results(eqn, args, distances))
    least: dict[str, float] = {}
    for eqn, distance in distances:
        source = source_of(eqn)
        name = _PAIRS.get(eqn.primitive.name, eqn.primitive.name)
        where = f"{name}{f' ({source})' if source else ''}"
        least[where] = min(least.get(where, np.inf), distance)
    nearest = sorted((d, where) for where, d in least.items() if d <= NEAR)[:3]
    described = []
    for distance, where in nearest:
        name, space, source = where.partition(" ")
        described.append(f"{name} has an argument {distance:.1e} away from its kink{space}{source}")
    return described


def _results(eqn: Eqn, args: list[Any], distances: list[tuple[Eqn, float]]) -> Sequence[Any]:
    """The results of an equation; appends each equation with a kink that is evaluated, and its smallest distance from it."""

    def called(closed: Any, args: Sequence[Any]) -> list[Any]:
        return interpreted(closed, args, lambda eqn, args: _results(eqn, args, distances))

    body = body_of(eqn)
    if body is not None and eqn.primitive.name not in ("custom_jvp_call", "custom_vjp_call"):
        return called(body, args)
    if eqn.primitive.name == "scan":
        p = eqn.params
        consts, carry, xs = scan_parts(p, args)
        for t in range(p["length"])[:: -1 if p["reverse"] else 1][:_STEPS]:
            carry = called(p["jaxpr"], [*consts, *carry, *(x[t] for x in xs)])[: len(carry)]
    elif (distance := _distance(eqn, args)) is not None:
        distances.append((eqn, distance))
    return bind(eqn, *args)


def _distance(eqn: Eqn, args: Sequence[Any]) -> float | None:
    """How far the arguments of an equation are from its kink, or None if it has none."""
    name = eqn.primitive.name
    if (
        not args
        or not jnp.issubdtype(jnp.result_type(args[0]), jnp.floating)
        or not np.size(args[0])
    ):
        return None
    x = np.asarray(args[0], np.float64)
    if name in _PAIRS and eqn.invars[0] is not eqn.invars[1]:
        gap = np.abs(x - np.asarray(args[1], np.float64))
    elif name in ("abs", "sign", "sqrt"):
        gap = np.abs(x)
    elif name in ("floor", "ceil"):
        gap = np.abs(x - np.round(x))
    elif name == "round":
        gap = np.abs(x - np.floor(x) - 0.5)
    elif name == "clamp":
        low, x, high = (np.asarray(a, np.float64) for a in args)
        gap = np.minimum(np.abs(x - low), np.abs(x - high))
    else:
        return None
    gap = gap / np.maximum(1.0, np.abs(x))
    return float(np.nanmin(np.where(np.isfinite(gap), gap, np.inf)))
