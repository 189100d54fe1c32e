"""`check_layer`: a correct layer has every property, and each planted fault is found under its name.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jrnn
from jrnn.errors import LayerError
from jrnn.testing import Layer, check_layer, layer_tests, properties, recurrent_layer
from jrnn.testing.properties import PROPERTIES

pytestmark = pytest.mark.usefixtures("little_optimization")

T, N, D, H = 3, 3, 2, 2
RNG = np.random.default_rng(0)
X = RNG.standard_normal((T, N, D)).astype(np.float32)
STATE = RNG.standard_normal((N, H)).astype(np.float32)
PARAMS = {
    n: RNG.standard_normal(s).astype(np.float32)
    for n, s in {"w": (D, 2 * H), "u": (H, 2 * H)}.items()
}
calls = itertools.count()


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """A loop in Python of as many steps as are checked for growth takes long."""
    monkeypatch.setattr(properties, "LONG", 40)


@jax.custom_vjp
def wrong_tanh(x):
    return jnp.tanh(x)


wrong_tanh.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x)),))


def step(params, h, x, tanh=jnp.tanh):
    z, c = jnp.split(x @ params["w"] + h @ params["u"], 2, axis=-1)
    z = jax.nn.sigmoid(z)
    return (1 - z) * h + z * tanh(c)


def one_direction(fault=""):
    """A gated layer as a loop in Python, with at most one fault."""

    def layer(params, x, state, *, lengths=None, resets=None, mask=None):
        h = (
            jnp.zeros((x.shape[1], H), x.dtype)
            if state is None or fault == "forgets the first state"
            else state
        )
        if fault == "stops the gradient of the first state":
            h = jax.lax.stop_gradient(h)
        steps, ys = len(x), []
        if fault == "centers over time":
            x = x - x.mean(0, keepdims=True)
        if fault == "centers over the batch":
            x = x - x.mean(1, keepdims=True)
        reset = {"resets late": -1, "resets early": 1}.get(fault, 0)
        before = h
        for t in range(steps):
            now, before = x[t], h
            if resets is not None and 0 <= t + reset < steps:
                flags = resets[t + reset][:, None]
                flags = flags.any() if fault == "resets the whole batch" else flags
                skips = {
                    "does not reset the first step": 0,
                    "does not reset the last step": steps - 1,
                }.get(fault)
                if fault != "resets after the step" and t != skips:
                    h = jnp.where(flags, jnp.zeros_like(h), h)
            if fault == "looks ahead":
                now = now + 0.1 * x[min(t + 1, steps - 1)]
            if fault == "mixes neighbors":
                h = 0.9 * h + 0.1 * jnp.roll(h, 1, 0)
            if fault == "treats the first step of a call apart" and t == 0:
                now = 2 * now
            if fault == "decodes otherwise" and steps == 1:
                now = 0.9 * now
            if lengths is not None:
                ends = lengths + (fault == "is off by one in lengths")
                ends = jnp.maximum(ends, 1) if fault == "takes length 0 for 1" else ends
                alive = (t < ends)[:, None]
                if fault == "multiplies padding by zero":
                    now = now * alive
                elif fault != "selects after the step alone":
                    now = jnp.where(alive, now, 0)
            if mask is not None and fault != "lets masked steps into gradients":
                now = jnp.where(mask[t][:, None], now, 0)
            new = step(
                params, h, now, wrong_tanh if fault == "has a wrong derivative" else jnp.tanh
            )
            old = h
            if fault == "grows":
                new = new + 30 * h
            if lengths is not None and fault != "lets padding into the state":
                new = jnp.where(alive, new, jnp.zeros_like(h) if fault == "ends in zeros" else h)
            h = new
            if resets is not None and fault == "resets after the step":
                h = jnp.where(flags, jnp.zeros_like(h), h)
            if mask is not None:
                rows = mask[t][:, None]
                h = h if fault == "advances at masked steps" else jnp.where(rows, h, old)
                new = new if fault == "gives outputs of masked steps" else jnp.where(rows, new, 0)
            ys.append(2 * new if fault == "returns the output as the state" else new)
        y = jnp.stack(ys)
        if fault == "draws noise":
            y = y + 1e-3 * next(calls)
        if fault == "compiles to something else" and isinstance(x, jax.core.Tracer):
            y = y * 1.01
        if fault == "computes in float32":
            y, h = y.astype(jnp.float32), h.astype(jnp.float32)
        if fault == "hands on the state before the last step":
            h = before
        if fault == "returns the output as the state":
            h = ys[-1]
        return y, h

    return layer


FAULTS = {
    "looks ahead": "causality",
    "centers over time": "causality",
    "centers over the batch": "batch",
    "mixes neighbors": "batch",
    "forgets the first state": "initial state",
    "stops the gradient of the first state": "initial state",
    "treats the first step of a call apart": "chunks",
    "hands on the state before the last step": "chunks",
    "returns the output as the state": "chunks",
    "decodes otherwise": "steps",
    "resets late": "resets",
    "resets early": "resets",
    "does not reset the first step": "resets",
    "does not reset the last step": "resets",
    "resets the whole batch": "resets",
    "resets after the step": "resets",
    "lets padding into the state": "lengths",
    "is off by one in lengths": "lengths",
    "ends in zeros": "lengths",
    "multiplies padding by zero": "padding",
    "selects after the step alone": "padding",
    "takes length 0 for 1": "zero length",
    "advances at masked steps": "mask",
    "gives outputs of masked steps": "mask",
    "lets masked steps into gradients": "mask",
    "has a wrong derivative": "gradients",
    "computes in float32": "dtype",
    "draws noise": "determinism",
    "compiles to something else": "jit",
    "grows": "long",
}


def two_directions(fault=""):
    def layer(params, x, state, *, lengths=None):
        ends = (
            jnp.full(x.shape[1], len(x))
            if lengths is None or fault == "turns padding around"
            else lengths
        )
        order = jnp.where(
            jnp.arange(len(x))[:, None] < ends,
            ends - 1 - jnp.arange(len(x))[:, None],
            jnp.arange(len(x))[:, None],
        )
        turned = jnp.take_along_axis(x, order[..., None], 0)
        run = one_direction()
        ahead, h = run(params[0], x, None, lengths=lengths)
        back, g = run(params[1], turned, None, lengths=lengths)
        if fault == "reads one direction":
            back, g = run(params[1], x, None, lengths=lengths)
        if fault != "does not turn the outputs back":
            back = jnp.take_along_axis(back, order[..., None], 0)
        return jnp.concatenate([ahead, back], -1), (h, g)

    return layer


FAULTS_OF_TWO = {
    "turns padding around": "lengths",
    "reads one direction": "directions",
    "does not turn the outputs back": "directions",
}


@pytest.mark.exhaustive
def test_a_correct_layer_has_every_property():
    report = check_layer(one_direction(), X, STATE, params=PARAMS)
    assert not report.findings, report
    assert set(report.holds) == set(PROPERTIES) - {"directions"}
    assert report.skipped == {"directions": "the layer has one direction"}


@pytest.mark.exhaustive(
    "looks ahead",
    "centers over time",
    "centers over the batch",
    "stops the gradient of the first state",
    "multiplies padding by zero",
    "compiles to something else",
    "grows",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    report = check_layer(one_direction(fault), X, STATE, params=PARAMS, only=[FAULTS[fault]])
    (finding,) = report.findings
    assert finding.property == FAULTS[fault] and finding.rule == PROPERTIES[finding.property].rule
    assert not finding.counterexample.startswith("raises"), finding
    assert fault == "grows" or finding.steps * finding.batch < T * N  # smaller than what was given


def test_there_are_twenty_eight_planted_faults():
    assert len(FAULTS) + len(FAULTS_OF_TWO) >= 28


def both(fault=""):
    other = jax.tree.map(lambda v: -v, PARAMS)
    return {
        "layer": two_directions(fault),
        "params": (PARAMS, other),
        "bidirectional": True,
        "swap": lambda p: p[::-1],
    }


def test_what_rests_on_a_failed_property_is_left_out():
    for fault, resting in (
        ("looks ahead", ["steps", "lengths", "padding", "mask", "resets"]),
        ("forgets the first state", ["chunks"]),
        ("ends in zeros", ["padding"]),
        ("draws noise", ["batch", "chunks"]),
        ("computes in float32", []),
    ):
        failing = FAULTS[fault]
        report = check_layer(
            one_direction(fault), X, STATE, params=PARAMS, only=[*resting, failing]
        )  # in any order
        assert [f.property for f in report.findings] == [failing]
        assert report.skipped == dict.fromkeys(resting, f"{failing} does not hold")
    report = check_layer(
        one_direction("computes in float32"), X, STATE, params=PARAMS, only=["gradients"]
    )
    assert "y is float32 for float64 inputs" in report.skipped["gradients"]


@pytest.mark.parametrize("reset_to", ["zeros", "initial"])
def test_each_fault_of_resets_has_a_message_of_its_own(reset_to):
    """Most of them have the same smallest counterexample: one step of one sequence."""
    faults = [fault for fault in FAULTS if FAULTS[fault] == "resets"]
    messages = {}
    for fault in ("", *faults):
        layer = one_direction(fault)
        report = check_layer(layer, X, STATE, params=PARAMS, only=["resets"], reset_to=reset_to)
        messages[fault] = report.findings[0].counterexample if report.findings else None
    assert (messages[""] is None) == (reset_to == "zeros")  # what the layer resets to
    assert len(set(messages.values())) == 1 + len(faults)
    late = "before step 0 acts before step 1; before step 1 acts before step 2; before step 2 is "
    if reset_to == "zeros":
        assert f"a reset {late}ignored" in messages["resets late"]
        assert f"a reset {late.removesuffix('is ')}acts after" in messages["resets after the step"]
    else:
        assert "and begins in the states 'zeros'" in messages[""]


@pytest.mark.exhaustive
def test_a_correct_layer_of_two_directions():
    report = check_layer(
        x=X, **both(), only=["directions", "lengths", "padding", "batch", "causality", "chunks"]
    )
    assert report.holds == ("directions", "lengths", "padding", "batch")
    assert report.skipped["causality"] == "a bidirectional layer reads the whole sequence"
    assert report.skipped["chunks"] == "no state was given"


@pytest.mark.sample("does not turn the outputs back")
@pytest.mark.parametrize("fault", FAULTS_OF_TWO)
def test_a_planted_fault_of_two_directions_is_found(fault):
    (finding,) = check_layer(x=X, **both(fault), only=[FAULTS_OF_TWO[fault]]).findings
    assert finding.property == FAULTS_OF_TWO[fault]


def test_the_counterexample_is_the_smallest():
    (finding,) = check_layer(
        one_direction("resets late"), X, STATE, params=PARAMS, only=["resets"]
    ).findings
    assert (finding.steps, finding.batch) == (1, 1)
    assert "with resets of sequence 0 before steps [0], for sequence 0, y[0, 0, 0] is " in str(
        finding
    )


def test_what_a_layer_raises_is_a_finding():
    def layer(params, x, state, *, lengths=None):
        if lengths is not None:
            raise ValueError("no lengths today\nsee below")
        return one_direction()(params, x, state)

    report = check_layer(layer, X, STATE, params=PARAMS, only=["lengths", "steps"])
    assert report.holds == ("steps",)
    assert report.findings[0].counterexample == "raises ValueError: no lengths today"
    assert "FAILS lengths: " in str(report)


def test_layers_of_libraries():
    """Of the libraries that the tests have; the table in docs/conformance.md has more."""
    few, turned = ["causality", "chunks", "jit"], X.swapaxes(0, 1)
    for layer, x in (
        (nnx.RNN(nnx.SimpleCell(D, H, rngs=nnx.Rngs(0))), turned),
        (nn.RNN(nn.SimpleCell(H)), turned),
        (jrnn.nn.RNN(D, H, batch_first=True, rngs=nnx.Rngs(0)), turned),
    ):
        report = check_layer(layer, x, only=few)
        assert report.holds == tuple(few), report
        assert recurrent_layer(layer, x).size == (T, N)


@pytest.mark.exhaustive
def test_directions_of_libraries_are_exchanged():
    """Of the weights of both directions; of a second layer also the halves that read the outputs of the first."""
    turned = X.swapaxes(0, 1)

    def rnn(seed):
        return nnx.RNN(nnx.SimpleCell(D, H, rngs=nnx.Rngs(seed)))

    for layer, x in (
        (nnx.Bidirectional(rnn(0), rnn(1)), turned),
        (nn.Bidirectional(nn.RNN(nn.SimpleCell(H)), nn.RNN(nn.SimpleCell(H))), turned),
        (jrnn.nn.RNN(D, H, num_layers=2, bidirectional=True, rngs=nnx.Rngs(0)), X),
    ):
        adapted = recurrent_layer(layer, x)
        assert adapted.swap is not None
        assert check_layer(adapted, only=["directions"]).holds == ("directions",)
        (finding,) = check_layer(adapted, only=["directions"], swap=lambda params: params).findings
        assert "with the directions' weights exchanged" in finding.counterexample
    both = nn.Bidirectional(nn.RNN(nn.SimpleCell(H)), nn.RNN(nn.GRUCell(H)))
    assert recurrent_layer(both, turned).swap is None
    summed = nnx.Bidirectional(rnn(0), rnn(1), merge_fn=jnp.add)
    assert recurrent_layer(summed, turned).swap is None


def test_time_may_be_the_second_axis():
    def layer(params, x, state):
        y, last = one_direction()(params, jnp.swapaxes(x, 0, 1), state)
        return jnp.swapaxes(y, 0, 1), last

    assert check_layer(
        layer, X.swapaxes(0, 1), STATE, params=PARAMS, time_axis=1, only=["chunks"]
    ).holds == ("chunks",)


def test_mistakes():
    with pytest.raises(
        LayerError, match=r"no property 'reset'; did you mean 'resets'\?; there are: causality, "
    ):
        check_layer(one_direction(), X, STATE, params=PARAMS, only=["reset"])
    with pytest.raises(LayerError, match="no property 'jitt'"):
        layer_tests(lambda: None, skip=["jitt"])
    with pytest.raises(LayerError, match=r"x is int64\[4\]; it must hold floating-point sequences"):
        check_layer(one_direction(), np.arange(4))
    with pytest.raises(
        LayerError,
        match=r"does not know layers of type builtins.str; write a function \(params, x, state\)",
    ):
        check_layer("lstm", X)


def right():
    return recurrent_layer(one_direction(), X, STATE, params=PARAMS)


test_one_test_for_each_property = layer_tests(
    right, skip=set(PROPERTIES) - {"causality", "directions", "jit"}
)


def test_a_test_of_a_property_fails(pytester):
    pytester.makepyfile(
        """
        import jax.numpy as jnp
        from jrnn.testing import layer_tests, recurrent_layer

        def total(params, x, state):
            return x - x.mean(0), state

        test_total = layer_tests(lambda: recurrent_layer(total, jnp.ones((3, 1, 1)).at[1].set(2), jnp.ones((1, 1))))
        """
    )
    result = pytester.runpytest_inprocess("-k", "causality or directions or determinism")
    result.assert_outcomes(failed=1, skipped=1, passed=1)
    result.stdout.fnmatch_lines(
        ["*causality: an output does not depend on later inputs; but for T=2, N=1*"]
    )


def test_a_record_may_be_given():
    record = Layer(lambda params, x, state, **_: (x + state[None], state), None, X, STATE)
    assert check_layer(record, only=["causality"]).holds == ("causality",)
