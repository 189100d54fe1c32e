"""How deep a compiled program is, and how much its devices send each other, from its HLO text."""

from __future__ import annotations

from jrnn.bench.hlo import Module, bytes_of, is_launch

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


class DeepModule(Module):
    """A compiled program as data."""

    def depth(self) -> int:
        """Returns the launches on the longest path: what runs one after the other even on an endless number of processors.

        A loop counts its body as often as the compiler knows that it runs, or once.
        """
        return self._depth(self.entry)

    def loop_depths(self) -> list[int]:
        """Returns the same of one trip of each outermost loop of the entry computation."""
        loops = (i for i in self.computations[self.entry].values() if i.opcode == "while")
        return [self._depth(i.runs[0]) for i in loops]

    def _depth(self, computation: str) -> int:
        ends: dict[str, int] = {}
        for i in self.computations[computation].values():  # operands stand before their users
            own = max(map(self._depth, i.runs)) * (i.trips or 1) if i.runs else int(is_launch(i))
            ends[i.name] = own + max((ends[name] for name in i.operands if name in ends), default=0)
        return max(ends.values(), default=0)

    def sent(self) -> int:
        """Returns the bytes that a device gives to collectives; loop bodies are repeated, and branches all count."""
        return self._sent(self.entry)

    def _sent(self, computation: str) -> int:
        here, total = self.computations[computation], 0
        for i in here.values():
            if i.opcode.removesuffix("-start") in COLLECTIVES:
                total += sum(bytes_of(here[name].result) for name in i.operands)
            total += sum(map(self._sent, i.runs)) * self.trips(i)
        return total
