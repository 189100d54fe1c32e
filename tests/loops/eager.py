"""Plans that move everything that can leave a loop, whatever it costs, so that small loops in tests exercise every pass.

Importing it patches the choice of plans. Outside of the context `eager_passes` nothing changes.
"""

from __future__ import annotations

import jax

from jrnn.loops.strategies import InChunks, Split, Steps, accelerator, backend, cpu
from jrnn.loops.strategies.candidates import Choice
from jrnn.loops.strategies.search import Search

# A number of steps to run at a time, 0 for all, or None.
eager_passes = jax.make_user_context(None)

_brief, _one, _may = cpu._is_brief, backend._has_one_step, cpu._turning_may_pay
_pays, _keeps, _others = cpu._turning_pays, accelerator._keeps_order, cpu._others
_candidates, _choose = Search.candidates, Search.choose


def _everything(search):
    if eager_passes.value is None:
        return _candidates(search)
    fission = search.split(None)
    node = Split(fission, Steps(fission.core))
    return [search.candidate("everything", InChunks(node, eager_passes.value) if eager_passes.value else node)]


def _first(search, candidates):
    return _choose(search, candidates) if eager_passes.value is None else Choice(candidates[0])


cpu._is_brief = lambda *args: eager_passes.value is None and _brief(*args)
backend._has_one_step = lambda *args: eager_passes.value is None and _one(*args)
cpu._turning_may_pay = lambda *args: eager_passes.value is not None or _may(*args)
cpu._turning_pays = lambda *args: eager_passes.value is not None or _pays(*args)
cpu._others = lambda *args: _others(*args) if eager_passes.value is None else []
accelerator._keeps_order = lambda *args: eager_passes.value is None and _keeps(*args)
Search.candidates, Search.choose = _everything, _first
