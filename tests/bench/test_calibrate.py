"""`jrnn bench --calibrate`: constants from injected times, and the file of constants. No test looks at the clock."""

from __future__ import annotations

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import jrnn
from jrnn.bench import calibrate
from jrnn.bench.calibrate import T
from jrnn.errors import ConfigError, DataError
from jrnn.loops import machines
from jrnn.loops.explain import plans_of
from jrnn.loops.machines import CPU, Machine

OTHER = Machine(
    products=50e9,
    tiny_products=5e9,
    call=0.9e-6,
    kernel=0.3e-6,
    trip=0.5e-6,
    elementwise_trip=0.02e-6,
    array=5e-9,
    element=0.05e-9,
    function=1e-9,
    cached=40e9,
    read=10e9,
    written=8e9,
    cache=8 << 20,
)


def predicted(machine: Machine, dispatch: float = 20e-6) -> dict[str, float]:
    """The time of each program on a machine with these constants."""
    m = machine
    product = m.kernel + m.call + 2 * 8 * 64 * 64 / m.products
    tiny = m.kernel + 2 * 16 * 16 / m.tiny_products
    steps = {
        "one product": m.trip + product,
        "two products": m.trip + 2 * product,
        "one tiny product": m.trip + tiny,
        "two tiny products": m.trip + 2 * tiny,
        "kernels": m.trip + product + 4 * (m.kernel + 2.5 * 8 * 64 * m.element),
        "operations": m.elementwise_trip + 64 * 4096 * m.element,
        "more operations": m.elementwise_trip + 128 * 4096 * m.element,
        "functions": 4 * 4096 * (m.function + m.element),
        "no stack": m.elementwise_trip,
        "stacks": m.elementwise_trip + 8 * m.array,
    }
    seconds = {name: dispatch + T * each for name, each in steps.items()}
    large = 4 * (32 << 20)
    seconds |= {"nothing": dispatch, "reading": large / m.read, "writing": large / m.written}
    for size in (1 << n for n in range(20, 27)):
        seconds[f"passes over {size} bytes"] = 20 * 2 * size / (m.cached if size <= m.cache else m.read)
    return seconds


def test_constants_explain_the_times_they_were_measured_from():
    found = calibrate.constants(predicted(OTHER), OTHER.products, CPU)
    for field in dataclasses.fields(Machine):
        assert getattr(found, field.name) == pytest.approx(getattr(OTHER, field.name), rel=1e-3), field.name


def test_noise_makes_no_constant_zero_or_negative():
    seconds = predicted(OTHER)
    seconds["two products"] = seconds["kernels"] = seconds["stacks"] = 0.0
    found = calibrate.constants(seconds, OTHER.products, CPU)
    assert all(getattr(found, f.name) > 0 for f in dataclasses.fields(Machine))


def test_a_run_prints_both_and_writes_a_file_that_is_read(tmp_path, monkeypatch):
    text, seconds = io.StringIO(), predicted(OTHER)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    calibrate.run(Console(file=text, width=120), None, lambda probe: seconds[probe.name], lambda: OTHER.products)
    path = tmp_path / "jrnn" / "costs.json"
    platform, machine = machines.read(path)
    assert platform == "cpu" and machine.call == pytest.approx(OTHER.call)
    assert f"{CPU.call:.3g}" in text.getvalue() and f"{OTHER.call:.3g}" in text.getvalue()
    assert "JRNN_COSTS" in text.getvalue()
    with pytest.raises(DataError, match="cannot be written"):
        console = Console(file=io.StringIO())
        calibrate.run(console, path / "below", lambda probe: seconds[probe.name], lambda: OTHER.products)


def test_every_program_computes():
    for probe in calibrate.probes():
        jax.eval_shape(probe.fn, *probe.args)
    assert {probe.name for probe in calibrate.probes()} == set(predicted(OTHER))


def test_the_file_is_read_where_it_is_asked_for(tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"platform": "cpu", "constants": {"trip": 1.0, "cache": 1e6}}))
    assert machines.of("cpu") is CPU
    monkeypatch.setenv("JRNN_COSTS", str(path))
    assert machines.of("cpu") == dataclasses.replace(CPU, trip=1.0, cache=10**6)
    assert machines.of("cuda") is machines.H100, "the file is for another platform"
    w = jnp.ones((4, 4))
    (plan,) = plans_of(lambda c, xs: jrnn.scan(lambda c, x: (jnp.tanh(c @ w + x), c), c, xs), w, jnp.ones((9, 4, 4)))
    assert plan.choice.chosen.estimate.seconds > 9, "trips of a second"


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", "not JSON"),
        ("[1]", 'expected {"platform"'),
        ('{"platform": "cpu", "constants": 3}', 'expected {"platform"'),
        ('{"platform": "abacus", "constants": {}}', "platform must be one of cpu, .* not 'abacus'"),
        ('{"platform": "cpu", "constants": {"tripp": 1}}', "there is no constant 'tripp'; did you mean 'trip'"),
        ('{"platform": "cpu", "constants": {"trip": 0}}', "constants.trip must be a positive number, not 0"),
        ('{"platform": "cpu", "constants": {"trip": "1"}}', "constants.trip must be a positive number, not '1'"),
        ('{"platform": "cpu", "constants": {"cache": NaN}}', "constants.cache must be a positive number, not nan"),
        ('{"platform": "cpu", "constants": {"call": true}}', "constants.call must be a positive number, not True"),
    ],
)
def test_a_bad_file_is_reported_by_name_key_and_rule(text, says, tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    path.write_text(text)
    monkeypatch.setenv("JRNN_COSTS", str(path))
    with pytest.raises(ConfigError, match=says) as caught:
        jax.jit(lambda xs: jrnn.scan(lambda c, x: (c + x, c), 0.0, xs)).lower(jnp.ones(3))
    assert str(path) in str(caught.value)


def test_a_missing_file_is_reported(monkeypatch):
    monkeypatch.setenv("JRNN_COSTS", "/nowhere/costs.json")
    with pytest.raises(ConfigError, match="JRNN_COSTS=/nowhere/costs.json: No such file"):
        machines.of("cpu")
