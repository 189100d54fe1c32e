"""From a run to a service: a run of each kind of configuration is loaded, called, streamed, sampled from and exported."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jrnn import models
from jrnn.cli import main
from jrnn.errors import CheckpointError, ConfigError
from jrnn.files.corpus import tokenize
from jrnn.train import Config, load_run, train
from jrnn.train.models.pretrained import PretrainedConfig, PretrainedModel
from jrnn.train.origin import Origin
from jrnn.train.serving import TrainedModel
from jrnn.train.tasks.task import COMPANIONS
from jrnn.train.toml_codec import decode

QUICK = {"steps": 1, "steps_per_call": 1, "validate_every": 1}
TEXT = {"batch": 2, "chunk": 8, "validation": 0.2}
ROWS = {"batch": 2, "length": 5, "validation": 2}
PRETRAINED = {
    "model_type": "mamba",
    "vocab_size": 300,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "state_size": 2,
}
OWN = """
from dataclasses import dataclass
import jax, jax.numpy as jnp
import jrnn
from jrnn.train import FunctionModel, ModelKind

@dataclass(frozen=True)
class Table:
    kind: str = ""
    hidden: int = 3

def make(config, signature, compute):
    def start(key):
        a, b = jax.random.split(key)
        w, v = (config.hidden, signature.inputs), (signature.outputs, config.hidden)
        return {"w": jax.random.normal(a, w), "v": jax.random.normal(b, v)}

    def apply(params, batch, key):
        def cell(h, x):
            h = jnp.tanh(x @ params["w"].T + 0.5 * h)
            return h, None
        h, _ = jrnn.scan(cell, jnp.zeros((batch.inputs.shape[1], config.hidden)), batch.inputs)
        return h @ params["v"].T

    return FunctionModel(start, apply, signature)

