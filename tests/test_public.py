"""The public surface: `import jrnn` is enough, and nothing loads before it is used."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jrnn

ROOT = Path(jrnn.__file__).parent


FIRST_SCAN = """
import importlib.util, sys, jrnn
assert not {'jax', 'numpy', 'flax', 'jrnn.nets.ops', 'jrnn.loops'} & set(sys.modules)
jrnn.scan
import numpy as np
assert not {'flax', 'google', 'jrnn.nets.ops', 'jrnn.nets.lowering'} & set(sys.modules)
unneeded = {f'jrnn.{name}' for name in (
    'jaxprs.by_numpy', 'jaxprs.resized', 'loops.affine.chunkwise', 'loops.explanations', 'loops.scan.host',
    'loops.kernels.native.runner', 'loops.ir.derived', 'loops.newton.api',
    'loops.derivatives.online', 'loops.derivatives.residuals', 'loops.passes.gpu_one_kernel',
    'loops.passes.gpu_packed_outputs',
    'loops.scan.optimize', 'loops.segments', 'loops.while_loops')}  # that a plain scan does not need
for name in unneeded:
    assert importlib.util.find_spec(name), name
jrnn.scan(lambda c, x: (c + x, c), 0.0, np.ones(3))
loaded = {name for name in sys.modules if name.partition('.')[0] == 'jrnn'}
assert not unneeded & loaded, unneeded & loaded
"""

ALL = """
import sys, jax, jrnn
net = jrnn.read_net('op { type: "Tanh" input: "x" output: "y" } external_input: "x"')
assert 'jrnn.nets.ops' not in sys.modules
traced = jax.make_jaxpr(lambda x: jrnn.to_jax(net, ['y'])({'x': x})['y'])(1.0)
assert [str(e.primitive) for e in traced.eqns] == ['tanh'], traced

jrnn.nn.LSTM, jrnn.train.load_config, jrnn.interop.from_flax, jrnn.testing.Layer, jrnn.onnx.Spec
jrnn.errors.ScanError, jrnn.nets.graph.show, jrnn.nets.cells.LSTM
"""


def test_a_first_scan_loads_only_what_it_needs():
    """Modules are what a first scan costs, and it must take at most 1.2 of the time of `import jax` and its first scan."""
    subprocess.run([sys.executable, "-c", FIRST_SCAN], check=True)


@pytest.mark.exhaustive
def test_import_jrnn_is_enough():
    """Operators load when the table is read, also while JAX traces."""
    subprocess.run([sys.executable, "-c", ALL], check=True)


def test_no_lazy_name_is_a_module():
    """Importing a module of that name would set the attribute to the module."""
    for package in (jrnn, jrnn.loops, jrnn.nets):
        files = {file.stem for file in Path(package.__file__).parent.iterdir()}
        assert not files & {name for names in package._HOMES.values() for name in names}


@pytest.mark.parametrize("name", jrnn.__all__)
def test_a_name_is_there(name):
    assert getattr(jrnn, name) is not None
    assert name in dir(jrnn)


def test_type_checkers_see_what_is_there():
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    shown = {
        alias.asname: f"{node.module}.{alias.name}" for node in block.body for alias in node.names
    }
    names = {name: f"jrnn.{home}.{name}" for home, names in jrnn._HOMES.items() for name in names}
    assert shown == names | {name: f"jrnn.{name}" for name in jrnn._MODULES}
    assert set(jrnn.__all__) == {*shown, "__version__"}


def test_the_face_is_small_and_shows_no_imports():
    """What is not listed lives in its module, which loads when it is first used."""
    assert len(jrnn.__all__) <= 32
    assert {name for name in dir(jrnn) if not name.startswith("_")} <= set(jrnn.__all__)
    assert (
        jrnn.loops.scan_statistics.__module__ == "jrnn.loops.newton.api"
        and jrnn.nets.Op is jrnn.nets.ir.Op
    )


def test_every_folder_says_what_comes_in_what_goes_out_and_which_file_to_read_first():
    for file in ROOT.rglob("__init__.py"):
        head = " ".join(
            (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "")
            .split("\n\n")[1]
            .split()
        )
        said = re.fullmatch(r"In: .+\. Out: .+\. Read `([\w/.]+)` first\.", head)
        assert said and (file.parent / said[1]).exists(), (
            f"{file}: write 'In: ... Out: ... Read `file.py` first.'"
        )


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jrnn' has no attribute 'scam'"):
        _ = jrnn.scam


@pytest.mark.parametrize("name", jrnn._MODULES)
def test_a_module_lists_what_it_has(name):
    module = getattr(jrnn, name)
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public), public
