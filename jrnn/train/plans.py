"""The plans of a run: how its loops run, where that was chosen by measurement. They are in plans.json of the run directory.

A run and its continuation take the same plans, so that a continued run equals an uninterrupted one to the bit: what counts
is the file in the run directory. A new run copies the plans of the environment variable JRNN_PLANS into it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jrnn.errors import ConfigError
from jrnn.files import kind_of
from jrnn.loops.costs import tuned
from jrnn.loops.costs.tuned import Table

# Measures the loops of a compiled function and writes the file: the path, the function, its arguments and its keywords.
Tuner = Callable[[Path, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]


def check(devices: int) -> None:
    """Raises ConfigError if the loops of a run cannot be measured."""
    if devices > 1:
        raise ConfigError(
            f"the loops of a run are measured on one device, and this run has {devices}; leave --tune out, or set "
            "train.devices to 1"
        )


def table_of(path: Path, step: int, devices: int) -> Table:
    """Returns the plans of a run.

    Args:
        path: the file of the run.
        step: the steps that the run has done. A run that has begun without plans goes on without.
        devices: several ones take no plans, because all processes must compile the same program.

    Raises:
        ScanError: if the file is damaged.
    """
    if devices > 1:
        return Table()
    if kind_of(path):
        return Table.read(path)
    table = Table() if step else tuned.current()
    if table.taken:
        tuned.write(path, {key: {"take": name} for key, name in table.taken})
    return table
