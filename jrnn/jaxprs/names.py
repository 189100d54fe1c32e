"""The names outside JAX's stable interface that jrnn uses, except for those in `loops/rules`.

`jax.core`, `jax.extend`, `jax.experimental` and the names of primitives may change with every release of JAX. Then this is
the file to edit; tests/loops/test_jax_names.py checks what jrnn expects of each name.
"""

from typing import Any

import jax
from jax.core import Tracer
from jax.experimental import topologies as topologies
from jax.experimental.multihost_utils import broadcast_one_to_all as broadcast_one_to_all
from jax.experimental.multihost_utils import process_allgather as process_allgather
from jax.extend.core import ClosedJaxpr as ClosedJaxpr  # type: ignore[attr-defined, unused-ignore]
from jax.extend.core import Primitive as Primitive
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun
from jax.extend.source_info_util import summarize
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir


def platform_of(backend: Any) -> str:
    """Returns the platform that programs of a backend are lowered for, such as "cuda" where `backend.platform` is "gpu".

    Args:
        backend: `device.client` of a device.
    """
    return getattr(backend, "_raw_platform", backend.platform)


def is_traced(value: Any) -> bool:
    """Whether a value is a tracer, whose elements cannot be read.

    >>> is_traced(1.0)
    False
    """
    return isinstance(value, Tracer)


class _Staged(Exception):
    """Is raised where JAX asks for types instead of a value."""


_value_p = Primitive("value")
_value_p.def_impl(lambda: False)


@_value_p.def_abstract_eval
def _() -> Any:
    raise _Staged


def is_staged() -> bool:
    """Whether JAX only traces here, as inside of `jax.jit`; inside of `jax.grad` and `jax.vmap` alone it computes.

    >>> is_staged(), jax.grad(lambda x: x * is_staged())(1.0).item(), jax.jit(lambda: is_staged())().item()
    (False, 0.0, True)
    """
    try:
        return bool(_value_p.bind())
    except _Staged:
        return True


def expanded(eqn: Any) -> Any | None:
    """The jaxpr to which JAX expands an equation when it lowers it, or None if it lowers the equation itself.

    In jax 0.12, `jnp.searchsorted` is such an equation.
    """
    if eqn.primitive.name != "call_hi_primitive" or eqn.effects:
        return None
    primitive = eqn.params["_prim"]
    return jax.make_jaxpr(lambda *args: jax.tree.leaves(primitive.expand(*args)))(*(v.aval for v in eqn.invars))


def source_line(eqn: Any) -> str:
    """The line of the user's code that an equation of a jaxpr comes from, as "/path/file.py:3:4 (function)"."""
    return summarize(eqn.source_info)
