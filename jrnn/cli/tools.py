"""The commands about jrnn itself: ops, bench, doctor; and the console of all commands."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

from rich.console import Console

from jrnn.bench import compile_for, measure, own_step
from jrnn.bench.suites import SuiteOptions, suite_of
from jrnn.cli import doctor
from jrnn.cli.feeds import parse_feeds
from jrnn.cli.output import say_written, terminal
from jrnn.errors import UsageError, near
from jrnn.nets.ops import catalog


def wide_console() -> Console:
    return terminal(width=None if sys.stdout.isatty() else 140)  # a file gets whole tables


def ops_command(args: argparse.Namespace) -> int:
    known = catalog.entries()
    matching = [e for e in known if args.pattern.lower() in e.type.lower()]
    if not matching:
        raise UsageError(f"no operator's name contains {args.pattern!r}{near(args.pattern, [e.type for e in known])}")
    for e in matching:
        arguments = f"  {e.arguments}" if e.arguments else ""
        print(f"{e.type}({e.inputs}) -> {e.outputs}{arguments}  gradient: {e.gradient}")
    return 0


def doctor_command(args: argparse.Namespace) -> int:
    return 0 if doctor.examine() else 1


def bench_command(args: argparse.Namespace) -> int:
    chosen = {f.name: getattr(args, f.name) for f in fields(SuiteOptions) if f.name != "console"}
    console = wide_console() if args.json != "-" else terminal(sys.stderr)
    options = SuiteOptions(**chosen, console=console)
    if args.step is not None:
        given = {"--suite": args.suite != "scan", "--compile-for": args.compile_for is not None}
        for option, is_given in given.items():
            if is_given:
                raise UsageError(f"{option} means nothing for a step of your own, {args.step}")
        own_step.run(args.step, parse_feeds(args.feed, args.seed), options)
    elif args.feed:
        raise UsageError("--feed gives the arrays of a step of your own: name it, as in jrnn bench cells.py:step")
    elif args.compile_for:
        if args.suite != "scan":
            raise UsageError(f"--compile-for compiles cells: it means nothing for the suite {args.suite!r}")
        if args.plot:
            raise UsageError("--out draws times: it means nothing with --compile-for, which measures none")
        compile_for.run(args.compile_for, options)
    else:
        measure.run(options, suite_of(options))
    if args.json != "-":
        say_written(args.json, args.plot)
    return 0
