"""How planning grows with the step: no pass takes more than about n log n for n equations.

A family is a step of `n` equations, of a kind that once made a pass take exponential or quadratic time.
It is lowered at two sizes, and each function of the package is counted. Nothing looks at a clock.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy

import jrnn
from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.jaxprs import programs
from jrnn.loops.compile import ON_CPU
from jrnn.loops.ir import strict_passes

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="calls are counted by sys.monitoring"
)

OURS = str(Path(jrnn.__file__).parent)
TOOL = 4  # of `sys.monitoring`, whose numbers up to 5 are for any tool
SMALL = 8
LARGE = 32
MOST_GROWTH = 9  # from 8 to 32: n log n grows to 6.7 times as many, and n^2 to 16 times
NOTICED = 1000  # calls of one function that are worth a look
MOST_CALLS = 1_000_000  # of one function, where a pass that takes exponential time ends
STATE = jax.ShapeDtypeStruct((8, 64), jnp.float32)
MATRIX = jax.ShapeDtypeStruct((64, 64), jnp.float32)
VECTOR = jax.ShapeDtypeStruct((2000, 64), jnp.float32)  # of each step
XS = jax.ShapeDtypeStruct((2000, 8, 64), jnp.float32)


class TooManyCalls(BaseException):
    """Ends a pass. It is no `Exception`, after which a loop would fall back to `jax.lax.scan`."""


def calls_of(run):
    """Counts the calls of each function of the package, and the items that its generators yield."""
    monitoring = sys.monitoring
    events = monitoring.events.PY_START | monitoring.events.PY_RESUME
    counts = Counter()

    def count(code, offset):
        if not code.co_filename.startswith(OURS):
            return monitoring.DISABLE
        counts[code] += 1
        if counts[code] > MOST_CALLS:
            raise TooManyCalls(code)
        return None

    jax.clear_caches()
    monitoring.use_tool_id(TOOL, "growth")
    for event in (monitoring.events.PY_START, monitoring.events.PY_RESUME):
        monitoring.register_callback(TOOL, event, count)
    monitoring.set_events(TOOL, events)
    try:
        run()
    finally:
        monitoring.set_events(TOOL, monitoring.events.NO_EVENTS)
        monitoring.free_tool_id(TOOL)
    named = Counter()
    for code, calls in counts.items():
        file = code.co_filename.removeprefix(OURS).lstrip("/")
        named[f"{file}:{code.co_qualname.split('.<locals>')[0]}"] += calls
    return named


# Steps of n equations: from the size to the step and its initial carry.


def euler(n):
    """A diamond for each substep: both operands of a sum follow from the state before."""

    def step(c, x):
        for _ in range(n):
            c = c + 0.1 * jnp.tanh(c)
        return c + x, c

    return step, STATE


def logistic(n):
    def step(c, x):
        for _ in range(n):
            c = c * (1 - c) * x
        return c, c

    return step, STATE


def where_chain(n):
    def step(c, x):
        for i in range(n):
            c = jnp.where(c > i, c / 2, jnp.maximum(c, 0.1) + c)
        return c + x, c

    return step, STATE


def pairs(n):
    def step(carry, x):
        a, b = carry
        for _ in range(n):
            a, b = b, jnp.sin(a) * b + x
        return (a, b), a

    return step, (STATE, STATE)


def lotka_volterra(n):
    def step(carry, x):
        a, b = carry
        for _ in range(n):
            a, b = a + 0.1 * (a - a * b), b + 0.1 * (a * b - b)
        return (a + x, b), a

    return step, (STATE, STATE)


def newton(n):
    """An implicit Euler step, with Newton's iterations unrolled."""

    def step(c, x):
        y = c
        for _ in range(n):
            slope = 1 - 0.1 * (1 - jnp.tanh(y + x) ** 2)
            y = y - (y - c - 0.1 * jnp.tanh(y + x)) / slope
        return y, y

    return step, STATE


