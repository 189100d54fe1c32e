"""A backend is one file: it is found, plans loops, and runs them."""

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_backend

import jrnn
from jrnn.loops import backends
from jrnn.loops.rules import lowering


@pytest.fixture
def toy(monkeypatch):
    """The toy backend in place of the CPU's."""
    monkeypatch.setitem(backends.BACKENDS, "cpu", toy_backend.BACKEND)
    lowering._planned.cache_clear()
    yield
    lowering._planned.cache_clear()


def sums(first, xs, reverse=False):
    return jrnn.scan(lambda c, x: ((s := c + x), s), first, xs, reverse=reverse)


def doubled(first, xs):
    return jrnn.scan(lambda c, x: (2 * c + x, c), first, xs)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_backend_of_one_file_runs_loops_and_their_gradients(toy, reverse):
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(7, 3)))
    first = jnp.ones(3)
    plan = jrnn.explain(functools.partial(sums, reverse=reverse), first, xs).loops[0]
    assert plan.executor == "cumsum" and "the loop is one cumulative sum" in str(plan)

    def loss(run, first, xs):
        last, ys = run(first, xs)
        return jnp.sum(jnp.sin(last)) + jnp.sum(jnp.cos(ys))

    ours = jax.jit(jax.value_and_grad(lambda *a: loss(lambda *b: sums(*b, reverse), *a), (0, 1)))(first, xs)
    step = lambda c, x: ((s := c + x), s)  # noqa: E731
    theirs = jax.value_and_grad(lambda *a: loss(lambda c, x: jax.lax.scan(step, c, x, reverse=reverse), *a), (0, 1))(
        first, xs
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, theirs)


def test_what_it_does_not_plan_is_the_loop_of_jax(toy):
    plan = jrnn.explain(doubled, jnp.ones(3), jnp.ones((4, 3))).loops[0]
    assert plan.executor == "lax.scan" and "it is no cumulative sum" in str(plan)


def test_a_file_in_the_folder_is_a_backend(tmp_path):
    package = Path(jrnn.__file__).parent
    shutil.copytree(package, tmp_path / "jrnn", ignore=shutil.ignore_patterns("__pycache__", "src"))
    shutil.copy(toy_backend.__file__, tmp_path / "jrnn/loops/backends/toy.py")
    program = "from jrnn.loops import backends; print(*backends.BACKENDS)"
    shown = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, text=True, capture_output=True, check=True)
    assert shown.stdout.split() == ["cpu", "cuda", "rocm", "toy", "tpu", "persistent"]


def test_a_toy_is_short():
    assert len(Path(toy_backend.__file__).read_text().splitlines()) < 80
