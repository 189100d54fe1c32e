"""A step that reads and writes a few elements of a large carry updates it in place: XLA copies nothing at each step.

No clock is read: the compiled program says whether the body of a loop copies an array.

Shapes: T time, N elements of the carry.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jrnn
from jrnn import jaxprs
from jrnn.loops.ir import ScanParams
from jrnn.loops.passes.carries_in_place import copied_bytes, update_in_place

T, N = 300, 4099
COPIES_ANYWAY = jax.__version_info__ < (0, 11)  # its XLA copies carries in spite of the barriers
XS = jnp.linspace(0.0, 1.0, T)


def delay(carry, x):
    buffer, i = carry
    y = x + 0.5 * buffer[(i - 7) % N]
    return (buffer.at[i % N].set(y), i + 1), y


def two_reads(carry, x):
    buffer, i = carry
    y = jnp.tanh(x + 0.3 * buffer[(i - 7) % N] + 0.2 * buffer[(i - 8) % N])
    return (buffer.at[i % N].set(y), i + 1), y


def read_at_what_was_read(carry, x):
    buffer, i = carry
    r = buffer[(i - 7) % N]
    y = x + 0.5 * buffer[(i - 3 - (r > 0.2)) % N]
    return (buffer.at[i % N].set(y), i + 1), y


def two_writes(carry, x):
    buffer, i = carry
    y = x + 0.5 * buffer[(i - 7) % N]
    buffer = buffer.at[i % N].set(y)
    z = y - 0.1 * buffer[(i - 3) % N]
    return (buffer.at[(i + 5) % N].add(z), i + 1), z


def crossed(carry, x):
    (left, right), i = carry
    new = x + 0.5 * right[(i - 11) % N], x - 0.4 * left[(i - 7) % N]
    return ((left.at[i % N].set(new[0]), right.at[i % N].set(new[1])), i + 1), new[0] * new[1]


def replay(carry, x):
    buffer, i = carry
    buffer = buffer.at[i % N].set(x)
    return (buffer, i + 1), jnp.sum(buffer[(i - jnp.array([3, 5, 5])) % N])


def rows(carry, x):
    buffer, i = carry
    y = jnp.tanh(x + lax.dynamic_index_in_dim(buffer, (i - 7) % N, keepdims=False))
    return (lax.dynamic_update_index_in_dim(buffer, y, i % N, 0), i + 1), jnp.sum(y)


def filled(carry, x):
    results, i = carry
    return (results.at[i].set(jnp.sin(x)), i + 1), None


FLAT = (jnp.zeros(N), jnp.int32(0))
PROGRAMS = {
    delay: FLAT,
    two_reads: FLAT,
    read_at_what_was_read: FLAT,
    two_writes: FLAT,
    crossed: ((jnp.zeros(N), jnp.zeros(N)), jnp.int32(0)),
    replay: FLAT,
    rows: (jnp.zeros((N, 8)), jnp.int32(0)),
    filled: FLAT,
}


def loss(scan, step, init, xs):
    (buffers, _), ys = scan(step, init, xs)
    summed = sum(jnp.sum(jnp.sin(b[:T])) for b in jax.tree.leaves(buffers))
    return summed if ys is None else summed + jnp.sum(ys**2)


def copies_in_loops(compiled):
    """The copies of arrays with at least N elements in the bodies of the loops of a compiled program."""
    text = compiled.as_text()
    blocks = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    copies = []
    for name in re.findall(r"while\(.*body=%?([\w.\-]+)", text):
        for shape in re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", blocks[name]):
            if np.prod([int(n) for n in shape.split(",")]) >= N:
                copies.append(shape)
    return copies


@pytest.mark.parametrize("step", PROGRAMS, ids=lambda step: step.__name__)
def test_no_carry_is_copied_at_each_step(step):
    init = PROGRAMS[step]
    of_jrnn = jax.jit(lambda xs: jrnn.scan(step, init, xs)).lower(XS).compile()
    of_jax = jax.jit(lambda xs: lax.scan(step, init, xs)).lower(XS).compile()
    assert COPIES_ANYWAY or not copies_in_loops(of_jrnn)
    for ours, theirs in zip(*(jax.tree.leaves(call(XS)) for call in (of_jrnn, of_jax))):
        np.testing.assert_array_equal(ours, theirs)
    gradient = jax.jit(jax.grad(lambda xs: loss(jrnn.scan, step, init, xs))).lower(XS).compile()
    assert COPIES_ANYWAY or not copies_in_loops(gradient)
    expected = jax.grad(lambda xs: loss(lax.scan, step, init, xs))(XS)
    np.testing.assert_allclose(gradient(XS), expected, rtol=2e-6, atol=1e-6)


def test_xla_copies_a_delay_line_that_is_left_to_it():
    """Otherwise the tests above hold without the pass."""
    gradient = jax.jit(jax.grad(lambda xs: loss(lax.scan, delay, FLAT, xs))).lower(XS).compile()
    assert copies_in_loops(gradient) or re.search(rf"add\S* = f32\[{N}\]", gradient.as_text())


def loop_of(step, init):
    closed = jax.make_jaxpr(lambda xs: lax.scan(step, init, xs))(XS)
    (eqn,) = [e for e in closed.eqns if e.primitive.name == "scan"]
    scan = ScanParams.of(eqn.params)
    return scan.loop(jaxprs.inlined(scan.jaxpr, jaxprs.LOWERED_CALLS))


def stale_read(carry, x):
    """What the buffer had before a write is read at a place that depends on what was written."""
    buffer, i = carry
    new = buffer.at[i % N].set(x)
    y = buffer[(new[(i - 1) % N] > 0.5).astype(int)]
    return (new, i + 1), y


def read_as_a_whole(carry, x):
    buffer, i = carry
    return (buffer.at[i % N].set(x + jnp.sum(buffer)), i + 1), x


def written_out(carry, x):
    buffer, i = carry
    return (buffer.at[i % N].set(x + buffer[(i - 1) % N]), i + 1), buffer


def replaced(carry, x):
    buffer, i = carry
    return (jnp.where(x > 0.5, buffer, buffer.at[i % N].set(x + buffer[3])), i + 1), x


@pytest.mark.parametrize("step", [read_as_a_whole, written_out, replaced])
def test_a_carry_that_is_read_as_a_whole_is_left_alone(step):
    loop = loop_of(step, FLAT)
    assert update_in_place(loop) is loop
    assert copied_bytes(loop) == 0


def test_a_read_after_the_write_that_needs_the_old_buffer_keeps_its_value():
    init = (jnp.arange(N, dtype=jnp.float32), jnp.int32(0))
    ours = jax.jit(lambda xs: jrnn.scan(stale_read, init, xs)[1])(XS)
    np.testing.assert_array_equal(ours, lax.scan(stale_read, init, XS)[1])


def test_what_is_copied_counts_in_the_plan():
    (plan,) = jrnn.explain(lambda xs: jrnn.scan(delay, FLAT, xs), XS).loops
    assert copied_bytes(loop_of(delay, FLAT)) == 4 * N
    assert plan.strategy == "scan"
    assert "carries are read before they are written, in place" in plan.text()
    assert plan.baseline.seconds > 1.5 * plan.chosen.estimate.seconds


def test_numbers_that_are_not_finite_stay_where_they_are():
    xs = XS.at[5].set(jnp.nan).at[9].set(jnp.inf).at[40].set(-jnp.inf)
    ours = jax.jit(jax.grad(lambda xs: loss(jrnn.scan, two_reads, FLAT, xs)))(xs)
    expected = jax.jit(jax.grad(lambda xs: loss(lax.scan, two_reads, FLAT, xs)))(xs)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(expected))


@pytest.mark.exhaustive(*map(str, range(3, 12)))
@pytest.mark.parametrize("seed", range(12))
def test_random_reads_and_writes(seed):
    """Steps that read and write two buffers in any order, at places that depend on what was read."""
    rng = np.random.default_rng(seed)
    actions = [
        (rng.integers(4), rng.integers(2), int(rng.integers(1, 40)))
        for _ in range(rng.integers(3, 9))
    ]

    def step(carry, x):
        buffers, i = list(carry[0]), carry[1]
        read = x
        for action, which, shift in actions:
            place = (i - shift - (read > 0.3)) % N
            if action == 0:
                buffers[which] = buffers[which].at[place].set(0.7 * read)
            elif action == 1:
                buffers[which] = buffers[which].at[place].add(0.3 * x)
            elif action == 2:
                read = read + 0.4 * carry[0][which][place]
            else:
                read = read - 0.2 * buffers[which][place]
        return (tuple(buffers), i + 1), read

    init = ((jnp.full(N, 0.1), jnp.full(N, -0.1)), jnp.int32(0))
    for make in (lambda f: f, jax.grad):
        results = []
        for scan in (jrnn.scan, lax.scan):
            results.append(jax.jit(make(lambda xs, scan=scan: loss(scan, step, init, xs)))(XS[:60]))
        np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-5)
