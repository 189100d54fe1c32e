"""Conversion of JAX functions to nets, and of nets to Python files."""

from jrnn.convert.export import export_package, load_package, write_predictor
from jrnn.convert.from_jax import from_jax
from jrnn.convert.package import Package
from jrnn.convert.predictor import Predictor
from jrnn.convert.target import example_of, from_factory, load_function, read_nets
from jrnn.convert.to_python import to_python, write_python

__all__ = [
    "Package",
    "Predictor",
    "example_of",
    "export_package",
    "from_factory",
    "from_jax",
    "load_function",
    "load_package",
    "read_nets",
    "to_python",
    "write_predictor",
    "write_python",
]
