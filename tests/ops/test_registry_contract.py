"""What holds of every operator: it has a recorded case, equals it, and its shapes, gradients and jitted form are right.

The cases are Caffe2's own answers, which scripts/record_caffe2.py recorded. Whatever is registered must be recorded there,
or stand in one of the tables of exceptions below, with the reason.
"""

from __future__ import annotations

import dataclasses
import io
import json
import lzma
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn import registry
from jrnn.autodiff import GradientSlice
from jrnn.errors import GradientError, OpError

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "ops"
RTOL, ATOL = 1e-4, 1e-5  # of float32 results; ATOL is relative to the largest element

# Operators without a recorded case.
NOT_RECORDED = {
    "AtomicIter": "reads a mutex, which cannot be recorded; runs in tests/ops/test_training_net.py",
    "CopyCPUToGPU": "Caffe2 runs it on GPUs only",
    "CopyGPUToCPU": "Caffe2 runs it on GPUs only",
    "RecurrentNetwork": "recorded as whole nets, replayed in tests/test_recurrent.py",
    "RecurrentNetworkGradient": "recorded as whole nets, replayed in tests/test_recurrent.py",
}

# Operators whose gradient is not compared with the derivative in float64.
NOT_THE_DERIVATIVE = {
    "Cast": "rounds to the type that it names, which float64 does not survive",
    "FloatToHalf": "takes float32 alone",
    "HalfToFloat": "takes float16 alone",
    "NegateGradient": "its gradient is the negative of the derivative, which is what it is for; see test_copies.py",
}

# Operators whose recorded gradient operators jrnn's are not to equal.
MAKER_DIFFERS = {
    "Pow": "Caffe2 writes a gradient several times over, which adds up wrongly where the input is read twice",
    "Sqr": "Caffe2 doubles the gradient that arrives in place, which others may read",
    "Sqrt": "Caffe2 writes a gradient twice over, which adds up wrongly where the input is read twice",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A recorded case: a net of one operator and its gradient operators, what it read and what Caffe2 wrote."""

    name: str
    net: jrnn.Net
    inputs: dict
    outputs: dict
    gradient: dict | None

    @property
    def op(self):
        return self.net.ops[0]

    @property
    def forward(self):
        return dataclasses.replace(self.net, ops=self.net.ops[:1], external_outputs=())

    @property
    def random(self):
        return any(registry.lookup(op.type).random for op in self.net.ops)


def read_cases():
    for path in sorted(GOLDEN.glob("*.npz.xz")):
        with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as z:
            cases: dict[int, dict] = {}
            for key in z.files:
                number, kind, *name = key.split("|", 2)
                found = cases.setdefault(int(number), {"in": {}, "out": {}})
                if name:
                    found[kind][name[0]] = z[key]
                else:
                    found[kind] = z[key]
        for k, c in sorted(cases.items()):
            net = jrnn.read_net(c["net"].tobytes())
            name = f"{path.name.split('.')[0]}-{k}-{net.ops[0].type}"
            yield Case(name, net, c["in"], c["out"], json.loads(str(c["gradient"])) if "gradient" in c else None)


CASES = list(read_cases())
TYPES = {d.type: d for d in registry.registered()}


def by_case(cases):
    return pytest.mark.parametrize("case", cases, ids=[c.name for c in cases])


def first_of_each_type(cases):
    """One case for each operator: the first that reads something, and has elements."""
    found = {}
    for c in sorted(cases, key=lambda c: not all(v.size for v in c.inputs.values())):
        found.setdefault(c.op.type, c)
    return list(found.values())


@pytest.fixture(autouse=True, scope="module")
def little_optimization():
    """These programs run once, so that what optimizing them saves is less than what it costs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


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
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol * max(1.0, finite.max(initial=0)))


def test_every_operator_is_recorded():
    seen = {op.type for c in CASES for op in c.net.ops}
    missing = sorted(set(TYPES) - seen - set(NOT_RECORDED))
    assert not missing, (
        f"no recorded case: add one to scripts/caffe2_cases, and run scripts/record_caffe2.py: {missing}"
    )


def test_every_gradient_is_recorded():
    differentiated = {c.op.type for c in CASES if c.gradient}
    missing = sorted(t for t in TYPES if registry.gradient_maker(t) and TYPES[t].outputs != (0, 0))
    missing = [t for t in missing if t not in differentiated and t not in NOT_RECORDED]
    assert not missing, f"a gradient, but no recorded case with gradient=True: {missing}"


def test_exceptions_are_needed():
    seen = {op.type for c in CASES for op in c.net.ops}
    assert not seen & set(NOT_RECORDED)
    assert set(NOT_RECORDED) | set(NOT_THE_DERIVATIVE) | set(MAKER_DIFFERS) <= set(TYPES)


@by_case(CASES)
def test_equals_recorded(case):
    key = jax.random.key(0)
    got = jrnn.run_net(case.net, case.inputs, key=key)
    for name, want in case.outputs.items():
        if case.random:
            assert (got[name].shape, got[name].dtype) == (want.shape, want.dtype), name
        else:
            assert_equal(got[name], want)
    if not any(registry.lookup(op.type).dynamic for op in case.net.ops):
        shapes = jrnn.infer_shapes(case.net, case.inputs, key=key)
        for name, want in case.outputs.items():
            assert want.dtype.kind == "S" or (shapes[name].shape, shapes[name].dtype) == (want.shape, want.dtype), name


