"""Steps that do not count: every layer computes what it computes of the others alone, in both directions, with resets."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from flax import nnx
from test_recurrent_layers import LAYERS

from jrnn import nn
from jrnn.errors import LayerError

T, N, D = 7, 4, 8


def own(param_dtype, rngs):
    def step(p, h, x):
        h = jnp.tanh(h * p["u"][None] + x @ p["w"])
        return h, h

    start = {
        "u": np.linspace(0.1, 0.9, 3).astype(param_dtype),
        "w": np.eye(D, 3, dtype=param_dtype),
    }
    return nn.Recurrent(step, D, lambda n: jnp.zeros((n, 3), param_dtype), start, rngs=rngs)


STACKS = {
    "RNN": lambda **o: nn.RNN(D, 3, 2, **o),
    "LSTM": lambda **o: nn.LSTM(D, 3, 2, proj_size=2, **o),
    "GRU both": lambda **o: nn.GRU(D, 3, 2, bidirectional=True, **o),
    "GRU merged": lambda **o: nn.GRU(D, 3, bidirectional=True, merge_directions=True, **o),
}
ALL = LAYERS | {"Recurrent": own} | STACKS
# Rows: no step that counts but with a reset, left padding, holes, and all steps.
MASK = np.array(
    [
        [0, 0, 0, 1],
        [0, 0, 1, 1],
        [0, 1, 0, 1],
        [0, 1, 0, 1],
        [0, 1, 1, 1],
        [0, 1, 1, 1],
        [0, 1, 0, 1],
    ],
    bool,
)
RESETS = np.zeros((T, N), bool)
# Of a step that counts, of one in a hole, of one before the first, of one after the last.
RESETS[[3, 4, 1, 3, 6, 5], [0, 1, 1, 2, 2, 3]] = True
pytestmark = pytest.mark.usefixtures("little_optimization")


def inputs(fill):
    x = np.random.RandomState(0).standard_normal((T, N, D))
    return np.where(MASK[..., None], x, fill)


def loss(y, state):
    """Every output and floating state with weights of its own."""
    leaves = [
        leaf for leaf in [y, *jax.tree.leaves(state)] if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    return sum(
        jnp.sum(jnp.real(leaf) * jnp.cos(jnp.arange(leaf.size, dtype=float)).reshape(leaf.shape))
        for leaf in leaves
    )


def by_pieces(layer, params, x, first, fresh):
    """The steps that count of each row, one call for each piece between resets; outputs are put back at their steps."""
    graph, stacked = nnx.graphdef(layer), hasattr(layer, "layout")

    def call(x, state):
        if not stacked:
            return layer.apply(params, x, state)
        own = nnx.merge(graph, nnx.state(layer))
        return run_stack_with(own, params, x, state)

    axis = 1 if stacked else 0
    ys, states = None, []
    for n in range(N):

        def row(tree, n=n):
            return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, n, 1, axis), tree)

        bounds = [0, *np.flatnonzero(RESETS[:, n]).tolist(), T]
        pieces = list(itertools.pairwise(bounds))
        both = stacked and layer.layout.bidirectional
        ends, y_row = [], None
        for k, (start, end) in enumerate(pieces):
            kept = start + np.flatnonzero(MASK[start:end, n])
            begin = row(first) if k == 0 else row(fresh)
            if (
                both and k < len(pieces) - 1
            ):  # the reverse direction of an earlier piece begins anew
                begin = mixed(begin, row(fresh))
            elif both:
                begin = mixed(begin, row(first))
            state = begin
            if len(kept):
                y, state = call(x[kept, n][:, None], begin)
                y_row = jnp.zeros((T, 1, *y.shape[2:]), y.dtype) if y_row is None else y_row
                y_row = y_row.at[kept].set(y)
            ends.append(state)
        states.append(mixed(ends[-1], ends[0]) if both else ends[-1])
        ys = [] if ys is None else ys
        ys.append(y_row)
    like = next(y for y in ys if y is not None)
    y = jnp.concatenate([jnp.zeros_like(like) if y is None else y for y in ys], axis=1)
    return y, jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis), *states)


def mixed(forward, reverse):
    """A state [L K, ...] of two directions, with those of the reverse directions from another."""
    return jax.tree.map(
        lambda a, b: jnp.where((jnp.arange(len(a)) % 2 == 0).reshape(-1, 1, 1), a, b),
        forward,
        reverse,
    )


def run_stack_with(layer, params, x, state, **masks):
    for name, value in params.items():
        setattr(layer, name, nnx.Param(value))
    return layer(x, state, **masks)


@pytest.mark.sample("GRU both", "LRU", "Mamba2", "GatedDeltaNet", "Recurrent")
@pytest.mark.parametrize("name", ALL)
def test_results_are_those_of_the_steps_that_count(name, x64):
    layer = ALL[name](param_dtype=np.float64, rngs=nnx.Rngs(0))
    random, stacked = np.random.RandomState(1), name in STACKS
    params = {
        n: np.asarray(v) + 0.3 * random.standard_normal(v.shape) for n, v in layer.params().items()
    }
    if stacked:
        state = jax.tree.map(np.zeros_like, layer(inputs(0.0))[1])
        first, fresh = (
            jax.tree.map(lambda v: 0.3 * random.standard_normal(v.shape), state) for _ in range(2)
        )
        options = {"reset_state": fresh}
    else:
        fresh, options = layer.initial_state(N), {}
        first = layer(inputs(0.0))[1]

    @jax.jit
    def masked(params, x, first):
        def of(params, x, first):
            if stacked:
                own = nnx.merge(*nnx.split(layer))
                y, state = run_stack_with(
                    own, params, x, first, mask=MASK, resets=RESETS, **options
                )
            else:
                y, state = layer.apply(params, x, first, mask=MASK, resets=RESETS)
            return loss(y, state), (y, state)

        return jax.value_and_grad(of, (0, 1, 2), has_aux=True, allow_int=True)(params, x, first)

    @by_numpy
    def expected(params, x, first):
        def of(params, x, first):
            y, state = by_pieces(layer, params, x, first, fresh)
            return loss(y, state), (y, state)

        return jax.value_and_grad(of, (0, 1, 2), has_aux=True, allow_int=True)(params, x, first)

    (_, results), gradients = masked(params, inputs(np.nan), first)
    (_, wanted), slopes = expected(params, inputs(0.0), first)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), results, wanted
    )
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(slopes)):
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["RNN", "LSTM", "Mamba2", "RetNet", "Recurrent"])
def test_pieces_and_steps_are_the_whole(name, x64):
    layer = ALL[name](param_dtype=np.float64, rngs=nnx.Rngs(0))
    x, masks = inputs(np.nan), {"mask": MASK, "resets": RESETS}
    whole, last = layer(x, **masks)
    for size in (1, 3):
        state, parts = layer.initial_state(N), []
        for k in range(0, T, size):
            y, state = layer(
                x[k : k + size], state, **{n: m[k : k + size] for n, m in masks.items()}
            )
            parts.append(y)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12),
            (jnp.concatenate(parts), state),
            (whole, last),
        )
    step, state = nn.compiled_step(layer), layer.initial_state(N)
    for t in range(T):
        y, state = step(x[t], state, **{n: m[t] for n, m in masks.items()})
        np.testing.assert_allclose(y, whole[t], atol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), state, last)
    if name in STACKS:
        y, state = nn.chunked(layer, x, size=3, **masks)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), (y, state), (whole, last)
        )


def test_layouts_and_packed_sequences():
    gru, lengths = nn.GRU(D, 3, bidirectional=True, rngs=nnx.Rngs(0)), [7, 5, 6, 4]
    first = nn.GRU(D, 3, bidirectional=True, batch_first=True, rngs=nnx.Rngs(0))
    x, within = inputs(0.0).astype(np.float32), np.arange(T)[:, None] < np.array(lengths)
    whole, last = gru(x, lengths=lengths, mask=MASK)
    np.testing.assert_allclose(whole, gru(x, mask=MASK & within)[0], atol=1e-6)
    y, state = first(x.swapaxes(0, 1), lengths=lengths, mask=MASK.T)
    np.testing.assert_allclose(y.swapaxes(0, 1), whole, atol=1e-6)
    packed, h = gru(nn.pack_padded_sequence(x, lengths, enforce_sorted=False), mask=MASK)
    np.testing.assert_allclose(nn.pad_packed_sequence(packed, total_length=T)[0], whole, atol=1e-6)
    np.testing.assert_allclose(h, last, atol=1e-6)
    y, h = gru(x[:, 2], mask=MASK[:, 2])
    np.testing.assert_allclose(y, gru(x, mask=MASK)[0][:, 2], atol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"mask": MASK.astype(int)},
            r"GRU: mask is int\d\d; it must be booleans; give mask.astype\(bool\)",
        ),
        ({"mask": MASK.T}, r"GRU: mask is \[4, 7\]; it must be \[7, 4\], one for each step"),
        (
            {"mask": MASK, "return_states": "all"},
            "return_states is 'all'; with a mask only the last states are known",
        ),
    ],
)
def test_what_does_not_fit_is_named(given, message):
    with pytest.raises(LayerError, match=message):
        nn.GRU(D, 3, rngs=nnx.Rngs(0))(np.zeros((T, N, D)), **given)


@pytest.mark.parametrize("name", ["GRU both", "Mamba2"])
def test_sizes_may_be_symbols(name):
    layer, (x, mask) = ALL[name](rngs=nnx.Rngs(0)), (inputs(0.0).astype(np.float32), MASK)
    specs = jax.export.symbolic_args_specs((x, mask), ("t, n, 8", "t, n"))
    exported = jax.export.export(jax.jit(lambda x, mask: layer(x, mask=mask)[0]))(*specs)
    np.testing.assert_allclose(exported.call(x, mask), layer(x, mask=mask)[0], atol=1e-6)
