"""Every layer inside of `jax.shard_map` with its default `check_vma=True`: a first state varies as the input does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import layers_over_devices
import pytest

import jrnn

QUICK = ("GatedDeltaNet", "LSTM", "gru", "Recurrent")  # whose values are compared in every run
STACKS = (
    "rnn",
    "lstm",
    "gru",
)  # XLA of jaxlib 0.11 crashes compiling them over devices: docs/notes/xla_faults.md
CRASHES = STACKS if (0, 11) <= jax.__version_info__ < (0, 12) else ()


@pytest.mark.parametrize("name", layers_over_devices.CASES)
def test_types_agree(name):
    """Values and gradients are traced, and so the types of all carries are checked."""
    fn, args = layers_over_devices.gradients(name, layers_over_devices.mesh_of(1))
    value, gradients = jax.eval_shape(fn, *args)
    assert value.shape == () and jax.tree.map(jax.numpy.shape, args) == jax.tree.map(
        lambda g: g.shape, gradients
    )


@pytest.fixture(scope="module")
def errors(request):
    folder = Path(__file__).parent
    everything = request.config.getoption("--exhaustive")
    names = [
        name for name in (layers_over_devices.CASES if everything else QUICK) if name not in CRASHES
    ]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    path = os.pathsep.join([str(folder), str(folder.parent), str(Path(jrnn.__file__).parents[1])])
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, str(folder / "layers_over_devices.py"), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.sample(*QUICK)
@pytest.mark.parametrize("name", layers_over_devices.CASES)
def test_values_and_gradients_on_four_devices_are_those_of_one(errors, name):
    if name in CRASHES:
        pytest.skip("XLA crashes")
    assert errors[name] < 1e-5
