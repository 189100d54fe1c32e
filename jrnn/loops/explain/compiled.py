"""The loops of a compiled program on a CPU: how many kernels a step they have, and what keeps them from being one kernel.

XLA:CPU compiles some loops as one kernel. In the optimized HLO such a loop is a call with the frontend attribute
`xla_cpu_small_call`. This attribute is read here, and never set: XLA aborts where it did not check the loop itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jaxlib.version

from jrnn.loops.costs.machines import ONE_KERNEL_FLAG

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", re.M | re.S)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?:\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_FREE = frozenset(("bitcast", "constant", "get-tuple-element", "parameter", "tuple"))
_CALLS = frozenset(("custom-call", "dot", "fft", "scatter", "sort"))  # each stops a loop from being one kernel, or may
_SMALL = re.compile(r'xla_cpu_small_call="?true')


@dataclass(frozen=True)
class CompiledLoop:
    """A loop that the program runs.

    Attributes:
        steps: the number of its steps, or None if XLA does not know it.
        kernels: kernels and library calls at a step; 0 if the whole loop is one kernel.
        in_the_way: what keeps it from being one kernel: opcodes of HLO, or names of the libraries' functions.
    """

    steps: int | None
    kernels: int
    in_the_way: tuple[str, ...]

    def __str__(self) -> str:
        of = "a loop" if self.steps is None else f"a loop of {self.steps} steps"
        if not self.kernels:
            return f"{of}: one kernel"
        text = f"{of}: {self.kernels} kernels a step"
        if self.in_the_way:
            return f"{text}; in the way of one kernel: {', '.join(self.in_the_way)}"
        if jaxlib.version.__version_info__ < (0, 12):
            return f"{text}; XLA may make one kernel if the process starts with XLA_FLAGS={ONE_KERNEL_FLAG}"
        return text


def loops_of(text: str) -> tuple[CompiledLoop, ...]:
    """Returns the outermost loops of a program for CPUs, in the order of its optimized HLO text.

    >>> import jax, jax.numpy as jnp
    >>> run = jax.jit(lambda h: jax.lax.scan(lambda h, _: (jnp.tanh(2 * h), None), h, length=9)[0])
    >>> loops_of(run.lower(jnp.ones(3)).compile().as_text())
    (CompiledLoop(steps=9, kernels=0, in_the_way=()),)
    """
    bodies: dict[str, list[str]] = {}
    entry = ""
    for is_entry, name, body in _COMPUTATION.findall(text):
        bodies[name] = body.splitlines()
        entry = name if is_entry else entry
    return tuple(_loops(entry, bodies))


def _loops(name: str, bodies: dict[str, list[str]]) -> Iterator[CompiledLoop]:
    for line, opcode in _instructions(bodies.get(name, [])):
        inner = _called(line)
        if opcode == "while":
            yield CompiledLoop(_steps(line), *_cost(inner["body"], bodies))
        elif opcode == "call" and _SMALL.search(line):
            whole = [one for one, code in _instructions(bodies[inner["to_apply"]]) if code == "while"]
            yield from (CompiledLoop(_steps(one), 0, ()) for one in whole)
        elif opcode in ("call", "conditional"):
            for other in inner.values():
                yield from _loops(other, bodies)


def _cost(name: str, bodies: dict[str, list[str]]) -> tuple[int, tuple[str, ...]]:
    """Returns the kernels of one run of a computation, and what is in the way of one kernel."""
    kernels, stops = 0, dict[str, None]()
    for line, opcode in _instructions(bodies.get(name, [])):
        inner = _called(line)
        if opcode in _FREE:
            continue
        if opcode in ("while", "call", "conditional") and not _SMALL.search(line):
            branches = [inner["body"]] if opcode == "while" else list(inner.values())
            costs = [_cost(other, bodies) for other in branches]
            kernels += (_steps(line) or 1 if opcode == "while" else 1) * max((n for n, _ in costs), default=0)
            stops.update(dict.fromkeys(stop for _, found in costs for stop in found))
            continue
        kernels += 1
        target = re.search(r'custom_call_target="([^"]+)"', line)
        if opcode in _CALLS or "kind=kCustom" in line:
            stops[target[1] if target else opcode] = None
    return kernels, tuple(stops)


def _instructions(lines: list[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        found = _INSTRUCTION.match(line)
        if found:
            yield line, found[1]


def _called(line: str) -> dict[str, str]:
    named = dict(re.findall(r"\b(body|to_apply|true_computation|false_computation)=%?([\w.\-]+)", line))
    branches = re.search(r"branch_computations=\{([^}]*)\}", line)
    names = branches[1].replace("%", "").split(", ") if branches else ()
    return named | {f"branch {k}": name for k, name in enumerate(names)}


def _steps(line: str) -> int | None:
    known: Any = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    return int(known[1]) if known else None
