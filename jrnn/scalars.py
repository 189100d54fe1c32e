"""Scalars of numpy and JAX as Python numbers."""

from typing import Any


def plain(value: Any) -> Any:
    """A scalar of numpy or JAX as a Python number or bool; anything else unchanged.

    >>> import numpy as np
    >>> plain(np.int32(3)), plain(np.asarray(True)), plain("x")
    (3, True, 'x')
    """
    kind = getattr(getattr(value, "dtype", None), "kind", None)  # keys of JAX have a dtype without a kind
    return value.item() if getattr(value, "ndim", None) == 0 and kind and kind in "biuf" else value
