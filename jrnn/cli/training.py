"""The commands about training: train, sample, plot, runs, configs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import jax

from jrnn.cli.lost import end_in_one_line
from jrnn.cli.output import INTERRUPTED, terminal
from jrnn.cli.tools import wide_console
from jrnn.corpus import tokenize
from jrnn.errors import CheckpointError, UsageError, printable
from jrnn.loops import host
from jrnn.models import load
from jrnn.models.text import is_model, write_text
from jrnn.progress import Heartbeat
from jrnn.train import load_config, load_run, train
from jrnn.train.config import config_names, describe_config
from jrnn.train.devices import join
from jrnn.train.run_dir import RunDir, first_free
from jrnn.train.runs import find_runs, plot_runs, runs_tables, summarize


def train_command(args: argparse.Namespace) -> int:
    if args.distributed or args.coordinator is not None:
        join(args.coordinator, args.processes, args.process)
        if jax.process_index() > 0:
            end_in_one_line(args.command)
    elif args.processes is not None or args.process is not None:
        raise UsageError("--processes and --process need --coordinator HOST:PORT, where process 0 listens")
    given, changes = Path(args.config), list(args.set)
    if args.devices is not None:
        changes.append(f"train.devices={args.devices}")
    if given.is_dir() and not RunDir(given).is_begun():
        raise UsageError(
            f"{given}: is not a run directory: it has no config.toml; a run that was stopped before it wrote one is started "
            f"again with its config: jrnn train CONFIG --out {given}"
        )
    config = load_config(given / "config.toml" if given.is_dir() else given, changes)
    if args.tensorboard and "tensorboard" not in config.train.loggers:
        loggers = [*config.train.loggers, "tensorboard"]
        config = replace(config, train=replace(config.train, loggers=loggers))
    if config.train.devices > 1 and not args.distributed and args.coordinator is None:
        host.divide_cpu(config.train.devices)
    if args.out is not None:
        out = Path(args.out)
    elif given.is_dir() and args.resume:
        out = given
    else:
        name = given.resolve().name if given.is_dir() else given.stem
        out = Path("runs", name) if args.resume else first_free(Path("runs"), name)
    is_first = jax.process_index() == 0
    console = terminal(quiet=not is_first)
    console.print(printable(f"run directory: {out}"), markup=False, highlight=False, soft_wrap=True)
    result = train(config, out, resume=args.resume, profile=args.profile, console=console)
    if not is_first:
        return INTERRUPTED if result.interrupted else 0
    if result.interrupted:
        print(f"stopped at step {result.step}; continue with: jrnn train {out} --resume", file=sys.stderr)
        return INTERRUPTED
    writes = config.kind.write is not None
    if writes and not args.no_sample:
        with Heartbeat(console, "writing a sample"):
            text = result.model.sample()
        title = "forecast" if config.kind.name == "forecast" else "sample"
        print(f"{title}:\n{text}")
    print(f"{result}; more: jrnn sample {out}" if writes else result)
    return 0


def tokens_command(args: argparse.Namespace) -> int:
    names = ("tokenizer", "vocabulary", "separator", "field", "end")
    with Heartbeat(terminal(), "reading") as beat:
        corpus = tokenize(args.texts, args.out, **{name: getattr(args, name) for name in names}, say=beat.say)
    print(
        printable(
            f"wrote {args.out}: {len(corpus):,} tokens of {corpus.vocabulary:,} kinds in {corpus.documents:,} documents"
        )
    )
    return 0


OF_MODELS = ("top_k", "top_p", "min_p", "repetition_penalty")  # options of `jrnn sample` for pretrained models


def sample_command(args: argparse.Namespace) -> int:
    if is_model(args.run_dir):
        return _sample_model(args)
    try:
        model = load_run(args.run_dir)
    except CheckpointError:
        if not Path(args.run_dir).parent.exists():
            load(args.run_dir)  # raises, and says how to download a model of the hub
        raise
    if args.stop or any(getattr(args, name) is not None for name in OF_MODELS):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in OF_MODELS)
        raise UsageError(f"{options} and --stop are for folders of pretrained models")
    names = ("prompt", "length", "temperature", "beam", "attention")
    print(model.sample(args.seed, **{name: getattr(args, name) for name in names}))
    return 0


def _sample_model(args: argparse.Namespace) -> int:
    if args.beam is not None or args.attention is not None:
        raise UsageError("--beam and --attention are for runs of the task seq2seq")
    length = 100 if args.length is None else args.length
    options = {name: getattr(args, name) for name in ("temperature", *OF_MODELS) if getattr(args, name) is not None}
    for piece in write_text(args.run_dir, args.prompt or "", length, stop=args.stop, seed=args.seed, **options):
        print(piece, end="", flush=True)
    print()
    return 0


def plot_command(args: argparse.Namespace) -> int:
    plot_runs(args.runs, args.out)
    print(f"wrote {args.out}")
    return 0


def runs_command(args: argparse.Namespace) -> int:
    summaries = [summarize(run) for run in find_runs(args.folder)]
    if args.json:
        print(json.dumps([asdict(run) for run in summaries], indent=1))
    else:
        wide_console().print(*runs_tables(summaries))
    return 0


def configs_command(args: argparse.Namespace) -> int:
    for name in config_names():
        print(f"{name}\n    {describe_config(name)}")
    return 0
