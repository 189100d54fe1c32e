"""The tag on a loop: XLA metadata that JAX carries through every transformation of the equation.

`jrnn.scan` and `optimize_scans` set it, and `rules` read it. It holds the caller's options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax

from jrnn.jaxprs import TAG
from jrnn.jaxprs.jax_internals import set_xla_metadata


class Options(NamedTuple):
    """The options of a scan.

    Attributes:
        executor: "auto", or the name of a strategy.
        recompute: None, "contractions", or the names of values that the reverse pass computes again.
        strict: raise if the loop would fall back to `jax.lax.scan`.
        memory: how many times the temporary memory of `jax.lax.scan` the loop may need, or None.
        written: for a loop that JAX differentiated, the direction in which the caller wrote it (`reverse`), or None.
        given: the bytes of that loop's xs, which are not temporary.
        gradients: the bytes of gradients of constants that JAX's reverse loop makes at each step.
        stores_less: its step has the derivative rule of `rules/residuals.py`.
        verify: compare derived programs with the loop before they are used.
    """

    executor: str = "auto"
    recompute: str | tuple[str, ...] | None = None
    strict: bool = False
    memory: float | None = None
    written: bool | None = None
    stores_less: bool = False
    given: int = 0
    gradients: int = 0
    verify: bool = True

    def of_gradient(self, reverse: bool) -> bool:
        """Returns True for a loop in direction `reverse` that JAX made by transposition: its sums are gradients."""
        return self.written is not None and self.written != reverse


_PLAIN = "plain"  # the tag of what `plain_scans` leaves to JAX

# False where JAX lacks names that the rules need: tagged loops are those of `jax.lax.scan`.
are_read = True

# True where `plain_scans` leaves the loops of `jrnn.scan` to JAX.
plain = jax.make_user_context(False)


# False where `unverified` leaves out the comparison of derived programs with their loops.
verified = jax.make_user_context(True)


def tagged(options: Options) -> AbstractContextManager[None]:
    """Tags every scan that is traced in this context."""
    return set_xla_metadata(**metadata(options._replace(verify=verified.value)))


def metadata(options: Options) -> dict[str, str]:
    """Returns the tag, which is short, for JAX writes it at each equation: the options that differ from their defaults."""
    return {TAG: json.dumps({k: v for k, v in options._asdict().items() if v != Options._field_defaults[k]})}


def untagged() -> AbstractContextManager[None]:
    """Leaves what is traced in this context untagged."""
    return set_xla_metadata(**{TAG: None})


def left_to_jax() -> AbstractContextManager[None]:
    """Tags what is traced in this context as plain: a tag around it, such as one around its gradient, does not hold."""
    return set_xla_metadata(**{TAG: _PLAIN})


def options_in(metadata: Mapping[str, Any] | None) -> Options | None:
    """Returns the options in an equation's metadata, or None if it has no tag, or if tags are not read."""
    text = (metadata or {}).get(TAG)
    if text is None or text == _PLAIN or not are_read:
        return None
    options = Options(**json.loads(text))
    return options._replace(recompute=tuple(options.recompute)) if isinstance(options.recompute, list) else options
