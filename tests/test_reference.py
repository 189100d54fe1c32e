"""Every public name has an entry in the API reference, and an example that the tests run."""

import doctest
import functools
import inspect
import re
from pathlib import Path

import pytest
from pages import blocks_of

import jrnn

ROOT = Path(__file__).parents[1]
API = sorted((ROOT / "docs" / "api").glob("*.md"))
PAGES = [*API, ROOT / "docs" / "errors.md"]
RUN_ELSEWHERE = [
    "README.md",
    "docs/own_tasks.md",
    "docs/caffe2.md",
    "docs/checking.md",
    "docs/nn.md",
    "docs/sequences.md",
    "docs/plans.md",
    "docs/serving.md",
]  # by other tests
OTHERS = {
    "convert",
    "files.corpus",
    "loops",
    "nets.cells",
    "nets.graph",
    "nets.plans",
    "nn.functional",
    "train.seq2seq",
}
MODULES = sorted({*jrnn._MODULES, *OTHERS})
ENTRY = re.compile(r"^\.\. (?:auto|py:)(?:function|class|exception|data):: ([\w.]+)", re.M)
NAMES = re.compile(
    r"^```\{names\} ([\w.]+)\n(.*?)\n```$", re.M | re.S
)  # docs/conf.py makes entries of such blocks


def resolve(name):
    """The object of a full name, as users write it: `jrnn.nn.GRU`."""
    _, *attributes = name.split(".")
    return functools.reduce(getattr, attributes, jrnn)


def public_names():
    """Every public name, once: what two modules export stands under the first."""
    names_to_values = {
        f"jrnn.{name}": getattr(jrnn, name) for name in jrnn.__all__ if name != "__version__"
    }
    for module in map("jrnn.{}".format, MODULES):
        loaded = resolve(module)
        names = getattr(loaded, "__all__", None) or [
            n for n in vars(loaded) if n[0].islower() and defined_in(loaded, n)
        ]
        names_to_values |= {f"{module}.{name}": getattr(loaded, name) for name in names}
    seen, once = set(), []
    for name, value in names_to_values.items():
        if not inspect.ismodule(value) and id(value) not in seen:
            seen.add(id(value))
            once.append(name)
    return once


def defined_in(module, name):
    return (
        inspect.isfunction(getattr(module, name))
        and getattr(module, name).__module__ == module.__name__
    )


def entries_of(page):
    text = page.read_text(encoding="utf-8")
    listed = [
        f"{m}.{n}"
        for m, names in NAMES.findall(text)
        for n in re.findall(r"([\w.]+)(?:\([^)]*\))?", names)
    ]
    return ENTRY.findall(text) + listed


ENTRIES = [name for page in PAGES for name in entries_of(page)]
PUBLIC = public_names()


def python_of(path):
    """The Python of a page that tests run: its doctests, or whole blocks of the pages that run as programs."""
    text = path.read_text(encoding="utf-8")
    blocks = [block for language, block in blocks_of(text) if language == "python"]
    if path in PAGES:
        blocks = [block for block in blocks if ">>>" in block]
    return "\n".join(blocks)


CODE = "\n".join(python_of(path) for path in [*PAGES, *(ROOT / name for name in RUN_ELSEWHERE)])


def has_example(name):
    value = resolve(name)
    documented = [value, *vars(value).values()] if inspect.isclass(value) else [value]
    if any(">>>" in (getattr(item, "__doc__", None) or "") for item in documented):
        return True
    return re.search(rf"\b{name.rpartition('.')[2]}\b", CODE) is not None


def test_the_reference_has_every_public_name():
    entries = [resolve(name) for name in ENTRIES]
    missing = [name for name in PUBLIC if not any(resolve(name) is entry for entry in entries)]
    assert not missing, f"no entry in docs/api: {missing}"


def test_the_reference_names_each_once():
    assert len(ENTRIES) == len(set(ENTRIES)) == len({id(resolve(name)) for name in ENTRIES})


@pytest.mark.parametrize("name", sorted({*PUBLIC, *ENTRIES}))
def test_a_name_has_an_example(name):
    assert has_example(name), (
        f"write an example: in the docstring of {name}, or on its page of docs/api"
    )


@pytest.mark.sample("convert", "corpus", "gradients", "graph", "index", "recurrent")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert doctest.testfile(str(page), module_relative=False, encoding="utf-8").failed == 0
