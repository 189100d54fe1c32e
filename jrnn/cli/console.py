"""Where tables are printed."""

import sys

from rich.console import Console


def wide_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140)  # tables stay whole in a file
