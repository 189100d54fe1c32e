"""TOML into frozen dataclasses, and back: unknown keys are errors, values are checked against the annotations.

The dataclasses define the file: a nested dataclass is a table, a `Literal` a choice, `dict` a free table, `list[str]` a
list. If the dataclass of a table depends on what the file says, `choose(given)` of the outer dataclass returns it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from jrnn.errors import ConfigError, near
from jrnn.files import AtLeast, checked, read_text

Tables = dict[str, Any]

T = TypeVar("T")

# The configs that ship: in a wheel `jrnn/configs`, in a clone `configs` next to `jrnn`.
CONFIGS = next(p / "configs" for p in Path(__file__).parents[1:3] if (p / "configs").is_dir())


def require(true: bool, rule: str, value: Any) -> None:
    """Raises ConfigError with the rule and the value that breaks it, unless `true`."""
    if not true:
        raise ConfigError(f"{rule}, is {value!r:.200}")


def hint(name: Any, known: Iterable[str]) -> str:
    """Returns the end of an error message: the known names that are near `name`, or else all of them."""
    return (near(name, known) if isinstance(name, str) else "") or f"; known are {', '.join(known)}"


Positive = Annotated[int, AtLeast(1)]
Natural = Annotated[int, AtLeast(0)]
NonNegative = Annotated[float, AtLeast(0)]


def check_bounds(table: str, config: Any) -> None:
    """Raises ConfigError if a field of the table's dataclass is below the bound in its annotation."""
    for name, least in _bounds(type(config)).items():
        require(
            getattr(config, name) >= least,
            f"{table}.{name} must be at least {least}",
            getattr(config, name),
        )


@functools.cache
def _bounds(cls: type) -> dict[str, int]:
    """Returns the least value of each field whose annotation has one."""
    bounds = {}
    for name, annotation in typing.get_type_hints(cls, include_extras=True).items():
        for bound in getattr(annotation, "__metadata__", ()):
            if isinstance(bound, AtLeast):
                bounds[name] = bound.least
    return bounds


def imply_file(config: Any, what: str) -> None:
    """Sets the `source` of a table [data] to "file" if it has a path; raises ConfigError for "file" without a path."""
    if config.path is not None:
        object.__setattr__(config, "source", "file")
    elif config.source == "file":
        raise ConfigError(f'data.source = "file" needs data.path, the path of {what}')


def read_toml(path: Path, hint: str = "") -> Tables:
    """Returns the tables of a TOML file; raises ConfigError if it is missing (with the hint) or is not TOML."""
    text = read_text(path, ConfigError, missing=hint)
    try:
        return tomllib.loads(text)
    except ValueError as e:  # tomllib's own error, or a number of thousands of digits
        raise ConfigError(f"{path}: is not TOML: {e}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is not TOML: nested too deeply") from None


