"""The steps of `scripts/accelerator_day.sh`.

Each is a process with its own time limit, so that a step that fails or hangs does not stop the others. `summary.md` in the
folder has the result of each.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

BUDGET = 530.0  # seconds for everything on a GPU
PATIENCE = 10  # factor of all limits on a CPU, which may be busy with other work
CELLS = ("lstm", "gru", "slstm", "min_gru")
PRECISIONS = {"float32": "highest", "tf32": "tensorfloat32", "bf16": "bfloat16"}
EXECUTOR_TESTS = ("tests/loops/test_gpu_target.py", "tests/loops/test_executors.py")
CONFORMANCE_TESTS = (
    "tests/nets/cells/test_lstm.py",
    "tests/nets/ops/test_recurrent_network.py",
    "tests/nn/test_against_torch.py",
)
SMOKE_TESTS = ("tests/test_tiny.py",)
NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="

PLATFORM = "import jax; print(jax.default_backend())"
PROFILE = """
import sys, jax
from jrnn.bench import peers
from jrnn.bench.sizes import Size
found = peers.FUNCTIONS["jrnn"]("lstm", Size.parse(sys.argv[2]))
step = jax.jit(peers.in_mode(found.forward, "train"))
jax.block_until_ready(step(found.weights, found.x))
with jax.profiler.trace(sys.argv[1]):
    for _ in range(3):
        jax.block_until_ready(step(found.weights, found.x))
"""
# A GRU with diagonal recurrent weights, all steps at once and as a loop. Sizes are T x N x D x H.
NEWTON = """
import json, sys, jax, jax.numpy as jnp, jrnn
from functools import partial
from jrnn.bench.measure import in_turns
from jrnn.bench.peers import Timed, clocked

def step(w, h, x):
    z, r, n = jnp.split(x, 3, -1)
    z, r = jax.nn.sigmoid(z + w["z"] * h), jax.nn.sigmoid(r + w["r"] * h)
    h = (1 - z) * h + z * jnp.tanh(n + r * (w["n"] * h))
    return h, h

def loss(scan, w, h, x):
    return jnp.sum(scan(partial(step, w), h, x @ w["w"])[1] ** 2)

records = []
for size in sys.argv[2:]:
    steps, batch, inputs, units = map(int, size.split("x"))
    keys = jax.random.split(jax.random.key(0), 5)
    w = {name: 0.5 * jax.random.normal(key, (1, units)) for name, key in zip("zrn", keys)}
    w["w"] = jax.random.normal(keys[3], (inputs, 3 * units)) / inputs**0.5
    h, x = jnp.zeros((batch, units)), jax.random.normal(keys[4], (steps, batch, inputs))
    for mode, change in {"forward": lambda f: f, "train": lambda f: jax.value_and_grad(f)}.items():
        runs = {"jrnn": partial(jrnn.scan, executor="newton"), "lax.scan": jax.lax.scan}
        runs = {name: jax.jit(change(partial(loss, scan))) for name, scan in runs.items()}
        programs = {n: Timed(clocked(lambda r=r: jax.block_until_ready(r(w, h, x)))) for n, r in runs.items()}
        for peer, timing in in_turns(programs, 7, 5.0).items():
            records.append({"cell": "gru", "mode": mode, "size": size, "peer": peer, "median": timing.median})
    found = jax.jit(lambda: jrnn.scan_statistics(partial(step, w), h, x @ w["w"])[1])()
    print(size, "iterations", found.iterations, "steps one by one", found.sequential_steps, flush=True)
