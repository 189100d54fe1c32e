"""Jaxprs: tracing, opening calls, evaluating lists of equations, and queries about equations.

A piece of a jaxpr is a list of equations that is evaluated in an environment `{variable: value}`. A rewrite traces such an
evaluation again, so nothing here builds equations by hand.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from jrnn.loops import mark

Var = jex.Var
Eqn = jex.JaxprEqn
Atom = Any  # Var | Literal
Env = dict[Var, Any]

# Primitives that only call a jaxpr, with the parameter that holds it.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "eval_jaxpr": "jaxpr"}
# These matter to transformations only: in a program that is being lowered, they are calls too.
LOWERED_CALLS = {
    **CALLS,
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
}
_IDENTITIES = ("copy", "copy_p")  # in a program that is being lowered


@dataclass(frozen=True)
class Program:
    """A jaxpr's equations, inputs and outputs. `consts` are the values of `constvars`."""

    constvars: tuple[Var, ...]
    consts: tuple[Any, ...]
    invars: tuple[Var, ...]
    eqns: tuple[Eqn, ...]
    outvars: tuple[Atom, ...]


def trace(fn: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> Program:
    """Traces a function from flat arguments of these types to a flat sequence, and opens the calls inside it."""
    return opened(jax.make_jaxpr(fn)(*avals))


def opened(closed: Any, calls: Mapping[str, str] = CALLS) -> Program:
    """Returns the program of a closed jaxpr with the calls inside it opened.

    Args:
        closed: the closed jaxpr.
        calls: the primitives to open, with the parameter that holds the jaxpr of each.
    """
    jaxpr = jaxpr_of(closed)
    if any(called(eqn, calls) or eqn.primitive.name in _IDENTITIES for eqn in jaxpr.eqns):
        closed = jax.make_jaxpr(lambda *args: _opened(closed, args, calls))(*(v.aval for v in jaxpr.invars))
        jaxpr = closed.jaxpr
    parts = jaxpr.constvars, closed.consts, jaxpr.invars, jaxpr.eqns, jaxpr.outvars
    return Program(*map(tuple, parts))


def jaxpr_of(closed: Any) -> Any:
    """Returns the jaxpr of a closed jaxpr; returns a plain jaxpr as it is."""
    return getattr(closed, "jaxpr", closed)


def is_literal(atom: Atom) -> bool:
    return not isinstance(atom, Var)


def is_in(atom: Atom, found: Collection[Var]) -> bool:
    """Returns True if an atom is a variable in a collection. Literals have no hash."""
    return not is_literal(atom) and atom in found


def variables(atoms: Iterable[Atom]) -> list[Var]:
    return [atom for atom in atoms if not is_literal(atom)]


def read(env: Env, atom: Atom) -> Any:
    return atom.val if is_literal(atom) else env[atom]


def value(env: Env, atom: Atom) -> jax.Array:
    """Returns an atom's value as an array of the atom's dtype (a literal may be a Python number)."""
    return jnp.asarray(atom.val, atom.aval.dtype) if is_literal(atom) else env[atom]


def zeros_of_shape(shape: Sequence[int], like: Any) -> jax.Array:
    """Returns zeros with the dtype and the sharding of the abstract value `like`."""
    zeros = jnp.zeros(shape, like.dtype)
    return jax.sharding.reshard(zeros, like.sharding) if _is_explicit(like) else zeros


def evaluate(eqns: Iterable[Eqn], env: Env, calls: Mapping[str, str] | None = None) -> Env:
    """Evaluates equations, adds their results to `env`, and returns it. The primitives in `calls` are opened."""
    for eqn in eqns:
        args = [read(env, atom) for atom in eqn.invars]
        with in_scope(eqn):
            body = called(eqn, calls) if calls else None
            if body is not None:
                out = _opened(body, args, calls)
            elif calls is LOWERED_CALLS and eqn.primitive.name in _IDENTITIES:
                out = args
            else:
                out = bind(eqn, *args)
        env.update(zip(eqn.outvars, out))
    return env


def bind(eqn: Eqn, *args: Any, **changed: Any) -> Sequence[Any]:
    """Returns the results of an equation for other operands, with some parameters changed."""
    out = eqn.primitive.bind(*args, **{**eqn.primitive.get_bind_params(eqn.params), **changed})
    return out if eqn.primitive.multiple_results else [out]


def over_time(eqns: Iterable[Eqn], env: Env, stacked: Env) -> None:
    """Evaluates equations for all steps. Adds results to `env`, or to `stacked` [T, ...] if they differ between steps."""
    for eqn in eqns:
        moving = [is_in(atom, stacked) for atom in eqn.invars]
        if not any(moving):
            evaluate([eqn], env)
            continue
        values = [stacked[atom] if moves else read(env, atom) for atom, moves in zip(eqn.invars, moving)]
        with in_scope(eqn):
            of_one_step = functools.partial(_with_one_batch_axis if _has_batch_axes(eqn) else bind, eqn)
            results = jax.vmap(of_one_step, [0 if moves else None for moves in moving])(*values)
        stacked.update(zip(eqn.outvars, results))


def _has_batch_axes(eqn: Eqn) -> bool:
    if eqn.primitive.name != "dot_general" or eqn.params.get("out_sharding") is not None:
        return False
    return len(eqn.params["dimension_numbers"][1][0]) > 1


def _with_one_batch_axis(eqn: Eqn, a: Any, b: Any) -> Sequence[Any]:
    params = eqn.params
    return [product(a, b, params["dimension_numbers"], params["precision"], params["preferred_element_type"])]


def product(a: Any, b: Any, numbers: Any, precision: Any, dtype: Any) -> Any:
    """Computes `lax.dot_general` with its batch axes joined to one.

    XLA aborts the process where it simplifies products of three batch axes (docs/notes/xla_faults.md), and every `vmap`
    around a product, such as the one over time, adds a batch axis.

    Args:
        a, b: the operands.
        numbers: the dimension numbers.
        precision: of the product.
        dtype: of the result.
    """
    (contracted, batch), free = numbers, []
    count = len(batch[0])
    if count < 2 or any(_is_explicit(jax.typeof(x)) for x in (a, b)):
        return jax.lax.dot_general(a, b, numbers, precision, dtype)
    joined = []
    for x, over, axes in zip((a, b), contracted, batch):
        rest = [d for d in range(x.ndim) if d not in axes]
        shape = [x.shape[d] for d in rest]
        joined.append(jnp.transpose(x, (*axes, *rest)).reshape(math.prod(x.shape[d] for d in axes), *shape))
        free += [n for d, n in zip(rest, shape) if d not in over]
    over = tuple(tuple(1 + d - sum(e < d for e in axes) for d in dims) for dims, axes in zip(contracted, batch))
    result = jax.lax.dot_general(*joined, (over, ((0,), (0,))), precision, dtype)
    return result.reshape(*(a.shape[d] for d in batch[0]), *free)


def _is_explicit(aval: Any) -> bool:
    return jax.sharding.AxisType.Explicit in aval.sharding.mesh.axis_types


def _opened(closed: Any, args: Sequence[Any], calls: Mapping[str, str] | None) -> list[Any]:
    jaxpr = jaxpr_of(closed)
    env = dict(zip(jaxpr.constvars, getattr(closed, "consts", ())))
    env.update(zip(jaxpr.invars, args))
    evaluate(jaxpr.eqns, env, calls)
    return [read(env, atom) for atom in jaxpr.outvars]


def in_scope(eqn: Eqn) -> ExitStack:
    """Enters an equation's context: its source lines, its `jax.named_scope`, and `eqn.ctx` without the mark."""
    stack = ExitStack()
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    stack.enter_context(source_info_util.user_context(eqn.source_info.traceback, name_stack=names))
    stack.enter_context(eqn.ctx.manager)
    if mark.options_in(eqn.ctx.xla_metadata) and eqn.primitive.name != "scan":
        stack.enter_context(mark.unmarked())
    return stack


def called(eqn: Eqn, calls: Mapping[str, str]) -> Any | None:
    """Returns the jaxpr of an equation that is one of `calls`, or None. A `jit` with its own shardings is not opened."""
    parameter = calls.get(eqn.primitive.name)
    if parameter is None or eqn.effects:
        return None
    placed = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(type(s).__name__ != "UnspecifiedValue" for s in placed):
        return None
    return eqn.params[parameter if parameter in eqn.params else "call_jaxpr"]  # the name in `eval_jaxpr` since jax 0.12


# Sizes ---------------------------------------------------------------------------------------------------------------

_OPEN = 64  # the size that a symbolic dimension counts as where sizes are compared


def sub_jaxprs(eqn: Eqn) -> Iterator[Any]:
    """Yields the jaxprs in an equation's parameters."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(jaxpr_of(item), "eqns"):
                yield jaxpr_of(item)


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in sub_jaxprs(eqn):
            yield from all_equations(inner)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the numbers of constants and carries of a scan's equation."""
    if "ft_in" in params:  # jax 0.12
        consts, carry, _ = params["ft_in"].unpack()
        return len(list(consts)), len(list(carry))
    return params["num_consts"], params["num_carry"]


def is_known(dimension: Any) -> bool:
    """Returns True if a dimension is a number, and False if it is a symbolic dimension of `jax.export`."""
    return isinstance(dimension, (int, np.integer))


def extent(dimension: Any) -> int:
    """Returns a dimension as a number; symbolic dimensions count as 64."""
    return int(dimension) if is_known(dimension) else _OPEN


def elements(shape: Sequence[Any]) -> int:
    return math.prod(map(extent, shape))


def nbytes(atom: Atom) -> int:
    return elements(atom.aval.shape) * getattr(atom.aval.dtype, "itemsize", 4)  # extended dtypes may have no itemsize


# Pieces --------------------------------------------------------------------------------------------------------------


def inputs(eqn: Eqn) -> list[Var]:
    return variables(eqn.invars)


def needed(
    eqns: Sequence[Eqn], outs: Iterable[Atom], available: Collection[Var], effects: bool = False
) -> tuple[list[Any], list[Var]]:
    """Returns the equations that compute `outs` from `available`, and the variables of `available` that they read.

    With `effects`, equations with side effects are included.

    >>> p = trace(lambda a, b: [a + b, a * b], [jax.typeof(1.0), jax.typeof(2.0)])
    >>> [e.primitive.name for e in needed(p.eqns, p.outvars[:1], set(p.invars))[0]]
    ['add']
    """
    want = dict.fromkeys(variables(outs))
    kept = []
    for eqn in reversed(eqns):
        made = [v for v in eqn.outvars if v in want and v not in available]
        if made or (effects and eqn.effects):
            kept.append(eqn)
            want.update(dict.fromkeys(inputs(eqn)))
    return kept[::-1], [v for v in want if v in available]


def free_variables(eqns: Sequence[Eqn]) -> list[Var]:
    """Returns the variables that equations read but do not define."""
    made = {v for eqn in eqns for v in eqn.outvars}
    return list(dict.fromkeys(v for eqn in eqns for v in inputs(eqn) if v not in made))


def depends(eqns: Sequence[Eqn], roots: Iterable[Var]) -> set[Var]:
    """Returns `roots` and every variable computed from one of them."""
    found = set(roots)
    for eqn in eqns:
        if any(v in found for v in inputs(eqn)):
            found.update(eqn.outvars)
    return found


def producers(eqns: Iterable[Eqn]) -> dict[Var, Any]:
    return {v: eqn for eqn in eqns for v in eqn.outvars}


def is_zero(atom: Atom, made: Mapping[Var, Any]) -> bool:
    """Returns True if a value is an array of zeros. `made` maps variables to their equations."""
    while not is_literal(atom):
        eqn = made.get(atom)
        if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
            return False
        atom = eqn.invars[0]
    return bool(np.all(np.asarray(atom.val) == 0))
