"""A call of `scan`, which the stages of its pipeline change and pass on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Results = tuple[Any, Any]


class ScanCall(NamedTuple):
    """A call of `scan`: a loop and its options, which are those of `scan` after the checks.

    Attributes:
        strategy: the row of the strategy that the caller asked for, or None.
        newton: the options of the executor "newton", or None for other executors.
        shard: where this device's segment stands in time, if time is divided among devices.
    """

    step: Callable
    init: Any
    xs: Any
    length: Any
    reverse: Any
    unroll: Any
    strategy: Any
    newton: Any = None
    lengths: Any = None
    resets: Any = None
    reset_state: Any = None
    mask: Any = None
    until: Callable | None = None
    recompute: Any = None
    strict: bool = False
    memory: float | None = None
    shard: Any = None
    split_transpose: bool = False

    @property
    def executor(self) -> str:
        """What the caller asked for, by name."""
        return "auto" if self.strategy is None else self.strategy.name

    @property
    def steps(self) -> Any:
        """T, or None if it is unknown, which `jax.lax.scan` reports."""
        leaves = jax.tree.leaves(self.xs)
        return next((jnp.shape(leaf)[0] for leaf in leaves if jnp.ndim(leaf)), self.length)


NextStage = Callable[[ScanCall], Results]  # the stages that follow
