"""The task `tokens`: rows of a corpus in random order, resets where documents begin, and pretrained models."""

import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jrnn import models
from jrnn.cli import main
from jrnn.errors import ConfigError, DataError
from jrnn.files.corpus import Corpus, tokenize
from jrnn.train import Config, load_run, train
from jrnn.train.models import Signature, TokenNnConfig, nn_model
from jrnn.train.models.pretrained import PretrainedConfig
from jrnn.train.tasks.task import COMPANIONS
from jrnn.train.tasks.tokens import Rows, permuted
from jrnn.train.text_streams import TextChunk
from jrnn.train.toml_codec import decode

V, T = 260, 8
CONFIG = {"model_type": "rwkv", "vocab_size": 264, "hidden_size": 8, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    lines = (f'{{"text": "{"the cat " * (k % 3 + 1)}{k}"}}\n' for k in range(60))
    (folder / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    return tokenize([folder / "text.jsonl"], folder / "out", vocabulary=V)


def tables(corpus, **changes):
    settings = {
        "task": "tokens",
        "data": {"path": str(corpus.folder), "batch": 2, "chunk": T, "validation": 2},
        "model": {"cell": "gru", "embedding": 4, "hidden": 8},
        "optimizer": {"learning_rate": 0.02, "schedule": "constant"},
        "train": {"steps": 8, "steps_per_call": 4, "validate_every": 8, "checkpoint_every": 4},
        "sample": {"length": 5, "prompt": "the"},
    }
    return decode(Config, settings | changes, "tokens.toml")


@pytest.mark.parametrize("size", [1, 2, 3, 10, 64, 1000])
def test_a_permutation_is_computed_piece_by_piece(size):
    order = permuted(np.arange(size), size, 5)
    assert sorted(order.tolist()) == list(range(size))
    np.testing.assert_array_equal(order[size // 2 :], permuted(np.arange(size // 2, size), size, 5))
    assert size < 10 or (
        (order != np.arange(size)).any() and (order != permuted(np.arange(size), size, 6)).any()
    )


def test_a_pass_reads_every_row_once(corpus):
    rows = Rows(corpus, 0, len(corpus), 2, T, seed=1)
    everything, begins = corpus.tokens(0, len(corpus)), corpus.begins(0, len(corpus))
    count = rows.per_pass * 2
    passes = [
        [rows.at(number * rows.per_pass + k) for k in range(rows.per_pass)] for number in range(2)
    ]
    # The first pass starts with the first token; the next ones at other places.
    wanted = sorted(everything[k * T : (k + 1) * T].tolist() for k in range(count))
    assert sorted(column for batch in passes[0] for column in batch.tokens.T.tolist()) == wanted
    assert sorted(column for batch in passes[1] for column in batch.tokens.T.tolist()) != wanted
    for batch in passes[1]:
        assert batch.tokens.shape == batch.targets.shape == batch.resets.shape == (T, 2)
        np.testing.assert_array_equal(batch.tokens[1:], batch.targets[:-1])
        # A document begins after each token that ends one.
        np.testing.assert_array_equal(batch.resets[1:], batch.tokens[:-1] == corpus.end)
    assert begins.sum() == 60


def test_validation_rows_are_not_trained_on(corpus):
    task = tables(corpus).kind.load(tables(corpus))
    border = task.held_out.start
    assert task.train.stop == border and len(corpus) - border == 2 * 2 * T + 1
    held = np.concatenate([batch.tokens.T.reshape(-1) for batch in task.validation()])
    np.testing.assert_array_equal(held, corpus.tokens(border, border + len(held)))


@pytest.mark.exhaustive("gru")
@pytest.mark.parametrize("cell", ["gru", "min_gru"])
def test_the_state_starts_anew_with_a_document(cell):
    signature = Signature(
        True, 5, 5, every_step=True, loss="cross_entropy", carried=True, resets=True
    )
    model = nn_model(TokenNnConfig(cell=cell, embedding=3, hidden=4), signature)
    params, start = model.init(jax.random.key(0)), model.initial_carry(1)
    tokens = np.array([[1], [2], [3], [4]], np.int32)
    resets = np.array([[False], [False], [True], [False]])
    whole, _ = model.predict(params, start, TextChunk(tokens, None, True, resets))
    second, _ = model.predict(params, start, TextChunk(tokens[2:], None, True, resets[:2]))
    np.testing.assert_allclose(whole[2:], second, atol=1e-6)
    never = model.predict(params, start, TextChunk(tokens, None, True, ~resets & resets))[0]
    assert abs(whole - never)[2:].max() > 1e-3


@pytest.mark.exhaustive
def test_a_run_writes_without_its_corpus(corpus, tmp_path, quiet):
    folder = shutil.copytree(corpus.folder, tmp_path / "corpus")
    result = train(tables(Corpus.open(folder)), tmp_path / "run", console=quiet)
    assert result.unit == "nats a token" and np.isfinite(result.validation_loss)
    shutil.rmtree(folder)
    assert load_run(tmp_path / "run").sample().startswith("the")


def test_a_changed_corpus_is_not_trained_on(corpus, tmp_path, quiet):
    train(tables(corpus), tmp_path / "run", console=quiet)
    (tmp_path / "text.txt").write_text("the cat " * 300)
    other = tokenize([tmp_path / "text.txt"], tmp_path / "out", tokenizer=corpus.folder)
    with pytest.raises(DataError, match="the data have changed"):
        train(tables(other), tmp_path / "run", resume=True, console=quiet)


def test_a_corpus_that_is_too_small(corpus):
    config = tables(corpus, data={"path": str(corpus.folder), "batch": 32, "chunk": 64})
    with pytest.raises(DataError, match=r"need 34,818"):
        config.kind.load(config)
    with pytest.raises(ConfigError, match=r"data\.path must name the folder"):
        decode(Config, {"task": "tokens"}, "tokens.toml")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    models.create(CONFIG, jax.random.key(0), jnp.bfloat16).save(folder)
    return folder


def fine_tuning(corpus, folder, **optimizer):
    return tables(
        corpus, model={"pretrained": str(folder)}, optimizer={"learning_rate": 0.02, **optimizer}
    )


@pytest.mark.exhaustive
def test_a_pretrained_model_is_trained_further_and_written_back(
    corpus, pretrained, tmp_path, quiet, capsys
):
    folder = shutil.copytree(pretrained, tmp_path / "model")
    only = {
        "only": ["rwkv.blocks.1.*"],
        "schedule": "constant",
        "name": "adamw",
        "options": {"weight_decay": 0.1},
    }
    config = fine_tuning(corpus, folder, **only)
    train(config, tmp_path / "run", console=quiet)
    # The same run, stopped in the middle and continued.
    half = fine_tuning(corpus, folder, **only)
    half = decode(
        Config, {**_tables_of(half), "train": {**vars(half.train), "steps": 4}}, "half.toml"
    )
    train(half, tmp_path / "again", console=quiet)
    train(config, tmp_path / "again", resume=True, console=quiet)
    one, two = (load_run(tmp_path / name).params for name in ("run", "again"))
    before = models.load(folder).params
    for name, value in one.items():
        np.testing.assert_array_equal(value, two[name])
        same = bool((value == before[name].astype(jnp.float32)).all())
        assert same == (not name.startswith("rwkv.blocks.1.")), name
    shutil.rmtree(folder)  # the run does without it
    assert load_run(tmp_path / "run").sample().startswith("the")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    written, exported = models.load(tmp_path / "out"), load_run(tmp_path / "run").language_model
    assert written.params["rwkv.embeddings.weight"].dtype == jnp.bfloat16
    tokens = jnp.array([[3, 1, 4]])
    np.testing.assert_array_equal(written(tokens)[0], exported(tokens)[0])
    assert (tmp_path / "out" / "tokenizer.json").read_text() == corpus.tokenizer().to_str()
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out.py")]) == 2
    assert "models are not written as Python" in capsys.readouterr().err


def _tables_of(config):
    return {
        "task": config.task,
        **{name: vars(getattr(config, name)) for name in ("data", "model", "optimizer", "sample")},
    }


def test_low_rank_parts_are_trained_and_merged(corpus, pretrained, tmp_path, quiet):
    lora = {
        "pretrained": str(pretrained),
        "lora_rank": 2,
        "lora_alpha": 4.0,
        "lora_targets": ["*.key.weight"],
    }
    config = tables(corpus, model=lora, optimizer={"learning_rate": 0.1})
    config = decode(
        Config, {**_tables_of(config), "train": {**vars(config.train), "steps": 2}}, "lora.toml"
    )
    assert config.optimizer.only == ["*.lora_a", "*.lora_b"]
    console = Console(record=True, width=200)
    train(config, tmp_path / "run", console=console)
    run, before = load_run(tmp_path / "run"), models.load(pretrained).params
    size = sum(x.size for x in run.params.values())
    low = sum(x.size for name, x in run.params.items() if ".lora_" in name)
    assert f"training {low:,} of {size:,} parameters" in console.export_text()
    merged = run.language_model.params
    assert merged.keys() == before.keys()
    for name, value in before.items():
        change = merged[name].astype(jnp.float32) - value.astype(jnp.float32)
        if not name.endswith(".key.weight"):
            assert not np.asarray(change).any(), name
            continue
        a, b = (run.params[f"{name}.{part}"] for part in ("lora_a", "lora_b"))
        assert a.shape == (2, value.shape[1]) and np.asarray(b).any()
        np.testing.assert_allclose(
            change, 2 * b @ a, atol=0.02 * float(abs(value).max())
        )  # rounded to bfloat16


def test_only_the_first_state_is_trained(corpus, pretrained, tmp_path, quiet, capsys):
    config = tables(
        corpus,
        model={"pretrained": str(pretrained), "tune": "state"},
        optimizer={"learning_rate": 0.1},
    )
    config = decode(
        Config, {**_tables_of(config), "train": {**vars(config.train), "steps": 2}}, "state.toml"
    )
    assert config.optimizer.only == ["first.*"]
    train(config, tmp_path / "run", console=quiet)
    run, before = load_run(tmp_path / "run"), models.load(pretrained)
    tuned = run.language_model
    for name, value in before.params.items():
        np.testing.assert_array_equal(tuned.params[name], value)
    assert tuned.first.keys() == before.decoder.first_shapes().keys()
    assert all(np.asarray(value).any() for value in tuned.first.values())
    states = tmp_path / "states.safetensors"
    assert main(["export", str(tmp_path / "run"), str(states)]) == 0
    again = before.with_first_state(models.load_state(states))
    tokens = jnp.array([[1, 2, 3]])
    np.testing.assert_array_equal(again(tokens)[0], tuned(tokens)[0])
    capsys.readouterr()
    with pytest.raises(ConfigError, match="lora_rank must be 0 where model.tune is 'state', is 2"):
        PretrainedConfig(pretrained="x", tune="state", lora_rank=2)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["x"], "no matrix has a name like 'x'; such as rwkv"),
        (["*.key.weight", "*.kee.weight"], r"no matrix has a name like '\*\.kee\.weight'; such as"),
        (["*.key.weight", "*ln_out.bias"], r"like '\*ln_out\.bias'; rwkv\.ln_out\.bias is \[8\];"),
        ([], r"model\.lora_targets must have a pattern, with lora_rank, is \[\]"),
    ],
)
def test_each_pattern_of_low_rank_parts_names_a_matrix(corpus, pretrained, patterns, message):
    lora = {"pretrained": str(pretrained), "lora_rank": 2, "lora_targets": patterns}
    config = tables(corpus, model=lora)
    with pytest.raises(ConfigError, match=message):
        config.kind.load(config)


def test_a_run_keeps_the_companion_files_of_its_model(corpus, tmp_path, quiet):
    folder, run, out = tmp_path / "model", tmp_path / "run", tmp_path / "out"
    models.create(CONFIG | {"hidden_size": 4, "num_hidden_layers": 1}, jax.random.key(0)).save(
        folder
    )
    texts = {
        "generation_config.json": '{"eos_token_id": [1, 2]}',
        "chat_template.jinja": "{{ messages }} \u00e9",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    config = fine_tuning(corpus, folder)
    config = decode(Config, {**_tables_of(config), "train": {"steps": 1}}, "one.toml")

    def saved(kept=None):
        if kept is not None:
            (run / "data.json").write_text(json.dumps(kept))
        load_run(run).save(out)
        return {p.name: p.read_text(encoding="utf-8") for p in out.iterdir() if p.name in texts}

    train(config, run, console=quiet)  # a corpus of another tokenizer, whose template this is not
    assert saved() == {"generation_config.json": texts["generation_config.json"]}
    shutil.copy(corpus.folder / "tokenizer.json", folder)
    train(
        config, run, resume=True, console=quiet
    )  # it learns nothing from them, so they may change
    shutil.rmtree(folder)
    assert saved() == texts
    kept = json.loads((run / "data.json").read_text())
    shutil.rmtree(out)
    names = {"config.json", "model.safetensors", "tokenizer.json"}
    assert (
        saved(kept | {COMPANIONS: {"../outside": "not ours"}}) == {}
        and {p.name for p in out.iterdir()} == names
    )
    assert not (tmp_path / "outside").exists()
    kept.pop(COMPANIONS)  # as older versions wrote it
    assert saved(kept) == {}


@pytest.mark.exhaustive
def test_the_loss_of_a_pretrained_model_is_that_of_its_documents(corpus, pretrained):
    task = (config := fine_tuning(corpus, pretrained)).kind.load(config)
    batch = task.train.at(0)
    params = task.model.init(None)
    loss, _ = task.model.loss(params, {}, batch, None)
    model, total = models.load(pretrained), 0.0
    model = jax.tree.map(lambda p: p.astype(jnp.float32), model)
    for column in range(2):
        starts = [0, *np.flatnonzero(batch.resets[1:, column]) + 1, T]
        for first, last in itertools.pairwise(starts):
            if first < last:
                logits, _ = model(batch.tokens[first:last, column][None])
                chances = jax.nn.log_softmax(logits[0])
                total -= float(
                    jnp.take_along_axis(
                        chances, batch.targets[first:last, column][:, None], -1
                    ).sum()
                )
    np.testing.assert_allclose(loss, total / (2 * T), rtol=1e-5)


def test_what_cannot_be_trained_further(corpus, pretrained, tmp_path):
    for only in (["rwkv.block.*"], ["rwkv.blocks.1.*", "rwkv.block.*"]):
        with pytest.raises(ConfigError, match=r"no parameter has a name like 'rwkv\.block\.\*'"):
            train(fine_tuning(corpus, pretrained, only=only), tmp_path / "run")
    small = tmp_path / "small"
    models.create(CONFIG | {"vocab_size": 16}, jax.random.key(0)).save(small)
    config = fine_tuning(corpus, small)
    with pytest.raises(ConfigError, match="knows 16 tokens, and the corpus has a tokenizer of 260"):
        config.kind.load(config)
    with pytest.raises(ConfigError, match=r"model\.pretrained must name the folder of a model"):
        tables(corpus, model={"kind": "pretrained"})
