"""Tests of the marks by which a quick run leaves tests and cases out."""

import types

import pytest
import quick_runs


class Item:
    """What pytest knows of a case, as far as marks ask for it."""

    def __init__(self, function, id, *marks):
        self.function, self.nodeid, self.marks = function, f"{function}[{id}]", marks
        if id is not None:
            self.callspec = types.SimpleNamespace(id=id)

    def iter_markers(self):
        return (mark.mark for mark in self.marks)


def kept(*marks):
    cases = [Item("test", id, *marks) for id in "abcdefg"]
    other = Item("another", None)
    dropped = quick_runs.left_out([*cases, other])
    assert other not in dropped
    return "".join(case.callspec.id for case in cases if case not in dropped)


def test_marks():
    assert kept() == kept(pytest.mark.parametrize("x", "abc")) == "abcdefg"
    assert kept(pytest.mark.exhaustive) == ""
    assert kept(pytest.mark.exhaustive("a", "d")) == "bcefg"
    assert kept(pytest.mark.sample("a", "d")) == "ad"
    assert kept(pytest.mark.grid(every=3)) == "adg"
    assert kept(pytest.mark.grid(every=3), pytest.mark.exhaustive("d")) == "ag"


@pytest.mark.parametrize(
    "mark", [pytest.mark.sample("a", "z"), pytest.mark.exhaustive("z")], ids=["sample", "exhaustive"]
)
def test_a_case_that_is_not_there(mark):
    with pytest.raises(
        pytest.UsageError, match=r"test\[a\]: the mark (sample|exhaustive) names no case of it: \['z'\]"
    ):
        kept(mark)