def packed(n):
    """The two halves of one carry are computed from each other, and joined."""

    def step(c, x):
        for _ in range(n):
            c = c + 0.1 * jnp.tanh(c)
        c = jnp.concatenate([c[:, 32:], c[:, :32]], 1)
        for _ in range(n):
            c = c + 0.1 * jnp.tanh(c)
        return c, c[:, :32] + x[:, :32]

    return step, STATE


def corrected_rows(n):
    """A matrix state, whose update reads the state once and is corrected n times."""

    def step(S, x):
        k, v, q = x
        r = v - k @ S
        for _ in range(n):
            r = r + 0.5 * (r - k @ S)
        S = S * 0.99 + k[:, None] * r[None, :]
        return S, q @ S

    return step, MATRIX


def repeated_decays(n):
    def step(S, x):
        k, v, q = x
        for _ in range(n):
            S = S + 0.01 * k[:, None] * S
        S = S + k[:, None] * v[None, :]
        return S, q @ S

    return step, MATRIX


def known_products(n):
    """The update of a matrix state is the same product many times, without the state."""

    def step(S, x):
        k, v, q = x
        product = k[:, None] * v[None, :]
        for _ in range(n):
            product = product + 0.5 * product * k[:, None]
        return S * 0.9 + product, q @ S

    return step, MATRIX


def delta_rules(n):
    """A matrix state is read and written n times in a step."""

    def step(S, x):
        k, v, q = x
        for _ in range(n):
            S = S * 0.9 + k[:, None] * (v - k @ S)[None, :]
        return S, q @ S

    return step, MATRIX


def twice(function, y):
    return function(y) * 0.5 + function(0.5 * y)


def shared_functions(n):
    """Functions of `jax.jit`, each of which calls the one before twice. JAX lowers each once."""
    function = jnp.tanh
    for _ in range(n):
        function = jax.jit(functools.partial(twice, function))
    return lambda c, x: (function(c) + x, c), STATE


def many_carries(n):
    """A ring of n carries, each of which reads the one before."""

    def step(carry, x):
        return tuple(jnp.tanh(carry[i - 1]) + x for i in range(n)), carry[0]

    return step, (STATE,) * n


def many_outputs(n):
    def step(c, x):
        return jnp.tanh(c) + x, [jnp.sin(c * i) for i in range(n)]

    return step, STATE


def products(n):
    """The step closes over n matrices."""
    weights = [jnp.full((64, 64), 0.01 * i) for i in range(n)]

    def step(c, x):
        for w in weights:
            c = c + jnp.tanh(c @ w)
        return c + x, c

    return step, STATE


def slices(n):
    def step(c, x):
        parts = [jnp.tanh(c[:, i : i + 2]) for i in range(n)]
        return jnp.tanh(c) + jnp.tile(sum(parts), (1, 32)) + x, c

    return step, STATE


def inner_loops(n):
    def step(c, x):
        for _ in range(n):
            c = jax.lax.scan(lambda c, _: (jnp.tanh(c) * 0.5, None), c, None, length=3)[0]
        return c + x, c

    return step, STATE


CARRIES = [many_carries, many_outputs, products, slices, inner_loops]
VECTORS = [euler, logistic, where_chain, pairs, lotka_volterra, newton, packed]
MATRICES = [corrected_rows, repeated_decays, known_products, delta_rules]
FAMILIES = [*VECTORS, *CARRIES, *MATRICES, shared_functions]
# Matrix states run step by step beyond some number of terms. JAX itself reads a shared function at
# each call where it looks for devices: at 20 levels, a million times.
SIZES = {known_products: (16, 64), delta_rules: (16, 64), shared_functions: (7, 14)}


