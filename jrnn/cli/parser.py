"""The arguments of every command. A command's function is in `training`, `nets` or `tools`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jrnn.bench.sizes import CELLS, GATES, MODES
from jrnn.bench.suites import SUITES
from jrnn.cli import nets, tools, training
from jrnn.loops import EXECUTORS
from jrnn.version import __version__


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jrnn", description="Trains, runs, converts and checks recurrent networks.")
    parser.add_argument("--version", action="version", version=f"jrnn {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(function: Any, name: str, summary: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=summary, description=summary)
        found.add_argument("--debug", action="store_true", help="show the traceback of an error")
        found.set_defaults(function=function)
        return found

    p = command(training.train_command, "train", "train the model that a configuration describes")
    p.add_argument(
        "config",
        type=_path,
        help="a TOML file, the name of a config that ships with jrnn, or a run directory, whose config is used",
    )
    p.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one key of the config, as in train.steps=100; may be repeated",
    )
    p.add_argument(
        "--out", metavar="DIR", type=_path, help="the run directory (default: runs/NAME, where NAME is the config's)"
    )
    p.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint of the run, if there is one"
    )
    p.add_argument("--no-sample", action="store_true", help="do not write text when training ends")
    p.add_argument(
        "--devices",
        type=_count(0, 4096),
        metavar="N",
        help="devices that share each batch, 0 for all; a CPU is divided into N devices (sets train.devices)",
    )
    p.add_argument(
        "--tensorboard", action="store_true", help="also write events for TensorBoard (adds to train.loggers)"
    )
    p.add_argument("--profile", action="store_true", help="trace a few steps, and print where the time went")
    p.add_argument(
        "--tune",
        nargs="?",
        type=_seconds,
        const=60.0,
        metavar="SECONDS",
        help="measure how each loop runs fastest on this machine before the first step, for at most SECONDS (default: "
        "%(const)s); the run and its continuation use plans.json of the run directory",
    )
    p = p.add_argument_group("several processes that train together, each started with this command (docs/scaling.md)")
    p.add_argument("--distributed", action="store_true", help="find the others by SLURM, Open MPI or Kubernetes")
    p.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens for the others")
    p.add_argument("--processes", type=_count(1), metavar="N", help="the number of processes")
    p.add_argument(
        "--process", type=_count(0), metavar="K", help="the index of this process, from 0; only process 0 writes files"
    )

    p = command(training.tokens_command, "tokens", "write texts as a corpus of tokens, for the task `tokens`")
    p.add_argument("texts", nargs="+", type=_path, metavar="TEXT", help="a UTF-8 text, or a .jsonl file")
    p.add_argument(
        "--out",
        required=True,
        metavar="FOLDER",
        type=_path,
        help="the folder of the corpus; after a call that was stopped, the same call goes on where that one was",
    )
    p.add_argument(
        "--tokenizer",
        metavar="FILE",
        type=_path,
        help="a tokenizer.json, or the folder of a model that has one (default: a new one, trained on the texts)",
    )
    p.add_argument(
        "--vocabulary",
        type=_count(257, 2**31 - 1),
        default=8_192,
        metavar="N",
        help="the number of tokens of a new tokenizer (default: %(default)s)",
    )
    p.add_argument(
        "--separator",
        metavar="TEXT",
        help="what stands between the documents of a text (default: a file is one document)",
    )
    p.add_argument(
        "--field", default="text", metavar="KEY", help="the key of the text in a .jsonl file (default: %(default)s)"
    )
    p.add_argument(
        "--end",
        metavar="TOKEN",
        help="the token that ends a document (default: <|endoftext|> or the like, if it is known)",
    )

    p = command(training.sample_command, "sample", "write text from a trained or a pretrained model")
    p.add_argument("run_dir", type=_path, help="a run directory, or a folder with config.json and safetensors")
    p.add_argument("--prompt", help="the beginning of the text; for task seq2seq, the sequence to answer")
    p.add_argument("--length", type=_count(1), help="characters, words or tokens to write after the prompt")
    p.add_argument(
        "--temperature",
        type=float,
        help="below 1 more predictable, above 1 more random, 0 always the most probable character",
    )
    p.add_argument(
        "--top-k", type=_count(1), metavar="K", help="for pretrained models, draw from the K likeliest tokens only"
    )
    limits = {
        "--top-p": "P, draw from the likeliest tokens of this share only",
        "--min-p": "P, draw from tokens of this share of the greatest probability only",
        "--repetition-penalty": "FACTOR, make tokens that the text has less likely (1: as likely)",
    }
    for name, text in limits.items():
        metavar, _, does = text.partition(", ")
        p.add_argument(name, type=float, metavar=metavar, help=f"for pretrained models, {does}")
    p.add_argument("--stop", metavar="TEXT", action="append", default=[], help="for pretrained models, end before TEXT")
    p.add_argument(
        "--seed", type=_count(0, 2**32 - 1), default=0, help="the seed of the random choices (default: %(default)s)"
    )
    p.add_argument(
        "--beam", type=_count(1), metavar="K", help="for task seq2seq, the width of the beam search (1: greedy)"
    )
    p.add_argument(
        "--attention",
        metavar="FILE",
        help="for task seq2seq, draw the attention of the best answer (needs the extra `plot`)",
    )

    p = command(training.plot_command, "plot", "draw the losses of runs")
    p.add_argument("runs", nargs="+", type=_file, metavar="RUN", help="a run directory")
    p.add_argument(
        "--out",
        type=_file,
        default=Path("losses.png"),
        metavar="FILE",
        help="a .png, .svg or .pdf file (default: %(default)s)",
    )

    p = command(training.runs_command, "runs", "list runs: state, best loss, speed, how their configs differ")
    p.add_argument(
        "folder",
        nargs="?",
        default="runs",
        help="a folder of runs; its sub-folders are searched too (default: %(default)s)",
    )
    p.add_argument("--json", action="store_true", help="print JSON, with whole configs")

    command(training.configs_command, "configs", "list the configs that ship with jrnn, for `jrnn train`")

    p = command(nets.run_command, "run", "run a net operator by operator, or a plan net by net")
    _add_net(p, _NET_OR_PACKAGE)
    p.add_argument(
        "--fetch",
        action="append",
        metavar="BLOB",
        help="a blob to print; may be repeated (default: the net's external outputs)",
    )
    p.add_argument("--save", metavar="DIR", type=_path, help="write each fetched blob to DIR/BLOB.npy")
    p.add_argument(
        "--files",
        metavar="DIR",
        type=_path,
        help="allow the net to read and write files in DIR; without it, it may not",
    )
    p.add_argument(
        "--max-iterations",
        type=_count(1),
        default=1_000_000,
        metavar="N",
        help="stop with an error when a loop runs longer than N iterations (default: %(default)s)",
    )

    p = command(nets.show_command, "show", "list the operators, shapes and parameters of a net or a plan")
    _add_net(p, _NET_OR_PACKAGE)
    _add_network(p)
    p.add_argument(
        "--dot", type=_file, metavar="FILE", help="write the graph in the DOT language instead of listing it"
    )
    p.add_argument("--svg", type=_file, metavar="FILE", help="draw the graph instead of listing it")

    p = command(nets.convert_command, "convert", "convert functions to nets, nets to Python, old nets to new ones")
    p.add_argument(
        "source",
        type=_path,
        help="a NetDef file, a folder with init_net.pb and predict_net.pb, MODULE:FACTORY, or a run directory",
    )
    p.add_argument(
        "out",
        type=_path,
        help="the NetDef file to write (text if its name ends in .pbtxt), the folder of a package, a .py file; "
        "for a run a .onnx or .jax file too",
    )
    _add_network(p)
    p.add_argument("--to", choices=("net", "py"), default="net", help="what to write (default: net)")
    p.add_argument(
        "--init", metavar="NET", type=_path, help="with --to py, the net that fills the weights of a NetDef file"
    )
    _add_feed(
        p, "with --to py, an example of an input whose shape the net does not define: FILE.npy, JSON, or normal[2,3]"
    )

    p = command(nets.check_command, "check", "compute gradients in three ways in float64, and compare them")
    _add_net(p, "a NetDef file, a package, a config, or MODULE:FUNCTION of a JAX function")
    _add_network(p)
    p.add_argument(
        "--loss", help="the blob to differentiate, which has one element (default: the blob `loss`, else all outputs)"
    )
    p.add_argument(
        "--scan", action="store_true", help="the function is a step (carry, x) -> (carry, y): run it over time"
    )
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key of a config")
    p.add_argument(
        "--elements",
        type=_count(1),
        default=200,
        metavar="N",
        help="how many elements of a blob are compared one by one (default: %(default)s)",
    )
    p.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    p.add_argument("--html", type=_file, metavar="FILE", help="write the report as a page, with the net drawn")

    p = command(tools.ops_command, "ops", "list the operators")
    p.add_argument("pattern", nargs="?", default="", help="list only operators whose name contains this")

    command(tools.doctor_command, "doctor", "print packages and devices, and how to install what is missing")

    p = command(tools.bench_command, "bench", "measure your own step, or cells next to other libraries")
    p.add_argument(
        "step",
        nargs="?",
        type=_path,
        metavar="FILE:STEP",
        help="your own step, in a file or a module: a function without arguments that returns (step, init, xs), or the step "
        "itself, with --feed; it runs by lax.scan and by each executor that can run it (default: the cells of a suite)",
    )
    _add_feed(
        p,
        "an argument of your step: FILE.npy, JSON, or normal[2,3]; name/0, name/1 for parts; the last one for all steps",
    )
    p.add_argument(
        "--seed", type=_count(0, 2**32 - 1), default=0, help="the seed of normal[...] (default: %(default)s)"
    )
    p.add_argument(
        "--suite",
        choices=SUITES,
        default="scan",
        help="scan: cells (default); nn: layers; layers: layers of today, from minGRU to RWKV-7; "
        "convert: conversions to nets and back; graph: passes over nets; "
        "growth: how the time for a net grows with its size; "
        "libraries: optimize_scans around layers of other libraries; streaming: inference frame by frame; "
        "never-worse: jrnn.scan and lax.scan on loops of many kinds; linear: layers with matrix states; "
        "tuned: loops that were chosen by measurement, next to each executor",
    )
    p.add_argument(
        "--cells",
        type=_names,
        metavar="A,B",
        help=f"some of {', '.join(CELLS)} (default: the first {len(GATES)}; with --compile-for, lstm,gru)",
    )
    p.add_argument("--modes", type=_names, metavar="A,B", help=f"some of {', '.join(MODES)} (default: all)")
    p.add_argument(
        "--sizes",
        type=_names,
        metavar="TxNxDxH,...",
        help="steps, sequences, features, hidden units; or the name of a set: six, or caffe2, the 24 of Caffe2's own "
        "benchmark (default: both sets; with --compile-for, six)",
    )
    p.add_argument(
        "--peers",
        type=_names,
        metavar="A,B",
        help="the programs to measure (default: all that can run here); for your own step, lax.scan and executors: "
        f"{', '.join(EXECUTORS)}",
    )
    p.add_argument(
        "--turns", type=_count(1), default=15, help="measured runs of each program, at most (default: %(default)s)"
    )
    p.add_argument(
        "--seconds",
        type=_seconds,
        default=20.0,
        help="time for one size; after it no turn begins but the first three (default: %(default)s)",
    )
    p.add_argument(
        "--devices",
        type=_count(0, 4096),
        metavar="N",
        help="also measure jrnn with the CPU divided into N devices (default: the number of cores)",
    )
    p.add_argument(
        "--compile-for",
        metavar="DEVICE",
        help="h100 or v5e: compile for an accelerator without having one; count kernels and bytes instead of measuring",
    )
    p.add_argument("--caffe2-python", metavar="PYTHON", help="a Python that has Caffe2, to measure it too")
    p.add_argument("--json", type=_file, metavar="FILE", help="write the figures and their conditions")
    p.add_argument("--plot", type=_file, metavar="FILE", help="draw the figures (needs the extra `plot`)")
    p.add_argument("--compare", type=_file, metavar="FILE", help="a JSON file of an earlier run to compare with")
    return parser


def _count(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """A type of argument: an integer between two bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text) if len(text) < 20 else most + 1
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not an integer") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]} is not between {least} and {most}")
        return value

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a positive number")
    return value


def _path(text: str) -> str:
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError("the name of a file or folder must not be empty, nor have a zero byte")
    return text


def _file(text: str) -> Path:
    return Path(_path(text))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _add_network(p: argparse.ArgumentParser) -> None:
    p.add_argument("--network", metavar="NAME", help="which net of a plan to use")


def _add_feed(p: argparse.ArgumentParser, what: str) -> None:
    p.add_argument("--feed", action="append", default=[], metavar="BLOB=VALUE", help=what)


_NET_OR_PACKAGE = "a NetDef or PlanDef file, binary or text, or a folder with init_net.pb and predict_net.pb"


def _add_net(p: argparse.ArgumentParser, what: str) -> None:
    p.add_argument("net", type=_path, help=what)
    p.add_argument("--init", metavar="NET", type=_path, help="a net to run first, which fills the parameters")
    _add_feed(p, "a blob's value: FILE.npy, a JSON number or list, or normal[2,3] for random numbers of that shape")
    p.add_argument(
        "--seed",
        type=_count(0, 2**32 - 1),
        default=0,
        help="the seed of random operators and of normal[...] (default: %(default)s)",
    )
