"""Which equation of a JAX function has a gradient that is not its derivative: a derivative rule of the user's, as a rule.

Found as in nets, by bisecting: the equations from number k on are a function of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.convert.flat import source_of
from jrnn.executor.jaxprs import Var, evaluate, read, scan_counts
from jrnn.gradcheck.compare import Effort, chosen, gradients_part, scale_of
from jrnn.gradcheck.report import Fault
from jrnn.gradcheck.subject import Subject
from jrnn.gradcheck.three_ways import by_jax, element_differences
from jrnn.ir import Net

SCAN, CALLS = "scan", ("jit", "pjit", "closed_call")


@dataclass(frozen=True)
class _Program:
    """Equations with the values that they know, their inputs, and their outputs."""

    known: dict[Any, Any]
    invars: tuple[Var, ...]
    eqns: tuple[Any, ...]
    outvars: tuple[Any, ...]

    @classmethod
    def of(cls, closed: Any, outputs: Sequence[int] | None = None) -> _Program:
        """A traced function, with some of its outputs."""
        jaxpr = closed.jaxpr
        outvars = jaxpr.outvars if outputs is None else [jaxpr.outvars[k] for k in outputs]
        known = dict(zip(jaxpr.constvars, closed.consts))
        return cls(known, tuple(jaxpr.invars), tuple(jaxpr.eqns), tuple(outvars))

    def env(self, args: Sequence[Any], k: int) -> dict[Any, Any]:
        """The values of all variables before equation number k."""
        return evaluate(self.eqns[:k], self.known | dict(zip(self.invars, args)))


def fault_in_function(s: Subject, effort: Effort) -> Fault | None:
    """The equation nearest to the outputs whose gradient disagrees with central differences, or None."""
    point = s.point
    traced = jax.make_jaxpr(lambda *values: list(s.function(dict(zip(point, values))).values()))(*point.values())
    program = _Program.of(traced)
    seeds = [np.tensordot(np.random.default_rng(0).standard_normal(s.rows), s.seeds[y], 1)[None] for y in s.seeds]
    return _fault(program, list(point.values()), seeds, effort)


def _fault(program: _Program, args: Sequence[Any], seeds: Sequence[np.ndarray], effort: Effort) -> Fault | None:
    if not gradients_part(_suffix(program, args, seeds, 0), effort, "difference"):
        return None
    low, high = 0, len(program.eqns)
    while high - low > 1:
        middle = (low + high) // 2
        if gradients_part(_suffix(program, args, seeds, middle), effort, "difference"):
            low = middle
        else:
            high = middle
    eqn = program.eqns[low]
    at = _suffix(program, args, seeds, low)
    mine = by_jax(at)
    where = {n: chosen(np.abs(np.asarray(mine[n])), effort.max_elements) for n in at.wrt}
    differences = element_differences(at, where)
    off = {
        n: np.abs(np.asarray(mine[n]).reshape(1, -1)[:, where[n]] - differences[n])[0] / scale_of(mine[n])
        for n in at.wrt
    }
    name = max((n for n in at.wrt if off[n].size), key=lambda n: off[n].max())
    k = int(np.argmax(off[name]))
    index = tuple(int(i) for i in np.unravel_index(where[name][k], np.shape(at.blobs[name])))
    values = (float(np.asarray(mine[name])[0][index]), None, float(differences[name][0, k]))
    inside = None
    if eqn.primitive.name in (SCAN, *CALLS):
        env = program.env(args, low)
        inside = _fault_inside(eqn, [jnp.asarray(read(env, v)) for v in eqn.invars], effort)
        if inside is not None and eqn.primitive.name in CALLS:
            return inside
    rule = eqn.params.get("name") or getattr(eqn.params.get("call_jaxpr"), "debug_info", None)
    called = getattr(rule, "func_name", rule)
    source = source_of(eqn)
    label = f"{eqn.primitive.name}{f' of {called}' if called else ''}{f' ({source})' if source else ''}"
    return Fault(label, eqn.primitive.name, name, index, values, inside)


def _suffix(program: _Program, args: Sequence[Any], seeds: Sequence[np.ndarray], k: int) -> Subject:
    """The equations from number k on as a subject without a net."""
    env = program.env(args, k)
    needed = dict.fromkeys(v for eqn in program.eqns[k:] for v in eqn.invars if isinstance(v, Var))
    needed.update(dict.fromkeys(v for v in program.outvars if isinstance(v, Var)))
    known = {f"input {i}": v for i, v in enumerate(v for v in needed if v in env)}
    blobs = {n: np.asarray(env[v]) for n, v in known.items()}
    wrt = tuple(n for n, x in blobs.items() if x.dtype == np.float64)
    smooth = {f"output {i}": s for i, s in enumerate(seeds)}

    def function(point: Any) -> dict[str, Any]:
        inner = evaluate(program.eqns[k:], {**env, **{known[n]: x for n, x in point.items()}})
        found = [read(inner, v) for v in program.outvars]
        return dict(zip(smooth, found))

    return Subject(Net("function"), blobs, wrt, smooth, function)


def _fault_inside(eqn: Any, values: Sequence[Any], effort: Effort) -> Fault | None:
    """The equation at fault within a call, or within the first step of a scan, beside the point where that is."""
    rng = np.random.default_rng(0)
    closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if eqn.primitive.name == SCAN:
        fixed = sum(scan_counts(eqn.params))
        values = [v if i < fixed else v[0] for i, v in enumerate(values)]
        values = [v + 0.1 * rng.standard_normal(v.shape) if v.dtype == np.float64 else v for v in values]
    smooth = [i for i, v in enumerate(closed.out_avals) if v.dtype == np.float64]
    seeds = [rng.standard_normal((1, *closed.out_avals[i].shape)) for i in smooth]
    return _fault(_Program.of(closed, smooth), values, seeds, effort)
