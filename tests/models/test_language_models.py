"""Generation, states, files and errors of models, with a tiny random model of each kind of state."""

import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jrnn import models
from jrnn.cli import main
from jrnn.errors import ConfigError, FormatError, LayerError
from jrnn.models import generation
from jrnn.models.blocks import Experts, Mlp, Router
from jrnn.models.family import Scoped
from jrnn.models.sampling import Sampler, sample
from jrnn.nn.span import Span

SMALL = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1}
CONFIGS = {
    "mamba": SMALL | {"state_size": 2},
    "qwen3_next": SMALL
    | {
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "linear_key_head_dim": 4,
        "linear_value_head_dim": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "moe_intermediate_size": 4,
        "shared_expert_intermediate_size": 4, "num_experts": 2, "num_experts_per_tok": 1, "full_attention_interval": 2,
    },
}  # fmt: skip
WINDOWED = SMALL | {
    "num_hidden_layers": 2, "block_types": ["recurrent", "attention"], "attention_window_size": 3, "head_dim": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 12, "lru_width": 8,
}  # fmt: skip
PROMPT = jnp.array([[3, 1, 4, 1], [2, 7, 0, 0]])
pytestmark = pytest.mark.usefixtures("little_optimization")


def made(name, **more):
    config = WINDOWED if name == "recurrent_gemma" else CONFIGS[name]
    return models.create({"model_type": name} | config | more, jax.random.key(0))


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    return made(request.param)


@pytest.mark.exhaustive
def test_generation_is_the_likeliest_token_step_by_step(model):
    new, state = model.generate(PROMPT, 5, temperature=0, lengths=[4, 2])
    assert [
        token.tolist() for token in model.stream(PROMPT, 5, temperature=0, lengths=[4, 2])
    ] == new.T.tolist()
    for n, length in enumerate((4, 2)):
        tokens = PROMPT[n : n + 1, :length]
        logits, own = model(tokens)
        logits = logits[:, -1]
        for token in new[n]:
            assert int(logits.argmax()) == int(token)
            logits, own = model.step(
                token[None], own
            )  # outside of jit the state gets room when it needs it
        after, _ = model.step(jnp.array([1, 1]), state)
        np.testing.assert_allclose(after[n], model.step(jnp.array([1]), own)[0][0], atol=1e-5)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Counted:
    """A model that reports each of its steps."""

    model: models.LanguageModel
    steps: ClassVar[list] = []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, *args, **options):
        return self.model(*args, **options)

    def step(self, *args, **options):
        jax.debug.callback(lambda: self.steps.append(None))
        return self.model.step(*args, **options)


def test_generation_ends_with_the_last_sequence():
    model = made("mamba")
    new = model.generate(PROMPT, 6, temperature=0)[0]
    stops = [int(new[0, 1]), int(new[1, 3])]
    ends = [next(k for k, token in enumerate(row.tolist()) if token in stops) for row in new]
    Counted.steps.clear()
    tokens, state = generation.generate(Counted(model), PROMPT, 400, temperature=0, stop=stops)
    jax.effects_barrier()
    assert len(Counted.steps) == max(ends) + 1
    for n, end in enumerate(ends):
        assert tokens[n].tolist() == [*new[n, :end].tolist(), *[int(new[n, end])] * (400 - end)]
        _, alone = model(jnp.concatenate([PROMPT[n], new[n, : end + 1]])[None])
        jax.tree.map(
            lambda a, b, n=n: np.testing.assert_allclose(a[n], b[0], atol=1e-5), state, alone
        )


def test_no_tokens_may_be_asked_for():
    model = made("mamba")
    new, state = model.generate(PROMPT, 0, temperature=0)
    assert new.shape == (2, 0) and list(model.stream(PROMPT, 0, temperature=0)) == []
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state, model(PROMPT)[1])


@pytest.mark.parametrize("name", ["qwen3_next", "recurrent_gemma"])
def test_a_step_copies_no_memory(name):
    slots, more = (
        4096,
        {} if name == "qwen3_next" else {"attention_window_size": 4096, "num_attention_heads": 1},
    )
    model = made(name, hidden_size=32, lru_width=32, **more) if more else made(name, head_dim=32)
    state = model.initial_state(2, slots)
    size = next(leaf.nbytes for path, leaf in state.items() if path.endswith("keys"))
    step = jax.jit(lambda model, token, state: model.step(token, state), donate_argnames="state")
    compiled = step.lower(model, jnp.array([1, 2]), state).compile()
    assert compiled.memory_analysis().alias_size_in_bytes > 2 * size
    assert compiled.memory_analysis().temp_size_in_bytes < size


