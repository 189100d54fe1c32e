"""Checks recurrent layers of libraries with `jrnn.testing.check_layer`, for docs/benchmarks/layer_conformance.json.

Run it in an environment with jrnn and those of the libraries that are to be checked (flax, equinox, dm-haiku, keras, torch):

    python scripts/record/layer_conformance.py            # prints the table
    python scripts/record/layer_conformance.py --write    # and writes the file
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import tables

from jrnn.testing import ConformanceReport, check_layer
from jrnn.testing.properties import PROPERTIES

T, N, D, H = 3, 2, 2, 3
X = np.random.default_rng(0).standard_normal((T, N, D)).astype(np.float32)
ROWS = X.swapaxes(0, 1)  # [N, T, D]


def of_jrnn() -> Iterator[tuple[str, Callable[[], ConformanceReport]]]:
    nnx = importlib.import_module("flax.nnx")
    nn = importlib.import_module("jrnn.nn")
    for name in ("RNN", "LSTM", "GRU"):
        yield (
            f"`jrnn.nn.{name}`",
            lambda name=name: check_layer(getattr(nn, name)(D, H, rngs=nnx.Rngs(0)), X),
        )
    yield (
        "`jrnn.nn.GRU`, bidirectional",
        lambda: check_layer(nn.GRU(D, H, bidirectional=True, rngs=nnx.Rngs(0)), X),
    )


def of_nnx() -> Iterator[tuple[str, Callable[[], ConformanceReport]]]:
    nnx = importlib.import_module("flax.nnx")

    def rnn(kind: str, seed: int = 0) -> Any:
        return nnx.RNN(getattr(nnx, kind)(D, H, rngs=nnx.Rngs(seed)))

    for kind in ("LSTMCell", "GRUCell", "SimpleCell"):
        yield f"`flax.nnx.RNN({kind})`", lambda kind=kind: check_layer(rnn(kind), ROWS)
    yield (
        "`flax.nnx.Bidirectional`",
        lambda: check_layer(nnx.Bidirectional(rnn("GRUCell"), rnn("GRUCell", 1)), ROWS),
    )


def of_linen() -> Iterator[tuple[str, Callable[[], ConformanceReport]]]:
    nn = importlib.import_module("flax.linen")
    for kind in ("LSTMCell", "GRUCell"):
        yield (
            f"`flax.linen.RNN({kind})`",
            lambda kind=kind: check_layer(nn.RNN(getattr(nn, kind)(H)), ROWS),
        )
    both = lambda: nn.Bidirectional(nn.RNN(nn.GRUCell(H)), nn.RNN(nn.GRUCell(H)))  # noqa: E731
    yield "`flax.linen.Bidirectional`", lambda: check_layer(both(), ROWS)


def of_equinox() -> Iterator[tuple[str, Callable[[], ConformanceReport]]]:
    eqx = importlib.import_module("equinox")
    for kind in ("LSTMCell", "GRUCell"):
        cell = getattr(eqx.nn, kind)
        yield (
            f"`equinox.nn.{kind}`",
            lambda cell=cell: check_layer(cell(D, H, key=jax.random.key(0)), X),
        )


def of_haiku() -> Iterator[tuple[str, Callable[[], ConformanceReport]]]:
    hk = importlib.import_module("haiku")
    for kind in ("LSTM", "GRU"):

        def unrolled(x: Any, state: Any, kind: str = kind) -> Any:
            core = getattr(hk, kind)(H)
            return hk.dynamic_unroll(
                core, x, core.initial_state(x.shape[1]) if state is None else state
            )

        def reset(x: Any, state: Any, resets: Any, kind: str = kind) -> Any:
            core = hk.ResetCore(getattr(hk, kind)(H))
            state = core.initial_state(x.shape[1]) if state is None else state
            return hk.dynamic_unroll(
                core, (x, np.zeros(x.shape[:2], bool) if resets is None else resets), state
            )

        yield f"`haiku.{kind}`", lambda unrolled=unrolled: check_layer(hk.transform(unrolled), X)

        def with_resets(reset: Any = reset) -> ConformanceReport:
            pair = hk.without_apply_rng(hk.transform(reset))
            params = pair.init(jax.random.key(0), X, None, None)
            state = jax.tree.map(lambda v: v + 0.5, pair.apply(params, X, None, None)[1])
            return check_layer(
                lambda p, x, s, *, resets=None: pair.apply(p, x, s, resets), X, state, params=params
            )

        yield f"`haiku.ResetCore({kind})`", with_resets


def of_keras() -> Iterator[tuple[str, Callable[[], ConformanceReport]]]:
    keras = importlib.import_module("keras")
    options = {"return_sequences": True, "return_state": True}
    for kind in ("LSTM", "GRU", "SimpleRNN"):
        layer = getattr(keras.layers, kind)
        yield f"`keras.layers.{kind}`", lambda layer=layer: check_layer(layer(H, **options), ROWS)
    both = lambda: keras.layers.Bidirectional(keras.layers.GRU(H, **options))  # noqa: E731
    yield "`keras.layers.Bidirectional(GRU)`", lambda: check_layer(both(), ROWS)


def of_torch() -> Iterator[tuple[str, Callable[[], ConformanceReport]]]:
    torch = importlib.import_module("torch")
    for kind in ("RNN", "LSTM", "GRU"):
        yield f"`torch.nn.{kind}`", lambda kind=kind: check_layer(getattr(torch.nn, kind)(D, H), X)
    yield (
        "`torch.nn.GRU`, bidirectional",
        lambda: check_layer(torch.nn.GRU(D, H, bidirectional=True), X),
    )


LIBRARIES = {
    "jrnn": of_jrnn, "flax": of_nnx, "linen": of_linen, "equinox": of_equinox, "dm-haiku": of_haiku, "keras": of_keras,
    "torch": of_torch,
}  # fmt: skip


def main() -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    names = [a for a in sys.argv[1:] if not a.startswith("-")] or list(LIBRARIES)
    versions, rows, notes = [f"jax {jax.__version__}"], [], Notes()
    for library in names:
        package = "flax" if library == "linen" else library
        if package not in ("jrnn",) and library != "linen":
            versions.append(f"{package} {importlib.metadata.version(package)}")
        for name, check in LIBRARIES[library]():
            report = check()
            findings = {f.property: f for f in report.findings}
            marks = [
                "yes" if p in report.holds else "**no**" if p in findings else "-"
                for p in PROPERTIES
            ]
            rows.append((name, marks))
            for f in report.findings:
                notes.add(
                    package, name, f.property, f"for T={f.steps}, N={f.batch}, {f.counterexample}"
                )
            print(*rows[-1], *map(str, report.findings), sep="\n", flush=True)
    if "--write" in sys.argv:
        write("layer_conformance", versions, ["layer", *PROPERTIES], rows, notes)


class Notes:
    """What does not hold: one line for each property of a library, with its first counterexample."""

    def __init__(self) -> None:
        self.failures: dict[tuple[str, str], list[tuple[str, str]]] = {}

    def add(self, library: str, name: str, property: str, text: str) -> None:
        self.failures.setdefault((library, property), []).append((name, text))

    def lines(self) -> list[str]:
        texts = []
        for (_, property), cases in self.failures.items():
            name, text = cases[0]
            others = ", ".join(dict.fromkeys(n for n, _ in cases if n != name))
            shown = text.replace("<", "&lt;").replace("*", "\\*")
            texts.append(
                f"- {property}: {name}, {shown}" + (f"; likewise {others}" if others else "")
            )
        return texts


def write(
    name: str, versions: list[str], head: list[str], rows: list[tuple[str, list[str]]], notes: Notes
) -> None:
    """Writes docs/benchmarks/NAME.json; what has the same marks shares a row."""
    shared: dict[tuple[str, ...], list[str]] = {}
    for row, marks in rows:
        shared.setdefault(tuple(marks), []).append(row)
    merged = [[", ".join(names), *marks] for marks, names in shared.items()]
    conditions = f"With {', '.join(versions)}, on a CPU:"
    tables.write(
        name, {"conditions": conditions, "head": head, "rows": merged, "notes": notes.lines()}
    )


if __name__ == "__main__":
    main()
