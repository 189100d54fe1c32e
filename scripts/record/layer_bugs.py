"""Checks releases of libraries that had a bug in a recurrent layer, and those that fixed it, and prints what is found.

Each release is installed from its package index into a folder of its own, next to what the environment has:

    python scripts/record/layer_bugs.py            # needs torch, keras's requirements and jrnn
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

MINGRU = """
import numpy as np, torch
from minGRU_pytorch import minGRU
from jrnn.testing import check_layer

torch.manual_seed(0)
layer = minGRU(2)

def call(params, x, state):
    with torch.no_grad():
        start = None if state is None else torch.tensor(np.asarray(state))[:, None]
        y, last = layer(torch.tensor(np.array(x)), start, return_next_prev_hidden=True)
    return y.numpy(), last[:, 0].numpy()

x = np.random.default_rng(0).standard_normal((2, 3, 2)).astype(np.float32)
state = np.full((2, 2), 0.5, np.float32)
print(check_layer(call, x, state, time_axis=1, in_jax=False, only=["chunks", "steps", "batch", "causality"]))
"""

KERAS = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import keras, numpy as np
from jrnn.testing import check_layer

x = np.random.default_rng(0).standard_normal((2, 3, 2)).astype(np.float32)
layer = keras.layers.RNN([keras.layers.LSTMCell(2), keras.layers.LSTMCell(2)], return_sequences=True, return_state=True)
print(check_layer(layer, x, only=["lengths", "padding", "chunks"]))
"""

# package, the release with the bug, the release without it, where it was reported, and the check
CASES = [
    ("minGRU-pytorch", "0.0.11", "0.0.12", "lucidrains/minGRU-pytorch#9", MINGRU),
    ("keras", "3.9.2", "3.10.0", "keras-team/keras#21224", KERAS),
]


def main() -> None:
    root = Path(__file__).parents[2]
    for package, bad, good, report, code in CASES:
        for version in (bad, good):
            with tempfile.TemporaryDirectory() as folder:
                install = [
                    sys.executable,
                    "-m",
                    "pip",
                    "install",
                    "-q",
                    "--no-deps",
                    "--target",
                    folder,
                    f"{package}=={version}",
                ]
                subprocess.run(install, check=True, stderr=subprocess.DEVNULL)
                path = os.pathsep.join([folder, str(root)])
                run = subprocess.run(
                    [sys.executable, "-c", code],
                    env={**os.environ, "PYTHONPATH": path},
                    capture_output=True,
                    text=True,
                )
                print(f"{package} {version} ({report}):\n{run.stdout or run.stderr[-2000:]}")


if __name__ == "__main__":
    main()
