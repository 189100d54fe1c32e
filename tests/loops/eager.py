"""Plans that move everything that can leave a loop, whatever it costs, so that small loops in tests exercise every pass.

Importing it patches what `compile.py` decides. Outside of the context `eager_passes` nothing changes.
"""

from __future__ import annotations

import functools

import jax

from jrnn.loops import compile as compiling
from jrnn.loops.passes import movable, transpose_constant_rhs
from jrnn.loops.strategies.context import Context
from jrnn.loops.strategies.nodes import Split, SplitInTiles, Steps

# A number of steps to run at a time, 0 for all, or None.
eager_passes = jax.make_user_context(None)

_is_brief = compiling._is_brief
_has_one_step = compiling._has_one_step
_cheapest = compiling.cheapest
_with_transposed_constants = compiling._with_transposed_constants
_strategies = dict(compiling.ON_CPU)


def is_eager():
    return eager_passes.value is not None


def everything(context):
    if not is_eager():
        return _strategies["scan"](context)
    split_loop = context.split(None)
    node = Split(split_loop, Steps(split_loop.residual))
    if eager_passes.value:
        node = SplitInTiles(node, eager_passes.value)
    finish = functools.partial(node.with_inner, functools.partial(_written_for_xla, context))
    return [context.candidate("scan", node, "everything", finish=finish)]


def _written_for_xla(context, residual):
    from jrnn.loops.strategies.try_split import _written_for_xla

    return _written_for_xla(context, residual)


def chosen(candidates, bounds):
    of_all = [candidate for candidate in candidates if candidate.label == "everything"]
    return (of_all[0], ()) if of_all else _cheapest(candidates, bounds)


def all_movable(context):
    also_sums = is_eager() and not context.target.is_estimated
    of_gradient = context.provenance.of_gradient(context.loop.reverse)
    return movable(context.split(None), also_sums or of_gradient)


def unless_eager(strategy):
    def try_strategy(context):
        is_left_out = is_eager() and context.options.executor == "auto"
        return [] if is_left_out else strategy(context)

    return try_strategy


def transposed(loop, *args):
    return transpose_constant_rhs(loop) if is_eager() else _with_transposed_constants(loop, *args)


compiling._is_brief = lambda *args: not is_eager() and _is_brief(*args)
compiling._has_one_step = lambda *args: not is_eager() and _has_one_step(*args)
compiling._with_transposed_constants = transposed
compiling.cheapest = chosen
compiling.ON_CPU["scan"] = everything
Context.movable = functools.cached_property(all_movable)
Context.movable.__set_name__(Context, "movable")
for name in ("arithmetic", "native"):
    compiling.ON_CPU[name] = unless_eager(_strategies[name])
