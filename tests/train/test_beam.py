"""Beam search against all sequences there are, and against greedy search, on a small random recurrent model."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrnn.train.seq2seq.encoder_decoder import beam_search

N, H, V, T, END = 3, 4, 3, 4, 0
RNG = np.random.default_rng(5)
IN, HIDDEN, OUT = (
    RNG.standard_normal(shape).astype(np.float32) for shape in ((V, H), (H, H), (H, V))
)
FIRST = RNG.standard_normal((1, N, H)).astype(np.float32)
SEQUENCES = [
    s
    for n in range(1, T + 1)
    for s in itertools.product(range(V), repeat=n)
    if END not in s[:-1] and END in (s[-1], n - T)
]


def step(state, last):
    state = jnp.tanh(state @ HIDDEN + jnp.asarray(IN)[None, last])
    return (state @ OUT)[0], state


@pytest.fixture(scope="module")
def search():
    return jax.jit(
        partial(beam_search, step, end=END, steps=T), static_argnames=("width", "normalization")
    )


def log_probability(n, sequence):
    """Of one sequence of example n, in float64 and by itself."""
    state, last, total = FIRST[0, n].astype(np.float64), END, 0.0
    for token in sequence:
        state = np.tanh(state @ HIDDEN + IN[last])
        logits = state @ OUT
        total += logits[token] - np.log(np.exp(logits).sum())
        last = token
    return total


def hypotheses(beams, n):
    tokens, lengths = np.asarray(beams.tokens[n]), np.asarray(beams.lengths[n])
    return [tuple(row[:length].tolist()) for row, length in zip(tokens, lengths)]


def test_there_are_as_many_sequences_as_there_should_be():
    assert len(SEQUENCES) == 1 + 2 + 4 + 8 * 3  # those that end at each step, and those cut off


@pytest.mark.sample("0.7")
@pytest.mark.parametrize("normalization", [0.0, 0.7, 1.0])
def test_a_wide_search_is_exhaustive(search, normalization):
    count = len(SEQUENCES)
    beams = search(FIRST, jnp.full(N, END), width=count + 2, normalization=normalization)
    for n in range(N):
        of = {s: log_probability(n, s) for s in SEQUENCES}
        ranked = sorted(SEQUENCES, key=lambda s: -of[s] / len(s) ** normalization)
        assert hypotheses(beams, n)[:count] == ranked
        np.testing.assert_allclose(
            beams.log_probability[n, :count], [of[s] for s in ranked], rtol=1e-5
        )
        np.testing.assert_allclose(
            beams.score[n, :count], [of[s] / len(s) ** normalization for s in ranked], rtol=1e-5
        )
        assert beams.finished[n, :count].tolist() == [s[-1] == END for s in ranked]
    assert np.isneginf(beams.score[:, count:]).all()  # there is nothing else to be found


def test_of_width_one_it_is_greedy(search):
    beams = search(FIRST, jnp.full(N, END), width=1, normalization=1.0)
    for n in range(N):
        state, last, greedy = FIRST[:, n], END, []
        while len(greedy) < T and (not greedy or last != END):
            logits, state = step(state, last)
            last = int(jnp.argmax(logits))
            greedy.append(last)
        assert hypotheses(beams, n) == [tuple(greedy)]
        assert (np.asarray(beams.tokens[n, 0, len(greedy) :]) == END).all()


@pytest.mark.exhaustive
def test_wider_finds_no_worse_and_examples_do_not_mix(search):
    scores = [
        search(FIRST, jnp.full(N, END), width=k, normalization=0.0).score[:, 0]
        for k in (1, 2, len(SEQUENCES) + 2)
    ]
    assert (scores[0] <= scores[1] + 1e-6).all() and (scores[1] <= scores[2] + 1e-6).all()
    assert (scores[0] < scores[2] - 0.1).any()  # greedy search misses the best here
    together = search(FIRST, jnp.full(N, END), width=3, normalization=1.0)
    for n in range(N):
        alone = search(FIRST[:, n : n + 1], jnp.full(1, END), width=3, normalization=1.0)
        assert hypotheses(alone, 0) == hypotheses(together, n)
