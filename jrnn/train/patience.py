"""When to stop early: how long ago the best validation was."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Patience:
    """Counts validations without a better loss.

    >>> patience = Patience(2)
    >>> [patience.see(loss) for loss in (3.0, 2.0, 2.5, 2.1)], patience.is_over
    ([True, True, False, False], True)
    """

    limit: int  # after so many it is over; 0: never
    best: float = math.inf
    since: int = 0

    @classmethod
    def after(cls, limit: int, losses: Iterable[float]) -> Patience:
        """As it is after validations with these losses."""
        patience = cls(limit)
        for loss in losses:
            patience.see(loss)
        return patience

    def see(self, loss: float) -> bool:
        """Whether a validation's loss is the best so far."""
        better = loss < self.best
        self.best, self.since = (loss, 0) if better else (self.best, self.since + 1)
        return better

    @property
    def is_over(self) -> bool:
        return 0 < self.limit <= self.since
