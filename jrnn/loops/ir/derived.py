"""Translation validation: a derived program agrees with its loop on random numbers before it is used.

A chunk program, a solution in doubling steps and the like are derived by reading a step's equations. As a compiler's
translation is validated, the derived program and the loop run for a few steps on small random numbers, values and tangents,
in float64 by numpy (`by_numpy.py`). The axes of large arrays are made smaller first (`resized.py`). A verdict is cached by
the text of the step.

What this does not show: a difference that needs more steps, larger axes or other numbers. What it is good for: a wrong rule
for one equation changes almost every result, and two right programs differ by 1e-13, so that random numbers tell them apart.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs.by_numpy import evaluate_by_numpy
from jrnn.jaxprs.jax_internals import ClosedJaxpr, is_traced, jaxpr_as_fun
from jrnn.jaxprs.resized import resized
from jrnn.jaxprs.tangents import is_smooth, pushed
from jrnn.jaxprs.work import TooMuchWork
from jrnn.loops.ir import observers, tag
from jrnn.loops.ir.loop import Loop, strict_passes
from jrnn.loops.ir.scans import ScanParams
from jrnn.loops.ir.unsupported import Unsupported

Array = jax.Array | np.ndarray[Any, Any]
Aval = Any  # the type of an array
Flat = Sequence[Array]
Function = Callable[..., Flat]


class Comparison(NamedTuple):
    """How programs are compared.

    Attributes:
        tolerance: in units of the largest element of each result; two right programs differ by 1e-13.
        scale: the size of random numbers: carries that grow by their square stay small.
        attempts: to find numbers for which most results are finite.
        max_work: elements to compute, about a nanosecond each.
        max_numbers: random numbers.
        operation_work: the overhead of an operation of numpy, in elements.
        operations_per_element: of a product, in the time of one element.
        steps_of_passes: the steps for which a pass is compared.
    """

    tolerance: float = 1e-9
    scale: float = 0.4
    attempts: int = 3
    max_work: float = 1e8
    max_numbers: float = 1e6
    operation_work: float = 1e4
    operations_per_element: float = 8
    steps_of_passes: int = 4


COMPARISON = Comparison()


def disagreement(derived: Function, original: Function, avals: Sequence[Aval]) -> str | None:
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
    argnums = [i for i, aval in enumerate(avals) if is_smooth(aval)]
    if sum(jaxprs.elements(aval.shape) for aval in avals) > COMPARISON.max_numbers:
        raise TooLarge("too large")
    original_program = _with_tangents(original, avals, argnums)
    derived_program = _with_tangents(derived, avals, argnums)
    tangents = _random(avals, 1)
    for attempt in range(COMPARISON.attempts):
        arguments = [*_random(avals, 0, attempt), *(tangents[i] for i in argnums)]
        expected = _evaluated(original_program, arguments)
        computed = _evaluated(derived_program, arguments)
        count = len(expected) // 2
        for i, (theirs, ours) in enumerate(zip(expected, computed, strict=True)):
            off = _relative_error(ours, theirs)
            if not off <= COMPARISON.tolerance:
                what = "result" if i < count else "tangent of result"
                return f"{what} {i % count} is off by {off:.0e}"
        if 2 * sum(map(_is_finite, expected)) >= len(expected):
            break
    return None


def _with_tangents(fn: Function, avals: Sequence[Aval], argnums: Sequence[int]) -> ClosedJaxpr:
    """Returns the program of a function and its tangents, from arguments and the tangents of some of them."""

    def values_and_tangents(*args: Array) -> Flat:
        arguments = args[: len(avals)]
        values, tangents = pushed(
            lambda *args: list(fn(*args)), arguments, argnums, args[len(avals) :]
        )
        return [*values, *tangents]

    with tag.untagged():
        closed = jax.make_jaxpr(values_and_tangents)(*avals, *(avals[i] for i in argnums))
    if _work(closed.jaxpr) > COMPARISON.max_work:
        raise TooLarge("too large")
    return closed


def _evaluated(closed: ClosedJaxpr, arguments: Flat) -> Flat:
    return evaluate_by_numpy(closed.jaxpr, closed.consts, arguments, wide=True)


class TooLarge(Unsupported):
    """Raised if a comparison would take too long."""


def _random(avals: Sequence[Aval], seed: int, attempt: int = 0) -> list[Array]:
    """Returns small random numbers. Square matrices are near the identity: positive definite, if they are covariances.

    At later attempts numbers are positive, and vectors smaller: the square root of a variance less a square is finite.
    """
    rng = np.random.default_rng(seed)

    def random(aval: Aval) -> Any:
        if aval.dtype == bool:
            return rng.random(aval.shape) < 0.5
        if jnp.issubdtype(aval.dtype, jnp.integer):
            return rng.integers(0, 3, aval.shape).astype(aval.dtype)
        if jnp.issubdtype(aval.dtype, jnp.complexfloating):
            real = rng.normal(size=aval.shape)
            return COMPARISON.scale * (real + 1j * rng.normal(size=aval.shape))
        values = COMPARISON.scale * rng.normal(size=aval.shape)
        if aval.ndim > 1 and aval.shape[-2] == aval.shape[-1]:
            return values / np.sqrt(aval.shape[-1]) + np.eye(aval.shape[-1])
        if not attempt:
            return values
        return np.abs(values) / (4**attempt if aval.ndim else 1)

    return list(map(random, avals))


def _is_finite(value: Array) -> bool:
    return value.dtype.kind not in "fc" or bool(np.isfinite(value).all())


def _relative_error(computed: Array, expected: Array) -> float:
    """Returns the largest difference, in units of the largest element; infinite where only one of two is finite."""
    if expected.dtype.kind not in "fc":
        return 0.0 if np.array_equal(computed, expected) else np.inf
    finite = np.isfinite(expected)
    if not np.array_equal(np.isfinite(computed), finite):
        return np.inf
    size = np.max(np.abs(expected[finite]), initial=0.0)
    return float(np.max(np.abs(computed - expected)[finite], initial=0.0) / (size or 1.0))


def _work(jaxpr: Any, inside: dict[int, float] | None = None) -> float:
    """Returns the elements that numpy computes, with a constant for each operation.

    Args:
        jaxpr: the jaxpr.
        inside: the result for each jaxpr inside of others, which may be called several times.
    """
    inside = {} if inside is None else inside
    total = 0.0
    for eqn in jaxpr.eqns:
        inner = []
        for body in jaxprs.sub_jaxprs(eqn):
            if id(body) not in inside:
                inside[id(body)] = _work(body, inside)
            inner.append(inside[id(body)])
        steps = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += COMPARISON.operation_work + steps * max(inner, default=0.0)
        total += sum(jaxprs.elements(v.aval.shape) for v in eqn.outvars)
        if eqn.primitive.name == "dot_general":
            total += jaxprs.operations(eqn) / COMPARISON.operations_per_element
    return total


# Loops ------------------------------------------------------------------------------------------------------------------

# From constants, initial carries and inputs to last carries and ys.
Run = Callable[[Flat, Flat, Flat], tuple[Flat, Flat]]
# From a loop of few steps to the derived program, or from a step to a function of the same arguments; None if there is none.
Derive = Callable[[ScanParams], Any]


@dataclass(frozen=True)
class _Question:
    """A loop and how to derive a program; equal questions have the same text."""

    text: str
    kind: str
    scan: ScanParams = field(compare=False)
    derive: Derive = field(compare=False)


def validate(scan: ScanParams, kind: str, derive: Derive) -> tuple[bool, str]:
    """Returns whether a derived program may be used, and what to say about it ("" if it agrees with the loop).

    Args:
        scan: the loop; its length is how many steps to compare. Without a length, the step alone is compared.
        kind: names the derivation.
        derive: derives the program from the loop.
    """
    digest = hashlib.sha256()
    step = scan.jaxpr
    for const in getattr(step, "consts", ()):
        digest.update(repr((jnp.shape(const), jax.typeof(const).dtype)).encode())
        if not is_traced(const):
            digest.update(np.asarray(const).tobytes())
    text = f"{kind} {scan.n_consts} {scan.n_carry} {scan.length} {scan.reverse} {digest.hexdigest()} {step}"
    agrees, note = _compare(_Question(text, kind, scan, derive))
    assert agrees or not strict_passes.value, f"{kind}: {note}"
    return agrees, note


@functools.lru_cache(maxsize=1024)
def _compare(question: _Question) -> tuple[bool, str]:
    program = jaxprs.inlined(question.scan.jaxpr)
    if any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in program.invars):
        return True, "not compared with the loop: it reads random keys"
    try:
        difference = _difference_when_small(question.scan, question.derive, program)
    except TooLarge as why:
        return True, f"not compared with the loop: {why}"
    except TooMuchWork:
        raise
    except Exception as error:
        kind = type(error).__name__
        return True, f"not compared with the loop, which raises {kind} on small arrays"
    if difference is None:
        return True, ""
    note = f"on random numbers, {difference} (please report it)"
    observers.warn_once(("derived", question.kind), f"{question.kind}: {note}")
    return False, note


def _difference_when_small(scan: ScanParams, derive: Derive, program: jaxprs.Program) -> str | None:
    """Compares with axes made smaller, where they can be."""
    try:
        _, carry, _ = scan.partition(program.invars)
        run, avals = resized(program, list(zip(carry, program.outvars)))
        with tag.untagged():
            small = jax.make_jaxpr(run)(*avals)
        return _difference(replace(scan, jaxpr=small), derive, avals)
    except (TooLarge, TooMuchWork):
        raise
    except Exception:  # it cannot be made smaller
        return _difference(scan, derive, [v.aval for v in program.invars])


def _difference(scan: ScanParams, derive: Derive, avals: Sequence[Aval]) -> str | None:
    """Compares a loop, or a step alone, with what is derived from it."""
    with tag.untagged():
        derived = derive(scan)
    if derived is None:
        return None
    if scan.length is None:
        return disagreement(derived, jaxpr_as_fun(scan.jaxpr), avals)

    def run_derived(consts: Flat, init: Flat, xs: Flat, length: int) -> tuple[Flat, Flat]:
        results: tuple[Flat, Flat] = derived(consts, init, xs)
        return results

    loop, constants = scan.inlined({})
    original = scan.flat(loop.run, constants)
    consts, init, xs = scan.partition(avals)
    stacked = [jax.ShapeDtypeStruct((scan.length, *a.shape), a.dtype) for a in xs]
    return disagreement(scan.flat(run_derived), original, [*consts, *init, *stacked])


def lifted(program: jaxprs.Program, n_carry: int, length: int, reverse: bool) -> ScanParams:
    """Returns a loop of a step as a program, whose traced constants become constants of the loop."""
    traced = [i for i, c in enumerate(program.consts) if is_traced(c)]
    names = (*(program.constvars[i] for i in traced), *program.invars)

    def step(*args: Array) -> Flat:
        consts = jaxprs.replaced(program.consts, traced, args)
        return replace(program, consts=tuple(consts)).run(*args[len(traced) :])

    with tag.untagged():
        closed = jax.make_jaxpr(step)(*(v.aval for v in names))
    return ScanParams(closed, len(traced), n_carry, length, reverse)


def check_pass(name: str, rewrite: Callable[[Loop], Any], before: Loop) -> None:
    """Raises an AssertionError that names a pass which changes the values of a loop, for the context `checked_passes`.

    The loop and the rewritten one run for a few steps on small random numbers, values and tangents.

    Args:
        name: of the pass.
        rewrite: the pass, which returns a loop, or a loop and its adapter.
        before: the loop before it.
    """
    if not jaxprs.is_known(before.length):
        return

    def derive(small: ScanParams) -> Run:
        loop, constants = small.inlined(jaxprs.LOWERED_CALLS)
        rewritten = rewrite(loop)
        form, adapter = (rewritten, None) if isinstance(rewritten, Loop) else rewritten

        def run(consts: Flat, init: Flat, xs: Flat) -> tuple[Flat, Flat]:
            arguments = ([*constants, *consts], init, xs, small.length)
            return form.run(*arguments) if adapter is None else adapter(form.run, *arguments)

        return run

    few_steps = ScanParams.of_loop(before, COMPARISON.steps_of_passes)
    with_module = f"{name} ({getattr(rewrite, 'func', rewrite).__module__})"
    agrees, note = validate(few_steps, with_module, derive)
    assert agrees, f"{with_module}: {note}"
