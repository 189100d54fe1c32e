"""The reader of compiled programs: the computations of an optimized HLO text, and their instructions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Instructions by the names of their results, operands before their users.
Computation = Mapping[str, "Instruction"]
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", re.M | re.S)
_HEAD = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%?([\w.\-]+)")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: of its result.
        opcode: what it does.
        result: the text of its result's type.
        operands: names of instructions.
        value: of a constant, its text.
        attributes: the rest of the line.
        root: whether it is the computation's result.
    """

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    value: str
    attributes: str
    root: bool

    def called(self, *attributes: str) -> str | None:
        """Returns the computation that one of these attributes names."""
        match = re.search(rf"\b(?:{'|'.join(attributes)})=%?([\w.\-]+)", self.attributes)
        return match and match[1]

    @property
    def runs(self) -> list[str]:
        """The computations that a loop (its body), a call or a condition runs; none for other instructions."""
        branches = None
        called: list[str | None] = []
        if self.opcode in ("while", "call"):
            called = [self.called("body", "to_apply")]
        elif self.opcode == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
            called = [self.called("true_computation"), self.called("false_computation")]
        return _NAME.findall(branches[1]) if branches else list(filter(None, called))

    @property
    def trips(self) -> int | None:
        """The steps of a loop, if the compiler knows them."""
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(known[1]) if known else None


def computations(text: str) -> tuple[str, dict[str, Computation]]:
    """Returns the name of the entry computation, and all computations by name."""
    every = {}
    entry = ""
    for is_entry, name, body in _COMPUTATION.findall(text):
        instructions = filter(None, map(_instruction, body.splitlines()))
        every[name] = {i.name: i for i in instructions}
        entry = name if is_entry else entry
    return entry, every


def _instruction(line: str) -> Instruction | None:
    head = _HEAD.match(line)
    if not head:
        return None
    rest = line[head.end() :]
    result = _enclosed(rest) if rest.startswith("(") else rest[: rest.index(" ")]
    rest = rest[len(result) :].lstrip()
    opcode = rest[: rest.index("(")]
    operands = _enclosed(rest[len(opcode) :])
    names = tuple(re.findall(r"%([\w.\-]+)", operands))
    attributes = rest[len(opcode) + len(operands) :]
    return Instruction(head[2], opcode, result, names, operands[1:-1], attributes, bool(head[1]))


def _enclosed(text: str) -> str:
    """Returns the text up to the parenthesis that closes its first one."""
    depth = 0
    end = 0
    while not end or depth:
        depth += (text[end] == "(") - (text[end] == ")")
        end += 1
    return text[:end]
