"""What is chosen for small cells in several spellings (`scripts/benchmarks/spellings.py`), as for users."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from plans_of import plans_of
from spelled_cells import problem
from spellings import programs

import jrnn
from jrnn.bench.peers import in_mode
from jrnn.bench.sizes import Size
from jrnn.loops.costs import machines
from jrnn.loops.kernels.native import library
from jrnn.loops.passes.canonical.random_keys import HoistedKeys

built = pytest.mark.skipif(
    bool(library.loaded().reason), reason=f"no kernel: {library.loaded().reason}"
)
SMALL = Size(100, 8, 16, 32)


@pytest.fixture(autouse=True)
def with_wide_vectors(monkeypatch):
    machine = machines.processor(64)._replace(one_kernel_bytes=machines.one_kernel_bytes())
    monkeypatch.setattr(machines, "this_processor", lambda: machine)


def plans(cell, name, mode, size=SMALL):
    return plans_of(in_mode(programs(cell, size, jrnn.scan)[name], mode), *problem(cell, size))


@built
@pytest.mark.parametrize(
    "name", ["plain", "a step that stores products", "a checkpointed step", "a key in the carry"]
)
def test_a_small_lstm_is_trained_by_calls_of_the_kernel(name):
    """What `jax.checkpoint` stores is reduced to the precision that it has, which is no operation."""
    chosen = plans("lstm", name, "train")
    assert [plan.strategy for plan in chosen] == ["native", "native"], chosen


@built
def test_a_loop_with_large_products_alone_has_its_keys_from_another_one():
    large, small = (
        plans("lstm", "a key in the carry", "forward", size) for size in (SMALL, Size(100, 1, 8, 8))
    )
    assert HoistedKeys.__name__ in str(large[0].node) and HoistedKeys.__name__ not in str(
        small[0].node
    )


def test_slices_of_what_a_plan_computes_before_the_loop_are_arrays(monkeypatch):
    """XLA:CPU does not vectorize functions of slices of an input: a gated unit took 1.3 of the time of `jax.lax.scan`."""
    monkeypatch.setattr(library, "loaded", lambda: library.Library(reason="a test has none"))
    monkeypatch.setattr(
        machines, "this_processor", lambda: machines.processor(64)
    )  # a loop is one kernel
    (plan,) = plans("gated", "plain", "forward")
    assert plan.chosen.label == "hoist"
    node = plan.node
    while hasattr(node, "inner"):
        node = node.inner
    assert [v.aval.shape for v in node.loop.xs] == [(8, 32)] * 2


@built
def test_columns_become_rows_where_that_pays_for_their_transposition():
    """The stacks of a simple network took 0.4 of 2.2 ms, which made it slower than `jax.lax.scan` with JAX 0.10."""
    w, xs = jnp.ones((256, 256)), jnp.ones((64, 256, 32))

    def chosen(product, xs):
        def step(h, x):
            h = jnp.tanh(product(h) + x)
            return h, h

        (plan,) = plans_of(lambda w, xs: jrnn.scan(step, xs[0], xs), w, xs)
        return plan.chosen

    rows = chosen(lambda h: h @ w.T, jnp.swapaxes(xs, 1, 2))
    assert rows.strategy == "native" and chosen(lambda h: w @ h, xs).strategy == "lax.scan"
    (plan,) = plans("lstm", "rows last", "forward", Size(64, 32, 64, 256))
    assert plan.strategy == "native"
