"""Kernels, bytes and operations of a compiled program, read from its HLO text.

A program may be compiled for a device that this machine lacks, so nothing is timed here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jrnn.bench.instructions import Computation, Instruction, computations

# Instructions that start no work on the device.
_FREE = frozenset((
    "add-dependency", "after-all", "bitcast", "call", "conditional", "constant", "get-tuple-element", "opt-barrier",
    "parameter", "partition-id", "replica-id", "tuple", "while",
))  # fmt: skip
_WHOLE = ("copy", "custom-call", "fusion")
_FREE_CALLS = ("AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding")
_BITS = {"pred": 8, "token": 0}
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Cost:
    """Launches, bytes read and written, and floating-point operations of contractions."""

    kernels: int = 0
    bytes: int = 0
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.kernels + other.kernels, self.bytes + other.bytes, self.flops + other.flops
        )


@dataclass(frozen=True)
class LoopCost:
    """A loop: its trips (1 if unknown), the cost of one trip, and the kernels of one trip by their kind."""

    trips: int
    body: Cost
    kinds: Mapping[str, int]


class Module:
    """A compiled program as data.

    >>> text = '''
    ... ENTRY %main (a: f32[2,3], b: f32[3,4]) -> f32[2,4] {
    ...   %a = f32[2,3]{1,0} parameter(0)
    ...   %b = f32[3,4]{1,0} parameter(1)
    ...   ROOT %dot.1 = f32[2,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }'''
    >>> Module(text).costs()
    [Cost(kernels=1, bytes=104, flops=48)]
    """

    def __init__(self, text: str):
        self.entry, self.computations = computations(text)

    def costs(self) -> list[Cost]:
        """Returns the cost of each launch of the whole program; loop bodies are repeated."""
        return [cost for _, cost in self._launches(self.entry)]

    def loops(self) -> list[LoopCost]:
        """Returns the outermost loops of the program, in order."""
        return list(self._loops(self.entry))

    def _loops(self, computation: str) -> Iterator[LoopCost]:
        for i in self.computations[computation].values():
            if i.opcode == "while":
                kinds: Counter[str] = Counter()
                body = Cost()
                for opcode, cost in self._launches(i.runs[0]):
                    kinds[opcode] += 1
                    body = body + cost
                yield LoopCost(self.trips(i), body, kinds)
            elif i.opcode == "call":
                yield from self._loops(i.runs[0])

    def _launches(self, computation: str) -> Iterator[tuple[str, Cost]]:
        """Yields the opcode and the cost of each launch; loop bodies are repeated."""
        here = self.computations[computation]
        for i in here.values():
            if i.opcode in ("while", "call"):
                yield from list(self._launches(i.runs[0])) * self.trips(i)
            elif is_launch(i):
                yield i.opcode, Cost(1, self._bytes(i, here), self._flops(i, here))

    def trips(self, i: Instruction) -> int:
        """Returns the trips of a loop: from the compiler, else the limit of its counter; 1 for a call."""
        if i.trips is not None:
            return i.trips
        condition = self.computations.get(i.called("condition") or "", {})
        limits = []
        for each in condition.values():
            if each.opcode == "constant" and each.value.isdigit():
                limits.append(int(each.value))
        return limits[0] if len(limits) == 1 else 1

    def _flops(self, i: Instruction, here: Computation) -> int:
        inside = i.called("calls", "called_computations={")
        if inside in self.computations:
            inner = self.computations[inside]
            return sum(self._flops(each, inner) for each in inner.values())
        if i.opcode == "dot":
            contracted = _numbers(i.attributes, "lhs_contracting_dims")
            return 2 * _elements(i.result) * _product_of(here[i.operands[0]].result, contracted)
        if i.opcode == "convolution":
            (labels,) = re.findall(r"dim_labels=\w+_(\w+)->", i.attributes)
            kernel = [a for a, label in enumerate(labels) if label != "o"]
            return 2 * _elements(i.result) * _product_of(here[i.operands[1]].result, kernel)
        is_product = re.search(r'custom_call_target="[^"]*(gemm|matmul)', i.attributes)
        if i.opcode == "custom-call" and is_product:
            axes = re.findall(r'lhs_contracting_dimensions":\["(\d+)"', i.attributes)
            contracted = list(map(int, axes))
            first = _arrays(i.result)[0]
            return 2 * math.prod(first[1]) * _product_of(here[i.operands[0]].result, contracted)
        return 0

    def _bytes(self, i: Instruction, here: Computation) -> int:
        inside = i.called("calls")
        if inside in self.computations:
            return self._fused_bytes(self.computations[inside])
        if i.opcode == "dynamic-update-slice":
            return 2 * bytes_of(here[i.operands[1]].result)
        if i.opcode in ("slice", "dynamic-slice"):
            return 2 * bytes_of(i.result)
        total = bytes_of(i.result)
        for name in i.operands:
            if name in here:
                total += bytes_of(here[name].result)
        return total

    def _fused_bytes(self, inner: Computation) -> int:
        """Returns the bytes that a fused computation reads and writes; of a stack, only the slices."""
        users: dict[str, list[Instruction]] = {}
        for i in inner.values():
            for name in i.operands:
                users.setdefault(name, []).append(i)

        def read(i: Instruction) -> int:
            total = 0
            for user in users.get(i.name, []):
                if user.opcode == "bitcast":
                    total += read(user)
                elif user.opcode in ("slice", "dynamic-slice"):
                    total += bytes_of(user.result)
                elif user.opcode != "dynamic-update-slice" or user.operands[0] != i.name:
                    return bytes_of(i.result)
            return min(total, bytes_of(i.result))

        def written(i: Instruction) -> int:
            if i.opcode == "tuple":
                return sum(written(inner[name]) for name in i.operands)
            if i.opcode == "bitcast":
                return written(inner[i.operands[0]])
            if i.opcode == "dynamic-update-slice":
                return bytes_of(inner[i.operands[1]].result)
            return bytes_of(i.result)

        total = 0
        for i in inner.values():
            if i.root:
                total += written(i)
            if i.opcode == "parameter":
                total += read(i)
        return total


def is_launch(i: Instruction) -> bool:
    """Returns whether an instruction is a kernel, a copy, or a library call."""
    if i.opcode in _FREE or i.opcode.endswith(("-done", "-update")):
        return False
    if i.opcode not in _WHOLE and re.match(r"\w+\[\]", i.result):
        return False  # a TPU's scalar unit computes scalars
    return i.opcode != "custom-call" or not any(f'"{name}"' in i.attributes for name in _FREE_CALLS)


def _arrays(result: str) -> list[tuple[str, list[int]]]:
    """Returns the dtype and the shape of each array of a type."""
    return [(dtype, _integers(shape)) for dtype, shape in _ARRAY.findall(result)]


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def bytes_of(result: str) -> int:
    """Returns the bytes of the arrays of a type.

    >>> bytes_of("(f32[2,3]{1,0:T(8,128)}, bf16[4])")
    32
    """

    def bits(dtype: str) -> int:
        return _BITS[dtype] if dtype in _BITS else int(re.search(r"\d+", dtype).group())

    return sum(bits(dtype) * math.prod(shape) for dtype, shape in _arrays(result)) // 8


def _elements(result: str) -> int:
    return sum(math.prod(shape) for _, shape in _arrays(result))


def _product_of(result: str, axes: Sequence[int]) -> int:
    shape = _arrays(result)[0][1]
    return math.prod(shape[a] for a in axes)


def _numbers(attributes: str, name: str) -> list[int]:
    numbers = re.search(rf"{name}=\{{([\d,]*)\}}", attributes)
    return _integers(numbers[1]) if numbers else []
