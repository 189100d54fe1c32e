"""Conversion of JAX functions to nets, and of nets to Python files.

In: a JAX function with example arguments, or a net. Out: a `Package` of two nets, files of it, or Python. Read
`from_jax.py` first.
"""

from jrnn.convert.export import export_package, load_package, read_nets, write_predictor
from jrnn.convert.from_jax import example_of, from_factory, from_jax, load_function
from jrnn.convert.package import Package, Predictor
from jrnn.convert.to_python import to_python, write_python

__all__ = [
    "Package",
    "Predictor",
    "export_package",
    "from_jax",
    "load_package",
    "write_predictor",
    "write_python",
]