def lowered(family, n, gradient, executor="auto"):
    """Returns a function that lowers the loop over the step of a family, or its gradient."""
    step, init = family(n)
    is_matrix = init is MATRIX
    xs = (VECTOR, VECTOR, VECTOR) if is_matrix else XS

    def total(init, xs):
        results = jrnn.scan(step, init, xs, executor=executor)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(results))

    fn = jax.grad(total, (0, 1)) if gradient else total
    return lambda: jax.jit(fn).lower(init, xs)


@pytest.mark.sample(
    "newton-forward",
    "packed-forward",
    "delta_rules-forward",
    "shared_functions-forward",
    "euler-gradient",
    "lotka_volterra-gradient",
    "corrected_rows-gradient",
)
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_growth(family, gradient):
    if family is shared_functions and gradient:
        pytest.skip("JAX differentiates a function of jax.jit at each call")
    few, many = SIZES.get(family, (SMALL, LARGE))
    small = calls_of(lowered(family, few, gradient))
    large = calls_of(lowered(family, many, gradient))
    grown = {
        name: f"{small[name]} -> {count}"
        for name, count in large.items()
        if count > max(NOTICED, MOST_GROWTH * small[name])
    }
    assert not grown


@pytest.mark.exhaustive("gradient")
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_long_chains_need_no_deep_stack(gradient):
    """A walk that calls itself for each operand ends in a RecursionError: Python allows 1,000 calls."""

    def step(c, x):
        for _ in range(500):
            c = jnp.tanh(c) + x
        return c, c

    run = lowered(lambda n: (step, STATE), 0, gradient)
    with strict_passes(True):
        calls_of(run)


@pytest.mark.parametrize("executor", ["chunks", *ON_CPU, "newton"])
@pytest.mark.parametrize("family", [euler, newton], ids=lambda family: family.__name__)
@pytest.mark.exhaustive
def test_every_executor(family, executor):
    """Each strategy either runs a step with shared subexpressions, or refuses it, in polynomial time."""
    try:
        calls_of(lowered(family, 5 if family is newton else 24, True, executor))
    except ScanError as error:
        assert "cannot run this step" in str(error)


def test_explain_and_budgets():
    step, init = euler(24)

    def loop(init, xs):
        return jax.lax.scan(step, init, xs)

    def with_budget():
        with jrnn.optimize_scans(compile_budget=1.0):
            jax.jit(loop).lower(init, XS)

    explained = []
    calls_of(lambda: explained.append(jrnn.explain(jrnn.optimize_scans(loop), init, XS)))
    assert len(explained[0].loops) == 1
    calls_of(with_budget)


def test_shared_functions_are_counted_once_and_inlined_up_to_a_bound():
    """A function that is called many times is opened, as long as the copies are few."""
    layer = jax.jit(lambda y: jnp.tanh(y) * 0.5 + 0.1)

    def step(c, x):
        for _ in range(40):
            c = layer(c)
        return c + x, c

    def names_in(step):
        closed = jax.make_jaxpr(step)(STATE, STATE)
        return {eqn.primitive.name for eqn in jaxprs.inlined(closed).eqns}

    assert not names_in(step) & {"jit", "pjit"}
    assert names_in(shared_functions(14)[0]) & {"jit", "pjit"}


def test_values_of_shared_functions(monkeypatch):
    monkeypatch.setattr(programs, "_MOST_OPENED", 4)
    monkeypatch.setattr(programs, "_MOST_COPIES", 1)
    monkeypatch.setattr(programs, "_SMALL", 4)
    step, _ = shared_functions(4)
    init = jnp.ones((2, 3))
    xs = 0.1 * jnp.ones((4, 2, 3))

    def total(run, init, xs):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(run(step, init, xs)))

    ours = functools.partial(total, functools.partial(jrnn.scan, executor="unrolled"))
    theirs = functools.partial(total, jax.lax.scan)
    with strict_passes(True):
        results = jax.jit(jax.value_and_grad(ours, (0, 1)))(init, xs)
    expected = by_numpy(jax.value_and_grad(theirs, (0, 1)))(init, xs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), results, expected)
