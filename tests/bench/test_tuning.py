"""`tune` with measurements of the test's own: what is measured, what wins, what is written, and what later programs take."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn.bench import loop_ways, tuning
from jrnn.bench.loop_ways import gains
from jrnn.errors import ScanError
from jrnn.loops.costs import tuned
from jrnn.loops.costs.tuned import Questions, Table

W = jnp.full((4, 4), 0.1)
XS = jnp.linspace(-1, 1, 240).reshape(30, 2, 4)


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """No table of another test, and none of the environment."""
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    yield
    tuned.use(None)


def loss(w, xs):
    def step(h, x):
        h = jnp.tanh(x @ w + h @ w)
        return h, h

    return jnp.sum(jrnn.scan(step, jnp.zeros((2, 4)), xs)[1] ** 2)


def questions_of(fn, *args):
    asked = Questions()
    with tuned.collecting(asked):
        jax.jit(fn).lower(*args)
    return asked


def prefers(*names, whole=0.9, seconds=0.5):
    """A measurement in which programs of these names take less time than others."""

    def measure(programs, turns, limit):
        for program in programs.values():
            jax.block_until_ready(program())
        times = {name: seconds if name in names else whole if name == "tuned" else 1.0 for name in programs}
        return {name: [time] * turns for name, time in times.items()}

    return measure


def tuned_by(measure, fn, *args, path, seconds=1e6):
    return jrnn.tune(fn, path=path, seconds=seconds, measure=measure)(*args)


def notes_of(fn, *args):
    return [note for plan in jrnn.explain(fn, *args).loops for note in plan.notes if "measurement" in note]


def test_the_fastest_way_is_kept_and_taken_by_later_programs(tmp_path, monkeypatch):
    path = tmp_path / "plans.json"
    (question,) = questions_of(loss, W, XS)
    way = next(name for name in question.ways[1:] if name != "lax.scan")
    result = tuned_by(prefers(way), loss, W, XS, path=path)
    assert [loop.taken for loop in result.loops] == [way] and result.ratio == 0.9 and result.path == path
    text = str(result)
    assert f"0.50 of its time by: {way}" in text and "the whole program takes 0.90 of its time before" in text
    ((key, entry),) = json.loads(path.read_text())["plans"].items()
    assert (key, entry["take"], entry["ratio"]) == (question.key, way, 0.5)

    assert notes_of(loss, W, XS) == [f"chosen by measurement: {way}"], "this process uses it"
    tuned.use(None)
    assert notes_of(loss, W, XS) == []
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    tuned._of_environment.cache_clear()
    assert notes_of(loss, W, XS) == [f"chosen by measurement: {way}"]
    assert notes_of(loss, W, XS[:7]) == [], "an entry holds for its shapes"

    again = tuned_by(prefers(), loss, W, XS, path=path)
    assert again.path is None and json.loads(path.read_text())["plans"] == {}, "what gains no longer is removed"


PROGRAM = """
import jax, jax.numpy as jnp, jrnn
def loss(w, xs):
    def step(h, x):
        h = jnp.tanh(x @ w + h @ w)
        return h, h
    return jnp.sum(jrnn.scan(step, jnp.zeros((2, 4)), xs)[1] ** 2)
