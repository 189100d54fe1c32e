"""Loops with matrix states in chunks: equal to `lax.scan` in value and gradient, however the step is written."""

import re

import chunk_layers as layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from plans_of import scan_plans

import jrnn
from jrnn import jaxprs
from jrnn.loops.affine.chunkwise.chunked import Chunkwise, chunkwise
from jrnn.loops.affine.chunkwise.control_flow import expand_control
from jrnn.loops.affine.chunkwise.labeled import variables
from jrnn.loops.affine.terms import Factor, Term
from jrnn.loops.ir import Loop, ScanParams, observers
from jrnn.loops.strategies.plan_chunks import chunks_may_pay
from jrnn.loops.strategies.try_chunks import plain_form

pytestmark = pytest.mark.usefixtures("rewritten", "in_chunks_always")


ESTIMATE = Chunkwise.estimate


def problem(step, T, dtype, strong=False, K=4, V=4):
    inputs = layers.data(T, 1, 2, K, V, strong=strong)
    xs = {n: x if x.dtype == bool else x.astype(np.dtype(dtype)) for n, x in inputs.items()}
    return layers.first_carry(step, 1, 2, K, V, dtype), xs


def loss(scan, step, init, xs, **options):
    out = scan(step, init, xs, **options)
    return sum(
        jnp.sum(jnp.sin(leaf.astype(jnp.result_type(leaf, jnp.float32))))
        for leaf in jax.tree.leaves(out)
    ), out


def compiled(step, init, xs, transform=None, reference=by_numpy):
    """Returns `jrnn.scan`, compiled, and `lax.scan`, by numpy, after checking that the first runs in chunks."""
    transform = transform or (lambda f: jax.value_and_grad(f, (0, 1), has_aux=True, allow_int=True))
    ours, theirs = (
        transform(lambda *a, run=run: loss(run, step, *a)) for run in (jrnn.scan, jax.lax.scan)
    )
    with observers.collected() as plans:
        ours = jax.jit(ours).lower(init, xs).compile()
    assert [p.strategy for p in plans if p.strategy == "chunks"], plans.notes
    return ours, reference(theirs)


def in_chunks_and_not(step, init, xs, transform=None, reference=by_numpy):
    """Returns the results of `jrnn.scan` and `lax.scan`, after checking that the first runs in chunks."""
    ours, theirs = compiled(step, init, xs, transform, reference)
    return ours(init, xs), theirs(init, xs)


def assert_close(pair, tolerance):
    actual, expected = map(jax.tree.leaves, pair)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        if a.dtype != jax.dtypes.float0:
            scale = np.max(np.abs(b), initial=1e-3) if np.all(np.isfinite(b)) else 1.0
            np.testing.assert_allclose(
                np.asarray(a, np.float64),
                np.asarray(b, np.float64),
                rtol=tolerance,
                atol=tolerance * scale,
            )


@pytest.mark.sample("delta_product_as_matrices", "decay_per_row_and_column")
@pytest.mark.parametrize("step", layers.STEPS, ids=lambda step: step.__name__)
def test_a_step_trains_in_chunks_as_step_by_step(x64, step):
    init, xs = problem(step, 37, jnp.float64, strong=layers.STEPS.index(step) % 2 == 0)
    assert_close(in_chunks_and_not(step, init, xs), 1e-10)