def test_streaming_in_place_leaves_the_callers_state():
    model = made("qwen3_next")
    _, state = model.generate(PROMPT, 3, temperature=0)
    before = jax.device_get(state)
    first = [token.tolist() for token in model.stream(PROMPT[:, :0], 3, temperature=0, state=state)]
    assert first == [
        token.tolist() for token in model.stream(PROMPT[:, :0], 3, temperature=0, state=state)
    ]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)


def test_a_long_prompt_is_read_in_pieces(monkeypatch):
    monkeypatch.setattr(generation, "PIECE", 4)
    model = made("qwen3_next")
    tokens = jnp.arange(33).reshape(3, 11) % 16
    for lengths in (None, jnp.array([11, 5, 2])):
        logits, wanted = model(tokens, lengths=lengths)
        ends = jnp.full(3, 11) if lengths is None else lengths
        token = logits[jnp.arange(3), ends - 1].argmax(-1)
        _, wanted = model.step(token, wanted)
        new, state = model.generate(tokens, 1, temperature=0, lengths=lengths)
        assert new[:, 0].tolist() == token.tolist()
        np.testing.assert_allclose(
            model.step(token, state)[0], model.step(token, wanted)[0], atol=1e-5
        )


@pytest.mark.parametrize("spread", [True, False])
def test_experts_with_room_for_their_tokens_are_those_of_all_tokens(spread):
    part, key = Experts(Mlp(4, 3), Router(4, 2)), jax.random.key(0)
    params = {
        f"experts.{name}": jax.random.normal(key, (4, *shape)) / 4
        for name, shape in part._each.items()
    }
    tokens, weights = jax.random.normal(key, (128, 4)), jax.random.uniform(key, (128, 2))
    chosen = (
        jax.lax.top_k(jax.random.normal(key, (128, 4)), 2)[1]
        if spread
        else jnp.tile(jnp.array([[2, 1]]), (128, 1))
    )

    def run(compute):
        def value(params, tokens, weights):
            return jnp.mean(
                jnp.sin(compute(Scoped(params, Span(1, jnp.float32)), tokens, weights, chosen))
            )

        return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2)))(params, tokens, weights)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        run(part._in_rooms),
        run(part._dense),
    )


@pytest.mark.exhaustive
def test_a_conversation_is_saved_and_continued(model, tmp_path):
    whole, _ = model.generate(PROMPT, 6, temperature=0)
    first, state = model.generate(PROMPT, 3, temperature=0)
    models.save_state(tmp_path / "state.safetensors", state)
    state = models.load_state(tmp_path / "state.safetensors")
    again, _ = model.generate(PROMPT[:, :2], 2, temperature=0, state=state)
    longer = jnp.concatenate([PROMPT, first, PROMPT[:, :2]], 1)
    assert (again == model.generate(longer, 2, temperature=0)[0]).all()
    assert (whole[:, :3] == first).all()


@pytest.mark.parametrize(
    "name", ["mamba", pytest.param("qwen3_next", marks=pytest.mark.exhaustive)]
)
def test_two_calls_write_what_one_does(name, tmp_path):
    """The state has the logits of the next token and the counts of what was read: in memory, from a file and by stream."""
    model, options = made(name), dict(temperature=0, repetition_penalty=4.0)
    whole, _ = model.generate(PROMPT, 6, lengths=[4, 2], **options)
    first, state = model.generate(PROMPT, 3, lengths=[4, 2], **options)
    assert state["counts"].sum(axis=1).tolist() == [7, 5]
    models.save_state(tmp_path / "state.safetensors", state)
    for again in (state, models.load_state(tmp_path / "state.safetensors")):
        second, end = model.generate(PROMPT[:, :0], 3, state=again, **options)
        assert jnp.concatenate([first, second], 1).tolist() == whole.tolist()
        assert (
            np.array(list(model.stream(PROMPT[:, :0], 3, state=again, **options))).T.tolist()
            == second.tolist()
        )
    assert end["counts"].sum(axis=1).tolist() == [10, 8]
    prompts = jnp.array([[5, 9], [8, 0]])  # of which the second text gets one token, and then none
    longer = jnp.concatenate([PROMPT[:1], first[:1], prompts[:1]], 1)
    for lengths, tokens in (([2, 1], longer), ([2, 0], longer)):
        further, _ = model.generate(prompts, 2, state=state, lengths=lengths, **options)
        assert further[0].tolist() == model.generate(tokens, 2, **options)[0][0].tolist()
    assert further[1].tolist() == whole[1, 3:5].tolist()


