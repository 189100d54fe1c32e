"""Time series from CSV files: columns with empty cells, and the times of rows.

Shapes: R rows, W steps of a window, D columns read, B examples.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from jrnn.errors import DataError
from jrnn.files import read_text
from jrnn.files.reading import free
from jrnn.train.tasks.task import Examples, Scaling
from jrnn.train.toml_codec import hint

_EMPTY = ("", "nan", "na", "n/a", "null", "none")  # cells of what was not measured, in lower case
_EQUAL = 0.01  # of the spacing: rows that differ by less are equally spaced


@dataclass(frozen=True)
class Series:
    """The rows that a model reads.

    Attributes:
        inputs: [R, D]; NaN where a cell is empty.
        counts: bool [R], False for rows with an empty cell.
        times: float64 [R], in seconds for dates; None if rows are equally spaced.
        spacing: what `dt` is counted in; None if rows are equally spaced.
    """

    inputs: np.ndarray
    counts: np.ndarray
    times: np.ndarray | None = None
    spacing: float | None = None

    def __getitem__(self, rows: slice) -> Series:
        times = None if self.times is None else self.times[rows]
        return replace(self, inputs=self.inputs[rows], counts=self.counts[rows], times=times)

    def equally_spaced(self) -> Series | None:
        """Returns the series without its times if its rows are equally spaced, else None."""
        if self.times is None:
            return self
        if not _is_equal(np.diff(self.times), self.spacing or 1.0):
            return None
        return replace(self, times=None, spacing=None)

    def scaled(self, scaling: Scaling) -> Series:
        return replace(self, inputs=scaling.apply(self.inputs))

    def at(self, rows: np.ndarray) -> Examples:
        """Returns the windows of these rows [W, B], without targets."""
        mask = None if self.counts.all() else self.counts[rows]
        dt = None if self.times is None else self._since_the_last()[rows]
        return Examples(np.nan_to_num(self.inputs[rows]), None, mask=mask, dt=dt)

    def _since_the_last(self) -> np.ndarray:
        """Returns the time from the last row that counts to each row, float32 [R]; the first has the usual spacing."""
        assert self.times is not None and self.spacing is not None
        numbers = np.where(self.counts, np.arange(len(self.counts)), -1)
        before = np.maximum.accumulate(np.concatenate([[-1], numbers[:-1]]))
        passed = np.where(before >= 0, self.times - self.times[before], self.spacing)
        return (passed / self.spacing).astype(np.float32)


def read_series(
    path: str | Path, names: Sequence[str], time: str | None, spacing: float | None = None
) -> Series:
    """Reads the columns that a model reads, and the times of the rows.

    Args:
        time: the column of times, or None.
        spacing: of the rows that a model was trained on; None: the spacing of these rows, if they are not equally spaced.

    Raises:
        DataError: as `read_columns` does, and for times that do not increase.
    """
    inputs = read_columns(path, names)
    series = Series(inputs, ~np.isnan(inputs).any(axis=1))
    if time is None:
        return series
    (times,) = _read(path, [time], _time).T
    if (steps := np.diff(times)).size and steps.min() <= 0:
        row = int(np.argmin(steps > 0)) + 2
        raise DataError(
            f"{path}: column {time!r} does not increase at row {row} of the data; sort the rows, one for each time"
        )
    usual = float(np.median(steps)) if steps.size else 1.0
    if spacing is None and _is_equal(steps, usual):
        return series
    return replace(series, times=times, spacing=spacing or usual)


def _is_equal(steps: np.ndarray, usual: float) -> bool:
    return bool((np.abs(steps - usual) <= _EQUAL * usual).all())


def times_after(path: str | Path, name: str, count: int, spacing: float | None = None) -> list[str]:
    """Returns the times of the rows after the last one of a file, as the file spells its times.

    Args:
        name: the column of times.
        count: how many rows.
        spacing: of the rows; None: the median spacing of the file's rows.

    Raises:
        DataError: if the file has too few rows to say what their spacing is.
    """
    cells: list[str] = []

    def kept(cell: str) -> float:
        cells.append(cell)
        return _time(cell)

    times = _read(path, [name], kept)[:, 0]
    if spacing is None and len(times) < 2:
        raise DataError(f"{path}: has {len(times)} rows; the times after them need two")
    between = float(np.median(np.diff(times))) if spacing is None else spacing
    return [_later(cells[-1], k * between) for k in range(1, count + 1)]


def _later(cell: str, seconds: float) -> str:
    """Returns a time that is so much later, in the spelling of `cell`.

    >>> _later("2026-11-27 10:30", 1800.0), _later("2026-11-27", 86400.0), _later("7", 0.5)
    ('2026-11-27 11:00', '2026-11-28', '7.5')
    """
    try:
        return np.format_float_positional(round(float(cell) + seconds, 9), trim="-")
    except ValueError:
        date = datetime.fromisoformat(cell) + timedelta(seconds=seconds)
    at_midnight = (date.hour, date.minute, date.second, date.microsecond) == (0, 0, 0, 0)
    if len(cell) <= 10 and at_midnight:
        return date.date().isoformat()
    has_minutes = re.match(r"[0-9]{2}:[0-9]{2}(?!:)", cell[11:]) is not None
    in_minutes = has_minutes and date.second == 0 and date.microsecond == 0
    separator = cell[10] if len(cell) > 10 and cell[10] == " " else "T"
    text = date.isoformat(separator, "minutes" if in_minutes else "auto")
    return text.replace("+00:00", "Z") if cell.endswith("Z") else text


def read_columns(path: str | Path, names: Sequence[str]) -> np.ndarray:
    """Returns columns of a CSV file by name, float64 [R, len(names)]; empty cells are NaN.

    Raises:
        DataError: for a file that is missing or not UTF-8, a column that it lacks, or a cell that is not a number.
    """
    return _read(path, names, _number)


def _read(path: str | Path, names: Sequence[str], value: Callable[[str], float]) -> np.ndarray:
    text = read_text(path, DataError, free(), "; data.path must name a CSV file")
    # Strict, so that a quote that is not closed is an error.
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    numbers = []
    try:
        header = list(map(str.strip, next(rows, [])))
        places = [_place(path, name, header) for name in names]
        for row in rows:
            if any(map(str.strip, row[len(header) :])):
                raise DataError(
                    f"{path}, line {rows.line_num}: has {len(row)} cells, and the first line {len(header)}"
                )
            if row:  # not an empty line
                numbers.append(list(_values(path, rows.line_num, names, row, places, value)))
    except csv.Error as e:
        raise DataError(f"{path}, line {rows.line_num}: {e}; is a quote not closed?") from None
    return np.asarray(numbers, np.float64).reshape(len(numbers), len(names))


def _values(
    path: str | Path,
    line: int,
    names: Sequence[str],
    row: list[str],
    places: Sequence[int],
    value: Callable[[str], float],
) -> Iterator[float]:
    for name, place in zip(names, places):
        cell = row[place].strip() if place < len(row) else ""
        try:
            yield value(cell)
        except ValueError as e:
            raise DataError(
                f"{path}, line {line}: column {name!r} must be {e}, is {cell!r:.80}"
            ) from None


def _number(cell: str) -> float:
    if cell.lower() in _EMPTY:
        return float("nan")
    try:
        number = float(cell)
    except ValueError:
        number = float("inf")
    if np.isinf(number):
        raise ValueError("a number, or empty where nothing was measured")
    return number


def _time(cell: str) -> float:
    """Returns a number, or a date as seconds since 1970; one without a zone is taken as UTC."""
    try:
        number = float(cell)
    except ValueError:
        try:
            date = datetime.fromisoformat(cell)
        except ValueError:
            raise ValueError("a number or a date, as 2026-11-27 or 2026-11-27T10:30") from None
        number = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if not np.isfinite(number):
        raise ValueError("a finite number or a date")
    return number


def _place(path: str | Path, name: str, header: list[str]) -> int:
    """Returns the position of a column."""
    if header.count(name) == 1:
        return header.index(name)
    if name in header:
        raise DataError(
            f"{path}: has {header.count(name)} columns {name!r}; give each a name of its own"
        )
    for mark, what in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(header) == 1 and mark in header[0]:
            raise DataError(
                f"{path}: its cells are separated by {what}; a CSV file has commas: convert it"
            )
    raise DataError(f"{path}: has no column {name!r}{hint(name, [h[:40] for h in header[:40]])}")