def jitted(case):
    """The outputs of the case's whole net, from one jitted function.

    All inputs are traced; where the shapes of outputs depend on integers, and for strings, they stay static.
    """
    fn = jrnn.to_jax(case.net, [n for n, v in case.outputs.items() if v.dtype.kind != "S"])
    key = jax.random.key(0)
    strings = {n: v for n, v in case.inputs.items() if v.dtype.kind == "S"}
    rest = {n: v for n, v in case.inputs.items() if n not in strings}
    with jax.enable_x64(True):
        try:
            return jax.jit(lambda given: fn({**strings, **given}, key=key))(rest)
        except OpError:
            floats = {n: v for n, v in rest.items() if v.dtype.kind == "f"}
            static = {n: v for n, v in case.inputs.items() if n not in floats}
            return jax.jit(lambda given: fn({**static, **given}, key=key))(floats)


@by_case([c for c in first_of_each_type(CASES) if not TYPES[c.op.type].dynamic])
def test_jit_equals_eager(case):
    eager = jrnn.run_net(case.net, case.inputs, key=jax.random.key(0))
    for name, got in jitted(case).items():
        assert_equal(got, eager[name])


def test_dynamic_shapes_are_refused_under_jit():
    for case in first_of_each_type(CASES):
        if TYPES[case.op.type].dynamic:
            with pytest.raises(OpError, match="traced"):
                jax.eval_shape(jrnn.to_jax(case.net), case.inputs)


@by_case([c for c in CASES if c.gradient])
def test_gradient_net_is_caffe2s(case):
    """The same operators and the same names; in another form than Caffe2's the arguments would not be readable there."""
    if case.op.type in MAKER_DIFFERS:
        return
    full, gradients = jrnn.add_gradients(case.forward, case.gradient["seeds"])
    made = [(op.type, op.inputs, op.outputs, {a.name: a.value for a in op.args}) for op in full.ops[1:]]
    wanted = [(op.type, op.inputs, op.outputs, {a.name: a.value for a in op.args}) for op in case.net.ops[1:]]
    assert made == wanted
    names = {k: list(g) if isinstance(g, GradientSlice) else g for k, g in gradients.items()}
    assert {k: names.get(k) for k in case.gradient["gradients"]} == case.gradient["gradients"]


@by_case([c for c in CASES if c.gradient and c.op.type not in NOT_THE_DERIVATIVE])
def test_gradients_agree_in_float64(case, x64):
    """JAX's gradient of the forward and the generated net's agree to 1e-10, and to 1e-6 with central differences.

    Differences are taken beside the recorded point: where inputs tie, the derivative is a matter of convention.
    """
    seeds = case.gradient["seeds"]
    inputs = {n: v.astype(float) if v.dtype.kind == "f" else v for n, v in case.inputs.items()}
    full, gradients = jrnn.add_gradients(case.forward, seeds)
    wanted = {
        n: g
        for n, g in gradients.items()
        if n in inputs and n not in seeds.values() and n in case.gradient["gradients"]
    }
    overwritten = set(case.op.outputs) & set(inputs)
    wanted = {n: g for n, g in wanted.items() if inputs[n].dtype.kind == "f"}
    forward = jrnn.to_jax(case.forward, list(seeds))
    backward = jrnn.to_jax(
        full, [str(b) for g in wanted.values() for b in (g if isinstance(g, GradientSlice) else (g,))]
    )
    key = jax.random.key(0)
    fixed = {n: v for n, v in inputs.items() if n not in wanted}

    def total(params):
        outputs = forward({**fixed, **params}, key=key)
        parts = [jnp.where(jnp.isfinite(outputs[y]), outputs[y], 0) * inputs[dy] for y, dy in seeds.items()]
        return sum(jnp.sum(p) for p in parts)

    @jax.jit
    def everything(params):
        found = backward({**fixed, **params}, key=key)
        value, by_jax = jax.value_and_grad(total)(params)
        by_net = {}
        for n, g in wanted.items():
            if isinstance(g, GradientSlice):
                by_net[n] = jnp.zeros_like(params[n]).at[found[g.indices]].add(found[g.values])
            else:
                by_net[n] = found[g]
        return value, by_jax, by_net

    params = {n: inputs[n] for n in wanted}
    _, by_jax, by_net = everything(params)
    assert overwritten or wanted
    for n in wanted:
        assert by_net[n].dtype == np.float64 and by_net[n].shape == params[n].shape, n
        assert_equal(by_net[n], np.asarray(by_jax[n]), rtol=1e-10, atol=1e-10)

    rng = np.random.default_rng(0)
    point = {n: v + 1e-3 * rng.standard_normal(v.shape) for n, v in params.items()}
    direction = {n: rng.standard_normal(v.shape) for n, v in params.items()}
    step = 1e-5
    ahead, behind = (everything({n: v + s * direction[n] for n, v in point.items()})[0] for s in (step, -step))
    _, by_jax, _ = everything(point)
    expected = float(sum(np.sum(np.asarray(by_jax[n]) * direction[n]) for n in params))
    scale = max(1.0, *(float(np.abs(v).max(initial=0)) for v in by_jax.values()))
    assert abs((ahead - behind) / (2 * step) - expected) < 1e-6 * scale


@by_case([c for c in first_of_each_type(CASES) if registry.gradient_maker(c.op.type) is None and c.op.outputs])
def test_absent_gradients_are_declared(case):
    """Without a maker, a gradient that arrives stops where the operator says so, and else is an error."""
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
        found = jax.grad(lambda p: sum(jnp.sum(v) for v in fn({**fixed, **p}, key=jax.random.key(0)).values()))(floats)
        assert not any(np.any(v) for v in found.values())
