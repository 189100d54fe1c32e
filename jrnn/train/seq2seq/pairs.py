"""Pairs of strings, generated: dates in many spellings with their ISO 8601 form, and strings with their reverse.

Shapes: N pairs, S characters of the longest input, T characters of the longest target and its end.
"""

from __future__ import annotations

import string
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jrnn.errors import DataError
from jrnn.train.text import Vocabulary

END = 0  # the token that ends a target; the decoder also starts from it
REVERSE = "<"  # begins an input that is a string to reverse; other inputs are dates
ALPHABET = string.ascii_letters + string.digits + " ,./-"
VOCABULARY = Vocabulary.of("\n" + REVERSE + ALPHABET)
ONE_IN = 10  # one target in so many is held out from training

MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ROMAN = ("I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII")

# d, m: numbers without leading zeros; dd, mm: two digits. With slashes the month comes first, with dots the day.
SPELLINGS = (
    "{d} {mon} {y}", "{dd} {mon} {y}", "{d} {month} {y}", "{d} {mon}. {y}", "{d}-{mon}-{y}", "{d}{mon}{y}",
    "{nth} {month} {y}", "{nth} {mon} {y}", "{nth} of {month} {y}", "{nth} of {month}, {y}",
    "{mon} {d}, {y}", "{month} {d}, {y}", "{month} {d} {y}", "{month} {nth}, {y}", "{month} the {nth}, {y}",
    "{wd} {d} {mon} {y}", "{wd}, {d} {month} {y}", "{wd}, {mon} {d}, {y}", "{weekday} {d} {month} {y}",
    "{weekday}, {month} {d}, {y}", "{weekday}, {nth} {month} {y}",
    "{y} {month} {d}", "{y} {mon} {dd}", "{y}, {month} {d}", "{d} {roman} {y}", "{d}.{roman}.{y}",
    "{y}-{mm}-{dd}", "{y}/{mm}/{dd}", "{y}.{mm}.{dd}", "{y} {mm} {dd}", "{y}{mm}{dd}",
    "{dd}.{mm}.{y}", "{d}.{m}.{y}", "{d}. {m}. {y}", "{mm}/{dd}/{y}", "{m}/{d}/{y}",
)  # fmt: skip
CASES = (str, str, str.lower, str.upper)


def spell(day: date, spelling: str) -> str:
    """Returns a date in one of SPELLINGS.

    >>> spell(date(2026, 11, 20), "{weekday}, {nth} of {month} {y}")
    'Friday, 20th of November 2026'
    """
    d, m, weekday, month = day.day, day.month, WEEKDAYS[day.weekday()], MONTHS[day.month - 1]
    end = {1: "st", 2: "nd", 3: "rd"}.get(0 if d in (11, 12, 13) else d % 10, "th")
    return spelling.format(
        y=day.year, m=m, d=d, mm=f"{m:02}", dd=f"{d:02}", nth=f"{d}{end}", month=month, mon=month[:3],
        weekday=weekday, wd=weekday[:3], roman=ROMAN[m - 1],
    )  # fmt: skip


def is_held_out(target: str) -> bool:
    """Returns whether a target is held out from training, which its checksum decides, for every seed.

    >>> [day for day in range(1, 31) if is_held_out(f"2026-11-{day:02}")]
    [4, 13, 18]
    """
    return zlib.crc32(target.encode()) % ONE_IN == 0


class Encoded(NamedTuple):
    """Pairs as tokens, int32: inputs [S, N] and targets [T, N], padded with END, and the lengths [N] of both.

    The length of a target includes its end.
    """

    inputs: np.ndarray
    input_lengths: np.ndarray
    targets: np.ndarray
    target_lengths: np.ndarray


def encode(pairs: Sequence[tuple[str, str]], input_steps: int = 0, target_steps: int = 0) -> Encoded:
    """Returns pairs as tokens, in arrays of at least so many steps.

    Raises:
        DataError: for a character that is not in VOCABULARY, or ends targets.

    >>> encode([("<ab", "ba"), ("<c", "c")]).targets.T.tolist()
    [[44, 43, 0], [45, 0, 0]]
    """
    end = VOCABULARY.characters[END]
    for text in (text for pair in pairs for text in pair):
        if end in text:
            raise DataError(f"{text!r} holds the character {end!r}, which ends a sequence; leave it out")
    inputs, input_lengths = _padded([source for source, _ in pairs], input_steps)
    targets, target_lengths = _padded([target + end for _, target in pairs], target_steps)
    return Encoded(inputs, input_lengths, targets, target_lengths)


def _padded(strings: Sequence[str], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns strings as columns of tokens [T, N], T at least `steps`, and their lengths [N]."""
    lengths = np.array([len(s) for s in strings], np.int32)
    numbers = np.full((len(strings), max(steps, lengths.max(initial=0))), END, np.int32)
    numbers[np.arange(numbers.shape[1]) < lengths[:, None]] = VOCABULARY.encode("".join(strings))
    return np.ascontiguousarray(numbers.T), lengths


@dataclass(frozen=True)
class Pairs:
    """Random pairs of an input and its target: a batch is a function of the seed and its number alone.

    Attributes:
        first_year, last_year: the range of the dates.
        reversals: the share of strings to reverse; the rest are dates.
        longest: characters of a string to reverse, at most.
        seed: of the random draws.
        held_out: draw only pairs whose target is held out, or only others.

    >>> Pairs(reversals=0.5, seed=1).draw(0, 3)
    [('August 25, 2064', '2064-08-25'), ('03.10.2089', '2089-10-03'), ('<RKfb5', '5bfKR')]
    """

    first_year: int = 1900
    last_year: int = 2099
    reversals: float = 0.25
    longest: int = 10
    seed: int = 0
    held_out: bool = False

    def draw(self, number: int, count: int) -> list[tuple[str, str]]:
        """Returns `count` pairs (input, target)."""
        rng = np.random.default_rng((self.seed, number, self.held_out))
        reverse = rng.random(count) < self.reversals
        days = rng.integers(len(self._days), size=count)
        spellings, cases = rng.integers(len(SPELLINGS), size=count), rng.integers(len(CASES), size=count)
        return [
            self._string(rng) if reverse[k] else _date(self._days[days[k]], SPELLINGS[spellings[k]], CASES[cases[k]])
            for k in range(count)
        ]

    @property
    def input_steps(self) -> int:
        """S, the greatest length of any input."""
        return max(_LONGEST_DATE, len(REVERSE) + self.longest)

    @property
    def target_steps(self) -> int:
        """T, the greatest length of any target with its end."""
        return max(len("2026-11-20"), self.longest) + 1

    @cached_property
    def _days(self) -> list[date]:
        first, end = (date(year, 1, 1).toordinal() for year in (self.first_year, self.last_year + 1))
        days = map(date.fromordinal, range(first, end))
        return [day for day in days if is_held_out(day.isoformat()) == self.held_out]

    def _string(self, rng: np.random.Generator) -> tuple[str, str]:
        while True:
            text = "".join(ALPHABET[k] for k in rng.integers(len(ALPHABET), size=rng.integers(1, self.longest + 1)))
            if is_held_out(text[::-1]) == self.held_out:
                return REVERSE + text, text[::-1]


def _date(day: date, spelling: str, case: Callable[[str], str]) -> tuple[str, str]:
    return case(spell(day, spelling)), day.isoformat()


_LONGEST_DATE = max(len(spell(date(2000, m, d), s)) for m in range(1, 13) for d in range(20, 28) for s in SPELLINGS)
