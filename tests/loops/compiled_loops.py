"""The loops of a compiled program on a CPU: how many kernels a step they have, and what keeps them from being one kernel.

XLA:CPU compiles some loops as one kernel. In the optimized HLO such a loop is a call with the frontend attribute
`xla_cpu_small_call`. This attribute is read here, and never set: XLA aborts where it did not check the loop itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jrnn.bench import instructions
from jrnn.bench.instructions import Computation

_FREE = frozenset(("bitcast", "constant", "get-tuple-element", "parameter", "tuple"))
_CALLS = frozenset(
    ("custom-call", "dot", "fft", "scatter", "sort")
)  # each stops a loop from being one kernel, or may
_SMALL = re.compile(r'xla_cpu_small_call="?true')


@dataclass(frozen=True)
class CompiledLoop:
    """A loop that the program runs.

    Attributes:
        steps: the number of its steps, or None if XLA does not know it.
        kernels: kernels and library calls at a step; 0 if the whole loop is one kernel.
        kernel_blockers: what keeps it from being one kernel: opcodes of HLO, or names of the libraries' functions.
    """

    steps: int | None
    kernels: int
    kernel_blockers: tuple[str, ...]


def loops_of(text: str) -> tuple[CompiledLoop, ...]:
    """Returns the outermost loops of a program for CPUs, in the order of its optimized HLO text."""
    entry, computations = instructions.computations(text)
    return tuple(_loops(entry, computations))


def _loops(name: str, computations: Mapping[str, Computation]) -> Iterator[CompiledLoop]:
    for i in computations.get(name, {}).values():
        if i.opcode == "while":
            yield CompiledLoop(i.trips, *_cost(i.runs[0], computations))
        elif _SMALL.search(i.attributes):
            whole = (one for one in computations[i.runs[0]].values() if one.opcode == "while")
            yield from (CompiledLoop(one.trips, 0, ()) for one in whole)
        else:
            for other in i.runs:
                yield from _loops(other, computations)


def _cost(name: str, computations: Mapping[str, Computation]) -> tuple[int, tuple[str, ...]]:
    """Returns the kernels of one run of a computation, and what keeps it from being one kernel."""
    kernels = 0
    stops = dict[str, None]()
    for i in computations.get(name, {}).values():
        if i.opcode in _FREE:
            continue
        if i.runs and not _SMALL.search(i.attributes):
            costs = [_cost(other, computations) for other in i.runs]
            kernels += (i.trips or 1) * max(count for count, _ in costs)
            stops.update(dict.fromkeys(stop for _, others in costs for stop in others))
            continue
        kernels += 1
        target = re.search(r'custom_call_target="([^"]+)"', i.attributes)
        if i.opcode in _CALLS or "kind=kCustom" in i.attributes:
            stops[target[1] if target else i.opcode] = None
    return kernels, tuple(stops)
