"""Plans that move everything that can leave a loop, whatever it costs, so that small loops in tests exercise every pass.

Importing it patches the choice of plans. Outside of the context `eager_passes` nothing changes.
"""

from __future__ import annotations

import jax

from jrnn.loops import native
from jrnn.loops.costs import Candidate, Choice
from jrnn.loops.targets import accelerator, cpu

# A number of steps to run at a time, 0 for all, or None.
eager_passes = jax.make_user_context(None)

_pays, _keeps, _choice = cpu._turning_pays, accelerator._keeps_order, cpu._Search.choice


def _everything(search, take=None):
    chosen = _choice(search, take) if eager_passes.value is None or search.options.executor == native.NAME else None
    if chosen is not None and (eager_passes.value is None or getattr(chosen.chosen.plan, "native", None) is not None):
        return chosen
    fission = search._split(None)
    way = cpu._Way(fission, eager_passes.value or None)
    return Choice(Candidate("everything", search.estimator.split(fission).at_once(), way))


cpu._turning_pays = lambda *args: eager_passes.value is not None or _pays(*args)
accelerator._keeps_order = lambda *args: eager_passes.value is None and _keeps(*args)
cpu._Search.choice = _everything
