"""The modules: PyTorch's names, shapes and first values; kinds of input; streaming; cells; flax.nnx's own tools; errors."""

import inspect
import pydoc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_numpy import by_numpy
from flax import nnx

from jrnn import nn
from jrnn.errors import LayerError

T, N, D, H = 5, 2, 3, 4
X = np.random.RandomState(0).standard_normal((T, N, D)).astype(np.float32)
KINDS = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}


def make(kind, *args, **settings):
    return KINDS[kind](*(args or (D, H)), rngs=nnx.Rngs(0), **settings)


def normal(seed, *shape):
    return np.random.RandomState(seed).standard_normal(shape).astype(jnp.zeros(()).dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["3-bi-bias", "1-uni-nobias"])
def test_names_and_shapes_are_pytorchs(kind, case, recording):
    prefix = {"RNN": "rnn_tanh"}.get(kind, kind.lower())
    recorded = recording(f"torch_{kind.lower()}.npz").get(f"{prefix}-{case}", "in")
    layers, way, bias = case.split("-")
    module = make(kind, 2, 3, int(layers), bidirectional=way == "bi", bias=bias == "bias")
    expected = {
        name: value.shape for name, value in recorded.items() if name.startswith(("weight", "bias"))
    }
    assert [(name, value.shape) for name, value in module.params().items()] == list(
        expected.items()
    )
    assert set(nnx.state(module, nnx.Param).keys()) == set(expected)


@pytest.mark.sample("LSTM")
@pytest.mark.parametrize("kind", KINDS)
def test_first_values_are_uniform(kind):
    module = make(kind, 50, 100, layer_norm=True)
    for name, value in module.params().items():
        value = np.asarray(value)
        if name.startswith("norm"):
            assert (value == 1).all()
        else:
            assert abs(value).max() <= 0.1 and abs(value).max() > 0.095, name
            assert abs(value.std() - 0.1 / np.sqrt(3)) < 0.012, name
    assert not np.array_equal(
        module.weight_ih_l0[...][:50, :50], module.weight_hh_l0[...][:50, :50]
    )


@pytest.mark.sample("GRU")
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_of_the_input_agree(kind):
    module, turned = (
        make(kind, bidirectional=True),
        make(kind, bidirectional=True, batch_first=True),
    )

    @jax.jit
    def runs(x):
        return (
            module(x),
            turned(x.swapaxes(0, 1)),
            [module(x[:, n], lengths=np.int32(T)) for n in range(N)],
        )

    (output, last), (other, other_last), singles = jax.device_get(runs(X))
    np.testing.assert_array_equal(other.swapaxes(0, 1), output)
    for n, (single, single_last) in enumerate(singles):
        np.testing.assert_allclose(single, output[:, n], atol=1e-6)
        assert jax.tree.map(jnp.shape, single_last) == jax.tree.map(lambda leaf: (2, H), last)
    jax.tree.map(np.testing.assert_array_equal, other_last, last)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_streaming_equals_the_whole(kind):
    settings = {"proj_size": 2} if kind == "LSTM" else {}
    module = make(kind, D, H, 2, layer_norm=True, zoneout=0.2, deterministic=True, **settings)
    output, last = jax.device_get(jax.jit(lambda x: module(x))(X))
    start = jax.tree.map(np.zeros_like, last)
    step = nnx.jit(lambda module, x, state: module.step(x, state))
    state, steps = start, []
    for x in X:
        y, state = step(module, x, state)
        steps.append(y)
    # Layer normalization of a few values amplifies rounding: hence not 1e-6.
    np.testing.assert_allclose(np.stack(steps), output, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, last)

    @jax.jit
    def pieces(x):
        first, state = module(x[:2])
        return first, *module(x[2:], state)

    first, second, state = jax.device_get(pieces(X))
    np.testing.assert_allclose(np.concatenate([first, second]), output, atol=1e-5)
    alone, alone_state = module.step(X[0, 0])
    np.testing.assert_allclose(alone, output[0, 0], atol=1e-5)
    assert jax.tree.map(jnp.shape, alone_state) == jax.tree.map(
        lambda leaf: (2, leaf.shape[2]), last
    )


