"""The suites of scripts/benchmarks on tiny sizes; no figure is judged."""

from __future__ import annotations

import io
import runpy
import textwrap
from pathlib import Path

import caffe2_cells
import jax.numpy as jnp
import layer_peers
import libraries
import pytest
from rich.console import Console

from jrnn.bench import measure
from jrnn.bench.sizes import Size
from jrnn.bench.suites import SuiteOptions
from jrnn.errors import ConfigError, DataError

COMMAND = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "benchmarks" / "__main__.py"))


def run_suite(name, **chosen):
    text = io.StringIO()
    options = SuiteOptions(suite=name, turns=1, console=Console(file=text, width=200), **chosen)
    return measure.run(options, COMMAND["suite_of"](name)), text.getvalue()


def test_suites_of_layers_and_of_conversions(monkeypatch):
    plain = lambda size, heads: (lambda w, x: w * x, jnp.float32(heads))  # noqa: E731
    plain.__name__ = "json"  # stands for an installed library that has the layer
    monkeypatch.setattr(layer_peers, "PEERS", {"gla": plain})
    records, text = run_suite("layers", cells=["gla"], modes=["forward"], sizes=["3x2x16x16"])
    assert {r.peer for r in records} == {"jrnn", "lax.scan", "json"} and "temporary MB" in text
    plain.__name__ = "no_such_library"
    assert not layer_peers.of("gla", Size(3, 2, 16, 16), 4) and not layer_peers.of(
        "rwkv7", Size(3, 2, 16, 16), 4
    )
    records, text = run_suite("convert", cells=["mlp"])
    assert [r.peer for r in records] == ["round trip", "function"] and "512x256" in text
    assert "time of round trip over the peer's" in text


def test_mistakes_and_missing_libraries_are_named(monkeypatch, capsys):
    assert COMMAND["main"](["convert", "--sizes", "3x2x3x4"]) == 2
    assert "--sizes means nothing for the suite 'convert'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="there is no cell 'mpl'; .*did you mean 'mlp'"):
        run_suite("convert", cells=["mpl"])
    monkeypatch.setattr(libraries, "NEEDS", {"no_such_library": "its-package"})
    with pytest.raises(
        DataError, match="the suite 'libraries' needs no_such_library: pip install its-package"
    ):
        run_suite("libraries")
    monkeypatch.delenv("CAFFE2_PYTHON", raising=False)
    with pytest.raises(DataError, match="set CAFFE2_PYTHON to its path"):
        run_suite("caffe2")


def test_a_worker_process_is_timed_and_told_to_stop(tmp_path):
    """The protocol with Caffe2's process, played by a stand-in interpreter."""
    log = tmp_path / "log"
    stand_in = tmp_path / "python"
    stand_in.write_text(
        textwrap.dedent(f"""\
        #!/bin/sh
        echo "$2 $3 $4 $5 $6" > {log}
        while read line; do echo 0.25; done
        echo stopped >> {log}
        """)
    )
    stand_in.chmod(0o755)
    program = caffe2_cells.caffe2(str(stand_in), Size(3, 2, 3, 4), "train")
    assert program.run() == program.run() == 0.25
    program.close()
    assert log.read_text() == "3 2 3 4 train\nstopped\n"


def test_a_worker_that_dies_is_reported(tmp_path):
    program = caffe2_cells.caffe2("/bin/false", Size(3, 2, 3, 4), "train")
    with pytest.raises(DataError, match="ended with status 1"):
        program.run()
    program.close()
