"""The rooms of the house and what each may import, read off the import statements."""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import jrnn
from jrnn.nets import registry

ROOT = Path(jrnn.__file__).parent
PAGE = ROOT.parent / "CONTRIBUTING.md"


class Room(NamedTuple):
    """A module at the top of jrnn or of jrnn/nets, or a folder there."""

    holds: str
    imports: str = ""  # the rooms that its files import, and no others


ROOMS = {
    "errors": Room("the errors that jrnn raises; text that is safe to show"),
    "version": Room("the version"),
    "files": Room("the one opener, reader of JSON and writer of files; arrays in files", "errors"),
    "jaxprs": Room(
        "jaxprs read, evaluated and retraced; functions as graphs of nodes; a table of primitives", "errors"
    ),
    "progress": Room("what a long work shows while it runs", "errors"),
    "loops": Room("the optimizing scan, and while loops; nothing of nets or flax", "errors version files jaxprs"),
    "nn": Room("layers on loops, with PyTorch's interface", "errors jaxprs loops"),
    "nets/__init__": Room("nothing"),
    "nets/memory": Room("the bound on what operators make", "errors"),
    "nets/ir": Room("nets as frozen records", "errors files"),
    "nets/execution_step": Room("plans as frozen records", "nets/ir"),
    "nets/registry": Room("the table of operators", "errors nets/ir"),
    "nets/gradient_maker": Room("operators to gradient operators", "errors nets/ir nets/registry"),
    "nets/proto": Room("the wire format", "errors files nets/ir nets/execution_step"),
    "nets/graph": Room("nets to nets, and nets to facts", "errors nets/ir"),
    "nets/builder": Room("building a net call by call", "errors nets/ir nets/registry nets/graph"),
    "nets/schedule": Room("the operators of a net, checked and in order", "errors nets/ir nets/registry nets/graph"),
    "nets/blobs": Room("the values of blobs", "errors nets/gradient_maker"),
    "nets/lowering": Room(
        "a net as a JAX function",
        "errors files loops nets/memory nets/ir nets/registry nets/graph nets/schedule nets/blobs",
    ),
    "nets/autodiff": Room("the backward net of a net", "errors nets/ir nets/registry nets/gradient_maker nets/graph"),
    "nets/ops": Room(
        "the operators; in contrib those that recurrent networks do not need",
        "errors jaxprs loops nets/memory nets/ir nets/registry nets/gradient_maker nets/proto nets/graph "
        "nets/schedule nets/lowering nets/autodiff",
    ),
    "nets/recurrent": Room(
        "step nets to recurrent networks",
        "errors nets/ir nets/gradient_maker nets/graph nets/builder nets/lowering nets/autodiff nets/ops",
    ),
    "nets/cells": Room("recurrent cells, with Caffe2's interface", "errors files nets/ir nets/builder nets/recurrent"),
    "nets/plans": Room(
        "loops over nets, run by the host", "errors nets/ir nets/execution_step nets/proto nets/graph nets/lowering"
    ),
    "corpus": Room("texts as files of tokens", "errors files"),
    "models": Room("pretrained recurrent language models", "errors files nn"),
    "interop": Room("weights of other systems", "errors files nn"),
    "convert": Room(
        "JAX functions to nets; packages; nets to Python",
        "errors files jaxprs nets/ir nets/proto nets/graph nets/builder nets/lowering nets/ops nets/recurrent",
    ),
    "onnx": Room("ONNX models in and out (the extra `onnx`)", "errors files jaxprs loops nn nets/memory nets/proto"),
    "testing": Room(
        "proofs of gradients, of recurrent layers and of loops; asserts for users' tests",
        "errors jaxprs loops nets/ir nets/registry nets/gradient_maker nets/proto nets/graph nets/builder "
        "nets/blobs nets/lowering nets/autodiff nets/ops nets/cells convert",
    ),
    "train": Room(
        "training from a config",
        "errors files jaxprs progress loops nn nets/ir nets/registry nets/proto nets/graph nets/builder "
        "nets/schedule nets/blobs nets/lowering nets/autodiff nets/ops nets/recurrent nets/cells corpus models convert onnx",
    ),
    "bench": Room(
        "measurements",
        "errors files jaxprs progress loops nn nets/ir nets/proto nets/graph nets/lowering nets/autodiff convert onnx",
    ),
    "cli": Room(
        "the command `jrnn`: one sub-command calls one function",
        "errors version files progress loops nets/memory nets/ir nets/execution_step nets/proto nets/graph "
        "nets/lowering nets/ops nets/plans corpus models convert testing train bench",
    ),
    "__main__": Room("`python -m jrnn`", "cli"),
    "__init__": Room(
        "the public names, which load lazily",
        "errors version loops nn nets/__init__ nets/ir nets/gradient_maker nets/proto nets/graph nets/builder "
        "nets/lowering nets/autodiff nets/ops nets/recurrent nets/cells nets/plans corpus models interop convert "
        "onnx testing train bench",
    ),
}
SHAPES = {  # folder: its rooms (a module or folder directly in it), the imports between them, and the longest chain of these
    "jrnn": (19, 83, 8),
    "jrnn/loops": (19, 60, 8),
}
ONLY_IN = {  # third-party package: the rooms that may know it
    "google": {"nets/proto", "onnx"},
    "argparse": {"cli"},
    "flax": {"nn", "interop", "train", "bench"},
    "optax": {"train"},
    "orbax": {"train"},
    "rich": {"progress", "train", "cli", "bench", "testing"},
    "safetensors": {"files"},
    "onnx": {"onnx"},
    "onnxruntime": {"onnx", "bench"},
}
# fmt: off
LATE = {  # jax.experimental.rnn, which loads much and is for CUDA alone; Pallas, which loads much, for TPUs
    ("loops/scan/cudnn.py", "jax"), ("loops/kernels/persistent/mosaic.py", "jax"),
    # what a plain scan does not need, so that its first use takes little longer than `import jax`
    ("loops/scan/pipeline.py", "jrnn.loops.scan.cudnn"), ("loops/scan/pipeline.py", "jrnn.loops.segments"),
    ("loops/scan/scan.py", "jrnn.loops.segments"), ("loops/rules/residuals.py", "scipy"),
    ("jaxprs/by_numpy.py", "scipy"), ("loops/passes/arithmetic/factors.py", "scipy"),
    ("loops/scan/pipeline.py", "jrnn.loops.newton.api.solve"), ("loops/rules/in_chunks.py", "jrnn.loops.chunks.choice"),
    ("loops/kernels/native/__init__.py", "jrnn.loops.kernels.native.runner.native_of"),
    ("loops/backends/cpu.py", "jrnn.loops.kernels.native.runner.called"),
    ("loops/backends/tpu.py", "jrnn.loops.kernels.persistent.runner.kernel_of"),
    ("loops/backends/gpu.py", "jrnn.loops.passes.one_kernel.one_kernel_a_stage"),
    ("loops/backends/gpu.py", "jrnn.loops.passes.packed.pack_stacks"),
    ("loops/backends/accelerator.py", "jrnn.loops.loop.derived"),
    *(("loops/rules/differentiation.py", f"jrnn.loops.rules.residuals.{name}")
      for name in ("Stacks", "step_storing_less")),
    ("train/exports.py", "jrnn.onnx.to_onnx"),  # an extra
}
OPTIONAL = {
    "torch", "matplotlib", "caffe2", "keras", "onnx", "tensorboardX", "pydoc_data", "flax", "hypothesis",
    "pkg_resources", "sklearn", "lmdb", "onnxruntime", "haiku", "equinox", "pytest", "tokenizers", "mamba2_jax",
    "recurrentgemma", "memax",
}
# fmt: on
FILES = sorted(p for p in ROOT.rglob("*.py"))
NAMES = {str(p.relative_to(ROOT)): p for p in FILES}


