"""Masked and stopped steps run in a branch, and select nothing there: in place, with inputs of their own, with gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from jax.experimental import io_callback

import jrnn
from jrnn.jaxprs import all_equations
from jrnn.loops import scan
from jrnn.loops.ir import observers

T, SIZE = 5, 1 << 15
LARGE = jnp.zeros(SIZE)
XS = jnp.arange(1.0, T + 1)
close = functools.partial(
    jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
)


def scattered(c, x):
    k, held = c
    return (k + 1, held.at[k + jnp.array([0, 7])].add(x)), held[k + 7] * x


def in_a_loop(c, x):
    k, held = c
    return (k + 1, jax.lax.fori_loop(0, 3, lambda i, held: held.at[k + i].add(x), held)), held[
        k + 2
    ] * x


def sliced(c, x):
    k, held = c
    return (k + 1, jax.lax.dynamic_update_slice(held, x[None], (k,))), held[k]


def computed(c, x):
    k, held = c
    return (k + 1, jnp.sin(held) * x), held[0]


MASKS = {
    "lengths": dict(lengths=jnp.int32(3)),
    "mask": dict(mask=jnp.array([True, False, True, True, False])),
    "resets": dict(resets=jnp.array([False, False, True, False, True])),
    "until": dict(until=lambda c: c[0] >= 3),
}


def selected_bytes(step, held, **options):
    """The bytes of the largest selection in the compiled steps of a loop, and whether it has branches."""
    text = jax.jit(lambda xs, held: scan(step, (0, held), xs, **options)).lower(XS, held).as_text()
    sizes = [
        line.rsplit("tensor<", 1)[1].split(">")[0]
        for line in text.splitlines()
        if "stablehlo.select" in line
    ]
    counts = [int(np.prod([int(n) for n in size.split("x")[:-1]], dtype=int)) for size in sizes]
    return 4 * max(counts, default=0), "stablehlo.case" in text


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("step", [scattered, in_a_loop])
def test_a_large_carry_that_is_updated_in_place_is_not_selected(step, masks):
    large, in_branch = selected_bytes(step, LARGE, **MASKS[masks])
    assert large < LARGE.nbytes and in_branch == (masks != "until")


def test_other_carries_are_selected_so_that_their_steps_stay_open():
    for masks in ("lengths", "mask"):
        assert not selected_bytes(computed, LARGE, **MASKS[masks])[1]
        assert not selected_bytes(scattered, LARGE[:100], **MASKS[masks])[1]
        assert not selected_bytes(sliced, LARGE, **MASKS[masks])[1], "XLA selects the slice alone"
    assert selected_bytes(sliced, LARGE, **MASKS["resets"])[1]


def by_hand(step, held, xs, lengths=T, mask=(), resets=(), until=None):
    first = c = (0, held)
    ys = []
    for t in range(T):
        c = first if t < len(resets) and resets[t] else c
        out = t >= lengths or (t < len(mask) and not mask[t]) or (until is not None and until(c))
        c, y = (c, jnp.zeros(())) if out else step(c, xs[t])
        ys.append(y)
    return c, jnp.stack(ys)


@pytest.mark.sample("lengths-in_a_loop", "until-scattered")
@pytest.mark.parametrize("step", [scattered, sliced, in_a_loop], ids=lambda step: step.__name__)
@pytest.mark.parametrize("masks", MASKS)
def test_values_and_derivatives_are_those_of_the_steps_by_hand(masks, step, x64):
    held, xs = jnp.cos(jnp.arange(float(SIZE))), jnp.asarray(XS, float)
    known = {name: v if callable(v) else np.asarray(v) for name, v in MASKS[masks].items()}

    def loss(run, held, xs):
        (_, held), ys = run(held, xs)
        return jnp.sum(jnp.sin(ys)) + jnp.sum(held[:20] ** 3)

    def everything(run):
        gradient = jax.grad(functools.partial(loss, run), argnums=(0, 1))
        tangent = jax.jvp(lambda xs: gradient(held, xs)[1], (xs,), (xs,))[1]
        return run(held, xs), gradient(held, xs), tangent

    ours = jax.jit(lambda: everything(lambda held, xs: scan(step, (0, held), xs, **MASKS[masks])))()
    close(ours, by_numpy(lambda: everything(lambda held, xs: by_hand(step, held, xs, **known)))())


@pytest.mark.parametrize("step", [scattered, in_a_loop], ids=lambda step: step.__name__)
def test_examples_are_masked_each_for_itself(step, x64):
    held, xs = jnp.cos(jnp.arange(float(SIZE))), jnp.asarray(XS, float)
    cases = {
        "lengths": (jnp.array([0, 2, 5]), lambda v: dict(lengths=v)),
        "mask": (jnp.arange(3 * T).reshape(3, T) % 4 != 0, lambda v: dict(mask=v)),
        "until": (jnp.array([0, 2, 9]), lambda v: dict(until=lambda c: c[0] >= v)),
    }

    def loss(xs, value, options):
        (_, last), ys = scan(step, (0, held), xs, **options(value))
        return jnp.sum(jnp.sin(ys)) + jnp.sum(last[:20] ** 3)

    for values, options in cases.values():
        each = jax.jit(jax.grad(functools.partial(loss, options=options)))
        close(
            jax.jit(jax.vmap(each, (None, 0)))(xs, values), jnp.stack([each(xs, v) for v in values])
        )


def test_what_stops_under_vmap_is_evaluated_where_its_derivative_is_finite(x64):
    def run(limit, start):
        return scan(lambda c, x: (c - 1, 1 / c), start, XS, until=lambda c: c < limit)[1].sum()

    limits, starts = jnp.array([0.5, 2.5, -9.0]), jnp.array([2.0, 4.0, 5.5])
    gradients = jax.vmap(jax.grad(run, argnums=1))(limits, starts)
    close(
        gradients,
        jnp.array([-1 / 4 - 1, -1 / 16 - 1 / 9, -sum(1 / (5.5 - k) ** 2 for k in range(T))]),
    )


def test_weights_are_not_stored_for_each_step():
    w = jnp.ones((6, 6)) / 8

    def train(w, xs):
        step = lambda h, x: (jnp.tanh(h @ w + x), None)  # noqa: E731
        return scan(step, jnp.zeros((2, 6)), xs, until=lambda h: h.sum() > 99)[0].sum()

    closed = jax.make_jaxpr(jax.grad(train))(w, jnp.ones((T, 2, 6)))
    stacks = [
        v.aval.shape
        for eqn in all_equations(closed.jaxpr)
        if eqn.primitive.name == "scan"
        for v in eqn.outvars
    ]
    assert (T, 2, 6) in stacks and (T, 6, 6) not in stacks


# Side effects ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls():
    """A step that adds what it gets, and calls the host with it; and what the host saw."""
    seen = []

    def step(c, x):
        io_callback(lambda v: seen.append(np.asarray(v).tolist()), None, x, ordered=True)
        return c + x, c

    return step, seen


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"recompute": 2}], ids=str)
@pytest.mark.parametrize(
    "masks, steps",
    [({"lengths": 3}, [0, 1, 2]), ({"mask": jnp.array([1, 0, 1, 1, 0], bool)}, [0, 2, 3])],
)
def test_the_host_is_not_called_at_masked_steps(masks, steps, options, calls):
    step, seen = calls
    expected = [float(XS[t]) for t in (steps[::-1] if "reverse" in options else steps)]
    for run in (scan, jax.jit(functools.partial(scan, step, **masks, **options))):
        args = (step, 0.0, XS) if run is scan else (0.0, XS)
        last, _ = run(*args, **(masks | options if run is scan else {}))
        jax.effects_barrier()
        assert float(last) == sum(expected) and seen == expected
        seen.clear()


def test_the_host_is_called_while_a_sequence_of_the_batch_goes_on(calls):
    step, seen = calls
    xs = jnp.stack([XS, XS * 10], axis=1)
    with observers.collected() as plans:
        last, _ = scan(step, jnp.zeros(2), xs, lengths=jnp.array([3, 1]))
    jax.effects_barrier()
    assert last.tolist() == [6, 10] and seen == [[1, 10], [2, 10], [3, 10]]
    assert any("get placeholder inputs" in note for note in plans.notes)


def test_printing_in_a_differentiated_step(capfd):
    def step(c, x):
        jax.debug.print("at {x}", x=x)
        return c * x, c

    gradient = jax.grad(lambda xs: scan(step, 1.0, xs, lengths=2)[0])(XS)
    jax.effects_barrier()
    assert gradient.tolist() == [2, 1, 0, 0, 0]
    assert set(capfd.readouterr().out.split()) == {"at", "1.0", "2.0"}


def test_a_while_loop_updates_its_state_in_place():
    def body(s):
        return s[0] + 1, s[1].at[s[0] + jnp.array([0, 5])].add(1.0)

    run = jax.jit(lambda held: jrnn.while_loop(lambda s: s[0] < 9, body, (0, held), max_steps=20))
    lines = run.lower(LARGE).as_text().splitlines()
    assert not any("stablehlo.select" in line and f"{SIZE}x" in line for line in lines)
    assert run(LARGE)[1].sum() == 18
