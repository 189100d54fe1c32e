"""Measures jrnn.scan beside its peers, without installing jrnn. The same as `jrnn bench`.

python scripts/benchmark.py --json docs/benchmarks/cpu.json
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jrnn.cli import main
from jrnn.executor import host_memory

if __name__ == "__main__":
    host_memory.keep()
    sys.exit(main(["bench", *sys.argv[1:]]))
