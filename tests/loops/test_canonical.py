"""The canonical form of a loop: every spelling of a step has the plan of the plain one, and the values of the loop."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from spelled_cells import CELLS, problem
from spellings import programs

import jrnn
from jrnn import jaxprs
from jrnn.bench.sizes import Size
from jrnn.loops import compile as compiling
from jrnn.loops import scan
from jrnn.loops.compile import canonical_form
from jrnn.loops.costs.target import Target
from jrnn.loops.explanations.explain import plans_in
from jrnn.loops.ir import checked_passes, traced_loops
from jrnn.loops.passes import split
from jrnn.loops.strategies.nodes import Steps, adapted

pytestmark = pytest.mark.usefixtures("rewritten")

CPU = Target("cpu")
SIZE = Size(16, 4, 5, 6)
EVERY = [(cell, name) for cell in CELLS for name in programs(cell, SIZE, scan, "train")]
# Spellings with other loops than the plain one: a loop of loops, and a product of the input in the loop.
OTHER_LOOPS = ("in an outer scan", "input and state joined", "a cell of Haiku")
OTHER_REVERSE = ("a checkpointed step",)  # it computes the step again
JOINED = ("a net",)  # other products than those of the plain spelling, of the same size
# The covariance of a Kalman filter does not depend on the rows, so that a vmap over them leaves it alone.
MAPPED = [("kalman", "one vmap"), ("kalman", "two vmaps"), ("kalman", "a vmap over rows")]
WITHOUT_KEYS = [
    (cell, name) for cell, name in EVERY if name not in ("a key in the carry", "drawn masks")
]
LOOPS = [
    (cell, name) for cell, name in EVERY if name not in OTHER_LOOPS and (cell, name) not in MAPPED
]


def loss(cell, name, size=SIZE, which=scan):
    run = programs(cell, size, which)[name]
    return lambda p, x: jnp.sum(jnp.sin(run(p, x)))


@functools.cache
def gradient_loops(cell, name):
    """The loops of a gradient as JAX makes them: forward with residuals, and reverse. Each spelling is traced once."""
    closed = jax.make_jaxpr(jax.grad(loss(cell, name), (0, 1)))(*problem(cell, SIZE))
    return [plan.loop for plan in plans_in(closed.jaxpr, CPU)]


def run_both(loop):
    """What a loop and its canonical form compute, for random numbers."""
    rng = np.random.default_rng(0)

    def draw(v, lead=()):
        shape = (*lead, *v.aval.shape)
        whole = jnp.issubdtype(v.aval.dtype, jnp.integer)
        return (
            rng.integers(0, 3, shape).astype(v.aval.dtype)
            if whole
            else rng.normal(size=shape).astype(v.aval.dtype)
        )

    given = [
        [draw(v) for v in loop.consts],
        [draw(v) for v in loop.carry],
        [draw(v, (3,)) for v in loop.xs],
    ]
    form, adapters, _ = canonical_form(loop)
    node = adapted(Steps(form.verify()), adapters)
    return [
        jax.tree.leaves(by_numpy(lambda *a, run=run: run(*a, 3))(*given))
        for run in (node.run, loop.run)
    ]


def assert_close(ours, theirs):
    """Sums of products in another order differ in proportion to the largest."""
    largest = np.max(np.abs(theirs), initial=1.0, where=np.isfinite(theirs))
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5 * largest)


@functools.cache
def stays(loop):
    """What a loop computes step by step, if all leaves it that can: its products, and the shapes of its carries."""
    core = split(canonical_form(loop, hoists_keys=True)[0]).residual
    products = Counter(
        (jaxprs.operations(e), tuple(sorted(e.outvars[0].aval.shape)))
        for e in core.eqns
        if e.primitive.name == "dot_general"
    )
    return products, Counter(v.aval.shape for v in core.carry)


@pytest.mark.grid(every=2)
@pytest.mark.parametrize("cell, name", LOOPS, ids=lambda value: value.replace(" ", "_"))
def test_a_spelling_has_the_loops_of_the_plain_one(cell, name):
    plain, other = gradient_loops(cell, "plain"), gradient_loops(cell, name)
    assert len(plain) == len(other) == 2
    for ours, theirs in list(zip(other, plain))[: 1 if name in OTHER_REVERSE else 2]:
        (products, carries), (wanted, plain_carries) = stays(ours), stays(theirs)
        if name in JOINED:
            # Products of one operand, with one matrix or with several, of the same work.
            assert {shape[0] for _, shape in products} == {shape[0] for _, shape in wanted}
            assert sum(n * k for (n, _), k in products.items()) == sum(
                n * k for (n, _), k in wanted.items()
            )
        else:
            assert products == wanted
        assert carries == plain_carries


@pytest.mark.parametrize("cell, name", [("lstm", "a net"), ("gru", "unit axis first")])
def test_arrays_in_a_mesh_change_no_form(cell, name):
    """With several modes of sharding, JAX writes the mesh at equations. In automatic mode that places nothing."""
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    weights, x = jax.device_put(problem(cell, SIZE), there)
    closed = jax.make_jaxpr(jax.grad(loss(cell, name), (0, 1)))(weights, x)
    loops = [plan.loop for plan in plans_in(closed.jaxpr, CPU)]
    moves = ("dot_general", "reduce_sum", "reshape", "transpose", "broadcast_in_dim")
    for ours, theirs in zip(loops, gradient_loops(cell, name), strict=True):
        forms = (canonical_form(loop)[0].eqns for loop in (ours, theirs))
        counts = [
            Counter(e.primitive.name for e in eqns if e.primitive.name in moves) for eqns in forms
        ]
        assert counts[0] == counts[1]


@pytest.mark.parametrize("constrained", ["carry", "input", "weight"])
def test_a_constraint_in_a_step_is_obeyed(constrained):
    """The parameter with the mesh, which other equations only repeat, is what a constraint does."""
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))

    def placed(name, value):
        return jax.lax.with_sharding_constraint(value, there) if name == constrained else value

    def loss_of(loop, weight, xs):
        def step(h, x):
            h = jnp.tanh(h @ placed("weight", weight) + placed("input", x @ weight))
            return placed("carry", h), h

        h, ys = loop(step, jnp.ones((2, 3)), xs)
        return jnp.sum(h) + jnp.sum(ys**2)

    def gradient(loop):
        return jax.jit(jax.value_and_grad(functools.partial(loss_of, loop), (0, 1)))

    arguments = jnp.eye(3) * 0.5, jnp.linspace(0.0, 1.0, 24).reshape(4, 2, 3)
    lowered = gradient(scan).lower(*arguments)
    assert lowered.as_text().count("sharding_constraint") >= 2
    expected = gradient(jax.lax.scan)(*arguments)
    for ours, theirs in zip(
        jax.tree.leaves(lowered.compile()(*arguments)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.grid(every=9)
@pytest.mark.parametrize("cell, name", WITHOUT_KEYS, ids=lambda value: value.replace(" ", "_"))
def test_the_form_of_a_spelling_computes_what_its_loops_do(cell, name):
    for loop in gradient_loops(cell, name):
        for ours, theirs in zip(*run_both(loop), strict=True):
            assert_close(ours, theirs)


@pytest.mark.grid(every=27)
@pytest.mark.parametrize("cell, name", EVERY, ids=lambda value: value.replace(" ", "_"))
def test_values_and_gradients_are_those_of_lax_scan(cell, name):
    given = problem(cell, SIZE)
    actual = jax.jit(jax.value_and_grad(loss(cell, name), (0, 1)))(*given)
    wanted = by_numpy(jax.value_and_grad(loss(cell, "plain", which=jax.lax.scan), (0, 1)))(*given)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, wanted
    )


# Steps that no spelling of a cell has ---------------------------------------------------------------------------------

N, H = 2, 3
W, V = jnp.linspace(-1, 1, H * H).reshape(H, H), jnp.linspace(-0.5, 1, H)


def reductions(h, x):
    mean = h.mean(-1, keepdims=True)
    most = jnp.max(h @ W + x, 1, keepdims=True) + jnp.min(x, (0, 1), keepdims=True)
    return jnp.tanh((h - mean) @ W + most), (jnp.sum(h, 0), jnp.argmax(h, -1), jnp.prod(x, 1))


def pieces(h, x):
    a, b, c = jnp.split(h @ W + x, 3, -1)
    padded = jnp.pad(jnp.concatenate([a, c], -1), ((0, 0), (0, 0), (1, 0))) + b
    return jnp.tanh(padded), jnp.stack([a, b[:, ::-1]], 1)


def running(h, x):
    """No rule has these: they get values as they were."""
    sums = jnp.cumsum(h @ W, 1) + jnp.sort(x, -1) + jnp.cumsum(h, 2)
    return jnp.tanh(sums), jax.lax.dynamic_slice(h, (0, 1, 0), (1, 1, H))


def heads(h, x):
    r = jnp.einsum("unh,hk->nuk", h, W)
    scores = jax.nn.softmax(jnp.einsum("nuk,unk->nu", r, x), -1)
    return jnp.einsum("nu,unk->unk", scores, jnp.tanh(h + x)), jnp.einsum("unk,unl->kl", h, x)


def views(h, x):
    flat = (h.reshape(N * H) * 0.5).reshape(1, N, H)[0].T[:, None, :]
    return jnp.tanh(
        jnp.transpose(flat, (1, 2, 0)) @ W + jnp.broadcast_to(x[:, :1], (1, N, H))
    ), jnp.squeeze(flat[1:])


def selections(h, x):
    mask = (x[:, :, :1] > 0) & (jnp.sum(h) < 9)
    new = jnp.where(mask, jnp.clip(h @ W, -1, V.reshape(1, 1, H)), x)
    return jnp.where(jnp.sum(x) > 0, new, h), jax.lax.cond(jnp.sum(x) > 0, lambda: h, lambda: x)


def outer(h, x):
    return jnp.tanh(h @ W + jnp.einsum("un,uk->unk", x[:, :, 0], jnp.sum(x, 1))), h[0] @ x[0].T


def empty_parts(h, x):
    """Slices along an axis of size 1 that leave nothing, alone and joined with others."""
    joined = jnp.concatenate([h[1:], h, h[:0]])
    nothing = jnp.concatenate([x[:0], x[1:]])
    return jnp.tanh(joined @ W + x), (jnp.sum(nothing, 0) + x[0], nothing)


STEPS = [reductions, pieces, running, heads, views, selections, outer, empty_parts]


@pytest.mark.parametrize("rows", [1, N])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("mapped", [False, True])
def test_any_step_keeps_its_values(step, rows, mapped, monkeypatch):
    monkeypatch.setitem(globals(), "N", rows)
    h, xs = (
        jnp.linspace(-1, 1, rows * H).reshape(1, rows, H),
        jnp.linspace(0, 2, 3 * rows * H).reshape(3, 1, rows, H),
    )

    def run(h, xs):
        return scan(step, h, xs)

    def total(h, xs):
        last, ys = run(h, xs)
        smooth = [y for y in jax.tree.leaves(ys) if jnp.issubdtype(y.dtype, jnp.floating)]
        return jnp.sum(jnp.sin(last)) + sum(jnp.sum(jnp.cos(y)) for y in smooth)

    if mapped:
        run, h, xs = jax.vmap(run, (0, None)), jnp.stack([h, -h]), xs
    for fn in (run, jax.grad(total, (0, 1))):
        loops = [plan.loop for plan in plans_in(jax.make_jaxpr(fn)(h, xs).jaxpr, CPU)]
        assert loops
        for loop in loops:
            for ours, theirs in zip(*run_both(loop), strict=True):
                assert_close(ours, theirs)


def form_of(step, carry, xs):
    (loop,) = traced_loops(lambda carry, xs: jax.lax.scan(step, carry, xs), carry, xs)
    for ours, theirs in zip(*run_both(loop), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    return canonical_form(loop)[0]


def test_counters_and_constants_leave_the_carry():
    def step(carry, x):
        t, table, back, h = carry
        return (t + 2, table, back - 1, jnp.tanh(h + table[t] + x)), (t, back)

    form = form_of(step, (jnp.int32(1), W, jnp.arange(2, dtype=jnp.int8), V), jnp.ones((3, H)))
    assert [v.aval.shape for v in form.carry] == [(2,), (H,)], (
        "only what adds a literal is a counter"
    )
    assert len(form.xs) == 2 and [v.aval.shape for v in form.consts] == [(H, H)]


def test_a_counter_of_a_reverse_loop_counts_the_steps_that_were_run():
    def step(carry, x):
        return (carry[0] + 1, jnp.tanh(carry[1] + x * carry[0].astype(x.dtype))), carry[0]

    reverse = lambda step, *given: jax.lax.scan(step, *given, reverse=True)  # noqa: E731
    (loop,) = traced_loops(lambda *a: reverse(step, *a), (jnp.int32(5), V), jnp.ones((3, H)))
    for ours, theirs in zip(*run_both(loop), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert len(canonical_form(loop)[0].carry) == 1


def test_states_of_several_sizes_are_taken_apart_and_masked():
    def step(s, x):
        h, c = s[:, :2], s[:, 2:]
        c = jnp.tanh(c + jnp.sum(x))
        h = jnp.tanh(h @ W[:2, :2] + c[:, :2])
        return jnp.where(x[:, :1] > 0, jnp.concatenate([h, c], 1), s), s

    form = form_of(step, jnp.ones((2, 5)), jnp.linspace(-1, 1, 18).reshape(3, 2, 3))
    assert sorted(v.aval.shape for v in form.carry) == [(2, 2), (2, 3)]


@pytest.mark.parametrize(
    "step, shapes",
    [
        (lambda s, x: (jnp.concatenate([s[:1] * 2, jnp.tanh(s @ W)[1:]]), s), [(H, H)]),
        (lambda s, x: (jnp.tanh(s.at[0].add(x)), s[1:]), [(H, H)]),
        (lambda s, x: (jnp.concatenate([s[1:], s[:1]]) * x, s[0]), [(1, H)] * 3),
    ],
    ids=["a product", "an update", "a rotation"],
)
def test_a_state_that_is_read_whole_stays_whole(step, shapes):
    assert [v.aval.shape for v in form_of(step, W, jnp.ones((3,))).carry] == shapes


def test_a_sum_of_joined_values_stays_whole():
    """The gradient of the bias of one sequence is a sum of joined cotangents of gates, which leaves the loop as it is."""

    def step(carry, x):
        total, h = carry
        h = jnp.tanh(h @ W + x)
        return (total + jnp.concatenate([h, x], 1), h), None

    form = form_of(step, (jnp.zeros((1, 2 * H)), jnp.ones((1, H))), jnp.ones((3, 1, H)))
    assert [v.aval.shape for v in form.carry] == [(1, 2 * H), (1, H)]


def test_a_plain_loop_stays_as_it_is():
    """Whose bias, as most are, has an axis of size 1."""
    for cell in ("lstm", "gru", "gated"):
        for loop in gradient_loops(cell, "plain"):
            assert canonical_form(loop)[1] == []


def test_rows_that_are_summed_apart_are_not_merged():
    def step(h, x):
        return jnp.tanh(h @ W + x), jnp.sum(h, 0)

    h, xs = jnp.ones((2, 4, H)), jnp.ones((3, 2, 4, H))
    assert [v.aval.shape for v in form_of(step, h, xs).carry] == [(2, 4, H)]
    merged = form_of(lambda h, x: (step(h, x)[0], jnp.sum(h, (0, 1))), h, xs)
    assert [v.aval.shape for v in merged.carry] == [(8, H)]


def test_loops_over_devices_merge_no_axes():
    (loop,) = traced_loops(
        lambda h, xs: jax.lax.scan(lambda h, x: (jnp.tanh(h @ W + x), h), h, xs),
        jnp.ones((2, 4, H)),
        jnp.ones((3, 2, 4, H)),
    )
    assert canonical_form(loop, devices=2)[1] == []
    assert [v.aval.shape for v in canonical_form(loop)[0].carry] == [(8, H)]


def test_unpacked_carries_share_values():
    """A value in parts is the new value of a whole carry, too, or is joined from other parts for another carry."""

    def two_carries(carry, x):
        a, b = carry
        new = jnp.concatenate([a[:, :4] + a[:, 4:], jnp.tanh(a[:, 4:])], 1)
        return (new, new), jnp.sum(b * x)

    def two_packings(carry, x):
        a, b = carry
        joined = jnp.concatenate([x[:, :4], x[:, 4:6] * 2, x[:, 6:]], 1)
        new_a = jnp.concatenate([a[:, :4] + a[:, 4:], jnp.tanh(a[:, 4:])], 1) + joined
        new_b = jnp.concatenate([b[:, 6:] * 0.3, b[:, 2:6], b[:, :2]], 1) * joined
        return (new_a, new_b), a[:, :4] * b[:, 4:]

    xs = 0.1 * np.random.default_rng(0).normal(size=(5, 3, 8)).astype(np.float32)
    init = (jnp.full((3, 8), 0.1), jnp.full((3, 8), 0.2))
    for step in (two_carries, two_packings):
        expected = by_numpy(functools.partial(jax.lax.scan, step))(init, xs)
        results = by_numpy(functools.partial(scan, step, executor="unrolled"))(init, xs)
        jax.tree.map(np.testing.assert_array_equal, results, expected)


def swapped(loop):
    """A pass that is wrong: it subtracts the other way around."""
    eqns = []
    for eqn in loop.eqns:
        is_subtraction = eqn.primitive.name == "sub"
        eqns.append(eqn.replace(invars=eqn.invars[::-1]) if is_subtraction else eqn)
    return replace(loop, eqns=tuple(eqns))


def test_a_wrong_pass_is_named(monkeypatch):
    """`checked_passes` compares the loop after each pass with the loop before it; a plan lists the passes."""
    monkeypatch.setattr(compiling, "SIMPLIFICATIONS", (*compiling.SIMPLIFICATIONS, swapped))

    def step(h, x):
        h = jnp.tanh(h @ jnp.full((64, 64), 0.1) - x)
        return h, h

    def plan():
        xs = jnp.ones((100, 8, 64))
        (plan,) = jrnn.explain(lambda xs: scan(step, xs[0], xs, executor="scan"), xs).loops
        return str(plan)

    assert "swapped" in plan()
    jax.clear_caches()
    wrong = r"swapped \(test_canonical\): on random numbers, result 0 is off"
    with checked_passes(True), pytest.raises(AssertionError, match=wrong):
        plan()