OWN = ModelKind(Table, make)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, words):
    """Returns a function that trains a configuration for one step, once."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(words * 8)
    (folder / "own.py").write_text(OWN)
    tokenize([folder / "text.txt"], folder / "corpus", vocabulary=260)
    models.create(PRETRAINED, jax.random.key(0), jnp.bfloat16).save(folder / "model")
    rows = "\n".join(f"{k},{k % 7},{(k * k) % 11}" for k in range(30))
    (folder / "rows.csv").write_text("hour,load,heat\n" + rows)
    rng = np.random.default_rng(0)
    np.savez(
        folder / "rows.npz",
        inputs=rng.standard_normal((20, 5, 2), dtype=np.float32),
        targets=np.arange(20) % 3,
    )
    text, tokens = (
        {"path": str(folder / "text.txt"), **TEXT},
        {"path": str(folder / "corpus"), "batch": 2, "chunk": 8, "validation": 1},
    )
    series = {
        "path": str(folder / "rows.csv"),
        "targets": ["load", "heat"],
        "inputs": ["heat"],
        "window": 4,
        "horizon": 2,
        "batch": 4,
    }
    tables = {
        "characters": {"data": text, "model": {"embedding": 3, "hidden": 4}},
        "characters nn": {"task": "characters", "data": text, "model": {"kind": "nn", "embedding": 3, "hidden": 4}},
        "tokens": {"data": tokens, "model": {"kind": "nn", "cell": "gated_deltanet", "embedding": 3, "hidden": 4}},
        "pretrained": {"task": "tokens", "data": tokens, "model": {"pretrained": str(folder / "model")}},
        "adding": {"data": ROWS, "model": {"kind": "cells", "hidden": 4}},
        "forecast": {"data": series, "model": {"kind": "nn", "cell": "gru", "hidden": 4}},
        "both ways": {"task": "adding", "data": ROWS, "model": {"kind": "nn", "bidirectional": True, "hidden": 4}},
        "own": {"task": "adding", "data": ROWS, "model": {"kind": f"{folder}/own.py:OWN"}},
        "words": {"data": text, "model": {"embedding": 3, "hidden": 4}},
        "classification": {"data": {"path": str(folder / "rows.npz"), "batch": 4}, "model": {"hidden": 4}},
        "net": {"task": "adding", "data": ROWS, "model": {"net": str(folder / "net" / "predict_net.pb")}},
        "seq2seq": {"data": {"batch": 2, "validation": 2}, "model": {"embedding": 2, "encoder": 3, "decoder": 3}},
    }  # fmt: skip

    def run(name):
        out = folder / name.replace(" ", "_")
        if not out.exists():
            if name == "net":
                load_run(run("adding")).save(folder / "net")
            given = {"task": name, "train": QUICK} | tables[name]
            given["sample"] = (
                {"length": 4}
                if "data" in given and given["task"] in ("characters", "words", "tokens")
                else {}
            )
            config = decode(Config, {k: v for k, v in given.items() if v}, f"{name}.toml")
            train(config, out, console=Console(quiet=True))
        return out

    return run


TOKENS = ["characters", "characters nn", "words", "tokens", "pretrained"]
FEATURES = ["adding", "forecast", "classification"]
WHOLE = ["both ways", "own", "net"]  # without a state
OF_CELLS = ("characters", "words", "adding", "classification", "net")  # exported as nets


@pytest.mark.exhaustive("characters nn", "words")
@pytest.mark.parametrize("name", TOKENS)
def test_a_model_of_tokens_is_called_streamed_and_sampled_from(runs, name):
    model = load_run(runs(name))
    tokens = jnp.array([[3, 1, 4, 1], [2, 7, 1, 8]])
    logits, state = model(tokens)
    assert logits.shape == (2, 4, model.vocabulary) and all(
        len(leaf) == 2 for leaf in state.values()
    )
    first, between = model(tokens[:, :2])
    rest, _ = model(tokens[:, 2:], between)
    np.testing.assert_allclose(jnp.concatenate([first, rest], 1), logits, atol=2e-5)
    steps, own = [], model.initial_state(2, 4)
    for t in range(4):
        y, own = model.step(tokens[:, t], own)
        steps.append(y)
    np.testing.assert_allclose(jnp.stack(steps, 1), logits, atol=2e-5)
    new, _ = model.generate(tokens, 3, temperature=0)
    assert [t.tolist() for t in model.stream(tokens, 3, temperature=0)] == new.T.tolist()
    assert new[:, 0].tolist() == logits[:, -1].argmax(-1).tolist()
    assert len(model.sample(prompt="the ", temperature=0.0)) >= 4
    if name not in OF_CELLS:  # a net of cells has no lengths unless it was trained with them
        short, _ = model(tokens, lengths=[4, 2])
        np.testing.assert_allclose(short[0], logits[0], atol=2e-5)
        ragged, _ = model.generate(tokens, 2, temperature=0, lengths=[4, 2])
        assert ragged[1].tolist() == model.generate(tokens[1:, :2], 2, temperature=0)[0][0].tolist()


@pytest.mark.exhaustive("classification")
@pytest.mark.parametrize("name", FEATURES)
def test_a_model_of_features_is_called_and_streamed(runs, name):
    model = load_run(runs(name))
    x = jax.random.normal(jax.random.key(0), (3, 4, model.origin.signature.inputs))
    y, state = model(x)
    own = model.initial_state(3)
    for t in range(4):
        last, own = model.step(x[:, t], own)
    np.testing.assert_allclose(last, y, atol=1e-5)
    assert state.keys() == own.keys() and state
    with pytest.raises(ConfigError, match="generate is for models that read tokens"):
        model.generate(x, 3)


def test_forecasts_have_the_units_of_the_file(runs):
    model = load_run(runs("forecast"))
    column = [(k * k) % 11 for k in range(30)]
    y, _ = model(jnp.array(column[-4:], jnp.float32)[None, :, None])
    assert y.shape == (1, 2, 2)
    written = [list(map(float, line.split(",")[1:])) for line in model.predict().splitlines()[1:]]
    np.testing.assert_allclose(y[0], written, rtol=1e-4)


@pytest.mark.exhaustive("net")
@pytest.mark.parametrize("name", WHOLE)
def test_a_model_without_a_state_is_called(runs, name):
    model = load_run(runs(name))
    y, state = model(jnp.ones((3, 5, 2)))
    assert y.shape == (3, 1) and state == {} == model.initial_state(3)
    with pytest.raises(ConfigError, match="step: the model has no state to go on from"):
        model.step(jnp.ones((3, 2)))


@pytest.mark.exhaustive
def test_an_encoder_decoder_is_sampled_from(runs):
    model = load_run(runs("seq2seq"))
    assert model.sample(prompt="18 Nov 2026")
    with pytest.raises(ConfigError, match="does not map one sequence to outputs; use model.sample"):
        model(jnp.zeros((1, 3), int))


@pytest.mark.exhaustive(
    "characters nn", "words", "tokens", "classification", "net", "both ways", "own"
)
@pytest.mark.parametrize("name", [*TOKENS, *FEATURES, *WHOLE])
def test_it_is_exported(runs, name, tmp_path):
    model = load_run(runs(name))
    if name in TOKENS:
        x = np.array([[3, 1, 4, 1, 5]], np.int32)
    else:
        x = np.asarray(jax.random.normal(jax.random.key(0), (1, 5, model.origin.signature.inputs)))
    y, state = model(x)
    sizes = {}
    if name in OF_CELLS:
        with pytest.raises(ConfigError, match="a net is exported for one number of steps"):
            model.export(tmp_path / "whole.jax")
        sizes = {"time": 5}
    model.export(tmp_path / "whole.jax", **sizes)
    exported = jax.export.deserialize((tmp_path / "whole.jax").read_bytes())
    np.testing.assert_allclose(exported.call(x), y, atol=2e-5)
    if state:
        model.export(tmp_path / "step.jax", step=True)
        step, own = (
            jax.export.deserialize((tmp_path / "step.jax").read_bytes()),
            model.initial_state(1, 8),
        )
        for t in range(x.shape[1]):
            last, own = step.call(x[:, t], own)
        np.testing.assert_allclose(last, y[:, -1] if name in TOKENS else y, atol=2e-5)
    ort = pytest.importorskip("onnxruntime")
    model.export(tmp_path / "whole.onnx", **sizes)
    session = ort.InferenceSession(str(tmp_path / "whole.onnx"))
    (outputs,) = session.run(
        None, {session.get_inputs()[0].name: x.astype(np.int64) if name in TOKENS else x}
    )
    np.testing.assert_allclose(outputs, y, atol=2e-5)


def test_the_step_of_a_model_that_attends_to_all_tokens_is_exported_with_its_room(tmp_path):
    sizes = {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 4,
        "layer_types": ["full_attention"],
    }
    config = PRETRAINED | {"model_type": "lfm2"} | sizes
    models.create({k: v for k, v in config.items() if k != "state_size"}, jax.random.key(0)).save(
        tmp_path / "model"
    )
    table = PretrainedConfig(pretrained=str(tmp_path / "model"))
    origin = Origin(tmp_path, None, {}, PretrainedModel.of(table, "float32", None))
    model = TrainedModel(models.load(tmp_path / "model").params, origin)
    with pytest.raises(ConfigError, match="the state remembers all tokens: give time="):
        model.export(tmp_path / "step.jax", step=True)
    model.export(tmp_path / "step.jax", step=True, time=5)
    step, state = (
        jax.export.deserialize((tmp_path / "step.jax").read_bytes()),
        model.initial_state(1, 5),
    )
    for token in (3, 1, 4, 1, 5):
        y, state = step.call(np.array([token], np.int32), state)
    np.testing.assert_allclose(y, model(np.array([[3, 1, 4, 1, 5]]))[0][:, -1], atol=2e-5)


@pytest.mark.parametrize("name", ["characters", "tokens", "pretrained", "forecast"])
def test_what_a_task_kept_is_checked(runs, name, tmp_path):
    """A stranger's data.json: a value that is missing or of another kind is one line, wherever it is read."""
    folder = shutil.copytree(runs(name), tmp_path / "run")
    kept = json.loads((folder / "data.json").read_text())

    def used():
        model = load_run(folder)
        return model.sample() if name in TOKENS else model(jnp.zeros((1, 4, 1)))

    for key in kept.keys() - {"sha256", "bytes"}:
        without = {
            k: v for k, v in kept.items() if k != ("vocabulary" if key == "pretrained" else key)
        }
        needed = () if key == COMPANIONS else (without,)
        for other in (*needed, kept | {key: 1.5}, {"__float__": "NaN"}):
            (folder / "data.json").write_text(json.dumps(other))
            with pytest.raises(CheckpointError, match=r"data\.json"):
                used()


def test_a_model_is_not_written_as_python(runs, tmp_path, capsys):
    assert main(["export", str(runs("characters")), str(tmp_path / "net.py")]) == 2
    assert "models are not written as Python; FILE.jax is" in capsys.readouterr().err


def test_a_prompt_that_the_text_lacks_is_no_fault_of_the_run(tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("a text without capitals. " * 20)
    keys = [f"data.path={text}", "data.batch=2", "data.chunk=8", "model.hidden=2", "train.steps=1"]
    assert (
        main(
            [
                "train",
                "char_lstm",
                "--out",
                str(out),
                *(word for key in keys for word in ("--set", key)),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "no sample: sample.prompt = 'The ': the model does not know the character 'T'" in said
    assert f"use jrnn sample {out} --prompt TEXT" in said
