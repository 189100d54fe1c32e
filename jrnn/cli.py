"""The command line: one sub-command calls one function. A user's mistake is one line and exit status 2."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from .bench import main as bench
from .bench.sizes import CELLS, MODES, SETS, parse_sizes
from .convert import from_factory, read_nets, write_python
from .errors import JrnnError, UsageError, near
from .execution_step import Plan
from .executor import host_devices, host_memory
from .feeds import parse_feeds
from .gradcheck import INEXACT, TOLERANCE, Effort, Subject, check, page, subject_of_file, subject_of_target, table_of
from .graph import show, to_dot, to_svg, upgrade
from .ir import Net
from .lowering import describe_value, infer_shapes, run_net
from .ops import catalog
from .plans import run_plan
from .proto import read_net, read_net_or_plan, write_net
from .train import export_run, load_config, sample_run, train
from .train.devices import join
from .train.plot import plot_runs
from .train.run_dir import first_free
from .train.runs import as_json, find_runs, runs_tables, summarize
from .train.subject import subject_of_config

INTERRUPTED = 130  # the shell's status of a command that Ctrl-C ended
PIPE_CLOSED = 141  # and of one whose reader, such as `head`, went away


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    0; 1 for a check that failed, 2 for a mistake; 130 where it was interrupted, 141 where nobody reads what it prints.
    """
    args = _parser().parse_args(argv)
    if argv is None:  # the process is ours
        host_memory.keep()
    try:
        status = args.function(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still holds when it ends
        return PIPE_CLOSED
    except JrnnError as e:
        if args.debug:
            raise
        print(f"jrnn {args.command}: error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jrnn", description="A JAX-compiled functional engine for recurrent networks."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(function: Any, name: str, summary: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=summary, description=summary)
        found.add_argument("--debug", action="store_true", help="show the traceback of an error")
        found.set_defaults(function=function)
        return found

    p = command(_train, "train", "train a model as a configuration says")
    p.add_argument("config", help="a TOML file, or a run directory: its config")
    p.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one key, as in train.steps=100"
    )
    p.add_argument("--out", metavar="DIR", help="the run directory; by default runs/NAME of the config")
    p.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of the run directory")
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

    p = command(_sample, "sample", "write text from a trained model")
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

    p = command(_plot, "plot", "draw the losses of runs")
    p.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    p.add_argument(
        "--out", type=Path, default=Path("losses.png"), metavar="FILE", help="a .png, .svg or .pdf (%(default)s)"
    )

    p = command(_runs, "runs", "list runs: what their configs differ in, best loss, speed, state")
    p.add_argument("folder", nargs="?", default="runs", help="where they are, or below it (default: %(default)s)")
    p.add_argument("--json", action="store_true", help="print JSON, with whole configs")

    p = command(_run, "run", "run a net, operator by operator, or a plan, net by net")
    _add_net(p)
    p.add_argument(
        "--fetch", action="append", metavar="BLOB", help="a blob to show; by default the net's external outputs"
    )
    p.add_argument("--save", metavar="DIR", help="write what is fetched to DIR/BLOB.npy")
    p.add_argument(
        "--max-iterations",
        type=int,
        default=1_000_000,
        metavar="N",
        help="a loop that goes on after so many rounds counts as endless (default: %(default)s)",
    )

    p = command(_show, "show", "list a net: operators, shapes, parameters, sub-nets")
    _add_net(p)
    p.add_argument("--dot", type=Path, metavar="FILE", help="write it as a graph in the DOT language instead")
    p.add_argument("--svg", type=Path, metavar="FILE", help="draw it instead")

    p = command(_convert, "convert", "turn JAX functions into nets, nets into Python, old nets into current ones")
    p.add_argument(
        "source",
        help="a NetDef file, binary or text; a folder with init_net.pb and predict_net.pb; MODULE:FACTORY; or a run",
    )
    p.add_argument(
        "out",
        help="a net's file (text where the name ends in .pbtxt), the folder of a package, or a .py file",
    )
    p.add_argument("--to", choices=("net", "py"), default="net", help="what to write (default: net)")
    p.add_argument("--init", metavar="NET", help="with --to py, the net that makes the weights of a NetDef file")

    p = command(_check, "check", "compute gradients in three ways, in float64, and compare them")
    _add_net(
        p, "a NetDef file, a package, a config (.toml), or MODULE:FUNCTION of a JAX function, whose arguments are fed"
    )
    p.add_argument("--loss", help="the blob to differentiate, of one element (default: loss, else all outputs)")
    p.add_argument(
        "--scan", action="store_true", help="the function is a step (carry, x) -> (carry, y): run it over time"
    )
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key of a config")
    p.add_argument("--elements", type=int, default=200, metavar="N", help="of a blob, checked singly (default: 200)")
    p.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    p.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page, with the net drawn")

    p = command(_ops, "ops", "list the operators")
    p.add_argument("pattern", nargs="?", default="", help="only those whose name contains this")

    p = command(_bench, "bench", "measure cells beside their peers, in one process and in turns")
    p.add_argument("--cells", type=_names, default=CELLS, metavar="A,B", help=f"of {', '.join(CELLS)}")
    p.add_argument("--modes", type=_names, default=MODES, metavar="A,B", help=f"of {', '.join(MODES)}")
    p.add_argument(
        "--sizes",
        type=_names,
        default=tuple(SETS),
        metavar="TxNxDxH,...",
        help="steps, sequences, features, hidden units; or sets: six, caffe2 (its own benchmark's 24); by default both",
    )
    p.add_argument("--peers", type=_names, metavar="A,B", help="by default all that can run here")
    p.add_argument("--turns", type=int, default=15, help="measured runs of each program, at most")
    p.add_argument(
        "--seconds", type=float, default=20.0, help="after which no more turns of a size begin, from the third on"
    )
    p.add_argument(
        "--devices", type=int, metavar="N", help="divide the CPU for one more row of jrnn; by default into its cores"
    )
    p.add_argument("--caffe2-python", metavar="PYTHON", help="a Python that has Caffe2, to measure it too")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the figures and their conditions")
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures (needs the extra `plot`)")
    p.add_argument("--compare", type=Path, metavar="FILE", help="a JSON file of an earlier run to compare with")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _add_net(p: argparse.ArgumentParser, what: str = "a NetDef file, binary or text") -> None:
    p.add_argument("net", help=what)
    p.add_argument("--init", metavar="NET", help="a net to run first, which makes the parameters")
    p.add_argument(
        "--feed",
        action="append",
        default=[],
        metavar="BLOB=VALUE",
        help="a blob's value: FILE.npy, a JSON number or list, or normal[2,3] for random numbers of that shape",
    )
    p.add_argument("--seed", type=int, default=0, help="of random operators and of normal[...]")


# training


def _train(args: argparse.Namespace) -> int:
    if args.distributed or args.coordinator is not None:
        join(args.coordinator, args.processes, args.process)
    elif args.processes is not None or args.process is not None:
        raise UsageError("--processes and --process need --coordinator HOST:PORT, where process 0 listens")
    given, changes = Path(args.config), list(args.set)
    if args.devices is not None:
        changes.append(f"train.devices={args.devices}")
    if args.tensorboard:
        changes.append("train.tensorboard=true")
    config = load_config(given / "config.toml" if given.is_dir() else given, changes)
    if config.train.devices > 1 and not args.distributed and args.coordinator is None:
        host_devices.divide(config.train.devices)
    if args.out is not None:
        out = Path(args.out)
    elif given.is_dir() and args.resume:
        out = given
    else:
        name = given.resolve().name if given.is_dir() else given.stem
        out = Path("runs", name) if args.resume else first_free(Path("runs"), name)
    is_first = jax.process_index() == 0
    console = Console(quiet=not is_first)
    console.print(f"run directory: {out}", markup=False, highlight=False, soft_wrap=True)
    result = train(config, out, resume=args.resume, profile=args.profile, console=console)
    if not is_first:
        return INTERRUPTED if result.interrupted else 0
    if result.interrupted:
        print(f"stopped at step {result.step}; continue with: jrnn train {out} --resume", file=sys.stderr)
        return INTERRUPTED
    writes = config.kind.write is not None
    if writes and not args.no_sample:
        print(f"--- what it writes:\n{sample_run(out)}\n---")
    print(f"{result}; more: jrnn sample {out}" if writes else result)
    return 0


def _sample(args: argparse.Namespace) -> int:
    names = ("prompt", "length", "temperature", "beam", "attention")
    print(sample_run(args.run_dir, args.seed, **{name: getattr(args, name) for name in names}))
    return 0


def _plot(args: argparse.Namespace) -> int:
    plot_runs(args.runs, args.out)
    print(f"wrote {args.out}")
    return 0


def _runs(args: argparse.Namespace) -> int:
    found = [summarize(run) for run in find_runs(args.folder)]
    if args.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        _wide_console().print(*runs_tables(found))
    return 0


# nets


def _run(args: argparse.Namespace) -> int:
    model, blobs = read_net_or_plan(args.net), _load_blobs(args)
    nets = model.networks if isinstance(model, Plan) else (model,)
    written = dict.fromkeys(o for net in nets for op in net.ops for o in op.outputs)
    for name in args.fetch or ():
        if name not in written and name not in blobs:
            kind = "plan" if isinstance(model, Plan) else "net"
            raise UsageError(f"--fetch {name}: {kind} {model.name!r} has no such blob{near(name, [*written, *blobs])}")
    options = {"key": jax.random.key(args.seed), "max_iterations": args.max_iterations}
    if isinstance(model, Plan):
        found = run_plan(model, blobs, **options)
        wanted = args.fetch or [n for n in written if isinstance(found.get(n), np.ndarray)]
    else:
        found = {**blobs, **run_net(model, blobs, **options)}
        wanted = args.fetch or list(model.external_outputs) or list(written)
    for name in wanted:
        if name not in found:
            raise UsageError(f"--fetch {name}: no step of plan {model.name!r} that ran wrote it to the workspace")
    for name in wanted:
        print(f"{name} {describe_value(found[name])}\n{found[name]}")
        if args.save:
            _save(Path(args.save), name, found[name])
    return 0


def _save(folder: Path, name: str, value: Any) -> None:
    path = folder / (name.replace("/", ".") + ".npy")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(path, value)
    except OSError as e:
        raise UsageError(f"--save: {path}: {e.strerror}") from None


def _show(args: argparse.Namespace) -> int:
    net, blobs = _load_net(args)
    if args.dot or args.svg:
        return _draw(net, args.dot, args.svg)
    try:
        shapes = infer_shapes(net, blobs, key=jax.random.key(args.seed))
    except JrnnError as e:
        print(show(net))
        if blobs:
            raise
        print(f"\nshapes are not known ({e}); give the inputs with --feed, and the parameters with --init")
        return 0
    print(show(net, shapes))
    _print_parameters(net, blobs)
    return 0


def _draw(net: Net, dot: Path | None, svg: Path | None) -> int:
    for path, drawn in ((dot, to_dot), (svg, to_svg)):
        if path is not None:
            _write(path, drawn(net))
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror}") from None


