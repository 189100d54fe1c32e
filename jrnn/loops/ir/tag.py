"""The tag on a loop: XLA metadata that JAX carries through every transformation of the equation.

`jrnn.scan` and `optimize_scans` set it, and the rules of `install.py` read it. It holds the caller's options, and what
differentiation leaves for the lowering. It is JSON in one string: of what one can put on an equation, JAX keeps nothing but
metadata through all its transformations, and metadata are strings that it writes into programs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax

from jrnn.jaxprs import TAG
from jrnn.jaxprs.jax_internals import set_xla_metadata

AUTO = "auto"  # the executor that leaves the choice to `compile.py`


class Options(NamedTuple):
    """The caller's options.

    Attributes:
        executor: "auto", or the name of a strategy.
        recompute: None, "contractions", or the names of values that the reverse pass computes again.
        strict: raise if the loop would fall back to `jax.lax.scan`.
        memory: how many times the temporary memory of `jax.lax.scan` the loop may need, or None.
        verify: compare derived programs with the loop before they are used.
        compile_budget: how many seconds longer than `jax.lax.scan` the program of the loop may compile, or None.
    """

    executor: str = AUTO
    recompute: str | tuple[str, ...] | None = None
    strict: bool = False
    memory: float | None = None
    verify: bool = True
    compile_budget: float | None = None


class Provenance(NamedTuple):
    """What the rule for differentiation leaves for the lowering of the loops that JAX makes of one loop.

    Attributes:
        written_reverse: the direction in which the caller wrote the loop, or None for a loop that was not differentiated.
        stores_less: its step has the derivative rule of `derivatives/residuals.py`.
        xs_bytes: the bytes of its xs, which are not temporary.
        gradient_bytes: the bytes of gradients of constants that JAX's reverse loop makes at each step.
    """

    written_reverse: bool | None = None
    stores_less: bool = False
    xs_bytes: int = 0
    gradient_bytes: int = 0

    @property
    def is_differentiated(self) -> bool:
        """Whether JAX made the loop by differentiating one of the caller's."""
        return self.written_reverse is not None

    def of_gradient(self, reverse: bool) -> bool:
        """Returns True for a loop in direction `reverse` that JAX made by transposition: its sums are gradients."""
        return self.is_differentiated and self.written_reverse != reverse


class Tag(NamedTuple):
    """The contents of a tag."""

    options: Options = Options()
    provenance: Provenance = Provenance()


_PLAIN = "plain"  # the tag of what `plain_scans` leaves to JAX

# False where JAX lacks names that the rules need: tagged loops then run as `jax.lax.scan`.
rules_available = True

# True where `plain_scans` leaves the loops of `jrnn.scan` to JAX.
plain = jax.make_user_context(False)

# False where `unverified` leaves out the comparison of derived programs with their loops.
verified = jax.make_user_context(True)


def tagged(tag: Tag) -> AbstractContextManager[None]:
    """Tags every scan that is traced in this context."""
    return set_xla_metadata(
        **metadata(tag._replace(options=tag.options._replace(verify=verified.value)))
    )


def metadata(tag: Tag) -> dict[str, str]:
    """Returns the tag, which is short, for JAX writes it at each equation: the fields that differ from their defaults."""
    fields: dict[str, Any] = {}
    for part in tag:
        for name, value in part._asdict().items():
            if value != part._field_defaults[name]:
                fields[name] = value
    return {TAG: json.dumps(fields)}


def untagged() -> AbstractContextManager[None]:
    """Leaves what is traced in this context untagged."""
    return set_xla_metadata(**{TAG: None})


def plain_loops() -> AbstractContextManager[None]:
    """Tags what is traced in this context as plain: a tag around it, such as one around its gradient, does not hold."""
    return set_xla_metadata(**{TAG: _PLAIN})


def tag_in(metadata: Mapping[str, Any] | None) -> Tag | None:
    """Returns the tag in an equation's metadata, or None if it has none, or if tags are not read."""
    text = (metadata or {}).get(TAG)
    if text is None or text == _PLAIN or not rules_available:
        return None
    fields = json.loads(text)
    if isinstance(fields.get("recompute"), list):
        fields["recompute"] = tuple(fields["recompute"])
    options = {name: value for name, value in fields.items() if name in Options._fields}
    provenance = {name: value for name, value in fields.items() if name in Provenance._fields}
    return Tag(Options(**options), Provenance(**provenance))
