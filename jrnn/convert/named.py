"""Loads objects named as MODULE:NAME, where MODULE is a module's dotted name or the path of a Python file.

Loading runs the module. The logger `jrnn.imports` says so before, and `jrnn` on the command line prints it.
"""

import importlib
import importlib.util
import logging
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from jrnn.errors import ErrorType, near

# By path and time of modification, so that a class that two names refer to is loaded once.
_FILES: dict[tuple[Path, int], ModuleType] = {}
_OWN: set[str] = set()  # the files of all modules that were loaded by name
_HERE = str(Path(__file__).parents[1])  # the package


def load_named(target: str, error: ErrorType, what: str = "NAME") -> Any:
    """The object that `target`, MODULE:NAME, names. Runs the module's code.

    Args:
        target: as the user wrote it.
        error: the type of error to raise if the module does not exist, raises an error, ends the process, or lacks the name.
        what: the word for NAME in messages.

    >>> from jrnn.errors import JrnnError
    >>> load_named("math:floor", JrnnError)(2.5)
    2
    """
    module_name, colon, name = target.rpartition(":")
    if not colon or not module_name or not name:
        raise error(f"{target!r} must be MODULE:{what}, as in my_models:make or my_models.py:make")
    path = Path(module_name)
    if path.suffix == ".py":
        module = _of_file(path, error)
    else:
        module = _imported(module_name, target, error)
    if not hasattr(module, name):
        raise error(f"{module_name} has no {what.lower()} {name!r}{near(name, vars(module))}")
    return getattr(module, name)


def _of_file(path: Path, error: ErrorType) -> ModuleType:
    if not path.is_file():
        raise error(f"{path}: no such file")
    key = path.resolve(), path.stat().st_mtime_ns
    if key not in _FILES:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)  # dataclasses and flax look their module up
        _search(path.resolve().parent)  # for the files next to it, which it may import
        _say(str(path.absolute()))
        try:
            spec.loader.exec_module(module)
        except BaseException as e:
            if sys.modules.get(path.stem) is module:
                del sys.modules[path.stem]
            if isinstance(e, KeyboardInterrupt):
                raise
            raise error(f"{path}: cannot be loaded: {described(e)}") from e
        _FILES[key] = module
    return _FILES[key]


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _say(file: str) -> None:
    _OWN.add(file)
    logging.getLogger("jrnn.imports").info("imports %s", file)


def described(e: BaseException) -> str:
    """An error of a user's module in one line, with the place in a module that was loaded by name, if it is known."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if f.filename in _OWN]
    place = f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""
    first_line = str(e).strip().partition("\n")[0]
    return f"{place}{type(e).__name__}: {first_line:.500}"


def is_own(e: BaseException) -> bool:
    """Whether a module that was loaded by name raised an error, itself or in what it called, and not jrnn."""
    files = [f.filename for f in traceback.extract_tb(e.__traceback__)]
    own = max((k for k, file in enumerate(files) if file in _OWN), default=-1)
    return own >= 0 and not any(file.startswith(_HERE) for file in files[own:])


def _imported(name: str, target: str, error: ErrorType) -> ModuleType:
    if "" not in sys.path:
        _search(Path.cwd())  # as `python -m` does; an installed command does not search this folder
    try:
        spec = None if name in sys.modules else importlib.util.find_spec(name.partition(".")[0])
        if spec is not None:
            _say(spec.origin or name)
        module = importlib.import_module(name)
        _OWN.add(str(module.__file__))
        return module
    except ModuleNotFoundError as e:
        raise error(f"{target}: {e}; give the path of a .py file, or install the module") from None
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt):
            raise
        raise error(f"{target}: cannot be loaded: {described(e)}") from e


def target_in(target: str, folder: Path) -> str:
    """Returns the target with the path of a Python file in `folder` if MODULE is there, and not in the working directory.

    Other targets, such as the names of installed modules, are returned as they are.
    """
    module, colon, name = target.rpartition(":")
    if not colon or not module:
        return target
    is_file = module.endswith(".py")
    path = Path(module) if is_file else Path(*module.split(".")).with_suffix(".py")
    if path.exists() or not (folder / path).is_file():
        return target
    if not is_file and importlib.util.find_spec(module.partition(".")[0]) is not None:
        return target
    return f"{folder / path}:{name}"


def from_the_root(target: str) -> str:
    """The same target with an absolute path if MODULE is a Python file, so that it is valid in any working directory.

    >>> from_the_root("my_package.tasks:TASK")
    'my_package.tasks:TASK'
    """
    module_name, colon, name = target.rpartition(":")
    if colon and module_name.endswith(".py"):
        return f"{Path(module_name).absolute()}:{name}"
    return target
