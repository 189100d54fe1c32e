"""load_module: a whole PyTorch model into a flax module; weights that PyTorch stores in parts."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jrnn import interop, nn
from jrnn.errors import ConversionError

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


class Tagger(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 6, rngs=rngs)
        self.convs = nnx.List([nnx.Conv(6, 8, (3,), padding="VALID", rngs=rngs)])
        self.up = nnx.ConvTranspose(8, 8, (3,), strides=2, padding="VALID", rngs=rngs)
        self.bn = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.rnn = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True, rngs=rngs)
        self.norm = nnx.LayerNorm(16, epsilon=1e-5, rngs=rngs)
        self.head = nnx.Sequential(
            nnx.Linear(16, 8, rngs=rngs), nnx.relu, nnx.Linear(8, 3, rngs=rngs)
        )
        self.gain = nnx.Param(jnp.ones(3))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, tokens):
        x = self.bn(self.up(self.convs[0](self.embed(tokens))))
        return self.dropout(self.head(self.norm(self.rnn(x)[0])) * self.gain[...][None, None])


NAMES = {
    "embed": "embedding",
    "head": "classifier",
    "head.2": "classifier.3",
    "gain": "scales.gain",
}
SHAPES = {
    "embedding.weight": (11, 6), "convs.0.weight": (8, 6, 3), "convs.0.bias": (8,), "up.weight": (8, 8, 3), "up.bias": (8,),
    "bn.weight": (8,), "bn.bias": (8,), "bn.running_mean": (8,), "norm.weight": (16,), "norm.bias": (16,),
    "classifier.0.weight": (8, 16), "classifier.0.bias": (8,), "classifier.3.weight": (3, 8), "classifier.3.bias": (3,),
    "scales.gain": (3,),
}  # fmt: skip


def state_dict():
    rnn = nn.LSTM(8, 8, 2, bidirectional=True, rngs=nnx.Rngs(1)).params()
    weights = {name: normal(*shape) for name, shape in SHAPES.items()} | {
        "bn.running_var": np.abs(normal(8)) + 0.5
    }
    return (
        weights
        | {f"rnn.{name}": value for name, value in rnn.items()}
        | {"bn.num_batches_tracked": np.int64(3)}
    )


def test_a_whole_model_computes_what_its_weights_say():
    model, weights = Tagger(nnx.Rngs(0)), state_dict()
    report = interop.load_module(model, weights, NAMES)
    assert (
        report.loaded["head.2.kernel"] == "classifier.3.weight"
        and not report.missing
        and not report.unused
    )
    assert set(report.loaded.values()) == weights.keys() - {"bn.num_batches_tracked"}
    assert "gain                     <- scales.gain" in str(report)
    model.eval()

    tokens, w = np.array([[1, 2, 10, 0, 5]]), weights
    x = w["embedding.weight"][tokens[0]].T  # [C, T], by the definitions of PyTorch's layers
    conv = [
        np.einsum("oik,ik->o", w["convs.0.weight"], x[:, t : t + 3]) + w["convs.0.bias"]
        for t in range(3)
    ]
    up = np.repeat(w["up.bias"][:, None], 7, 1)
    for t, column in enumerate(conv):
        up[:, 2 * t : 2 * t + 3] += np.einsum("iok,i->ok", w["up.weight"], column)
    scaled = (up.T - w["bn.running_mean"]) / np.sqrt(w["bn.running_var"] + 1e-5) * w[
        "bn.weight"
    ] + w["bn.bias"]
    rnn = {name.removeprefix("rnn."): v for name, v in w.items() if name.startswith("rnn.")}
    y = np.asarray(nn.functional.lstm(rnn, jnp.asarray(scaled)[:, None])[0][:, 0])
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5) * w[
        "norm.weight"
    ] + w["norm.bias"]
    y = np.maximum(y @ w["classifier.0.weight"].T + w["classifier.0.bias"], 0)
    y = (y @ w["classifier.3.weight"].T + w["classifier.3.bias"]) * w["scales.gain"]
    np.testing.assert_allclose(model(tokens)[0], y, atol=2e-5)


def test_what_does_not_fit_is_named_and_changes_nothing():
    model, weights = Tagger(nnx.Rngs(0)), state_dict()
    before = np.asarray(model.embed.embedding[...])
    lacks = r"embed.embedding needs 'embed.weight'; did you mean 'embedding.weight'.*embedding.weight \[11, 6\] is not used"
    with pytest.raises(ConversionError, match=lacks):
        interop.load_module(model, weights)
    with pytest.raises(
        ConversionError,
        match=r"up.kernel is \[3, 8, 8\], but up.weight is \[8, 8, 5\]; the layers differ",
    ):
        interop.load_module(model, weights | {"up.weight": normal(8, 8, 5)}, NAMES)
    with pytest.raises(ConversionError, match=r"names: the module has no 'haed'"):
        interop.load_module(model, weights, {"haed": "classifier"})
    np.testing.assert_array_equal(model.embed.embedding[...], before)
    report = interop.load_module(
        model, {f"module.{name}": v for name, v in weights.items()}, prefix="module", strict=False
    )
    assert report.missing[0] == "embed.embedding" and "scales.gain" in report.unused
    assert str(report).endswith("scales.gain is not used") and "gain has no tensor" in str(report)
    np.testing.assert_array_equal(model.norm.bias[...], weights["norm.bias"])


def test_a_stack_of_layers_is_numbered_as_in_pytorch():
    rngs = nnx.Rngs(0)
    stack = nn.Sequential(nn.GRU(3, 4, rngs=rngs), nnx.relu, nnx.Linear(4, 2, rngs=rngs))
    weights = {
        f"0.{name}": value for name, value in nn.GRU(3, 4, rngs=nnx.Rngs(1)).params().items()
    }
    weights |= {"2.weight": normal(2, 4), "2.bias": normal(2)}
    report = interop.load_module(stack, weights)
    assert (
        report.loaded["2.kernel"] == "2.weight" and report.loaded["0.bias_hh_l0"] == "0.bias_hh_l0"
    )
    np.testing.assert_array_equal(stack.parts[2].kernel[...], weights["2.weight"].T)


def test_a_tied_tensor_needs_no_variable():
    embed, table = nnx.Embed(4, 2, rngs=nnx.Rngs(0)), normal(4, 2)
    assert interop.load_module(embed, {"weight": table, "head.weight": table}).unused == ()
    with pytest.raises(ConversionError, match=r"head.weight \[4, 2\] is not used"):
        interop.load_module(embed, {"weight": table, "head.weight": 2 * table})


def largest(weight):
    """The largest singular value of a matrix, and its vectors."""
    u, sizes, v = np.linalg.svd(weight, full_matrices=False)
    return sizes[0], u[:, 0], v[0]


def test_normalized_and_pruned_weights_are_folded():
    v, g, w, mask = normal(8, 3, 2), np.abs(normal(8, 1, 1)), normal(6, 4), RNG.random((8, 3)) < 0.5
    sigma, left, right = largest(w)
    turned = normal(4, 4, 3)  # of a transposed convolution: the rows are along axis 1
    second, above, below = largest(np.moveaxis(turned, 1, 0).reshape(4, -1))
    stored = {
        "a.weight_g": g, "a.weight_v": v, "a.bias": normal(8),
        "rnn.parametrizations.weight_hh_l0.original0": g[..., 0], "rnn.parametrizations.weight_hh_l0.original1": v[..., 0],
        "b.weight_orig": w, "b.weight_u": left, "b.weight_v": right,
        "c.parametrizations.weight.original": turned, "c.parametrizations.weight.0._u": above,
        "c.parametrizations.weight.0._v": below,
        "d.weight_orig": v[..., 0], "d.weight_mask": mask.astype(np.float32),
        "e.weight_g": np.float32(2), "e.weight_v": v,
        "W_g": normal(4, 3), "W_v": normal(4, 3),
    }  # fmt: skip
    folded = interop.load_state_dict(stored)
    assert sorted(folded) == [
        "W_g", "W_v", "a.bias", "a.weight", "b.weight", "c.weight", "d.weight", "e.weight", "rnn.weight_hh_l0",
    ]  # fmt: skip
    rows = np.sqrt((v**2).sum((1, 2), keepdims=True))
    np.testing.assert_allclose(folded["a.weight"], v / rows * g, rtol=1e-6)
    first = v[..., 0] / np.linalg.norm(v[..., 0], axis=1, keepdims=True)
    np.testing.assert_allclose(folded["rnn.weight_hh_l0"], first * g[..., 0], rtol=1e-6)
    np.testing.assert_allclose(folded["b.weight"], w / sigma, rtol=1e-5)
    np.testing.assert_allclose(folded["c.weight"], turned / second, rtol=1e-5)
    np.testing.assert_array_equal(folded["d.weight"], v[..., 0] * mask)
    np.testing.assert_allclose(folded["e.weight"], 2 * v / np.linalg.norm(v), rtol=1e-6)


def test_another_parametrization_is_named():
    stored = {
        "rnn.parametrizations.weight_hh_l0.original": normal(4, 4),
        "rnn.parametrizations.weight_hh_l0.0.base": normal(4, 4),
    }
    with pytest.raises(
        ConversionError,
        match=r"rnn.weight_hh_l0 is parametrized by neither .*remove_parametrizations",
    ):
        interop.load_state_dict(stored)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_model_of_torch_with_every_kind_of_normalization():
    torch = pytest.importorskip("torch")
    utils = torch.nn.utils

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.up = (
                torch.nn.Embedding(11, 6),
                torch.nn.ConvTranspose1d(8, 8, 3, stride=2),
            )
            self.convs = torch.nn.ModuleList(
                [utils.parametrizations.weight_norm(torch.nn.Conv1d(6, 8, 3))]
            )
            self.bn, self.rnn = (
                torch.nn.BatchNorm1d(8),
                torch.nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True),
            )
            first, last = (
                torch.nn.Linear(16, 8),
                utils.parametrizations.spectral_norm(torch.nn.Linear(8, 3)),
            )
            dropout = torch.nn.Dropout(0.1)
            self.norm, self.classifier = (
                torch.nn.LayerNorm(16),
                torch.nn.Sequential(first, torch.nn.ReLU(), dropout, last),
            )
            self.scales = torch.nn.ParameterDict({"gain": torch.nn.Parameter(torch.randn(3))})
            utils.spectral_norm(first)
            for name in ("weight_hh_l0", "weight_ih_l1_reverse"):
                utils.weight_norm(self.rnn, name)

        def forward(self, tokens):
            x = self.bn(self.up(self.convs[0](self.embedding(tokens).transpose(1, 2)))).transpose(
                1, 2
            )
            return self.classifier(self.norm(self.rnn(x)[0])) * self.scales["gain"]

    torch.manual_seed(0)
    theirs, tokens = Model(), torch.randint(0, 11, (4, 9))
    theirs(tokens).sum().backward()
    torch.optim.SGD(theirs.parameters(), 0.001).step()
    theirs.eval()
    ours = Tagger(nnx.Rngs(0))
    interop.load_module(ours, theirs.state_dict(), NAMES)
    ours.eval()
    np.testing.assert_allclose(ours(tokens.numpy()), theirs(tokens).detach().numpy(), atol=1e-5)
