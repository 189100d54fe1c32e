"""JAX functions become nets, and nets become Python files."""

from .from_jax import from_jax
from .package import Package

__all__ = ["Package", "from_jax"]
