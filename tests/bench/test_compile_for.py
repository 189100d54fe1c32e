"""What is read off compiled programs, and the command that compiles for devices that are not there."""

from __future__ import annotations

import io
import json

import jax
import pytest
from rich.console import Console

from jrnn.bench import compile_for
from jrnn.bench.hlo import Cost, Module
from jrnn.bench.sizes import Size, flops
from jrnn.bench.suites import SuiteOptions
from jrnn.errors import ConfigError

TINY = Size(3, 2, 3, 4)

# As XLA:GPU writes it: a fused product with a slice of a stack, an update in place, a copy that runs at the same time.
PROGRAM = """
%product (p0: f32[10,2,8], p1: s32[], p2: f32[2,4], p3: f32[4,8]) -> f32[2,8] {
  %p0 = f32[10,2,8]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,2,8]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,2,8}
  %x = f32[2,8]{1,0} bitcast(%slice)
  %p2 = f32[2,4]{1,0} parameter(2)
  %p3 = f32[4,8]{1,0} parameter(3)
  %dot = f32[2,8]{1,0} dot(%p2, %p3), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %sum = f32[2,8]{1,0} add(%x, %dot)
}

%store (q0: f32[10,2,8], q1: s32[], q2: f32[2,8]) -> f32[10,2,8] {
  %q0 = f32[10,2,8]{2,1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %q2 = f32[2,8]{1,0} parameter(2)
  %row = f32[1,2,8]{2,1,0} bitcast(%q2)
  %none = s32[] constant(0)
  ROOT %new = f32[10,2,8]{2,1,0} dynamic-update-slice(%q0, %row, %q1, %none, %none)
}

%body (state: (s32[], f32[2,4], f32[10,2,8], f32[4,8])) -> (s32[], f32[2,4], f32[10,2,8], f32[4,8]) {
  %state = (s32[], f32[2,4]{1,0}, f32[10,2,8]{2,1,0}, /*index=3*/f32[4,8]{1,0:T(8,128)S(1)}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %h = f32[2,4]{1,0} get-tuple-element(%state), index=1
  %stack = f32[10,2,8]{2,1,0} get-tuple-element(%state), index=2
  %w = f32[4,8]{1,0} get-tuple-element(%state), index=3
  %z = f32[2,8]{1,0} fusion(%stack, %i, %h, %w), kind=kCustom, calls=%product
  %held-start = (f32[2,4]{1,0}, f32[2,4]{1,0}, u32[]) copy-start(%h)
  %held = f32[2,4]{1,0} copy-done(%held-start)
  %stored = f32[10,2,8]{2,1,0} fusion(%stack, %i, %z), kind=kLoop, calls=%store
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[2,4]{1,0}, f32[10,2,8]{2,1,0}, f32[4,8]{1,0}) tuple(%next, %held, %stored, %w)
}

%condition (c: (s32[], f32[2,4], f32[10,2,8], f32[4,8])) -> pred[] {
  %c = (s32[], f32[2,4]{1,0}, f32[10,2,8]{2,1,0}, f32[4,8]{1,0}) parameter(0)
  %at = s32[] get-tuple-element(%c), index=0
  %end = s32[] constant(10)
  ROOT %lt = pred[] compare(%at, %end), direction=LT
}

ENTRY %main (h0: f32[2,4], s0: f32[10,2,8], w0: f32[4,8]) -> f32[10,2,8] {
  %h0 = f32[2,4]{1,0} parameter(0)
  %s0 = f32[10,2,8]{2,1,0} parameter(1)
  %w0 = f32[4,8]{1,0} parameter(2)
  %first = s32[] constant(0)
  %start = (s32[], f32[2,4]{1,0}, f32[10,2,8]{2,1,0}, f32[4,8]{1,0}) tuple(%first, %h0, %s0, %w0)
  %loop = (s32[], f32[2,4]{1,0}, f32[10,2,8]{2,1,0}, f32[4,8]{1,0}) while(%start), condition=%condition, body=%body
  ROOT %result = f32[10,2,8]{2,1,0} get-tuple-element(%loop), index=2
}
"""


