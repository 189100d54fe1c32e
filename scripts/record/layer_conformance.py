"""Checks recurrent layers of libraries with `jrnn.testing.check_layer`, and writes the table of docs/conformance.md.

Run it in an environment with jrnn and those of the libraries that are to be checked (flax, equinox, dm-haiku, keras, torch):

    python scripts/record/layer_conformance.py            # prints the table
    python scripts/record/layer_conformance.py --write    # and puts it into docs/conformance.md
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

from jrnn.testing import LayerReport, check_layer
from jrnn.testing.properties import PROPERTIES

PAGE = Path(__file__).parents[2] / "docs" / "conformance.md"
START, END = "<!-- table: scripts/record/layer_conformance.py -->", "<!-- end of the table -->"
T, N, D, H = 3, 2, 2, 3
X = np.random.default_rng(0).standard_normal((T, N, D)).astype(np.float32)
ROWS = X.swapaxes(0, 1)  # [N, T, D]


def of_jrnn() -> Iterator[tuple[str, Callable[[], LayerReport]]]:
    nnx = importlib.import_module("flax.nnx")
    nn = importlib.import_module("jrnn.nn")
    for name in ("RNN", "LSTM", "GRU"):
        yield f"`jrnn.nn.{name}`", lambda name=name: check_layer(getattr(nn, name)(D, H, rngs=nnx.Rngs(0)), X)
    yield "`jrnn.nn.GRU`, bidirectional", lambda: check_layer(nn.GRU(D, H, bidirectional=True, rngs=nnx.Rngs(0)), X)


def of_nnx() -> Iterator[tuple[str, Callable[[], LayerReport]]]:
    nnx = importlib.import_module("flax.nnx")

    def rnn(kind: str, seed: int = 0) -> Any:
        return nnx.RNN(getattr(nnx, kind)(D, H, rngs=nnx.Rngs(seed)))

    for kind in ("LSTMCell", "GRUCell", "SimpleCell"):
        yield f"`flax.nnx.RNN({kind})`", lambda kind=kind: check_layer(rnn(kind), ROWS)
    yield "`flax.nnx.Bidirectional`", lambda: check_layer(nnx.Bidirectional(rnn("GRUCell"), rnn("GRUCell", 1)), ROWS)


def of_linen() -> Iterator[tuple[str, Callable[[], LayerReport]]]:
    nn = importlib.import_module("flax.linen")
    for kind in ("LSTMCell", "GRUCell"):
        yield f"`flax.linen.RNN({kind})`", lambda kind=kind: check_layer(nn.RNN(getattr(nn, kind)(H)), ROWS)
    both = lambda: nn.Bidirectional(nn.RNN(nn.GRUCell(H)), nn.RNN(nn.GRUCell(H)))  # noqa: E731
    yield "`flax.linen.Bidirectional`", lambda: check_layer(both(), ROWS)


def of_equinox() -> Iterator[tuple[str, Callable[[], LayerReport]]]:
    eqx = importlib.import_module("equinox")
    for kind in ("LSTMCell", "GRUCell"):
        cell = getattr(eqx.nn, kind)
        yield f"`equinox.nn.{kind}`", lambda cell=cell: check_layer(cell(D, H, key=jax.random.key(0)), X)


def of_haiku() -> Iterator[tuple[str, Callable[[], LayerReport]]]:
    hk = importlib.import_module("haiku")
    for kind in ("LSTM", "GRU"):

        def unrolled(x: Any, state: Any, kind: str = kind) -> Any:
            core = getattr(hk, kind)(H)
            return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]) if state is None else state)

        def reset(x: Any, state: Any, resets: Any, kind: str = kind) -> Any:
            core = hk.ResetCore(getattr(hk, kind)(H))
            state = core.initial_state(x.shape[1]) if state is None else state
            return hk.dynamic_unroll(core, (x, np.zeros(x.shape[:2], bool) if resets is None else resets), state)

        yield f"`haiku.{kind}`", lambda unrolled=unrolled: check_layer(hk.transform(unrolled), X)

        def with_resets(reset: Any = reset) -> LayerReport:
            pair = hk.without_apply_rng(hk.transform(reset))
            params = pair.init(jax.random.key(0), X, None, None)
            state = jax.tree.map(lambda v: v + 0.5, pair.apply(params, X, None, None)[1])
            return check_layer(lambda p, x, s, *, resets=None: pair.apply(p, x, s, resets), X, state, params=params)

        yield f"`haiku.ResetCore({kind})`", with_resets


def of_keras() -> Iterator[tuple[str, Callable[[], LayerReport]]]:
    keras = importlib.import_module("keras")
    options = {"return_sequences": True, "return_state": True}
    for kind in ("LSTM", "GRU", "SimpleRNN"):
        layer = getattr(keras.layers, kind)
        yield f"`keras.layers.{kind}`", lambda layer=layer: check_layer(layer(H, **options), ROWS)
    both = lambda: keras.layers.Bidirectional(keras.layers.GRU(H, **options))  # noqa: E731
    yield "`keras.layers.Bidirectional(GRU)`", lambda: check_layer(both(), ROWS)


def of_torch() -> Iterator[tuple[str, Callable[[], LayerReport]]]:
    torch = importlib.import_module("torch")
    for kind in ("RNN", "LSTM", "GRU"):
        yield f"`torch.nn.{kind}`", lambda kind=kind: check_layer(getattr(torch.nn, kind)(D, H), X)
    yield "`torch.nn.GRU`, bidirectional", lambda: check_layer(torch.nn.GRU(D, H, bidirectional=True), X)


LIBRARIES = {
    "jrnn": of_jrnn, "flax": of_nnx, "linen": of_linen, "equinox": of_equinox, "dm-haiku": of_haiku, "keras": of_keras,
    "torch": of_torch,
}  # fmt: skip


SHOWN = "What does not hold, once for each library and property:"


def main() -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    names = [a for a in sys.argv[1:] if not a.startswith("-")] or list(LIBRARIES)
    versions, rows, notes = [f"jax {jax.__version__}"], [], {}
    for library in names:
        package = "flax" if library == "linen" else library
        if package not in ("jrnn",) and library != "linen":
            versions.append(f"{package} {importlib.metadata.version(package)}")
        for name, check in LIBRARIES[library]():
            report = check()
            found = {f.property: f for f in report.findings}
            marks = ["yes" if p in report.holds else "**no**" if p in found else "-" for p in PROPERTIES]
            rows.append(f"| {name} | {' | '.join(marks)} |")
            for f in report.findings:
                note = f"- {name}, {f.property}: for T={f.steps}, N={f.batch}, {_escaped(f.counterexample)}"
                notes.setdefault((library, f.property), note)
            print(rows[-1], *map(str, report.findings), sep="\n", flush=True)
    head = [f"| layer | {' | '.join(PROPERTIES)} |", f"|---|{'---|' * len(PROPERTIES)}"]
    text = "\n".join([f"With {', '.join(versions)}, on a CPU:", "", *head, *rows, "", SHOWN, "", *notes.values()])
    if "--write" in sys.argv:
        before, rest = PAGE.read_text().split(START)
        PAGE.write_text(f"{before}{START}\n\n{text}\n\n{END}{rest.split(END)[1]}")


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    main()
