"""Steps of the literature are proved: by JAX, by the generated backward net, and by central differences; see literature.py.

And what a proof says where one of the three cannot be had, or where it means something else.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from literature import CELLS

import jrnn
from jrnn.testing import assert_gradients_agree
from jrnn.testing.gradients import INEXACT, Effort, check, over_time, subject_of_function

pytestmark = pytest.mark.usefixtures("little_optimization")

RNG = np.random.default_rng(0)
# one of each kind, for runs that are not exhaustive
SAMPLE = {
    "s_lstm",
    "ntm_head",
    "fast_weights",
    "dopri",
    "branches",
    "spiking",
    "lru",
    "phase_of_an_oscillator",
    "equilibrium",
}


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def report_of(step, carry, xs, params=None, **effort):
    with jax.enable_x64(True):
        return check(
            subject_of_function(over_time(step), (carry, xs), params),
            Effort(INEXACT, **{"max_elements": 4} | effort),
        )


def test_there_are_forty_cells():
    assert len(CELLS) >= 40 and set(CELLS) >= SAMPLE


@pytest.mark.sample("branches")
@pytest.mark.parametrize("name", sorted(SAMPLE))
def test_cell(name):
    prove(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(set(CELLS) - SAMPLE))
def test_cell_of_the_full_table(name):
    prove(name)


def prove(name):
    case = CELLS[name]
    report = report_of(case.step, case.carry, case.xs, case.weights)
    assert report.agrees, report
    assert all((b.net_error is not None) == case.net for b in report.blobs)
    assert any(np.any(b.values[0]) for b in report.blobs)  # not a proof of zeros


def test_a_where_is_chosen_not_multiplied():
    """A NaN of the branch that is not taken reaches neither the value nor the gradient, in the net as in JAX."""

    def step(h, x):
        h = jnp.where(x > -9, jnp.tanh(h + x), jnp.full_like(h, jnp.nan))
        return h, h

    report = report_of(step, normal(1, 2), normal(2, 1, 2))
    assert report.agrees and report.blobs[0].net_error < 1e-12, report
    net = jrnn.Net(
        "n", (jrnn.nets.Op.of("Where", ["c", "x", "y"], ["z"]),), ("c", "x", "y"), ("z",)
    )
    full, gradients = jrnn.add_gradients(net, {"z": "dz"})
    blobs = {
        "c": np.array([True, False]),
        "x": np.ones(2),
        "y": np.array([np.nan, 1.0]),
        "dz": np.array([np.inf, 2.0]),
    }
    outputs = jrnn.run_net(full, blobs)
    assert outputs[gradients["x"]].tolist() == [np.inf, 0] and outputs[gradients["y"]].tolist() == [
        0,
        2,
    ]


def test_writes_at_indices():
    def step(h, x):
        h = h.at[:, 0].set(x[:, 0])
        return jnp.tanh(h.at[jnp.arange(2), jnp.argmax(x, 1)].set(2 * x[:, 1])), h

    report = report_of(step, normal(2, 3), normal(2, 2, 3))
    assert report.agrees and report.blobs[0].net_error is not None, report


@pytest.mark.exhaustive
def test_definitions_at_zero():
    """Functions that Caffe2 lacks have their gradients where a state usually begins, too."""

    def step(h, x):
        return h + x, (
            jnp.arcsinh(h),
            jnp.arctan2(h, x),
            jnp.arctan2(x, h),
            jnp.expm1(h),
            jnp.log1p(h),
            jax.nn.mish(h),
        )

    assert_gradients_agree(
        step, np.zeros((1, 2), np.float32), np.full((2, 1, 2), 0.5, np.float32), max_elements=4
    )


@jax.custom_vjp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.defvjp(lambda v: (spike(v), v), lambda v, g: (g / (1 + jnp.abs(v)) ** 2,))


@jax.custom_jvp
def gate(v):
    return (v > 0).astype(v.dtype)


gate.defjvp(lambda p, t: (gate(*p), t[0] * jnp.exp(-(p[0] ** 2))))


@pytest.mark.exhaustive("vjp")
@pytest.mark.parametrize("rule", [spike, gate], ids=["vjp", "jvp"])
def test_a_surrogate_is_taken_on_request_alone(rule):
    def fires(v, x):
        z = rule(v)
        return 0.5 * v + x - z, z * v

    def wrong(v, x):
        (v, z) = fires(v, x)
        return twice(v), z

    arguments = normal(2, 3), normal(2, 2, 3)
    assert_gradients_agree(fires, *arguments, surrogates=[rule.__name__], max_elements=4)
    with pytest.raises(AssertionError, match=f"{rule.__name__} .*test_literature.py"):
        assert_gradients_agree(fires, *arguments, max_elements=4)
    with pytest.raises(
        AssertionError, match="twice .*test_literature.py"
    ):  # the rest of the step is still proved
        assert_gradients_agree(wrong, *arguments, surrogates=[rule.__name__], max_elements=4)
    with pytest.raises(
        jrnn.errors.GradientError, match="calls no function 'spyke' with a derivative rule"
    ):
        assert_gradients_agree(fires, *arguments, surrogates=["spyke"])


@jax.custom_vjp
def twice(x):
    return 2 * x


twice.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))


def test_a_fault_next_to_a_stopped_gradient_is_found():
    def step(h, x):
        h = jnp.tanh(h + x + jax.lax.stop_gradient(jnp.round(h) - h))
        return twice(h), h

    with pytest.raises(
        AssertionError,
        match=r"(?s)treat values under stop_gradient as constants \(test_literature.py.*twice",
    ):
        assert_gradients_agree(step, normal(2, 3), normal(2, 2, 3), max_elements=4)


@pytest.mark.exhaustive
def test_kinks_are_named():
    report = report_of(
        lambda h, x: (h + x, jnp.abs(h)), np.zeros((1, 2), np.float32), normal(2, 1, 2)
    )
    assert not report.agrees
    assert any(
        "abs has an argument 0.0e+00 away from its kink (test_literature.py:" in note
        for note in report.notes
    )
    assert "the net's gradient and central differences agree; JAX's does not" in str(report)


@pytest.mark.exhaustive
def test_why_there_is_no_net():
    """In one line, with the operation and the user's line; the report has no gradient of a net."""

    def solved(h, x):
        return jnp.linalg.solve(
            jnp.eye(2, dtype=x.dtype)[None] + h[:, :, None] * h[:, None, :], x[..., None]
        )[..., 0], h

    report = report_of(solved, normal(1, 2), normal(2, 1, 2))
    assert report.agrees and report.blobs[0].values[1] is None
    (note,) = report.notes
    assert note.startswith(
        "there is no net, so JAX's gradient and central differences were compared: "
    )
    assert "(test_literature.py:" in note and "\n" not in note
    assert report.verdict() == "JAX's gradient and central differences agree; there is no net"


