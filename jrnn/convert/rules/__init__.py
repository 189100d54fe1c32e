"""The rules, by family. Importing this package fills the table."""

from . import conv, elementwise, matmul, reduce, shapes
from .table import RULES, rule

__all__ = ["RULES", "conv", "elementwise", "matmul", "reduce", "rule", "shapes"]
