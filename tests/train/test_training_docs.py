"""docs/training.md lists every key with its default, the training guide every config, docs/scaling.md valid commands."""

import operator
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import jrnn.train
from jrnn.cli.parser import make_parser
from jrnn.train import load_config
from jrnn.train.config import (
    CONFIGS,
    GradientConfig,
    OptimizerConfig,
    TrainConfig,
    config_names,
    describe_config,
)
from jrnn.train.models import TOKEN_MODELS
from jrnn.train.tasks import KINDS
from jrnn.train.toml_codec import decode

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def tables():
    """The dataclass of each table by the heading that it stands under: `[data]` of `words`."""
    records = {"[optimizer]": OptimizerConfig, "[gradient]": GradientConfig, "[train]": TrainConfig}
    records |= {f"[model] of kind {name}": cls for name, cls in TOKEN_MODELS.items()}
    for name, kind in KINDS.items():
        records[f"[data] of {name}"] = kind.data
        if kind.sample is not None:
            records[f"[sample] of {name}"] = kind.sample
        for cls in kind.models.values():
            if not any(issubclass(known, cls) for known in TOKEN_MODELS.values()):
                records[f"[model] of {name}"] = cls
    return records


def documented(title):
    """The dataclass whose keys stand under a heading, which may be for several tasks: `characters` and `words`."""
    for section in re.split(r"^#+ ", DOC, flags=re.M):
        heading, _, text = section.partition("\n")
        heading = heading.replace("`", "")
        what, of, names = heading.partition(" of ")
        names = names.removeprefix("kind ").split(" and ") if of else [""]
        wanted, _, name = title.partition(" of ")
        if (
            what == wanted
            and name.removeprefix("kind ") in names
            and ("kind" in title) == ("kind" in heading)
        ):
            (path,) = re.findall(
                r"^<!-- keys: ([\w.]+) -->$", text, flags=re.M
            )  # docs/generated.py makes a table of it
            return operator.attrgetter(path)(jrnn.train)
    return None


@pytest.mark.parametrize("title", tables())
def test_every_table_is_documented(title):
    assert documented(title) is tables()[title], f"docs/training.md has no heading {title}"


def test_every_task_is_listed():
    section = DOC.partition("## Tasks")[2].partition("###")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, flags=re.M)[1:] == list(KINDS)


def test_the_example_is_a_configuration():
    example = re.search(r"```toml\n(.*?)```", DOC, re.S)[1]
    config = decode(
        type(load_config(config_names()[0])), tomllib.loads(example), "docs/training.md"
    )
    assert config.model.bidirectional


@pytest.mark.parametrize("name", config_names())
def test_a_config_loads_and_opens_with_its_command(name):
    """And says next what it trains, of which docs/generated.py makes the table of the training guide."""
    load_config(name)
    head = (CONFIGS / f"{name}.toml").read_text(encoding="utf-8").partition("\n")[0]
    assert re.match(rf"# .*jrnn train {name}\b", head)
    assert len(describe_config(name)) > 20
    assert "\n<!-- configs -->\n" in (ROOT / "docs" / "train_from_config.md").read_text(
        encoding="utf-8"
    )


PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
LINES = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]


@pytest.mark.parametrize("line", LINES)
def test_a_command(line):
    line = line.replace("$OMPI_COMM_WORLD_SIZE", "4").replace("$OMPI_COMM_WORLD_RANK", "3")
    words = shlex.split(line)
    if "sh" in words:
        words = shlex.split(words[-1])
    args = make_parser().parse_args(words[words.index("jrnn") + 1 :])
    assert args.command in ("train", "runs", "plot")
    if args.command == "train":
        assert args.config in config_names()
        together = (args.coordinator, args.processes, args.process)
        assert None not in together or together == (None, None, None)


def test_the_page_names_what_there_is():
    assert len(LINES) == 11
    keys = set(re.findall(r"`((?:train|data|optimizer)\.\w+)`", PAGE))
    assert keys == {
        "train.devices",
        "data.batch",
        "optimizer.accumulate",
        "train.on_nan",
        "train.steps_per_call",
    }