def test_calls_and_steps_keep_the_history_that_a_state_has():
    model, options = made("mamba"), dict(temperature=0, repetition_penalty=4.0)
    whole, _ = model.generate(PROMPT[:1], 4, **options)
    for history in (True, False):
        _, state = model(PROMPT[:1, :2], model.initial_state(1, history=history))
        for token in PROMPT[0, 2:]:
            logits, state = model.step(token[None], state)
        if history:
            np.testing.assert_array_equal(state["logits"], logits)
            assert (
                model.generate(PROMPT[:1, :0], 4, state=state, **options)[0].tolist()
                == whole.tolist()
            )
            continue
        with pytest.raises(
            LayerError, match="repetition_penalty needs the tokens that the state has read"
        ):
            model.generate(PROMPT[:1], 2, state=state, **options)
        with pytest.raises(
            LayerError, match="the prompt has no tokens; .* or the state of a text to go on with"
        ):
            model.generate(PROMPT[:1, :0], 2, state=state, temperature=0)
        new, state = model.generate(
            PROMPT[:1], 2, state=state, temperature=0
        )  # its logits are known then, counts are not
        assert "logits" in state and "counts" not in state
    with pytest.raises(LayerError, match="the prompt has no tokens"):
        model.generate(PROMPT[:, :0], 2, state=model.initial_state(2, history=True), temperature=0)
    resets = jnp.zeros((2, 4), bool).at[0, 2].set(True).at[1, 3].set(True)
    _, state = model(
        PROMPT, lengths=[4, 2], resets=resets
    )  # the reset of the second text is past its end
    assert [np.flatnonzero(row).tolist() for row in state["counts"]] == [[1, 4], [2, 7]]
    assert state["counts"].sum(axis=1).tolist() == [2, 2]


@pytest.mark.exhaustive
def test_sequences_stop():
    model = made("mamba")
    free, _ = model.generate(PROMPT, 6, temperature=0)
    stop = int(free[0, 1])
    ended, state = model.generate(PROMPT, 6, temperature=0, stop=stop)
    first = free[0].tolist().index(stop)
    assert ended[0].tolist() == free[0, :first].tolist() + [stop] * (6 - first)
    _, expected = model.generate(PROMPT[:1], first + 1, temperature=0)
    for name, leaf in expected.items():
        np.testing.assert_allclose(state[name][0], leaf[0], atol=1e-5)
    one = list(model.stream(PROMPT[:1], 6, temperature=0, stop=stop))
    assert [int(token[0]) for token in one] == free[0, : first + 1].tolist()


@pytest.mark.exhaustive
def test_draws_follow_the_probabilities_and_the_limits():
    chances = jnp.array([0.5, 0.3, 0.15, 0.05])
    logits = jnp.broadcast_to(jnp.log(chances), (4000, 4))

    def shares(**options):
        drawn = sample(logits, jax.random.key(0), Sampler(1.0, **options))
        return np.bincount(drawn, minlength=4) / len(logits)

    np.testing.assert_allclose(shares(), chances, atol=0.03)
    np.testing.assert_allclose(shares(top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(top_p=0.8), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(top_p=0.81), np.array([0.5, 0.3, 0.15, 0]) / 0.95, atol=0.03)
    cold = sample(logits, jax.random.key(0), Sampler(0.1))
    assert np.mean(np.asarray(cold) == 0) > 0.98
    alone = sample(logits[:3], jax.random.key(0), Sampler(1.0))
    assert (alone == sample(logits, jax.random.key(0), Sampler(1.0))[:3]).all()


def test_types_are_kept_and_parameters_are_shared_by_devices(tmp_path):
    model = models.create(
        {"model_type": "mamba"} | CONFIGS["mamba"], jax.random.key(0), jnp.bfloat16
    )
    model.save(tmp_path)
    mesh = jax.make_mesh((1,), ("devices",))
    for loaded in (models.load(tmp_path), models.load(tmp_path, mesh=mesh)):
        for name, value in model.params.items():
            assert loaded.params[name].dtype == jnp.bfloat16
            assert (loaded.params[name] == value).all()
    assert loaded.params["backbone.embeddings.weight"].sharding.spec == jax.sharding.PartitionSpec(
        "devices", None
    )
    logits, state = loaded(PROMPT)
    assert logits.dtype == jnp.float32 and state["0.ssm"].dtype == jnp.float32
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model)
    np.testing.assert_allclose(logits, exact(PROMPT)[0], atol=0.1 * float(jnp.abs(logits).max()))


