"""Less time for compiling, which takes most of the time of tests: XLA's flags for programs that run once, and JAX's cache.

XLA aborts the process at a flag that it does not know, so each jaxlib is asked once, in a process of its own. The answer is
kept in the folder `.cache` of the clone, where that can be written. So is every compiled program: one that several tests
compile is compiled once, and a second run of the tests compiles only what has changed.
"""

import hashlib
import json
import os
import platform
import shutil
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
# The same for one program, where its process has the default flags: `jax.jit(..., compiler_options=OPTIONS)`.
OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
CACHE = Path(__file__).parents[1] / ".cache" / "xla_flags.json"
PROGRAMS = CACHE.parent / "compiled"
LIMIT = 2**30  # bytes of compiled programs; where there are more, all are deleted
# It fails if XLA's older kernels make NaN of what is rounded to -0, as those of jaxlib 0.10 do.
PROGRAM = """
import jax, jax.numpy as jnp
assert jax.jit(lambda x: x.astype(jnp.float8_e4m3fnuz))(jnp.full(4, -1e-7, jnp.float32)).astype(float).max() == 0
"""


def flags(cache=CACHE):
    """Those of the flags with which this jaxlib compiles the program rightly."""
    name = " ".join([version("jaxlib"), *WANTED, PROGRAM])
    known = _read(cache)
    if name not in known:
        known[name] = (
            list(WANTED) if accepts(WANTED) else [flag for flag in WANTED if accepts([flag])]
        )
        if known[name]:  # none at all may mean that no program ran
            _write(cache, known)
    return known[name]


def kept(folder=PROGRAMS):
    """Settings of JAX, as environment variables, by which it keeps compiled programs in a folder; none where it cannot."""
    own = folder / _machine()
    try:
        if sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) > LIMIT:
            shutil.rmtree(folder)
        own.mkdir(parents=True, exist_ok=True)
        (own / f".{os.getpid()}").touch()
        (own / f".{os.getpid()}").unlink()
    except OSError:
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": str(own),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _machine():
    """A name for the kind of this processor: programs that are compiled for one may not run on another."""
    try:
        flags = [
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith(("flags", "Features"))
        ]
    except OSError:
        flags = []
    return hashlib.sha256(
        "".join([platform.machine(), platform.processor(), *flags[:1]]).encode()
    ).hexdigest()[:12]


def accepts(chosen):
    """Whether this jaxlib compiles the program with these flags, and it does not fail."""
    environment = {**os.environ, "XLA_FLAGS": " ".join(chosen), "JAX_PLATFORMS": "cpu"}
    return (
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True
        ).returncode
        == 0
    )


def _read(cache):
    try:
        cached = json.loads(cache.read_text())
    except (OSError, ValueError):
        return {}
    return cached if isinstance(cached, dict) else {}


def _write(cache, known):
    with suppress(OSError):  # where the clone cannot be written, the next process asks again
        cache.parent.mkdir(exist_ok=True)
        aside = cache.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(known, indent=1))
        aside.replace(cache)
