"""The keys of a configuration as text: what `jrnn configs --keys` prints and the page of the keys lists."""

from __future__ import annotations

import ast
import inspect
import io
import json
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass

from jrnn.train.config import Config
from jrnn.train.tasks import KINDS, TaskKind


@dataclass(frozen=True)
class Key:
    """A key of a table: its name, its default as TOML has it (None: no default), its choices and its meaning."""

    name: str
    default: str | None
    choices: tuple[str, ...]
    meaning: str


def keys_of(table: type) -> list[Key]:
    """Returns the keys of a table, which are the fields of its dataclass; their comments say what they mean.

    >>> from jrnn.train.config import GradientConfig
    >>> [key.name for key in keys_of(GradientConfig)]
    ['source', 'check', 'check_every']
    """
    meanings = {k: text for kind in table.__mro__ if is_dataclass(kind) for k, text in _comments(kind).items() if text}
    types, keys = typing.get_type_hints(table), []
    for field in fields(table):
        kind = types[field.name]
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        default = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
        text = None if default is None else json.dumps(default)
        keys.append(Key(field.name, text, choices, meanings.get(field.name, "")))
    return [key for key in keys if key.name != "kind"]


def _comments(table: type) -> dict[str, str]:
    """Returns the comment of each field of a dataclass."""
    source = textwrap.dedent(inspect.getsource(table))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = {t.start[0]: t.string.strip("# ") for t in tokens if t.type == tokenize.COMMENT and "fmt:" not in t.string}
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    return {
        node.target.id: " ".join(t for k, t in texts.items() if node.lineno <= k <= node.end_lineno)
        for node in body
        if isinstance(node, ast.AnnAssign)
    }


def reference_of_keys(config: Config | None = None) -> str:
    """Returns the tables that a configuration has, or those of all tasks, with a line for each key."""
    if config is None:
        own = [(table, title) for name, kind in KINDS.items() for table, title in _tables_of(name, kind)]
    else:
        own = [(type(table), f"[{name}]") for name in ("data", "model", "sample") if (table := getattr(config, name))]
    titles: dict[type, str] = {}
    for table, title in own:
        titles[table] = f"{titles[table]}, {title.rpartition(' ')[2]}" if table in titles else title
    for name in ("optimizer", "gradient", "train"):
        titles[type(getattr(config or Config(), name))] = f"[{name}]"
    return "\n\n".join("\n".join(_lines(title, table)) for table, title in titles.items())


def _tables_of(name: str, kind: TaskKind) -> Iterator[tuple[type, str]]:
    """Yields the tables of a task with their titles, which end with the task's name."""
    yield kind.data, f"[data] of {name}"
    for model, table in kind.models.items():
        yield table, f'[model] with kind = "{model}", of {name}'
    if kind.sample is not None:
        yield kind.sample, f"[sample] of {name}"


def _lines(title: str, table: type) -> Iterator[str]:
    yield title
    for key in keys_of(table):
        said = "; ".join(filter(None, [" | ".join(key.choices), key.meaning]))
        yield textwrap.fill(
            f"  {key.name} = {key.default or '(none)'}" + (f"  # {said}" if said else ""),
            118,
            subsequent_indent=" " * 6,
        )
