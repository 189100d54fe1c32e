"""docs/scaling.md: every command is one that `jrnn` takes; what they do is tested in test_devices.py."""

import re
import shlex
from pathlib import Path

import pytest

from jrnn.cli.parser import make_parser
from jrnn.train.config import config_names

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


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
    assert len(LINES) == 12
    keys = set(re.findall(r"`((?:train|data|optimizer)\.\w+)`", PAGE))
    assert keys == {"train.devices", "data.batch", "optimizer.accumulate", "train.on_nan", "train.steps_per_call"}