def test_a_memory_that_is_full_shows_in_traced_steps():
    model = made("qwen3_next")
    step = jax.jit(lambda token, state: model.step(token, state))
    state = model.initial_state(1, 2)
    refusals = []
    for token in (3, 1, 4):
        logits, state = step(jnp.array([token]), state)
        refusals.append(bool(jnp.isnan(logits).any()))
    assert refusals == [False, False, True]


def test_the_command_writes_tokens(tmp_path, capsys):
    made("mamba", eos_token_id=15).save(tmp_path)
    assert (
        main(["sample", str(tmp_path), "--prompt", "3 1 4", "--length", "5", "--temperature", "0"])
        == 0
    )
    written = [int(word) for word in capsys.readouterr().out.split()]
    new, _ = made("mamba").generate(jnp.array([[3, 1, 4]]), 5, temperature=0)
    wanted = new[0].tolist()
    assert written == [3, 1, 4, *(wanted[: wanted.index(15)] if 15 in wanted else wanted)]
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [-1, wanted[2]], "note": [[]]})
    )
    assert (
        main(["sample", str(tmp_path), "--prompt", "3 1 4", "--length", "5", "--temperature", "0"])
        == 0
    )
    assert capsys.readouterr().out.split() == list(
        map(str, [3, 1, 4, *wanted[: wanted.index(wanted[2])]])
    )
    limits = ["--top-k", "2", "--min-p", "0.1", "--repetition-penalty", "1.3"]
    assert (
        main(["sample", str(tmp_path), "--prompt", "3", "--length", "4", *limits, "--seed", "1"])
        == 0
    )
    assert main(["sample", str(tmp_path), "--prompt", "three"]) == 2
    assert "the folder has no tokenizer.json: give numbers of tokens" in capsys.readouterr().err
    assert main(["sample", str(tmp_path / "missing"), "--stop", "x"]) == 2
    assert capsys.readouterr().err.endswith(
        "missing: is not a run directory: there is no such folder\n"
    )


def test_the_command_writes_text_with_a_tokenizer(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{k}": k for k in range(16)}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model = made("mamba")
    model.save(tmp_path)
    words.save(str(tmp_path / "tokenizer.json"))
    assert (
        main(["sample", str(tmp_path), "--prompt", "w3 w1", "--length", "4", "--temperature", "0"])
        == 0
    )
    new, _ = model.generate(jnp.array([[3, 1]]), 4, temperature=0)
    written = ["w3", "w1", *(f"w{token}" for token in new[0].tolist())]
    assert capsys.readouterr().out.split() == written
    words.enable_truncation(
        1
    )  # as the files of some models have it, from a batch that was encoded last
    words.enable_padding(length=9)
    words.save(str(tmp_path / "tokenizer.json"))
    stop = f"w{new[0, 1]} w{new[0, 2]}"
    options = ["--length", "4", "--temperature", "0", "--stop", stop, "--stop", "x"]
    assert main(["sample", str(tmp_path), "--prompt", "w3 w1", *options]) == 0
    text = " ".join(written)
    assert capsys.readouterr().out.split() == text[: text.index(stop, len("w3 w1"))].split()


def test_what_does_not_fit_is_named(tmp_path):
    model = made("mamba")
    with pytest.raises(
        LayerError, match=r"mamba: tokens are float32\[1, 2\]; they must be integers \[N, T\]"
    ):
        model(jnp.ones((1, 2)))
    with pytest.raises(LayerError, match="tokens lie between 0 and 16; the vocabulary has 0 to 15"):
        model(jnp.array([[0, 16]]))
    with pytest.raises(
        LayerError, match=r"the state has '0.conv' \[3, 3, 16\] but must have \[2, 3, 16\]"
    ):
        model(PROMPT, model.initial_state(3))
    with pytest.raises(LayerError, match="drawing tokens needs a key"):
        model.generate(PROMPT, 2)
    with pytest.raises(LayerError, match="top_p is 0; it must be above 0"):
        model.generate(PROMPT, 2, key=jax.random.key(0), top_p=0)
    with pytest.raises(LayerError, match="the prompt has no tokens"):
        model.generate(PROMPT[:, :0], 2, temperature=0)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"model_type": "mambo"},
            "create: model_type is 'mambo', which is not supported; there are bailing_hybrid, bamba",
        ),
        ({"model_type": ["mamba"]}, r"model_type is \['mamba'\], which is not supported"),
        (
            {"hiden_size": 8},
            "no computation reads the key 'hiden_size'; did you mean 'hidden_size'",
        ),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'; there are silu"),
        ({"hidden_size": "8"}, "hidden_size must be an integer, is '8'"),
        ({"hidden_size": [8]}, r"hidden_size must be an integer, is"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon must be a finite number"),
        ({"use_bias": 1}, "use_bias must be true or false, is 1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .*; only None is supported"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is .*; only None is supported"),
    ],
)
def test_an_unknown_config_says_which_key(change, message):
    with pytest.raises(ConfigError, match=message):
        made(**({"name": "mamba"} | change)) if "model_type" not in change else models.create(
            change, jax.random.key(0)
        )


