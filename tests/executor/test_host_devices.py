"""A CPU that counts as several devices: the same results, and no devices where it is too late or XLA_FLAGS know better."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from jrnn.executor import host_devices

DIVIDE = """
import json, sys, jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jrnn import scan
from jrnn.executor import host_devices

divided = host_devices.divide(2)
weights = jnp.asarray(np.random.RandomState(0).randn(2, 3, 3), jnp.float32)
x = np.random.RandomState(1).randn(5, 4, 3).astype(np.float32)

def loss(weights, x, h):
    def step(h, x):
        return (h := jnp.tanh(x @ weights[0] + h @ weights[1])), h
    return jnp.sum(scan(step, h, x)[1] ** 2)

gradient, found = jax.jit(jax.grad(loss)), []
for count in (1, jax.device_count()):
    mesh = jax.make_mesh((count,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:count])
    put = lambda value, *spec: jax.device_put(value, NamedSharding(mesh, P(*spec)))
    found.append(np.asarray(gradient(put(weights), put(x, None, "batch"), put(np.zeros((4, 3), np.float32), "batch"))))
np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)
print(json.dumps([divided, jax.device_count(), host_devices.divide(3), jax.device_count()]))
"""


@pytest.mark.parametrize("flags, expected", [("", [True, 2, False, 2]), ("4", [False, 4, False, 4])])
def test_dividing(flags, expected):
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--{host_devices._FLAG}={flags}" if flags else "",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run([sys.executable, "-c", DIVIDE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
