"""Conversion of JAX functions to nets, and packages of nets.

In: a JAX function with example arguments, or a net. Out: a `Package` of two nets, or files of it. Read `from_jax.py` first.
"""

from jrnn.convert.export import export_package, load_package, write_predictor
from jrnn.convert.from_jax import example_of, from_factory, from_jax, load_function
from jrnn.convert.package import Package, Predictor

__all__ = [
    "Package",
    "Predictor",
    "export_package",
    "from_jax",
    "load_package",
    "write_predictor",
]
