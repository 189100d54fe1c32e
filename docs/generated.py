"""What pages of docs/ hold that is made from the code and from records of measurements. It stands in the pages themselves.

    .venv/bin/python docs/generated.py           writes it into the pages, anew
    .venv/bin/python docs/generated.py --check   ends with status 1 where a page is not current

A page has it between two comments, of which the first says what to make, as `<!-- keys: text_streams.TextConfig -->` does.
"""

import argparse
import importlib
import re
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import operator_tables
import tables

from jrnn.cli.parser import make_parser
from jrnn.train.config import config_names, describe_config, keys_of

DOCS = Path(__file__).parent
END = "<!-- end of what docs/generated.py writes -->"
PART = re.compile(rf"^<!-- (\w+)(?:: ([\w.]+))? -->\n(.*?)^{re.escape(END)}$", re.M | re.S)


def commands(_):
    """The options of every command, read off the parser."""
    (choices,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    lines = []
    for name, parser in choices.choices.items():
        about = f"{parser.description[:1].upper()}{parser.description[1:].rstrip('.')}."
        lines += [f"## jrnn {name}", "", about, "", "| argument | what |", "|---|---|"]
        lines += [_option(action) for action in parser._actions if action.dest != "help"]
        lines.append("")
    return "\n".join(lines)


def _option(action):
    """A row of the table of a command."""
    choices = "|".join(action.choices) if action.choices else action.dest.upper()
    shown = ", ".join(action.option_strings) or action.dest
    takes = ""
    if action.nargs != 0 and action.option_strings:
        takes = f" {action.metavar or choices}"
    text = (action.help or "").replace("|", "\\|") % vars(action)
    return f"| `{shown}{takes}` | {text} |"


def keys(path):
    """The keys of a table of a configuration: the fields of the dataclass that a part of docs/training.md names."""
    module, _, name = path.rpartition(".")
    rows = ["| key | default | |", "|---|---|---|"]
    for key in keys_of(getattr(importlib.import_module(f"jrnn.train.{module}"), name)):
        default = "none" if key.default is None else f"`{key.default}`"
        choices = ", ".join(f"`{c}`" for c in key.choices)
        text = "; ".join(filter(None, [choices, key.meaning]))
        rows.append(f"| `{key.name}` | {default} | {text} |")
    return "\n".join(rows)


def properties(path):
    """What `check_layer`, `check_kernel` or `check_model` checks, as the code says it."""
    module, _, name = path.partition(".")
    table = getattr(importlib.import_module(f"jrnn.testing.{module}"), name)
    rows = [f"| {property.name} | {property.rule} |" for property in table.values()]
    return "\n".join(["| property | what must hold |", "|---|---|", *rows])


def configs(_):
    """The configurations that ship, as `jrnn configs` prints them."""
    rows = [f"| `{name}` | {describe_config(name)} |" for name in config_names()]
    return "\n".join(["| name | what it trains, time and result |", "|---|---|", *rows])


def clone(_):
    """How to get a clone, where pyproject.toml names the repository."""
    text = (DOCS.parent / "pyproject.toml").read_text(encoding="utf-8")
    urls = tomllib.loads(text)["project"].get("urls", {})
    if "Repository" not in urls:
        return ""
    return f"```text\ngit clone {urls['Repository']} jrnn\ncd jrnn\n```"


MADE = {
    "clone": clone,
    "commands": commands,
    "configs": configs,
    "keys": keys,
    "measured": tables.render,
    "operators": lambda _: operator_tables.render(),
    "properties": properties,
}


def current(text):
    """The text of a page with everything in it made anew."""

    def made(part):
        contents = MADE[part[1]](part[2]).strip()
        first = part[0].partition("\n")[0]
        return "\n\n".join(filter(None, [first, contents, END]))

    return PART.sub(made, text)


def pages():
    return sorted(DOCS.rglob("*.md"))


def main(check):
    """Writes the pages that are not current, or only names them; returns how many there are."""
    count = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = current(text)
        if new != text:
            count += 1
            print(f"{page}: {'is not current' if check else 'written'}")
            if not check:
                page.write_text(new, encoding="utf-8")
    return count


if __name__ == "__main__":
    check = "--check" in sys.argv
    sys.exit(1 if main(check) and check else 0)