def room(path: Path) -> str:
    """The room that a file belongs to."""
    parts = path.relative_to(ROOT).with_suffix("").parts
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


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_what_it_may(name):
    imported = {}
    for path in FILES:
        if room(path) != name:
            continue
        for line, target, package, local in imports(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            if target is None:
                allowed = ONLY_IN.get(package)
                assert allowed is None or name in allowed, f"{where}: {package} is only for {sorted(allowed or ())}"
                late = package in OPTIONAL or (str(path.relative_to(ROOT)), package) in LATE
                assert not local or late, f"{where}: imports {package} inside a function"
                continue
            late = (str(path.relative_to(ROOT)), ".".join(["jrnn", *target])) in LATE
            assert not local or late, f"{where}: imports from jrnn inside a function"
            imported.setdefault(room(_file(target)), where)
    imported.pop(name, None)
    allowed = ROOMS[name].imports.split()
    for there, where in imported.items():
        assert there in allowed, f"{where}: {name} may not import {there}; what it may is in ROOMS, here"
    assert not set(allowed) - set(imported), "allowed here, but no longer imported"


def test_every_file_has_a_room_and_every_room_a_floor():
    assert {room(path) for path in FILES} == set(ROOMS)
    below = []
    for name, here in ROOMS.items():  # each room stands after all that it imports, so there is no circle
        assert set(here.imports.split()) <= set(below), name
        below.append(name)


def table() -> str:
    """The rooms as the table of CONTRIBUTING.md."""
    rows = ["| room | what it holds | it imports |", "|---|---|---|"]
    for name, here in ROOMS.items():
        if "__" not in name:
            imports = ", ".join(f"`{other}`" for other in here.imports.split())
            rows.append(f"| `{name}` | {here.holds} | {imports} |")
    return "\n".join(rows)


def test_the_page_has_the_table_of_rooms():
    assert table() in PAGE.read_text(encoding="utf-8"), f"CONTRIBUTING.md must have this table:\n\n{table()}"


@pytest.mark.parametrize("folder", SHAPES)
def test_rooms_arrows_and_floors(folder):
    """The counts that a drawing of the imports shows: fewer is better, and is kept."""
    top = ROOT.parent / folder
    arrows = {}
    for path in FILES:
        if path.is_relative_to(top):
            here = path.relative_to(top).with_suffix("").parts[0]
            there = {_file(target) for _, target, _, _ in imports(path) if target is not None}
            rooms = {p.relative_to(top).with_suffix("").parts[0] for p in there if p.is_relative_to(top)}
            arrows.setdefault(here, set()).update(rooms - {here})
    floors = {}
    while len(floors) < len(arrows):
        lowest = {room: below for room, below in arrows.items() if room not in floors and below <= floors.keys()}
        assert lowest, f"a circle among {sorted(arrows.keys() - floors.keys())}"
        floors |= {room: 1 + max((floors[other] for other in below), default=0) for room, below in lowest.items()}
    shape = len(arrows), sum(map(len, arrows.values())), max(floors.values())
    message = (
        "more: put what a new import brings where it belongs; fewer: lower the number in SHAPES, so that it stays so"
    )
    assert dict(zip(("rooms", "arrows", "floors"), shape)) == dict(
        zip(("rooms", "arrows", "floors"), SHAPES[folder])
    ), message


def test_the_reading_paths_are_short():
    page = PAGE.read_text(encoding="utf-8")
    paths = re.findall(r"read in `(\w+)` ((?:`[\w/]+`(?:,\s+| and\s+|))+)", page)
    assert [wing for wing, _ in paths] == ["loops", "nets"]
    for wing, names in paths:
        files = [ROOT / wing / f"{name}.py" for name in re.findall(r"`([\w/]+)`", names)]
        assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) < 1800, wing


