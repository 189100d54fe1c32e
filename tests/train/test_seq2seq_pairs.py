"""Generated pairs: what a spelling means, what is held out, and that a batch is a function of the seed and its number."""

import re
from dataclasses import replace
from datetime import date, datetime

import numpy as np
import pytest

from jrnn.errors import DataError
from jrnn.train.seq2seq.seq2seq_task import (
    END,
    REVERSE,
    ROMAN,
    SPELLINGS,
    VOCABULARY,
    Pairs,
    encode,
    is_held_out,
    spell,
)

DAYS = [date(1900 + 7 * k, k % 12 + 1, k % 28 + 1) for k in range(29)]
FORMATS = {"d": "%d", "dd": "%d", "nth": "%d", "m": "%m", "mm": "%m", "roman": "%m", "y": "%Y"} | {
    "mon": "%b", "month": "%B", "wd": "%a", "weekday": "%A",
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_spelling_means_its_date(spelling):
    written = spelling.format(**FORMATS)
    for day in DAYS:
        text = re.sub(r"(\d)(st|nd|rd|th)\b", r"\1", spell(day, spelling))
        text = re.sub(r"\b[IVX]+\b", lambda numeral: str(ROMAN.index(numeral[0]) + 1), text)
        assert datetime.strptime(text, written).date() == day


@pytest.mark.parametrize(
    "day, ends", [(1, "1st"), (2, "2nd"), (3, "3rd"), (11, "11th"), (12, "12th"), (23, "23rd")]
)
def test_ordinals(day, ends):
    assert spell(date(2000, 1, day), "{nth}") == ends


def test_spellings_of_different_dates_differ():
    texts = {}
    for spelling in SPELLINGS:
        for day in (date(2001, m, d) for m in range(1, 13) for d in range(1, 29)):
            assert texts.setdefault(spell(day, spelling), day) == day, spelling


def test_pairs_are_a_function_of_the_seed_and_the_number():
    pairs = Pairs(seed=3)
    assert pairs.draw(5, 20) == Pairs(seed=3).draw(5, 20)
    others = [
        pairs.draw(6, 20),
        replace(pairs, seed=4).draw(5, 20),
        replace(pairs, held_out=True).draw(5, 20),
    ]
    assert all(pairs.draw(5, 20) != other for other in others)


def test_what_is_held_out_is_never_drawn_for_training():
    train, held_out = (
        {target for _, target in Pairs(held_out=is_out).draw(0, 2000)} for is_out in (False, True)
    )
    assert len(train) > 1000 and len(held_out) > 1000
    assert not any(map(is_held_out, train)) and all(map(is_held_out, held_out))
    share = np.mean([is_held_out(date.fromordinal(n).isoformat()) for n in range(700_000, 720_000)])
    assert abs(share - 0.1) < 0.01


def test_reversals_and_dates_come_in_their_shares():
    pairs = Pairs(reversals=0.25, longest=6).draw(0, 2000)
    reversals = [(source, target) for source, target in pairs if source.startswith(REVERSE)]
    assert abs(len(reversals) / len(pairs) - 0.25) < 0.04
    assert all(source[1:] == target[::-1] for source, target in reversals)
    assert {len(target) for _, target in reversals} == set(range(1, 7))
    dates = [
        date.fromisoformat(target) for source, target in pairs if not source.startswith(REVERSE)
    ]
    assert {day.year for day in dates} >= {1900, 2099} and all(
        1900 <= day.year <= 2099 for day in dates
    )


@pytest.mark.parametrize("longest", [3, 40])
def test_arrays_have_one_shape_whatever_is_drawn(longest):
    pairs = Pairs(reversals=0.5, longest=longest)
    encoded = [encode(pairs.draw(k, 50), pairs.input_steps, pairs.target_steps) for k in range(10)]
    assert {(e.inputs.shape, e.targets.shape) for e in encoded} == {
        ((pairs.input_steps, 50), (pairs.target_steps, 50))
    }


def test_encoded_pairs_can_be_read_back():
    pairs = Pairs().draw(0, 30)
    e = encode(pairs)
    for k, (source, target) in enumerate(pairs):
        assert VOCABULARY.decode(e.inputs[: e.input_lengths[k], k]) == source
        assert (
            VOCABULARY.decode(e.targets[: e.target_lengths[k], k])
            == target + VOCABULARY.characters[END]
        )
        assert (e.inputs[e.input_lengths[k] :, k] == END).all() and (
            e.targets[e.target_lengths[k] :, k] == END
        ).all()


@pytest.mark.parametrize(
    "text, message", [("20 März", "does not know the character 'ä'"), ("a\nb", "ends a sequence")]
)
def test_characters_that_cannot_be_read(text, message):
    with pytest.raises(DataError, match=message):
        encode([(text, "")])
