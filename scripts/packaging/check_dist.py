"""Checks what a release holds: python scripts/packaging/check_dist.py dist

The wheel, the sdist, jrnn/version.py, CITATION.cff and the changelog have one version, and both archives have the license.
"""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def faults(dist: Path) -> list[str]:
    """Returns what is wrong with the archives of a folder, and with the documents that name their version."""
    version = _match(r'^__version__ = "(.+)"', "jrnn/version.py")
    names = {
        "CITATION.cff": _match(r"^version: (.+)", "CITATION.cff"),
        "CHANGELOG.md": _match(r"^## (\S+) ", "CHANGELOG.md"),
    }
    wrong = [
        f"{name}: has version {other}, and jrnn/version.py {version}"
        for name, other in names.items()
        if other != version
    ]
    wheels, sdists = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        return [
            *wrong,
            f"{dist}: must hold one wheel and one sdist, and has {[p.name for p in (*wheels, *sdists)]}",
        ]
    with zipfile.ZipFile(wheels[0]) as wheel, tarfile.open(sdists[0]) as sdist:
        archives = {wheels[0].name: wheel.namelist(), sdists[0].name: sdist.getnames()}
    for name, files in archives.items():
        if not name.startswith(f"jrnn-{version}"):
            wrong.append(f"{name}: is not of version {version}")
        if not any(Path(file).name == "LICENSE" for file in files):
            wrong.append(f"{name}: has no LICENSE")
        if stray := [
            file for file in files if re.search(r"__pycache__|\.venv|/runs/|\.cache", file)
        ]:
            wrong.append(f"{name}: has {stray[0]}")
    return wrong


def _match(pattern: str, path: str) -> str:
    match = re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.M)
    return match[1].strip() if match else "none"


if __name__ == "__main__":
    problems = faults(Path(sys.argv[1]))
    print("\n".join(problems) or "one version in all places, and the license in both archives")
    sys.exit(bool(problems))
