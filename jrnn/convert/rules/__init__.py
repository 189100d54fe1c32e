"""The conversion rules, by family. Importing this package fills the table `jrnn.convert.emit.RULES`.

In: one equation of a jaxpr and the `Emitter`. Out: the operators that compute it. Read `elementwise.py` first.
"""

from jrnn.convert.rules import control, elementwise, indexing, products, reduce, shapes
