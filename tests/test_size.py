"""The package does not grow: who adds lines takes others away."""

from pathlib import Path

import jrnn

LINES = 72_275


def test_the_package_does_not_grow():
    files = Path(jrnn.__file__).parent.rglob("*.py")
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= LINES
