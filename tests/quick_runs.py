"""What a quick run leaves out, by the marks `exhaustive`, `sample` and `grid`, which pyproject.toml explains."""

import collections

import pytest


def left_out(items):
    """Returns those of the collected items that only an exhaustive run checks.

    Raises:
        pytest.UsageError: if a mark names a case that its test does not have.
    """
    tests = collections.defaultdict(list)
    for item in items:
        tests[getattr(item, "function", None)].append(
            item
        )  # None: examples in docstrings, which have no marks
    return {item for cases in tests.values() for item in _left_out(cases)}


def _left_out(cases):
    ids = [case.callspec.id if hasattr(case, "callspec") else None for case in cases]
    dropped = set()
    for mark in cases[0].iter_markers():
        if mark.name in ("exhaustive", "sample") and (unknown := set(mark.args) - set(ids)):
            raise pytest.UsageError(
                f"{cases[0].nodeid}: the mark {mark.name} names no case of it: {sorted(unknown)}"
            )
        if mark.name == "grid":
            dropped |= {case for number, case in enumerate(cases) if number % mark.kwargs["every"]}
        elif mark.name == "sample":
            dropped |= {case for case, id in zip(cases, ids) if id not in mark.args}
        elif mark.name == "exhaustive":
            dropped |= {case for case, id in zip(cases, ids) if id in mark.args or not mark.args}
    return dropped
