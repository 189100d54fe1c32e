"""The benchmark's plumbing on tiny sizes; no figure is judged."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import custom_steps
import divided
import jax
import jax.numpy as jnp
import mean_times
import numpy as np
import pytest
import spelling_suite
import spellings
from compare import comparison_table
from rich.console import Console
from spelled_cells import problem

from jrnn.bench import cell_suite, measure, measured_cells, peers, results
from jrnn.bench.peers import Timed
from jrnn.bench.sizes import CELLS, SIZES, Size, flops
from jrnn.bench.suites import SuiteOptions
from jrnn.errors import ConfigError, UsageError
from jrnn.loops.kernels.native import library

TINY = Size(3, 2, 3, 4)


def run(options):
    return measure.run(options, cell_suite)


def quiet(**options):
    text = io.StringIO()
    chosen = SuiteOptions(
        sizes=[str(TINY)], turns=2, console=Console(file=text, width=200), **options
    )
    return chosen, text


def test_a_net_is_measured_next_to_the_same_cell():
    """Caffe2's LSTM by `to_jax`, with gradients for its weights and input."""
    forward, weights, x = peers.caffe2_net("lstm", TINY)
    assert forward(weights, x).shape == (TINY.steps, TINY.batch, TINY.hidden)
    of_weights, of_x = peers.in_mode(forward, "train")(weights, x)
    assert all(
        bool(jnp.any(leaf != 0))
        for leaf in (of_weights["cell/gates_t_w"], of_weights["cell/i2h_w"], of_x)
    )
    assert peers.caffe2_net("slstm", TINY) is None
    options, text = quiet(cells=["layer_norm_lstm"], peers=["jrnn", "net"], modes=["forward"])
    assert [r.peer for r in measure.run(options, custom_steps)] == ["jrnn", "net"]


def test_records_tables_json_plot_and_comparison(tmp_path):
    options, text = quiet(
        cells=["min_gru"],
        peers=["jrnn", "lax.scan", "associative"],
        json=tmp_path / "new" / "a.json",
        plot=tmp_path / "new" / "a.svg",
    )
    records = run(options)
    assert [(r.mode, r.peer) for r in records] == [
        (mode, peer)
        for mode in ("forward", "train")
        for peer in ("jrnn", "lax.scan", "associative")
    ]
    assert all(
        0 < r.low <= r.median <= r.high and r.turns == 2 and r.compile_seconds > 0 for r in records
    )
    assert "time of jrnn over the peer's" in text.getvalue() and "3x2x3x4" in text.getvalue()
    assert (tmp_path / "new" / "a.svg").stat().st_size > 1000

    data = json.loads((tmp_path / "new" / "a.json").read_text())
    assert data["conditions"]["versions"]["jax"] == jax.__version__
    assert {"device", "cores", "flags", "gemm_flops_per_second", "matmul_precision"} <= set(
        data["conditions"]
    )
    assert [results.Record(**r) for r in data["records"]] == records
    lines = shown_by(comparison_table(data["records"], data["records"])).splitlines()
    assert {line.split("│")[-2].strip() for line in lines if "min_gru" in line} == {"1.00"}


def test_mistakes_name_the_near_word():
    for wrong in (dict(cells=["lstn"]), dict(modes=["trane"]), dict(peers=["lax.scam"])):
        with pytest.raises(ConfigError, match="did you mean"):
            run(quiet(**wrong)[0])
    with pytest.raises(UsageError, match="--peers means nothing for the suite 'spellings'"):
        measure.run(SuiteOptions("spellings", peers=["jrnn"]), spelling_suite)


