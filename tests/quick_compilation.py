"""XLA's flags for programs that run once: values matter in tests, and most of the time goes into compiling."""

import importlib.util
import mmap
from pathlib import Path

# LLVM's optimizations are left out, XLA's own are not; kernels come from the emitter that compiles in half the time.
_WANTED = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
    "xla_cpu_use_fusion_emitters": "false",
}


def flags():
    """Those of the flags that this jaxlib has: XLA aborts at one that it does not know."""
    known = set()
    for library in Path(importlib.util.find_spec("jaxlib").origin).parent.glob("*.so"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            known |= {name for name in _WANTED if content.find(name.encode()) >= 0}
    return [f"--{name}={_WANTED[name]}" for name in sorted(known)]
