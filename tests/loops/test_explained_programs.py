"""`explain` as a context, the log `jrnn.loops`, `optimize_scans(everywhere=True)`, and contexts that are never left."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jrnn
from jrnn.jaxprs.jax_internals import tracing

pytestmark = pytest.mark.usefixtures("without_kernel")
T, N, D, H = 5, 2, 3, 4
XS = jnp.linspace(-1, 1, N * T * D).reshape(N, T, D)
ONES = jnp.ones((D, D))


def total(xs):
    return jnp.sum(jax.lax.scan(lambda c, x: (jnp.tanh(c + x @ ONES), c), jnp.zeros((T, D)), xs)[0])


def in_a_thread(fn):
    results = []
    thread = threading.Thread(target=lambda: results.append(fn()))
    thread.start()
    thread.join()
    return results[0]


def traced_loops(fn, *args):
    return len(jrnn.explain(fn, *args).loops)


def test_the_loops_of_a_library_say_where_they_are_and_why_they_are_so():
    graph, parameters, rest = nnx.split(
        nnx.RNN(nnx.GRUCell(D, H, rngs=nnx.Rngs(0))), nnx.Param, ...
    )

    @jax.jit
    def gradient(parameters, xs):
        return jax.grad(
            lambda p: jnp.sum(nnx.merge(graph, p, rest)(xs, initial_carry=jnp.zeros((N, H))))
        )(parameters)

    with jrnn.explain() as explained, jrnn.optimize_scans():
        in_a_thread(lambda: None)
        gradient(parameters, jnp.ones((N, 100, D)))
    forward, reverse = explained.loops
    assert (forward.title, reverse.title) == (
        "forward loop of 100 steps on cpu",
        "reverse loop of 100 steps on cpu",
    )
    assert reverse.strategy != "lax.scan"
    lines = str(explained).splitlines()
    assert lines[0].startswith("2 loops: ") and lines[1].startswith("flax/nnx/"), (
        "the library's line"
    )
    assert (
        f", from {os.path.join('tests', 'loops', Path(__file__).name)}" in lines[1]
        and "gradient" in lines[1]
    ), "ours"
    assert f"  reverse loop of 100 steps on cpu: {reverse.strategy}" in lines
    assert any("estimated: " in line and "(lax.scan: " in line for line in lines)


def test_the_reasons_of_loops_that_are_left_as_they_are():
    with jrnn.explain() as explained:
        for xs in (jnp.ones((0, 2)), jnp.ones((1, 2)), jnp.ones((3, 2)), jnp.ones((500, 64, 64))):
            jax.jit(
                lambda xs: jrnn.scan(lambda c, x: (c + x, None), jnp.zeros(xs.shape[1:]), xs)[0]
            )(xs)
    assert [plan.strategy for plan in explained.loops] == ["lax.scan"] * 4
    *short, others = [plan.notes for plan in explained.loops]
    assert short == [
        ("it has no steps",),
        ("it has one step",),
        ("it takes less time than planning it",),
    ]
    assert others == ("nothing to gain",) and "; nothing to gain" in explained.loops[3].text()
    with jrnn.explain() as explained, jrnn.optimize_scans(executor="associative"):
        jax.jit(total).lower(XS)
    assert "not associative: " in explained.loops[0].text()


def test_a_loop_over_matrix_states_has_the_reason_why_it_is_not_in_chunks():
    def loss(S, ks):
        return jnp.sum(
            jax.lax.scan(lambda S, k: (0.9 * S + jnp.outer(k, jnp.tanh(k @ S)), k @ S), S, ks)[1]
        )

    with jrnn.explain() as explained, jrnn.optimize_scans():
        jax.jit(jax.grad(loss)).lower(jnp.zeros((64, 64)), jnp.ones((256, 64)))
    assert explained.loops and all("not chunks: " in plan.text() for plan in explained.loops)


def test_equal_loops_are_counted_and_a_context_that_was_left_hears_nothing():
    with jrnn.explain() as explained, jrnn.optimize_scans():
        for k in (1.0, 2.0):
            jax.jit(lambda xs, k=k: jax.lax.scan(lambda c, x: (c * k + x, None), 0.0, xs)[0]).lower(
                jnp.ones(3)
            )
    assert len(explained.loops) == 2 and str(explained).count("forward loop") == 1
    assert "  forward loop of 3 steps on cpu: lax.scan, 2 times" in str(explained).splitlines()
    with jrnn.optimize_scans():
        jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c + x, None), 0.0, xs)[0]).lower(jnp.ones(4))
    assert len(explained.loops) == 2
    with jrnn.explain() as empty:
        traced_loops(total, XS)
    assert empty.loops == () and "optimize_scans(everywhere=True)" in str(empty)
    with pytest.raises(TypeError, match="as a context it has no arguments"):
        jrnn.explain(xs=XS)


def test_the_log(caplog):
    with caplog.at_level(logging.DEBUG, "jrnn.loops"), jrnn.optimize_scans():
        jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c - x, None), 0.0, xs)[0]).lower(jnp.ones(3))
        assert traced_loops(total, XS) == 1
    (line,) = caplog.messages  # `explain` lowers what does not run
    assert Path(__file__).name in line and ": forward loop of 3 steps on cpu: lax.scan\n" in line
    assert "\n  it takes less time" in line


def test_the_mark_of_a_process_holds_in_its_threads():
    assert traced_loops(total, XS) == 0
    with jrnn.optimize_scans(everywhere=True, memory=2.5):
        assert traced_loops(total, XS) == in_a_thread(lambda: traced_loops(total, XS)) == 1

        def plain(xs):
            with jrnn.plain_scans():
                return total(xs)

        assert (
            traced_loops(plain, XS)
            == traced_loops(jax.grad(plain), XS)
            == traced_loops(jax.grad(jax.jit(plain)), XS)
            == 0
        )
        with jrnn.optimize_scans(everywhere=True, executor="scan"), jrnn.plain_scans():
            assert traced_loops(total, XS) == 0
        options = [
            eqn.ctx.xla_metadata
            for eqn in jax.make_jaxpr(total)(XS).eqns
            if eqn.primitive.name == "scan"
        ]
        assert jrnn.loops.ir.tag.tag_in(options[0]).options.memory == 2.5, (
            "that of the outer block again"
        )
    assert traced_loops(total, XS) == in_a_thread(lambda: traced_loops(total, XS)) == 0


def test_marks_of_a_process_end_in_any_order():
    def memory():
        (eqn,) = [eqn for eqn in jax.make_jaxpr(total)(XS).eqns if eqn.primitive.name == "scan"]
        of_loop = jrnn.loops.ir.tag.tag_in(eqn.ctx.xla_metadata)
        return of_loop and of_loop.options.memory

    outer, inner = (jrnn.optimize_scans(everywhere=True, memory=factor) for factor in (2.5, 3.5))
    assert memory() == 3.5
    outer.close()
    assert memory() == 3.5, "the inner one has not ended"
    inner.close()
    assert memory() is None
    outer, inner = (jrnn.optimize_scans(everywhere=True, memory=factor) for factor in (2.5, 3.5))
    inner.close()
    assert memory() == 2.5
    outer.close()
    assert memory() is None


def test_mistakes_and_other_versions_of_jax(monkeypatch):
    with pytest.raises(TypeError, match="everywhere=True is for a process"):
        jrnn.optimize_scans(total, everywhere=True)
    monkeypatch.setattr(tracing, "updated_metadata", None)
    with pytest.raises(
        jrnn.errors.JrnnError, match="leave it out, and use the context in each thread"
    ):
        jrnn.optimize_scans(everywhere=True)


def test_a_context_can_be_entered_again_and_decorates_each_call():
    context = jrnn.optimize_scans()
    for _ in range(2):
        with context:
            assert traced_loops(total, XS) == 1
    marked = context(total)
    assert (
        marked.__name__ == "total"
        and traced_loops(marked, XS) == 1
        and traced_loops(total, XS) == 0
    )


PROGRAM = """
import jax, jax.numpy as jnp, jrnn
contexts = [jrnn.optimize_scans(), jrnn.plain_scans(), jrnn.optimize_scans(everywhere=True), jrnn.explain()]
for context in contexts:
    context.__enter__()
print(jax.eval_shape(lambda xs: jax.lax.scan(lambda c, x: (c + x, None), 0.0, xs)[0], jnp.ones(3)))
"""


def test_contexts_that_are_never_left_print_nothing_at_exit():
    environment = {**os.environ, "PYTHONPATH": str(Path(jrnn.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and done.stderr == "" and "float32" in done.stdout
