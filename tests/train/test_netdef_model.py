"""Nets from disk: what is read off them, what must be said, and a fine-tuning from files to files."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn import NetBuilder
from jrnn.cli import main
from jrnn.convert import Package, export_package
from jrnn.errors import ConfigError
from jrnn.nets.cells import LSTM
from jrnn.train import Config
from jrnn.train.models import Compute, Signature
from jrnn.train.models.cells import TokenCellsConfig, cells_model
from jrnn.train.models.net_from_disk import NetDefConfig, netdef_model
from jrnn.train.tasks.task import Examples
from jrnn.train.text_streams import TextChunk
from jrnn.train.toml_codec import decode

T, B, D, H, CLASSES = 4, 3, 2, 5, 3
CLASSIFY = Signature(False, D, CLASSES, every_step=False, loss="cross_entropy", carried=False)
LANGUAGE = Signature(True, 6, 6, every_step=True, loss="cross_entropy", carried=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An old classifier: LSTM from first states that are given -> FC of the last state -> Softmax, as files."""
    b = NetBuilder("old")
    data, first = b.input("data"), [b.input("hidden_init"), b.input("cell_init")]
    lstm = LSTM(b, data, None, first, D, H, "lstm")
    last = b.Squeeze(
        [b.Slice([lstm.hidden_all], "last", starts=[-2, 0, 0], ends=[-1, -1, -1])], "read", dims=[0]
    )
    logits = b.FC(
        [last, b.param("w", [CLASSES, H]), b.param("b", [CLASSES], "ConstantFill", value=0.0)],
        "scores",
    )
    b.Softmax([logits], "probabilities")
    weights = jrnn.run_net(b.build_init(), {}, key=jax.random.key(0))
    package = export_package(
        b.build(), weights, ["data", "hidden_init", "cell_init"], ["probabilities"]
    )
    folder = tmp_path_factory.mktemp("old")
    package.save(folder)
    return folder


def config(folder, **changes):
    return NetDefConfig(net=str(folder / "predict_net.pb"), **changes)


@pytest.fixture(scope="module")
def model(folder):
    return netdef_model(config(folder), CLASSIFY, Compute())


@pytest.fixture(scope="module")
def batch():
    inputs = np.random.default_rng(0).standard_normal((T, B, D)).astype(np.float32)
    return Examples(inputs, np.array([0, 2, 1], np.int32))


@pytest.mark.exhaustive
def test_inputs_states_weights_and_output_are_read_off_the_net(model, folder, batch):
    assert model.feeds == {"data": "inputs", "targets": "targets"}
    assert model.states == {
        "hidden_init": ("lstm/hidden_state_last", H), "cell_init": ("lstm/cell_state_last", H)
    }  # fmt: skip
    assert model.output_blob == "scores"  # before the softmax
    params = model.init(jax.random.key(0))
    assert set(params) == set(Package.load(folder).weight_names)
    zeros = {name: np.zeros((1, B, H), np.float32) for name in model.states}
    served = Package.load(folder).to_jax()({"data": batch.inputs, **zeros})["probabilities"]
    logits, _ = model.predict(params, model.initial_carry(B), batch)
    np.testing.assert_allclose(jax.nn.softmax(logits), served, rtol=1e-5)
    loss, _ = model.loss(params, model.initial_carry(B), batch, None)
    np.testing.assert_allclose(
        loss, -np.mean(np.log(served[np.arange(B), batch.targets])), rtol=1e-5
    )


def test_frozen_weights_are_no_parameters(folder, model):
    frozen = netdef_model(config(folder, frozen=["w", "b"]), CLASSIFY, Compute())
    assert set(jax.eval_shape(frozen.init, jax.random.key(0))) == set(
        model.init_net.external_outputs
    ) - {"w", "b"}
    assert set(frozen.constants) == {"w", "b"}


