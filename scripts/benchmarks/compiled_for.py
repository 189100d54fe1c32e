"""Train steps in float32 and bfloat16 compiled for an accelerator that is not there: kernels, bytes, memory, compilation.

    python scripts/benchmarks/compiled_for.py DEVICE FILE [PROGRAM...]

DEVICE is one of `jrnn bench --compile-for`. FILE is a JSON file, whose list "types" is replaced (docs/benchmarks/h100.json).
PROGRAM is a cell or a layer, by default four layers with matrix states, LSTM and GRU. Compilation is processor time of all
threads, because XLA compiles kernels side by side; peers are compiled one after the other.

Shapes: T time, N batch or heads, D input or keys, H hidden or values.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import chunkwise
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from linear_layers import LAYERS, problem

from jrnn.bench import compile_for, measured_cells
from jrnn.bench.hlo import Cost, Module
from jrnn.bench.peers import versions
from jrnn.bench.sizes import Size
from jrnn.jaxprs.jax_internals import platform_of
from jrnn.loops import scan
from jrnn.loops.costs.target import planned_platform

LAYER_SIZE = Size.parse("2048x64x64x64")
CELL_SIZE = Size.parse("100x32x512x512")
PROGRAMS = ("linear_attention", "gated_delta_rule", "gla", "mamba2", "lstm", "gru")
SCANS: dict[str, Callable[..., Any]] = {"jrnn": scan, "lax.scan": jax.lax.scan}


def programs(name: str, dtype: Any) -> Iterator[tuple[str, Callable[..., Any], Sequence[Any]]]:
    """Yields each peer, its function of two arguments, and these arguments. In bfloat16, all arrays are."""

    def narrow(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype), tree)

    if name in LAYERS:
        given = problem(name, LAYER_SIZE, dtype)
        for peer, which in SCANS.items():
            yield peer, functools.partial(which, LAYERS[name].step), given
        by_hand = getattr(chunkwise, name, None)
        if by_hand is not None:
            yield "by hand", by_hand, given
        return
    given = narrow(measured_cells.inputs(name, CELL_SIZE))
    carry = narrow(measured_cells.initial(name, CELL_SIZE))
    for peer, which in SCANS.items():

        def run(weights: Any, x: Any, which: Callable[..., Any] = which) -> Any:
            return which(measured_cells.make(name, weights), carry, x)

        yield peer, run, given


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the gradients of the sum of the squares of all results."""

    def loss(*args: Any) -> Any:
        leaves = jax.tree.leaves(fn(*args))
        return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in leaves)

    return jax.grad(loss, (0, 1))


def record(device: Any, fn: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """Compiles the train step of a function, and counts."""
    there = SingleDeviceSharding(device)
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), tuple(args)
    )
    start = time.process_time()
    with planned_platform(platform_of(device.client)):
        compiled = jax.jit(gradients(fn)).lower(*given).compile()
    seconds = time.process_time() - start
    total = sum(Module(compiled.as_text()).costs(), Cost())
    return {
        "kernels": total.kernels,
        "bytes": total.bytes,
        "temporary": int(compiled.memory_analysis().temp_size_in_bytes),
        "compile": round(seconds, 2),
    }


def main(target: str, file: Path, *names: str) -> None:
    chunkwise.C = 64
    device = compile_for.described(compile_for.DEVICES[target])
    records = []
    for name in names or PROGRAMS:
        size = LAYER_SIZE if name in LAYERS else CELL_SIZE
        for dtype in ("float32", "bfloat16"):
            for peer, fn, args in programs(name, jnp.dtype(dtype)):
                row = {"program": name, "size": str(size), "type": dtype, "peer": peer}
                row |= record(device, fn, args)
                print(json.dumps(row), flush=True)
                records.append(row)
    text = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    text["conditions"] = {"target": target, "versions": versions()}
    text["types"] = records
    lines = ",\n".join(f"  {json.dumps(row)}" for row in text.pop("types"))
    rows = ",\n".join(f"  {json.dumps(row)}" for row in text.pop("rows", []))
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in text.items())
    file.write_text(
        "{\n" + head + f' "rows": [\n{rows}\n ],\n "types": [\n{lines}\n ]\n' + "}\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
