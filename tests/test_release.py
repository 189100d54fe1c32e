"""What a release holds: the sdist's files, the README that a package index shows, and the versions that documents name."""

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import types
import zipfile
from pathlib import Path

import pytest

import jrnn

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_sdist_holds_all_that_its_tests_need():
    """What git tracks at the top is named in MANIFEST.in, or setuptools takes it by itself."""
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").split()
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    tops = {
        name.partition("/")[0]
        for name in listed or ["CHANGELOG.md", "tests/x", "docs/x", "examples/x", "scripts/x"]
    }
    own = {
        "jrnn",
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "MANIFEST.in",
        ".gitignore",
        ".gitattributes",
    }
    assert {"tests", "docs", "examples", "CHANGELOG.md"} <= tops
    assert not tops - own - set(manifest)


@pytest.mark.parametrize("repository", ["", "https://example.org/jrnn"])
def test_the_readme_of_an_index_has_no_link_that_leads_nowhere(repository, monkeypatch, tmp_path):
    """It is what setup.py gives to setuptools."""
    given = {}
    fake = {
        "setuptools": dict(
            setup=lambda **options: given.update(options),
            find_packages=lambda **_: ["jrnn"],
            Extension=lambda *_, **__: None,
        ),
        "setuptools.command.bdist_wheel": dict(bdist_wheel=object),
        "setuptools.command.build_ext": dict(build_ext=object),
        "setuptools.errors": dict(CompileError=Exception),
    }
    for name, members in fake.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**members))
    for name in ("setup.py", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    if repository:
        with (tmp_path / "pyproject.toml").open("a", encoding="utf-8") as file:
            file.write(f'\n[project.urls]\nRepository = "{repository}"\n')
    runpy.run_path(str(tmp_path / "setup.py"))
    targets = re.findall(r"\]\(([^)]+)\)", given["long_description"])
    assert given["long_description"].startswith("# jrnn")
    assert not [target for target in targets if not target.startswith(("https:", "#"))]
    assert any(
        target.startswith(f"{repository}/raw/main/docs/images/") for target in targets
    ) == bool(repository)


def test_documents_name_the_versions_of_the_metadata():
    text = (ROOT / "docs" / "releases.md").read_text(encoding="utf-8")
    pythons = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert (
        f"Python {pythons[0]} to {pythons[-1]}" in text
        and PROJECT["requires-python"] == f">={pythons[0]}"
    )
    bounds = {
        name: d.removeprefix(name)
        for d in PROJECT["dependencies"]
        for name in ("jax", "jaxlib")
        if d.startswith(name + ">")
    }
    first, last = re.fullmatch(r">=0\.(\d+),<0\.(\d+)", bounds["jax"]).groups()
    *others, newest = (f"0.{minor}" for minor in range(int(first), int(last)))
    assert bounds["jaxlib"] == bounds["jax"]
    for page in ("docs/releases.md", "docs/start.md", "docs/troubleshooting.md", "README.md"):
        named = re.search(
            r"JAX ((?:0\.\d+, )*0\.\d+ (?:and|or) 0\.\d+)",
            (ROOT / page).read_text(encoding="utf-8"),
        )
        assert named is not None and re.split(", | and | or ", named[1]) == [*others, newest], page


def test_a_release_is_checked(tmp_path):
    """The archives that a build makes, here written by hand, and the documents that name the version."""
    faults = runpy.run_path(str(ROOT / "scripts" / "packaging" / "check_dist.py"))["faults"]
    name = f"jrnn-{jrnn.__version__}"

    def archives(license, extra):
        with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
            for file in (*license, "jrnn/version.py"):
                wheel.writestr(file, "")
        with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz") as sdist:
            for file in ("LICENSE", *extra):
                sdist.add(ROOT / "LICENSE", f"{name}/{file}")

    archives(["jrnn.dist-info/licenses/LICENSE"], [])
    assert faults(tmp_path) == []
    archives([], [".cache/x"])
    assert faults(tmp_path) == [
        f"{name}-py3-none-any.whl: has no LICENSE",
        f"{name}.tar.gz: has {name}/.cache/x",
    ]
    (tmp_path / f"{name}.tar.gz").unlink()
    assert "must hold one wheel and one sdist" in faults(tmp_path)[0]
