"""The commands about nets: run, show, check, convert; and what `jrnn check` finds in a configuration."""

from __future__ import annotations

import argparse
import inspect
import io
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrnn.cli.output import say_written, terminal, write_json
from jrnn.cli.tools import parse_feeds, wide_console
from jrnn.convert import from_factory
from jrnn.convert.named import load_named
from jrnn.convert.package import INIT, PREDICT
from jrnn.errors import FormatError, JrnnError, NetError, UsageError, describe_value, near
from jrnn.files import write_whole
from jrnn.files.progress import Heartbeat
from jrnn.models import load
from jrnn.models.text import is_model
from jrnn.nets.graph import show, to_dot, to_svg, upgrade
from jrnn.nets.graph.scope import all_names, reads
from jrnn.nets.ir import Blobs, Net, Plan, Values
from jrnn.nets.lowering import infer_shapes, run_net, unwritten_output, without_sources
from jrnn.nets.plans import net_of_plan, run_plan, show_steps
from jrnn.nets.proto import read_net, read_net_or_plan, write_net, write_plan
from jrnn.testing import ConformanceReport, check_kernel, check_model, gradients
from jrnn.testing.gradients import Subject, subject_of_function, subject_of_net
from jrnn.train import load_config
from jrnn.train.config import Config, find_config
from jrnn.train.models.net import NetModel

_DRAWINGS = {".svg": to_svg, ".dot": to_dot}
_SHOWN = 200  # characters of an argument in an error
_NAMES = 8  # blobs in an error


def run_command(args: argparse.Namespace) -> int:
    model, blobs = _opened(args)
    nets = model.networks if isinstance(model, Plan) else (model,)
    written: dict[str, None] = {}
    for net in nets:
        for op in net.ops:
            written |= dict.fromkeys(op.outputs)
    for name in args.fetch or ():
        if name not in written and name not in blobs:
            raise UsageError(
                f"--fetch {name}: {_no_blob(model, name, [*written, *blobs], 'writes', written)}"
            )
    options = {
        "key": jax.random.key(args.seed),
        "max_iterations": args.max_iterations,
        "files": args.files,
    }
    if isinstance(model, Plan):
        values = run_plan(model, blobs, **options)
        wanted = args.fetch or [n for n in written if isinstance(values.get(n), np.ndarray)]
    else:
        try:
            values = {**blobs, **run_net(model, blobs, **options)}
        except NetError as e:
            if hint := _not_given(e, model, blobs, args):
                raise NetError(f"{e}; {hint}") from None
            raise
        wanted = args.fetch or list(model.external_outputs) or [n for n in written if n in values]
    for name in wanted:
        if name not in values and isinstance(model, Plan):
            raise UsageError(
                f"--fetch {name}: no step of plan {model.name!r} that ran wrote it to the workspace"
            )
        if name not in values:
            raise NetError(unwritten_output(model, name))
    files = _files_of(Path(args.out), wanted) if args.out else {}
    for name in wanted:
        print(f"{name} {describe_value(values[name])}\n{values[name]}")
        if args.out:
            _save(files[name], name, values[name])
    say_written(*files.values())
    return 0


