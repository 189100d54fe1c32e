"""A derived program agrees with its loop on random numbers before it is used.

A chunk program, a solution in rounds and the like are derived by reading a step's equations. As a compiler's translation is
validated, the derived program and the loop run for a few steps on small random numbers, values and tangents, in float64 by
numpy (`by_numpy.py`). The axes of large arrays are made smaller first (`resized.py`). A verdict is kept by structure.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jrnn import jaxprs
from jrnn.jaxprs.by_numpy import evaluate
from jrnn.jaxprs.resized import resized
from jrnn.loops.loop import mark
from jrnn.loops.loop.record import strict_passes

TOLERANCE = 1e-9  # in units of the largest element of each result; two right programs differ by 1e-13
_SCALE = 0.4  # of random numbers: carries that grow by their square stay small
_MOST = 1e8  # elements to compute, about a nanosecond each
_MOST_NUMBERS = 1e6  # random numbers
_CALL = 1e4  # what an operation of numpy costs besides, in elements

Flat = Sequence[Any]
Function = Callable[..., Flat]


def disagreement(derived: Function, original: Function, avals: Sequence[Any]) -> str | None:
    """Compares two functions of the same arrays on random numbers, values and tangents.

    Args:
        derived, original: functions that JAX can trace and differentiate.
        avals: the types of the arguments.

    Returns:
        what differs, or None if the functions agree.

    >>> import jax.numpy as jnp
    >>> disagreement(lambda x: [x * x], lambda x: [x**2], [jax.typeof(jnp.ones(3))])
    >>> disagreement(lambda x: [x * x], lambda x: [x**3], [jax.typeof(jnp.ones(3))])
    'result 0 is off by 3e+00'
    """
    places = [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)]
    programs = []
    if sum(jaxprs.elements(a.shape) for a in avals) > _MOST_NUMBERS:
        raise TooLarge
    for fn in (original, derived):
        with mark.unmarked():
            closed = jax.make_jaxpr(_with_tangents(fn, places, len(avals)))(*avals, *(avals[i] for i in places))
        if _work(closed.jaxpr) > _MOST:
            raise TooLarge
        programs.append(closed)
    inputs, tangents = (_random(avals, seed) for seed in (0, 1))
    given = [*inputs, *(tangents[i] for i in places)]
    expected, computed = (evaluate(closed.jaxpr, closed.consts, given, wide=True) for closed in programs)
    count = len(expected) // 2
    for i, (theirs, ours) in enumerate(zip(expected, computed, strict=True)):
        off = _off(ours, theirs)
        if not off <= TOLERANCE:
            return f"{'result' if i < count else 'tangent of result'} {i % count} is off by {off:.0e}"
    return None


class TooLarge(Exception):
    """Raised if a comparison would take too long."""


def _with_tangents(fn: Function, places: Sequence[int], count: int) -> Function:
    def of(*args: Any) -> Flat:
        def of_moving(*moving: Any) -> Flat:
            return list(fn(*jaxprs.replaced(args[:count], places, moving)))

        values, tangents = jax.jvp(of_moving, [args[i] for i in places], list(args[count:]))
        return [*values, *tangents]

    return of


def _random(avals: Sequence[Any], seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)

    def of(aval: Any) -> Any:
        if aval.dtype == bool:
            return rng.random(aval.shape) < 0.5
        if jnp.issubdtype(aval.dtype, jnp.integer):
            return rng.integers(0, 3, aval.shape).astype(aval.dtype)
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            return _SCALE * (rng.normal(size=aval.shape) + 1j * rng.normal(size=aval.shape))
        return _SCALE * rng.normal(size=aval.shape)

    return list(map(of, avals))


def _off(computed: Any, expected: Any) -> float:
    """Returns the largest difference, in units of the largest element; infinite where only one of two is finite."""
    if expected.dtype.kind not in "fc":
        return 0.0 if np.array_equal(computed, expected) else np.inf
    finite = np.isfinite(expected)
    if not np.array_equal(np.isfinite(computed), finite):
        return np.inf
    size = np.max(np.abs(expected[finite]), initial=0.0)
    return float(np.max(np.abs(computed - expected)[finite], initial=0.0) / (size or 1.0))


def _work(jaxpr: Any) -> float:
    """Returns the elements that numpy computes, with a constant for each operation."""
    total = 0.0
    for eqn in jaxpr.eqns:
        inner = [_work(body) for body in jaxprs.sub_jaxprs(eqn)]
        steps = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += _CALL + steps * max(inner, default=0.0) + sum(jaxprs.elements(v.aval.shape) for v in eqn.outvars)
        if eqn.primitive.name == "dot_general":
            total += jaxprs.operations(eqn) / 8
    return total


# Loops ------------------------------------------------------------------------------------------------------------------

# From a closed step, the numbers of its constants, carries and steps, and the direction: the derived program, as a function
# of constants, initial carries and inputs, one after the other; or None if there is none for so few steps.
Derive = Callable[[Any, int, int, int, bool], Function | None]


@dataclass(frozen=True)
class _Question:
    """A step and how to derive a program; equal questions have the same text."""

    text: str
    step: Any = field(compare=False)
    counts: tuple[int, int] = field(compare=False)
    length: int = field(compare=False)
    reverse: bool = field(compare=False)
    derive: Derive = field(compare=False)


def verdict(
    step: Any, n_consts: int, n_carry: int, length: int, reverse: bool, kind: str, derive: Derive
) -> tuple[bool, str]:
    """Returns whether a derived program may be used, and what to say about it ("" if it agrees with the loop).

    Args:
        step: a closed jaxpr, from constants, carries and inputs to new carries and outputs.
        n_consts, n_carry: the numbers of constants and carries.
        length: how many steps to compare.
        reverse: the direction of the loop.
        kind: names the derivation.
        derive: derives the program from a step.
    """
    digest = hashlib.sha256()
    for const in getattr(step, "consts", ()):
        digest.update(repr((jnp.shape(const), jax.typeof(const).dtype)).encode())
        if not isinstance(const, jax.core.Tracer):
            digest.update(np.asarray(const).tobytes())
    text = f"{kind} {n_consts} {n_carry} {length} {reverse} {digest.hexdigest()} {step}"
    try:
        agrees, note = _answer(_Question(text, step, (n_consts, n_carry), length, reverse, derive))
    except TooLarge:
        return True, "not compared with the loop: too large"
    except Exception as error:
        return True, f"not compared with the loop, which raises {type(error).__name__} on small arrays"
    assert agrees or not strict_passes.value, note
    return agrees, note


@functools.lru_cache(maxsize=1024)
def _answer(question: _Question) -> tuple[bool, str]:
    n_consts, n_carry = question.counts
    program = jaxprs.opened(question.step)
    if any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in program.invars):
        return True, "not compared with the loop: it reads random keys"
    try:
        run, avals = resized(program, list(zip(program.invars[n_consts:], program.outvars[:n_carry])))
        with mark.unmarked():
            small = jax.make_jaxpr(run)(*avals)
        difference = _difference(question, small, avals)
    except TooLarge:
        raise
    except Exception:  # it cannot be made smaller
        difference = _difference(question, question.step, [v.aval for v in program.invars])
    return (True, "") if difference is None else (False, f"on random numbers, {difference} (please report it)")


def _difference(question: _Question, step: Any, avals: Sequence[Any]) -> str | None:
    counts = *question.counts, question.length, question.reverse
    with mark.unmarked():
        derived = question.derive(step, *counts)
    if derived is None:
        return None
    end = sum(question.counts)
    stacks = [jax.ShapeDtypeStruct((question.length, *a.shape), a.dtype) for a in avals[end:]]
    return disagreement(derived, scanned(jaxpr_as_fun(step), *counts), [*avals[:end], *stacks])


def lifted(program: jaxprs.Program) -> tuple[Any, int]:
    """Returns a step as a closed jaxpr whose first arguments are its constants that are traced, and their number."""
    traced = [v for v, c in zip(program.constvars, program.consts) if isinstance(c, jax.core.Tracer)]
    fixed = {v: c for v, c in zip(program.constvars, program.consts) if v not in traced}
    names = (*traced, *program.invars)

    def step(*args: Any) -> Flat:
        env = jaxprs.evaluate(program.eqns, fixed | dict(zip(names, args)))
        return [jaxprs.value(env, a) for a in program.outvars]

    with mark.unmarked():
        return jax.make_jaxpr(step)(*(v.aval for v in names)), len(traced)


def scanned(step: Function, n_consts: int, n_carry: int, length: int, reverse: bool) -> Function:
    """Returns `jax.lax.scan` of a step as a function of constants, initial carries and inputs, one after the other."""
    end = n_consts + n_carry

    def loop(*args: Any) -> Flat:
        def of_carry(carry: Flat, x: Flat) -> tuple[Flat, Flat]:
            outs = step(*args[:n_consts], *carry, *x)
            return list(outs[:n_carry]), list(outs[n_carry:])

        carry, ys = jax.lax.scan(of_carry, list(args[n_consts:end]), list(args[end:]), length, reverse=reverse)
        return [*carry, *ys]

    return loop
