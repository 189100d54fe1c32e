"""The encoder-decoder: its gradients, its padding, its decoding step by step, its attention; and the task around it."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrnn
from jrnn.cli import main, training
from jrnn.errors import ConfigError, DataError, UsageError
from jrnn.train import train
from jrnn.train.config import Config
from jrnn.train.models import Compute, Outcome
from jrnn.train.seq2seq import seq2seq_task as task_file
from jrnn.train.seq2seq.encoder_decoder import Beams, Seq2SeqConfig, seq2seq
from jrnn.train.seq2seq.seq2seq_task import (
    VOCABULARY,
    PairBatch,
    Seq2SeqTask,
    draw_attention,
    encode,
)
from jrnn.train.tasks import Trained
from jrnn.train.toml_codec import decode

S, T, N, V, END = 4, 3, 3, 5, 0
SIZES = {"embedding": 2, "encoder": 2, "decoder": 3}
INPUT_LENGTHS, TARGET_LENGTHS = np.array([0, 2, S], np.int32), np.array([1, 2, T], np.int32)


def random_params(model, scale=1.0):
    """As `init` makes them in shape, but quicker, and with nothing that is 0."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return {
        name: scale * rng.standard_normal(a.shape).astype(np.float32) for name, a in shapes.items()
    }


def batch(padding=END):
    rng = np.random.default_rng(0)
    inputs, targets = (rng.integers(1, V, shape).astype(np.int32) for shape in ((S, N), (T, N)))
    decoder_inputs = np.concatenate([np.full((1, N), END, np.int32), targets[:-1]])
    inputs[np.arange(S)[:, None] >= INPUT_LENGTHS] = padding
    for tokens in (targets, decoder_inputs):
        tokens[np.arange(T)[:, None] >= TARGET_LENGTHS] = padding
    return PairBatch(
        inputs, INPUT_LENGTHS, decoder_inputs, targets, TARGET_LENGTHS, np.asarray(True)
    )


@pytest.mark.exhaustive
def test_gradients_agree_also_after_a_way_through_a_file_and_padding_never_shows(tmp_path):
    model = seq2seq(Seq2SeqConfig(**SIZES), V)
    jrnn.write_net(model.net, tmp_path / "net.pb")
    model = replace(model, net=jrnn.read_net(tmp_path / "net.pb"))
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, random_params(model))

        @jax.jit
        def both(batch):
            return [
                replace(model, compute=Compute(source)).gradients(wide, {}, batch, None)
                for source in ("jax", "net")
            ]

        by_jax, by_net = jax.device_get(both(batch()))
        again = jax.device_get(both(batch(padding=V - 1)))
    assert by_jax.loss > 1.0
    for name, gradient in by_jax.gradients.items():
        np.testing.assert_allclose(
            by_net.gradients[name], gradient, rtol=0, atol=1e-14, err_msg=name
        )
    still = {name for name, gradient in by_jax.gradients.items() if np.abs(gradient).max() < 1e-6}
    assert still == {"attend/attention_logits_b"}  # a bias that all scores share
    jax.tree.map(np.testing.assert_array_equal, again, [by_jax, by_net])


@pytest.mark.exhaustive
@pytest.mark.parametrize("attention", ["dot", "coverage"])
def test_decoding_step_by_step_is_what_the_whole_net_says(attention):
    model = seq2seq(Seq2SeqConfig(**SIZES, attention=attention), V)
    params = random_params(model, scale=2.0)
    params["logits_b"][END] = -2.0  # so that answers differ, and have some length
    inputs = batch().inputs
    searched = model.search(
        params, inputs, INPUT_LENGTHS, end=END, steps=T, width=2, normalization=0.0
    )
    best = np.asarray(searched.tokens)[:, 0].T  # [T, N]
    assert len(set(map(tuple, best.T))) > 1
    fed = np.concatenate([np.full((1, N), END, np.int32), best[:-1]])
    whole = batch()._replace(
        decoder_inputs=fed, targets=best, target_lengths=np.asarray(searched.lengths)[:, 0]
    )
    logits, _ = model.predict(params, {}, whole)
    of_tokens = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits)), best[..., None], axis=-1
    )[..., 0]
    within = np.arange(T)[:, None] < whole.target_lengths
    np.testing.assert_allclose(
        (of_tokens * within).sum(0), searched.log_probability[:, 0], rtol=1e-4, atol=1e-5
    )


class Guess:
    """A stand-in for a model: it knows how frequent each character is, and gives the answers that the test sets."""

    def __init__(self, answers=()):
        self.answers = answers

    def init(self, key):
        return {"logits": jnp.zeros(len(VOCABULARY))}

    def initial_carry(self, examples):
        return {}

    def loss(self, params, carry, batch, key):
        within = jnp.arange(len(batch.targets))[:, None] < batch.target_lengths[None]
        return -jnp.mean(jax.nn.log_softmax(params["logits"])[batch.targets], where=within), carry

    def gradients(self, params, carry, batch, key):
        (loss, carry), gradients = jax.value_and_grad(self.loss, has_aux=True)(
            params, carry, batch, key
        )
        return Outcome(loss, carry, gradients)

    def search(self, params, inputs, input_lengths, *, steps, **options):
        answers = self.answers or [""] * len(input_lengths)
        tokens = encode([("", text) for text in answers], target_steps=steps).targets.T[:, None]
        return Beams(tokens, None, None, None, None)


