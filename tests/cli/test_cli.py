"""The command line: what it prints, its exit statuses, and that a mistake is one line without a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from jrnn import Net, read_net, write_net
from jrnn.cli import main, training
from jrnn.files import progress
from jrnn.nets import Op
from jrnn.nets.proto import read_plan, write_plan
from jrnn.train import load_config

NET = """
name: "tiny"
external_input: "x" external_input: "w" external_input: "b" external_output: "y"
op { type: "FC" input: "x" input: "w" input: "b" output: "y" }
op { type: "AveragedLoss" input: "y" output: "loss" }
"""
INIT = """
name: "tiny_init"
external_output: "w" external_output: "b"
op { type: "XavierFill" output: "w" arg { name: "shape" ints: 4 ints: 3 } }
op { type: "ConstantFill" output: "b" arg { name: "shape" ints: 4 } arg { name: "value" f: 0.5 } }
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.pbtxt").write_text(NET)
    (tmp_path / "init.pbtxt").write_text(INIT)
    np.save(tmp_path / "x.npy", np.ones((2, 3), np.float32))
    return tmp_path


def fails(capsys, *argv):
    """The one line that a mistake prints."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert err.startswith(f"jrnn {argv[0]}: error: ") and err.count("\n") == 1, err
    return err


def test_a_package_is_run_and_shown_by_its_folder(files, capsys):
    package = files / "package"
    package.mkdir()
    write_net(read_net(files / "net.pbtxt"), package / "predict_net.pb")
    write_net(read_net(files / "init.pbtxt"), package / "init_net.pb")
    assert (
        main(["run", "package", "--feed", "x=x.npy"]) == 0
        and "y float32[2,4]" in capsys.readouterr().out
    )
    assert main(["show", "package", "--feed", "x=x.npy"]) == 0
    assert "y [2, 4] float32 = FC(x, w, b)" in capsys.readouterr().out
    assert "error: .: has no predict_net.pb; name the file of a net" in fails(capsys, "run", ".")
    given = "missing: 'x'; give inputs with --feed BLOB=VALUE, and parameters with --init package/init_net.pb"
    for command in ("run", "check"):
        assert given.replace("'x'", "'x', 'w', 'b'") in fails(
            capsys, command, "package/predict_net.pb"
        )
    assert main(["show", "package"]) == 0
    assert capsys.readouterr().out.endswith("missing: 'x'; give inputs with --feed BLOB=VALUE\n")


def test_run_prints_and_saves_what_is_fetched(files, capsys):
    feeds = ["--feed", "x=x.npy", "--feed", "w=[[1, 2, 3], [0.5, 0, 0]]", "--feed", "b=[0, 10]"]
    assert main(["run", "net.pbtxt", *feeds, "--out", "out"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("y float32[2,2]\n[[ 6.  10.5]") and out.endswith("\nwrote out/y.npy\n")
    np.testing.assert_array_equal(np.load(files / "out" / "y.npy"), [[6, 10.5], [6, 10.5]])
    assert main(["run", "net.pbtxt", *feeds, "--fetch", "loss", "--fetch", "b"]) == 0
    assert capsys.readouterr().out == "loss float32[]\n8.25\nb int32[2]\n[ 0 10]\n"


PLAN = """
name: "counting"
network { name: "start"
  op { type: "ConstantFill" output: "i" arg { name: "shape" } arg { name: "value" i: 0 } }
  op { type: "ConstantFill" output: "one" arg { name: "shape" } arg { name: "value" i: 1 } }
  op { type: "ConstantFill" output: "five" arg { name: "shape" } arg { name: "value" i: 5 } } }
network { name: "count"
  op { type: "Add" input: "i" input: "one" output: "i" }
  op { type: "GE" input: "i" input: "five" output: "done" } }
