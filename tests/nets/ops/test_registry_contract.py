"""What holds of every operator: it has a recorded case, equals it, and its shapes, gradients and jitted form are right.

The cases are Caffe2's own answers, recorded by scripts/record/caffe2_operators.py. Whatever is registered must be recorded
there, or stand in one of the tables of exceptions below, with the reason.
"""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded import Case, read_cases

import jrnn
from jrnn.errors import GradientError, OpError
from jrnn.nets import registry
from jrnn.nets.autodiff import GradientSlice
from jrnn.nets.ops import catalog

RTOL, ATOL = 1e-4, 1e-5  # of float32 results; ATOL is relative to the largest element

# Operators without a recorded case.
NOT_RECORDED = {
    "Allgather": "Caffe2 runs it with an engine for several processes; runs in tests/nets/ops/test_collective.py",
    "Allreduce": "as Allgather",
    "AtomicIter": "reads a mutex, which cannot be recorded; runs in tests/nets/ops/test_training_net.py",
    "Barrier": "as Allgather",
    "Broadcast": "as Allgather",
    "CloneCommonWorld": "as Allgather",
    "CopyCPUToGPU": "Caffe2 runs it on GPUs only",
    "CopyGPUToCPU": "Caffe2 runs it on GPUs only",
    "CountDown": "changes its input in place; runs in tests/nets/ops/test_control.py",
    "CountUp": "changes its input in place; runs in tests/nets/ops/test_control.py",
    "CreateCommonWorld": "as Allgather",
    "CreateCounter": "writes a counter, which cannot be recorded; runs in tests/nets/ops/test_control.py",
    "CreateScope": "writes a workspace, which cannot be recorded; runs in tests/nets/ops/test_control.py",
    "CreateDB": "writes a reader of a file, which cannot be recorded; runs in tests/nets/ops/test_database.py",
    "DestroyCommonWorld": "as Allgather",
    "FileStoreHandlerCreate": "as Allgather",
    "Free": "leaves a blob without a value, which cannot be recorded; runs in tests/nets/ops/test_free.py",
    "Load": "reads a file; recorded apart, replayed in tests/nets/ops/test_database.py",
    "NCCLAllGather": "Caffe2 runs it on GPUs only; runs in tests/nets/ops/test_collective.py",
    "NCCLAllreduce": "as NCCLAllGather",
    "NCCLBroadcast": "as NCCLAllGather",
    "NCCLReduce": "as NCCLAllGather",
    "NCCLReduceScatter": "as NCCLAllGather",
    "Print": "writes to the terminal; runs in tests/nets/ops/test_database.py",
    "RedisStoreHandlerCreate": "as Allgather",
    "Reduce": "as Allgather",
    "Save": "writes a file; recorded apart, replayed in tests/nets/ops/test_database.py",
    "TimerBegin": "writes a timer, which cannot be recorded; runs in tests/nets/ops/test_control.py",
    "TimerEnd": "as TimerBegin",
    "TimerGet": "as TimerBegin",
    "TimerGetAndEnd": "as TimerBegin",
    "TensorProtosDBInput": "reads a file; recorded apart, replayed in tests/nets/ops/test_database.py",
    "Do": "recorded in whole nets, replayed in tests/nets/ops/test_control.py",
    "HasScope": "reads a workspace, which cannot be recorded; runs in tests/nets/ops/test_control.py",
    "If": "recorded in whole nets, replayed in tests/nets/ops/test_control.py",
    "RecurrentNetworkBlobFetcher": "its input is no tensor; tested in tests/test_recurrent.py",
    "RecurrentNetwork": "recorded as whole nets, replayed in tests/nets/ops/test_recurrent_network.py",
    "RecurrentNetworkGradient": "recorded as whole nets, replayed in tests/nets/ops/test_recurrent_network.py",
    "Log1p": "Caffe2 1.8.1 has no such operator; runs in tests/nets/ops/test_families.py",
    "GivenTensorFp16Fill": "Caffe2 1.8.1 has no such operator; runs in tests/nets/ops/test_families.py",
    "ResetCounter": "changes its input in place; runs in tests/nets/ops/test_control.py",
    "RetrieveCount": "reads a counter, which cannot be recorded; runs in tests/nets/ops/test_control.py",
    "While": "recorded in whole nets, replayed in tests/nets/ops/test_control.py",
}

# Operators whose gradient Caffe2 does not have, so that none is recorded;
# tests/testing/gradients/test_literature.py proves them.
BEYOND_CAFFE2 = {"ScatterAssign", "Where"}

