"""`optimize_scans`: loops of other libraries, here flax's, give the same results and are really rewritten.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plans_of import plans_of

import jrnn

pytestmark = pytest.mark.usefixtures("rewritten")

T, N, D, H = 5, 2, 3, 4
XS = jnp.linspace(-1, 1, N * T * D).reshape(N, T, D)


def nnx_rnn():
    """`flax.nnx.RNN` as `(loss, parameters)`."""
    graph, parameters, rest = nnx.split(
        nnx.RNN(nnx.GRUCell(D, H, rngs=nnx.Rngs(0))), nnx.Param, ...
    )

    def loss(parameters, xs):
        return jnp.sum(nnx.merge(graph, parameters, rest)(xs, initial_carry=jnp.zeros((N, H))) ** 2)

    return loss, parameters


def linen_scan():
    """`flax.linen.scan` of a cell as `(loss, parameters)`."""
    fixed = dict(variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
    cell = nn.scan(nn.OptimizedLSTMCell, **fixed)(features=H)
    state = (jnp.zeros((N, H)),) * 2
    return lambda parameters, xs: jnp.sum(cell.apply(parameters, state, xs)[1] ** 2), cell.init(
        jax.random.key(0), state, XS
    )


def by_context(fn):
    def optimized(*args):
        with jrnn.optimize_scans():
            return fn(*args)

    return optimized


def by_decorator(fn):
    return jrnn.optimize_scans()(fn)


def total(xs):
    return jax.lax.scan(
        lambda c, x: (jnp.tanh(c + x @ jnp.ones((D, D))), c), jnp.zeros((T, D)), xs
    )[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("library, optimized", [(nnx_rnn, by_context), (linen_scan, by_decorator)])
def test_loops_of_flax_are_rewritten(library, optimized):
    loss, parameters = library()
    plain, ours = (jax.value_and_grad(fn) for fn in (loss, optimized(loss)))
    forward, reverse = plans_of(ours, parameters, XS)
    assert forward.hoisted and not forward.loop.reverse
    assert reverse.accumulated and reverse.loop.reverse
    written = [item.type for item in (*reverse.stacked, *reverse.sunk)]
    assert all(kind.startswith(f"float32[{N},") for kind in written), (
        "the gradient of a weight is stacked, not summed"
    )
    assert plans_of(plain, parameters, XS) == []
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
        jax.jit(ours)(parameters, XS),
        jax.jit(plain)(parameters, XS),
    )


def test_the_mark_does_not_leak_out():
    assert [plan.strategy for plan in plans_of(by_context(total), XS)] == ["scan"]
    assert len(plans_of(lambda xs: by_context(total)(xs) + total(xs), XS)) == 1
    assert plans_of(total, XS) == []
    with pytest.raises(RuntimeError, match="inside"), jrnn.optimize_scans():
        raise RuntimeError("inside")
    assert plans_of(total, XS) == []


def test_a_compiled_function_keeps_what_it_was_traced_with():
    marked = jax.jit(by_decorator(total))
    outside = jax.jit(total)
    first = outside(XS)
    with jrnn.optimize_scans():
        inside = outside.lower(XS).as_text()
    assert inside != outside.lower(XS).as_text(), "the context is part of the key of JAX's caches"
    np.testing.assert_allclose(marked(XS), first, rtol=1e-6)


def test_options_of_a_scan_hold_in_the_context():
    def run(xs):
        step = lambda h, x: (h * x, h)  # noqa: E731
        ours = jrnn.scan(step, jnp.ones((T, D)), xs, executor="associative")[0]
        return ours + jax.lax.scan(step, jnp.ones((T, D)), xs)[0]

    assert sorted(plan.strategy for plan in plans_of(by_context(run), XS)) == [
        "associative",
        "scan",
    ]
