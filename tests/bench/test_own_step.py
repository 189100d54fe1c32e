"""`bench_step` and `jrnn bench FILE:STEP` on tiny steps; no figure is judged."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jrnn
from jrnn.bench import own_step
from jrnn.bench.suites import SuiteOptions
from jrnn.cli import main
from jrnn.errors import ConfigError, UsageError

FILE = """
import jax.numpy as jnp

def average(carry, x):
    return 0.5 * carry + x, carry

def weighted(w, carry, x):
    return w * carry + x, carry

def make():
    w = jnp.full((3, 3), 0.1)
    return lambda h, x: (jnp.tanh(h @ w + x), h), jnp.zeros((2, 3)), jnp.ones((5, 2, 3))

def counted():
    return lambda c, x: (c + 1, c), 0, None, 4

def number():
    return 3

def fails():
    return 1 / 0

def no_pair(carry, x):
    return carry

THREE = 3
"""


@pytest.fixture
def cells(tmp_path):
    (tmp_path / "cells.py").write_text(FILE)
    return str(tmp_path / "cells.py")


def quiet(**options):
    return SuiteOptions(turns=1, console=Console(file=io.StringIO(), width=200), **options)


def test_an_affine_step_by_all_executors():
    results = jrnn.bench_step(
        lambda c, x: (0.5 * c + x, c), jnp.zeros(4), jnp.ones((6, 4)), turns=1
    )
    assert [r.mode for r in results.records] == sorted(r.mode for r in results.records)
    assert {"lax.scan", "auto", "scan", "associative"} <= {r.peer for r in results.records}
    assert all(
        0 < r.least <= r.median and r.compile_seconds > 0 and r.difference < 1e-5
        for r in results.records
    )
    assert "newton" in {name for _, name in results.missing}
    text = str(results)
    assert text.count("not newton") == 1 and results.of("train", "newton") is None
    assert results.of("train", "associative").ran == "associative, associative"


def test_what_the_step_closes_over_is_an_argument_and_has_a_gradient():
    w = jnp.full((3, 3), 0.1)
    own = own_step.OwnStep(
        "step", lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros((1, 3)), jnp.ones((4, 1, 3))
    )
    fn, args = own_step._program(own, "auto", "train")
    assert [v.shape for v in args[0]] == [(3, 3), (1, 3), (4, 1, 3)]
    _, gradients = jax.jit(fn)(*args)

    def loss(w):
        return jnp.sum(
            jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros((1, 3)), args[0][2])[0]
            ** 2
        )

    np.testing.assert_allclose(gradients[0], jax.grad(loss)(w), rtol=1e-5)


def test_an_executor_that_asks_for_a_strategy_is_measured():
    options = {"executors": ["chunks"], "modes": ["forward"], "turns": 1}
    results = jrnn.bench_step(
        lambda c, x: (jnp.tanh(c + x), c), jnp.zeros(2), jnp.ones((4, 2)), **options
    )
    assert [r.peer for r in results.records] == ["lax.scan", "chunks"]


def test_a_chosen_executor_is_measured_next_to_jax():
    keys = jax.random.split(jax.random.key(0), 3)
    results = jrnn.bench_step(
        lambda c, key: (c + jax.random.bits(key), None),
        jnp.uint32(0),
        keys,
        executors=["scan"],
        modes=["forward"],
        turns=1,
    )
    assert [r.peer for r in results.records] == ["lax.scan", "scan"] and not results.missing
    with pytest.raises(ConfigError, match="no executor 'natve'.*did you mean 'native'"):
        jrnn.bench_step(lambda c, x: (c, x), 0.0, jnp.ones(3), executors=["natve"])
    with pytest.raises(TypeError, match="pair"):
        jrnn.bench_step(lambda c, x: c, 0.0, jnp.ones(3))


def test_a_factory_a_step_with_feeds_and_files(cells, tmp_path):
    options = quiet(
        peers=["auto"], modes=["forward"], json=tmp_path / "a.json", plot=tmp_path / "a.svg"
    )
    results = own_step.run(f"{cells}:make", {}, options)
    assert [r.size for r in results.records] == ["T = 5", "T = 5"] and (
        tmp_path / "a.svg"
    ).stat().st_size > 1000
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["conditions"]["step"] == f"{cells}:make" and {"ran", "least", "difference"} <= set(
        data["records"][0]
    )
    results = own_step.run(f"{cells}:counted", {}, quiet(peers=["auto"]))
    assert [(r.mode, r.size) for r in results.records] == [
        (m, "T = 4") for m in ("forward", "train") for _ in range(2)
    ]
    feeds = dict(w=np.float32(0.5), carry=np.zeros(2, np.float32), x=np.ones((3, 2), np.float32))
    assert (
        own_step.run(f"{cells}:weighted", feeds, quiet(peers=["auto"], modes=["train"]))
        .records[0]
        .size
        == "T = 3"
    )


def test_mistakes(cells):
    for name, feeds, options, message in (
        ("averge", {}, {}, "no step 'averge'; did you mean 'average'"),
        ("average", {}, {}, "has the arguments carry, x. Give their arrays .--feed carry=normal"),
        (
            "number",
            {},
            {},
            r"must return \(step, init, xs\) or .*, but returned an object of type int",
        ),
        ("fails", {}, {}, "raised ZeroDivisionError: division by zero"),
        ("make", {"x": 1.0}, {}, "has no arguments, so --feed x means nothing"),
        (
            "no_pair",
            {"carry": np.zeros(2), "x": np.ones((3, 2))},
            {},
            "jax.lax.scan cannot run .* must be a pair",
        ),
        ("THREE", {}, {}, "must be a function, but is a int"),
        ("make", {}, {"sizes": ["3x2x3x4"]}, "--sizes means nothing for a step of your own"),
    ):
        with pytest.raises(UsageError, match=message):
            own_step.run(f"{cells}:{name}", feeds, quiet(**options))


def test_the_command(cells, capsys):
    few = ["--modes", "forward", "--peers", "auto", "--turns", "1"]
    assert (
        main(
            [
                "bench",
                f"{cells}:average",
                "--feed",
                "carry=normal[2]",
                "--feed",
                "x=normal[4,2]",
                *few,
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "lax.scan" in out and "T = 4" in out
    assert main(["bench", f"{cells}:make", "--compile-for", "h100"]) == 2
    assert "--compile-for means nothing for a step of your own" in capsys.readouterr().err
    assert main(["bench", "--feed", "x=normal[2]"]) == 2
    assert "name it, as in jrnn bench cells.py:step" in capsys.readouterr().err
