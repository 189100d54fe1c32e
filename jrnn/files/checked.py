"""JSON of strangers: not too deep, no key twice, and each value of the type and bounds that a field declares."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from jrnn.errors import ErrorType, near
from jrnn.files.reading import LARGEST, PathName, read_text

T = TypeVar("T")

DEEPEST = 100  # lists and objects within each other
_NAMES = {
    int: "an integer", float: "a number", str: "a string", bool: "true or false", dict: "a table", list: "a list",
    tuple: "a list", type(None): "nothing",
}  # fmt: skip


@dataclass(frozen=True)
class AtLeast:
    """Bounds in the annotation of a field, as in `Annotated[int, AtLeast(1)]`.

    Without `most`, an integer has 32 bits, and a number is finite; with `most` of infinity, it may be infinite.
    """

    least: float
    most: float | None = None


def parse_json(text: str | bytes, where: str, error: ErrorType, *, finite: bool = True) -> Any:
    """Returns the value of a JSON text.

    Args:
        text: JSON; bytes are UTF-8.
        where: what messages begin with.
        error: the type of errors.
        finite: whether Infinity, NaN and numbers as large as 1e999 are errors.

    Raises:
        JrnnError: of type `error`, for what is not JSON, deeper than `DEEPEST`, an object with a key twice, a number of
            thousands of digits, one that is not finite, and half of a surrogate pair.

    >>> from jrnn.errors import JrnnError
    >>> parse_json('{"a": [1, 2.5]}', "example", JrnnError)
    {'a': [1, 2.5]}
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8-sig")
        number = _finite if finite else float
        value = json.loads(text, object_pairs_hook=_once, parse_float=number, parse_constant=number)
        level = [value]
        for _ in range(DEEPEST):
            level = _parts(level)
        if level:
            raise RecursionError
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise error(
            f"{where}: is not JSON that is read: lists and objects are nested more than {DEEPEST} deep"
        ) from None
    except UnicodeEncodeError:
        raise error(f"{where}: is not JSON: a string has half of a surrogate pair") from None
    except ValueError as e:
        # json's own error, bytes that are not UTF-8, or a number of thousands of digits
        raise error(f"{where}: is not JSON: {e}") from None
    return value


def _parts(values: list[Any]) -> list[Any]:
    """Returns what the lists and objects among values hold."""
    parts: list[Any] = []
    for value in values:
        if isinstance(value, dict):
            parts += value.values()
        elif isinstance(value, list):
            parts += value
    return parts


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in keys if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r:.80} twice")
    return keys


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.80} is not a finite number")
    return value


def read_json(
    path: PathName,
    error: ErrorType,
    *,
    finite: bool = True,
    most: int = LARGEST,
) -> dict[str, Any]:
    """Returns the object of a JSON file; raises `error` as `open_file` and `parse_json` do, and for another value."""
    value = parse_json(read_text(path, error, most), str(path), error, finite=finite)
    if not isinstance(value, dict):
        raise error(f"{path}: must hold a JSON object, holds {_described(value)}")
    return value


def record(cls: type[T], given: Any, where: str, error: ErrorType) -> T:
    """Returns a dataclass made from an object, each field `checked`; keys that are no fields are left out.

    >>> from jrnn.errors import JrnnError
    >>> @dataclass
    ... class Size:
    ...     width: int
    >>> record(Size, {"width": 3, "color": "red"}, "example", JrnnError)
    Size(width=3)
    """
    if not isinstance(given, Mapping):
        raise error(f"{where}: must be an object, is {_described(given)}")
    kinds = typing.get_type_hints(cls, include_extras=True)
    values = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in given:
            values[field.name] = checked(
                kinds[field.name], given[field.name], f"{where}: {field.name}", error
            )
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise error(f"{where}: lacks {field.name!r}")
    return cls(**values)


