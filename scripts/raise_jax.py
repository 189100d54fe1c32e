"""Raises the upper bound of JAX in pyproject.toml to admit a version, after the tests have passed with it.

python scripts/raise_jax.py VERSION

Prints the new bound, or nothing if the version is admitted already. tests/test_release.py then names the pages to change.
"""

import re
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def main(version: str) -> None:
    minor = int(re.match(r"0\.(\d+)", version)[1])
    text = PROJECT.read_text(encoding="utf-8")
    changed = re.sub(r"(jax[^\"]*>=0\.\d+,<0\.)(\d+)", lambda m: m[1] + str(max(int(m[2]), minor + 1)), text)
    if changed != text:
        PROJECT.write_text(changed, encoding="utf-8")
        print(f"jax<0.{minor + 1}")


if __name__ == "__main__":
    main(sys.argv[1])
