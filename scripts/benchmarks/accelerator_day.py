"""What to run on a machine with an accelerator, in one process, in minutes and without a network.

    python scripts/benchmarks/accelerator_day.py OUT SECONDS [PART...]

PART is a part, or a group of parts: A (correctness and headline ratios), B (tries of constants) or C (half precision and
peers, for 720 seconds); all by default. OUT
gets results.jsonl (a line for each result, flushed at once), summary.md, day.log and programs.tar.gz. The process ends
after SECONDS, whatever is left to do. On a machine without a GPU all parts run in small sizes, to show that they run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")  # the rest is torch's
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "accelerator_day_programs")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
if os.environ.get("JAX_PLATFORMS") in ("cuda", "gpu"):
    os.environ["JAX_PLATFORMS"] += ",cpu"  # float64 runs there
sys.path.insert(0, str(Path(__file__).parents[2]))

import accelerator_parts as parts
import accelerator_tries as tries
import accelerator_types as types
import jax
import jaxlib
from accelerator_measure import Day

A = {
    "launch": (
        parts.launch,
        "time of a launch, of a kernel in a loop; rates of products and of memory",
    ),
    "right": (
        parts.right,
        "default programs next to float64 step by step: values, gradients, repeatability",
    ),
    "matrix": (parts.matrix, "layers with matrix states: jrnn, chunks by hand, lax.scan"),
    "lstm": (parts.lstm, "LSTM and GRU: jrnn, jrnn.nn, lax.scan, flax, torch's cuDNN"),
    "loose": (parts.loose, "the errors of `right` at the default precision (TF32)"),
    "profile": (parts.profile, "kernels of one train step: count, busy time, gaps"),
    "affine": (parts.affine, "executor='associative' over T"),
    "newton": (parts.newton, "executor='newton' over T"),
}
B = {
    "chunks": (tries.chunks, "chunks of 32, 64 and 128 steps, jrnn and by hand"),
    "unroll": (tries.unroll, "1 to 16 steps a trip of the loop"),
    "stages": (tries.stages, "one kernel a stage on and off, packed stacks on and off"),
    "buffers": (tries.buffers, "command buffers on and off"),
    "bfloat16": (tries.bfloat16, "bfloat16 weights with float32 carries"),
    "rounds": (tries.rounds, "from which T on gradients of affine steps are faster in rounds"),
}
C = {
    "cells16": (types.cells, "LSTM and GRU in bfloat16 and float16: jrnn, cuDNN, FlashRNN"),
    "layers16": (types.layers, "layers in bfloat16 and float32: jrnn, by hand, fla, jla"),
    "errors16": (types.errors, "the errors of these layers against float64"),
    "memory": (types.memory, "memory of gated linear attention in chunks"),
    "resets": (types.resets, "no resets, 1 % and 10 %"),
    "long": (types.long, "executor='newton' and 'associative' over T, next to the loop"),
    "compilation": (types.compilation, "seconds to lower and to compile"),
    "slowest": (types.slowest, "kernels of the program that is slowest next to a peer"),
}
# Of the time of group C, if it runs alone.
SHARES = {
    "cells16": 0.21,
    "layers16": 0.29,
    "errors16": 0.12,
    "memory": 0.06,
    "resets": 0.07,
    "long": 0.14,
    "compilation": 0.07,
    "slowest": 0.04,
}
PARTS = A | B | C
GROUPS = {"A": A, "B": B, "C": C}


def main(arguments: Sequence[str]) -> int:
    names = "\n".join(
        f"  {group} {name:10}{text}"
        for group, of in GROUPS.items()
        for name, (_, text) in of.items()
    )
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"parts:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("part", nargs="*", help="a part or a group")
    parser.add_argument(
        "--no-torch",
        action="store_true",
        help="leave torch out, where it cannot share a process with JAX",
    )
    asked = parser.parse_args(arguments)
    unknown = {part.partition(":")[0] for part in asked.part} - {*PARTS, *GROUPS}
    if unknown:
        parser.error(
            f"there is no part {', '.join(sorted(unknown))}; there are {', '.join((*GROUPS, *PARTS))}"
        )
    chosen = [name for part in asked.part or GROUPS for name in GROUPS.get(part, (part,))]
    parts.use_torch = not asked.no_torch
    day = Day(asked.out, asked.seconds)
    device = jax.devices()[0]
    versions = dict(
        jax=jax.__version__, jaxlib=jaxlib.__version__, runtime=device.client.platform_version
    )
    day.say(
        device=device.device_kind,
        python=sys.version.split()[0],
        **versions,
        flags=os.environ.get("XLA_FLAGS"),
    )
    parts_to_run = {name: PARTS[name.partition(":")[0]][0] for name in dict.fromkeys(chosen)}
    day.run(parts_to_run, SHARES if list(parts_to_run) == list(C) else None)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # programs that were too late may still compile in threads