# Operators whose gradient is not compared with the derivative in float64.
NOT_THE_DERIVATIVE = {
    "NegateGradient": "its gradient is the negative of the derivative, which is what it is for; see test_families.py",
}

# Operators whose recorded gradient operators jrnn's are not to equal.
MAKER_DIFFERS = {
    "Pow": "Caffe2 writes a gradient several times over, which adds up wrongly where the input is read twice",
    "Sqr": "Caffe2 doubles the gradient that arrives in place, which others may read",
    "Sqrt": "Caffe2 writes a gradient twice over, which adds up wrongly where the input is read twice",
}


KEY = jax.random.key(0)
CASES = read_cases()
TYPES = {d.type: d for d in registry.registered()}


def by_type(cases):
    """One test for each operator: its cases are compiled together, which costs less than one by one."""
    groups: dict[str, list[Case]] = {}
    for c in sorted(
        cases, key=lambda c: not all(v.size for v in c.inputs.values())
    ):  # first one that has elements
        groups.setdefault(c.op.type, []).append(c)
    return pytest.mark.parametrize("cases", groups.values(), ids=groups)


def best(cases):
    """One case of an operator: with its gradient operator if it has one, and with elements."""
    return max(
        cases, key=lambda c: (c.gradient is not None, all(v.size for v in c.inputs.values()))
    )


@contextlib.contextmanager
def told(case):
    """Adds the name of the case to an error."""
    try:
        yield
    except Exception as e:
        e.add_note(f"in case {case.name}")
        raise


pytestmark = pytest.mark.usefixtures("little_optimization")


def assert_equal(got, want, rtol=RTOL, atol=ATOL):
    got = np.asarray(got)
    assert got.shape == want.shape
    if want.dtype.kind == "S":
        assert got.astype("S").tolist() == want.tolist()
        return
    assert got.dtype == want.dtype
    if want.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want)
    else:
        finite = np.abs(want[np.isfinite(want)].astype(float))
        np.testing.assert_allclose(
            got, want, rtol=rtol, atol=atol * max(1.0, finite.max(initial=0))
        )


def test_every_operator_is_recorded():
    seen = {op.type for c in CASES for op in c.net.ops}
    missing = sorted(set(TYPES) - seen - set(NOT_RECORDED))
    assert not missing, (
        f"no recorded case: add one to scripts/record/caffe2_cases, and run scripts/record/caffe2_operators.py: {missing}"
    )


def test_every_gradient_is_recorded():
    differentiated = {c.op.type for c in CASES if c.gradient}
    missing = sorted(t for t in TYPES if registry.gradient_maker(t) and TYPES[t].outputs != (0, 0))
    missing = [
        t for t in missing if t not in differentiated and t not in BEYOND_CAFFE2.union(NOT_RECORDED)
    ]
    assert not missing, f"a gradient, but no recorded case with gradient=True: {missing}"


def test_exceptions_are_needed():
    seen = {op.type for c in CASES for op in c.net.ops}
    assert not seen & set(NOT_RECORDED)
    assert set(NOT_RECORDED) | set(NOT_THE_DERIVATIVE) | set(MAKER_DIFFERS) <= set(TYPES)


def traced(case):
    """The case's net as a function of as many of its inputs as can be traced, and those inputs.

    Where the shapes of outputs depend on integers, these stay static; where they depend on floats, only the first of them
    is traced.
    """
    fn = jrnn.to_jax(case.net, case.outputs)
    floats = [n for n, v in case.inputs.items() if v.dtype.kind == "f"]
    refused = None
    for names in (list(case.inputs), floats, floats[:1]):
        static = {
            n: jnp.asarray(v) if n in floats else v
            for n, v in case.inputs.items()
            if n not in names
        }
        given = {n: case.inputs[n] for n in names}

        def run(given, static=static):
            return fn({**static, **given}, key=KEY)

        try:
            jax.eval_shape(run, given)
            return run, given
        except OpError as e:
            refused = e
    raise refused


def assert_recorded(case, got):
    for name, want in case.outputs.items():
        if case.random:
            assert (got[name].shape, got[name].dtype) == (want.shape, want.dtype), name
        else:
            assert_equal(got[name], want)


