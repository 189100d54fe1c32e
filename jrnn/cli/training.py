"""The commands about models: train, configs, tokens, sample, predict, export, runs, plot."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

from jrnn.cli.lost import end_in_one_line
from jrnn.cli.output import INTERRUPTED, MISTAKE, say_written, terminal, write_json
from jrnn.cli.tools import wide_console
from jrnn.errors import CheckpointError, ConfigError, DataError, TrainError, UsageError, printable
from jrnn.files import read_text, write_whole
from jrnn.files.corpus import tokenize
from jrnn.files.progress import Heartbeat
from jrnn.loops import host
from jrnn.models.hub import is_of_hub
from jrnn.models.text import is_model, write_text
from jrnn.train import load_config, load_run, train
from jrnn.train.config import (
    Config,
    config_names,
    describe_config,
    find_config,
    nearest_config,
    reference_of_keys,
)
from jrnn.train.devices import join
from jrnn.train.exports import EXPORTS
from jrnn.train.run_dir import RunDir, first_free
from jrnn.train.runs import find_runs, plot_runs, runs_tables, summarize
from jrnn.train.toml_codec import split_values


def train_command(args: argparse.Namespace) -> int:
    if args.distributed or args.coordinator is not None:
        join(args.coordinator, args.processes, args.process)
        if jax.process_index() > 0:
            end_in_one_line(args.command)
    elif args.processes is not None or args.process is not None:
        raise UsageError(
            "--processes and --process need --coordinator HOST:PORT, where process 0 listens"
        )
    given = Path(args.config)
    changes = list(args.set)
    if args.devices is not None:
        changes.append(f"train.devices={args.devices}")
    if given.is_dir() and not RunDir(given).is_begun():
        raise UsageError(
            f"{given}: is not a run directory: it has no config.toml; a run that was stopped before it wrote one is started "
            f"again with its config: jrnn train CONFIG --out {given}"
        )
    values = list(_combinations(args.sweep))
    file = given / "config.toml" if given.is_dir() else given
    configs = []  # all, before the first run
    for some in values:
        config = load_config(file, [*changes, *some])
        if args.tensorboard and "tensorboard" not in config.train.loggers:
            loggers = [*config.train.loggers, "tensorboard"]
            config = replace(config, train=replace(config.train, loggers=loggers))
        configs.append(config)
    if configs[0].train.devices > 1 and not args.distributed and args.coordinator is None:
        host.divide_cpu(configs[0].train.devices)
    if args.out is not None:
        out = Path(args.out)
    elif given.is_dir() and args.resume:
        out = given
    else:
        name = given.resolve().name if given.is_dir() else given.stem
        out = Path("runs", name) if args.resume else first_free(Path("runs"), name)
    if not args.sweep:
        return _train_one(configs[0], out, args)
    return _sweep(configs, [out / _folder_of(some) for some in values], args)


def _folder_of(assignments: Sequence[str]) -> str:
    """Returns the name of a run's folder in a sweep: one folder, whatever the values are."""
    return ",".join(assignments).replace("/", "_")


