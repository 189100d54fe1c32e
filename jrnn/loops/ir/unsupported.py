"""The one exception of passes, strategies and kernels that do not apply to a loop."""

from __future__ import annotations

from collections.abc import Sequence

from jrnn.jaxprs import Eqn
from jrnn.jaxprs.jax_internals import source_line

CARRY = "{carry}"  # in a reason: the carry that it is about, which users know by another name


class Unsupported(Exception):
    """Raised, with the reason, by a pass, a strategy or a kernel that does not apply to a loop.

    Whoever raises it knows what is in the way, and what a user can do about it. Whoever catches it knows what the user
    calls the carries. `str` of it is the reason, with S for the carry.

    Args:
        reason: why it does not apply, with `CARRY` where the carry is named.
        eqn: the operation that is in the way, if there is one.
        remedy: what the user can do about it, or "".
    """

    def __init__(self, reason: str, eqn: Eqn | None = None, remedy: str = ""):
        super().__init__(reason)
        self.reason = reason
        self.eqn = eqn
        self.remedy = remedy

    def __str__(self) -> str:
        return self.reason.replace(CARRY, "S")

    def explained(self, names: Sequence[str] = ()) -> str:
        """Returns the reason with the names of the carries, the place in the user's code, and the remedy.

        >>> print(Unsupported(f"{CARRY} is a matrix", remedy="use a vector").explained(["carry['memory']"]))
        carry['memory'] is a matrix; use a vector
        """
        text = str(self)
        if names:
            carries = " and ".join(names)
            is_named = CARRY in self.reason
            text = self.reason.replace(CARRY, carries) if is_named else f"{carries}: {text}"
        if self.eqn is not None:
            text += f" at {source_line(self.eqn)}"
        if self.remedy:
            text += f"; {self.remedy}"
        return text
