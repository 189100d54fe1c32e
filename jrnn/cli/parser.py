"""The arguments of every command. A command's function is in `training`, `nets` or `tools`; one prints these arguments."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jrnn.bench.sizes import CELLS, MODES
from jrnn.cli import nets, tools, training
from jrnn.errors import UsageError, needs_extra
from jrnn.loops import COMPARED_EXECUTORS
from jrnn.version import __version__

NET_OR_PACKAGE = (
    "a NetDef or PlanDef file, binary or text, or a folder with init_net.pb and predict_net.pb"
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jrnn",
        usage="jrnn [-h] [--version] COMMAND ...",
        description="Trains, runs, converts and checks recurrent networks.",
        epilog=_listed() + "\n\njrnn COMMAND --help describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jrnn {__version__}")
    commands = parser.add_subparsers(
        dest="command", prog="jrnn", metavar="COMMAND", help=argparse.SUPPRESS
    )
    for function, name, summary, add_options in itertools.chain(*COMMANDS.values()):
        described = f"{summary[0].upper()}{summary[1:]}."
        p = commands.add_parser(name, description=described, help=summary)
        p.set_defaults(function=function)
        options = _Options(p)
        options.flag("--debug", "show the traceback of an error")
        add_options(options)
    return parser


def _listed() -> str:
    """Returns the commands in groups, a line each."""
    lines = []
    for title, group in COMMANDS.items():
        lines += ["", f"{title}:"]
        for _, name, summary, _ in group:
            lines.append(f"  {name:12}{summary}")
    return "\n".join(lines[1:])


class _Options:
    """Adds the arguments of a command. `%(default)s` in a help is the default."""

    def __init__(self, to: Any):
        self._to = to

    def group(self, title: str) -> _Options:
        return _Options(self._to.add_argument_group(title))

    def argument(self, name: str, help: str, type: Callable[[str], Any] = str, **more: Any) -> None:
        self._to.add_argument(name, help=help, type=type, **more)

    def flag(self, name: str, help: str) -> None:
        self._to.add_argument(name, action="store_true", help=help)

    def option(
        self,
        name: str,
        metavar: str,
        help: str,
        type: Callable[[str], Any] = str,
        default: Any = None,
        **more: Any,
    ) -> None:
        self._to.add_argument(name, metavar=metavar, help=help, type=type, default=default, **more)

    def several(
        self, name: str, metavar: str, help: str, default: Sequence[str] | None = ()
    ) -> None:
        """An option that may be repeated."""
        given = None if default is None else list(default)
        self._to.add_argument(name, action="append", metavar=metavar, help=help, default=given)

    def json(self, what: str) -> None:
        help = f"write {what} as JSON (-: to the terminal, in place of tables)"
        self.option("--json", "FILE", help, _path)

    def set(self, where: str) -> None:
        help = f"change one key of {where}, as in train.steps=100; may be repeated"
        self.several("--set", "KEY=VALUE", help)

    def seed(self, help: str) -> None:
        self.option("--seed", "N", f"{help} (default: %(default)s)", _count(0, 2**32 - 1), 0)

    def network(self) -> None:
        self.option("--network", "NAME", "which net of a plan to use")

    def feed(self, help: str) -> None:
        self.several("--feed", "BLOB=VALUE", help)

    def net(self, help: str, name: str = "NET") -> None:
        self.argument("net", help, _path, metavar=name)
        self.option("--init", "NET", "a net to run first, which fills the parameters", _path)
        self.feed(
            "a blob's value: FILE.npy, a JSON number or list, or normal[2,3] for random numbers of that shape"
        )
        self.seed("the seed of random operators and of normal[...]")


def _completion(p: _Options) -> None:
    p.argument("shell", "bash, zsh, fish, tcsh or powershell", metavar="SHELL")


def completion_command(args: argparse.Namespace) -> int:
    """Prints a script by which a shell completes commands, options and the names of files."""
    try:
        import shtab
    except ImportError:
        raise UsageError(needs_extra("jrnn completion", "completion")) from None
    if args.shell not in shtab.SUPPORTED_SHELLS:
        known = ", ".join(shtab.SUPPORTED_SHELLS)
        raise UsageError(f"there is no completion for {args.shell!r}; known are {known}")
    parser = make_parser()
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    commands.help = "the command"  # shtab leaves out what has no help
    for command in commands.choices.values():
        for action in command._actions:
            if action.type in (_path, _file):
                action.complete = shtab.FILE
    print(shtab.complete(parser, args.shell))
    return 0


def _nothing(p: _Options) -> None:
    """The arguments of a command that has none."""


def _train(p: _Options) -> None:
    p.argument(
        "config",
        "a TOML file, the name of a config that ships with jrnn, or a run directory, whose config is used",
        _path,
    )
    p.set("the config")
    p.several(
        "--sweep",
        "KEY=A,B,C",
        "run the config with each of these values; two options run all combinations",
    )
    p.option(
        "--out", "DIR", "the run directory (default: runs/NAME, where NAME is the config's)", _path
    )
    p.flag("--resume", "continue from the newest checkpoint of the run, if there is one")
    p.flag("--no-sample", "do not write text when training ends")
    what = "devices that share each batch, 0 for all; a CPU is divided into N devices (sets train.devices)"
    p.option("--devices", "N", what, _count(0, 4096))
    p.flag("--tensorboard", "also write events for TensorBoard (adds to train.loggers)")
    p.flag("--profile", "trace a few steps, and print where the time went")
    p = p.group(
        "several processes that train together, each started with this command (docs/scaling.md)"
    )
    p.flag("--distributed", "find the others by SLURM, Open MPI or Kubernetes")
    p.option("--coordinator", "HOST:PORT", "where process 0 listens for the others")
    p.option("--processes", "N", "the number of processes", _count(1))
    p.option(
        "--process",
        "K",
        "the index of this process, from 0; only process 0 writes files",
        _count(0),
    )


def _tokens(p: _Options) -> None:
    p.argument("texts", "a UTF-8 text, or a .jsonl file", _path, nargs="+", metavar="TEXT")
    what = "the folder of the corpus; the same command continues one that was stopped"
    p.option("--out", "FOLDER", what, _path, required=True)
    what = "a tokenizer.json, or the folder of a model that has one (default: a new one, trained on the texts)"
    p.option("--tokenizer", "FILE", what, _path)
    what = "the number of tokens of a new tokenizer (default: %(default)s)"
    p.option("--vocabulary", "N", what, _count(257, 2**31 - 1), 8_192)
    p.option(
        "--separator",
        "TEXT",
        "the separator of the documents of a text (default: a file is one document)",
    )
    p.option(
        "--field",
        "KEY",
        "the key of the text in a .jsonl file (default: %(default)s)",
        default="text",
    )
    p.option(
        "--end",
        "TOKEN",
        "the token that ends a document (default: <|endoftext|> or the like, if it is known)",
    )


def _sample(p: _Options) -> None:
    p.argument(
        "run", "a run directory, or a folder with config.json and weights", _path, metavar="RUN"
    )
    p.option(
        "--prompt", "TEXT", "the beginning of the text; for task seq2seq, the sequence to answer"
    )
    p.option("--length", "N", "characters, words or tokens to write after the prompt", _count(1))
    what = "below 1 more predictable, above 1 more random, 0 always the most probable character"
    p.option("--temperature", "X", what, float)
    p.option(
        "--top-k", "K", "for pretrained models, draw from the K likeliest tokens only", _count(1)
    )
    what = "for pretrained models, nucleus sampling: the smallest set of tokens with this total probability"
    p.option("--top-p", "P", what, float)
    what = "for pretrained models, min-p sampling: tokens with at least this share of the greatest probability"
    p.option("--min-p", "P", what, float)
    what = "for pretrained models, penalize repeated tokens (1: off)"
    p.option("--repetition-penalty", "FACTOR", what, float)
    p.several("--stop", "TEXT", "for pretrained models, end before TEXT")
    what = "for pretrained models, begin from the trained state in FILE.safetensors"
    p.option("--state", "FILE", what, _path)
    p.seed("the seed of the random choices")
    p.option("--beam", "K", "for task seq2seq, the width of the beam search (1: greedy)", _count(1))
    p.option(
        "--attention",
        "FILE",
        "for task seq2seq, draw the attention of the best answer (needs the extra `plot`)",
    )


def _plot(p: _Options) -> None:
    p.argument("runs", "a run directory", _file, nargs="+", metavar="RUN")
    p.option(
        "--out",
        "FILE",
        "a .png, .svg or .pdf file (default: %(default)s)",
        _file,
        Path("losses.png"),
    )


def _runs(p: _Options) -> None:
    what = "a folder of runs; its sub-folders are searched too (default: %(default)s)"
    p.argument("folder", what, nargs="?", default="runs", metavar="FOLDER")
    p.json("the runs with whole configs")


def _predict(p: _Options) -> None:
    p.argument(
        "run", "a run directory of the task forecast or classification", _path, metavar="RUN"
    )
    what = "for forecast a CSV file with the columns that it reads; for classification a .npz file with `inputs`"
    p.argument(
        "file", f"{what} (default: the file of the config)", _path, nargs="?", metavar="FILE"
    )
    p.option("--out", "FILE", "the CSV file to write (default: the terminal)", _file)


def _export(p: _Options) -> None:
    p.argument("run", "a run directory", _path, metavar="RUN")
    what = (
        "FILE.onnx for onnxruntime, FILE.jax for jax.export, FILE.safetensors for a trained first state; another name is "
        "a folder with Caffe2's init_net.pb and predict_net.pb, or with a pretrained model"
    )
    p.argument("out", what, _file, metavar="OUT")
    p.flag("--step", "write (x, state) -> (y, state) for one step, to .onnx and .jax files")
    p.option(
        "--batch",
        "N",
        "the number of sequences (default: left open)",
        _count(1),
    )
    p.option(
        "--time",
        "T",
        "the number of steps (default: left open; a net needs it)",
        _count(1),
    )


def _configs(p: _Options) -> None:
    p.argument("name", "print this config (default: list all)", nargs="?", metavar="NAME")
    p.flag(
        "--keys", "print the keys of the config, or of all tasks, with their defaults and meanings"
    )


def _run(p: _Options) -> None:
    p.net(NET_OR_PACKAGE)
    p.several(
        "--fetch",
        "BLOB",
        "a blob to print; may be repeated (default: the net's external outputs)",
        None,
    )
    p.option("--out", "DIR", "write each fetched blob to DIR/BLOB.npy", _path)
    p.option(
        "--files",
        "DIR",
        "allow the net to read and write files in DIR; without it, it may not",
        _path,
    )
    what = "stop with an error when a loop runs longer than N iterations (default: %(default)s)"
    p.option("--max-iterations", "N", what, _count(1), 1_000_000)


def _show(p: _Options) -> None:
    p.net(NET_OR_PACKAGE)
    p.network()
    p.option(
        "--out",
        "FILE",
        "draw the graph instead of listing it: FILE.svg, or FILE.dot for Graphviz",
        _file,
    )


def _convert(p: _Options) -> None:
    what = "a NetDef file, a folder with init_net.pb and predict_net.pb, or FILE:NAME of a function that returns a package"
    p.argument("source", what, _path, metavar="SOURCE")
    what = "FILE.pbtxt for a net as text; else the NetDef file, or the folder of a package"
    p.argument("out", what, _file, metavar="OUT")
    p.network()


def _check(p: _Options) -> None:
    what = (
        "a NetDef file, a package, a config, FILE:NAME of a JAX function, or a pretrained model's folder; with --step, "
        "FILE:NAME of a kernel, or an ONNX model"
    )
    p.net(what, "TARGET")
    p.network()
    what = (
        "the blob to differentiate, which has one element (default: the blob `loss`, else what a training net "
        "differentiates, else all outputs)"
    )
    p.option("--loss", "BLOB", what)
    what = (
        "check that the kernel computes the loop of this step: a function without arguments that returns (step, state, xs) "
        "or (step, state, xs, options), with options of jrnn.testing.check_kernel"
    )
    p.option("--step", "FILE:STEP", what, _path)
    p.flag("--scan", "the function is a step (carry, x) -> (carry, y): run it over time")
    p.set("a config")
    what = "how many elements of a blob are compared one by one (default: %(default)s)"
    p.option("--elements", "N", what, _count(1), 200)
    p.json("the report")
    p.option("--out", "FILE", "write the report as a page, FILE.html, with the net drawn", _file)


def _ops(p: _Options) -> None:
    p.argument(
        "pattern",
        "list only operators whose name contains this",
        nargs="?",
        default="",
        metavar="PATTERN",
    )


def _bench(p: _Options) -> None:
    what = (
        "your own step, in FILE.py or a module: a function without arguments that returns (step, init, xs), or the step "
        "itself, with --feed; it runs by lax.scan and by each executor that can run it (default: the cells below)"
    )
    p.argument("step", what, _path, nargs="?", metavar="FILE:STEP")
    p.feed(
        "an argument of your step: FILE.npy, JSON, or normal[2,3]; name/0, name/1 for parts; the last one for all steps"
    )
    p.seed("the seed of normal[...]")
    what = f"some of {', '.join(CELLS)} (default: all; with --compile-for, lstm,gru)"
    p.option("--cells", "A,B", what, _names)
    p.option("--modes", "A,B", f"some of {', '.join(MODES)} (default: all)", _names)
    what = (
        "steps, sequences, features, hidden units; or the name of a set: six, or caffe2, the 24 of Caffe2's own "
        "benchmark (default: both sets; with --compile-for, six)"
    )
    p.option("--sizes", "TxNxDxH,...", what, _names)
    what = (
        "the programs to measure (default: all that can run here); for your own step, lax.scan and executors (default: "
        f"{', '.join(COMPARED_EXECUTORS)})"
    )
    p.option("--peers", "A,B", what, _names)
    p.option(
        "--turns",
        "N",
        "measured runs of each program, at most (default: %(default)s)",
        _count(1),
        15,
    )
    what = "time for one size, after which no run begins but the first three of each program (default: %(default)s)"
    p.option("--seconds", "S", what, _seconds, 20.0)
    what = "h100 or v5e: compile for an accelerator without having one; count kernels and bytes instead of measuring"
    p.option("--compile-for", "DEVICE", what)
    p.json("the figures and their conditions")
    p.option(
        "--out",
        "FILE",
        "draw the figures: FILE.png, .svg or .pdf (needs the extra `plot`)",
        _file,
        dest="plot",
    )


# Groups of commands: the function, the name, the summary and the arguments of each.
COMMANDS: dict[str, tuple[tuple[Any, str, str, Callable[[_Options], None]], ...]] = {
    "train and use models": (
        (training.train_command, "train", "train the model that a configuration describes", _train),
        (
            training.configs_command,
            "configs",
            "list the configs that ship with jrnn, print one, or its keys",
            _configs,
        ),
        (
            training.tokens_command,
            "tokens",
            "write texts as a corpus of tokens, for the task `tokens`",
            _tokens,
        ),
        (
            training.sample_command,
            "sample",
            "write text from a trained or a pretrained model",
            _sample,
        ),
        (
            training.predict_command,
            "predict",
            "forecast, or classify, the data of a file with a trained model",
            _predict,
        ),
        (
            training.export_command,
            "export",
            "write a trained model for ONNX, JAX or Caffe2",
            _export,
        ),
        (
            training.runs_command,
            "runs",
            "list runs by loss: state, metrics, speed, how their configs differ",
            _runs,
        ),
        (training.plot_command, "plot", "draw the losses of runs", _plot),
    ),
    "nets": (
        (nets.run_command, "run", "run a net operator by operator, or a plan net by net", _run),
        (
            nets.show_command,
            "show",
            "list the operators, shapes and parameters of a net or a plan",
            _show,
        ),
        (
            nets.convert_command,
            "convert",
            "convert nets and functions to Caffe2's files",
            _convert,
        ),
        (tools.ops_command, "ops", "list the operators", _ops),
    ),
    "measure and check": (
        (
            nets.check_command,
            "check",
            "compare gradients of three kinds; check a kernel or a pretrained model",
            _check,
        ),
        (
            tools.bench_command,
            "bench",
            "measure your own step, or cells next to other libraries",
            _bench,
        ),
        (
            tools.doctor_command,
            "doctor",
            "print packages and devices, and how to install what is missing",
            _nothing,
        ),
        (
            completion_command,
            "completion",
            "print a script for a shell that completes commands, options and names of files",
            _completion,
        ),
    ),
}


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
        raise argparse.ArgumentTypeError(
            "the name of a file or folder must not be empty, nor have a zero byte"
        )
    return text


def _file(text: str) -> Path:
    return Path(_path(text))


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))