def test_keys_that_no_computation_reads_are_no_error(tmp_path):
    """In the files of other people; near names too, which only someone who writes a config here mistypes."""
    model = made("mamba")
    model.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "hiden_size": 9,
        "embd_pdrop": 0.1,
        "rope_scaling": None,
        "dtype": "float32",
        "nested": {"a": [1]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    np.testing.assert_array_equal(models.load(tmp_path)(PROMPT)[0], model(PROMPT)[0])


def test_quantized_models_are_loaded_as_numbers(tmp_path, caplog):
    model = made("mamba")
    model.save(tmp_path)
    tensors, name = (
        load_file(tmp_path / "model.safetensors"),
        "backbone.layers.0.mixer.out_proj.weight",
    )
    tensors[name.replace("weight", "SCB")] = scales = abs(tensors[name]).max(axis=1)
    tensors[name] = np.round(tensors[name] / scales[:, None] * 127).astype(np.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = models.load(tmp_path)
    assert "tensors are dequantized (bitsandbytes)" in caplog.text
    assert loaded.params[name].dtype == jnp.bfloat16
    np.testing.assert_allclose(
        loaded.params[name].astype(jnp.float32), model.params[name], atol=0.02
    )
    assert "quantization_config" not in json.loads(loaded.text)


GOLDEN = Path(__file__).parents[1] / "golden" / "models"
FAMILIES = {folder.name.rpartition("_")[0] for folder in GOLDEN.iterdir() if folder.is_dir()}
NEVER_TIED = {"bailing_hybrid", "kimi_linear", "nemotron_h"}  # whatever config.json says


def tied_folder(name, folder):
    """A folder of a family whose config.json ties the output layer; its tensors, and the two names."""
    model = models.load(GOLDEN / f"{name}_0")
    model.save(folder)
    config = json.loads(model.text) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    names = model.decoder.names
    return tensors | {names.head: tensors[names.embedding] + 1}, names


@pytest.mark.parametrize("name", sorted(FAMILIES - NEVER_TIED))
def test_an_output_layer_that_differs_from_the_embedding_is_kept(name, tmp_path, caplog):
    tensors, names = tied_folder(name, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = models.load(tmp_path)
    assert f"{names.head} differs from {names.embedding}" in caplog.text
    np.testing.assert_array_equal(loaded.params[names.head], tensors[names.head])
    assert not loaded.decoder.tied
    loaded.save(tmp_path / "new")
    caplog.clear()
    again = models.load(tmp_path / "new")
    assert again.config == loaded.config and caplog.text == ""
    np.testing.assert_array_equal(again.params[names.head], tensors[names.head])

    save_file(tensors | {names.head: tensors[names.embedding]}, tmp_path / "model.safetensors")
    assert models.load(tmp_path).decoder.tied
    del tensors[names.embedding]
    save_file(tensors, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(
        models.load(tmp_path).params[names.embedding], tensors[names.head]
    )
    assert caplog.text == ""


@pytest.mark.parametrize("format", ["alias", "parts", "torch", "text_config", "types", "quantized"])
def test_an_output_layer_that_differs_is_kept_in_each_format(format, tmp_path, caplog, monkeypatch):
    tensors, names = tied_folder("qwen3_5_text" if format == "text_config" else "lfm2", tmp_path)
    head = tensors[names.head]
    config = json.loads((tmp_path / "config.json").read_text())
    files = {"model.safetensors": tensors}
    if format == "alias":
        del config["tie_word_embeddings"]
        config["tie_embedding"] = True
    elif format == "parts":
        one = {names.head: tensors.pop(names.head)}
        (tmp_path / "model.safetensors").unlink()
        files = {
            "model-00001-of-00002.safetensors": tensors,
            "model-00002-of-00002.safetensors": one,
        }
        places = {part: file for file, inside in files.items() for part in inside}
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": places}))
    elif format == "torch":
        files = {}
        (tmp_path / "model.safetensors").unlink()
        torch = types.ModuleType("torch")
        torch.load = lambda path, **options: {
            part: TorchTensor(value) for part, value in tensors.items()
        }
        monkeypatch.setitem(sys.modules, "torch", torch)
        (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04...")
    elif format == "text_config":
        config = {"model_type": "qwen3_5", "text_config": config, "tie_word_embeddings": True}
    elif format == "types":
        head = head.astype(np.float16)
        tensors[names.head] = head
    else:
        tensors["lm_head.SCB"] = abs(head).max(axis=1)
        rounded = np.round(head / tensors["lm_head.SCB"][:, None] * 127).astype(np.int8)
        tensors[names.head] = rounded
    for file, inside in files.items():
        save_file(inside, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = models.load(tmp_path)
    assert "so they are not tied" in caplog.text
    kept = loaded.params[names.head]
    np.testing.assert_allclose(kept.astype(head.dtype), head, atol=0.05 * (format == "quantized"))
    loaded.save(tmp_path / "new")
    caplog.clear()
    assert models.load(tmp_path / "new").config == loaded.config and caplog.text == ""


def test_half_supported_configs_say_which_key():
    with pytest.raises(
        ConfigError, match="rope_parameters.rope_type is 'yarn'; only 'default' is supported"
    ):
        made("qwen3_next", rope_parameters={"rope_type": "yarn"})
    with pytest.raises(ConfigError, match="add_out_norm is False; only True is supported"):
        models.create({"model_type": "xlstm", "add_out_norm": False}, jax.random.key(0))
    with pytest.raises(
        ConfigError, match="expand times hidden_size is 16, but num_heads times head_dim is 8192"
    ):
        models.create({"model_type": "mamba2", "hidden_size": 8}, jax.random.key(0))


def test_damaged_folders_are_named(tmp_path):
    with pytest.raises(FormatError, match=r"config.json: no such file"):
        models.load(tmp_path)
    model = made("mamba")
    model.save(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mamba"} | CONFIGS["mamba"] | {"state_size": 3})
    )
    with pytest.raises(
        FormatError, match=r"x_proj.weight is \[5, 16\] but config.json makes it \[7, 16\]"
    ):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mamba"} | CONFIGS["mamba"] | {"num_hidden_layers": 2})
    )
    with pytest.raises(FormatError, match=r"lacks the tensor 'backbone.layers.1"):
        models.load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../other.safetensors"}})
    )
    with pytest.raises(
        FormatError, match="must map names of tensors to names of files in this folder"
    ):
        models.load(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 30)
    with pytest.raises(FormatError, match=r"cannot be read as safetensors"):
        models.load(tmp_path)


def test_the_text_of_a_model_is_short():
    text = repr(made("mamba"))
    assert (
        "numbers in" in text
        and "arrays of float32; MambaConfig(vocab_size=" in text
        and len(text) < 600
    )
    assert jax.eval_shape(lambda m: (repr(m), m)[1], made("mamba"))


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"stop": [3, "x"]}, "stop is 'x'; it must be an integer"),
        ({"min_p": 2}, "min_p is 2; it must lie between 0 and 1"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"top_p": "x"}, "top_p is 'x'; it must be a number"),
    ],
)
def test_options_of_other_types_are_named(options, rule):
    with pytest.raises(LayerError, match=rule):
        made("mamba").generate(jnp.ones((1, 2), int), 2, **{"temperature": 0, **options})


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"model_type": ["mamba"]}, r"model_type is \['mamba'\]"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, is 'false'"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers must be at least 1 and at most 10000, is 1000000000",
        ),
        ({"layer_norm_epsilon": {"__float__": "abc"}}, "layer_norm_epsilon must be a number"),
        (
            {"layer_norm_epsilon": {"__float__": "Infinity"}},
            "layer_norm_epsilon must be a finite number",
        ),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"hidden_size": 2**31}, "the parameters need .* bytes, and .* are available"),
        ({"time_step_rank": "abc"}, "time_step_rank must be an integer or 'auto'"),
    ],
)
def test_values_of_config_json_are_checked(changes, rule):
    with pytest.raises(ConfigError, match=rule):
        models.create(CONFIGS["mamba"] | {"model_type": "mamba"} | changes, jax.random.key(0))


