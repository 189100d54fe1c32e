"""The conversion rules, by family. Importing this package fills the table `jrnn.convert.emitter.RULES`.

In: one equation of a jaxpr and the `Emitter`. Out: the operators that compute it. Read `elementwise_rules.py` first.
"""

from jrnn.convert.rules import (
    control_rules,
    elementwise_rules,
    indexing_rules,
    product_rules,
    reduction_rules,
    shape_rules,
)
