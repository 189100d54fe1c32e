"""Fixes of JAX's own rules, where one version of JAX differentiates a scan wrongly or wastefully."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jrnn import jaxprs
from jrnn.jaxprs.jax_internals import ad, in_context


def with_zeros_of_a_step(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Fixes JAX 0.10's rule for transposing a scan with outputs whose cotangent is a symbolic zero.

    The rule passes a zero with the type of all steps to the transposition of one step, which raises. Later versions do not.
    """

    @functools.wraps(rule)
    def transpose(cts: Sequence[Any], *args: Any, jaxpr: Any, **params: Any) -> Any:
        avals = [a.to_ct_aval() for a in jaxpr.out_avals]
        cts = [ad.Zero(a) if type(ct) is ad.Zero else ct for ct, a in zip(cts, avals)]
        return rule(cts, *args, jaxpr=jaxpr, **params)

    return transpose


def with_inputs_as_residuals(
    rule: Callable[..., Any], partial_eval: Callable[..., Any]
) -> Callable[..., Any]:
    """Fixes the rule of JAX 0.10 and 0.11 for partial evaluation of a `cond` with residuals that are inputs of a branch.

    The rule makes them results of the `cond`, so that a loop around it stores them for each step, even a weight. Later
    versions read the inputs.

    Args:
        rule: JAX's rule.
        partial_eval: JAX's function that evaluates a jaxpr in part.
    """

    @functools.wraps(rule)
    def evaluate(
        trace: Any, index: Any, *tracers: Any, branches: Sequence[Any], **params: Any
    ) -> list[Any]:
        outs = rule(trace, index, *tracers, branches=branches, **params)
        unknown = [t for t in outs if getattr(t, "recipe", None) is not None]
        if not index.pval.is_known() or not unknown:
            return outs
        are_unknown = [any(t is u for u in unknown) for t in outs]
        are_inputs = [not t.pval.is_known() for t in tracers]
        known = [t.pval.get_known() for t in tracers if t.pval.is_known()]
        halves = [
            partial_eval(branch, are_inputs, instantiate=are_unknown)[::3] for branch in branches
        ]
        in_tracers = list(unknown[0].recipe.in_tracers)
        for k, inputs in enumerate(_inputs_of_residuals(halves)):
            if len(inputs) == 1 and None not in inputs:
                in_tracers[1 + k] = trace.new_instantiated_const(known[inputs.pop()])
        recipe = unknown[0].recipe._replace(in_tracers=in_tracers)
        for tracer in unknown:
            tracer.recipe = recipe
        return outs

    return evaluate


def _inputs_of_residuals(halves: Sequence[tuple[Any, Sequence[Any]]]) -> list[set[int | None]]:
    """Returns for each residual of a `cond` which known inputs of its branches it is, or None for other values.

    JAX numbers the residuals of each type in each branch; equal numbers share a place.

    Args:
        halves: the known part of each branch, and the types of its residuals, which are its last results.
    """
    inputs: dict[Any, set[int | None]] = {}
    for closed, avals in halves:
        jaxpr = jaxprs.jaxpr_of(closed)
        counts = Counter[Any]()
        positions = {v: i for i, v in enumerate(jaxpr.invars)}
        for v, aval in zip(jaxpr.outvars[len(jaxpr.outvars) - len(avals) :], avals):
            place = None if jaxprs.is_literal(v) else positions.get(v)
            inputs.setdefault((aval, counts[aval]), set()).add(place)
            counts[aval] += 1
    return list(inputs.values())


def in_context_of_loop(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Fixes the rule of JAX 0.11 and later for a scan in a `jax.checkpoint` that is differentiated.

    The rule traces the forward loop in a call, which has the tag. In earlier versions the loop has it, too.
    """

    @functools.wraps(rule)
    def evaluate(saveable: Any, unknown: Any, instantiated: Any, eqn: Any) -> Any:
        with in_context(eqn):
            return rule(saveable, unknown, instantiated, eqn)

    return evaluate