def test_a_tensor_in_two_files_is_named(tmp_path):
    model = made("mamba")
    model.save(tmp_path, shard_bytes=500)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    (tmp_path / "again.safetensors").write_bytes(next(tmp_path.glob("model-00001-*")).read_bytes())
    index["weight_map"]["more"] = "again.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        FormatError, match=r"the tensor '.*' is twice, in again.safetensors and model-00001-of-"
    ):
        models.load(tmp_path)


@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "recurrent_gemma"])
def test_padding_anywhere_changes_nothing(name):
    model = made(name)
    whole, last = model(PROMPT[:1, :3])
    for mask in ([0, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1]):
        mask = np.array([mask], bool)
        tokens = np.full((1, 5), 7)
        tokens[mask] = PROMPT[0, :3]
        logits, state = model(tokens, mask=mask)
        np.testing.assert_allclose(np.asarray(logits)[mask], whole[0], atol=1e-6)
        assert not np.asarray(logits)[~mask].any()
        more, _ = model.step(jnp.array([4]), state)
        np.testing.assert_allclose(more, model.step(jnp.array([4]), last)[0], atol=1e-6)
        new, _ = model.generate(tokens, 3, temperature=0, mask=mask)
        assert new.tolist() == model.generate(PROMPT[:1, :3], 3, temperature=0)[0].tolist()
    with pytest.raises(
        LayerError, match=r"mask is int32; it must be booleans; give mask.astype\(bool\)"
    ):
        model(PROMPT, mask=np.ones(PROMPT.shape, np.int32))


