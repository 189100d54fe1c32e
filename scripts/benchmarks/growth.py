"""How the processor time of each stage grows with the size of a net: reading, analysis, differentiation and running.

The ratios are the time for the largest net over the time for a smaller one, which is a tenth of it: a ratio of 10 is linear
time, and 100 is quadratic. A million operators are read and analyzed only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jrnn.bench.peers import Timed, clocked
from jrnn.bench.suites import Job, SuiteOptions
from jrnn.nets import graph
from jrnn.nets.autodiff import add_gradients
from jrnn.nets.ir import Net, Op
from jrnn.nets.lowering import infer_shapes, run_net, to_jax
from jrnn.nets.proto import Limits, format_net, read_net, serialize_net

SIZES = (1_000, 10_000, 100_000)
MOST = 1_000_000
LIMITS = Limits(messages=2 * MOST, strings=8 * MOST, text_bytes=2**30)
OURS = (f"{SIZES[-1]} operators", f"{MOST} operators")
TAKES = ("cells", "modes")


def chain(size: int) -> Net:
    """Returns operators that each read what the one before wrote."""
    ops = [Op.of("Tanh", [f"h{k}" if k else "x"], [f"h{k + 1}"]) for k in range(size)]
    return Net("chain", tuple(ops), ("x", "w"), (f"h{size}",))


def fan(size: int) -> Net:
    """Returns operators that all read the same two blobs, and a sum of what they wrote."""
    ops = [Op.of("Mul", ["x", "w"], [f"y{k}"]) for k in range(size - 1)]
    return Net(
        "fan", (*ops, Op.of("Sum", [f"y{k}" for k in range(size - 1)], ["y"])), ("x", "w"), ("y",)
    )


def shared(size: int) -> Net:
    """Returns a chain in which every operator also reads one blob, as the steps of an unrolled network read its weights."""
    ops = [Op.of("Mul", [f"h{k}" if k else "x", "w"], [f"h{k + 1}"]) for k in range(size)]
    return Net("shared", tuple(ops), ("x", "w"), (f"h{size}",))


def in_place(size: int) -> Net:
    """Returns operators that each overwrite the same blob."""
    return Net(
        "in place", tuple(Op.of("Mul", ["x", "w"], ["x"]) for _ in range(size)), ("x", "w"), ("x",)
    )


NETS: Mapping[str, Callable[[int], Net]] = {
    "chain": chain,
    "fan": fan,
    "shared": shared,
    "in place": in_place,
}


class GrowthStage(NamedTuple):
    """A stage: what is made of a net first, and what is measured on that; `most`: the largest net."""

    prepare: Callable[[Net], Any]
    run: Callable[[Any], object]
    most: int = SIZES[-1]


def _same(net: Net) -> Net:
    return net


def _blobs() -> dict[str, np.ndarray]:
    return {"x": np.full(4, 0.5, np.float32), "w": np.full(4, 0.5, np.float32)}


STAGES: Mapping[str, GrowthStage] = {
    "read": GrowthStage(serialize_net, lambda data: read_net(data, limits=LIMITS), MOST),
    "read text": GrowthStage(format_net, lambda text: read_net(text, limits=LIMITS)),
    "serialize": GrowthStage(_same, serialize_net),
    "ssa": GrowthStage(_same, graph.get_ssa, MOST),
    "infer_shapes": GrowthStage(_same, lambda net: infer_shapes(net, _blobs())),
    "to_jax": GrowthStage(_same, to_jax),
    "add_gradients": GrowthStage(_same, lambda net: add_gradients(net, net.external_outputs)),
    "run": GrowthStage(_same, lambda net: run_net(net, _blobs())),
    "to_svg": GrowthStage(_same, graph.to_svg),
}


def jobs(options: SuiteOptions) -> Iterator[Job]:
    for name in options.chosen("cells", STAGES):
        stage = STAGES[name]
        for kind in options.chosen("modes", NETS):
            sizes = [*SIZES, *([MOST] if stage.most == MOST else [])]
            given = {size: stage.prepare(NETS[kind](size)) for size in sizes}
            runs = {
                size: clocked(lambda x=x, s=stage: s.run(x), time.process_time)
                for size, x in given.items()
            }
            programs = {f"{size} operators": Timed(run) for size, run in runs.items()}
            yield Job(name, kind, "", programs)
