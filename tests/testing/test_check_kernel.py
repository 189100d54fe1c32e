"""`check_kernel`: a right kernel has every property, and each planted fault is found under its name.

Shapes: T time, N batch, H heads, K keys, V values.
"""

import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import blocks_of

import jrnn
from jrnn.errors import LayerError
from jrnn.testing import Kernel, check_kernel, sequence_kernel
from jrnn.testing.kernels import KERNEL_PROPERTIES

pytestmark = pytest.mark.usefixtures("little_optimization")

HERE = Path(__file__).parent
SOURCE = (HERE / "chunkwise_kernel.py").read_text(encoding="utf-8")
FAULTS = tomllib.loads((HERE / "kernel_faults.toml").read_text(encoding="utf-8"))

N, T, H, K, V = 2, 5, 2, 3, 2
RNG = np.random.default_rng(0)
SHAPES = {"q": (N, T, H, K), "k": (N, T, H, K), "v": (N, T, H, V)}
XS = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
XS["a"] = RNG.uniform(0.3, 1, (N, T, H)).astype(np.float32)
STATE = RNG.standard_normal((N, H, K, V)).astype(np.float32)
OPTIONS = {"layout": "NTH", "chunk": 4, "decay": "a"}


def module(line="", wrong=""):
    """The names of chunkwise_kernel.py, with one part of a line replaced."""
    assert not line or SOURCE.count(line) == 1, f"there are {SOURCE.count(line)} of {line!r}"
    names = {"__name__": "chunkwise_kernel"}
    source = SOURCE.replace(line, wrong) if line else SOURCE
    exec(compile(source, "chunkwise_kernel.py", "exec"), names)
    return names


RIGHT = module()


def adapted(names, **options):
    own = {"framework": "numpy", "gradients": names["gradients"], "decode": names["decode"]}
    given = {**OPTIONS, **own, **options}
    return sequence_kernel(RIGHT["step"], names["kernel"], XS, STATE, **given)