def test_an_operator_without_gradient_is_named(monkeypatch):
    """A net that exists but has no backward pass is not silently forward only."""
    monkeypatch.delitem(jrnn.nets.registry._GRADIENTS, "Sin")
    report = report_of(lambda h, x: (jnp.sin(h + x), h), normal(1, 2), normal(2, 1, 2))
    assert (
        report.agrees
        and "sin (test_literature.py:" in report.notes[0]
        and "gradient of Sin" in report.notes[0]
    )


def test_complex_carries_and_keys():
    def step(key, z, x):
        z = z * jnp.exp(1j * x.astype(z.dtype)) + jax.random.normal(key, x.shape, x.dtype)
        return z, (z.real, z)

    first = (normal(1, 2) + 1j * normal(1, 2)).astype(np.complex64)
    report = report_of(step, first, normal(2, 1, 2), jax.random.key(0))
    assert report.agrees, report
    assert {b.name for b in report.blobs} == {"z/real", "z/imag", "x"}


def test_a_cell_may_read_its_own_new_state():
    """The output gate of a peephole LSTM depends on the new cell, so the step is no LSTMUnit."""
    case = CELLS["peephole_lstm"]
    package = jrnn.from_jax(case.step, case.carry, case.xs[0], params=case.weights)
    assert "LSTMUnit" not in {op.type for op in package.predict_net.ops}