execution_step { name: "first" network: "start" }
execution_step { name: "loop" network: "count" should_stop_blob: "done" }
"""


def test_run_of_a_plan(files, capsys):
    write_plan(read_plan(PLAN.encode()), files / "plan.pb")
    assert main(["run", "plan.pb", "--fetch", "i", "--out", "out"]) == 0
    assert capsys.readouterr().out == "i int64[]\n5\nwrote out/i.npy\n"
    assert np.load(files / "out" / "i.npy") == 5
    assert main(["run", "plan.pb"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[::2]] == [
        "i",
        "one",
        "five",
        "done",
    ]
    (files / "plan.pbtxt").write_text(PLAN)
    err = fails(capsys, "run", "plan.pbtxt", "--max-iterations", "3")
    assert (
        "step 'loop': runs on after 3 rounds; its stop blob 'done' is still False; raise max_iterations"
        in err
    )
    assert "plan 'counting' has no such blob; did you mean 'five'" in fails(
        capsys, "run", "plan.pb", "--fetch", "fiv"
    )
    unread = PLAN.replace('should_stop_blob: "done"', "num_iter: 0")
    (files / "plan.pbtxt").write_text(unread)
    assert "--fetch done: no step of plan 'counting' that ran wrote it" in fails(
        capsys, "run", "plan.pbtxt", "--fetch", "done"
    )


TRAIN_PLAN = """
name: "mnist"
network { name: "init" op { type: "ConstantFill" output: "b" arg { name: "shape" ints: 1 } }
          op { type: "GivenTensorFill" output: "w" arg { name: "shape" ints: 1 ints: 2 }
               arg { name: "values" floats: 0.5 floats: 2 } } }
network { name: "train" op { type: "TensorProtosDBInput" input: "reader" output: "x" }
          op { type: "FC" input: "x" input: "w" input: "b" output: "y" }
          op { type: "AveragedLoss" input: "y" output: "loss" } }
