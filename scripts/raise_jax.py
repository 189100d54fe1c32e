"""Raises the upper bound of JAX in pyproject.toml to admit a version, after the tests have passed with it.

python scripts/raise_jax.py VERSION

Prints the new bound, or nothing if the version is admitted already. tests/test_release.py then names the pages to change.
The version is also noted as tested in jrnn/jaxprs/jax_internals/tracing.py.
"""

import re
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
INTERNALS = PROJECT.parent / "jrnn" / "jaxprs" / "jax_internals" / "tracing.py"


def main(version: str) -> None:
    minor, patch = map(int, re.match(r"0\.(\d+)\.(\d+)", version).groups())
    text = PROJECT.read_text(encoding="utf-8")
    changed = re.sub(
        r"(jax[^\"]*>=0\.\d+,<0\.)(\d+)", lambda m: m[1] + str(max(int(m[2]), minor + 1)), text
    )
    if changed != text:
        PROJECT.write_text(changed, encoding="utf-8")
        print(f"jax<0.{minor + 1}")
    text = INTERNALS.read_text(encoding="utf-8")
    INTERNALS.write_text(with_tested(text, minor, patch), encoding="utf-8")


def with_tested(text: str, minor: int, patch: int) -> str:
    """Returns the source of tracing.py with a release of JAX as the newest of its minor that was tested."""
    table = re.search(r"_TESTED = \{(.*?)\}", text, re.S)
    newest = {int(m): int(p) for m, p in re.findall(r"\(0, (\d+)\): (\d+)", table[1])}
    if newest.get(minor, -1) >= patch:
        return text
    newest[minor] = patch
    return text.replace(table[1], ", ".join(f"(0, {m}): {p}" for m, p in sorted(newest.items())))


if __name__ == "__main__":
    main(sys.argv[1])