@by_type(CASES)
def test_equals_recorded(cases, pytestconfig):
    """The numbers of one case, or of all if exhaustive, compiled where it can be; and the shapes of every case."""
    chosen = cases if pytestconfig.getoption("--exhaustive") else [best(cases)]
    together = [c for c in chosen if not c.dynamic and not c.has_strings]
    with jax.enable_x64(True):
        programs = []
        for c in together:
            with told(c):
                programs.append(traced(c))
        compiled = jax.jit(lambda given: [run(g) for (run, _), g in zip(programs, given)])
        results = {c.name: r for c, r in zip(together, compiled([given for _, given in programs]))}
    for c in chosen:
        with told(c):
            assert_recorded(
                c, results[c.name] if c.name in results else jrnn.run_net(c.net, c.inputs, key=KEY)
            )
    for c in cases:
        with told(c):
            shapes = {} if c.dynamic else jrnn.nets.infer_shapes(c.net, c.inputs, key=KEY)
            for name in set(shapes) & set(c.outputs):
                assert (shapes[name].shape, shapes[name].dtype) == (
                    c.outputs[name].shape,
                    c.outputs[name].dtype,
                ), name


@pytest.mark.exhaustive(
    "Clip",
    "SquaredL2Distance",
    "Col2Im",
    "Lars",
    "AveragePool1D",
    "ReduceL2",
    "SparseLengthsWeightedSumGradient",
)
@pytest.mark.grid(every=23)
@by_type([c for c in CASES if not c.dynamic and not c.has_strings])
def test_equals_recorded_operator_by_operator(cases):
    """Not compiled as a whole, also what random operators draw; of the first case."""
    with told(cases[0]):
        outputs = jrnn.run_net(cases[0].net, cases[0].inputs, key=KEY)
        assert_recorded(cases[0], outputs)
        if cases[0].random:
            with jax.enable_x64(True):
                run, given = traced(cases[0])
                for name, value in jax.jit(run)(given).items():
                    assert_equal(outputs[name], np.asarray(value))


@by_type([c for c in CASES if TYPES[c.op.type].dynamic and not c.has_strings])
def test_dynamic_shapes_are_refused_under_jit(cases):
    """In one case at least: in others an argument may tell the shape."""
    refusals = []
    for c in cases:
        try:
            jax.eval_shape(jrnn.to_jax(c.net), c.inputs)
        except OpError as e:
            refusals.append(str(e))
    assert any("they are traced; run the net with run_net" in r for r in refusals)


@by_type([c for c in CASES if c.gradient and c.op.type not in MAKER_DIFFERS])
def test_gradient_net_is_caffe2s(cases):
    """The same operators and the same names; in another form than Caffe2's the arguments would not be readable there."""
    for c in cases:
        with told(c):
            full, gradients = jrnn.add_gradients(c.forward, c.gradient["seeds"])
            actual = [
                (op.type, op.inputs, op.outputs, {a.name: a.value for a in op.args})
                for op in full.ops[1:]
            ]
            wanted = [
                (op.type, op.inputs, op.outputs, {a.name: a.value for a in op.args})
                for op in c.net.ops[1:]
            ]
            assert actual == wanted
            names = {
                k: list(g) if isinstance(g, GradientSlice) else g for k, g in gradients.items()
            }
            assert {k: names.get(k) for k in c.gradient["gradients"]} == c.gradient["gradients"]


def gradients_of(case):
    """A function of the inputs that have a gradient, in float64, and these inputs.

    The function gives the loss (the sum of the outputs, each times the gradient that arrives at it), and its gradients
    from JAX and from the generated net.
    """
    seeds = case.gradient["seeds"]
    inputs = {n: v.astype(float) if v.dtype.kind == "f" else v for n, v in case.inputs.items()}
    full, gradients = jrnn.add_gradients(case.forward, seeds)
    wanted = {
        n: g for n, g in gradients.items() if n in case.gradient["gradients"] and n in case.inputs
    }
    wanted = {
        n: g for n, g in wanted.items() if inputs[n].dtype.kind == "f" and n not in seeds.values()
    }
    assert wanted
    params = {n: inputs[n] for n in wanted}
    fixed = {
        n: jnp.asarray(v) if v.dtype.kind == "f" else v
        for n, v in inputs.items()
        if n not in wanted
    }
    forward = jrnn.to_jax(case.forward, list(seeds), wide=True)
    written = {
        o for op in full.ops[1:] for o in op.outputs
    }  # a gradient may also be passed through
    blobs = {str(b) for g in wanted.values() for b in (g if isinstance(g, GradientSlice) else (g,))}
    backward = jrnn.to_jax(full, sorted(blobs & written), wide=True)

    def loss(params):
        outputs = forward({**fixed, **params}, key=KEY)
        parts = [
            jnp.where(jnp.isfinite(outputs[y]), outputs[y], 0) * inputs[dy]
            for y, dy in seeds.items()
        ]
        return sum(jnp.sum(p) for p in parts)

    def run(params):
        values = {**fixed, **params, **backward({**fixed, **params}, key=KEY)}
        value, by_jax = jax.value_and_grad(loss)(params)
        by_net = {}
        for n, g in wanted.items():
            sparse = isinstance(g, GradientSlice)
            by_net[n] = (
                jnp.zeros_like(params[n]).at[values[g.indices]].add(values[g.values])
                if sparse
                else values[g]
            )
        return value, by_jax, by_net

    return run, params