execution_step { name: "begin" network: "init" }
execution_step { name: "loop" network: "train" num_iter: 3 }
"""


@pytest.mark.exhaustive("pb")
@pytest.mark.parametrize("suffix", ["pb", "pbtxt"])
def test_show_check_and_convert_take_plans(files, capsys, suffix):
    plan = f"plan.{suffix}"
    write_plan(read_plan(TRAIN_PLAN.encode()), files / plan)
    assert main(["show", plan]) == 0
    out = capsys.readouterr().out
    assert "plan mnist\n  step begin num_iter=None" not in out
    assert (
        "  step begin: init\n  step loop num_iter=3: train\nnet init" in out
        and "FC(x, w, b)" in out
    )
    assert main(["show", plan, "--network", "train", "--feed", "x=[[1.0, 3.0]]"]) == 0
    assert "y [1, 1] float32 = FC(x, w, b)" in capsys.readouterr().out
    assert main(["check", plan, "--network", "train", "--feed", "x=[[1.0, 3.0]]"]) == 0
    assert "the gradients agree" in capsys.readouterr().out
    assert "has 2 nets: init, train; choose one with --network NAME" in fails(capsys, "check", plan)
    assert (
        main(["convert", plan, "other.pbtxt"]) == 0
        and main(["convert", plan, "net.pb", "--network", "train"]) == 0
    )
    assert read_plan(files / "other.pbtxt") == read_plan(files / plan)
    assert [op.type for op in read_net(files / "net.pb").ops] == [
        "TensorProtosDBInput",
        "FC",
        "AveragedLoss",
    ]
    assert "no operator writes" in fails(capsys, "run", plan)
    assert main(["run", plan, "--feed", "x=[[1.0, 3.0]]", "--fetch", "loss"]) == 0
    assert capsys.readouterr().out.endswith("loss float32[]\n6.5\n")


def test_run_of_a_net_with_an_endless_loop(files, capsys):
    body = Net("body", (Op.of("Copy", ["go"], ["go"]),), ("go",))
    write_net(
        Net("n", (Op.of("While", ["go"], ["go"], loop_net=body),), ("go",)), files / "loop.pb"
    )
    assert "the loop goes on after 7 trips" in fails(
        capsys, "run", "loop.pb", "--feed", "go=true", "--max-iterations", "7"
    )


def test_show_draws(files, capsys):
    assert main(["show", "net.pbtxt", "--out", "net.dot"]) == 0
    assert capsys.readouterr().out == "wrote net.dot\n"
    graph = (files / "net.dot").read_text()
    assert graph.startswith('digraph "tiny" {') and '[label="FC"' in graph
    assert main(["show", "net.pbtxt", "--out", "net.svg"]) == 0
    image = ElementTree.parse(files / "net.svg").getroot()
    words = [e.text for e in image.iter("{http://www.w3.org/2000/svg}text")]
    assert words == ["x", "w", "b", "FC", "y", "AveragedLoss", "loss"]
    assert "No such file" in fails(capsys, "show", "net.pbtxt", "--out", "none/net.dot")


def test_run_with_an_init_net_is_a_function_of_the_seed(files, capsys):
    def run(seed):
        assert (
            main(
                [
                    "run",
                    "net.pbtxt",
                    "--init",
                    "init.pbtxt",
                    "--feed",
                    "x=normal[2,3]",
                    "--seed",
                    seed,
                ]
            )
            == 0
        )
        return capsys.readouterr().out

    assert run("1") == run("1") != run("2")


def test_show_lists_operators_shapes_and_parameters(files, capsys):
    assert main(["show", "net.pbtxt"]) == 0
    out = capsys.readouterr().out
    assert "#0 y = FC(x, w, b)" in out
    assert "shapes are not known (op #0 FC -> 'y' in net 'tiny': reads blob 'x'" in out
    assert main(["show", "net.pbtxt", "--init", "init.pbtxt", "--feed", "x=x.npy"]) == 0
    out = capsys.readouterr().out
    assert "#0 y [2, 4] float32 = FC(x, w, b)" in out
    assert "  w  float32[4,3]" in out
    assert "22 numbers in all" in out


def test_show_of_an_unknown_operator_names_it_alone(files, capsys):
    (files / "typo.pbtxt").write_text(NET.replace("FC", "FCC"))
    assert main(["show", "typo.pbtxt"]) == 0
    assert capsys.readouterr().out.endswith("unknown operator 'FCC'; did you mean 'FC'?)\n")


def test_convert_writes_the_current_version(files, capsys):
    (files / "old.pbtxt").write_text(
        'op { type: "RecurrentNetwork" input: "x" input: "h0" output: "all" '
        'arg { name: "alias_dst" strings: "all" } arg { name: "recurrent_inputs" strings: "h0" } '
        """arg { name: "step_net" s: 'name: "step" type: "rnn" op { type: "Copy" input: "x_t" output: "h" }' } }"""
    )
    assert main(["convert", "old.pbtxt", "new.pb"]) == 0
    assert "wrote new.pb" in capsys.readouterr().out
    op = read_net(files / "new.pb").ops[0]
    assert (op.arg("step_net").type, tuple(op.arg("initial_recurrent_state_ids"))) == (
        "simple",
        (1,),
    )


def test_ops_lists_operators(capsys):
    assert main(["ops", "sigmoid"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Sigmoid(x) -> 1  gradient: yes" in lines
    assert lines == sorted(lines)


def test_configs_lists_what_train_finds_by_name(files, capsys):
    assert main(["configs"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n    ") >= 6 and "adding\n    The adding problem over 200 steps" in out
    changes = [
        "train.steps=1",
        "model.hidden=2",
        "data.batch=2",
        "model.memory=0",
        "train.steps_per_call=1",
    ]
    assert main(["train", "forecast", *(f"--set={change}" for change in changes)]) == 0
    assert "run directory: runs/forecast\n" in capsys.readouterr().out
    assert main(["predict", "runs/forecast"]) == 0
    assert (forecast := capsys.readouterr().out).startswith("step,demand\n1,")
    assert main(["predict", "runs/forecast", "--out", "next.csv"]) == 0
    assert (files / "next.csv").read_text() == forecast
    assert "writes no text; use jrnn predict runs/forecast" in fails(
        capsys, "sample", "runs/forecast"
    )


def test_configs_prints_a_config_and_keys(files, capsys):
    assert main(["configs", "forecast"]) == 0
    (files / "own.toml").write_text(capsys.readouterr().out)
    assert load_config(files / "own.toml") == load_config("forecast")
    assert main(["configs", "forecast", "--keys"]) == 0
    out = capsys.readouterr().out
    assert (
        "[data]" in out
        and "\n  horizon = 1  # rows after them that it predicts\n" in out
        and "chunk" not in out
    )
    assert main(["configs", "--keys"]) == 0
    out = capsys.readouterr().out
    assert "[data] of forecast" in out and "[data] of characters" in out and "[train]" in out


def test_a_sweep_trains_each_combination(files, capsys):
    changes = [
        "train.steps=2",
        "data.batch=2",
        "model.memory=0",
        "train.steps_per_call=1",
        "train.validate_every=1",
    ]
    options = [
        *(f"--set={change}" for change in changes),
        "--sweep",
        "model.hidden=2,3",
        "--sweep",
        "seed=1,2",
    ]
    assert main(["train", "forecast", *options, "--out", "sweep"]) == 0
    names = sorted(path.name for path in (files / "sweep").iterdir())
    assert names == [f"model.hidden={hidden},seed={seed}" for hidden in (2, 3) for seed in (1, 2)]
    out = capsys.readouterr().out
    table = out[out.index("forecast, nn") :]
    assert "rmse demand" in table and all(name in table for name in names)
    assert "--sweep model.hidden: must be written KEY=A,B,C" in fails(
        capsys, "train", "forecast", "--sweep", "model.hidden"
    )
    assert "--sweep seed: [1,2: a list or a table is not closed" in fails(
        capsys, "train", "forecast", "--sweep", "seed=[1,2"
    )
    assert "model.hiden" in fails(
        capsys, "train", "forecast", "--out", "bad", "--sweep", "model.hiden=1,2"
    )
    assert not (files / "bad").exists()


def test_a_sweep_over_lists_and_paths():
    words = ['optimizer.only=["a", "b"],["c"]', "data.path=../x.csv,/y.csv"]
    combinations = list(training._combinations(words))
    assert len(combinations) == 4
    assert combinations[0] == ('optimizer.only=["a", "b"]', "data.path=../x.csv")
    assert training._folder_of(combinations[0]) == (
        'optimizer.only=["a", "b"],data.path=.._x.csv'  # one folder in that of the sweep
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "nope.pb"], "nope.pb"),
        (["run", "x.npy"], "x.npy"),
        (["run", "net.pbtxt"], "op #0 FC -> 'y' in net 'tiny': reads blob 'x'"),
        (
            ["run", "net.pbtxt"],
            "missing: 'x', 'w', 'b'; give inputs with --feed BLOB=VALUE, and parameters with --init INIT_NET",
        ),
        (["run", "net.pbtxt", "--fetch", "zzzz"], "no such blob; it writes 'y', 'loss'"),
        (["show", "net.pbtxt", "--feed", "zzzz=1"], "no such blob; it reads 'x', 'w', 'b'"),
        (
            ["show", "net.pbtxt", "--out", "net.png"],
            "--out net.png: must end in .svg or .dot, which says what is drawn",
        ),
        (["convert", "net.pbtxt", "net.onnx"], "in Python, jrnn.to_onnx writes other functions"),
        (["run", "net.pbtxt", "--feed", "xx=1"], "--feed xx: net 'tiny' has no such blob"),
        (["show", "net.pbtxt", "--feed", "xx=1"], "--feed xx: net 'tiny' has no such blob"),
        (["run", "net.pbtxt", "--feed", "x=nope.npy"], "--feed x=nope.npy: no such file"),
        (
            ["run", "net.pbtxt", "--feed", "x=net.npy"],
            "--feed x=net.npy: is not a .npy file of numbers",
        ),
        (["run", "net.pbtxt", "--feed", "x"], "--feed x: must be written BLOB=VALUE"),
        (["run", "net.pbtxt", "--feed", 'x="text"'], "must be FILE.npy, a JSON number"),
        (["run", "net.pbtxt", "--feed", "x=[[1], [1, 2]]"], "must be FILE.npy, a JSON number"),
        (
            ["run", "net.pbtxt", "--fetch", "los"],
            "--fetch los: net 'tiny' has no such blob; did you mean 'loss'?",
        ),
        (
            [
                "run",
                "net.pbtxt",
                "--feed",
                "x=normal[2,3]",
                "--feed",
                "w=normal[4,5]",
                "--feed",
                "b=[0, 0, 0, 0]",
            ],
            "w must be",
        ),
        (
            ["run", "lost.pbtxt"],
            "run: error: net '' declares the output 'y', which no operator writes and which was not",
        ),
        (["show", "net.pbtxt", "--feed", "x=x.npy"], "reads blob 'w', which no operator writes"),
        (
            ["check", "net.pbtxt", "--feed", "x=x.npy", "--init", "init.pbtxt", "--loss", "lss"],
            "'lss'",
        ),
        (["ops", "Sigmiod"], "no operator's name contains 'Sigmiod'; did you mean "),
        (["bench", "--sizes", "3x4"], "the size '3x4' must be written TxNxDxH"),
        (
            ["bench", "--sizes", "0x2x3x4"],
            "the size '0x2x3x4' must be written TxNxDxH, as in 100x32x128x128, with no 0",
        ),
        (["bench", "--cells", "lsmt"], "there is no cell 'lsmt';"),
        (["train", "nope.toml"], "nope.toml: no such file; `jrnn configs` lists"),
        (["train", "char_lstn"], "char_lstn: no such file; did you mean 'char_lstm'?"),
        (["check", "net.pbtxt", "--out", "page.txt"], "--out page.txt: must end in .html"),
        (
            ["bench", "--compile-for", "h100", "--out", "a.svg"],
            "--out draws times: it means nothing with --compile-for",
        ),
        (["configs", "char_lstn"], "char_lstn: no such file; did you mean 'char_lstm'?"),
        (["train", "typo.toml"], "typo.toml: unknown key 'model.hiden'; did you mean 'hidden'?"),
        (["train", "text.toml"], "missing.txt: no such file"),
        (
            ["train", "text.toml", "--set", "data.path=latin.txt"],
            "latin.txt: is not UTF-8: byte 3 is 0xe9",
        ),
        (
            ["train", "text.toml", "--set", "data.path=short.txt"],
            "short.txt, training part: the text is too short",
        ),
        (
            ["train", ".", "--resume"],
            "a run that was stopped before it wrote one is started again with",
        ),
        (["sample", "nope"], "nope: is not a run directory"),
    ],
)
def test_a_mistake_is_one_line(files, capsys, argv, message):
    (files / "net.npy").write_text("not numbers")
    (files / "lost.pbtxt").write_text('external_output: "y"')
    (files / "typo.toml").write_text("[model]\nhiden = 3\n")
    (files / "text.toml").write_text('[data]\npath = "missing.txt"\n')
    (files / "latin.txt").write_bytes(b"caf\xe9")
    (files / "short.txt").write_text("short")
    assert message in fails(capsys, *argv)


def test_bench_measures_and_writes(files, capsys):
    chosen = [
        "--cells",
        "min_gru",
        "--modes",
        "forward",
        "--sizes",
        "2x1x3x4",
        "--peers",
        "lax.scan",
        "--turns",
        "2",
    ]
    assert main(["bench", *chosen, "--json", "figures.json"]) == 0
    assert "2x1x3x4" in capsys.readouterr().out
    assert "lax.scan" in (files / "figures.json").read_text()


@pytest.mark.exhaustive
def test_a_reader_that_goes_away_is_no_mistake():
    """As with `jrnn ops | head -1`, here for a pipe whose reader is closed from the start."""
    reads, writes = os.pipe()
    os.close(reads)
    ran = subprocess.run(
        [sys.executable, "-m", "jrnn", "ops", "lstm"], stdout=writes, stderr=subprocess.PIPE
    )
    os.close(writes)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_debug_shows_where_an_error_came_from(files):
    with pytest.raises(Exception, match="no such file"):
        main(["train", "nope.toml", "--debug"])


def test_check_says_what_it_does_on_the_standard_error(files, monkeypatch, capsys):
    """Whatever is computed takes 8 seconds here."""
    doing, now = progress.Heartbeat.doing, [0.0]

    def slowly(self, what):
        doing(self, what)
        now[0] += 8
        self.check()

    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.Heartbeat, "doing", slowly)
    feeds = [
        f"--feed={name}=normal{shape}" for name, shape in (("x", [5, 3]), ("w", [4, 3]), ("b", [4]))
    ]
    assert main(["check", "net.pbtxt", "--json", "-", "--elements", "1", *feeds]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["agrees"]
    assert err.splitlines() == [
        f"{what}: 8 s so far"
        for what in (
            "reading net.pbtxt",
            "computing JAX's gradient",
            "computing the net's gradient",
            "computing central differences, 0 of 3 elements done",
            "computing central differences along directions in 3 blobs",
            "computing second derivatives",
            "computing the loss",
        )
    ]


@pytest.mark.parametrize("argv", [["trian"], ["run"]])
def test_usage_errors_have_status_2(argv, capsys):
    with pytest.raises(SystemExit) as e:
        main(argv)
    assert e.value.code == 2


@pytest.mark.exhaustive
def test_train_writes_text_when_it_ends(files, capsys):
    (files / "text.txt").write_text("the cat sat on the mat and the dog ran away\n" * 40)
    (files / "c.toml").write_text(
        '[data]\npath = "text.txt"\nbatch = 2\nchunk = 4\n[model]\nembedding = 2\nhidden = 4\n'
        '[train]\nsteps = 3\n[sample]\nprompt = "the"\nlength = 5\n'
    )
    assert main(["train", "c.toml"]) == 0
    out = capsys.readouterr().out
    assert "run directory: runs/c\n" in out
    assert "3 steps, validation loss " in out
    assert (files / "runs" / "c" / "checkpoints" / "3").is_dir()
    assert main(["sample", "runs/c", "--prompt", "the cat", "--length", "2"]) == 0
    assert len(capsys.readouterr().out) == len("the cat") + 2 + len("\n")
    longer = ["--set", "train.steps=4", "--set", "optimizer.schedule_steps=4"]
    assert (
        main(["train", "runs/c", "--resume", "--no-sample", *longer]) == 0
    )  # from the directory alone
    out = capsys.readouterr().out
    assert "resuming from step 3\n" in out and "4 steps" in out


@pytest.mark.exhaustive
def test_ctrl_c_after_the_end_of_a_command_changes_nothing():
    code = (
        "import os, signal, sys; from jrnn.cli import main; sys.argv = ['jrnn', 'configs']; status = main()\n"
        "os.kill(os.getpid(), signal.SIGINT); sys.exit(status)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "") and "char_lstm" in ran.stdout


IGNORED = """
import os, signal, sys, threading
import jrnn.cli.training
from jrnn.cli import main
from jrnn.files import progress

