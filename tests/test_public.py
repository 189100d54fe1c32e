"""The public surface: `import jrnn` is enough, and nothing loads before it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jrnn

ROOT = Path(jrnn.__file__).parent


PROGRAM = """
import importlib.util, sys, jrnn
assert not {'jax', 'numpy', 'flax', 'jrnn.nets.ops', 'jrnn.loops'} & set(sys.modules)
jrnn.scan
import numpy as np
assert not {'flax', 'google', 'jrnn.nets.ops', 'jrnn.nets.lowering'} & set(sys.modules)
unneeded = {f'jrnn.loops.{name}' for name in (
    'chunks', 'scan.cudnn', 'host_devices', 'host_memory', 'kernels.persistent.runner', 'kernels.native.runner',
    'newton.api', 'online', 'segments', 'while_loops.trips')}  # that a plain scan does not need
for name in unneeded:
    assert importlib.util.find_spec(name), name
jrnn.scan(lambda c, x: (c + x, c), 0.0, np.ones(3))
assert not unneeded & set(sys.modules), unneeded & set(sys.modules)

import jax
net = jrnn.read_net('op { type: "Tanh" input: "x" output: "y" } external_input: "x"')
assert 'jrnn.nets.ops' not in sys.modules
traced = jax.make_jaxpr(lambda x: jrnn.to_jax(net, ['y'])({'x': x})['y'])(1.0)
assert [str(e.primitive) for e in traced.eqns] == ['tanh'], traced

jrnn.nn.LSTM, jrnn.train.load_config, jrnn.interop.from_flax, jrnn.testing.Layer, jrnn.onnx.Spec
jrnn.errors.ScanError, jrnn.graph.show, jrnn.cells.LSTM
"""


@pytest.mark.exhaustive
def test_import_jrnn_is_enough_and_nothing_loads_before_it_is_used():
    """Operators load when the table is read, also while JAX traces."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


@pytest.mark.parametrize("name", jrnn.__all__)
def test_a_name_is_there(name):
    assert getattr(jrnn, name) is not None
    assert name in dir(jrnn)


def test_type_checkers_see_what_is_there():
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    shown = {alias.asname: f"{node.module}.{alias.name}" for node in block.body for alias in node.names}
    assert shown == {**{name: f"{home}.{name}" for name, home in jrnn._HOMES.items()}, **jrnn._MODULES}
    assert set(jrnn.__all__) == {*shown, "__version__"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jrnn' has no attribute 'scam'"):
        _ = jrnn.scam


@pytest.mark.parametrize("name", jrnn._MODULES)
def test_a_module_lists_what_it_has(name):
    module = getattr(jrnn, name)
    for public in getattr(module, "__all__", ()):
        assert hasattr(module, public), public
