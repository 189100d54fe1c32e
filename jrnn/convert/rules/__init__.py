"""The rules, by family. Importing this package fills the table."""

from . import control, conv, elementwise, matmul, reduce, scans, shapes
from .table import RULES, rule

__all__ = ["RULES", "control", "conv", "elementwise", "matmul", "reduce", "rule", "scans", "shapes"]