@pytest.mark.parametrize("kind", KINDS)
def test_cells_are_one_step_of_the_layer(kind):
    cell = {"RNN": nn.RNNCell, "LSTM": nn.LSTMCell, "GRU": nn.GRUCell}[kind](D, H, rngs=nnx.Rngs(3))
    layer = make(kind)
    layer.load({f"{name}_l0": value for name, value in cell.params().items()})
    output, _ = layer(X)
    state = None
    for x in X:
        state = cell(x, state)
    np.testing.assert_allclose(state[0] if kind == "LSTM" else state, output[-1], atol=1e-6)
    single = cell(X[0, 0])
    assert jax.tree.map(jnp.shape, single) == jax.tree.map(lambda leaf: (H,), state)
    with pytest.raises(
        LayerError, match=rf"{kind}Cell: x is \[2, 7\] but must be \[3\] or \[N, 3\]"
    ):
        cell(np.ones((2, 7)))


def test_an_empty_sequence_leaves_the_state():
    h = normal(0, 1, N, H)
    output, last = make("GRU")(X[:0], h)
    assert output.shape == (0, N, H)
    np.testing.assert_array_equal(last, h)
    assert make("GRU")(X[:, :0])[0].shape == (T, 0, H)


def test_dropout_follows_train_and_eval():
    module = make("LSTM", D, H, 2, dropout=0.5)
    first, second = module(X)[0], module(X)[0]
    assert (first != second).any()
    key = jax.random.key(0)
    np.testing.assert_array_equal(module(X, rngs=key)[0], module(X, rngs=key)[0])
    np.testing.assert_array_equal(
        module(X, rngs=nnx.Rngs(4))[0], module(X, rngs=nnx.Rngs(4).dropout)[0]
    )
    module.eval()
    np.testing.assert_array_equal(module(X)[0], module(X)[0])
    noisy = nnx.view(module, deterministic=False)
    assert (noisy(X)[0] != noisy(X)[0]).any() and module.deterministic
    module.train()
    assert (module(X)[0] != module(X)[0]).any()
    with pytest.raises(
        LayerError,
        match="rngs is of type int; it must be flax.nnx.Rngs, one of its streams, or a key",
    ):
        module(X, rngs=0)


@pytest.mark.exhaustive
def test_nnx_sees_an_ordinary_module():
    module = make("LSTM", D, H, 2, dropout=0.5, bidirectional=True)
    graph, _ = nnx.split(module)
    hash(graph)
    module.eval()

    @nnx.jit
    def run(module, x):
        return module(x)[0]

    np.testing.assert_allclose(run(module, X), by_numpy(lambda x: module(x)[0])(X), atol=1e-6)
    grads = nnx.jit(nnx.grad(lambda module: jnp.sum(module(X)[0] ** 2)))(module)
    assert set(grads.keys()) == set(module.params())
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(grads))


def test_vmap_over_parameters():
    draw = jax.vmap(lambda key: nn.Layout(make("GRU").layout.unit, D, H).init(key))
    params = jax.device_get(jax.jit(draw)(jax.random.split(jax.random.key(0), 3)))
    outputs = jax.device_get(jax.jit(jax.vmap(lambda p: nn.functional.gru(p, X)[0]))(params))
    for k in range(3):
        one = {name: value[k] for name, value in params.items()}
        np.testing.assert_allclose(
            outputs[k], by_numpy(lambda p: nn.functional.gru(p, X)[0])(one), atol=1e-6
        )


