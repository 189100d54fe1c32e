"""`explain`: how the loops of a program run, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from jrnn import jaxprs
from jrnn.jaxprs import primitives
from jrnn.jaxprs.jax_internals import metadata_of, scan_p
from jrnn.loops.compile import compile_loop
from jrnn.loops.costs.target import Target
from jrnn.loops.costs.times import size_in_words
from jrnn.loops.explanations.memory import temporary_bytes
from jrnn.loops.ir import ScanParams, observers, tag
from jrnn.loops.ir.observers import Plans
from jrnn.loops.plan import Plan

_NONE = (
    "no loop of jrnn.scan or optimize_scans() was lowered; call jrnn.scan in place of jax.lax.scan, or decorate the "
    "function with jrnn.optimize_scans(); jrnn.optimize_scans(everywhere=True) tags the loops of a whole program. "
    "A function that was compiled before is not lowered again"
)


class Explanation:
    """The plans of the tagged loops of a program. It prints how each loop runs, below the line of code it is at.

    As a context, it records the loops that are lowered while it is open, in all threads.

    Attributes:
        memory: the estimated bytes of temporary arrays of the program at the peak, without its arguments and results; None
            for a context, and where there is no cost model.
    """

    def __init__(
        self,
        plans: Plans | None = None,
        memory: int | None = None,
    ):
        self._plans = Plans() if plans is None else plans
        self.memory = memory

    @property
    def loops(self) -> tuple[Plan, ...]:
        """One plan for each loop that was lowered, in this order. A plan prints all that was decided."""
        with self._plans.lock:
            places = self._plans.places
            notes_at = self._plans.notes_at
            plans = []
            for plan, place in zip(self._plans, places):
                plans.append(_noted(plan, notes_at.get(place, [])))
            if plans:
                # The first plan has the notes of places without a loop.
                for place, notes in notes_at.items():
                    if place not in places:
                        plans[0] = _noted(plans[0], notes)
        return tuple(plans)

    def __enter__(self) -> Explanation:
        observers.subscribers.append(self._plans.record)
        return self

    def __exit__(self, *exc: object) -> None:
        observers.subscribers.remove(self._plans.record)

    def __str__(self) -> str:
        loops = self.loops
        places = tuple(self._plans.places)
        notes_at = self._plans.notes_at
        n_left = sum(plan.strategy == "lax.scan" for plan in loops)
        title = f"{len(loops)} loop{'s' * (len(loops) != 1)}: {len(loops) - n_left} rewritten, {n_left} left to lax.scan"
        lines = [title if loops or notes_at else _NONE]
        for place in dict.fromkeys(places or notes_at):
            lines.append(observers.place_text(place))
            texts = [plan.text() for plan, at in zip(loops, places) if at == place]
            lines += _each_once(texts or notes_at[place])
        if loops and self.memory is not None:
            lines.append(f"estimated temporary memory of the program: {size_in_words(self.memory)}")
        if loops:
            rewritten = [k for k, plan in enumerate(loops) if plan.strategy != "lax.scan"]
            last = rewritten[-1] if rewritten else 0
            lines.append(f"details: print .loops[{last}] of this explanation")
        return "\n".join(lines)


def _each_once(texts: list[str]) -> list[str]:
    """Returns texts with indented lines, each once; its first line says how often it came."""
    lines = []
    for text in dict.fromkeys(texts):
        count = texts.count(text)
        first, *rest = text.splitlines()
        if count > 1:
            first = f"{first}, {count} times"
        for line in (first, *rest):
            lines.append(f"  {line}")
    return lines


def _noted(plan: Plan, notes: list[str]) -> Plan:
    """Returns a plan with the notes of its place, such as why a loop was not differentiated in chunks."""
    new = [note for note in notes if note not in plan.notes]
    return replace(plan, notes=(*plan.notes, *new))


def explain(fn: Callable | None = None, /, *args: Any, **keywords: Any) -> Explanation:
    """Returns how the loops of a program run: the plans of its tagged loops. Nothing is run.

    Tagged loops are loops of `scan`, of jrnn's layers, and loops that are traced in `optimize_scans`. A loop of a jitted
    function that is called several times is lowered, and explained, once.

    Without a function it is a context, `with explain() as loops:`, for a program that one does not call oneself. It records
    every loop that is lowered in the block. Nothing is lowered a second time for it. The log `jrnn.loops` has the same
    text at the level DEBUG, as the loops come.

    Args:
        fn: a function, such as a train step or `jrnn.scan`. It may be jitted; anything with JAX's method `lower` is lowered
            with it.
        args, keywords: the arguments of `fn`. Arrays may be `jax.ShapeDtypeStruct`.

    Returns:
        The plans, in the order in which the loops are lowered. It prints a summary of each, and a plan prints its details.

    Raises:
        TypeError: if `fn` is not callable. What `fn` raises while it is traced.

    >>> import jax, jax.numpy as jnp
    >>> from jrnn.loops import scan
    >>> step = lambda h, x: (jnp.tanh(h @ w + x), None)
    >>> w, h, xs = jnp.ones((64, 64)), jnp.ones((8, 64)), jnp.ones((50, 8, 64))
    >>> loss = lambda w: jnp.sum(scan(lambda h, x: (jnp.tanh(h @ w + x), None), h, xs, executor="scan")[0])
    >>> [(plan.title, plan.contractions) for plan in explain(jax.grad(loss), w).loops]
    [('forward loop of 50 steps on cpu', 1), ('reverse loop of 50 steps on cpu', 1)]
    >>> print(explain(scan, step, h, xs[:4]))  # doctest: +ELLIPSIS
    1 loop: 0 rewritten, 1 left to lax.scan
    ...
      forward loop of 4 steps on cpu: lax.scan
    ...
    >>> with explain() as loops:
    ...     gradient = jax.jit(jax.grad(loss))(w)
    >>> len(loops.loops)
    2
    """
    if fn is None:
        if args or keywords:
            raise TypeError(
                "explain: as a context it has no arguments; give a function first to explain a call of it"
            )
        return Explanation()
    if not callable(fn):
        raise TypeError(f"explain: the first argument must be a function, but is {fn!r}")
    with observers.collected() as plans:
        plans.caller = observers.current_place()
        if hasattr(fn, "lower"):
            fn.lower(*args, **keywords)
            traced = fn.trace(*args, **keywords) if hasattr(fn, "trace") else None
        else:
            traced = _traced(fn, args, keywords)
            _lower(traced, plans)
        where = " where the memory of a program is estimated"
        jaxpr = getattr(traced, "jaxpr", None)
        memory = None
        if jaxpr is not None:
            memory = observers.attempt(where, temporary_bytes, jaxpr, Target.here())
    return Explanation(plans, memory)


def _traced(fn: Callable, args: Any, keywords: Any) -> Any:
    """Traces a function; its arguments that are no arrays are constants."""
    leaves, tree = jax.tree.flatten((args, keywords))
    places = []
    for k, leaf in enumerate(leaves):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            places.append(k)

    def run(*arrays: Any) -> Any:
        args, keywords = jax.tree.unflatten(tree, jaxprs.replaced(leaves, places, arrays))
        return fn(*args, **keywords)

    return jax.jit(run).trace(*(leaves[k] for k in places))


def _lower(traced: Any, plans: Plans) -> None:
    """Lowers a traced function.

    A function with collectives cannot be lowered outside its `vmap` or `shard_map`. Its plans are those for JAX's default
    platform.
    """
    if not any(
        primitives.is_kind(eqn, "collective") for eqn in jaxprs.all_equations(traced.jaxpr.jaxpr)
    ):
        traced.lower()
        return
    for plan in plans_in(traced.jaxpr.jaxpr, Target.here()):
        plans.record(plan)


def plans_in(jaxpr: object, target: Target) -> list[Plan]:
    """Returns the plans of the tagged loops in a jaxpr, without lowering it."""
    plans = []
    for eqn in jaxprs.all_equations(jaxpr):
        loop_tag = tag.tag_in(metadata_of(eqn)) if eqn.primitive is scan_p else None
        if loop_tag is not None:
            plans.append(compile_loop(ScanParams.of(eqn.params), target, *loop_tag))
    return plans
