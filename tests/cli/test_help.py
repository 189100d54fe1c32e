"""The texts of `--help` are recorded: `python tests/cli/test_help.py` writes help.txt anew."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jrnn.cli import main
from jrnn.cli.parser import COMMANDS, make_parser

_USAGE = re.compile(r"^usage: .*?\n\n", re.DOTALL)
RECORDED = Path(__file__).with_name("help.txt")


def texts():
    """The help of jrnn and of every command, without usage lines, which versions of Python break at other places."""
    parser = make_parser()
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    helps = {"jrnn": parser, **{f"jrnn {name}": commands[name] for name in commands}}
    described = {name: _USAGE.sub("", p.format_help()) for name, p in helps.items()}
    return "\n\n".join(f"$ {name} --help\n{text}" for name, text in described.items())


def test_the_help_is_the_recorded_one(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("NO_COLOR", "1")
    assert texts() == RECORDED.read_text(), "if the change is meant: python tests/cli/test_help.py"


def test_without_a_command_the_commands_are_listed(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert (out, end.value.code) == ("", 0) and capsys.readouterr().out == err
    for group in COMMANDS.values():
        for _, name, summary, _ in group:
            assert f"\n  {name:12}{summary}\n" in err


COMPLETE = """
source "$1"
COMP_WORDS=("${@:2}")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
$(complete -p jrnn | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["tra"], ["train"]),
        (["train", "--no-s"], ["--no-sample"]),
        (["train", "mine"], ["mine.toml"]),
    ],
)
def test_a_shell_completes_commands_options_and_files(words, wanted, tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "complete.sh").write_text(capsys.readouterr().out)
    (tmp_path / "mine.toml").touch()
    command = ["bash", "-c", COMPLETE, "bash", "complete.sh", "jrnn", *words]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert completed.stdout.split() == wanted, completed.stderr


def test_a_shell_without_completion(capsys, monkeypatch):
    assert main(["completion", "dos"]) == 2
    assert "there is no completion for 'dos'; known are bash, zsh" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'jrnn[completion]'" in capsys.readouterr().err


if __name__ == "__main__":
    os.environ |= {"COLUMNS": "110", "NO_COLOR": "1"}
    RECORDED.write_text(texts())
