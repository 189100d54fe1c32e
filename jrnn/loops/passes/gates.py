"""Gates that are slices of one pre-activation, for XLA:CPU: sliced before they are added up.

The problem: XLA:CPU makes one kernel of each elementwise chain, and does not vectorize a chain that reads several slices of
an array that it computes in the same kernel. A step of a GRU with 64 units then takes 10.5 us instead of 4.1
(docs/notes/cpu_log.md). Slices of `x W` are known before the loop, so they can be inputs of their own:

    z = x W + h U                          a, b = x W[:, 0:H], x W[:, H:2H]     before the loop
    r = logistic(z[:, 0:H])                v = h U
    u = logistic(z[:, H:2H])               r = logistic(a + v[:, 0:H])
                                           u = logistic(b + v[:, H:2H])

`slice_operands` rewrites the left form to the right one, and a split of the result hoists the slices of inputs.
`prefers_separate_slices` chooses. One activation of several neighboring gates was tried, too: it gains nothing next to this.

Invariant: every value is unchanged.

Shapes: N batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Env, Eqn, Var, primitives
from jrnn.loops.ir import Loop

_MAX_SUM_DEPTH = 4  # a slice is moved through at most these additions


def slice_operands(loop: Loop) -> Loop:
    """Rewrites `slice(a + b)` as `slice(a) + slice(b)`, so that slices of xs can be hoisted."""
    cuts = axis_slices(loop.eqns)
    sums = jaxprs.producers(filter(_is_sum, loop.eqns))

    def part(
        atom: Atom,
        cut: AxisSlice,
        env: Env,
        depth: int = 0,
    ) -> Array:
        """Returns `atom[cut.lo:cut.hi]`; `atom` may have size one along the axis."""
        if jaxprs.is_in(atom, sums) and depth < _MAX_SUM_DEPTH:
            eqn = sums[atom]
            with jaxprs.in_scope(eqn):
                parts = [part(a, cut, env, depth + 1) for a in eqn.invars]
                return jaxprs.bind(eqn, *parts)[0]
        value = jaxprs.read(env, atom)
        if atom.aval.ndim == 0 or atom.aval.shape[cut.axis] == 1:
            return value
        return jax.lax.slice_in_dim(value, cut.lo, cut.hi, axis=cut.axis)

    def rule(eqn: Eqn, env: Env) -> Sequence[Any] | None:
        if not eqn.outvars or not all(v in cuts and cuts[v].size > 1 for v in eqn.outvars):
            return None
        return [part(cuts[v].of, cuts[v], env) for v in eqn.outvars]

    return loop.rewrite(rule)


def _is_sum(eqn: Eqn) -> bool:
    return eqn.primitive.name in ("add", "sub")


class AxisSlice(NamedTuple):
    """A slice `of[lo:hi]` along `axis`, of a variable or of what `canonical/shared_operands.py` joins."""

    of: Any
    axis: int
    lo: int
    hi: int

    @property
    def size(self) -> int:
        return self.hi - self.lo


def axis_slices(eqns: Iterable[Eqn]) -> dict[Var, AxisSlice]:
    """Returns the variables that are slices of others along one axis."""
    cuts: dict[Var, AxisSlice] = {}
    for eqn in eqns:
        name = eqn.primitive.name
        if name not in ("slice", "split") or jaxprs.is_literal(eqn.invars[0]):
            continue
        operand = eqn.invars[0]
        params = eqn.params
        if name == "split":
            lo = 0
            for out, size in zip(eqn.outvars, params["sizes"]):
                cuts[out] = AxisSlice(operand, params["axis"], lo, lo + size)
                lo += size
            continue
        ranges = [*zip(params["start_indices"], params["limit_indices"])]
        axes = [a for a, n in enumerate(operand.aval.shape) if ranges[a] != (0, n)]
        if len(axes) == 1 and (params["strides"] is None or set(params["strides"]) == {1}):
            cuts[eqn.outvars[0]] = AxisSlice(operand, axes[0], *ranges[axes[0]])
    return cuts


def prefers_separate_slices(loop: Loop, computed: Collection[Var] = ()) -> bool:
    """Returns True if `slice_operands`, with the slices of xs hoisted, makes a loop faster.

    Slices of sums that are activated later keep XLA:CPU from vectorizing `logistic` and `tanh`. So do slices of inputs. Sums
    that a plan computes, `computed`, may as well be arrays of their own.
    """
    activations = list(filter(primitives.is_activation, loop.eqns))
    if not {eqn.primitive.name for eqn in activations} <= {"logistic", "tanh"}:
        return False
    sums = {*computed, *jaxprs.results(filter(_is_sum, loop.eqns))}
    slices = [v for v, cut in axis_slices(loop.eqns).items() if cut.of in sums]
    sliced = jaxprs.depends(loop.eqns, slices)
    return jaxprs.any_in(jaxprs.free_variables(activations), sliced)
