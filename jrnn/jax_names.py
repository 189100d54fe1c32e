"""The names of JAX outside its stable interface that jrnn uses, all but those of the executor.

`jax.extend` and `jax.experimental` may change with every release, and so may the names of primitives. When one of them
moves, this is the file to edit; tests/test_jax_names.py says what each must do.
"""

from typing import Any

from jax.core import Tracer
from jax.experimental import topologies
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather
from jax.extend.core import ClosedJaxpr as ClosedJaxpr  # type: ignore[attr-defined, unused-ignore]
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.extend.source_info_util import summarize
from jax.interpreters import ad, batching, mlir

__all__ = [
    "ClosedJaxpr",
    "Primitive",
    "ad",
    "batching",
    "broadcast_one_to_all",
    "is_traced",
    "jaxpr_as_fun",
    "mlir",
    "process_allgather",
    "source_line",
    "topologies",
]


def is_traced(value: Any) -> bool:
    """Whether a value is being traced, so that its elements cannot be read.

    >>> is_traced(1.0)
    False
    """
    return isinstance(value, Tracer)


def source_line(eqn: Any) -> str:
    """The user's line that an equation of a jaxpr comes from, as "/path/file.py:3:4 (function)"."""
    return summarize(eqn.source_info)
