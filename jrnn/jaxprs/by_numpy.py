"""Jaxprs evaluated by numpy, without a compiler: for checks of derived programs (`derived.py`), and for references of tests.

XLA takes about a second to compile the gradient of a small loop; numpy runs a few steps of it in milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jrnn.jaxprs import (
    LOWERED_CALLS,
    Atom,
    Eqn,
    Var,
    bind,
    is_literal,
    jaxpr_of,
    primitives,
    scan_parts,
)
from jrnn.jaxprs.jax_internals import ClosedJaxpr, Jaxpr

Array = np.ndarray  # or a JAX array of random keys
Values = Sequence[Array]


class Endless(Exception):
    """Raised if a while loop does not end."""


def evaluate_by_numpy(
    jaxpr: Jaxpr,
    consts: Sequence[jax.Array],
    args: Sequence[jax.Array | Array],
    wide: bool = False,
) -> list[Array]:
    """Returns the outputs of a jaxpr. A primitive that is not in the tables is run by JAX.

    Args:
        jaxpr: the jaxpr.
        consts, args: the values of its constants and inputs.
        wide: compute in float64 and complex128, whatever types the jaxpr has.
    """
    return Evaluator(wide).evaluate(jaxpr, consts, args)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates jaxprs, as `evaluate_by_numpy` does.

    Attributes:
        wide: see there.
        trips: the most steps of a while loop, or None; a loop that takes more raises Endless.
    """

    wide: bool = False
    trips: int | None = None

    def evaluate(self, jaxpr: Jaxpr, consts: Values, args: Values) -> list[Array]:
        values: dict[Var, Array] = {}
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        for var, value in zip(inputs, (*consts, *args), strict=True):
            values[var] = self.typed(value, var.aval.dtype)
        for eqn in jaxpr.eqns:
            operands = [self._read(values, atom) for atom in eqn.invars]
            with np.errstate(all="ignore"):
                results = self._results(eqn, operands)
            for var, value in zip(eqn.outvars, results, strict=True):
                values[var] = self.typed(value, var.aval.dtype)
        return [self._read(values, atom) for atom in jaxpr.outvars]

    def run(self, closed: ClosedJaxpr | Jaxpr, operands: Values) -> list[Array]:
        """Returns the outputs of a jaxpr, closed or without constants."""
        return self.evaluate(jaxpr_of(closed), getattr(closed, "consts", ()), operands)

    def _read(self, values: Mapping[Var, Array], atom: Atom) -> Array:
        return self.typed(atom.val, atom.aval.dtype) if is_literal(atom) else values[atom]

    def typed(self, value: jax.Array | Array, dtype: np.dtype) -> Array:
        """Returns a value as an array of a type, or of the wide type of its kind."""
        if dtype == jax.dtypes.float0:
            return np.zeros(np.shape(value), dtype)
        if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            return value
        if self.wide and jax.dtypes.issubdtype(dtype, np.floating):
            dtype = np.dtype(np.float64)
        elif self.wide and jax.dtypes.issubdtype(dtype, np.complexfloating):
            dtype = np.dtype(np.complex128)
        return np.asarray(value, dtype)

    def _results(self, eqn: Eqn, operands: Values) -> Values:
        """Returns the results of an equation: by a rule of numpy for its case, or by JAX."""
        name = eqn.primitive.name
        if name in LOOPS:
            return LOOPS[name](self, operands, **eqn.params)
        if self.wide and name == "bitcast_convert_type":  # of the bits that the jaxpr's type has
            operands = [operands[0].astype(eqn.invars[0].aval.dtype)]
        is_conversion = name in ("convert_element_type", "reduce_precision")
        if self.wide and is_conversion and _is_floating(eqn.invars[0], eqn.outvars[0]):
            return operands
        rule = primitives.numpy_rule(eqn)
        result = None if rule is None else rule(*operands, **eqn.params)
        if result is None:
            return self._by_jax(eqn, operands)
        return result if eqn.primitive.multiple_results else [result]

    def _by_jax(self, eqn: Eqn, operands: Values) -> Values:
        name = eqn.primitive.name
        with jax.ensure_compile_time_eval():
            if not self.wide or name in ("convert_element_type", "iota"):
                return bind(eqn, *operands)
            with jax.enable_x64(True):
                if not name.startswith("scatter"):
                    return jax.device_get(bind(eqn, *operands))
                # The sum of the equation has the types of the jaxpr.
                scatter = getattr(jax.lax, name.replace("-", "_"))
                keywords = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
                params = {key: eqn.params[key] for key in keywords}
                return [jax.device_get(scatter(*operands, **params))]


