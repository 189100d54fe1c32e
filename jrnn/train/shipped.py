"""The configs and data that ship inside the package, by name."""

from __future__ import annotations

from pathlib import Path

from jrnn.errors import near

FOLDER = Path(__file__).parents[1] / "configs"
DEMAND = FOLDER / "data" / "demand.csv"  # the hourly load of the config `forecast`


def config_names() -> list[str]:
    """The names of the configs that ship, in alphabetical order.

    >>> "char_lstm" in config_names()
    True
    """
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_config(given: str | Path) -> Path:
    """The file that is meant: `given` itself where it exists, else the shipped config of that name.

    >>> find_config("char_lstm").name
    'char_lstm.toml'
    """
    path = Path(given)
    if not path.exists() and str(given) in config_names():
        return FOLDER / f"{given}.toml"
    return path


def near_config(path: Path) -> str:
    """What to say of a file that does not exist: a shipped config of nearly that name, or how to list them all."""
    return near(path.stem, config_names()) or "; `jrnn configs` lists the configs that ship"


def describe_config(name: str) -> str:
    """The comment that opens a shipped config, without its first line, which is the command."""
    lines = (FOLDER / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line.removeprefix("# ") for line in lines[1:end])
