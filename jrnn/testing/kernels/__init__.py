"""Kernels for recurrences, next to the step for one token that they compute: what `check_kernel` is made of.

In: a step and a kernel of JAX, NumPy, torch or ONNX. Out: properties that hold, and counterexamples. Read `kernel.py` first.

Then read `trial.py` (one call of the kernel), `oracle.py` (what the step gives), `properties.py` (which calls are tried).
"""

from jrnn.testing.kernels.adapters import sequence_kernel
from jrnn.testing.kernels.kernel import Kernel
from jrnn.testing.kernels.properties import KERNEL_PROPERTIES, example_trial
from jrnn.testing.kernels.shrinking import counterexample_of, smallest_trial
from jrnn.testing.kernels.trial import Trial

__all__ = [
    "KERNEL_PROPERTIES",
    "Kernel",
    "Trial",
    "counterexample_of",
    "example_trial",
    "sequence_kernel",
    "smallest_trial",
]