@pytest.mark.parametrize("step", layers.STEPS, ids=lambda step: step.__name__)
def test_a_step_is_recognized_however_it_is_written(step):
    init, xs = problem(step, 2, jnp.float32)
    given, tree = jax.tree.flatten((init, jax.tree.map(lambda x: x[0], xs)))
    count = len(jax.tree.leaves(init))
    program = expand_control(
        jax.make_jaxpr(lambda *a: jax.tree.leaves(step(*tree.unflatten(a))))(*given)
    )
    inputs, outs, consts = program.invars, program.outvars, program.constvars
    parts = inputs[:count], inputs[count:], outs[:count], outs[count:]
    loop, _ = plain_form(Loop(program.eqns, consts, *parts, length=64, reverse=False, unroll=1))
    node = chunkwise(loop, dict(zip(loop.consts, program.consts)))
    assert [stage for stage in node.stages if stage.forms]


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", [layers.kda, layers.gla], ids=lambda step: step.__name__)
def test_float32_with_strong_and_weak_decay(step):
    runs = compiled(step, *problem(step, 70, jnp.float32))
    for strong in (False, True):
        given = problem(step, 70, jnp.float32, strong)
        assert_close((run(*given) for run in runs), 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("T", [1, 2, 31, 33])
@pytest.mark.parametrize(
    "step", [layers.decay_per_row_and_column, layers.delta_product], ids=lambda step: step.__name__
)
def test_few_steps(x64, step, T):
    assert_close(in_chunks_and_not(step, *problem(step, T, jnp.float64)), 1e-10)


@pytest.mark.exhaustive
def test_reverse_lengths_and_resets(x64):
    init, xs = problem(layers.gated_delta, 37, jnp.float64)
    given = {"reverse": True, "lengths": np.array([20]), "resets": np.arange(37)[:, None] == 9}

    slope = jax.grad(
        lambda x: loss(jrnn.scan, layers.gated_delta, init, x, **given)[0], allow_int=True
    )
    with observers.collected() as plans:
        actual = jax.jit(slope)(xs)
    assert "chunks" in [p.strategy for p in plans], plans.notes
    with jrnn.plain_scans():
        expected = by_numpy(slope)(xs)
    assert_close((actual, expected), 1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("step, name", [(layers.gla, "gk"), (layers.kda, "k")], ids=["gla", "kda"])
def test_jvp_and_second_derivatives(x64, step, name):
    init, xs = problem(step, 20, jnp.float64)
    xs = {n: x for n, x in xs.items() if x.dtype != bool}

    def forward(f):
        return lambda *a: jax.jvp(lambda *a: f(*a)[0], a, jax.tree.map(jnp.cos, a))

    assert_close(in_chunks_and_not(step, init, xs, forward), 1e-10)

    def second(f):
        def slope(v):
            return jnp.sum(jnp.sin(jax.grad(lambda v: f(init, {**xs, name: v})[0])(v)))

        return lambda init, xs: jax.grad(slope)(xs[name])

    assert_close(in_chunks_and_not(step, init, xs, second), 1e-9)


@pytest.mark.exhaustive
def test_vmap_of_the_gradient(x64):
    init, xs = problem(layers.delta, 20, jnp.float64)
    many = jax.tree.map(lambda x: np.stack([x, x[::-1]]), xs)

    def batched(f):
        return lambda init, xs: jax.vmap(jax.grad(lambda x: f(init, x)[0], allow_int=True))(many)

    assert_close(in_chunks_and_not(layers.delta, init, xs, batched), 1e-10)


@pytest.mark.sample("gated_delta", "mlstm", "decay_per_column")
@pytest.mark.parametrize("step", layers.STEPS, ids=lambda step: step.__name__)
def test_inside_shard_map_with_checked_types(x64, step):
    """What is made inside, such as the identity that an inverse starts from, varies over the mesh as the inputs do."""
    init, xs = problem(step, 20, jnp.float64)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    specs = {"in_specs": (spec("batch"), spec(None, "batch")), "out_specs": spec()}

    def inside(f):
        part = jax.shard_map(lambda *a: jax.lax.psum(f(*a)[0], "batch"), mesh=mesh, **specs)
        return jax.value_and_grad(part, (0, 1), allow_int=True)

    ours, _ = compiled(step, init, xs, inside, reference=lambda _: None)
    expected = by_numpy(
        jax.value_and_grad(lambda *a: loss(jax.lax.scan, step, *a)[0], (0, 1), allow_int=True)
    )
    assert_close((ours(init, xs), expected(init, xs)), 1e-10)


@pytest.mark.exhaustive
def test_what_is_not_finite_stays_where_the_recurrence_has_it():
    init, xs = problem(layers.gla, 20, jnp.float32)
    xs["v"][12, 0, 0, 1] = np.inf
    xs["k"][15, 0, 1, 2] = np.nan
    (actual, _), (expected, _) = jax.device_get(in_chunks_and_not(layers.gla, init, xs))
    np.testing.assert_array_equal(np.isfinite(actual[1][1]), np.isfinite(expected[1][1]))
    assert np.isfinite(actual[1][1])[:12].all()


@pytest.mark.exhaustive
def test_a_product_that_the_recurrence_does_not_have_may_overflow():
    init, xs = problem(layers.linear, 20, jnp.float32)
    xs["q"], xs["k"] = (
        xs[n] * np.where(np.arange(20) % 2 == i, np.float32(3e30), 0)[:, None, None, None]
        for i, n in enumerate("qk")
    )
    xs["v"], init = xs["v"] * np.float32(1e-38), init * 1e-38
    actual, expected = in_chunks_and_not(
        layers.linear, init, xs, reference=jax.jit
    )  # XLA rounds 1e-39 to 0
    np.testing.assert_allclose(actual[0][1][1], expected[0][1][1], rtol=1e-5)


def test_products_of_cotangents_that_the_recurrence_does_not_have_may_overflow():
    """Cotangents of the first steps and states of the last ones are near the largest float: the gradients are not."""
    init, xs = problem(layers.gated_delta, 128, jnp.float32)
    given = {n: xs[n] for n in ("q", "k", "v", "b")}
    growth = np.full_like(xs["g"], np.log(1.99))
    weight = np.cos(np.arange(xs["v"].size, dtype=np.float32)).reshape(xs["v"].shape)

    def weighted(scan):
        def of(given):
            return jnp.sum(
                weight * scan(layers.gated_delta, init * 0, {**xs, **given, "g": growth})[1]
            )

        return jax.jit(jax.grad(of))

    actual, expected = (jax.device_get(weighted(scan)(given)) for scan in (jrnn.scan, jax.lax.scan))
    assert all(np.all(np.isfinite(v)) for v in expected.values())
    for name, theirs in expected.items():
        scale = np.max(np.abs(theirs), axis=tuple(range(1, theirs.ndim)), keepdims=True)
        np.testing.assert_allclose(actual[name] / scale, theirs / scale, atol=1e-3)


@pytest.mark.exhaustive
def test_bfloat16_inputs_with_a_float32_state():
    init, xs = problem(layers.gated_delta, 20, jnp.float32)
    narrow = {n: x if x.dtype == bool else x.astype(jnp.bfloat16) for n, x in xs.items()}

    def step(S, x):
        S, y = layers.gated_delta(S, {n: v.astype(jnp.float32) for n, v in x.items()})
        return S, y.astype(jnp.bfloat16)

    actual, expected = in_chunks_and_not(step, init, narrow)
    assert actual[0][1][0].dtype == jnp.float32
    np.testing.assert_allclose(actual[0][1][0], expected[0][1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reverse", [False, True])
def test_states_without_products_to_gain_are_stored_at_boundaries(x64, reverse):
    """Mamba-1: each element of the state has a decay of its own."""
    rng = np.random.default_rng(0)
    init, rates, xs = rng.normal(size=(5, 4)), np.arange(1.0, 5), rng.normal(size=(150, 3, 5))

    def step(h, x):
        h = jnp.exp(-jnp.exp(x[0])[:, None] * rates[None]) * h + x[0][:, None] * x[1][None, :4]
        return h, h @ x[2][:4]

    def both(scan):
        return jax.value_and_grad(
            lambda *a: loss(scan, step, *a, reverse=reverse), (0, 1), has_aux=True
        )

    with observers.collected() as plans:
        run = jax.jit(both(jrnn.scan))(init, xs)
    assert "float64[5,4] stored at 3 boundaries of chunks of 64" in str(plans)
    assert_close((run, by_numpy(both(jax.lax.scan))(init, xs)), 1e-10)


@pytest.mark.exhaustive("q-True")
@pytest.mark.parametrize("name, reads", [("q", True), ("v", False)])
def test_a_gradient_that_reads_no_state_is_computed_step_by_step(name, reads):
    init, xs = problem(layers.linear, 20, jnp.float32)

    def of_one(v):
        return loss(jrnn.scan, layers.linear, init, {**xs, name: v})[0]

    with observers.collected() as plans:
        jax.jit(jax.grad(of_one)).lower(xs[name])
    assert (plans[0].strategy == "chunks") == reads, plans[0]
    assert plans.notes == ([] if reads else ["not chunks: this gradient reads no state"])


def test_the_reverse_pass_keeps_states_of_chunk_boundaries_only():
    init, xs = problem(layers.gla, 256, jnp.float32, K=32, V=32)

    def sizes(scan):
        value = lambda init, xs: loss(scan, layers.gla, init, xs)[0]  # noqa: E731
        pull = jax.eval_shape(
            lambda *given: jax.vjp(value, *given)[1],
            init,
            {n: xs[n] for n in ("q", "k", "v", "gk")},
        )
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))

    assert sizes(jrnn.scan) < sizes(jax.lax.scan) / 5


@pytest.mark.sample("all states")
@pytest.mark.parametrize(
    "step, reason",
    [
        (lambda S, x: (jnp.tanh(S) + layers.outer(x["k"], x["v"]), layers.read(S, x["q"])), "tanh of S at "),
        (lambda S, x: (S + layers.outer(x["k"], x["v"]), (layers.read(S, x["q"]), S)), "S is an output of every step"),
        (lambda S, x: (S + layers.outer(x["k"], jnp.tanh(layers.read(S, x["k"]))), x["v"]), "tanh of what was read from S"),
    ],
    ids=["tanh of S", "all states", "tanh of a row"],
)  # fmt: skip
def test_steps_of_other_forms_run_as_before_and_say_why(step, reason):
    init, xs = problem(layers.linear, 20, jnp.float32)
    with observers.collected() as plans:
        actual = jax.grad(lambda xs: loss(jrnn.scan, step, init, xs)[0], allow_int=True)(xs)
    assert not [p for p in plans if p.strategy == "chunks"]
    assert any(reason in note for note in plans.notes), plans.notes
    expected = jax.grad(lambda xs: loss(jax.lax.scan, step, init, xs)[0], allow_int=True)(xs)
    assert_close((actual, expected), 1e-5)


@pytest.mark.parametrize("given, expected", [("highest", jax.lax.Precision.HIGHEST), (None, None)])
def test_products_have_the_precision_of_the_step(given, expected):
    def step(S, x):
        S = S + jnp.matmul(x["k"][..., None], x["v"][..., None, :], precision=given)
        return S, jnp.einsum("bhk,bhkv->bhv", x["q"], S, precision=given)

    init, xs = problem(layers.linear, 64, jnp.float32)
    slope = jax.make_jaxpr(jax.grad(lambda xs: loss(jrnn.scan, step, init, xs)[0], allow_int=True))(
        xs
    )
    products = [e for e in jaxprs.all_equations(slope.jaxpr) if e.primitive.name == "dot_general"]
    inside = [e.params["precision"] for e in products if 32 in e.outvars[0].aval.shape]
    assert inside
    assert {p[0] if p else None for p in inside} == {expected}


@pytest.mark.exhaustive
def test_explain_says_how_a_loop_is_solved():
    init, xs = problem(layers.kda, 64, jnp.float32)
    plan = scan_plans(layers.kda, init, xs).training[0]
    assert (
        "solved in chunks of 16: S[1,2,4,4] with decay per row, 1 transition of rank one, stored at 4 boundaries"
        in str(plan)
    )


def test_which_loops_pay():
    def scan_of(n, T):
        init, xs = jnp.zeros((2, n, n)), {k: jnp.zeros((T, 2, n)) for k in "qkv"}
        step = jax.make_jaxpr(
            lambda S, x: layers.linear_by_vmap(S[None], {k: v[None] for k, v in x.items()})
        )(init, {k: v[0] for k, v in xs.items()})
        return ScanParams(step, 0, 1, T, False)

    assert chunks_may_pay(scan_of(64, 256))
    assert not chunks_may_pay(scan_of(64, 64))
    assert not chunks_may_pay(scan_of(16, 256))


def chosen(T, K, **options):
    """Returns the plan of the forward loop of a train step of a delta rule, or None if it is differentiated by steps."""
    xs = {
        n: jax.ShapeDtypeStruct((T, 1, 8, *shape), jnp.float32)
        for n, shape in dict(q=(K,), k=(K,), v=(K,), b=()).items()
    }

    def train(xs):
        return jnp.sum(jrnn.scan(layers.delta, jnp.zeros((1, 8, K, K)), xs, **options)[1] ** 2)

    with observers.collected() as plans:
        jax.make_jaxpr(jax.grad(train))(xs)
    return next((p for p in plans if p.strategy == "chunks"), None), plans.notes


def test_the_cost_model_chooses_between_chunks_and_steps(monkeypatch):
    monkeypatch.setattr(Chunkwise, "estimate", ESTIMATE)
    plan, _ = chosen(1024, 64)
    (other, reason), mine = plan.rejected[0], plan.chosen.estimate
    assert (plan.chosen.label, other.label, reason) == ("in chunks", "lax.scan", "slower")
    assert mine.memory < 0.06 * other.estimate.memory
    assert mine.seconds < 0.5 * other.estimate.seconds
    plan, notes = chosen(256, 16)
    assert plan is None
    assert notes[0].startswith("not chunks: "), notes
    assert notes[0].endswith("step by step"), notes
    assert (
        chosen(256, 16, memory=0.01)[0] is not None
    )  # step by step, the states of all steps take 4 MB


def test_the_variables_of_terms_are_read_in_their_order():
    """The program of a chunk depends on it, and must be the same in every process."""
    read = jax.make_jaxpr(lambda *xs: sum(xs))(*[jnp.float32(0)] * 40).jaxpr.invars
    nested = Factor((Factor(read[5], ()), Factor(read[1], ())), ())
    terms = [
        Term(None, tuple(Factor(v, ()) for v in pair)) for pair in zip(read[10:30], read[20:40])
    ]
    names = variables([Term(None, (nested,)), *terms])
    ordered = dict.fromkeys(
        [read[5], read[1], *(v for pair in zip(read[10:30], read[20:40]) for v in pair)]
    )
    assert names == list(ordered)


def test_the_gradient_of_a_decay_in_levels_is_a_short_program():
    """Each equation costs time at the first call. With all levels spelled out, the gradient had over 1,000 of them."""
    init, xs = problem(layers.gla, 64, jnp.float32)
    slope = jax.make_jaxpr(
        jax.grad(lambda xs: loss(jrnn.scan, layers.gla, init, xs)[0], allow_int=True)
    )(xs)
    assert 200 < len(list(jaxprs.all_equations(slope.jaxpr))) < 700


@pytest.mark.exhaustive
def test_no_kernel_computes_all_levels_of_a_decay():
    """XLA:CPU fused the cotangents of five levels into kernels of over 100 operations, which took a second to compile."""
    init, xs = problem(layers.gla, 64, jnp.float32)
    text = compiled(init=init, step=layers.gla, xs=xs)[0].as_text()
    sizes = [
        len(body.splitlines())
        for body in re.findall(r"^%fused_computation[^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    ]
    assert 30 < max(sizes) < 80
