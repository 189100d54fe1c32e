"""The commands about jrnn itself: ops, bench, doctor."""

from __future__ import annotations

import argparse

from jrnn import doctor
from jrnn.bench import compile_for
from jrnn.bench import main as bench
from jrnn.bench.sizes import GATES, SETS, parse_sizes
from jrnn.cli.console import wide_console
from jrnn.errors import UsageError, near
from jrnn.ops import catalog


def ops_command(args: argparse.Namespace) -> int:
    known = catalog.entries()
    found = [e for e in known if args.pattern.lower() in e.type.lower()]
    if not found:
        raise UsageError(f"no operator's name contains {args.pattern!r}{near(args.pattern, [e.type for e in known])}")
    for e in found:
        arguments = f"  {e.arguments}" if e.arguments else ""
        print(f"{e.type}({e.inputs}) -> {e.outputs}{arguments}  gradient: {e.gradient}")
    return 0


def doctor_command(args: argparse.Namespace) -> int:
    return 0 if doctor.examine() else 1


def bench_command(args: argparse.Namespace) -> int:
    if args.compile_for:
        cells, sizes = args.cells or ("lstm", "gru"), parse_sizes(args.sizes or ["six"])
        compile_for.run(args.compile_for, cells, args.modes, sizes, args.peers, wide_console(), args.json)
        return 0
    options = bench.Options(
        cells=args.cells or tuple(GATES),
        modes=args.modes,
        sizes=parse_sizes(args.sizes or list(SETS)),
        peers=args.peers,
        turns=args.turns,
        seconds=args.seconds,
        devices=args.devices,
        caffe2_python=args.caffe2_python,
        json=args.json,
        plot=args.plot,
        compare=args.compare,
        console=wide_console(),
    )
    bench.run(options)
    return 0
