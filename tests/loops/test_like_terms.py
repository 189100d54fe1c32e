"""Steps that add like terms to a matrix state many times have as many terms as one that does so once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_matrix_states import assert_close, compiled

from jrnn import jaxprs
from jrnn.loops.affine.matrix import matrix_form
from jrnn.loops.affine.terms import factors_of
from jrnn.loops.ir import ScanParams, Unsupported

N = 4


def corrected_rows(n):
    def step(S, x):
        k, v, q = x
        read = k @ S
        r = v - read
        for _ in range(n):
            r = r + 0.5 * (r - read)
        S = S * 0.99 + k[:, None] * r[None, :]
        return S, q @ S

    return step


def repeated_decays(n):
    def step(S, x):
        k, v, q = x
        for i in range(n):
            S = S + 0.1 * jnp.sin(k + i)[:, None] * S
        S = S + k[:, None] * v[None, :]
        return S, q @ S

    return step


def repeated_decays_of_a_known_matrix(n):
    def step(S, x):
        k, v, q = x
        product = k[:, None] * v[None, :]
        for _ in range(n):
            product = product + 0.5 * product * k[:, None]
        return S * 0.9 + product, q @ S

    return step


def masked_decays(n):
    def step(S, x):
        k, v, q = x
        for i in range(n):
            S = jnp.where(k[0] > 0.1 * i, S, S * 0.9)
        return S + k[:, None] * v[None, :], q @ S

    return step


STEPS = [corrected_rows, repeated_decays, repeated_decays_of_a_known_matrix, masked_decays]


def form_of(step):
    """The form of the state of a step."""
    state = jax.ShapeDtypeStruct((N, N), jnp.float32)
    vector = jax.ShapeDtypeStruct((N,), jnp.float32)
    closed = jax.make_jaxpr(step)(state, (vector,) * 3)
    scan = ScanParams(closed, 0, 1, 8, False)
    loop = scan.loop(jaxprs.inlined(closed))
    known = {*loop.inputs, *(v for e in loop.eqns for v in e.outvars)}
    known -= jaxprs.depends(loop.eqns, loop.carry)
    return matrix_form(loop, (0,), known, loop.ys, {})


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_terms_do_not_multiply(make):
    sizes = []
    for n in (2, 4, 8):
        terms = form_of(make(n)).terms
        sizes.append(len(factors_of(f for t in terms for f in t.factors)))
    assert sizes[2] - sizes[1] <= 2 * (sizes[1] - sizes[0])


@pytest.mark.usefixtures("rewritten", "in_chunks_always")
@pytest.mark.sample("corrected_rows")
@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_sums_of_like_terms_are_those_of_the_loop(make, x64):
    rng = np.random.default_rng(0)
    xs = tuple(0.3 * rng.normal(size=(9, N)) for _ in range(3))
    ours, theirs = compiled(make(3), 0.3 * np.eye(N), xs)
    assert_close((run(0.3 * np.eye(N), xs) for run in (ours, theirs)), 1e-10)


def test_outer_products_are_not_added_up():
    """`p r + q s` stays two outer products: their sum is a matrix for each step."""

    def step(S, x):
        p, r, q = x
        return S * 0.9 + p[:, None] * r[None, :] + q[:, None] * jnp.tanh(r)[None, :], q @ S

    assert len(form_of(step).known) == 2


def test_too_many_terms_are_refused():
    def step(S, x):
        k, v, q = x
        for i in range(40):
            S = S + jnp.sin(k + i)[:, None] * jnp.cos(v * i)[None, :]
        return S, q @ S

    with pytest.raises(Unsupported, match="more than 32 terms"):
        form_of(step)