found = jrnn.explain(jax.grad(loss), jnp.ones((4, 4)), jnp.ones((30, 2, 4)))
print([note for plan in found.loops for note in plan.notes if "measurement" in note])
"""


@pytest.mark.exhaustive
def test_two_processes_take_the_same_plans(tmp_path):
    path = tmp_path / "plans.json"
    entries = {q.key: {"take": q.ways[-1]} for q in questions_of(jax.grad(loss), W, XS)}
    assert len(entries) == 2
    tuned.write(path, entries)
    environment = {**os.environ, "PYTHONPATH": str(Path(jrnn.__file__).parents[1]), tuned.VARIABLE: str(path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, "PYTHONHASHSEED": "7"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([f"chosen by measurement: {entry['take']}" for entry in entries.values()])


def test_every_way_gives_the_results_of_the_plain_loop():
    step = lambda h, x: (0.9 * h + jax.nn.sigmoid(x) @ W, h * x)  # noqa: E731
    run = lambda xs: jrnn.scan(step, jnp.zeros((2, 4)), xs)  # noqa: E731
    (question,) = questions_of(run, XS)
    names = [*question.ways, tuned.unrolled("lax.scan", 4), tuned.unrolled(question.ways[-1], 2)]
    assert "coefficients before the loop" in names or len(names) > 3
    expected = jax.lax.scan(step, jnp.zeros((2, 4)), XS)
    for name in names:
        with tuned.using(Table.of({question.key: name})):
            actual = jax.jit(run)(XS)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


def test_gradients_over_matrix_states_have_lengths_of_chunks(tmp_path):
    def run(S, ks):
        return jnp.sum(jrnn.scan(lambda S, k: (0.9 * S + jnp.outer(k, k), k @ S), S, ks)[1] ** 2)

    args = jnp.zeros((64, 64)), jnp.ones((512, 64)) / 8
    gradient = jax.grad(run, argnums=(0, 1))
    question = questions_of(gradient, *args)[0]
    assert question.moves and {"step by step", "in chunks of 16", "in chunks of 64"} <= set(question.ways)
    for name, in_chunks in (("step by step", False), ("in chunks of 64", True)):
        with tuned.using(Table.of({question.key: name})):
            plans = jrnn.explain(gradient, *args).loops
        assert any(plan.executor == "chunks" for plan in plans) is in_chunks
    assert "matrix states" in question.title


def test_what_wins_must_win_by_more_than_the_noise_and_again():
    assert gains({"a": [1.0] * 4, "b": [0.99] * 4}, "a") == {}
    assert gains({"a": [1.0, 1.3, 1.0, 1.3], "b": [0.8] * 4}, "a") == {}, "the turns of `a` differ by more"
    assert gains({"a": [1.0] * 4, "b": [0.8] * 4, "c": [0.7] * 4}, "a") == {"b": 0.8, "c": 0.7}
    (question,) = questions_of(loss, W, XS)
    default = question.ways[0]
    other = next(name for name in question.ways if name != default)
    calls = []

    def lucky(programs, turns, seconds):
        calls.append(tuple(programs))
        fast = other if len(calls) < 3 else default
        return {name: [0.5 if name == fast else 1.0] * turns for name in programs}

    loop = loop_ways.WayTimer(question, {}, 1e6, lucky, lambda: 0.0).best()
    assert loop.taken == loop.before == default and loop.ratio == 1.0 and len(calls) == 3
    assert set(calls[2]) == {default, "lax.scan", other}


def test_a_program_that_is_slower_as_a_whole_keeps_nothing(tmp_path):
    path = tmp_path / "plans.json"
    (question,) = questions_of(loss, W, XS)
    result = tuned_by(prefers(*question.ways[1:], whole=1.02), loss, W, XS, path=path)
    assert result.path is None and result.ratio == 1.02 and not path.exists()
    assert "nothing was gained" in str(result) and not tuned.current().taken
    shapes = jax.ShapeDtypeStruct(XS.shape, XS.dtype)
    result = tuned_by(prefers(*question.ways[1:]), jax.jit(loss), W, shapes, path=path)
    assert np.isnan(result.ratio) and result.path == path, "of shapes alone, the loops are measured"


@pytest.mark.exhaustive
def test_arguments_that_a_program_consumes_are_copied(tmp_path):
    def update(w, xs):
        return w - 0.1 * jax.grad(loss)(w, xs)

    w = jnp.array(W)
    reverse = questions_of(update, w, XS)[1]
    result = tuned_by(prefers(*reverse.ways[1:]), jax.jit(update, donate_argnums=0), w, XS, path=tmp_path / "p.json")
    assert result.ratio == 0.9 and not w.is_deleted()


def test_what_cannot_be_measured_stays_as_it_is(tmp_path):
    def inner(xs):
        step = lambda h, x: (jax.lax.while_loop(lambda h: jnp.sum(h) > 9, lambda h: h / 2, h + x), None)  # noqa: E731
        return jrnn.scan(step, jnp.zeros((2, 4)), xs)[0]

    path = tmp_path / "plans.json"
    result = tuned_by(prefers("lax.scan"), inner, XS, path=path)
    assert "not measured: a while loop is in its step" in str(result) and not path.exists()
    late = tuned_by(prefers("lax.scan"), loss, W, XS, path=path, seconds=1e-9)
    assert "not measured: the time is over" in str(late)
    assert "nothing to tune" in str(tuned_by(prefers(), jnp.sin, 1.0, path=path))
    (question,) = questions_of(loss, W, XS)
    broken = loop_ways.WayTimer(question, {}, 1e6, prefers(), lambda: 0.0)
    broken.program = lambda: lambda *args: 1 / 0
    assert "cannot be compiled alone" in str(broken.best())


def test_ways_that_differ_or_need_too_much_memory_are_left_out(monkeypatch):
    (question,) = questions_of(loss, W, XS)
    measured = loop_ways.WayTimer(question, {}, 1e6, prefers(), lambda: 0.0)
    for name in question.ways:
        measured.compile(name)
    assert set(measured.programs) == set(question.ways)
    measured = loop_ways.WayTimer(question, {}, 1e6, prefers(), lambda: 0.0)
    measured.compile("lax.scan")
    monkeypatch.setattr(loop_ways, "difference", lambda ours, theirs: 0.1)
    other = next(name for name in question.ways[1:] if name != "lax.scan")
    measured.compile(other)
    monkeypatch.setattr(loop_ways, "difference", lambda ours, theirs: 0.0)
    monkeypatch.setattr(loop_ways.costs, "bound", lambda memory, reference, ratio: -1.0)
    measured.sizes = {"lax.scan": 0, question.ways[0]: -1}
    measured.compile(other)
    assert set(measured.programs) == {"lax.scan"}


def test_mistakes(tmp_path):
    with pytest.raises(TypeError, match="must be a function, but is 3"):
        jrnn.tune(3)
    with pytest.raises(ScanError, match="seconds must be positive, but is -1"):
        jrnn.tune(loss, seconds=-1)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ScanError, match=r"a\.json: lacks 'format'; jrnn.tune writes a file of plans"):
        jrnn.tune(loss, path=tmp_path / "a.json")(W, XS)
    with pytest.raises(ScanError, match="is a folder, not a file"):
        tuned.read(tmp_path)


def test_a_file_that_cannot_be_used_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "none.json"))
    with pytest.warns(UserWarning, match="none.json: no such file; .*; loops are planned without it"):
        jax.jit(loss).lower(W, XS)
    jax.jit(loss).lower(W, XS[:9])  # once


def test_the_clock_measures_in_turns():
    order = []
    took = loop_ways.by_clock({name: lambda name=name: order.append(name) for name in "ab"}, 4, 1e6)
    assert {name: len(times) for name, times in took.items()} == {"a": 4, "b": 4}
    assert all(time >= 0 for times in took.values() for time in times) and set(order) == {"a", "b"}
    assert len(loop_ways.by_clock({"a": lambda: None}, 9, 0.0)["a"]) == 3, "at least"


def test_drawn_numbers():
    avals = [
        jax.typeof(v)
        for v in (jnp.ones(3), jnp.ones(2, int), jnp.ones(2, bool), jax.random.key(0), jnp.ones(2, complex))
    ]
    values = loop_ways.drawn(avals, 0.5)
    assert [jax.typeof(v).str_short() for v in values] == [a.str_short() for a in avals]
    assert tuning.FILE.endswith(".json")
