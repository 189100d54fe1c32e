"""What a candidate costs, as data and in words: seconds, bytes, and the parts of the time by name."""

from __future__ import annotations

from typing import NamedTuple

Terms = dict[str, float]  # parts of a time, by the names of `UNCERTAINTIES`


# How far each part of an estimate may be off, as a part of it: operations are counted, while bandwidths, calls, and what a
# library copies before a product differ between processors and versions of XLA. What a candidate saves must exceed its
# uncertainty, so that one that trades one uncertain part for another has to promise more.
UNCERTAINTIES = {
    "products": 0.15,
    "elements": 0.5,
    "carry copies": 0.5,
    "calls": 0.5,
    "weight copies": 0.75,
    "stacks": 1.0,
}


class Estimate(NamedTuple):
    """What a candidate costs.

    Attributes:
        seconds: the time of all steps on one core.
        memory: the bytes of temporary arrays at the peak, without the loop's own inputs and outputs.
        terms: parts of the time, by name.
    """

    seconds: float
    memory: int
    terms: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        parts = []
        for name, seconds in self.terms:
            if seconds >= 0.01 * self.seconds:
                parts.append(f"{name} {in_words(seconds)}")
        return f"{self.brief()} ({', '.join(parts)})" if parts else self.brief()

    def brief(self) -> str:
        """Returns the time and the memory alone."""
        return f"{in_words(self.seconds)}, {size_in_words(self.memory)}"


def in_words(seconds: float) -> str:
    """Returns a time as text."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def size_in_words(size: float) -> str:
    """Returns a number of bytes as text."""
    return f"{size / 1e6:,.2f} MB"


def total(*estimates: Terms) -> Terms:
    """Returns sums of times, by name."""
    sums = dict.fromkeys(UNCERTAINTIES, 0.0)
    for terms in estimates:
        for name, seconds in terms.items():
            sums[name] += seconds
    return sums


def estimate(terms: Terms, memory: int) -> Estimate:
    """Returns the estimate with these parts of its time."""
    return Estimate(sum(terms.values()), memory, tuple(terms.items()))
