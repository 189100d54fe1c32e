"""How tokens are drawn: options as data of each row, and how many programs are compiled for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations

from jrnn import models
from jrnn.errors import LayerError
from jrnn.models import sampling
from jrnn.models.sampling import Sampler, sample

SMALL = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1}
CONFIGS = {
    "mamba": SMALL | {"state_size": 2},
    "bamba": SMALL
    | {
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8,
        "mamba_n_heads": 2, "mamba_d_state": 2, "mamba_expand": 1, "attn_layer_indices": [1],
    },
}  # fmt: skip
KEY = jax.random.key(1)
PROMPT = np.array([[3, 1, 4, 1], [2, 7, 0, 0], [5, 5, 5, 5], [9, 0, 1, 2]])
OTHERS = [
    {"temperature": 0.7, "top_p": 0.9}, {"top_p": 0.5}, {"top_k": 3}, {"top_k": 9, "min_p": 0.1},
    {"repetition_penalty": 1.3}, {"temperature": 0}, {"temperature": jnp.float32(0.3)}, {"temperature": [0, 1, 2, 3]},
    {"top_k": np.array([2, 5, 16, 20]), "top_p": [0.5, None, 1, 0.1]},
]  # fmt: skip
pytestmark = pytest.mark.usefixtures("little_optimization")


def made(name):
    return models.create({"model_type": name} | CONFIGS[name], jax.random.key(0))


@pytest.mark.sample("mamba")
@pytest.mark.parametrize("name", CONFIGS)
def test_other_options_and_lengths_need_no_other_program(name):
    model = made(name)
    model.generate(PROMPT, 8, key=KEY, lengths=[4, 2, 1, 4])
    model.generate(PROMPT, 8, key=KEY, stop=3)
    list(model.stream(PROMPT, 3, key=KEY))
    with compilations() as compiled:
        for options in OTHERS:
            model.generate(PROMPT, 8, key=KEY, **options)
        for stop in (5, [6, 7], {1, 2}, [[1], [2, 3], [], [4]]):
            model.generate(PROMPT, 8, key=KEY, stop=stop)
        for steps, length in ((1, 9), (3, 8), (9, 30), (16, 2)):
            tokens = np.ones((4, steps), int)
            model.generate(tokens, length, key=KEY, lengths=[steps, 1, 1, 1])
            model.generate(tokens, length, key=KEY, mask=np.ones((4, steps), bool))
            list(model.stream(jax.device_put(tokens), min(length, 4), key=KEY, top_p=0.3))
    assert compiled == []


def test_a_row_with_options_of_its_own_is_that_of_a_batch_with_these_options():
    model = made("mamba")
    of_rows = [
        {"temperature": 0.9, "top_k": 3},
        {"temperature": 0},
        {"temperature": 2.0, "top_p": 0.6, "repetition_penalty": 1.5, "stop": [1, 2, 3]},
        {"min_p": 0.2},
    ]
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop")
    together = {name: [options.get(name) for options in of_rows] for name in names}
    together["stop"] = [stop or [] for stop in together["stop"]]
    new, state = model.generate(PROMPT, 12, key=KEY, **together)
    assert [
        token.tolist() for token in model.stream(PROMPT, 12, key=KEY, **together)
    ] == new.T.tolist()
    for n, options in enumerate(of_rows):
        alone, last = model.generate(PROMPT, 12, key=KEY, **options)
        assert new[n].tolist() == alone[n].tolist()
        np.testing.assert_allclose(state["logits"][n], last["logits"][n], atol=1e-5)


def allowed(logits, count, share):
    """Which tokens transformers leaves, by a sort of each row."""
    left = np.ones(len(logits), bool)
    if count is not None and count < len(logits):
        left &= logits >= np.sort(logits)[-count]
    if share is not None and share < 1:
        order = np.argsort(-np.where(left, logits, -np.inf), kind="stable")
        chances = np.where(left, np.exp(logits - logits.max()), 0)[order]
        chances /= chances.sum()
        first = order[np.cumsum(chances) - chances < share]
        left &= logits >= logits[first].min()
    return left


LIMITS = {  # and whether they need the order of all logits
    "plain": [(None, None)] * 4,
    "narrow": [(1, None), (7, None), (64, 0.6), (None, None)],
    "wide": [(65, None), (300, 0.9), (1024, 0.2), (3, 0.999)],
    "whole": [(1025, None), (None, 0.9), (80, 0.2), (3, 0.999)],
}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_those_of_a_sort(name, ties):
    random = np.random.RandomState(0)
    shape = (4, 1100)
    logits = random.randint(0, 9, shape) if ties else random.randn(*shape) * 2
    logits = logits.astype(np.float32)
    counts = np.array([[1100 if count is None else count] for count, _ in LIMITS[name]])
    shares = np.array([[1.0 if share is None else share] for _, share in LIMITS[name]], np.float32)
    bound = sampling._bound(logits, counts, shares, np.ones((4, 1), bool))
    for n, limits in enumerate(LIMITS[name]):
        np.testing.assert_array_equal(logits[n] >= bound[n], allowed(logits[n], *limits))


def test_what_no_row_needs_is_not_computed():
    """The order of the logits, and random numbers, are in branches; the likeliest token needs neither."""
    text = str(
        jax.make_jaxpr(sample)(jnp.ones((2, 100)), KEY, Sampler(jnp.ones(2), jnp.ones(2, int)))
    )
    outside = text[: text.index("cond[")]
    assert "sort" in text and "sort" not in outside and "random" not in outside


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_p": [0.5, 0, 1, 1]}, "top_p is 0; it must be above 0"),
        ({"top_p": [0.5] * 3}, r"top_p is an array \[3\]; it must be a number, or an array \[4\]"),
        ({"temperature": [1, -1, 1, 1]}, "temperature is -1; it must be at least 0"),
        ({"top_k": [1, 0, 1, 1]}, "top_k is 0; it must be an integer of at least 1"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be an integer"),
        ({"min_p": "x"}, "min_p is 'x'; it must be a number"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf; it must be above 0"),
        ({"stop": [[1], [2], [3]]}, "stop has 3 rows; it must have 4"),
        ({"stop": [1 << 40]}, "the vocabulary has the tokens from 0 to 15"),
        ({"stop": [1.5]}, "stop is 1.5; it must be an integer"),
    ],
)
def test_what_does_not_fit_is_named(options, message):
    with pytest.raises(LayerError, match=message):
        made("mamba").generate(PROMPT, 2, key=KEY, **options)
