"""The conversion rules, by family. Importing this package fills the table `jrnn.convert.emit.RULES`."""

from jrnn.convert.rules import control, elementwise, indexing, products, reduce, shapes