@pytest.mark.parametrize("name", ["qwen3_next", "recurrent_gemma"])
def test_a_memory_in_pieces_is_that_of_the_whole(name):
    """Rows of other lengths, texts that begin anew, and windows that wrap around: whole, in pieces, and token by token."""
    model, random = made(name), np.random.RandomState(0)
    tokens, steps = random.randint(0, 16, (3, 11)), 11
    resets, mask = random.rand(3, steps) < 0.2, random.rand(3, steps) < 0.8
    whole, last = model(tokens, resets=resets, mask=mask)
    for size in (1, 2, 5):
        state, parts = None, []
        for k in range(0, steps, size):
            piece = slice(k, k + size)
            logits, state = model(
                tokens[:, piece], state, resets=resets[:, piece], mask=mask[:, piece]
            )
            parts.append(logits)
        np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-5)
        assert state["position"].tolist() == last["position"].tolist()
    state, parts = model.initial_state(3, steps), []
    for t in range(steps):
        logits, state = model.step(tokens[:, t], state, resets=resets[:, t], mask=mask[:, t])
        parts.append(logits)
    np.testing.assert_allclose(np.stack(parts, 1), whole, atol=1e-5)


@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "recurrent_gemma"])
def test_a_text_begins_anew_at_a_token_that_does_not_count(name):
    model, tokens = made(name), PROMPT[:1].repeat(2, 0)
    mask, resets = np.array([[1, 1, 1, 0]] * 2, bool), np.zeros((2, 4), bool)
    resets[1, 3] = True
    _, state = model(tokens, mask=mask, resets=resets)
    logits, _ = model.step(jnp.array([5, 5]), state)
    np.testing.assert_allclose(
        logits[0], model(jnp.array([[*tokens[0, :3].tolist(), 5]]))[0][0, -1], atol=1e-6
    )
    np.testing.assert_allclose(logits[1], model(jnp.array([[5]]))[0][0, -1], atol=1e-6)
    assert np.asarray(state["counts"]).sum(axis=1).tolist() == [3, 0]


def test_penalties_limits_and_several_stops():
    logits = jnp.log(jnp.array([[0.4, 0.35, 0.2, 0.05]])) + 3
    seen = jnp.array([[True, False, False, False]])
    assert int(sample(logits, None, Sampler(0.0, repetition_penalty=1.5), seen)[0]) == 1
    rows = jnp.broadcast_to(logits, (500, 4))
    drawn = sample(rows, jax.random.key(0), Sampler(1.0, min_p=0.6))
    assert set(np.asarray(drawn).tolist()) == {0, 1}
    model = made("mamba")
    free, _ = model.generate(PROMPT[:1], 6, temperature=0, repetition_penalty=1.3)
    stops = [int(free[0, 4]), int(free[0, 2])]
    first = min(free[0].tolist().index(stop) for stop in stops)
    ended, _ = model.generate(PROMPT[:1], 6, temperature=0, repetition_penalty=1.3, stop=stops)
    assert ended[0].tolist() == free[0, : first + 1].tolist() + [int(free[0, first])] * (5 - first)
    with pytest.raises(LayerError, match="stop is 16; the vocabulary has the tokens from 0 to 15"):
        model.generate(PROMPT, 2, temperature=0, stop=[3, 16])


def test_tokens_are_taken_back():
    model = made("mamba")
    kept = list(model.stream(PROMPT[:1], 4, temperature=0, states=True))
    token, state = kept[1]
    again, _ = model.generate(token[:, None], 2, temperature=0, state=kept[0][1])
    assert again[0].tolist() == [int(t[0]) for t, _ in kept[2:]]


