"""The encoder-decoder: its gradients, its padding, its decoding step by step, its attention, and a run of the whole task."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jrnn
from jrnn.errors import DataError, UsageError
from jrnn.train import sample_run, train
from jrnn.train.beam import Beams
from jrnn.train.config import Config
from jrnn.train.models import Compute
from jrnn.train.models.seq2seq import Seq2SeqConfig, seq2seq
from jrnn.train.settings import decode
from jrnn.train.tasks.seq2seq import PairBatch, Seq2SeqTask
from jrnn.train.tasks.seq2seq_pairs import VOCABULARY
from jrnn.train.tasks.seq2seq_picture import draw_attention

S, T, N, V, END = 4, 3, 3, 5, 0
SIZES = {"embedding": 2, "encoder": 2, "decoder": 3}
INPUT_LENGTHS, TARGET_LENGTHS = np.array([0, 2, S], np.int32), np.array([1, 2, T], np.int32)


@pytest.fixture(scope="module")
def model():
    return seq2seq(Seq2SeqConfig(**SIZES), V)


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(0))


def batch(padding=END):
    rng = np.random.default_rng(0)
    inputs, targets = (rng.integers(1, V, shape).astype(np.int32) for shape in ((S, N), (T, N)))
    decoder_inputs = np.concatenate([np.full((1, N), END, np.int32), targets[:-1]])
    inputs[np.arange(S)[:, None] >= INPUT_LENGTHS] = padding
    for tokens in (targets, decoder_inputs):
        tokens[np.arange(T)[:, None] >= TARGET_LENGTHS] = padding
    return PairBatch(inputs, INPUT_LENGTHS, decoder_inputs, targets, TARGET_LENGTHS, np.asarray(True))


def test_gradients_agree_also_after_a_way_through_a_file_and_padding_never_shows(model, params, tmp_path):
    jrnn.write_net(model.net, tmp_path / "net.pb")
    model = replace(model, net=jrnn.read_net(tmp_path / "net.pb"))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

        @jax.jit
        def both(batch):
            return [
                replace(model, compute=Compute(source)).gradients(wide, {}, batch, None) for source in ("jax", "net")
            ]

        by_jax, by_net = jax.device_get(both(batch()))
        again = jax.device_get(both(batch(padding=V - 1)))
    assert 1.0 < by_jax.loss < 3.0  # about that of chance, log V
    for name, gradient in by_jax.gradients.items():
        np.testing.assert_allclose(by_net.gradients[name], gradient, rtol=0, atol=1e-14, err_msg=name)
    still = {name for name, gradient in by_jax.gradients.items() if np.abs(gradient).max() < 1e-6}
    assert still == {"attend/attention_logits_b"}  # a bias that all scores share
    jax.tree.map(np.testing.assert_array_equal, again, [by_jax, by_net])


@pytest.mark.parametrize("attention", ["dot", "coverage"])
def test_decoding_step_by_step_is_what_the_whole_net_says(attention):
    model = seq2seq(Seq2SeqConfig(**SIZES, attention=attention), V)
    params = jax.tree.map(lambda a: 3 * a, model.init(jax.random.key(1)))  # so that the answers differ
    inputs = batch().inputs
    found = model.search(params, inputs, INPUT_LENGTHS, end=END, steps=T, width=2, normalization=0.0)
    best = np.asarray(found.tokens)[:, 0].T  # [T, N]
    assert len(set(map(tuple, best.T))) > 1
    fed = np.concatenate([np.full((1, N), END, np.int32), best[:-1]])
    whole = batch()._replace(decoder_inputs=fed, targets=best, target_lengths=np.asarray(found.lengths)[:, 0])
    logits, _ = model.predict(params, {}, whole)
    of_tokens = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), best[..., None], axis=-1)[..., 0]
    within = np.arange(T)[:, None] < whole.target_lengths
    np.testing.assert_allclose((of_tokens * within).sum(0), found.log_probability[:, 0], rtol=1e-4, atol=1e-5)


def test_attention_is_on_the_input_and_nowhere_else(model, params):
    weights = model.attention(params, batch())
    assert weights.shape == (T, N, S)
    for n, length in enumerate(INPUT_LENGTHS):
        np.testing.assert_allclose(weights[:, n].sum(1), 1.0 if length else 0.0, rtol=1e-6)
        assert not weights[:, n, length:].any()


class Answers:
    """Stands in for a model: it gives every answer that it is told to."""

    def __init__(self, answers):
        self.answers = answers

    def search(self, params, inputs, input_lengths, *, steps, **options):
        tokens = PairBatch.of([("", text) for text in self.answers], target_steps=steps).targets.T[:, None]
        return Beams(tokens, None, None, None, None)


def test_one_wrong_character_is_no_match():
    pairs = [("<abc", "cba"), ("<ab", "ba"), ("<a", "a"), ("1 May 2000", "2000-05-01")]
    task = load(small())
    for answers, share in [(["cba", "ba", "a", "2000-05-01"], 1.0), (["cbb", "bab", "", "2000-05-01"], 0.25)]:
        assert replace(task, model=Answers(answers)).exact_match({}, pairs) == share


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


@pytest.mark.parametrize("share, kinds", [(0.0, ["dates"]), (0.5, ["dates", "reversals"]), (1.0, ["reversals"])])
def test_what_is_trained_on_is_what_is_measured(share, kinds):
    task = load(small(reversals=share))
    assert list(task.held_out) == kinds
    assert sum(len(b.input_lengths) for b in task.validation()) == 8 * len(kinds)
    assert all(np.array_equal(a, b) for a, b in zip(task.train.at(7), task.train.at(7)))
    assert any(not np.array_equal(a, b) for a, b in zip(task.train.at(7), task.train.at(8)))


def test_a_run_answers_and_draws(tmp_path, quiet):
    config = decode(Config, small(), "small.toml")
    result = train(config, tmp_path / "run", console=quiet)
    assert set(result.metrics) == {"exact_match_dates", "exact_match_reversals"}
    picture = tmp_path / "attention.png"
    lines = sample_run(tmp_path / "run", prompt="1 May 2000", attention=str(picture)).splitlines()
    assert len(lines) == 2
    shares = [float(line.split()[-1]) for line in lines]
    assert all(0 <= share <= 1 for share in shares)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DataError, match="does not know the character 'é'"):
        sample_run(tmp_path / "run", prompt="été")


def test_another_vocabulary_is_another_model():
    task = load(small())
    config = decode(Config, small(), "small.toml")
    kept = {**task.fingerprint(), "characters": "\nabc"}
    with pytest.raises(DataError, match="train it anew"):
        config.kind.model(config, kept)
    assert set(VOCABULARY.characters) > set("abc")


def test_pictures(tmp_path, monkeypatch):
    weights = np.eye(3)[::-1]
    draw_attention(tmp_path / "a.svg", "a b", "b a", weights)
    assert "<svg" in (tmp_path / "a.svg").read_text()
    with pytest.raises(UsageError, match="must end in one of .png"):
        draw_attention(tmp_path / "a.txt", "a b", "b a", weights)
    with pytest.raises(UsageError, match="cannot be written"):
        draw_attention(tmp_path / "none" / "a.png", "a b", "b a", weights)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'jrnn\[plot\]'"):
        draw_attention(tmp_path / "a.png", "a b", "b a", weights)
