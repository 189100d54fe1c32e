"""The levels of the house, read off the import statements: a file imports from lower levels or from its own folder."""

import ast
import functools
from pathlib import Path

import pytest

import jrnn
from jrnn.nets import registry

ROOT = Path(jrnn.__file__).parent
LEVELS = {
    "errors": 0,
    "printable": 0,
    "version": 0,
    "nets/__init__": 0,
    "nets/ir": 0,
    "nets/execution_step": 0,
    "named": 1,
    "memory": 1,
    "arrays": 2,
    "nets/proto": 1,
    "nets/registry": 1,
    "loops": 1,
    "nets/graph": 2,
    "nets/builder": 3,
    "nets/lowering": 3,
    "nets/autodiff": 3,
    "nets/gradient_maker": 3,
    "nets/ops": 4,
    "nets/recurrent": 5,
    "convert": 5,
    "nets/plans": 5,
    "gradcheck": 6,
    "nets/cells": 6,
    "nn": 6,
    "interop": 7,
    "testing": 7,
    "train": 7,
    "onnx": 8,
    "bench": 9,
    "cli": 10,
    "__main__": 11,
    "__init__": 11,
}
ONLY_IN = {  # third-party package: the rooms that may know it
    "google": {"nets/proto", "onnx"},
    "argparse": {"cli"},
    "flax": {"nn", "interop", "train", "bench"},
    "optax": {"train"},
    "orbax": {"train"},
    "rich": {"train", "cli", "bench", "gradcheck"},
    "safetensors": {"interop"},
    "onnx": {"onnx"},
    "onnxruntime": {"onnx", "bench"},
}
# fmt: off
LATE = {  # jax.experimental.rnn, which loads much and is for CUDA alone; Pallas, which loads much, for TPUs
    ("loops/cudnn.py", "jax"), ("loops/kernels/mosaic.py", "jax"),
}
OPTIONAL = {
    "torch", "matplotlib", "caffe2", "keras", "onnx", "tensorboardX", "pydoc_data", "flax", "hypothesis",
    "pkg_resources", "sklearn", "lmdb", "onnxruntime", "haiku", "equinox",
}
# fmt: on
FILES = sorted(p for p in ROOT.rglob("*.py"))
NAMES = {str(p.relative_to(ROOT)): p for p in FILES}


def room(path: Path) -> str:
    """The top-level module or folder of jrnn that a file belongs to."""
    return _room(path.relative_to(ROOT).with_suffix("").parts)


def _room(parts) -> str:
    return "/".join(parts[: 2 if parts[0] == "nets" else 1])


@functools.cache
def imports(path: Path):
    """(line, module path inside jrnn as parts, or the external package's name, whether inside a function), for each."""
    return tuple(_imports(path))


def _imports(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inside.update(id(n) for n in ast.walk(node))
    package = list(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(tree):
        local = id(node) in inside
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, *rest = alias.name.split(".")
                yield node.lineno, (rest if first == "jrnn" else None), first, local
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            if node.level == 0 and module[0] != "jrnn":
                yield node.lineno, None, module[0], local
                continue
            target = [*package[: len(package) - (node.level - 1)], *module] if node.level else module[1:]
            for alias in node.names:  # a module of the package, or a name that it defines
                yield node.lineno, [*target, alias.name], "jrnn", local


@pytest.mark.parametrize("name", NAMES)
def test_a_file_imports_from_below(name):
    path, here = NAMES[name], room(NAMES[name])
    assert here in LEVELS, f"{here} has no level: give it one here and in the design"
    for line, target, package, local in imports(path):
        where = f"{name}:{line}"
        if target is None:
            allowed = ONLY_IN.get(package)
            assert allowed is None or here in allowed, f"{where}: {package} is only for {sorted(allowed or ())}"
            late = package in OPTIONAL or (name, package) in LATE
            assert not local or late, f"{where}: imports {package} inside a function"
            continue
        assert not local, f"{where}: imports from jrnn inside a function"
        there = _room(target) if target and _room(target) in LEVELS else "__init__"
        if there == here:
            continue
        assert LEVELS[there] < LEVELS[here] or _siblings(here, there), (
            f"{where}: {here} [{LEVELS[here]}] imports {there} [{LEVELS[there]}], which is not below it"
        )


def _siblings(here: str, there: str) -> bool:
    """Within a level, single files may be imported; folders of one level do not know each other."""
    return LEVELS[here] == LEVELS[there] and (ROOT / f"{there}.py").exists()


@pytest.mark.parametrize(
    "name", [n for n in NAMES if room(NAMES[n]) in ("nets/ir", "nets/proto", "nets/graph", "errors")]
)
def test_no_jax_at_the_bottom(name):
    assert not {p for _, t, p, _ in imports(NAMES[name]) if t is None} & {"jax", "jaxlib"}


def test_no_cycles_between_files():
    edges = {
        path: {found for _, target, _, _ in imports(path) if target is not None and (found := _file(target)) != path}
        for path in FILES
    }
    done, under_way = set(), []

    def visit(path):
        if path in done:
            return
        assert path not in under_way, "a cycle: " + " -> ".join(str(p.relative_to(ROOT)) for p in [*under_way, path])
        under_way.append(path)
        for target in sorted(edges.get(path, ())):
            visit(target)
        done.add(under_way.pop())

    for path in FILES:
        if path.name != "__init__.py":  # a package's own file gathers what its siblings define
            visit(path)


def _file(target: list[str]) -> Path:
    """The file that holds what is imported: a module, a package, or a name inside either."""
    for parts in (target, target[:-1]):
        for path in (ROOT.joinpath(*parts).with_suffix(".py"), ROOT.joinpath(*parts, "__init__.py")):
            if parts and path.exists():
                return path
    return ROOT / "__init__.py"


def test_ops_and_nn_do_not_know_what_stands_beside_them():
    for name, path in NAMES.items():
        targets = {_room(target) for _, target, _, _ in imports(path) if target}
        if room(path) == "nn":
            assert "nets/ops" not in targets, name
        if room(path) == "nets/ops":
            assert not targets & {"nets/cells", "nn", "nets/recurrent"}, name


def test_mechanisms_name_no_operator():
    """Operators' names stand in content alone; what autodiff emits itself is a constant of the registry."""
    types = {d.type for d in registry.registered()}
    # fmt: off
    mechanisms = {
        "errors", "gradcheck", "loops", "nets/autodiff", "nets/builder", "nets/gradient_maker", "nets/ir",
        "nets/lowering", "nets/proto", "nn",
    }
    # fmt: on
    words = {"XavierFill"}  # what NetBuilder.param fills parameters with where nothing else is said
    for name, path in NAMES.items():
        if room(path) not in mechanisms:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                assert node.value not in types - words, f"{name}:{node.lineno}: names the operator {node.value!r}"


def test_the_operators_that_autodiff_emits_exist():
    for name in (registry.ACCUMULATE, registry.SEED, registry.CONCATENATE, registry.SAVE):
        assert registry.lookup(name)