def test_one_wrong_character_is_no_match():
    pairs = [("<abc", "cba"), ("<ab", "ba"), ("<a", "a"), ("1 May 2000", "2000-05-01")]
    task = load(small())
    for answers, share in [
        (["cba", "ba", "a", "2000-05-01"], 1.0),
        (["cbb", "bab", "", "2000-05-01"], 0.25),
    ]:
        assert replace(task, model=Guess(answers)).exact_match({}, pairs) == share


def small(**data):
    return {
        "task": "seq2seq",
        "data": {"batch": 4, "longest": 3, "validation": 8, **data},
        "model": SIZES,
        "train": {"steps": 2, "steps_per_call": 2, "validate_every": 2, "checkpoint_every": 2},
        "sample": {"beam": 2, "prompt": "<abc"},
    }


def load(tables):
    return Seq2SeqTask.load(decode(Config, tables, "small.toml"))


@pytest.mark.sample("0.0-kinds0")
@pytest.mark.parametrize(
    "share, kinds", [(0.0, ["dates"]), (0.5, ["dates", "reversals"]), (1.0, ["reversals"])]
)
def test_what_is_trained_on_is_what_is_measured(share, kinds):
    task = load(small(reversals=share))
    assert list(task.held_out) == kinds
    assert sum(len(b.input_lengths) for b in task.validation()) == 8 * len(kinds)
    assert all(np.array_equal(a, b) for a, b in zip(task.train.at(7), task.train.at(7)))
    assert any(not np.array_equal(a, b) for a, b in zip(task.train.at(7), task.train.at(8)))


@pytest.mark.exhaustive
def test_the_task_trains(tmp_path, quiet, monkeypatch):
    monkeypatch.setattr(task_file, "seq2seq", lambda *settings: Guess())
    tables = small()
    tables["train"] = {"steps": 60, "validate_every": 30, "checkpoint_every": 30}
    tables["optimizer"] = {"learning_rate": 0.1}
    result = train(decode(Config, tables, "small.toml"), tmp_path / "run", console=quiet)
    assert (
        result.validation_loss < np.log(len(VOCABULARY)) - 0.5
    )  # most of what is written are digits and strokes
    assert result.metrics == {"exact_match_dates": 0.0, "exact_match_reversals": 0.0}
    longer = {
        **tables,
        "train": {**tables["train"], "steps": 61},
        "optimizer": {"learning_rate": 0.1, "schedule_steps": 60},
    }
    assert (
        train(
            decode(Config, longer, "small.toml"), tmp_path / "run", resume=True, console=quiet
        ).step
        == 61
    )


def test_answers_and_a_picture(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        task_file, "draw_attention", lambda *given: drawn.append(given) or draw_attention(*given)
    )
    tables = small()
    tables["sample"] = {
        "beam": 2,
        "prompt": "1 May 2000",
        "attention": str(tmp_path / "attention.png"),
    }
    config = decode(Config, tables, "small.toml")
    model = config.kind.model(config, {"characters": VOCABULARY.characters})
    params = random_params(model, scale=0.1)
    params["logits_b"][VOCABULARY.encode("7")] = 6.0
    answers = [
        line.split()
        for line in config.kind.write(Trained(config, {}, model, params), 0).split("\n")
    ]
    assert answers[0][0] == "7" * 11  # as long as an answer may be
    first, second = (float(share) for _, share in answers)
    assert 0.5 > first > second > 0
    ((path, source, target, weights),) = drawn
    assert path.read_bytes().startswith(b"\x89PNG")
    assert (source, target) == ("1 May 2000", "7" * 11)
    assert weights.shape == (len(target), len(source))
    np.testing.assert_allclose(weights.sum(1), 1.0, rtol=1e-5)


def test_another_vocabulary_is_another_model():
    task = load(small())
    config = decode(Config, small(), "small.toml")
    kept = {**task.fingerprint(), "characters": "\nabc"}
    with pytest.raises(DataError, match="train a new model"):
        config.kind.model(config, kept)
    assert set(VOCABULARY.characters) > set("abc")


def test_coverage_is_not_for_low_precision():
    tables = {**small(), "model": {**SIZES, "attention": "coverage"}}
    assert load(tables).model
    with pytest.raises(ConfigError, match="leave train.precision at"):
        load({**tables, "train": {"precision": "bfloat16"}})


def test_the_command_says_how_to_search_and_where_to_draw(monkeypatch, capsys):
    given = {}
    model = SimpleNamespace(sample=lambda seed, **changes: given.update(changes) or "2026-11-20")
    monkeypatch.setattr(training, "load_run", lambda run: given.update(run=run) or model)
    assert (
        main(["sample", "runs/s", "--prompt", "20 Nov 2026", "--beam", "3", "--attention", "a.png"])
        == 0
    )
    assert capsys.readouterr().out == "2026-11-20\n"
    asked = {name: value for name, value in given.items() if value is not None}
    assert asked == {"run": "runs/s", "prompt": "20 Nov 2026", "beam": 3, "attention": "a.png"}


@pytest.mark.exhaustive
def test_pictures(tmp_path, monkeypatch):
    weights = np.eye(3)[::-1]
    draw_attention(tmp_path / "a.svg", "a b", "b a", weights)
    assert "<svg" in (tmp_path / "a.svg").read_text()
    with pytest.raises(UsageError, match="must end in one of .png"):
        draw_attention(tmp_path / "a.txt", "a b", "b a", weights)
    with pytest.raises(UsageError, match="the answer is empty"):
        draw_attention(tmp_path / "a.png", "a b", "", np.zeros((0, 3)))
    with pytest.raises(UsageError, match="cannot be written"):
        draw_attention(tmp_path / "none" / "a.png", "a b", "b a", weights)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'jrnn\[plot\]'"):
        draw_attention(tmp_path / "a.png", "a b", "b a", weights)