def test_a_net_whose_steps_and_examples_are_joined(tmp_path):
    """A language model with its own loss over [T B, V], as Caffe2's own scripts made them."""
    b = NetBuilder("joined")
    tokens = b.input("tokens")
    table = b.param("table", [6, D], "GaussianFill", std=1.0)
    lstm = LSTM(
        b, b.Gather([table, tokens], "embedded"), None, [b.input("h"), b.input("c")], D, H, "lstm"
    )
    flat, _ = b.Reshape([lstm.hidden_all], ["flat", "old_shape"], shape=[-1, H])
    b.Softmax(
        [
            b.FC(
                [flat, b.param("w", [6, H]), b.param("bias", [6], "ConstantFill", value=0.0)],
                "scores",
            )
        ],
        "p",
    )
    weights = jrnn.run_net(b.build_init(), {}, key=jax.random.key(0))
    export_package(b.build(), weights, ["tokens", "h", "c"], ["p"]).save(tmp_path)
    model = netdef_model(config(tmp_path), LANGUAGE, Compute())
    text = np.random.default_rng(0).integers(0, 6, (T + 1, B)).astype(np.int32)
    chunk = TextChunk(text[:-1], text[1:], np.asarray(True))
    params, carry = model.init(jax.random.key(0)), model.initial_carry(B)
    logits, after = model.predict(params, carry, chunk)
    assert logits.shape == (T, B, 6) and set(after) == {"h", "c"}
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), chunk.targets[..., None], axis=-1)
    np.testing.assert_allclose(model.loss(params, carry, chunk, None)[0], -picked.mean(), rtol=1e-5)


def test_a_model_of_cells_goes_out_and_comes_back(tmp_path):
    own = cells_model(TokenCellsConfig(embedding=D, hidden=H, dropout=0.5), LANGUAGE)
    params = own.init(jax.random.key(0))
    own.package(params).save(tmp_path)
    back = netdef_model(config(tmp_path), LANGUAGE, Compute())
    assert (dict(back.states), back.feeds) == (dict(own.states), own.feeds)
    for name, value in back.init(jax.random.key(1)).items():
        np.testing.assert_array_equal(value, params[name])


def test_a_fine_tuning_from_files_to_files(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez("data.npz", inputs=rng.standard_normal((40, T, D)), targets=np.arange(40) % CLASSES)
    (tmp_path / "tune.toml").write_text(
        f'task = "classification"\n[data]\npath = "data.npz"\nbatch = 8\n[model]\nnet = "{folder}/predict_net.pb"\n'
        'frozen = ["lstm/i2h_b"]\n[gradient]\nsource = "net"\n[train]\nsteps = 2\n'
    )
    assert main(["train", "tune.toml", "--out", "run"]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert main(["export", "run", "tuned"]) == 0
    old, new = Package.load(folder), Package.load(tmp_path / "tuned")
    assert new.output_names[0] == "probabilities"
    before, after = old.weights(), new.weights()
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed == set(before) - {"lstm/i2h_b"}


@pytest.mark.parametrize(
    ("changes", "signature", "message"),
    [
        (
            {"net": "none.pb"},
            CLASSIFY,
            r"model\.net = 'none\.pb': model\.net: none\.pb: no such file",
        ),
        ({"init_net": "none.pb"}, CLASSIFY, r"model\.init_net: none\.pb: no such file"),
        ({"output": "scorse"}, CLASSIFY, r"there is no blob 'scorse'; did you mean 'scores'"),
        ({"frozen": ["v"]}, CLASSIFY, r"there is no blob 'v'"),
        ({"input": "date"}, CLASSIFY, r"reads no blob 'date' of inputs; did you mean 'data'"),
        (
            {},
            replace(CLASSIFY, outputs=4),
            r"its output 'scores' is \[3, 3\]; the data need 4 on the last axis",
        ),
        ({}, replace(CLASSIFY, lengths=True), "the data have lengths, and the net reads none"),
        (
            {},
            replace(CLASSIFY, inputs=7),
            "does not fit the data, or its states have several sizes",
        ),
        (
            {"loss": "probabilities"},
            CLASSIFY,
            r"has a loss of its own; name the blob of its targets",
        ),
    ],
)
def test_what_does_not_fit_is_named(folder, changes, signature, message):
    with pytest.raises(ConfigError, match=message):
        netdef_model(replace(config(folder), **changes), signature, Compute())


def test_a_net_is_a_kind_of_model():
    assert decode(Config, {"model": {"net": "a.pb"}}, "c.toml").model.kind == "net"
    with pytest.raises(ConfigError, match=r"model\.net must name the file of a net"):
        decode(Config, {"model": {"kind": "net"}}, "c.toml")
