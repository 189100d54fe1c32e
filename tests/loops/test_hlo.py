"""What the compiler is given: contractions in the loops, stacked arrays, carries. No clock is read.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from cases import gru_step, lstm_step
from plans_of import scan_plans

from jrnn.loops import scan

pytestmark = pytest.mark.usefixtures("rewritten")

T, N, D, H = 11, 3, 5, 7


def parameters(gates, steps=T):
    p = dict(wx=jnp.ones((D, gates * H)), wh=jnp.ones((H, gates * H)), b=jnp.ones((1, gates * H)))
    return p, jnp.ones((steps, N, D))


def lstm_loss(which, p, x):
    return jnp.sum(which(lstm_step(p), (jnp.zeros((N, H)),) * 2, x)[1] ** 2)


def gru_loss(which, p, x):
    return jnp.sum(which(gru_step(p), jnp.zeros((N, H)), x)[1] ** 2)


CELLS = {"lstm": (lstm_loss, 4), "gru": (gru_loss, 3)}


def traced_loops(which, cell, steps=T):
    """`(whole text, text of each loop's body)` of the compiled gradient, forward loop first."""
    loss, gates = CELLS[cell]
    p, x = parameters(gates, steps)
    compiled = (
        jax.jit(jax.grad(lambda p, x: loss(which, p, x), argnums=(0, 1))).lower(p, x).compile()
    )
    text = compiled.as_text()
    blocks = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    bodies = [blocks[name] for name in re.findall(r"while\(.*body=%?([\w.\-]+)", text)]

    def opened(name_or_text):
        """A body with the computations that it calls."""
        calls = re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", name_or_text)
        return name_or_text + "".join(opened(blocks[c]) for c in calls)

    return text, [opened(b) for b in bodies]


def contractions(text):
    return len(re.findall(r" dot\(", text)) + text.count("__onednn$matmul")


def stacked(body):
    """Arrays with a leading axis of T that a body writes a slice of."""
    return re.findall(rf"= f32\[{T},([\d,]+)\]\S* dynamic-update-slice\(", body)


@pytest.mark.exhaustive("gru")
@pytest.mark.parametrize("cell", CELLS)
def test_one_contraction_in_each_loop(cell):
    _, bodies = traced_loops(scan, cell)
    assert [contractions(body) for body in bodies] == [1, 1]
    _, plain = traced_loops(jax.lax.scan, cell)
    assert sum(map(contractions, plain)) > 2, (
        "the count would not see a contraction that was left in"
    )


@pytest.mark.parametrize("cell, stores", [("lstm", 6), ("gru", 5)])
def test_the_forward_loop_stacks_what_a_cell_needs(cell, stores):
    """h and the gates; for the LSTM also c, for the GRU also the state's part of the candidate: [N, H] each."""
    _, (forward, reverse) = traced_loops(scan, cell)
    assert sum(int(shape.split(",")[-1]) for shape in stacked(forward)) == stores * H
    # The reverse loop stacks the cotangents of the pre-activations: the GRU has two sets, for x and for h.
    columns = [int(shape.split(",")[-1]) for shape in stacked(reverse)]
    assert sum(columns) <= {"lstm": 4 * H, "gru": 6 * H}[cell]


@pytest.mark.parametrize("cell, gates", [("lstm", 4), ("gru", 3)])
def test_no_weight_is_carried_or_stacked(cell, gates):
    text, (_, reverse) = traced_loops(scan, cell)
    assert f"f32[{T},{H},{gates * H}]" not in text and f"f32[{T},{gates * H},{H}]" not in text
    root = re.search(r"ROOT [^\n]*tuple\([^\n]*", reverse).group()
    carried = re.findall(r"f32\[3,7\]", root.split(" tuple(")[0])
    assert len(carried) == {"lstm": 2, "gru": 1}[cell]
    written = re.findall(rf"= f32\[{H},{gates * H}\]\S* add", reverse)
    assert not written, "a weight's gradient is added up inside the loop"


@pytest.mark.parametrize("columns", [1, 0])
def test_the_gradient_of_a_weight_copies_the_smaller_operand(columns):
    """With PyTorch's weights, [4H, D] and [4H, H]: x and h are copied, transposed, and not the gates' cotangents."""
    turn = (lambda w: w) if columns else jnp.transpose
    weights, x = (turn(jnp.ones((4 * H, D))), turn(jnp.ones((4 * H, H)))), jnp.ones((T, N, D))

    def loss(weights, x):
        def step(h, x):
            wx, wh = map(turn, weights)
            z = jax.lax.dot_general(x, wx, (((1,), (1,)), ((), ()))) + jnp.einsum(
                "nh,gh->ng", h, wh
            )
            i, f, g, o = jnp.split(jnp.tanh(z), 4, axis=1)
            return (h := i * f + g * o), h

        return jnp.sum(scan(step, jnp.zeros((N, H)), x)[1] ** 2)

    text = jax.jit(jax.grad(loss)).lower(weights, x).compile().as_text()
    assert set(re.findall(rf"= f32\[(\d+),{T * N}\]", text)) == {str(D), str(H)}
    products = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text)
    assert {f"{D},{4 * H}", f"{H},{4 * H}"} <= set(products), (
        "a product of the larger operand, transposed"
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", CELLS)
def test_the_program_is_as_long_for_many_steps(cell):
    few, many = (traced_loops(scan, cell, steps)[0].count("\n") for steps in (10, 10_000))
    assert abs(many - few) <= 0.05 * few


def test_a_step_that_stacks_and_tiles_stores_no_more_than_one_that_does_not():
    def joined(h, x):
        a, b = jnp.unstack(jnp.tanh(jnp.stack([h, x])))
        return jnp.tanh(a * b + jnp.tile(x[:, :1], (1, H))), None

    def apart(h, x):
        return jnp.tanh(jnp.tanh(h) * jnp.tanh(x) + jnp.broadcast_to(x[:, :1], (N, H))), None

    loops = [
        scan_plans(step, jnp.ones((N, H)), jnp.ones((T, N, H))).training for step in (joined, apart)
    ]
    of_joined, of_apart = (sum(item.bytes for item in forward.stacked) for forward, _ in loops)
    assert of_joined <= of_apart


def test_explain_shows_the_same_loops():
    p, x = parameters(4)
    explained = scan_plans(lstm_step(p), (jnp.zeros((N, H)),) * 2, x)
    assert explained.strategy == "scan"
    forward, reverse = explained.training
    assert (forward.contractions, reverse.contractions) == (1, 1)
    assert [item.type for item in forward.hoisted] == ["float32[3,28]"]
    assert (
        sum(item.bytes for item in forward.stacked) == T * N * H * 4 * 6
    )  # h, c, three sigmoids, one tanh
    assert {item.type for item in reverse.accumulated} == {
        "float32[5,28]",
        "float32[7,28]",
        "float32[1,28]",
    }
    assert forward.loop.length == T and not forward.loop.reverse and reverse.loop.reverse
    assert "cases.py" in str(reverse), "source lines are shown"
