"""The examples of the documentation run and print what they say."""

import argparse
import doctest
import functools
import importlib
import importlib.util
import inspect
import re
import runpy
import sys
from pathlib import Path

import pytest
from pages import blocks_of, commands, run_blocks

import jrnn
from jrnn.cli.parser import make_parser
from jrnn.loops.costs import machines
from jrnn.train import load_config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


PAGES = sorted(DOCS.glob("*.md"))
TABLES = runpy.run_path(str(DOCS / "tables.py"))
GENERATED = runpy.run_path(str(DOCS / "generated.py"))


@pytest.mark.sample("accelerators.md-2", "backward_nets.md-5")
@pytest.mark.parametrize(
    "page, examples",
    [
        ("accelerators.md", 2),
        ("backward_nets.md", 5),
        ("choosing.md", 3),
        ("conformance.md", 10),
        ("conversion.md", 5),
        ("migrating.md", 10),
        ("more_loops.md", 15),
        ("exporting.md", 10),
        ("from_pytorch.md", 10),
        ("index.md", 15),
        ("nn.md", 20),
        ("plans.md", 10),
        ("pretrained.md", 20),
        ("recurrent_network.md", 15),
        ("scan.md", 15),
        ("seq2seq.md", 8),
        ("sequences.md", 20),
        ("speed_up.md", 15),
        ("start.md", 5),
    ],
)
def test_page(page, examples, tmp_path, monkeypatch):
    monkeypatch.setattr(
        machines, "this_processor", lambda: machines.CPU
    )  # what pages print follows from its caches
    monkeypatch.chdir(tmp_path)
    failed, attempted = doctest.testfile(str(DOCS / page), module_relative=False, encoding="utf-8")
    assert failed == 0 and attempted > examples


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "page, wanted",
    [
        ("checking.md", {"check"}),
        ("own_tasks.md", {"train", "runs", "check"}),
        ("caffe2.md", {"show", "run", "convert", "check", "train"}),
        ("corpora.md", {"tokens", "train", "sample"}),
        ("filters.md", set()),
        ("linear_attention.md", set()),
        ("new_cell.md", {"train", "export"}),
        ("serving.md", {"train", "export"}),
        ("train_from_config.md", {"train", "runs", "plot", "predict"}),
    ],
)
def test_commands_of_a_page(page, wanted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run_blocks(page, blocks_of((DOCS / page).read_text(encoding="utf-8"))) == wanted


def test_a_task_of_ones_own_takes_50_lines():
    task = next(
        block
        for _, block in blocks_of((DOCS / "own_tasks.md").read_text(encoding="utf-8"))
        if "TaskKind(" in block
    )
    assert sum(bool(line.strip()) for line in task.splitlines()) <= 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_do_not_run_here_are_valid(page):
    """Blocks of `bash` take too long to run, or need what tests lack; the command line must take them as they stand."""
    for _, block in [b for b in blocks_of(page.read_text(encoding="utf-8")) if b[0] == "bash"]:
        for words in commands(block):
            assert words[0] == "jrnn", words
            make_parser().parse_args(words[1:])


def test_the_configuration_of_the_training_guide_loads(tmp_path):
    page = (DOCS / "train_from_config.md").read_text(encoding="utf-8")
    path = tmp_path / "adding.toml"
    path.write_text(
        next(block for language, block in blocks_of(page) if language == "toml"), encoding="utf-8"
    )
    assert load_config(path, ["model.cell=lstm", "train.steps=10"]).model.cell == "lstm"


def test_operators_that_are_alike_share_a_row():
    text = runpy.run_path(str(DOCS / "operator_tables.py"))["render"]()
    assert "| And, EQ, GE, GT, LE, LT, NE, Or | `a, b` |" in text


@pytest.mark.parametrize("page", GENERATED["pages"](), ids=lambda page: page.stem)
def test_what_is_generated_stands_in_the_pages_and_is_current(page):
    text = page.read_text(encoding="utf-8")
    assert GENERATED["current"](text) == text, "run .venv/bin/python docs/generated.py"
    empty = re.findall(r"^```\{(?!eval-rst|toctree|code-block|names)\w+\}.*$", text, re.M)
    assert not empty, "a reader of the file sees nothing"
    assert len(GENERATED["PART"].findall(text)) == text.count(GENERATED["END"])


def test_generated_parts_are_made_anew():
    made = GENERATED["current"]
    stale = f"Before.\n\n<!-- configs -->\n\n| old |\n\n{GENERATED['END']}\n\nAfter.\n"
    text = made(stale)
    assert text == made(text) and "| old |" not in text and "| `char_lstm` |" in text
    assert text.startswith("Before.\n\n<!-- configs -->\n\n| name |")
    assert text.endswith(f"|\n\n{GENERATED['END']}\n\nAfter.\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_of_measured_figures_can_be_made(page):
    for name in re.findall(r"^<!-- measured: (\w+) -->$", page.read_text(encoding="utf-8"), re.M):
        lines = [line for line in TABLES["render"](name).splitlines() if line.startswith("|")]
        assert len(lines) > 5 and len({line.count(" | ") for line in lines}) == 1


@pytest.mark.parametrize("name", ["newton", "layer_conformance", "model_conformance"])
def test_recorded_tables_are_written_as_they_are(name, tmp_path, monkeypatch):
    table = TABLES["read"](name)
    monkeypatch.setitem(TABLES["write"].__globals__, "FOLDER", tmp_path)
    TABLES["write"](name, table)
    assert (tmp_path / f"{name}.json").read_bytes() == (
        DOCS / "benchmarks" / f"{name}.json"
    ).read_bytes()


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/benchmarks.md"])
def test_figures_in_prose_are_those_that_were_measured(page):
    """The means of the layers, where a page has them; pictures are made from the same records."""
    text = (DOCS.parent / page).read_text(encoding="utf-8")
    ratios = {
        key: f"{TABLES['mean'](sizes.values()):.2f}" for key, sizes in TABLES["ratios"]().items()
    }
    linear = [float(row[2]) for row in TABLES["linear"]()["rows"]]
    lstm, torch, matrix = (
        ratios["lstm", "train", "jrnn.nn"],
        ratios["lstm", "train", "torch"],
        TABLES["mean"](linear),
    )
    assert {f"{matrix:.2f}", lstm} <= set(re.findall(r"\d\.\d\d", text))
    for said in re.findall(r"torch(?:'s)? (0\.\d\d)", text):
        assert said == torch


def test_links_between_pages_lead_somewhere():
    for page in sorted(DOCS.rglob("*.md")):
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", prose):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def exists(name):
    """Whether a dotted name, such as jrnn.nn.GRU or jrnn.loops.scan, is a module or what one holds."""
    value, path = jrnn, "jrnn"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(value, part) and (
            inspect.isclass(value) or importlib.util.find_spec(path) is None
        ):
            return False
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(path)
    return True


@functools.cache
def files_of_the_project():
    folders = ("docs", "jrnn", "tests", "scripts", "examples", "configs", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(
        ROOT.glob("*")
    )
    return {f"/{path.relative_to(ROOT).as_posix()}" for path in paths}


MADE_BY_COMMANDS = (
    "_generated/",
    "results/",
    "examples/NAME.py",
)  # names of pages that stand for other files
PROSE = [
    *(page for page in DOCS.rglob("*.md") if page.stem != "changelog"),  # it names what is gone
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
]
NAME = re.compile(r"(?<![\w./-])jrnn(?:\.[A-Za-z_]\w*)+(?![\w/])")
FILE = re.compile(r"(?<![\w./:-])(?:\w[\w.-]*/)+[\w.-]*\.(?:py|sh|md|toml|mjs|json|svg)\b")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
OF_OTHERS = {"--signal", "--logdir"}  # SLURM's, TensorBoard's


def test_names_in_prose_exist():
    """Dotted names of jrnn, and files with their folders; a file may be named from any folder on."""
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PROSE}
    unknown = {
        (page, name)
        for page, text in texts.items()
        for name in set(NAME.findall(text))
        if not exists(name)
    }
    for page, text in texts.items():
        for name in {name for name in FILE.findall(text) if not name.startswith(MADE_BY_COMMANDS)}:
            if not any(path.endswith(f"/{name}") for path in files_of_the_project()):
                unknown.add((page, name))
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_in_prose_exist(page):
    """Options outside of blocks are those of some command of jrnn, of a script, or of two other programs."""
    known = {
        option
        for parser in [make_parser(), *commands_of(make_parser())]
        for option in parser._option_string_actions
    }
    scripts = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "scripts").rglob("*")
        if path.suffix in (".py", ".sh")
    )
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    unknown = [
        option
        for option in OPTION.findall(text)
        if option not in known | OF_OTHERS and option not in scripts
    ]
    assert not unknown


def commands_of(parser):
    return next(
        a for a in parser._actions if isinstance(a, argparse._SubParsersAction)
    ).choices.values()


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    lines = [
        line
        for block in re.findall(r"```{toctree}\n(.*?)```", index, re.S)
        for line in block.splitlines()
    ]
    listed = {
        re.sub(r".*<(.+)>", r"\1", line.strip()) for line in lines
    }  # a page, or a shorter title with its page
    assert {page.stem for page in PAGES} - {"index"} <= listed
