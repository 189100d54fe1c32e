"""The target of `jrnn convert`: `MODULE:FACTORY` names a function without arguments that returns what is to be converted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jrnn.convert.from_jax import from_jax
from jrnn.convert.package import INIT, PREDICT, Package
from jrnn.errors import ConversionError
from jrnn.ir import Net
from jrnn.named import load_named
from jrnn.proto import read_net


def from_factory(target: str) -> Package:
    """The package of what `MODULE:FACTORY` returns: `(fn, args)` or `(fn, args, params)`, the arguments of `from_jax`.

    MODULE is a module's dotted name or the path of a Python file. Running it runs its code.

    Raises:
        ConversionError: for a module or factory that is not there, a factory that returns something else, and as
            `from_jax` does.
    """
    fn, args, params = example_of(target, load_function(target)())
    return from_jax(fn, *args, params=params)


def example_of(target: str, found: Any) -> tuple[Any, tuple[Any, ...], Any]:
    """What a factory returned as (fn, args, params); ConversionError where it returned something else."""
    if not isinstance(found, tuple) or len(found) not in (2, 3) or not isinstance(found[1], (tuple, list)):
        raise ConversionError(
            f"{target} returns a {type(found).__name__}; it must return (fn, args) or (fn, args, params), where args is a "
            "tuple of example arrays"
        )
    fn, args, params = (*found, None)[:3]
    return fn, tuple(args), params


def load_function(target: str) -> Callable[..., Any]:
    """The function that `MODULE:FUNCTION` names; MODULE is a module's dotted name or the path of a Python file.

    Raises:
        ConversionError: for a module or function that is not there.
    """
    found = load_named(target, ConversionError, "FUNCTION")
    if not callable(found):
        raise ConversionError(f"{target} is no function but a {type(found).__name__}")
    return found


def read_nets(path: str | Path, init: str | Path | None = None) -> Package:
    """The package in a folder, or the net in a file, with the net that makes its weights."""
    path = Path(path)
    if path.is_dir():
        if init is not None:
            raise ConversionError(
                f"{path} is a folder, whose {INIT} makes the weights; give {path / PREDICT} with another"
            )
        return Package.load(path)
    return Package(read_net(Path(init)) if init is not None else Net("init"), read_net(path))