json.dump({"conditions": {"device": jax.devices()[0].device_kind}, "records": records}, open(sys.argv[1], "w"))
"""


@dataclass(frozen=True)
class Step:
    """One process: its name, its command, its time limit, and additions to its environment."""

    name: str
    command: Sequence[str]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)


def steps(out: Path, on_gpu: bool) -> list[Step]:
    """Returns all steps, the most important ones first."""
    python = sys.executable
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    executor, conformance = (EXECUTOR_TESTS, CONFORMANCE_TESTS) if on_gpu else (SMOKE_TESTS, SMOKE_TESTS)
    sizes, latency = ("six", "1024x16x768x768") if on_gpu else ("5x2x3x4", "5x2x3x4")
    newton = ["512x8x64x256", "4096x8x64x256", "32768x8x64x256"] if on_gpu else ["5x2x3x4"]
    turns = ["--turns", "7" if on_gpu else "1", "--seconds", "1", "--devices", "1"]
    turns += [] if on_gpu else ["--peers", "jrnn,jrnn.nn,lax.scan,flax"]

    def measured(name: str, cell: str, size: str, seconds: float, modes: str = "train", **environment: str) -> Step:
        asked = ["--cells", cell, "--modes", modes, "--sizes", size, *turns, "--json", str(out / f"{name}.json")]
        return Step(name, [python, "-m", "jrnn", "bench", *asked], seconds, environment)

    def benchmarks(cell: str, precision: str, seconds: float, modes: str = "train") -> Step:
        asked = {"JAX_DEFAULT_MATMUL_PRECISION": PRECISIONS[precision]}
        return measured(f"bench-{cell}-{precision}", cell, sizes, seconds, modes, **asked)

    exact = {"JAX_DEFAULT_MATMUL_PRECISION": PRECISIONS["float32"]}
    first = [("lstm", "float32"), ("gru", "float32")]
    return [
        Step("environment", [python, "-m", "jrnn", "doctor"], 40),
        measured("latency-lstm", "lstm", latency, 60, "forward,train"),
        *(benchmarks(*job, 60, "forward,train") for job in first),
        Step("executor", [*tests, *executor], 90, exact),
        Step("conformance", [*tests, *conformance], 60, exact),
        Step("profile", [python, "-c", PROFILE, str(out / "profile"), latency], 40),
        Step("newton", [python, "-c", NEWTON, str(out / "newton.json"), *newton], 60),
        measured("command-buffers-on", "lstm", latency, 30),
        measured("command-buffers-off", "lstm", latency, 30, XLA_FLAGS=NO_COMMAND_BUFFERS if on_gpu else ""),
        *(benchmarks(cell, name, 40) for name in PRECISIONS for cell in CELLS if (cell, name) not in first),
    ]


def run(step: Step, out: Path, seconds: float) -> str:
    """Runs a step and returns its result; its output goes to a file of its name."""
    start = time.monotonic()
    with (out / f"{step.name}.log").open("w") as log:
        try:
            environment = {**os.environ, **step.environment}
            done = subprocess.run(step.command, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=seconds)
            result = "ok" if done.returncode == 0 else f"FAILED with status {done.returncode}"
        except subprocess.TimeoutExpired:
            result = f"STOPPED after {seconds:.0f} s"
    return f"{result}, {time.monotonic() - start:.0f} s"


def summary(out: Path, results: dict[str, str]) -> str:
    """Returns the page of results: the steps, and for each benchmark jrnn's time over each peer's, and us a step."""
    lines = ["# Accelerator day", "", "| step | result |", "|---|---|"]
    lines += [f"| {name} | {result} |" for name, result in results.items()]
    for name in results:
        path = out / f"{name}.json"
        if not path.exists():
            continue
        data = json.loads(path.read_text())
        times: dict[tuple[str, str, str], dict[str, float]] = {}
        for record in data["records"]:
            times.setdefault((record["cell"], record["mode"], record["size"]), {})[record["peer"]] = record["median"]
        peers = [peer for peer in dict.fromkeys(p for row in times.values() for p in row) if peer != "jrnn"]
        device = data["conditions"]["device"]
        lines += ["", f"## {name}, on {device}", "", "Time of jrnn over the peer's; below 1, jrnn is faster.", ""]
        lines += [f"| job | jrnn, us a step | {' | '.join(peers)} |", "|---|---|" + "---|" * len(peers)]
        for job, row in times.items():
            ours, length = row.get("jrnn", math.nan), int(job[2].split("x")[0])
            ratios = [f"{ours / row[peer]:.2f}" if peer in row else "-" for peer in peers]
            lines.append(f"| {' '.join(job)} | {ours / length * 1e6:.1f} | {' | '.join(ratios)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    start = time.monotonic()
    out = Path(arguments[0] if arguments else "accelerator_day").resolve()
    out.mkdir(parents=True, exist_ok=True)
    asked = subprocess.run([sys.executable, "-c", PLATFORM], capture_output=True, text=True)
    platform = asked.stdout.strip() or "no platform"
    known, patience = steps(out, platform == "gpu"), 1 if platform == "gpu" else PATIENCE
    unknown = set(arguments[1:]) - {step.name for step in known}
    if unknown:
        print(
            f"there is no step {sorted(unknown)}; there are {', '.join(step.name for step in known)}", file=sys.stderr
        )
        return 2
    results = {"platform": platform}
    for step in known:
        if arguments[1:] and step.name not in arguments[1:]:
            continue
        left = BUDGET * patience - (time.monotonic() - start)
        results[step.name] = run(step, out, min(step.seconds * patience, left)) if left > 5 else "SKIPPED: out of time"
        print(f"{step.name}: {results[step.name]}", flush=True)
        (out / "summary.md").write_text(summary(out, results))
    return 1 if any("FAILED" in result for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