def _is_floating(*atoms: Atom) -> bool:
    return all(jax.dtypes.issubdtype(atom.aval.dtype, np.floating) for atom in atoms)


# Jaxprs within --------------------------------------------------------------------------------------------------------


def _call(evaluator: Evaluator, operands: Values, **params: ClosedJaxpr) -> list[Array]:
    (program,) = [params[name] for name in _PROGRAMS if name in params]
    return evaluator.run(program, operands)


def _scan(
    evaluator: Evaluator,
    operands: Values,
    *,
    jaxpr: ClosedJaxpr,
    length: int,
    reverse: bool,
    **params: Any,
) -> list[Array]:
    consts, carry, xs = scan_parts(params, operands)
    n_carry = len(carry)
    ys = []
    for aval in jaxpr.out_avals[n_carry:]:
        ys.append(evaluator.typed(np.zeros((length, *aval.shape)), aval.dtype))
    for t in range(length)[::-1] if reverse else range(length):
        results = evaluator.run(jaxpr, [*consts, *carry, *(x[t] for x in xs)])
        carry = results[:n_carry]
        for stacked, y in zip(ys, results[n_carry:], strict=True):
            stacked[t] = y
    return [*carry, *ys]


def _while(
    evaluator: Evaluator,
    operands: Values,
    *,
    cond_jaxpr: ClosedJaxpr,
    cond_nconsts: int,
    body_jaxpr: ClosedJaxpr,
    body_nconsts: int,
    **_: object,
) -> Values:
    cond_consts = operands[:cond_nconsts]
    body_consts = operands[cond_nconsts : cond_nconsts + body_nconsts]
    carry = operands[cond_nconsts + body_nconsts :]
    for number in itertools.count():
        if not evaluator.run(cond_jaxpr, [*cond_consts, *carry])[0]:
            break
        if number == evaluator.trips:
            raise Endless
        carry = evaluator.run(body_jaxpr, [*body_consts, *carry])
    return carry


def _cond(
    evaluator: Evaluator, operands: Values, *, branches: Sequence[ClosedJaxpr], **_: object
) -> list[Array]:
    which = min(max(int(operands[0]), 0), len(branches) - 1)
    return evaluator.run(branches[which], operands[1:])


def _checked_linear_map(
    evaluator: Evaluator,
    operands: Values,
    *,
    linear_map: Any,
) -> list[Array]:
    results = evaluator.run(linear_map.products, operands[1:])
    if operands[0] and all(np.isfinite(v).all() for v in results):
        return results
    return evaluator.run(linear_map.steps, operands[1:])


def _linear_solve(
    evaluator: Evaluator, operands: Values, *, const_lengths: Any, jaxprs: Any, **_: object
) -> list[Array]:
    start = const_lengths.matvec + const_lengths.vecmat
    consts = operands[start : start + const_lengths.solve]
    return evaluator.run(jaxprs.solve, [*consts, *operands[sum(const_lengths) :]])


_PROGRAMS = ("jaxpr", "call_jaxpr", "call", "program")  # the parameters of calls
LOOPS: dict[str, Callable[..., Values]] = {
    **dict.fromkeys((*LOWERED_CALLS, "custom_vmap_call", "hidden_program"), _call),
    "checked_linear_map": _checked_linear_map,
    "custom_linear_solve": _linear_solve,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
