"""Packages whose names and modules load when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def attributes(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package.

    Args:
        package: its name.
        homes: module, relative to the package -> the names in it that the package has too.

    >>> load, names = attributes("jrnn", {"errors": ["JrnnError"]})
    >>> load("JrnnError").__module__, load("version").__name__, "JrnnError" in names()
    ('jrnn.errors', 'jrnn.version', True)
    """
    module_of = {name: f"{package}.{module}" for module, names in homes.items() for name in names}

    def load(name: str) -> Any:
        if name in module_of:
            value = getattr(import_module(module_of[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        if name.startswith("__") or find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(f"{package}.{name}")

    return load, lambda: sorted(
        {*module_of, *(name for name in vars(sys.modules[package]) if name.startswith("__"))}
    )
