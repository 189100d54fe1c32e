"""Objects named as MODULE:NAME, in an importable module or a Python file, whose code is run."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from jrnn.errors import JrnnError, near

_FILES: dict[
    tuple[Path, int], ModuleType
] = {}  # by path and time of change: a class must be one class wherever it is named


def load_named(target: str, error: type[JrnnError], what: str = "NAME") -> Any:
    """What `MODULE:NAME` names, where MODULE is a module's dotted name or the path of a Python file.

    Args:
        target: as the user wrote it.
        error: the type of error to raise.
        what: the word for NAME in messages.

    Raises:
        JrnnError: of type `error`, for a module that is not there or lacks the name.

    >>> load_named("math:floor", JrnnError)(2.5)
    2
    """
    module_name, colon, name = target.rpartition(":")
    if not colon or not module_name or not name:
        raise error(f"{target!r} must be MODULE:{what}, as in my_models:make or my_models.py:make")
    path = Path(module_name)
    module = _of_file(path, error) if path.suffix == ".py" else _imported(module_name, target, error)
    if not hasattr(module, name):
        raise error(f"{module_name} has no {what.lower()} {name!r}{near(name, vars(module))}")
    return getattr(module, name)


def _of_file(path: Path, error: type[JrnnError]) -> ModuleType:
    if not path.is_file():
        raise error(f"{path}: no such file")
    key = path.resolve(), path.stat().st_mtime_ns
    if key not in _FILES:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)  # dataclasses and flax look their module up
        spec.loader.exec_module(module)
        _FILES[key] = module
    return _FILES[key]


def _imported(name: str, target: str, error: type[JrnnError]) -> ModuleType:
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(here)  # as with `python -m`: an installed command does not look there
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        raise error(f"{target}: {e}; give the path of a .py file, or install the module") from None


def from_the_root(target: str) -> str:
    """The same name with the path of a Python file from the root, so that it holds in any working directory.

    >>> from_the_root("my_package.tasks:TASK")
    'my_package.tasks:TASK'
    """
    module_name, colon, name = target.rpartition(":")
    return f"{Path(module_name).absolute()}:{name}" if colon and module_name.endswith(".py") else target
