"""Strict settings for every test: rank promotion raises, and 64-bit types are asked for, never assumed."""

import importlib.util
import mmap
import os
from pathlib import Path

# Values matter here, and most of the time goes into compiling: LLVM's optimizations are left out, XLA's own are not, and
# kernels come from the emitter that compiles in half the time.
QUICK_COMPILATION = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
    "xla_cpu_use_fusion_emitters": "false",
}


def _known_flags(flags):
    """Those of the flags that this jaxlib has: XLA aborts at one that it does not know."""
    found = set()
    for library in Path(importlib.util.find_spec("jaxlib").origin).parent.glob("*.so"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found |= {flag for flag in flags if content.find(flag.encode()) >= 0}
    return found


_flags = [f"--{flag}={QUICK_COMPILATION[flag]}" for flag in sorted(_known_flags(QUICK_COMPILATION))]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_flags])

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="every case of the large grids, not a sample")


def pytest_collection_modifyitems(config, items):
    """Of tests marked `grid(every=K)`, keeps every K-th case."""
    if config.getoption("--exhaustive"):
        return
    counts, dropped, kept = {}, [], []
    for item in items:
        mark = item.get_closest_marker("grid")
        if mark is None:
            kept.append(item)
            continue
        count = counts[item.function] = counts.get(item.function, -1) + 1
        (dropped if count % mark.kwargs["every"] else kept).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


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