def test_the_same_step_gives_the_same_result_through_every_scan():
    """What is compared computes the same: each peer that takes our weights is checked against lax.scan."""
    for cell in (*CELLS, *custom_steps.CUSTOM):
        weights, x = measured_cells.inputs(cell, TINY)
        step, carry = measured_cells.make(cell, weights), measured_cells.initial(cell, TINY)
        ours, theirs = (which(step, carry, x)[1] for which in (peers.scan, jax.lax.scan))
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_programs_take_turns_in_changing_orders_and_follow_themselves():
    order = []

    def program(name, seconds):
        return Timed(lambda: order.append(name) or seconds)

    timings = measure.in_turns({"a": program("a", 1.0), "b": program("b", 0.004)}, 8)
    assert (timings["a"].median, timings["b"].median, timings["a"].turns) == (1.0, 0.004, 8)
    turns = "".join(order[2:])
    assert sorted(turns) == sorted("aabbbb" * 8), "a program runs for 10 ms before it is measured"
    blocks = [turns[i : i + 6] for i in range(0, len(turns), 6)]
    assert set(blocks) == {"aabbbb", "bbbbaa"}


def test_large_programs_take_fewer_turns():
    program = Timed(lambda: 1.0)
    assert measure.in_turns({"a": program}, 8, seconds=0.0)["a"].turns == 3
    assert measure.in_turns({"a": program}, 2, seconds=0.0)["a"].turns == 2


def test_ratios_and_their_means_by_set_of_sizes():
    def record(size, peer, median):
        return results.Record(
            "lstm", str(size), "train", peer, median, median, median, 3, None, None, 1.0
        )

    times = {("100x1x128x128", 1.0): 2.0, ("500x8x64x64", 1.0): 0.5, ("3x2x1x1", 3.0): 1.0}
    records = [
        record(size, peer, t)
        for (size, ours), their in times.items()
        for peer, t in (("jrnn", ours), ("flax", their))
    ]
    text = io.StringIO()
    Console(file=text, width=200).print(results.ratios_table(records))
    lines = [line.split("│")[3:5] for line in text.getvalue().splitlines() if "lstm" in line]
    assert [(what.strip(), ratio.strip()) for what, ratio in lines] == [
        ("100x1x128x128", "0.50"),
        ("500x8x64x64", "2.00"),
        ("3x2x1x1", "3.00"),
        ("geometric mean of six (2 of 6)", "1.00"),
        ("geometric mean", "3.00"),
    ]


def shown_by(table):
    text = io.StringIO()
    Console(file=text, width=200).print(table)
    return text.getvalue()


def test_a_column_that_would_be_empty_is_left_out():
    def record(peer, compile_seconds):
        return results.Record(
            "lstm", "3x2x1x1", "train", peer, 4e-5, 3e-5, 6e-5, 3, compile_seconds, None, 2.5e8
        )

    bare = shown_by(results.times_table([record("torch", None)], 1e9))
    assert "compile s" not in bare and "temporary MB" not in bare
    assert [cell.strip() for cell in bare.splitlines()[-2].split("│")[5:-1]] == [
        "0.04",
        "0.03-0.06",
        "25.0%",
    ]
    both = shown_by(results.times_table([record("jrnn", 1.5), record("torch", None)], 1e9))
    assert (
        "compile s" in both
        and "1.50" in both
        and both.splitlines()[-2].split("│")[-2].strip() == "-"
    )


def test_a_gemm_is_measured_by_its_best_turn(monkeypatch):
    clock = iter(
        [0.0, 0.0, 1.0, 1.0, 1.5, 1.5, 3.5, 3.5]
    )  # three turns, of which the second takes half a second
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    assert measure.gemm_flops(seconds=0.0, sides=[8]) == 2 * 8**3 / 0.5


def test_a_gemm_is_measured_beside_every_job(monkeypatch):
    rates = iter([1.0, 3.0, 2.0])
    monkeypatch.setattr(measure, "gemm_flops", lambda: next(rates))
    options, text = quiet(cells=["min_gru"], peers=["jrnn"], modes=["forward"])
    sizes = ["3x2x3x4", "2x1x1x1", "2x1x2x1"]
    monkeypatch.setattr(results, "times_table", lambda records, gemm: f"at best {gemm}")
    run(replace(options, sizes=sizes))
    assert "at best 3.0" in text.getvalue()


