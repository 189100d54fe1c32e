"""No test looks at the clock: on a machine that is busy, waiting and measuring decide nothing."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
WORDS = re.compile(
    r"\btime\.(sleep|time|monotonic|perf_counter|process_time)\b|\b(ru_utime|ru_stime|ru_minflt|ru_majflt)\b"
)


def offences(source):
    """The lines of a test file that wait, read a clock or set a deadline; also in the programs that it holds as text."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names) if any(name.name == "time" for name in names):
                yield node.lineno
            case ast.ImportFrom(module="time"):
                yield node.lineno
            case ast.Constant(value=str(text)) if WORDS.search(text):
                yield node.lineno
            case ast.Attribute(attr="ru_utime" | "ru_stime" | "ru_minflt" | "ru_majflt"):
                yield node.lineno
            case ast.Call(keywords=keywords):
                for keyword in keywords:
                    unlimited = isinstance(keyword.value, ast.Constant) and keyword.value.value is None
                    if keyword.arg in ("timeout", "deadline") and not unlimited:
                        yield node.lineno


def test_no_test_uses_a_clock():
    uses = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__)
        for line in offences(path.read_text(encoding="utf-8"))
    ]
    assert not uses, "give the code under test a clock of the test's own"


@pytest.mark.parametrize(
    "line",
    [
        "import time",
        "from time import sleep",
        "run(command, timeout=60)",
        "settings(deadline=500)",
        "PROGRAM = 'import time; time.sleep(1)'",
        "before = getrusage(RUSAGE_SELF).ru_minflt",
    ],
)
def test_an_offence_is_found(line):
    assert list(offences(line)) == [1]
    assert not list(offences("settings(deadline=None)"))