def test_a_right_kernel_has_every_property():
    report = check_kernel(adapted(RIGHT))
    assert report.holds == tuple(KERNEL_PROPERTIES), report


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.grid(every=2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    planted = FAULTS[fault]
    kernel = adapted(module(planted["line"], planted["wrong"]))
    report = check_kernel(kernel, only=[planted["property"]])
    (finding,) = report.findings
    assert finding.property == planted["property"]
    assert not finding.counterexample.startswith("raises"), finding
    assert finding.steps <= 9  # of 13


def test_there_are_forty_planted_faults_and_no_property_without_one():
    assert len(FAULTS) >= 40
    assert {fault["property"] for fault in FAULTS.values()} >= set(KERNEL_PROPERTIES) - {"float32"}


def test_a_fault_is_reported_once():
    """What rests on it, and further results that have it, are left out."""
    for fault in (
        "a last chunk that is left out where it is not whole",
        "the state before the last chunk as the last one",
        "a gradient that does not go from chunk to chunk",
        "a last sequence that reads the state of the first",
    ):
        planted = FAULTS[fault]
        report = check_kernel(adapted(module(planted["line"], planted["wrong"])))
        assert [f.property for f in report.findings] == [planted["property"]], report
        assert all(why.endswith("does not hold") for why in report.skipped.values())


def test_the_counterexample_is_small_and_can_be_run_again():
    fault = FAULTS["outputs that see the state of a chunk before its decay"]
    names = module(fault["line"], fault["wrong"])
    (finding,) = check_kernel(adapted(names), only=["values"]).findings
    assert str(finding).startswith(
        "values: outputs of whole chunks are the step's; but for T=5, N=1: y[0, 4, 0, 0] is 1, not 0.9964"
    )
    assert finding.inputs["xs['k']"].shape == (1, 5, 1, 1)
    assert np.count_nonzero(finding.inputs["xs['k']"]) == 1
    xs = {name: finding.inputs[f"xs['{name}']"] for name in "akqv"}
    assert names["kernel"](xs)[0][0, 4, 0, 0] == 1 != RIGHT["kernel"](xs)[0][0, 4, 0, 0]


def test_what_a_kernel_does_not_take_is_reported():
    def kernel(xs):
        return RIGHT["kernel"](xs)[0]

    without = {
        "framework": "numpy",
        "returns_state": False,
        "multiple_of": 4,
        "types": ("float16",),
    }
    report = check_kernel(RIGHT["step"], kernel, XS, STATE, layout="NTH", chunk=4, **without)
    assert report.holds == ("values", "determinism", "batch", "heads", "float16")
    no_state = "the kernel takes no first state"
    assert report.skipped == {
        "odd lengths": "the kernel takes only multiples of 4 steps",
        "final state": "the kernel returns no state",
        "first state": no_state,
        "gradients": "the kernel has no gradients",
        "gradient of the first state": no_state,
        **dict.fromkeys(
            ["decay 1", "decay 0", "decay 1e-6", "decay 1e-30", "growth"],
            "which input holds decays was not given (`decay`)",
        ),
        "resets": "the kernel takes no resets",
        "documents": "the kernel takes no segments",
        "right padding": "the kernel takes no lengths and no mask",
        "left padding": "the kernel takes no mask",
        "length 0": "the kernel takes no lengths",
        "pieces": no_state,
        "decoding": "the kernel takes only multiples of 4 steps",
        "float32": "the kernel takes no float32",
        "bfloat16": "the kernel takes no bfloat16",
    }


@pytest.mark.exhaustive
def test_a_right_kernel_of_jax_has_every_property():
    report = check_kernel(RIGHT["step"], RIGHT["in_jax"], XS, STATE, **{**OPTIONS, "chunk": 2})
    assert not report.findings, report
    assert set(report.skipped) == {"documents", "right padding", "left padding", "length 0"}


def test_a_kernel_of_jax_with_params_and_logarithms_of_decays():
    def step(u, total, x):
        total = jnp.exp(x["g"]) * total + u * x["v"]
        return total, total

    def kernel(u, xs, state):
        decay = jnp.exp(xs["g"])

        def join(first, second):
            return second[0] * first[0], second[0] * first[1] + second[1]

        decays, totals = jax.lax.associative_scan(join, (decay, u * xs["v"]))
        ys = totals + decays * state
        return ys, jax.lax.stop_gradient(ys[-1]) if wrong else ys[-1]

    xs = {"g": -XS["a"].reshape(T, -1), "v": XS["v"].reshape(T, -1)[:, : N * H]}
    options = {"params": np.float32(0.5), "layout": "TN", "chunk": 2, "decay": "exp(g)"}
    only = ["values", "first state", "gradients", "decay 0", "pieces"]
    wrong = False
    report = check_kernel(step, kernel, xs, xs["v"][0], only=only, **options)
    assert report.holds == tuple(only), report
    wrong = True
    (finding,) = check_kernel(step, kernel, xs, xs["v"][0], only=["gradients"], **options).findings
    assert "the gradient of the last state, the gradient of xs['v'][0, 0] is 0, not" in str(finding)


def test_a_kernel_of_torch():
    torch = pytest.importorskip("torch")

    def kernel(xs, state=None, *, resets=None):
        state = torch.zeros_like(xs["v"][:, 0, :, None]) if state is None else state
        ys = []
        for t in range(xs["a"].shape[1]):
            a = (
                xs["a"][:, t]
                if resets is None
                else torch.where(resets[:, t, None], 0, xs["a"][:, t])
            )
            outer = xs["k"][:, t, :, :, None] * xs["v"][:, t, :, None]
            state = a[..., None, None] * state + outer
            ys.append((xs["q"][:, t, :, None] @ state)[:, :, 0])
        return torch.stack(ys, 1), state

    report = check_kernel(RIGHT["step"], kernel, XS, STATE, framework="torch", **OPTIONS)
    assert not report.findings and "bfloat16" in report.holds, report


def test_an_onnx_model(tmp_path):
    pytest.importorskip("onnxruntime")

    def step(total, x):
        total = x["a"] * total + x["v"]
        return total, total

    def loop(a, v, state):
        def batched(total, x):
            total = x[0] * total + x[1]
            return total, total

        last, ys = jrnn.scan(batched, state, (a, v))
        return ys, last if right else jnp.zeros_like(last)

    xs = {"a": XS["a"].reshape(T, -1), "v": XS["v"].reshape(T, -1)[:, : N * H]}
    for right, dims in ((True, "T, N"), (False, "T, N"), (True, None)):
        path = tmp_path / f"{right}{dims}.onnx"
        open_sizes = None if dims is None else (dims, dims, "N")
        jrnn.to_onnx(loop, xs["a"], xs["v"], xs["v"][0], dims=open_sizes, path=path)
        if dims is None:
            with pytest.raises(LayerError, match="its axes TN must be open"):
                check_kernel(step, path, xs, xs["v"][0])
            continue
        report = check_kernel(step, path, xs, xs["v"][0], chunk=2, decay="a")
        assert [f.property for f in report.findings] == ([] if right else ["final state"]), report
        assert report.skipped["gradients"] == "the kernel has no gradients"
        assert "growth" in report.holds


def test_what_a_kernel_raises_is_a_finding():
    def kernel(xs, state):
        if xs["a"].shape[1] % 4:
            raise ValueError("no such length")
        return RIGHT["kernel"](xs, state)

    report = check_kernel(RIGHT["step"], kernel, XS, STATE, framework="numpy", **OPTIONS)
    (finding,) = report.findings
    assert finding.property == "odd lengths"
    assert finding.counterexample.startswith("raises ValueError: no such length; with ")


def test_a_function_can_set_the_decay():
    def decay(xs, factor):
        return {**xs, "a": np.full_like(xs["a"], factor)}

    fault = FAULTS["decays above a bound"]
    kernel = adapted(module(fault["line"], fault["wrong"]), decay=decay)
    report = check_kernel(kernel, only=["decay 1e-6", "growth"])
    assert report.holds == ("decay 1e-6",) and report.findings[0].property == "growth"


def test_wrong_arguments():
    step, kernel = RIGHT["step"], RIGHT["kernel"]
    for arguments, options, text in (
        (
            (step, kernel, XS, STATE),
            {"layout": "NHT", "chnk": 2},
            "no field 'chnk'; did you mean 'chunk'?",
        ),
        ((step, kernel, XS, STATE), {"layout": "NTD"}, "layout is 'NTD'; it has T"),
        (
            (step, kernel, XS, STATE),
            {"framework": "tf"},
            "framework is 'tf'; there are: jax, torch",
        ),
        ((step, 3, XS, STATE), {}, "does not know kernels of type int"),
        ((step, kernel, XS["a"][0, 0], STATE), {}, "does not begin with the axes TN of the layout"),
        ((step, kernel, XS["a"], STATE[0]), {}, "does not begin with N = "),
        ((adapted(RIGHT, decay="g"),), {"only": ["decay 0"]}, "decay is 'g', but xs have no 'g'"),
        ((adapted(RIGHT),), {"only": ["value"]}, "no property 'value'; did you mean 'values'?"),
    ):
        with pytest.raises(LayerError) as error:
            check_kernel(*arguments, **options)
        assert text in str(error.value)


def test_kernel_tests(pytester):
    pytester.makepyfile(
        """
        import numpy as np
        from jrnn.testing import kernel_tests, sequence_kernel

        def step(total, x):
            return total + x, total + x

        def kernel(xs, state):
            ys = np.cumsum(xs, axis=0) + state
            return ys, ys[-1] * (len(xs) < 6)

        def make():
            xs = np.ones((3, 2), np.float32)
            return sequence_kernel(step, kernel, xs, xs[0], framework="numpy", chunk=2)

        test_kernel = kernel_tests(make, skip=["bfloat16", "float16", "float32"])
        """
    )
    result = pytester.runpytest("-q", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=5, failed=3, skipped=13)
    result.stdout.fnmatch_lines(
        ["*final state: the last state is the step's, at every length; but for T=6, N=1*"]
    )


def test_a_kernel_is_a_record():
    kernel = adapted(RIGHT)
    assert isinstance(kernel, Kernel) and (kernel.chunk, kernel.steps) == (4, 13)
    assert kernel.x["q"].shape == (13, N, H, K) and kernel.takes_state and not kernel.needs_state


def test_the_example_of_the_guide():
    """The counterexamples in the page are those that are found."""
    page = (Path(jrnn.__file__).parents[1] / "docs" / "checking.md").read_text(encoding="utf-8")
    code = next(text for _, text in blocks_of(page) if text.startswith("# file: attention.py"))
    names = {}
    exec(code, names)
    step, state, xs, options = names["loop"]()
    report = check_kernel(step, names["kernel"], xs, state, only=["decay 1e-30"], **options)
    assert f"\n{str(report).splitlines()[1]}\n" in page
