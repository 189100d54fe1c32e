"""The rules, by family. Importing this package fills the table."""

from jrnn.convert.rules import control, conv, defined, elementwise, indexing, matmul, order, reduce, scans, shapes
from jrnn.convert.rules.table import RULES, rule

__all__ = [
    "RULES",
    "control",
    "conv",
    "defined",
    "elementwise",
    "indexing",
    "matmul",
    "order",
    "reduce",
    "rule",
    "scans",
    "shapes",
]