@pytest.mark.exhaustive
def test_second_derivatives(x64):
    params = {
        name: jnp.asarray(value, jnp.float64) for name, value in make("LSTM").params().items()
    }
    x, v = jnp.asarray(X[:3], jnp.float64), jnp.ones((3, N, D))

    def gradient(x):
        return jax.grad(lambda x: jnp.sum(nn.functional.lstm(params, x)[0] ** 3))(x)

    exact = jax.jit(lambda x: jax.jvp(gradient, (x,), (v,))[1])(x)
    step = 1e-6
    numeric = by_numpy(lambda x: (gradient(x + step * v) - gradient(x - step * v)) / (2 * step))(x)
    np.testing.assert_allclose(exact, numeric, atol=1e-7)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ((D, 0), {}, "hidden_size is 0; it must be an integer of at least 1"),
        ((D, 2.5), {}, "hidden_size is 2.5"),
        ((D, H, 0), {}, "num_layers is 0"),
        ((D, H), {"proj_size": 4}, "proj_size is 4; it must be smaller than hidden_size, 4"),
        ((True, H), {}, "input_size is True; it must be an integer"),
        ((D, H), {"drop": 0.1}, "no setting is called 'drop'"),
        ((D, H), {"bidirectonal": True}, "'bidirectonal'; did you mean 'bidirectional'"),
        ((D, H), {"zoneout": (0.1, 0.1, 0.1)}, r"zoneout is \(0.1, 0.1, 0.1\)"),
        ((D, H), {"zoneout": [0.1, 0.1]}, r"zoneout is \[0.1, 0.1\]; .* may be a pair"),
        ((D, H), {"dropout": "0.1"}, "dropout is '0.1'; a probability lies"),
        ((D, H), {"unroll": 0}, "unroll is 0; it must be an integer of at least 1"),
        ((D, H), {"dtype": "bf16"}, "dtype is 'bf16'; it must be a floating type"),
        (
            (D, H),
            {"param_dtype": jnp.int32},
            "param_dtype is .*int32.*; it must be a floating type",
        ),
        ((D, H), {"rngs": 0}, r"rngs is of type int; give flax.nnx.Rngs\(seed\)"),
    ],
)
def test_impossible_modules_are_errors(arguments, settings, message):
    with pytest.raises(LayerError, match=message):
        nn.LSTM(*arguments, **{"rngs": nnx.Rngs(0), **settings})


@pytest.mark.exhaustive("RNN", "LSTM", "GRU")
@pytest.mark.parametrize("name", ["RNN", "LSTM", "GRU", "RNNCell", "LSTMCell", "GRUCell"])
def test_help_shows_every_argument(name):
    taken = inspect.signature(getattr(nn, name)).parameters
    assert not {p.kind for p in taken.values()} & {
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    }
    # Python 3.13 breaks the line
    shown = re.sub(r"[\s|]+", "", pydoc.render_doc(getattr(nn, name), renderer=pydoc.plaintext))
    assert f"{name}({next(iter(taken.values()))}".replace(" ", "") in shown
    one_each = {
        "nonlinearity": "relu",
        "bidirectional": True,
        "proj_size": 1,
        "bias": False,
        "dtype": jnp.float32,
    }
    sizes = {"input_size": D, "hidden_size": H, "num_layers": 2, "rngs": nnx.Rngs(0)}
    for option in taken:
        given = {n: v for n, v in sizes.items() if n in taken}
        given.setdefault(option, one_each.get(option, taken[option].default))
        module = getattr(nn, name)(**given)
        assert type(module) is getattr(nn, name)
    assert ("proj_size" in taken) == (name == "LSTM") and ("executor" in taken) == (
        not name.endswith("Cell")
    )
    assert {"batch_first", "dropout", "key"} < set(inspect.signature(nn.functional.gru).parameters)


def test_a_module_of_ones_own_has_its_own_signature():
    class Two(nn.LSTM):
        def __init__(self, size: int, *, rngs: nnx.Rngs):
            super().__init__(size, size, 2, rngs=rngs)

    assert list(inspect.signature(Two).parameters) == ["size", "rngs"]
    assert Two(3, rngs=nnx.Rngs(0))(jnp.ones((4, 2, 3)))[0].shape == (4, 2, 3)


