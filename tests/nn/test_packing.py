"""Packed sequences: round trips, any order and length, buckets, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jrnn import nn
from jrnn.errors import LayerError


def reference(x, lengths):
    """The rows of a packed array, one by one."""
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    return [x[t, n] for t in range(len(x)) for n in order if t < lengths[n]]


@pytest.mark.exhaustive
@settings(max_examples=25)
@given(st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_packing_and_padding(lengths):
    x = np.arange(4 * len(lengths) * 2, dtype=np.float32).reshape(4, len(lengths), 2) + 1
    packed = nn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    rows = np.array(reference(x, lengths), np.float32).reshape(-1, 2)
    assert packed.data.shape == (4 * len(lengths), 2)
    np.testing.assert_array_equal(packed.data[: len(rows)], rows)
    assert not packed.data[len(rows) :].any()
    np.testing.assert_array_equal(
        packed.batch_sizes, [sum(t < length for length in lengths) for t in range(4)]
    )
    back, unpacked_lengths = nn.pad_packed_sequence(
        packed, batch_first=True, padding_value=-1.0, total_length=6
    )
    np.testing.assert_array_equal(unpacked_lengths, lengths)
    expected = np.full((6, len(lengths), 2), -1, np.float32)
    for n, length in enumerate(lengths):
        expected[:length, n] = x[:length, n]
    np.testing.assert_array_equal(back, expected.swapaxes(0, 1))


def test_padding_does_not_enter_and_gets_no_gradient():
    x = jnp.array([[1.0, 4.0], [2.0, jnp.nan], [3.0, jnp.inf]])
    packed, pull = jax.vjp(lambda x: nn.pack_padded_sequence(x, [3, 1]).data, x)
    np.testing.assert_array_equal(packed, [1, 4, 2, 3, 0, 0])
    np.testing.assert_array_equal(pull(jnp.arange(1.0, 7.0))[0], [[1, 2], [3, 0], [4, 0]])


def test_sequences_of_a_list():
    sequences = [np.full((length, 2), length, np.float32) for length in (1, 3, 0)]
    packed = nn.pack_sequence(
        sequences, enforce_sorted=False, total_length=nn.bucket(3, least=4), capacity=4
    )
    np.testing.assert_array_equal(packed.data[:, 0], [3, 1, 3, 3])
    np.testing.assert_array_equal(packed.batch_sizes, [2, 1, 1, 0])
    np.testing.assert_array_equal(packed.lengths, [1, 3, 0])
    np.testing.assert_array_equal(
        nn.pad_sequence(sequences, batch_first=True)[1], np.full((3, 2), 3)
    )


def test_a_list_may_be_differentiated():
    sequences = [jnp.array([1.0, 2.0, 3.0]), jnp.zeros(0), jnp.array([4.0])]
    packed, pull = jax.vjp(lambda s: nn.pack_sequence(s, enforce_sorted=False).data, sequences)
    np.testing.assert_array_equal(packed, nn.pack_sequence(sequences, enforce_sorted=False).data)
    for actual, expected in zip(pull(jnp.arange(1.0, 10.0))[0], ([1, 3, 4], [], [2]), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.exhaustive
def test_modules_take_and_give_packed_sequences():
    module = nn.LSTM(2, 3, num_layers=2, bidirectional=True, batch_first=True, rngs=nnx.Rngs(0))
    x = np.random.RandomState(0).standard_normal((3, 5, 2)).astype(np.float32)
    lengths = [2, 5, 0]
    packed = nn.pack_padded_sequence(
        x, lengths, batch_first=True, enforce_sorted=False, capacity=nn.bucket(7)
    )
    output, (h, c) = jax.jit(lambda packed: module(packed))(packed)
    assert isinstance(output, nn.PackedSequence) and output.data.shape == (8, 6)
    padded, unpacked_lengths = nn.pad_packed_sequence(output, batch_first=True)
    expected, (h_expected, c_expected) = jax.jit(lambda x: module(x, lengths=lengths))(x)
    np.testing.assert_array_equal(unpacked_lengths, lengths)
    np.testing.assert_array_equal(padded, expected)
    np.testing.assert_array_equal(h, h_expected)
    np.testing.assert_array_equal(c, c_expected)
    with pytest.raises(LayerError, match="a PackedSequence has its own lengths"):
        module(packed, lengths=lengths)
    with pytest.raises(LayerError, match=r"x is \[8, 2\] but must be PackedSequence.data \[C, 4\]"):
        nn.LSTM(4, 3, rngs=nnx.Rngs(0))(packed)


def test_too_small_a_capacity_is_never_silent():
    x = jnp.ones((3, 2))
    with pytest.raises(
        LayerError, match=r"add up to 5 rows, but capacity is 4; bucket\(sum\(lengths\)\) is 8"
    ):
        nn.pack_padded_sequence(x, [3, 2], capacity=4)
    packed = jax.jit(lambda lengths: nn.pack_padded_sequence(x, lengths, capacity=4))
    assert np.isfinite(packed(jnp.array([3, 1])).data).all()
    assert np.isnan(packed(jnp.array([3, 2])).data).all()


def test_what_does_not_fit_is_an_error():
    x = jnp.ones((3, 2))
    with pytest.raises(
        LayerError, match=r"lengths are \[1, 3\]; sort them in descending order, or give enforce"
    ):
        nn.pack_padded_sequence(x, [1, 3])
    with pytest.raises(LayerError, match=r"lengths\[1\] is -1"):
        nn.pack_padded_sequence(x, [1, -1])
    with pytest.raises(LayerError, match=r"lengths\[0\] is 4, but the sequences have 3 steps"):
        nn.pack_padded_sequence(x, [4, 1])
    with pytest.raises(LayerError, match=r"lengths are \[3\]; they must be \[2\]"):
        nn.pack_padded_sequence(x, [1, 1, 1])
    with pytest.raises(LayerError, match="lengths are float32; they must be integers"):
        nn.pack_padded_sequence(x, jnp.ones(2))
    with pytest.raises(LayerError, match="capacity is 8.0; it must be an integer"):
        nn.pack_padded_sequence(x, [3, 1], capacity=8.0)
    with pytest.raises(LayerError, match=r"x is \[3\]; it must be \[T, N, ...\]"):
        nn.pack_padded_sequence(jnp.ones(3), [1])
    with pytest.raises(
        LayerError, match="total_length is 2, but the packed sequences may have 3 steps"
    ):
        nn.pad_packed_sequence(nn.pack_padded_sequence(x, [3, 1]), total_length=2)
    with pytest.raises(LayerError, match="total_length is 1, but a sequence has 2 steps"):
        nn.pad_sequence([np.ones(2)], total_length=1)
    with pytest.raises(LayerError, match=r"sequence 1 is \[2, 3\], but the first is \[2, 2\]"):
        nn.pad_sequence([np.ones((2, 2)), np.ones((2, 3))])
    with pytest.raises(LayerError, match="there are no sequences"):
        nn.pad_sequence([])


@given(st.integers(0, 100_000), st.integers(1, 64), st.integers(1, 8))
def test_buckets_hold_and_waste_little(length, least, per_octave):
    size = nn.bucket(length, least=least, per_octave=per_octave)
    assert size >= max(length, least)
    assert size == least or size <= max(length * (1 + 1 / per_octave), length + 1)


def test_there_are_few_buckets():
    assert len({nn.bucket(n) for n in range(1, 1025)}) == 1 + 4 * 7
    assert nn.bucket(np.int64(9)) == nn.bucket(jnp.array(9)) == 10
    for length in (-1, 2.5, "a"):
        with pytest.raises(
            LayerError, match=f"length is {length!r}; it must be an integer of at least 0"
        ):
            nn.bucket(length)
    with pytest.raises(LayerError, match="batch_size is 0"):
        nn.bucketed([[1]], 0)


def test_every_sequence_is_in_one_batch():
    sequences = ["a" * n for n in (3, 90, 30, 5, 31, 32, 8, 0)]
    batches = nn.bucketed(sequences, 2)
    assert sorted(n for _, members in batches for n in members) == list(range(8))
    for length, members in batches:
        assert len(members) <= 2 and all(len(sequences[n]) <= length for n in members)