def test_the_table_of_the_loops_names_what_exists():
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index("In `loops`, read") :].split("\n\n")[1]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+(?:\.py|/))`", row.split(" | ")[0])}
    there = {p.name + "/" * p.is_dir() for p in (ROOT / "loops").iterdir() if p.is_dir() or p.suffix == ".py"}
    assert named == there - {"__init__.py", "__pycache__/"}


def test_the_map_names_what_exists():
    page = (ROOT.parent / "docs" / "notes" / "map.md").read_text(encoding="utf-8")
    places = re.findall(r"`(\w+/[\w/]+(?:\.py)?)`(?::\s+`(\w+)`)?", page)
    assert len(places) > 30
    for file, name in places:
        path = (ROOT.parent if file.startswith("tests/") else ROOT) / file
        assert path.exists(), file
        assert not name or re.search(rf"^(def|class) {name}\b", path.read_text(), re.MULTILINE), (file, name)


@pytest.mark.parametrize(
    "name", [n for n in NAMES if room(NAMES[n]) in ("nets/ir", "nets/proto", "nets/graph", "errors")]
)
def test_no_jax_at_the_bottom(name):
    assert not {p for _, t, p, _ in imports(NAMES[name]) if t is None} & {"jax", "jaxlib"}


def test_no_cycles_between_files():
    edges = {
        path: {file for _, target, _, _ in imports(path) if target is not None and (file := _file(target)) != path}
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


def test_the_name_of_a_class_has_one_meaning():
    """Two wings have an LSTM's cell, a GRU's and a Mamba-2 each. Every other name is defined once."""
    places = {}
    for name, path in NAMES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    several = {cls: where for cls, where in places.items() if len(where) > 1}
    assert several.keys() == {"GRUCell", "LSTMCell", "Mamba2"}, several


def test_mechanisms_name_no_operator():
    """Operators' names stand in content alone; what autodiff emits itself is a constant of the registry."""
    types = {d.type for d in registry.registered()}
    # fmt: off
    mechanisms = {
        "errors", "loops", "nets/autodiff", "nets/builder", "nets/gradient_maker", "nets/ir",
        "nets/lowering", "nets/proto", "nets/schedule", "nn", "testing/gradients",
    }
    # fmt: on
    words = {"XavierFill", "Split"}  # what NetBuilder.param fills with where nothing else is said; a node of plans
    for name, path in NAMES.items():
        if not name.startswith(tuple(mechanisms)):
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
