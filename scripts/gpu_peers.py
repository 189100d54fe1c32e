"""Collects libraries to compare with on a GPU, as folders that travel to a machine without a network.

    python scripts/gpu_peers.py [FOLDER]           collect them, and import each
    python scripts/gpu_peers.py --check [FOLDER]   import what is there, on the machine with the GPU

FOLDER is `gpu_peers` of the clone by default, which git ignores: nothing of these libraries is committed. Each library has
a folder of its own with what it needs besides torch, Triton, JAX and numpy, which the machine has. Each is imported in a
process of its own, so that one that fails says why, in a line of JSON, and stops no other.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "gpu_peers"
PYTHON = "3.12"  # of the machine with the GPU
MOST_BYTES = 64 << 20  # that may travel

# The packages of each peer, and what is imported to show that it works.
PEERS = {
    "fla": (["fla-core", "einops"], "fla.ops.gla, fla.ops.gated_delta_rule, fla.ops.simple_gla"),
    "jla": (["jax-linear-attention"], "jla.ops"),
    "flashrnn": (["flashrnn", "einops"], "flashrnn"),
}


def collect(folder: Path, name: str) -> str | None:
    """Installs the packages of a peer, without what they depend on; returns the reason if that fails."""
    target = folder / name
    shutil.rmtree(target, ignore_errors=True)
    packages, _ = PEERS[name]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--python-version", PYTHON, "--only-binary", ":all:", "--target", str(target)]
    done = subprocess.run([*command, *packages], capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr.strip()[-400:]


def imported(folder: Path, name: str) -> str | None:
    """Imports a peer in another process; returns the reason if that fails."""
    _, modules = PEERS[name]
    program = f"import sys; sys.path.append({str(folder / name)!r}); import {modules}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return "its import takes over two minutes"
    return None if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2][-400:]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--check", action="store_true", help="collect nothing")
    asked = parser.parse_args(arguments)
    failed = 0
    for name in PEERS:
        reason = None if asked.check else collect(asked.folder, name)
        line = {"peer": name, "collected": reason is None, "bytes": size_of(asked.folder / name)}
        reason = reason or imported(asked.folder, name)
        print(json.dumps({**line, "imports": reason is None, "reason": reason}), flush=True)
        failed += not line["collected"]
    total = size_of(asked.folder)
    print(json.dumps({"bytes": total, "fits": total <= MOST_BYTES}))
    return int(failed > 0 or total > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
