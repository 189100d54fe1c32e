"""XLA's flags for programs that run once: values matter in tests, and most of the time goes into compiling.

XLA aborts the process at a flag that it does not know, so each jaxlib is asked once, in a process of its own. The answer is
kept in the folder `.cache` of the clone, where that can be written.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

# LLVM's optimizations are left out, XLA's own are not; kernels come from the emitter that compiles in half the time.
WANTED = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_llvm_disable_expensive_passes=true",
)
CACHE = Path(__file__).parents[1] / ".cache" / "xla_flags.json"
PROGRAM = "import jax; jax.jit(lambda x: x + 1)(1.0).block_until_ready()"


def flags(cache=CACHE):
    """Those of the flags that this jaxlib compiles with."""
    name = " ".join([version("jaxlib"), *WANTED])
    known = _read(cache)
    if name not in known:
        known[name] = list(WANTED) if accepts(WANTED) else [flag for flag in WANTED if accepts([flag])]
        if known[name]:  # none at all may mean that no program ran
            _write(cache, known)
    return known[name]


def accepts(chosen):
    """Whether this jaxlib compiles a program with these flags."""
    environment = {**os.environ, "XLA_FLAGS": " ".join(chosen), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True).returncode == 0


def _read(cache):
    try:
        found = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(cache, known):
    with suppress(OSError):  # where the clone cannot be written, the next process asks again
        cache.parent.mkdir(exist_ok=True)
        aside = cache.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(known, indent=1))
        aside.replace(cache)
