"""Tables in the documentation that list options, arguments and names say what the code has, and nothing else."""

import argparse
import inspect
import json
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from jrnn import interop, nn, testing
from jrnn.cli.parser import make_parser
from jrnn.nets import cells
from jrnn.nets.cells.layer_stacks import AttentionLayer, Layers
from jrnn.testing.gradients.report import BlobAgreement, GradientReport, table_of

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}


def rows(page, head):
    """The cells of a table's rows, by the first cell of its head."""
    lines = PAGES[page].splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith(f"| {head} |"))
    end = next(k for k in range(start, len(lines)) if not lines[k].startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[start + 2 : end]]


def written(parameter):
    """A parameter as the tables write it."""
    value = parameter.default
    if value is parameter.empty:
        return parameter.name
    text = json.dumps(value) if isinstance(value, str) else "float32" if value is jnp.float32 else repr(value)
    return f"{parameter.name}={text}"


def test_the_arguments_of_modules():
    listed = [a for first, *_ in rows("nn.md", "argument") for a in first.strip("`").split(", ")]
    taken = [p for name in ("RNN", "LSTM", "GRU") for p in inspect.signature(getattr(nn, name)).parameters.values()]
    assert sorted(listed) == sorted({written(p) for p in taken})


def test_the_functions_for_weights():
    listed = {}
    for _, functions, _ in rows("nn.md", "system"):
        listed |= dict(re.findall(r"`(\w+)\((.*?)\)`", functions))
    assert sorted(listed) == sorted(n for n in interop.__all__ if n.startswith(("from_", "to_", "load_", "save_")))
    for name, arguments in listed.items():
        parameters = list(inspect.signature(getattr(interop, name)).parameters.values())
        given = arguments.split(", ")
        for parameter, text in zip(parameters, given):
            assert text in (parameter.name, written(parameter)), name
        assert all(p.default is not p.empty for p in parameters[len(given) :]), f"{name} needs more than is listed"


def test_the_columns_of_a_check():
    blob = BlobAgreement("x", (1,), 0.0, 0.0, 1, (0,), (1.0, 1.0, 1.0), True, "", 0.0, 0.0)
    shown = [column.header for column in table_of(GradientReport(1.0, (blob,), 1.0, 1.0)).columns]
    listed = [first.strip("`") for first, *_ in rows("checking.md", "column")]
    assert listed == [name for name in shown if name not in ("blob", "shape", "jax", "net", "difference", "at")]


def test_the_assertions():
    listed = [first.strip("`") for first, *_ in rows("checking.md", "assertion")]
    assert sorted(listed) == sorted(name for name in testing.__all__ if name.startswith("assert_"))


def test_the_layers():
    table = {
        name: states
        for first, states, _ in rows("recurrent_network.md", "function")
        for name in re.findall(r"`(\w+)`", first)
    }
    kinds = {name: layer for name, layer in vars(cells).items() if isinstance(layer, (Layers, AttentionLayer))}
    assert set(table) == set(kinds)
    for name, layers in kinds.items():
        if isinstance(layers, Layers):
            layer = [state.previous.partition("_")[0] for state in layers.cell(3, 4).states]
            assert table[name].split(", ") == layer


def options():
    """The options of each command."""
    parser = make_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {name: {o for a in p._actions for o in a.option_strings} for name, p in commands.choices.items()}


def commands(page):
    """The commands in a page's blocks, with what follows them."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGES[page], re.M | re.S)
    return [command for block in blocks for command in re.findall(r"^jrnn (\w+)(.*)$", block, re.M)]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_options_of_commands(page):
    """A line that begins with a command has options of that command; one in the prose is of some command or program."""
    known = options()
    for command, rest in commands(page):
        assert command in known
        assert set(re.findall(r"(?<=\s)--[\w-]+", rest)) <= known[command], f"jrnn {command}{rest}"
    everywhere = set().union(*known.values()) | {
        "--exhaustive",
        "--version",
        "--signal",
    }  # of pytest here, of jrnn, of sbatch
    prose = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.M | re.S)
    for text in re.findall(r"`(?:jrnn \w+ [^`]*)?(--[a-z][\w-]*)[^`]*`", prose):
        assert text in everywhere or text.startswith("--xla"), text


def test_every_command_is_in_the_readme():
    in_prose = re.findall(r"`jrnn (\w+)`", PAGES["README.md"])
    assert {command for command, _ in commands("README.md")} | set(in_prose) == set(options())
