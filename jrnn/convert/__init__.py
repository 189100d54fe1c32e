"""JAX functions become nets, and nets become Python files."""

from .from_jax import from_jax
from .package import Package
from .target import from_factory, read_nets
from .to_python import to_python, write_python

__all__ = ["Package", "from_factory", "from_jax", "read_nets", "to_python", "write_python"]
