"""Tasks, models and metrics of one's own, beyond docs/own_tasks.md: other folders, resuming, and mistakes."""

import os
import re
from pathlib import Path

import pytest

from jrnn.cli import main
from jrnn.errors import ConfigError
from jrnn.train import load_config
from jrnn.train.metrics import read_metrics

PAGE = (Path(__file__).parents[2] / "docs" / "own_tasks.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```\w+\n(?=# file: (\S+)\n)(.*?)^```$", PAGE, re.M | re.S))
TASK = 'task = "parity.py:PARITY"\n[train]\nsteps = 2\n[model]\nkind = "nn"\nhidden = 4\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "c.toml").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_goes_on_from_another_folder(folder, monkeypatch, capsys):
    """The file, the model and the metric are found again, where they are named by path."""
    assert (
        main(
            [
                "train",
                "bag.toml",
                "--set",
                'train.metrics=["measures.py:confidence"]',
                "--set",
                "train.steps=2",
            ]
        )
        == 0
    )
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    more = ["--set", "train.steps=3", "--set", "optimizer.schedule_steps=3"]
    assert main(["train", str(folder / "runs" / "bag"), "--resume", *more]) == 0
    assert "resuming from step 2\n" in capsys.readouterr().out
    last = read_metrics(folder / "runs" / "bag" / "metrics.jsonl")[-1]
    assert last["step"] == 3 and 0.5 <= last["confidence"] <= 1 and "accuracy" in last


@pytest.mark.parametrize("module", ["tasks_of_a_config.py", "next_to_the_config"])
def test_code_next_to_the_config_is_known_in_any_folder(folder, monkeypatch, module):
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    file = folder / f"{module.removesuffix('.py')}.py"
    os.rename(folder / "parity.py", file)
    (folder / "c.toml").write_text(TASK.replace("parity.py", module))
    config = load_config("../c.toml", ["train.steps=3"])
    assert config.kind.name == "parity" and config.train.steps == 3
    assert Path(config.task.rpartition(":")[0]).samefile(file)


def test_a_module_that_can_be_imported(folder, monkeypatch):
    os.rename("parity.py", "parity_of_a_package.py")
    monkeypatch.syspath_prepend(str(folder))
    Path("c.toml").write_text(TASK.replace("parity.py", "parity_of_a_package"))
    config = load_config("c.toml")
    assert config.kind.name == "parity" and config.data.batch == 50


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("parity.py:PARITY", "party.py:PARITY"), "party.py: no such file"),
        (
            ("parity.py:PARITY", "parity.py:PARTY"),
            "parity.py has no name 'PARTY'; did you mean 'PARITY'",
        ),
        (("parity.py:PARITY", "parity.py:"), "'parity.py:' must be MODULE:NAME"),
        (
            ("parity.py:PARITY", "parity.py:ParityTask"),
            "parity.py:ParityTask is a type; it must be a jrnn.train.TaskKind",
        ),
        (
            ("parity.py:PARITY", "no_such_module:PARITY"),
            "No module named 'no_such_module'; give the path of a .py file",
        ),
        (
            ('"nn"', '"bag.py:make"'),
            "model.kind: bag.py:make is a function; it must be a jrnn.train.ModelKind",
        ),
        (("hidden = 4", "hiden = 4"), "unknown key 'model.hiden'"),
        (
            ("[model]", 'metrics = ["measures.py:confidense"]\n[model]'),
            "has no function 'confidense'; did you mean 'confid",
        ),
        (
            ("[model]", 'metrics = ["measures.py:np"]\n[model]'),
            "measures.py:np is a module; it must be a function",
        ),
    ],
)
def test_mistakes(folder, change, message):
    assert change[0] in TASK
    Path("c.toml").write_text(TASK.replace(*change))
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config("c.toml").metrics()