def checked(kind: Any, value: Any, where: str, error: ErrorType) -> Any:
    """Returns a value of JSON or TOML as what an annotation says, or raises `error`.

    Args:
        kind: int, float, str, bool, dict, a list or tuple of kinds, a dataclass, a `Literal`, a union, or Any; `Annotated`
            with `AtLeast` has bounds. An integer is also a float. A list stands for a tuple.

    >>> from jrnn.errors import JrnnError
    >>> checked(tuple[int, ...], [1, 2], "sizes", JrnnError)
    (1, 2)
    """
    bounds = AtLeast(-math.inf)
    if typing.get_origin(kind) is typing.Annotated:
        kind, *extras = typing.get_args(kind)
        bounds = next((b for b in extras if isinstance(b, AtLeast)), bounds)
    origin = typing.get_origin(kind)
    choices = typing.get_args(kind)
    if kind is Any:
        return value
    if origin is typing.Literal:
        if not _fits(kind, value):
            nearest = near(value, choices) if isinstance(value, str) else ""
            raise error(
                f"{where} must be {' or '.join(map(repr, choices))}, is {_described(value)}{nearest}"
            )
        return value
    if origin in (types.UnionType, typing.Union):
        kinds = [k for k in choices if _fits(k, value)]
        if not kinds:
            names = " or ".join(_named(k) for k in choices if k is not type(None))
            raise error(f"{where} must be {names}, is {_described(value)}")
        return checked(kinds[0], value, where, error)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return record(kind, value, where, error)
    if not _fits(kind, value):
        raise error(f"{where} must be {_named(kind)}, is {_described(value)}")
    if origin in (list, tuple):
        if not (each := choices[-1] is ... or origin is list) and len(value) != len(choices):
            raise error(f"{where} must have {len(choices)} elements, has {len(value)}")
        parts = zip([choices[0]] * len(value) if each else choices, value)
        return origin(checked(k, one, f"{where}[{n}]", error) for n, (k, one) in enumerate(parts))
    return _within(kind, value, bounds, where, error) if kind in (int, float) else value


def plain(value: Any) -> Any:
    """A scalar of numpy or JAX as a Python number or bool; anything else unchanged.

    >>> import numpy as np
    >>> plain(np.int32(3)), plain(np.asarray(True)), plain("x")
    (3, True, 'x')
    """
    kind = getattr(getattr(value, "dtype", None), "kind", "O")  # the dtypes of keys have no kind
    return value.item() if getattr(value, "ndim", None) == 0 and kind in "biuf" else value


def _plain(kind: Any) -> Any:
    kind = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
    return typing.get_origin(kind) or kind


def _named(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    return _NAMES.get(_plain(kind), "a table")


def _fits(kind: Any, value: Any) -> bool:
    if typing.get_origin(kind) is typing.Literal:
        return any(type(value) is type(one) and value == one for one in typing.get_args(kind))
    kind = _plain(kind)
    if dataclasses.is_dataclass(kind):
        return isinstance(value, Mapping)
    given = list if type(value) is tuple else type(value)
    wanted = list if kind is tuple else kind
    return kind is Any or given is wanted or (kind is float and given is int)


def _within(kind: type, value: Any, bounds: AtLeast, where: str, error: ErrorType) -> Any:
    most = math.nan if bounds.most is None else bounds.most
    greatest = 2**32 - 1 if bounds.most is None else min(bounds.most, 2**63)
    if type(value) is int and not -(2**31) <= value <= greatest:
        rule = "have 32 bits" if bounds.most is None else f"be at most {most}"
        raise error(f"{where} must {rule}, is {value!r:.40}")
    value = kind(value)
    if not math.isfinite(value) and value != most:
        raise error(f"{where} must be a finite number, is {value}")
    if value < bounds.least or value > most:
        rule = f"at least {bounds.least}" if value < bounds.least else f"at most {most}"
        raise error(f"{where} must be {rule}, is {value}")
    return value


def _described(value: Any) -> str:
    return f"{value!r:.200}"