class Interrupts:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100): pass

def configs_command(args):
    threading.Thread(target=signal.pause).start()  # as JAX has one that waits for its backend
    Interrupts()
    signal.pause()

signal.alarm(120)  # ends the process if nothing else does
jrnn.cli.training.configs_command = configs_command
sys.argv = ["jrnn", "configs"]
sys.exit(main())
"""


@pytest.mark.exhaustive
def test_ctrl_c_where_python_ignores_exceptions():
    ran = subprocess.run([sys.executable, "-c", IGNORED], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (130, "jrnn configs: interrupted\n")


KERNELS = """
import numpy as np

def step(total, x):
    return total + x, total + x

def loop():
    xs = np.ones((3, 2), np.float32)
    return step, xs[0], xs, {"framework": "numpy", "chunk": 2, "types": ("float32",)}

def right(xs, state):
    ys = np.cumsum(xs, axis=0) + state
    return ys, ys[-1]

def wrong(xs, state):
    ys, last = right(xs, state)
    return ys, last + (len(xs) == 3)

number = 3
"""


def test_check_compares_a_kernel_with_its_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("sums.py").write_text(KERNELS, encoding="utf-8")
    assert main(["check", "sums.py:right", "--step", "sums.py:loop"]) == 0
    assert capsys.readouterr().out.startswith("holds: values, odd lengths, final state, ")
    assert main(["check", "sums.py:wrong", "--step", "sums.py:loop"]) == 1
    assert "\nFAILS final state: " in capsys.readouterr().out
    command = ("check", "sums.py:right", "--step")
    for step in ("sums.py:right", "sums.py:number", "sums.py:step"):
        assert "must be a function without arguments that returns" in fails(capsys, *command, step)
    assert "--scan is for gradients; sums.py:right is a kernel" in fails(
        capsys, *command, "sums.py:loop", "--scan"
    )
