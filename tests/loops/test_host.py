"""A CPU as several devices gives the same results, unless it is too late or XLA_FLAGS set them. Freed memory is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pages import blocks_of

from jrnn.loops import host

DIVIDE = """
import json, sys, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jrnn import scan
from jrnn.loops import host

divided = host.divide_cpu(2)
weights = jnp.asarray(np.random.RandomState(0).randn(2, 3, 3), jnp.float32)
x = np.random.RandomState(1).randn(5, 4, 3).astype(np.float32)

def loss(weights, x, h):
    def step(h, x):
        return (h := jnp.tanh(x @ weights[0] + h @ weights[1])), h
    return jnp.sum(scan(step, h, x)[1] ** 2)

gradient, found = jax.jit(jax.grad(loss)), []
for count in (1, jax.device_count()):
    mesh = Mesh(jax.devices()[:count], ("batch",))
    put = lambda value, *spec: jax.device_put(value, NamedSharding(mesh, P(*spec)))
    found.append(np.asarray(gradient(put(weights), put(x, None, "batch"), put(np.zeros((4, 3), np.float32), "batch"))))
np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)
print(json.dumps([divided, jax.device_count(), host.divide_cpu(3), jax.device_count()]))
"""
TELL = """
import json
shards = lambda v: [s.data.shape for s in v.addressable_shards]
print(json.dumps([shards(x), shards(gradients["weight_hh_l1"])]))
"""
HEAP = """
import sys, numpy as np
if sys.argv[1:]:
    import runpy
    assert runpy.run_path(sys.argv[1])["retain_memory"]()

def size():
    found = [line.split()[0].split("-") for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]")]
    return sum(int(last, 16) - int(first, 16) for first, last in found)

array = np.ones(10_000_000)
allocated = size()
del array
print(allocated > 80_000_000, size() > 80_000_000)
"""


def run(program, devices=""):
    flags = f"--{host._FLAG}={devices}" if devices else ""
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "devices, expected", [("", [True, 2, False, 2]), ("4", [False, 4, False, 4])]
)
def test_dividing(devices, expected):
    assert run(DIVIDE, devices) == expected


@pytest.mark.exhaustive
def test_the_example_of_the_documentation():
    """Its data lies in two parts, and its gradients on each device whole."""
    page = Path(__file__).parents[2] / "docs" / "scaling.md"
    (example,) = [
        block
        for language, block in blocks_of(page.read_text(encoding="utf-8"))
        if language == "python"
    ]
    assert run(example + TELL) == [[[100, 8, 32]] * 2, [[256, 64]] * 2]


@pytest.mark.skipif(sys.platform != "linux", reason="it is about glibc")
def test_memory_is_kept():
    """A large array lies in the heap, which stays as large when the array is freed."""

    def found(*args):
        return subprocess.check_output([sys.executable, "-c", HEAP, *args], text=True).split()

    assert found(host.__file__) == ["True", "True"]
    assert found() == ["False", "False"]
