"""The commands about jrnn itself: ops, bench, doctor; and the console of all commands."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable

import numpy as np
from rich.console import Console

from jrnn.bench import cell_suite, compile_for, measure, own_step
from jrnn.bench.suites import SuiteOptions
from jrnn.cli import doctor
from jrnn.cli.output import say_written, terminal
from jrnn.errors import OpError, UsageError, near
from jrnn.files.tensors import load_npy
from jrnn.nets.memory import check_size
from jrnn.nets.ops import catalog


def wide_console() -> Console:
    return terminal(width=None if sys.stdout.isatty() else 140)  # a file gets whole tables


def ops_command(args: argparse.Namespace) -> int:
    known = {e.type: e for e in catalog.entries()}
    matching = [name for name in known if args.pattern.lower() in name.lower()]
    if not matching:
        raise UsageError(f"no operator's name contains {args.pattern!r}{near(args.pattern, known)}")
    for name in matching:
        e = known[name]
        arguments = f"  {e.arguments}" if e.arguments else ""
        print(f"{name}({e.inputs}) -> {e.outputs}{arguments}  gradient: {e.gradient}")
    return 0


def doctor_command(args: argparse.Namespace) -> int:
    return 0 if doctor.examine() else 1


def bench_command(args: argparse.Namespace) -> int:
    options = SuiteOptions(
        cells=args.cells,
        modes=args.modes,
        sizes=args.sizes,
        peers=args.peers,
        turns=args.turns,
        seconds=args.seconds,
        json=args.json,
        plot=args.plot,
        console=wide_console() if args.json != "-" else terminal(sys.stderr),
    )
    if args.step is not None:
        if args.compile_for is not None:
            raise UsageError(f"--compile-for means nothing for a step of your own, {args.step}")
        own_step.run(args.step, parse_feeds(args.feed, args.seed), options)
    elif args.feed:
        raise UsageError(
            "--feed gives the arrays of a step of your own: name it, as in jrnn bench cells.py:step"
        )
    elif args.compile_for:
        if args.plot:
            raise UsageError(
                "--out draws times: it means nothing with --compile-for, which measures none"
            )
        compile_for.run(args.compile_for, options)
    else:
        measure.run(options, cell_suite)
    if args.json != "-":
        say_written(args.json, args.plot)
    return 0


_SHOWN = 200  # characters of a feed in an error


def parse_feeds(feeds: Iterable[str], seed: int) -> dict[str, np.ndarray]:
    """The arrays that feeds of the forms BLOB=FILE.npy, BLOB=[1, 2.5] and BLOB=normal[2,3] name; `seed` is for normal.

    >>> parse_feeds(["x=[[1, 2]]", "w=normal[3]"], seed=0)["w"].shape
    (3,)
    """
    rng = np.random.default_rng(seed)
    blobs = {}
    for feed in feeds:
        name, equals, text = feed.partition("=")
        if not name or not equals:
            raise UsageError(f"--feed {feed}: must be written BLOB=VALUE, as in --feed x=x.npy")
        blobs[name] = _feed_value(feed, name, text, rng)
    return blobs


def _feed_value(feed: str, name: str, text: str, rng: np.random.Generator) -> np.ndarray:
    feed = feed if len(feed) <= _SHOWN else f"{feed[:_SHOWN]}..."
    if text.endswith(".npy"):
        try:
            return load_npy(text, UsageError)
        except UsageError as e:
            raise UsageError(f"--feed {name}={e}") from None
    rule = f"--feed {feed}: must be FILE.npy, a JSON number or list of numbers, or normal[2,3]"
    dtypes = {"i": np.int32, "u": np.int32, "f": np.float32, "b": np.bool_}
    drawn = re.fullmatch(r"normal(\[[\d, ]*\])", text)
    try:
        value = json.loads(drawn[1] if drawn else text)
        if drawn:
            shape = check_size(value, np.float64)
            return np.asarray(rng.standard_normal(shape), np.float32)
        wide = np.asarray(value)
        with np.errstate(over="ignore"):
            given = wide.astype(dtypes[wide.dtype.kind])
    except OpError as e:
        raise e.at(f"--feed {feed}") from None
    except (ValueError, KeyError, OverflowError, RecursionError):
        raise UsageError(rule) from None
    lost = (given != wide) if given.dtype == np.int32 else np.isinf(given) & np.isfinite(wide)
    if lost.any():
        raise UsageError(
            f"--feed {feed}: {wide[lost][0]} does not fit {given.dtype}; give a .npy file of a wider type"
        )
    return given
