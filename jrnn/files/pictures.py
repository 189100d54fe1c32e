"""Pictures by matplotlib, written in one step."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jrnn.errors import UsageError, needs_extra
from jrnn.files.writing import write_whole

SUFFIXES = (".png", ".svg", ".pdf")


@contextmanager
def picture(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Gives the `with` block a matplotlib figure of a size in inches, and saves it to `path` afterwards.

    Raises:
        UsageError: matplotlib is not installed, the name of the file has an unknown suffix, or it cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(needs_extra(f"{path}: a picture", "plot")) from None
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: the name of a picture must end in one of {', '.join(SUFFIXES)}")
    figure = Figure(figsize=size, layout="constrained")
    yield figure
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=path.suffix[1:].lower())
    write_whole(path, drawn.getvalue(), UsageError)