def test_parts_that_lack_a_field_are_mistakes(folder):
    text = FILES["parity.py"].replace("    batch: int = 50\n", "")
    Path("parity.py").write_text(text)
    with pytest.raises(ConfigError, match="must be a dataclass with a field `batch`"):
        load_config("c.toml")
    Path("parity.py").write_text(FILES["parity.py"])
    Path("bag.py").write_text(FILES["bag.py"].replace('    kind: str = ""\n', ""))
    with pytest.raises(ConfigError, match="must be a dataclass with a field `kind`"):
        load_config("bag.toml")


def test_a_task_without_models_of_features_takes_none_of_ones_own(folder):
    Path("c.toml").write_text('task = "seq2seq"\n[model]\nkind = "bag.py:BAG"\n')
    with pytest.raises(ConfigError, match="task 'seq2seq' has no models of kind 'bag.py:BAG'"):
        load_config("c.toml")


@pytest.mark.exhaustive
def test_a_logger_gets_what_metrics_jsonl_gets(folder, capsys):
    """Also after a resume, where what is measured again is not there twice in metrics.csv."""
    chosen = ["--set", 'train.loggers=["lines.py:Lines", "csv"]', "--out", "run"]
    assert main(["train", "c.toml", *chosen]) == 0
    more = ["--set", "train.steps=3", "--set", "optimizer.schedule_steps=3"]
    assert main(["train", "run", "--resume", *more]) == 0
    measured = [m for m in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in m]
    lines = (folder / "run" / "lines.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines if "'loss'" in line] == ["1", "2", "3"]
    rows = [row.split(",") for row in (folder / "run" / "metrics.csv").read_text().splitlines()]
    assert [(int(step), float(value)) for step, name, value in rows[1:] if name == "loss"] == [
        (m["step"], m["loss"]) for m in measured
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "tensorbord",
            "there is no logger 'tensorbord'; known are tensorboard, csv, wandb, trackio, mlflow, and MODULE:NAME",
        ),
        ("measures.py:no_logger", "returned a int without write and close"),
    ],
)
def test_what_is_no_logger(folder, capsys, name, message):
    (folder / "measures.py").write_text("def no_logger(run, config, resume_at):\n    return 3\n")
    assert main(["train", "c.toml", "--set", f'train.loggers=["{name}"]']) == 2
    assert message in capsys.readouterr().err


def test_what_is_imported_is_said_before_it_is_run(folder, capsys, caplog):
    """And a file may import the one next to it, from any working directory."""
    (folder / "other").mkdir()
    (folder / "other" / "shared.py").write_text("NAME = 'shared'\n")
    (folder / "other" / "mine.py").write_text(
        "import sys\nimport shared\nprint(shared.NAME, file=sys.stderr)\nX = 1\n"
    )
    Path("c.toml").write_text('task = "other/mine.py:X"')
    assert main(["train", "c.toml"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert (
        said[:2] == [f"imports {folder / 'other' / 'mine.py'}", "shared"] and "is a int" in said[2]
    )
    assert not caplog.records  # nobody else prints it


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("X = {}['planted']", r"mine.py: cannot be loaded: .*mine.py, line 1: KeyError: 'planted'"),
        (
            "class E(BaseException): pass\nraise E('odd')",
            "mine.py: cannot be loaded: .*mine.py, line 2: E: odd",
        ),
        (
            "import nothing_there",
            "mine.py: cannot be loaded: .*ModuleNotFoundError: No module named 'nothing_there'",
        ),
    ],
)
def test_what_an_own_module_raises_is_its_mistake(folder, capsys, text, message):
    Path("mine.py").write_text(text)
    Path("c.toml").write_text('task = "mine.py:X"')
    assert main(["train", "c.toml"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_what_an_own_function_raises_is_its_mistake(folder, capsys):
    Path("mine.py").write_text("def measure(task, params, loss):\n    return 1 / 0\n")
    changes = ["--set", 'train.metrics=["mine.py:measure"]', "--set", "train.steps=1"]
    assert main(["train", "c.toml", *changes]) == 2
    assert re.search(
        r"error: .*mine.py, line 2: ZeroDivisionError: division by zero", capsys.readouterr().err
    )