def test_operations_are_counted():
    assert flops("lstm", Size(10, 2, 3, 5), "train") == 3 * 2 * 10 * 2 * (3 + 5) * 20
    assert len(SIZES) == 6 and Size.parse(str(TINY)) == TINY


@pytest.mark.skipif(bool(library.loaded().reason), reason="the kernel for CPUs was not built")
def test_the_kernel_for_cpus_is_measured_where_it_runs_a_step():
    native = peers.available()["native"]
    assert native("lstm", TINY, "train").run() > 0
    assert native("automaton", TINY, "forward") is None


def test_a_batch_divided_over_the_cores_is_timed_in_a_process_of_its_own():
    """Its process answers with its costs, then with seconds."""
    assert divided.divided(2, "lstm", Size(3, 3, 3, 4), "train") is None, (
        "3 sequences cannot be divided by 2"
    )
    assert divided.divided(1, "lstm", Size(3, 3, 3, 4), "train") is None, (
        "on one core nothing is divided"
    )
    program = divided.divided(2, "lstm", Size(3, 2, 3, 4), "train")
    try:
        assert program.compile_seconds > 0 and program.peak_bytes > 0
        assert program.run() > 0
    finally:
        program.close()
    one = divided.divided_here(1, "gru", TINY, "train")
    assert one.run() > 0
    options = SuiteOptions("divided", cells=["gru"], modes=["forward"], sizes=["3x1x3x4"])
    (job,) = divided.jobs(options)
    assert set(job.programs) == {"jrnn", "lax.scan", f"jrnn x{peers.cores()}"}


@pytest.mark.parametrize(("backend", "mean"), [("cpu", 0.004), ("gpu", 0.012)])
def test_suites_time_the_processor_on_a_cpu_and_the_clock_on_an_accelerator(
    backend, mean, monkeypatch
):
    """Each run takes 4 ms of the processor and 12 ms of the clock, and counts once it is waited for."""
    waited = []
    clocks = SimpleNamespace(
        process_time=lambda: 0.004 * len(waited), perf_counter=lambda: 0.012 * len(waited)
    )
    monkeypatch.setattr(mean_times, "time", clocks)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    program = mean_times.averaged(jnp.sin, [jnp.ones(3)])
    assert program.run() == pytest.approx(mean)
    assert len(waited) == {"cpu": 5, "gpu": 2}[backend] and waited[0].shape == (3,)


def test_the_suite_of_spellings_has_all_of_a_cell_and_its_net():
    options = SuiteOptions("spellings", cells=["gated"], modes=["forward"], sizes=[str(TINY)])
    jobs = list(itertools.islice(spelling_suite.jobs(options), 2))
    assert [job.cell for job in jobs] == ["gated, eager", "gated, plain"]
    for job in jobs:
        assert set(job.programs) == {"jrnn", "lax.scan", "plain"}
        assert all(program.run() > 0 for program in job.programs.values())
    assert set(spellings.programs("gru", TINY, jax.lax.scan)) == {*spellings.SPELLINGS, "a net"} - {
        "joined states"
    }


@pytest.mark.parametrize("size", ["4x2x3x4", "1x1x1x1", "5x6x2x3"])
@pytest.mark.parametrize("cell", ["lstm", "gated", "delta", "kalman"])
def test_spellings_have_no_size_of_their_own(cell, size):
    """Such as a number of sequences that two `vmap`s divide by 4, or of steps that is no prime."""
    size = Size.parse(size)
    args = problem(cell, size)
    runs = spellings.programs(cell, size, jax.lax.scan)
    expected = jax.eval_shape(runs["plain"], *args)
    assert {name for name, run in runs.items() if jax.eval_shape(run, *args) != expected} == set()