class TorchTensor:
    """What of a tensor of torch is used."""

    def __init__(self, value):
        self.value, self.shape, self.dtype = value, value.shape, f"torch.{value.dtype.name}"

    def __getitem__(self, index):
        return TorchTensor(self.value[index])

    def detach(self):
        return self

    cpu = detach

    def numpy(self):
        return self.value


def as_of_mamba_ssm(folder, model, ssm_cfg, save):
    """Writes a model as mamba_ssm does: `save(tensors, path)` writes the weights."""
    names = {
        name.replace("backbone.embeddings.", "backbone.embedding."): leaf
        for name, leaf in model.params.items()
    }
    names["lm_head.weight"] = names["backbone.embedding.weight"]
    c = model.config
    config = {
        "d_model": c.hidden_size,
        "n_layer": c.num_hidden_layers,
        "vocab_size": c.vocab_size - 3,
        "rms_norm": True,
    }
    config |= {
        "ssm_cfg": ssm_cfg,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save(
        {f"module.{name}": np.asarray(leaf) for name, leaf in names.items()},
        folder / "pytorch_model.bin",
    )


SSM = {
    "mamba": (
        {"state_size": 2, "expand": 4, "time_step_rank": 3},
        {"d_state": 2, "expand": 4, "dt_rank": 3},
    ),
    "mamba2": (
        {
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 4,
            "n_groups": 2,
            "tie_word_embeddings": True,
        },
        {"layer": "Mamba2", "d_state": 4, "headdim": 4, "ngroups": 2, "chunk_size": 64},
    ),
}


@pytest.mark.parametrize("name", SSM)
def test_folders_of_mamba_ssm(name, tmp_path, monkeypatch):
    written, torch = {}, types.ModuleType("torch")
    torch.load = lambda path, **options: written[str(path)]
    monkeypatch.setitem(sys.modules, "torch", torch)

    def save(tensors, path):
        path.write_bytes(b"PK\x03\x04...")
        written[str(path)] = {name: TorchTensor(leaf) for name, leaf in tensors.items()}

    keys, ssm_cfg = SSM[name]
    model = models.create({"model_type": name} | SMALL | keys, jax.random.key(0))
    as_of_mamba_ssm(tmp_path, model, ssm_cfg, save)
    loaded = models.load(tmp_path)
    assert loaded.family is model.family and loaded.config == model.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, model.params)
    loaded.save(tmp_path / "new")
    assert models.load(tmp_path / "new").config == model.config
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        FormatError,
        match=r"(?s)pytorch_model.bin is a file of torch.save, .*save_file\(.*model.safetensors",
    ):
        models.load(tmp_path)


def test_files_of_torch_in_parts(tmp_path):
    torch = pytest.importorskip("torch")
    model = made("mamba")
    half = sorted(model.params)[::2]
    parts = {
        "pytorch_model-00001-of-00002.bin": half,
        "pytorch_model-00002-of-00002.bin": set(model.params) - set(half),
    }
    for file, names in parts.items():
        tensors = {
            name: torch.tensor(np.array(model.params[name])).to(torch.bfloat16) for name in names
        }
        torch.save(
            tensors | {"x.rotary_emb.inv_freq": torch.ones(2)} if names is half else tensors,
            tmp_path / file,
        )
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(model.text)
    loaded = models.load(tmp_path)
    for name, leaf in model.params.items():
        np.testing.assert_array_equal(loaded.params[name], leaf.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"ssm_cfg": {"layer": "Mamba3"}},
            "ssm_cfg.layer is 'Mamba3'; only 'Mamba1' and 'Mamba2' are supported",
        ),
        (
            {"ssm_cfg": {"layer": "Mamba2", "rmsnorm": False}},
            "ssm_cfg.rmsnorm is False; only True is supported",
        ),
        (
            {"ssm_cfg": {"d_stat": 2}},
            "ssm_cfg has the unknown key 'd_stat'; did you mean 'd_state'",
        ),
        ({"attn_layer_idx": [1]}, r"attn_layer_idx is \[1\]; only \[\] is supported"),
        ({"rms_norm": False}, "rms_norm is False; only True is supported"),
        ({"d_model": "8"}, "d_model must be"),
    ],
)
def test_other_options_of_mamba_ssm_are_errors(change, message, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"d_model": 8, "n_layer": 1, "vocab_size": 16} | change)
    )
    with pytest.raises(ConfigError, match=message):
        models.load(tmp_path)
