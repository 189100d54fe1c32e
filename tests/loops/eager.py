"""Plans that move everything that can leave a loop, whatever it costs, so that small loops in tests exercise every pass.

Importing it patches the choice of plans. Outside of the context `eager_passes` nothing changes.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import jax

from jrnn.loops.passes import movable
from jrnn.loops.strategies import Problem, Split, SplitInChunks, Steps, chooser, problem, splits
from jrnn.loops.strategies.candidates import Choice
from jrnn.loops.strategies.table import STRATEGIES

# A number of steps to run at a time, 0 for all, or None.
eager_passes = jax.make_user_context(None)

_brief, _one, _cheapest, _propose = (
    chooser._is_brief,
    chooser._has_one_step,
    chooser.cheapest,
    splits.propose,
)
_may, _pays = problem._transposing_may_pay, problem._transposing_pays


def _everything(problem):
    if eager_passes.value is None:
        return _propose(problem)
    fission = problem.split(None)
    node = Split(fission, Steps(fission.core))
    return [
        problem.candidate(
            SplitInChunks(node, eager_passes.value) if eager_passes.value else node, "everything"
        )
    ]


def _chosen(candidates, bounds):
    everything = [candidate for candidate in candidates if candidate.label == "everything"]
    return Choice(everything[0]) if everything else _cheapest(candidates, bounds)


def _movable(problem):
    also_sums = eager_passes.value is not None and not problem.is_estimated
    return movable(
        problem.split(None), also_sums or problem.provenance.of_gradient(problem.loop.reverse)
    )


def _unless_eager(row):
    def propose(problem):
        return (
            ()
            if eager_passes.value is not None and problem.options.executor == "auto"
            else row.propose(problem)
        )

    return replace(row, propose=propose)


chooser._is_brief = lambda *args: eager_passes.value is None and _brief(*args)
chooser._has_one_step = lambda *args: eager_passes.value is None and _one(*args)
problem._transposing_may_pay = lambda *args: eager_passes.value is not None or _may(*args)
problem._transposing_pays = lambda *args: eager_passes.value is not None or _pays(*args)
chooser.cheapest, splits.propose = _chosen, _everything
Problem.movable = functools.cached_property(_movable)
Problem.movable.__set_name__(Problem, "movable")
STRATEGIES |= {name: _unless_eager(STRATEGIES[name]) for name in ("arithmetic", "native")}