def test_dropout_between_one_layer_warns():
    with pytest.warns(
        UserWarning,
        match="LSTM: dropout = 0.5 drops outputs of every layer but the last, and there is one",
    ):
        module = nn.LSTM(D, H, dropout=0.5, rngs=nnx.Rngs(0))
    assert module.settings.dropout == 0.5
    with pytest.warns(UserWarning, match="gru: dropout = 0.5"):
        nn.functional.gru(nn.GRU(D, H, rngs=nnx.Rngs(0)).params(), X, dropout=0.5)
    nn.functional.gru(nn.GRU(D, H, 2, rngs=nnx.Rngs(0)).params(), X, dropout=0.5)


def test_impossible_cells_are_errors():
    with pytest.raises(LayerError, match="dtype is .*int32.*; it must be a floating type"):
        nn.GRUCell(D, H, dtype=jnp.int32, rngs=nnx.Rngs(0))


def test_sizes_may_be_numpys():
    module = nn.GRU(np.int64(D), np.int32(H), num_layers=np.int8(2), rngs=nnx.Rngs(0))
    assert module(X)[1].shape == (2, N, H) and type(module.layout.hidden_size) is int


def test_an_unknown_nonlinearity_is_an_error():
    with pytest.raises(
        LayerError, match="nonlinearity is 'than'; it must be 'tanh' or 'relu'; did you mean 'tanh'"
    ):
        nn.RNN(D, H, nonlinearity="than", rngs=nnx.Rngs(0))
    with pytest.raises(LayerError, match="only an LSTM has a projection"):
        nn.Layout(make("GRU").layout.unit, D, H, proj_size=2)


@pytest.mark.parametrize(
    ("x", "hx", "lengths", "message"),
    [
        (X[..., :2], None, None, r"LSTM: x is \[5, 2, 2\] but must be \[T, 3\] or \[T, N, 3\]"),
        (X[None], None, None, r"x is \[1, 5, 2, 3\]"),
        (X.astype(np.complex64), None, None, "x is complex64; it must be real"),
        (
            X,
            np.zeros((1, N, H)),
            None,
            r"hx must be a pair \(h, c\) of arrays \[1, 2, 4\] and \[1, 2, 4\], but is an array",
        ),
        (X, (np.zeros((1, N, H)),), None, "but is 1 values"),
        (
            X,
            (np.zeros((1, N, H)), np.zeros((2, N, H))),
            None,
            r"the state c of hx is \[2, 2, 4\] but must be \[1, 2, 4\]",
        ),
        (
            X[:, 0],
            (np.zeros((1, N, H)),) * 2,
            None,
            r"the state h of hx is \[1, 2, 4\] but must be \[1, 4\]",
        ),
        (X[:, 0], (np.zeros(H),) * 2, None, r"the state h of hx is \[4\] but must be \[1, 4\]"),
        (X[:, 0], (0.0, 0.0), None, r"the state h of hx is \[\] but must be \[1, 4\]"),
        (None, None, None, "LSTM: x is of type NoneType; it must be an array"),
        (
            X,
            None,
            [6, 1],
            r"lengths\[0\] is 6, but the sequences have 5 steps; lengths must lie between 0 and 5",
        ),
        (X, None, [3, -1], r"lengths\[1\] is -1"),
        (X, None, [3], r"lengths are \[1\]; they must be \[2\], one for each sequence"),
        (X, None, [1.0, 2.0], "they must be integers"),
        (X, None, [None, 2], "lengths are object; they must be integers"),
        (X, None, np.array([2**40, 2]), r"lengths\[0\] is 1099511627776, but"),
        (X, {"h": 0, "c": 0}, None, "but is of type dict"),
        (
            X,
            (np.zeros((1, N, H)), None),
            None,
            r"the state c of hx is of type NoneType; it must be an array \[1, 2, 4\]",
        ),
        (
            X,
            (np.zeros((1, N, H), np.complex64),) * 2,
            None,
            "the state h of hx is complex64; it must be real",
        ),
    ],
)
def test_what_does_not_fit_is_named(x, hx, lengths, message):
    with pytest.raises(LayerError, match=message):
        make("LSTM")(x, hx, lengths=lengths)


