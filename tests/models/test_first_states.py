"""A trained first state of pretrained models: every family, resets, files, generation."""

import by_numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_chunked_families import CONFIGS, SIZES
from test_language_models import WINDOWED

from jrnn import models
from jrnn.cli import main
from jrnn.errors import LayerError

OTHERS = {
    "falcon_mamba": {"state_size": 2},
    "jamba": {"num_attention_heads": 8, "intermediate_size": 16, "num_experts": 1},
    "mamba": {"state_size": 2},
    "recurrent_gemma": WINDOWED | {"block_types": ["recurrent"], "num_hidden_layers": 1},
    "rwkv": {},
}
ALL = CONFIGS | OTHERS
NONE = {"lfm2", "lfm2_moe"}  # convolutions and attention
TOKENS = np.array([[3, 1, 4, 1], [5, 9, 2, 6]])
pytestmark = pytest.mark.usefixtures("little_optimization")


def test_every_family_is_here():
    assert set(ALL) | NONE == set(models.FAMILIES)


def made(family):
    layers = {} if family == "nemotron_h" else {"num_hidden_layers": 1}
    config = {"model_type": family} | SIZES | layers | ALL[family]
    return models.create(config, jax.random.key(0))


def some(model):
    """A first state of random numbers."""
    random = np.random.RandomState(0)
    state = {}
    for name, shape in model.decoder.first_shapes().items():
        state[name] = (0.3 * random.standard_normal(shape)).astype(np.float32)
    return state


@pytest.mark.sample("falcon_h1", "recurrent_gemma", "rwkv", "rwkv7", "xlstm")
@pytest.mark.parametrize("family", ALL)
def test_the_gradient_reaches_the_first_state(family):
    """It changes the logits, also after a reset, which goes back to it."""
    model = made(family)
    tuned = model.with_first_state(some(model))
    resets = np.zeros(TOKENS.shape, bool)
    resets[:, 2] = True

    def run(first):
        return tuned.with_first_state(first)(TOKENS, resets=resets)[0]

    def loss(first):
        logits = run(first)
        return jnp.sum(logits * jnp.cos(jnp.arange(logits.size).reshape(logits.shape)))

    gradients = by_numpy.jit(jax.grad(loss))(tuned.first)
    assert all(np.abs(gradient).max() > 1e-7 for gradient in gradients.values())
    logits = by_numpy.jit(run)(tuned.first)
    one, other = (tuned(TOKENS[:, part])[0] for part in (slice(2), slice(2, 4)))
    np.testing.assert_allclose(logits[:, :2], one, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(logits[:, 2:], other, rtol=1e-3, atol=1e-4)
    assert np.abs(np.asarray(model(TOKENS[:, :2])[0]) - np.asarray(one)).max() > 1e-6


def test_a_first_state_is_written_read_and_generated_from(tmp_path, capsys):
    config = {"model_type": "rwkv7", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2}
    model = models.create(config | {"head_dim": 4}, jax.random.key(0))
    first = {name: 20 * value for name, value in some(model).items()}
    models.save_state(tmp_path / "first.safetensors", first)
    tuned = model.with_first_state(models.load_state(tmp_path / "first.safetensors"))
    prompt = jnp.array([[3, 1]])
    written, _ = tuned.generate(prompt, 6, temperature=0)
    streamed = [int(token[0]) for token in tuned.stream(prompt, 6, temperature=0)]
    assert written[0].tolist() == streamed
    assert int(tuned(prompt)[0][0, -1].argmax()) == streamed[0]
    model.save(tmp_path / "model")
    command = ["sample", str(tmp_path / "model"), "--prompt", "3 1", "--length", "6"]
    options = ["--temperature", "0", "--state", str(tmp_path / "first.safetensors")]
    assert main([*command, *options]) == 0
    assert capsys.readouterr().out.split() == list(map(str, [3, 1, *streamed]))


def test_states_that_do_not_fit():
    model = made("mamba")
    with pytest.raises(
        LayerError, match=r"first state has '0.ssm' \[\] but must have \[1, 512, 2\]"
    ):
        model.with_first_state({})
    with pytest.raises(LayerError, match=r"has '0.conv' \[1\] but must have \[\]"):
        model.with_first_state(some(model) | {"0.conv": jnp.ones(1)})
    attention = models.create(
        {"model_type": "lfm2", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8, "layer_types": ["conv"]},
        jax.random.key(0),
    )  # fmt: skip
    with pytest.raises(LayerError, match="lfm2: the model has no recurrent state"):
        attention.with_first_state({})
