"""Equal equations, evaluated once."""

from __future__ import annotations

from jrnn.executor import jaxprs
from jrnn.executor.loop import Loop


def distinct(loop: Loop) -> Loop:
    """Evaluates each distinct equation once. Equations with side effects or jaxprs of their own stay."""
    return loop.rewritten(lambda env: jaxprs.distinct(loop.eqns, env))