def test_states_and_steps_that_do_not_fit_are_named():
    with pytest.raises(LayerError, match=r"hx must be one array \[1, 2, 4\], but is 2 values"):
        make("GRU")(X, (np.zeros((1, N, H)),) * 2)
    with pytest.raises(LayerError, match="a bidirectional stack needs the whole sequence"):
        make("GRU", bidirectional=True).step(X[0])
    with pytest.raises(
        LayerError, match=r"GRU.step: x is \[5, 2, 3\] but must be \[3\] or \[N, 3\]"
    ):
        make("GRU").step(X)
    with pytest.raises(LayerError, match="GRU.step: x is of type str"):
        make("GRU").step("x")
    with pytest.raises(
        LayerError, match=r"a step takes x of one step, \[N, 3\], not a PackedSequence"
    ):
        make("GRU").step(nn.pack_sequence([X[:, 0]]))
    with pytest.raises(
        LayerError, match="gru: key is of type int; it must be one that jax.random.key makes"
    ):
        nn.functional.gru(make("GRU").params(), X, zoneout=0.5, key=0)


@pytest.mark.parametrize(
    ("kind", "arguments", "options", "given"),
    [
        ("LSTM", (3, 4), {"num_layers": 2}, "LSTM(3, 4, num_layers=2)"),
        (
            "GRU",
            (3, 4),
            {"num_layers": 2, "bidirectional": True},
            "GRU(3, 4, num_layers=2, bidirectional=True)",
        ),
        ("GRU", (3, 5), {"bias": False}, "GRU(3, 5, bias=False)"),
        ("RNN", (3, 4), {}, "RNN(3, 4)"),
    ],
    ids=["layers", "directions", "sizes", "kind"],
)
def test_parameters_of_another_layer_are_named(kind, arguments, options, given):
    params = getattr(nn, kind)(*arguments, **options, rngs=nnx.Rngs(0)).params()
    with pytest.raises(LayerError) as error:
        nn.GRU(3, 4, rngs=nnx.Rngs(0)).load(params)
    assert str(error.value).endswith(f"; these are the parameters of {given}")


def test_load_does_not_take_a_path():
    with pytest.raises(
        LayerError, match="not 'lstm.pt'; jrnn.interop.load_state_dict reads one from a file"
    ):
        nn.LSTM(3, 4, rngs=nnx.Rngs(0)).load("lstm.pt")


def test_an_unknown_argument_suggests_positional_ones():
    with pytest.raises(
        LayerError, match="no setting is called 'num_layer'; did you mean 'num_layers'"
    ):
        nn.LSTM(3, 4, num_layer=2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_ih_l0": None}, "the parameters lack 'weight_ih_l0'; did you mean"),
        ({"weight_hh_l1": None}, r"the parameters lack 'weight_hh_l1' \[12, 4\]"),
        ({"weight_hh_l0": np.ones((12, 5))}, r"weight_hh_l0 is \[12, 5\] but must be \[12, 4\]"),
        (
            {"weight_ih_l0": np.ones((11, 3))},
            "its rows must be 3 times the hidden size, .* gates r, z, n",
        ),
        ({"weight_ih_l0": np.ones(12)}, r"weight_ih_l0 is \[12\] but must be a matrix"),
        (
            {"bias_hi_l0": np.ones(12)},
            "the parameter 'bias_hi_l0' has no place here; did you mean 'bias_ih_l0'",
        ),
    ],
)
def test_parameters_that_do_not_fit_are_named(change, message):
    params = {**make("GRU", D, H, 2).params(), **change}
    with pytest.raises(LayerError, match=message):
        nn.functional.gru({name: value for name, value in params.items() if value is not None}, X)
