"""What the values of a step are computed from: the arrays and inputs that a kernel reads, through values that are no arrays.

XLA fuses elementwise equations, so that a kernel reads what all of them read. A chain of n equations, each with an input of
its own, would have n lists with up to n entries. Here a set of arrays is an integer with a bit for each, so that the sets of
an equation's operands are joined in one operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jrnn.jaxprs import Var

Arrays = int  # a set of arrays and inputs, as bits


class Sources:
    """The arrays and inputs of a step, numbered in the order in which they are read."""

    def __init__(self) -> None:
        self.of: dict[Var, Arrays] = {}  # what each value is computed from; an array from itself
        self._bits: dict[Var, Arrays] = {}
        self._variables: list[Var] = []

    def bit(self, v: Var) -> Arrays:
        """Returns an array alone."""
        bit = self._bits.get(v)
        if bit is None:
            bit = self._bits[v] = 1 << len(self._variables)
            self._variables.append(v)
        return bit

    def bits(self, variables: Iterable[Var]) -> Arrays:
        """Returns the variables among some that are read, as a set."""
        bits = 0
        for v in variables:
            bits |= self._bits.get(v, 0)
        return bits

    def read(self, operands: Sequence[Var]) -> Arrays:
        """Returns the arrays that an equation with these operands reads."""
        arrays = 0
        for v in operands:
            if v not in self.of:
                self.of[v] = self._bits[v] = 1 << len(self._variables)
                self._variables.append(v)
            arrays |= self.of[v]
        if not arrays and len(operands) == 1:
            # A value that is computed from nothing, such as a counter, is read itself.
            return self.bit(operands[0])
        return arrays

    def listed(self, arrays: Arrays) -> list[Var]:
        """Returns a set as a list, in the order of the numbers."""
        listed = []
        while arrays:
            lowest = arrays & -arrays
            listed.append(self._variables[lowest.bit_length() - 1])
            arrays ^= lowest
        return listed