def _print_parameters(net: Net, blobs: Mapping[str, Any]) -> None:
    given = [name for name in net.external_inputs if name in blobs]
    if not given:
        return
    width = max(map(len, given))
    print("\ninputs and parameters")
    for name in given:
        print(f"  {name:{width}}  {describe_value(blobs[name])}")
    print(f"  {sum(np.size(blobs[name]) for name in given):,} numbers in all")


def _check(args: argparse.Namespace) -> int:
    with jax.enable_x64(True):
        subject = _subject(args)
        effort = Effort(TOLERANCE if subject.exact else INEXACT, max_elements=args.elements, directions=2, second=True)
        report = check(subject, effort, inner=args.html is not None)
    if args.html:
        _write(args.html, page(report, subject.net))
    if args.json:
        print(json.dumps(report.to_dict(), indent=2, allow_nan=False))
        return 0 if report.agrees else 1
    console = _wide_console()
    console.print(table_of(report))
    for line in (*report.notes, *(() if report.fault is None else (f"first fault: {report.fault}",))):
        print(line)
    print("the gradients agree" if report.agrees else "the gradients DISAGREE")
    return 0 if report.agrees else 1


def _subject(args: argparse.Namespace) -> Subject:
    """What `jrnn check` is to check."""
    is_config, is_function = args.net.endswith(".toml"), _is_factory(Path(args.net))
    for option, given, fits in (
        ("--set", args.set, is_config),
        ("--scan", args.scan, is_function),
        ("--init", args.init, not is_config and not is_function),
        ("--loss", args.loss, not is_config and not is_function),
        ("--feed", args.feed, not is_config),
    ):
        if given and not fits:
            raise UsageError(f"{option} means nothing for {args.net}")
    if is_config:
        return subject_of_config(load_config(args.net, args.set))
    feeds = parse_feeds(args.feed, args.seed)
    if is_function:
        return subject_of_target(args.net, feeds, scanned=args.scan)
    return subject_of_file(args.net, feeds, args.loss, init=args.init, key=jax.random.key(args.seed))


