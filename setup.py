"""What pyproject.toml cannot say: where `configs/` is in the package, and the README that a package index shows.

An index has no files of the repository. Links to them become absolute where pyproject.toml names the repository
(`project.urls.Repository`); else they become plain text, and pictures are left out.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def readme() -> str:
    """The README for a package index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository", "").rstrip("/")

    def absolute(found: re.Match) -> str:
        mark, text, target = found.groups()
        if repository:
            return f"{mark}[{text}]({repository}/{'raw' if mark else 'blob'}/main/{target})"
        return "" if mark else text

    return re.sub(
        r"(!?)\[([^]]*)\]\((?![a-z]+:|#)([^)]+)\)", absolute, (ROOT / "README.md").read_text(encoding="utf-8")
    )


setup(
    packages=[*find_packages(include=["jrnn*"]), "jrnn.configs"],
    package_dir={"jrnn.configs": "configs"},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
