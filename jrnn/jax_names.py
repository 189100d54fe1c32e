"""The names of JAX outside its stable interface that jrnn uses, all but those of the executor.

`jax.extend` and `jax.experimental` may change with every release, and so may the names of primitives. When one of them
moves, this is the file to edit; tests/test_jax_names.py says what each must do.
"""

from typing import Any

import jax
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
    "expanded",
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


def expanded(eqn: Any) -> Any | None:
    """The jaxpr of an equation that JAX expands when it lowers it, or None for an ordinary one.

    From jax 0.12 on `jnp.searchsorted` makes such equations.
    """
    if eqn.primitive.name != "call_hi_primitive" or eqn.effects:
        return None
    primitive = eqn.params["_prim"]
    return jax.make_jaxpr(lambda *args: jax.tree.leaves(primitive.expand(*args)))(*(v.aval for v in eqn.invars))


def source_line(eqn: Any) -> str:
    """The user's line that an equation of a jaxpr comes from, as "/path/file.py:3:4 (function)"."""
    return summarize(eqn.source_info)