def _convert(args: argparse.Namespace) -> int:
    source, out = Path(args.source), Path(args.out)
    if args.to == "py":
        if _is_run(source):
            package = export_run(source)
        else:
            package = from_factory(args.source) if _is_factory(source) else read_nets(source, args.init)
        write_python(replace(package, predict_net=upgrade(package.predict_net)), out)
    elif args.init is not None:
        raise UsageError(f"--init {args.init}: the weights are written with --to py alone")
    elif _is_factory(source):
        from_factory(args.source).save(out)
    elif _is_run(source):
        export_run(source).save(out)
    else:
        write_net(upgrade(read_net(source)), out)
    print(f"wrote {args.out}")
    return 0


def _is_run(source: Path) -> bool:
    return (source / "config.toml").is_file()


def _is_factory(source: Path) -> bool:
    return ":" in source.name and not source.exists()


def _ops(args: argparse.Namespace) -> int:
    known = catalog.entries()
    found = [e for e in known if args.pattern.lower() in e.type.lower()]
    if not found:
        raise UsageError(f"no operator's name contains {args.pattern!r}{near(args.pattern, [e.type for e in known])}")
    for e in found:
        arguments = f"  {e.arguments}" if e.arguments else ""
        print(f"{e.type}({e.inputs}) -> {e.outputs}{arguments}  gradient: {e.gradient}")
    return 0


def _bench(args: argparse.Namespace) -> int:
    options = bench.Options(
        cells=args.cells,
        modes=args.modes,
        sizes=parse_sizes(args.sizes),
        peers=args.peers,
        turns=args.turns,
        seconds=args.seconds,
        devices=args.devices,
        caffe2_python=args.caffe2_python,
        json=args.json,
        plot=args.plot,
        compare=args.compare,
        console=_wide_console(),
    )
    bench.run(options)
    return 0


def _wide_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140)  # tables stay whole in a file


def _load_net(args: argparse.Namespace) -> tuple[Net, dict[str, Any]]:
    """The net, and its blobs."""
    return read_net(Path(args.net)), _load_blobs(args)


def _load_blobs(args: argparse.Namespace) -> dict[str, Any]:
    """The blobs that --init makes and --feed gives."""
    blobs: dict[str, Any] = {}
    if args.init:
        blobs.update(run_net(read_net(Path(args.init)), {}, key=jax.random.key(args.seed)))
    return blobs | parse_feeds(args.feed, args.seed)