def _combinations(sweeps: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields the assignments of each run of a sweep, such as ("model.hidden=32", "seed=1")."""
    choices = []
    for sweep in sweeps:
        key, equals, text = sweep.partition("=")
        try:
            values = split_values(text)
        except ConfigError as e:
            raise UsageError(f"--sweep {key}: {e}") from None
        if not equals or not all(values):
            raise UsageError(
                f"--sweep {sweep}: must be written KEY=A,B,C, as in model.hidden=32,64"
            )
        choices.append([f"{key}={value}" for value in values])
    yield from itertools.product(*choices)


def _sweep(configs: Sequence[Config], folders: Sequence[Path], args: argparse.Namespace) -> int:
    """Trains one config after the other. A run that fails does not end the sweep; an interrupt does."""
    args.no_sample = True
    failed = False
    for config, folder in zip(configs, folders):
        try:
            if _train_one(config, folder, args) == INTERRUPTED:
                return INTERRUPTED
        except TrainError as e:
            print(f"{folder}: {e}", file=sys.stderr)
            failed = True
    if jax.process_index() == 0:
        wide_console().print(*runs_tables(list(map(summarize, folders))))
    return MISTAKE if failed else 0


def _train_one(config: Config, out: Path, args: argparse.Namespace) -> int:
    is_first = jax.process_index() == 0
    console = terminal(quiet=not is_first)
    console.print(printable(f"run directory: {out}"), markup=False, highlight=False, soft_wrap=True)
    result = train(config, out, resume=args.resume, profile=args.profile, console=console)
    if not is_first:
        return INTERRUPTED if result.interrupted else 0
    if result.interrupted:
        print(
            f"stopped at step {result.step}; continue with: jrnn train {out} --resume",
            file=sys.stderr,
        )
        return INTERRUPTED
    writes = config.kind.write is not None
    if writes and not args.no_sample:
        try:
            with Heartbeat(console, "writing a sample"):
                text = result.model.sample()
            print(f"sample:\n{text}")
        except DataError as e:  # the config's prompt has what the text lacks: no fault of the run
            print(
                f"no sample: sample.prompt = {config.sample.prompt!r}: {e}; use jrnn sample {out} --prompt TEXT"
            )
    more = "sample" if writes else "predict" if config.kind.predict is not None else ""
    print(f"{result}; more: jrnn {more} {out}" if more else result)
    return 0


def tokens_command(args: argparse.Namespace) -> int:
    with Heartbeat(terminal(), "reading") as beat:
        corpus = tokenize(
            args.texts,
            args.out,
            tokenizer=args.tokenizer,
            vocabulary=args.vocabulary,
            separator=args.separator,
            field=args.field,
            end=args.end,
            say=beat.say,
        )
    size = f"{len(corpus):,} tokens of {corpus.vocabulary:,} kinds"
    print(printable(f"wrote {args.out}: {size} in {corpus.documents:,} documents"))
    return 0


# Options of `jrnn sample` for pretrained models.
OF_DRAWS = ("top_k", "top_p", "min_p", "repetition_penalty")
OF_MODELS = (*OF_DRAWS, "state")


def _given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Returns the options among `names` that the command line has."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def sample_command(args: argparse.Namespace) -> int:
    if is_model(args.run):
        return _sample_model(args)
    try:
        model = load_run(args.run)
    except CheckpointError:
        if is_of_hub(args.run):
            return _sample_model(args)
        raise
    if args.stop or _given(args, OF_MODELS):
        options = ", ".join(OF_MODELS).replace("_", "-").replace(" ", " --")
        raise UsageError(f"--{options} and --stop are for folders of pretrained models")
    names = ("prompt", "length", "temperature", "beam", "attention")
    print(model.sample(args.seed, **_given(args, names)))
    return 0


def _sample_model(args: argparse.Namespace) -> int:
    if args.beam is not None or args.attention is not None:
        raise UsageError("--beam and --attention are for runs of the task seq2seq")
    length = 100 if args.length is None else args.length
    options = _given(args, ("temperature", *OF_DRAWS))
    options |= {"stop": args.stop, "seed": args.seed, "first_state": args.state}
    for piece in write_text(args.run, args.prompt or "", length, **options):
        print(piece, end="", flush=True)
    print()
    return 0


def predict_command(args: argparse.Namespace) -> int:
    text = load_run(args.run).predict(args.file)
    if args.out is None:
        print(text, end="")
    else:
        write_whole(args.out, text.encode(), UsageError)
        say_written(args.out)
    return 0


def export_command(args: argparse.Namespace) -> int:
    model = load_run(args.run)
    if args.out.suffix in EXPORTS:
        model.export(args.out, step=args.step, batch=args.batch, time=args.time)
    elif args.step:
        raise UsageError(f"--step is for files that end in {' or '.join(EXPORTS)}")
    elif args.out.suffix == ".safetensors":
        model.save_first_state(args.out)
    elif args.out.suffix == ".py":
        raise UsageError(
            f"{args.out}: models are not written as Python; FILE.jax is a program that runs without jrnn"
        )
    elif args.batch is not None or args.time is not None:
        raise UsageError(f"--batch and --time are for files that end in {' or '.join(EXPORTS)}")
    else:
        model.save(args.out)
    say_written(args.out)
    return 0


def plot_command(args: argparse.Namespace) -> int:
    plot_runs(args.runs, args.out)
    say_written(args.out)
    return 0


def runs_command(args: argparse.Namespace) -> int:
    summaries = list(map(summarize, find_runs(args.folder)))
    if args.json:
        write_json(args.json, list(map(asdict, summaries)))
    if args.json != "-":
        wide_console().print(*runs_tables(summaries))
        say_written(args.json)
    return 0


def configs_command(args: argparse.Namespace) -> int:
    if args.keys:
        print(reference_of_keys(None if args.name is None else load_config(args.name)))
    elif args.name is not None:
        path = find_config(args.name)
        print(read_text(path, ConfigError, missing=nearest_config(path)), end="")
    else:
        for name in config_names():
            print(f"{name}\n    {describe_config(name)}")
    return 0
