"""Differentiation of a marked loop: its step is replaced by one that stores less (`loops/rules/residuals.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jrnn import jaxprs
from jrnn.loops.loop import Options, ScanParams, mark


def storing_less(rule: Callable, current_metadata: Callable) -> Callable:
    """Wraps JAX's rule for differentiating a scan: a marked scan gets a step that stores less."""

    @functools.wraps(rule)
    def differentiate(*args: Any, jaxpr: Any, **params: Any) -> Any:
        options = mark.options_in(current_metadata())
        if options is None:
            return rule(*args, jaxpr=jaxpr, **params)
        from jrnn.loops.rules.residuals import Stacks, step_storing_less

        scan = ScanParams.of({"jaxpr": jaxpr, **params})
        stacks = Stacks.of(jax.default_backend(), params["length"])
        alone = replace(scan, length=None, reverse=False)
        step = step_storing_less(alone, stacks, options.recompute, options.verify)
        if options.written is None:
            consts, _, xs = scan.apart(jaxprs.jaxpr_of(jaxpr).invars)
            given = sum(map(jaxprs.nbytes, xs)) * jaxprs.extent(scan.length)
            gradients = sum(map(jaxprs.nbytes, _differentiated(consts, args)))
            options = options._replace(written=scan.reverse, given=given, gradients=gradients)
        options = options._replace(stores_less=step is not jaxpr)
        with mark.marked(options):
            return _marking(rule(*args, jaxpr=step, **params), options)

    return differentiate


def _differentiated(constants: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Returns the constants of which there will be gradients, where a rule is told so: that for linearization is."""
    is_for_gradients = isinstance(args[0], bool) and args[0]
    return [v for v, nonzero in zip(constants, args[1]) if nonzero] if is_for_gradients else []


def _marking(result: Any, options: Options) -> Any:
    """Wraps the function that a rule for linearization returns, so that the loop that it makes has the mark."""
    if not (isinstance(result, tuple) and result and callable(result[-1])):
        return result

    @functools.wraps(result[-1])
    def linear(*args: Any) -> Any:
        with mark.marked(options):
            return result[-1](*args)

    return (*result[:-1], linear)


def with_zeros_of_a_step(rule: Callable, zero: type) -> Callable:
    """Fixes JAX 0.10's rule for transposing a scan with outputs whose cotangent is a symbolic zero.

    The rule passes a zero with the type of all steps to the transposition of one step, which raises. Later versions do not.
    """

    @functools.wraps(rule)
    def transpose(cts: Sequence[Any], *args: Any, jaxpr: Any, **params: Any) -> Any:
        avals = [a.to_ct_aval() for a in jaxpr.out_avals]
        cts = [zero(a) if type(ct) is zero else ct for ct, a in zip(cts, avals)]
        return rule(cts, *args, jaxpr=jaxpr, **params)

    return transpose
