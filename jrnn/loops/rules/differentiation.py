"""Differentiation of a marked loop: its step is replaced by one that stores less (`loops/rules/residuals.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.loops.loop import Options, ScanParams, derived, mark, strict_passes
from jrnn.loops.rules import residuals
from jrnn.loops.rules.residuals import Stacks


def storing_less(rule: Callable, current_metadata: Callable) -> Callable:
    """Wraps JAX's rule for differentiating a scan: a marked scan gets a step that stores less."""

    @functools.wraps(rule)
    def differentiate(*args: Any, jaxpr: Any, **params: Any) -> Any:
        options = mark.options_in(current_metadata())
        if options is None:
            return rule(*args, jaxpr=jaxpr, **params)
        scan = ScanParams.of({"jaxpr": jaxpr, **params})
        stacks = Stacks.of(jax.default_backend(), params["length"])
        alone = replace(scan, length=None, reverse=False)
        step = _step_storing_less(alone, stacks, options.recompute, options.verify)
        if options.written is None:
            consts, _, xs = scan.apart(jaxprs.jaxpr_of(jaxpr).invars)
            given = sum(map(jaxprs.nbytes, xs)) * jaxprs.extent(scan.length)
            gradients = sum(map(jaxprs.nbytes, _differentiated(consts, args)))
            options = replace(options, written=scan.reverse, given=given, gradients=gradients)
        options = replace(options, stores_less=step is not jaxpr)
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


@functools.lru_cache(maxsize=256)
def _step_storing_less(scan: ScanParams, stacks: Stacks, recompute: Any, verify: bool) -> Any:
    """Returns the step of a loop, whatever its length, with a rule that stores less, or as it is."""
    jaxpr, avals = scan.jaxpr, [v.aval for v in jaxprs.jaxpr_of(scan.jaxpr).invars]

    def storing_less(scan: ScanParams) -> Any:
        return residuals.storing_less(scan, stacks, recompute)

    try:
        step = storing_less(scan)
        if step is None:
            return jaxpr
        with mark.unmarked():
            smooth = jax.make_jaxpr(step)(*avals)
        same = [v.aval for v in smooth.jaxpr.invars] == avals and list(smooth.out_avals) == list(jaxpr.out_avals)
        if not same or not verify:
            return smooth if same else jaxpr
        agrees, _ = derived.verdict(scan, f"residuals {recompute}", storing_less)
        return smooth if agrees else jaxpr
    except ScanError:
        raise
    except Exception:
        if strict_passes.value:
            raise
        return jaxpr
