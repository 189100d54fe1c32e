"""The arguments of every command. A command's function is in `training`, `nets` or `tools`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jrnn.bench.sizes import CELLS, GATES, MODES
from jrnn.bench.suites import SUITES
from jrnn.cli import nets, tools, training
from jrnn.version import __version__


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jrnn", description="A JAX-compiled functional engine for recurrent networks."
    )
    parser.add_argument("--version", action="version", version=f"jrnn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(function: Any, name: str, summary: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=summary, description=summary)
        found.add_argument("--debug", action="store_true", help="show the traceback of an error")
        found.set_defaults(function=function)
        return found

    p = command(training.train_command, "train", "train a model as a configuration says")
    p.add_argument("config", help="a TOML file, the name of a config that ships, or a run directory: its config")
    p.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one key, as in train.steps=100"
    )
    p.add_argument("--out", metavar="DIR", help="the run directory; by default runs/NAME of the config")
    p.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint of the run, if there is one",
    )
    p.add_argument("--no-sample", action="store_true", help="do not write text when training ends")
    p.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="devices that share each batch, 0 for all; a CPU is divided into so many: train.devices",
    )
    p.add_argument("--tensorboard", action="store_true", help="also write events for TensorBoard: train.tensorboard")
    p.add_argument("--profile", action="store_true", help="trace a few steps, and tell where the time went")
    p = p.add_argument_group("several processes that train together, each started with this command (docs/scaling.md)")
    p.add_argument("--distributed", action="store_true", help="find the others by SLURM, Open MPI or Kubernetes")
    p.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens for the others")
    p.add_argument("--processes", type=int, metavar="N", help="how many there are")
    p.add_argument("--process", type=int, metavar="K", help="the number of this one, from 0; 0 alone writes")

    p = command(training.sample_command, "sample", "write text from a trained model")
    p.add_argument("run_dir", help="a run directory")
    p.add_argument("--prompt", help="how the text begins; of task seq2seq, what is to be answered")
    p.add_argument("--length", type=int, help="characters to write after the prompt")
    p.add_argument("--temperature", type=float, help="below 1 safer, above 1 wilder, 0 always the likeliest")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--beam", type=int, metavar="K", help="of task seq2seq, how many answers to search for (1: greedily)"
    )
    p.add_argument(
        "--attention",
        metavar="FILE",
        help="of task seq2seq, draw what the best answer attended to (needs the extra `plot`)",
    )

    p = command(training.plot_command, "plot", "draw the losses of runs")
    p.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    p.add_argument(
        "--out", type=Path, default=Path("losses.png"), metavar="FILE", help="a .png, .svg or .pdf (%(default)s)"
    )

    p = command(training.runs_command, "runs", "list runs: what their configs differ in, best loss, speed, state")
    p.add_argument("folder", nargs="?", default="runs", help="where they are, or below it (default: %(default)s)")
    p.add_argument("--json", action="store_true", help="print JSON, with whole configs")

    command(training.configs_command, "configs", "list the configs that ship, which train finds by name")

    p = command(nets.run_command, "run", "run a net, operator by operator, or a plan, net by net")
    _add_net(p)
    p.add_argument(
        "--fetch", action="append", metavar="BLOB", help="a blob to show; by default the net's external outputs"
    )
    p.add_argument("--save", metavar="DIR", help="write what is fetched to DIR/BLOB.npy")
    p.add_argument("--files", metavar="DIR", help="the folder in which it may read and write files; else it may not")
    p.add_argument(
        "--max-iterations",
        type=int,
        default=1_000_000,
        metavar="N",
        help="a loop that goes on after so many rounds counts as endless (default: %(default)s)",
    )

    p = command(nets.show_command, "show", "list a net or a plan: operators, shapes, parameters, sub-nets")
    _add_net(p)
    _add_network(p)
    p.add_argument("--dot", type=Path, metavar="FILE", help="write it as a graph in the DOT language instead")
    p.add_argument("--svg", type=Path, metavar="FILE", help="draw it instead")

    p = command(
        nets.convert_command, "convert", "turn JAX functions into nets, nets into Python, old nets into current ones"
    )
    p.add_argument(
        "source",
        help="a NetDef file, binary or text; a folder with init_net.pb and predict_net.pb; MODULE:FACTORY; or a run",
    )
    p.add_argument(
        "out",
        help="a net's file (text where the name ends in .pbtxt), the folder of a package, or a .py file",
    )
    _add_network(p)
    p.add_argument("--to", choices=("net", "py"), default="net", help="what to write (default: net)")
    p.add_argument("--init", metavar="NET", help="with --to py, the net that makes the weights of a NetDef file")
    _add_feed(p, "with --to py, an example of an input whose shape is not known: FILE.npy, JSON, or normal[2,3]")

    p = command(nets.check_command, "check", "compute gradients in three ways, in float64, and compare them")
    _add_net(p, "a NetDef file, a package, a config, or MODULE:FUNCTION of a JAX function, whose arguments are fed")
    _add_network(p)
    p.add_argument("--loss", help="the blob to differentiate, of one element (default: loss, else all outputs)")
    p.add_argument(
        "--scan", action="store_true", help="the function is a step (carry, x) -> (carry, y): run it over time"
    )
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key of a config")
    p.add_argument("--elements", type=int, default=200, metavar="N", help="of a blob, checked singly (default: 200)")
    p.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    p.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page, with the net drawn")

    p = command(tools.ops_command, "ops", "list the operators")
    p.add_argument("pattern", nargs="?", default="", help="only those whose name contains this")

    command(
        tools.doctor_command, "doctor", "say what is installed, which devices there are, and how to get what is missing"
    )

    p = command(tools.bench_command, "bench", "measure cells next to their peers, in one process and in turns")
    p.add_argument(
        "--suite",
        choices=SUITES,
        default="scan",
        help="scan: cells (default); nn: layers; convert: round trips through nets; graph: passes over nets; libraries: "
        "optimize_scans with others' layers; streaming: frame by frame",
    )
    p.add_argument(
        "--cells",
        type=_names,
        metavar="A,B",
        help=f"of {', '.join(CELLS)}; by default the first {len(GATES)}; with --compile-for lstm,gru",
    )
    p.add_argument("--modes", type=_names, metavar="A,B", help=f"of {', '.join(MODES)}")
    p.add_argument(
        "--sizes",
        type=_names,
        metavar="TxNxDxH,...",
        help="steps, sequences, features, hidden units; or sets: six, caffe2 (its own benchmark's 24); by default both, "
        "with --compile-for six",
    )
    p.add_argument("--peers", type=_names, metavar="A,B", help="by default all that can run here")
    p.add_argument("--turns", type=int, default=15, help="measured runs of each program, at most")
    p.add_argument(
        "--seconds", type=float, default=20.0, help="after which no more turns of a size begin, from the third on"
    )
    p.add_argument(
        "--devices", type=int, metavar="N", help="divide the CPU for one more row of jrnn; by default into its cores"
    )
    p.add_argument(
        "--compile-for",
        metavar="DEVICE",
        help="h100 or v5e: compile for an accelerator that is not there, and count kernels and bytes instead of measuring",
    )
    p.add_argument("--caffe2-python", metavar="PYTHON", help="a Python that has Caffe2, to measure it too")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures and their conditions")
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures (needs the extra `plot`)")
    p.add_argument("--compare", type=Path, metavar="FILE", help="a JSON file of an earlier run to compare with")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _add_network(p: argparse.ArgumentParser) -> None:
    p.add_argument("--network", metavar="NAME", help="of a plan, the net that is meant")


def _add_feed(p: argparse.ArgumentParser, what: str) -> None:
    p.add_argument("--feed", action="append", default=[], metavar="BLOB=VALUE", help=what)


def _add_net(p: argparse.ArgumentParser, what: str = "a NetDef file, binary or text") -> None:
    p.add_argument("net", help=what)
    p.add_argument("--init", metavar="NET", help="a net to run first, which makes the parameters")
    _add_feed(p, "a blob's value: FILE.npy, a JSON number or list, or normal[2,3] for random numbers of that shape")
    p.add_argument("--seed", type=int, default=0, help="of random operators and of normal[...]")