def _files_of(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Returns the file of each blob that --out writes."""
    files: dict[str, Path] = {}
    owners: dict[Path, str] = {}
    for name in dict.fromkeys(names):
        path = folder / (name.replace("/", ".") + ".npy")
        if path in owners:
            raise UsageError(
                f"--out: blobs {owners[path]!r} and {name!r} would both be {path}; choose one with --fetch"
            )
        owners[path] = name
        files[name] = path
    return files


def _save(path: Path, name: str, value: Any) -> None:
    array = np.asarray(value)
    if array.dtype.kind == "O":
        items = array.reshape(-1).tolist()
        if not all(isinstance(v, bytes) and not v.endswith(b"\0") for v in items):
            raise UsageError(
                f"--out: blob {name!r} holds {describe_value(value)}, which a .npy file cannot hold"
            )
        array = np.asarray(items, np.bytes_).reshape(array.shape)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = io.BytesIO()
        np.save(written, array, allow_pickle=False)
        write_whole(path, written.getvalue(), FormatError)
    except (OSError, ValueError) as e:
        raise UsageError(f"--out: {path}: {getattr(e, 'strerror', None) or e}") from None


def show_command(args: argparse.Namespace) -> int:
    model, blobs = _opened(args)
    draw = None if args.out is None else _DRAWINGS.get(args.out.suffix)
    if args.out and not draw:
        raise UsageError(
            f"--out {args.out}: must end in {' or '.join(_DRAWINGS)}, which says what is drawn"
        )
    if isinstance(model, Plan) and args.network is None and not draw:
        print(show_steps(model))
        for net in model.networks:
            print(show(net))
        return 0
    net, before = _one_net(model, args.network)
    blobs = _run_before(before, blobs, args.seed)
    if draw:
        _write(args.out, draw(net))
        say_written(args.out)
        return 0
    try:
        shapes = infer_shapes(net, blobs, key=jax.random.key(args.seed))
    except JrnnError as e:
        print(show(net))
        hint = _not_given(e, net, blobs, args)
        if args.feed:
            raise (NetError(f"{e}; {hint}") if hint else e) from None
        print(f"\nshapes are not known ({e})" + (f"; {hint}" if hint else ""))
        return 0
    print(show(net, shapes))
    _print_parameters(net, blobs)
    return 0


def _no_blob(
    model: Net | Plan, name: str, known: Iterable[str], does: str, blobs: Iterable[str]
) -> str:
    """The error for an unknown blob. It lists similar names, or else the names that the net reads or writes."""
    near_names = near(name, known)
    kind = "plan" if isinstance(model, Plan) else "net"
    return f"{kind} {model.name!r} has no such blob{near_names or f'; it {does} {_listed(blobs)}'}"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(map(repr, names[:_NAMES])) + more


def _not_given(error: JrnnError, net: Net, blobs: Blobs, args: argparse.Namespace) -> str:
    """Returns what to give if an error is of blobs that a net reads and that were not given, or ""."""
    missing = [name for name in reads(net) if name not in blobs]
    if not any(f"reads blob {name!r}" in str(error) for name in missing):
        return ""
    path = Path(args.net)
    init = path.with_name(path.name.replace("predict_net", "init_net"))
    init_net = init if init != path and init.is_file() else "INIT_NET"
    parameters = "" if args.init else f", and parameters with --init {init_net}"
    return f"missing: {_listed(missing)}; give inputs with --feed BLOB=VALUE{parameters}"


def _write(path: Path, text: str) -> None:
    write_whole(path, text.encode("utf-8", "backslashreplace"), FormatError)


def _print_parameters(net: Net, blobs: Blobs) -> None:
    given = [name for name in net.external_inputs if name in blobs]
    if not given:
        return
    width = max(map(len, given))
    print("\ninputs and parameters")
    for name in given:
        print(f"  {name:{width}}  {describe_value(blobs[name])}")
    print(f"  {sum(np.size(blobs[name]) for name in given):,} numbers in all")


def check_command(args: argparse.Namespace) -> int:
    if args.step is not None:
        return _check_kernel(args)
    if is_model(args.net):
        return _check_model(args)
    if args.out is not None and args.out.suffix != ".html":
        raise UsageError(f"--out {args.out}: must end in .html")
    with jax.enable_x64(True), Heartbeat(terminal(sys.stderr), f"reading {args.net}") as beat:
        subject = _subject(args)
        tolerance = gradients.TOLERANCE if subject.exact else gradients.INEXACT
        effort = gradients.Effort(
            tolerance, max_elements=args.elements, directions=2, second=True, doing=beat.doing
        )
        report = gradients.check(subject, effort, inner=args.out is not None)
    if args.out:
        _write(args.out, gradients.page(report, subject.net))
    if args.json:
        write_json(args.json, report.to_dict())
    if args.json == "-":
        return 0 if report.agrees else 1
    print(report.conclusion())
    wide_console().print(gradients.table_of(report))
    for note in report.notes:
        print(note)
    if report.fault is not None:
        print(f"first fault: {report.fault}")
    print(report.verdict())
    say_written(args.out, args.json)
    return 0 if report.agrees else 1


def _check_model(args: argparse.Namespace) -> int:
    _refuse_options_of_gradients(args, "a pretrained model")
    return _print_conformance(check_model(load(args.net)))


def _check_kernel(args: argparse.Namespace) -> int:
    _refuse_options_of_gradients(args, "a kernel")
    make = load_named(args.step, UsageError, "STEP")
    parts = make() if callable(make) and not inspect.signature(make).parameters else None
    if not isinstance(parts, tuple) or len(parts) not in (3, 4) or not callable(parts[0]):
        raise UsageError(
            f"--step {args.step}: must be a function without arguments that returns (step, state, xs), or (step, state, xs, "
            "options) with options of jrnn.testing.check_kernel"
        )
    step, state, xs, *more = parts
    is_model_file = Path(args.net).suffix == ".onnx"
    kernel = args.net if is_model_file else load_named(args.net, UsageError, "KERNEL")
    return _print_conformance(check_kernel(step, kernel, xs, state, **(more[0] if more else {})))


def _refuse_options_of_gradients(args: argparse.Namespace, what: str) -> None:
    for option in ("init", "feed", "network", "loss", "scan", "set", "json", "out"):
        if getattr(args, option):
            raise UsageError(f"--{option} is for gradients; {args.net} is {what}")


def _print_conformance(report: ConformanceReport) -> int:
    print(report)
    return int(bool(report.findings))


def _subject(args: argparse.Namespace) -> gradients.Subject:
    """Returns the subject of `jrnn check`."""
    is_config = find_config(args.net).suffix == ".toml"
    is_function = _is_factory(Path(args.net))
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
        return gradients.subject_of_target(args.net, feeds, scanned=args.scan)
    key = jax.random.key(args.seed)
    plan = _plan_of(Path(args.net))
    if plan is not None or args.network is not None:
        net, before = _one_net(plan or read_net(Path(args.net)), args.network)
        loss = args.loss
        if not loss and any("loss" in op.outputs for op in net.ops):
            loss = "loss"
        blobs = _run_before(before, _load_blobs(args), args.seed)
        return gradients.subject_of_net(net, blobs, loss, key=key)
    try:
        return gradients.subject_of_file(args.net, feeds, args.loss, init=args.init, key=key)
    except NetError as e:
        hint = ""
        if Path(args.net).is_file():
            hint = _not_given(e, read_net(Path(args.net)), _load_blobs(args), args)
        raise (NetError(f"{e}; {hint}") if hint else e) from None


def convert_command(args: argparse.Namespace) -> int:
    source = Path(args.source)
    out = args.out
    if (source / "config.toml").is_file():
        raise UsageError(
            f"{source}: is a run directory, which jrnn export writes: jrnn export {source} {out}"
        )
    if out.suffix == ".onnx":
        raise UsageError(
            f"{out}: jrnn export writes runs as ONNX; in Python, jrnn.to_onnx writes other functions"
        )
    if out.suffix == ".py":
        raise UsageError(
            f"{out}: nets are not written as Python; jax.export.export(jax.jit(jrnn.to_jax(net))) makes a program "
            "that runs without jrnn"
        )
    if _is_factory(source):
        from_factory(args.source).save(out)
    else:
        model = read_net_or_plan(source)
        if isinstance(model, Plan) and args.network is None:
            write_plan(replace(model, networks=tuple(map(upgrade, model.networks))), out)
        else:
            write_net(upgrade(_one_net(model, args.network)[0]), out)
    say_written(out)
    return 0


def _plan_of(path: Path) -> Plan | None:
    """Reads a plan from a file; returns None if the file holds something else."""
    try:
        model = read_net_or_plan(path) if path.is_file() else None
    except FormatError:
        return None
    return model if isinstance(model, Plan) else None


def _is_factory(source: Path) -> bool:
    return ":" in source.name and not source.exists()


def _one_net(model: Net | Plan, network: str | None) -> tuple[Net, tuple[Net, ...]]:
    """Returns the net of a file, and the nets that its plan runs before it."""
    if isinstance(model, Plan):
        return net_of_plan(model, network)
    if network is not None:
        raise UsageError(f"--network {network}: net {model.name!r} is not a plan")
    return model, ()


def _run_before(nets: tuple[Net, ...], blobs: Values, seed: int) -> Values:
    """Returns the blobs, together with the blobs that the first nets of a plan make."""
    given = dict(blobs)
    for net in nets:
        net = without_sources(net, given)
        known = {n: blobs[n] for n in reads(net) if n in blobs}
        blobs = {**blobs, **run_net(net, known, key=jax.random.key(seed), fed=())}
    return blobs


def _opened(args: argparse.Namespace) -> tuple[Net | Plan, Values]:
    """Returns the net or the plan of `run` and `show`, and the blobs of --init and --feed. A folder is a package."""
    folder = Path(args.net)
    if folder.is_dir() and (folder / PREDICT).is_file():
        args.net = folder / PREDICT
        args.init = args.init or folder / INIT
    elif folder.is_dir():
        raise UsageError(
            f"{folder}: has no {PREDICT}; name the file of a net, or a folder with {INIT} and {PREDICT}"
        )
    model = read_net_or_plan(Path(args.net))
    blobs = _load_blobs(args)
    if isinstance(model, Net):
        known = dict.fromkeys((*model.external_inputs, *all_names(model)))
        for feed in args.feed:
            name = feed.partition("=")[0]
            if name not in known:
                raise UsageError(
                    f"--feed {name}: {_no_blob(model, name, known, 'reads', reads(model))}"
                )
    return model, blobs


def _load_blobs(args: argparse.Namespace) -> Values:
    """Returns the blobs of --init and --feed."""
    blobs: Values = {}
    if args.init:
        blobs.update(run_net(read_net(Path(args.init)), {}, key=jax.random.key(args.seed)))
    return blobs | parse_feeds(args.feed, args.seed)


def subject_of_config(config: Config) -> Subject:
    """Returns the loss of the first batch with the first parameters; a model that is not a net is a JAX function.

    Call it with 64-bit types enabled.

    Raises:
        DataError: if the data cannot be used. ConversionError: for a function that cannot be converted to a net.
    """
    with jax.enable_x64(False):
        task = config.kind.load(config)
        params = jax.device_get(jax.jit(task.model.init)(jax.random.key(config.seed)))
        batch = task.train.at(0)
        carry = jax.device_get(task.model.initial_carry(config.data.batch))
    model = task.model
    if isinstance(model, NetModel):
        fed = {blob: np.asarray(getattr(batch, member)) for blob, member in model.feeds.items()}
        blobs = {**model.constants, **params, **carry, **fed}
        key = jax.random.key(config.seed)
        return subject_of_net(model.net, blobs, model.loss_blob, wrt=[*params, *carry], key=key)

    def model_loss(params: Any) -> Any:
        return model.loss(params, carry, batch, None)[0]

    return subject_of_function(model_loss, (params,))