@pytest.mark.sample(
    "EnsureDense",
    "LabelCrossEntropy",
    "Negative",
    "Sqrt",
    "Acos",
    "MaxPool3D",
    "RowMul",
    "SortedSegmentRangeMax",
)
@by_type([c for c in CASES if c.gradient and c.op.type not in NOT_THE_DERIVATIVE])
def test_gradients_agree_in_float64(cases, x64):
    """JAX's gradient of the forward and the generated net's agree to 1e-10, and to 1e-6 with central differences.

    Differences are taken beside the recorded point: where inputs tie, the derivative is a matter of convention.
    """
    programs = []
    for c in cases:
        with told(c):
            programs.append(gradients_of(c))
            jax.eval_shape(*programs[-1])
    compiled = jax.jit(lambda points: [run(p) for (run, _), p in zip(programs, points)])
    rng = np.random.default_rng(0)
    at = [params for _, params in programs]
    beside = [{n: v + 1e-3 * rng.standard_normal(v.shape) for n, v in p.items()} for p in at]
    towards = [{n: rng.standard_normal(v.shape) for n, v in p.items()} for p in at]

    def moved(step):
        return [{n: v + step * t[n] for n, v in p.items()} for p, t in zip(beside, towards)]

    step = 1e-5
    rows = zip(
        cases,
        compiled(at),
        compiled(beside),
        compiled(moved(step)),
        compiled(moved(-step)),
        towards,
    )
    for c, (_, by_jax, by_net), (_, slope, _), (ahead, *_), (behind, *_), direction in rows:
        with told(c):
            for n in by_jax:
                assert by_net[n].dtype == np.float64 and by_net[n].shape == by_jax[n].shape, n
                assert_equal(by_net[n], np.asarray(by_jax[n]), rtol=1e-10, atol=1e-10)
            expected = float(sum(np.sum(np.asarray(slope[n]) * direction[n]) for n in slope))
            scale = max(1.0, *(float(np.abs(v).max(initial=0)) for v in slope.values()))
            assert abs((ahead - behind) / (2 * step) - expected) < 1e-6 * scale


@by_type([c for c in CASES if registry.gradient_maker(c.op.type) is None and c.op.outputs])
def test_absent_gradients_are_declared(cases):
    """Without a maker, a gradient that arrives stops where the operator says so, and else is an error."""
    case = cases[0]
    seeds = dict.fromkeys(case.op.outputs[:1], "arriving")
    if TYPES[case.op.type].gradient != "stops":
        with pytest.raises(GradientError, match=case.op.type):
            jrnn.add_gradients(case.forward, seeds)
        return
    full, gradients = jrnn.add_gradients(case.forward, seeds)
    assert len(full.ops) == 1
    assert not set(gradients) & (set(case.op.inputs) - set(case.op.outputs))
    floats = {n: v for n, v in case.inputs.items() if v.dtype.kind == "f"}
    outputs = [n for n in case.op.outputs if case.outputs[n].dtype.kind == "f"]
    if floats and outputs:
        fixed = {n: v for n, v in case.inputs.items() if n not in floats}
        fn = jrnn.to_jax(case.forward, outputs)
        slope = jax.jit(
            jax.grad(lambda p: sum(jnp.sum(v) for v in fn({**fixed, **p}, key=KEY).values()))
        )(floats)
        assert not any(np.any(v) for v in slope.values())


def test_entries_tell_inputs_arguments_and_gradients():
    rows = {e.type: e for e in catalog.entries()}
    assert set(rows) == {d.type for d in registry.registered()}
    assert rows["LayerNorm"].inputs == "x, [gamma], [beta]"
    assert (
        rows["LayerNorm"].arguments
        == "axis: int = 1, epsilon: float = 1e-05, elementwise_affine: bool = 0"
    )
    assert rows["Squeeze"].arguments == "dims: ints"
    assert (rows["Sum"].inputs, rows["Split"].outputs) == ("x, *xs", "1 or more")
    assert [rows[t].gradient for t in ("FC", "StopGradient", "EQ")] == ["yes", "stops", "none"]
    assert (rows["Dropout"].notes, rows["Dropout"].outputs) == (
        "random, in place: output 0 over input 0",
        "1 to 2",
    )