def override(tables: Tables, assignments: Iterable[str]) -> Tables:
    """Returns the tables with `a.b=value` assignments applied; a value that is not TOML is taken as a string.

    Numbers and booleans may be written as in Python, too.

    >>> override({"train": {"steps": 10}}, ["train.steps=1e3", "data.path=a.txt", "optimizer.ema=.9"])
    {'train': {'steps': 1000}, 'data': {'path': 'a.txt'}, 'optimizer': {'ema': 0.9}}
    """
    changed = json.loads(json.dumps(tables, default=str))  # a deep copy of plain tables
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        keys = name.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(
                f"--set {assignment}: must be written KEY=VALUE, as in --set train.steps=100"
            )
        table = changed
        for key in keys[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {assignment}: {key!r} is a value, not a table")
        table[keys[-1]] = _value(text.strip())
    return changed


def _value(text: str) -> Any:
    """Returns a value as TOML has it, or as Python spells numbers and booleans; else the text."""
    for spelling in (text, _SPELLED.sub(_in_toml, text)):
        try:
            value = tomllib.loads(f"value = {spelling}")["value"]
        except (ValueError, RecursionError):
            continue
        # An integer is a float, too: so 1e4 steps are as good as 10000.
        is_whole = isinstance(value, float) and abs(value) < 2**53 and value.is_integer()
        return int(value) if is_whole and _POWER.fullmatch(text) else value
    return text


_STRING = r'"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\])*"|' + r"'''.*?'''|'[^']*'"
_POWER = re.compile(r"[+-]?[0-9]+[eE]\+?[0-9]+")
# Strings, which stay; True and False; and numbers that lack digits before or after their point.
_SPELLED = re.compile(
    _STRING + r"|\b(?:True|False)\b|(?<![\w.])[0-9]*\.[0-9]*(?:[eE][+-]?[0-9]+)?(?![\w.])",
    re.DOTALL,
)
_OPENS = re.compile(_STRING, re.DOTALL)


def _in_toml(found: re.Match[str]) -> str:
    """Returns what Python spells otherwise as TOML has it."""
    text = found[0]
    if text in ("True", "False"):
        return text.lower()
    number = re.fullmatch(r"([0-9]*)\.([0-9]*)(.*)", text, re.DOTALL)
    if number is None or not (number[1] or number[2]) or text[0] in "\"'":
        return text
    return f"{number[1] or 0}.{number[2] or 0}{number[3]}"


def split_values(text: str) -> list[str]:
    """Returns the values that commas separate, outside of lists, tables and quotes.

    >>> split_values('1, [2, 3], {a = 4, b = 5}, "6, 7"')
    ['1', '[2, 3]', '{a = 4, b = 5}', '"6, 7"']

    Raises:
        ConfigError: if a list, a table or a quote is not closed.
    """
    values = [""]
    open_brackets = 0
    place = 0
    while place < len(text):
        char = text[place]
        # A quote begins a string only where a value begins: not in it's.
        begins = values[-1].rstrip()[-1:] in ("", "[", "{", ",", "=")
        string = _OPENS.match(text, place) if begins else None
        if string is None and begins and char in "\"'":
            raise ConfigError(f"{text}: a quote is not closed")
        open_brackets += (char in "[{") - (char in "]}") if string is None else 0
        if char == "," and open_brackets == 0:
            values.append("")
        else:
            values[-1] += char if string is None else string[0]
        place += 1 if string is None else len(string[0])
        if open_brackets < 0:
            break
    if open_brackets:
        raise ConfigError(f"{text}: a list or a table is not closed, or not opened")
    return list(map(str.strip, values))


def decode(cls: type[T], tables: Tables, where: str, prefix: str = "") -> T:
    """Returns a dataclass made from tables.

    Args:
        cls: a frozen dataclass whose fields have defaults; its `__post_init__` may raise ConfigError.
        tables: the contents of the file.
        where: the file's name, for messages.
        prefix: the name of the table and a dot, for messages.

    Raises:
        ConfigError: for an unknown key (with the near name), a value of another type, or an impossible value.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    annotations = typing.get_type_hints(cls)
    values = {}
    if hasattr(cls, "choose"):
        try:
            annotations |= (chosen := cls.choose(tables))
        except ConfigError as e:
            raise e.at(where) from None
        fields = {name: f for name, f in fields.items() if chosen.get(name, f) is not None}
    for key, value in tables.items():
        full = prefix + key
        if key not in fields:
            raise ConfigError(
                f"{where}: unknown key {full!r:.200}{_meant(key, annotations, fields)}"
            )
        kind = annotations[key]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: {full} must be a table [{full}], is {value!r:.200}")
            values[key] = decode(kind, value, where, full + ".")
        else:
            values[key] = checked(kind, value, f"{where}: {full}", ConfigError)
    try:
        return cls(**values)
    except ConfigError as e:
        raise e.at(where) from None


def _meant(key: str, annotations: Tables, fields: Iterable[str]) -> str:
    """Returns how the message about an unknown key ends: with the tables that have such a key, or with near keys."""
    inner = []
    for table, kind in annotations.items():
        if dataclasses.is_dataclass(kind) and key in {f.name for f in dataclasses.fields(kind)}:
            inner.append(repr(f"{table}.{key}"))
    return f"; did you mean {' or '.join(inner)}?" if inner else hint(key, fields)


def encode(config: Any) -> str:
    """Returns TOML that `decode` reads back to an equal dataclass; fields that are None are left out."""
    return _encode(dataclasses.asdict(config), "").lstrip()


def _encode(table: Tables, name: str) -> str:
    text = ""
    inner = ""  # the tables in the table, which come last
    for key, value in table.items():
        if isinstance(value, Mapping):
            inner += _encode(value, f"{name}.{key}" if name else key)
        elif value is not None:
            text += f"{key} = {_scalar(value)}\n"
    if name and (text or not table):
        text = f"\n[{name}]\n{text}"
    return text + inner


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    # JSON's strings, booleans, integers and lists are also TOML's, once DEL and non-ASCII characters stay as they are.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
