"""Several runs: the table of finished, running, stopped and failed ones, and the drawing of their losses."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from jrnn.cli import main
from jrnn.errors import DataError, UsageError
from jrnn.train.runs import curves, find_runs, labels, plot_runs, runs_tables, smoothed, summarize


def make_run(path, steps=6, done=6, **config):
    """A run directory as `train` leaves it."""
    path.mkdir(parents=True)
    rows = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
    (path / "config.toml").write_text(f"seed = 0\n[model]\n{rows}[train]\nsteps = {steps}\n")
    (path / "run.json").write_text("{}")
    lines = [
        {"step": k, "loss": 3.0 - 0.1 * k, "gradient_norm": 1.0, "items_per_second": 100 * k}
        for k in range(1, done + 1)
    ]
    lines.insert(4, {"step": 4, "validation_loss": 2.5})
    lines.append({"step": done, "validation_loss": 2.75, "accuracy": 0.5})
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(m) + "\n" for m in lines) + '{"step": 9, "lo'
    )
    return path


@pytest.fixture
def runs(tmp_path):
    make_run(tmp_path / "a", hidden=8)
    make_run(tmp_path / "deep" / "b", done=4, hidden=16, cell="gru")
    return tmp_path


def test_a_run_in_figures(runs):
    run = summarize(runs / "a")
    assert (run.state, run.step, run.steps, run.best_loss, run.best_step) == (
        "finished",
        6,
        6,
        2.5,
        4,
    )
    assert run.speed == 350
    assert summarize(runs / "deep" / "b").state == "stopped"
    with (runs / "deep" / "b" / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 5, "refused": "the loss is nan"}\n')
    assert summarize(runs / "deep" / "b").state == "not finite"
    with (runs / "deep" / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "refused": "the loss is 9, above train.loss_limit = 8"}\n')
    assert summarize(runs / "deep" / "b").state == "above limit"
    with (runs / "a" / "config.toml").open("a") as file:
        file.write("patience = 1\n")
    lines = (runs / "a" / "metrics.jsonl").read_text().splitlines()
    (runs / "a" / "metrics.jsonl").write_text(
        "\n".join(line for line in lines if '"loss"' not in line)
    )
    assert summarize(runs / "a").state == "finished"
    (runs / "a" / "metrics.jsonl").unlink()
    assert summarize(runs / "a").state == "stopped"
    assert (summarize(runs / "a").speed, summarize(runs / "a").best_loss) == (None, None)


def test_one_that_a_process_holds_is_running(runs):
    hold = textwrap.dedent("""
        import fcntl, sys
        file = open(sys.argv[1], "w")
        fcntl.flock(file, fcntl.LOCK_EX)
        print("held", flush=True)
        sys.stdin.read()
    """)
    command = [sys.executable, "-c", hold, str(runs / "a" / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        assert summarize(runs / "a").state == "running"
        holder.stdin.close()
        holder.wait()
        assert summarize(runs / "a").state == "finished"


def test_the_command_lists_what_differs(runs, capsys):
    assert main(["runs", str(runs)]) == 0
    out = capsys.readouterr().out
    for text in (
        "model.hidden",
        "model.cell",
        "gru",
        "6/6",
        "4/6",
        "2.5000",
        "350",
        "finished",
        "stopped",
    ):
        assert text in out
    assert "seed" not in out
    assert main(["runs", str(runs), "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [Path(r["path"]).name for r in rows] == ["a", "b"]
    assert rows[0]["config"] == {"seed": 0, "model.hidden": 8, "train.steps": 6}
    assert main(["runs", str(runs / "none")]) == 2
    assert "none: holds no run directory; `jrnn train` makes them" in capsys.readouterr().err
    assert find_runs(runs / "a") == [runs / "a"]


def test_the_best_run_is_the_first_with_what_it_measured(runs, capsys):
    for name, loss, accuracy in (("a", 2.5, 0.25), ("deep/b", 1.5, 0.75)):
        line = {"step": 6, "validation_loss": loss, "accuracy": accuracy}
        (runs / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    best = summarize(runs / "deep" / "b")
    assert (best.best_loss, best.metrics) == (1.5, {"accuracy": 0.75})
    assert main(["runs", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "accuracy" in out and out.index("0.75") < out.index("0.25")


def test_runs_of_one_kind_stand_together(runs, capsys):
    make_run(runs / "c", kind="nn", layers=2)
    tables = runs_tables([summarize(run) for run in find_runs(runs)])
    assert [(str(t.title), t.row_count) for t in tables] == [("", 2), ("nn", 1)]
    assert main(["runs", str(runs)]) == 0
    assert "layers" not in capsys.readouterr().out  # there is nothing else of its kind


def test_much_that_differs_stands_below_each_other(runs, capsys):
    make_run(runs / "c", hidden=8, **{f"key_{k}": k for k in range(5)})
    assert main(["runs", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "model.cell = gru" in out and "model.key_4 = 4" in out


def test_labels_tell_runs_apart(runs):
    told = labels([summarize(run) for run in find_runs(runs)])
    assert told == ["a: model.hidden = 8", "b: model.hidden = 16, model.cell = gru"]
    assert labels([summarize(runs / "a")]) == ["a"]


@pytest.mark.sample("svg-<?xml")
@pytest.mark.parametrize(
    "suffix, magic", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_losses_are_drawn(runs, capsys, suffix, magic):
    out = runs / f"losses.{suffix}"
    assert main(["plot", str(runs / "a"), str(runs / "deep" / "b"), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    assert out.read_bytes().startswith(magic)


def test_a_legend_of_many_keys_has_room(runs):
    """One that does not fit makes matplotlib warn, which is an error here."""
    for name in "cd":
        make_run(runs / name, **{f"a_long_key_{k}": f"value of {name}" for k in range(20)})
    plot_runs([runs / "c", runs / "d"], runs / "losses.png")


def test_curves_and_smoothing(runs):
    (steps, losses), (where, validations) = curves(runs / "a")
    np.testing.assert_array_equal(steps, np.arange(1, 7))
    np.testing.assert_allclose(losses, 3.0 - 0.1 * steps)
    assert (where.tolist(), validations.tolist()) == ([4, 6], [2.5, 2.75])
    noisy = np.random.default_rng(0).normal(1, 1, 5000)
    assert smoothed(noisy).std() < 0.3 and abs(smoothed(noisy)[100:].mean() - 1) < 0.1


def test_what_cannot_be_drawn(runs):
    with pytest.raises(
        UsageError, match=r"losses\.txt: the name of a picture must end in one of \.png"
    ):
        plot_runs([runs / "a"], runs / "losses.txt")
    with pytest.raises(
        DataError, match=r"deep: is not a run directory: .*config\.toml: no such file"
    ):
        plot_runs([runs / "deep"], runs / "losses.png")
    with pytest.raises(UsageError, match="cannot be written"):
        plot_runs([runs / "a"], runs / "none" / "losses.png")
    (runs / "a" / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="has no losses in metrics.jsonl yet"):
        plot_runs([runs / "a"], runs / "losses.png")
