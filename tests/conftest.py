"""Strict settings for every test: rank promotion raises, and 64-bit types are asked for, never assumed."""

import gc
import os
from pathlib import Path

import quick_compilation

if (
    "PYTEST_XDIST_WORKER" not in os.environ
):  # the workers of pytest-xdist, and programs that tests start, inherit these
    os.environ["XLA_FLAGS"] = " ".join(
        [os.environ.get("XLA_FLAGS", ""), *quick_compilation.flags()]
    )
    os.environ.update(quick_compilation.kept())

import eager_by_numpy
import jax
import pytest
import quick_runs
from hypothesis import HealthCheck, settings

jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run, however slow the machine is.
settings.register_profile(
    "same",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same")

# They hold no tests. As modules of doctests, those of several folders on one command line would have the same name.
collect_ignore_glob = ["conftest.py", "*/conftest.py"]


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="every test and every case, not those of a quick run",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """All tests of a file run in one process, so that what they share is traced and compiled once.

    Files begin in their order, in which the longest are first; by default those with few tests would begin last.
    """
    from xdist.scheduler import LoadFileScheduling  # optional: pytest runs without pytest-xdist too

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_configure(config):
    """Lets numpy compute what tests compute outside of `jax.jit`, but in an exhaustive run."""
    if not config.getoption("--exhaustive"):
        eager_by_numpy.install()


def pytest_collection_modifyitems(config, items):
    """Leaves out what only an exhaustive run checks, unless it is asked for: by --exhaustive, or by the name of a test."""
    if config.getoption("--exhaustive") or any("::" in arg for arg in config.args):
        return
    dropped = quick_runs.left_out(items)
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]


# Tracing makes many objects, and little garbage: search for it less often than Python does by default.
gc.set_threshold(100_000, 20, 100)


@pytest.fixture(scope="module", autouse=True)
def _forget():
    """Frees what a file leaves, and the traces and compiled functions when they are gigabytes.

    What remains is not searched for garbage again.
    """
    yield
    if memory() > LIMIT:
        jax.clear_caches()
    gc.collect()
    gc.freeze()


LIMIT = 2 * 2**30  # bytes


def memory() -> float:
    """The bytes that this process holds; infinite where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return float("inf")


@pytest.fixture
def x64():
    """64-bit types for the length of one test, for proofs of gradients."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def little_optimization():
    """For modules whose programs run a few times, so that what optimizing them saves is less than what it costs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def little_compilation(pytestconfig):
    """For modules that test what is traced, and not what is made of it: numpy evaluates it where that suffices."""
    import by_numpy

    from jrnn.loops.wrappers import compiled_calls

    if not by_numpy.suffices(pytestconfig.getoption("--exhaustive")):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", by_numpy.jit)
        yield
    compiled_calls._compiled.clear()  # programs that are not compiled