def test_kernels_bytes_and_operations_of_a_loop():
    (loop,) = Module(PROGRAM).loops()
    product = 4 + 4 * (
        2 * 8 + 2 * 4 + 4 * 8 + 2 * 8
    )  # the counter, a row of the stack, h, w, and the result
    held, stored = 4 * 2 * 4 * 3 + 4, 4 + 4 * 2 * (2 * 8)
    assert loop.trips == 10, "read off the condition"
    assert loop.kinds == {"fusion": 2, "copy-start": 1}, (
        "a scalar's addition and the end of a copy are no kernels"
    )
    assert loop.body == Cost(3, product + held + stored, 2 * 2 * 8 * 4)
    assert sum(Module(PROGRAM).costs(), Cost()) == sum([loop.body] * 10, Cost())
    known = PROGRAM.replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    )
    assert Module(known).loops()[0].trips == 7


def test_the_estimate_is_the_sum_over_kernels_of_what_takes_longest():
    h100 = compile_for.DEVICES["h100"]
    launches = [Cost(1, 8, 0), Cost(1, int(h100.bandwidth), 10), Cost(1, 0, int(2 * h100.peak))]
    assert h100.estimate(launches) == pytest.approx(h100.launch + 1 + 2)


def tiny(text=None, **options):
    return SuiteOptions(
        sizes=[str(TINY)], console=Console(file=text or io.StringIO(), width=200), **options
    )


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(compile_for, "described", lambda accelerator: jax.devices("cpu")[0])


@pytest.mark.exhaustive
def test_rows_table_and_file(on_a_cpu, tmp_path):
    """The whole command, with this machine's processor in the place of the accelerator."""
    text = io.StringIO()
    path = tmp_path / "a" / "h100.json"
    rows = compile_for.run("h100", tiny(text, cells=["lstm"], modes=["train"], json=path))
    assert [row.peer for row in rows] == ["jrnn", "jrnn.nn", "lax.scan", "flax"]
    for row in rows:
        assert len(row.kernels) == 2 and all(n >= 1 for n in row.kernels)
        assert row.bytes > 0 and row.temporary > 0 and row.estimated_seconds > 0
    ours, plain = rows[0], rows[2]
    assert plain.flops == flops("lstm", TINY, "train"), (
        "every contraction is counted, as often as its loop runs"
    )
    assert sum(ours.kernels) < sum(plain.kernels)
    assert "ESTIMATE" in text.getvalue() and "estimated us a step" in text.getvalue()
    written = json.loads((tmp_path / "a" / "h100.json").read_text())
    assert written["conditions"]["times"] == "estimated" and len(written["rows"]) == 4


def test_a_peer_without_the_cell_has_no_row(on_a_cpu):
    rows = compile_for.run(
        "v5e", tiny(cells=["lru"], modes=["forward"], peers=["flax", "lax.scan"])
    )
    assert [row.peer for row in rows] == ["lax.scan"]


@pytest.mark.parametrize("device, extra", [("h100", "aot-cuda"), ("v5e", "aot-tpu")])
def test_without_the_plugin_the_command_says_what_to_install(device, extra, monkeypatch):
    monkeypatch.setattr(compile_for.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install 'jrnn\[{extra}\]'"):
        compile_for.run(device, tiny(cells=["lstm"]))


def test_mistakes_name_the_near_word():
    for wrong in (
        ("h10", ["lstm"], ["train"], None),
        ("h100", ["lstn"], ["train"], None),
        ("h100", [], [], ["flux"]),
    ):
        target, cells, modes, peers = wrong
        with pytest.raises(ConfigError, match="did you mean"):
            compile_for.run(target, tiny(cells=cells, modes=modes, peers=peers))
