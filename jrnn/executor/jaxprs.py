"""What the executor does with jaxprs: trace, flatten, evaluate in pieces, and ask what an equation is like.

Pieces of a jaxpr are plain lists of equations evaluated in an environment `{variable: value}`, so that a rewrite is a
new trace of an evaluation, and nothing here builds equations by hand.
"""

from __future__ import annotations

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

from jrnn.executor import mark

Var = jex.Var
Atom = Any  # Var | Literal
Env = dict[Var, Any]

# Primitives that merely call a jaxpr, with the parameter that holds it.
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "eval_jaxpr": "jaxpr"}
# Those that only a transformation would treat in another way: once a program is lowered, they are calls too.
LOWERED_CALLS = {
    **CALLS,
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
}
_IDENTITIES = ("copy", "copy_p")  # once a program is lowered


@dataclass(frozen=True)
class Program:
    """Equations with their inputs and outputs; `consts` are the values of `constvars`."""

    constvars: tuple[Var, ...]
    consts: tuple[Any, ...]
    invars: tuple[Var, ...]
    eqns: tuple[Any, ...]
    outvars: tuple[Atom, ...]
    effects: Any


def trace(fn: Callable[..., Sequence[Any]], avals: Sequence[Any], calls: Mapping[str, str] = CALLS) -> Program:
    """Traces a function of flat arguments that returns a flat sequence, and opens the calls inside it.

    Args:
        fn: the function.
        avals: the types of its arguments.
        calls: the primitives to open, with the parameter that holds the jaxpr of each.
    """
    return opened(jax.make_jaxpr(fn)(*avals), calls)


def opened(closed: Any, calls: Mapping[str, str] = CALLS) -> Program:
    """The program of a jaxpr, with the calls inside it opened."""
    jaxpr = getattr(closed, "jaxpr", closed)
    if not any(called(eqn, calls) or eqn.primitive.name in _IDENTITIES for eqn in jaxpr.eqns):
        return _program(closed)
    return _trace(lambda *args: _opened(closed, args, calls), [v.aval for v in jaxpr.invars])


def _trace(fn: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> Program:
    return _program(jax.make_jaxpr(fn)(*avals))


def _program(closed: Any) -> Program:
    jaxpr = getattr(closed, "jaxpr", closed)
    return Program(
        tuple(jaxpr.constvars),
        tuple(closed.consts),
        tuple(jaxpr.invars),
        tuple(jaxpr.eqns),
        tuple(jaxpr.outvars),
        jaxpr.effects,
    )


def retrace(
    evaluation: Callable[[Env], Env], invars: Sequence[Var], outs: Sequence[Atom], avals: Sequence[Any] | None = None
) -> Program:
    """The program of an evaluation that is given the environment of `invars` and must define `outs`.

    `avals` are the types of `invars`, where they change.
    """

    def fn(*args: Any) -> list[Any]:
        env = evaluation(dict(zip(invars, args)))
        return [read(env, atom) for atom in outs]

    return _trace(fn, [v.aval for v in invars] if avals is None else avals)


def is_literal(atom: Atom) -> bool:
    return not isinstance(atom, Var)


def read(env: Env, atom: Atom) -> Any:
    return atom.val if is_literal(atom) else env[atom]


def value(env: Env, atom: Atom) -> jax.Array:
    """An atom's value as an array of its own type (a literal may be a Python number)."""
    return jnp.asarray(atom.val, atom.aval.dtype) if is_literal(atom) else env[atom]


def zeros_of_shape(shape: Sequence[int], like: Any) -> jax.Array:
    """Zeros of the data type of `like`, an abstract value, divided among devices as it is."""
    zeros = jnp.zeros(shape, like.dtype)
    explicit = jax.sharding.AxisType.Explicit in like.sharding.mesh.axis_types
    return jax.sharding.reshard(zeros, like.sharding) if explicit else zeros


def evaluate(eqns: Iterable[Any], env: Env, calls: Mapping[str, str] | None = None) -> Env:
    """Evaluates equations into `env`, which it changes and returns; `calls` are opened."""
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


def bind(eqn: Any, *args: Any) -> Sequence[Any]:
    """The outputs of an equation for other inputs."""
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return out if eqn.primitive.multiple_results else [out]


def _opened(closed: Any, args: Sequence[Any], calls: Mapping[str, str] | None) -> list[Any]:
    jaxpr = getattr(closed, "jaxpr", closed)
    env = dict(zip(jaxpr.constvars, getattr(closed, "consts", ())))
    env.update(zip(jaxpr.invars, args))
    evaluate(jaxpr.eqns, env, calls)
    return [read(env, atom) for atom in jaxpr.outvars]


def in_scope(eqn: Any) -> ExitStack:
    """The equation's own context: its source lines, its `jax.named_scope`, and what `eqn.ctx` holds but the mark."""
    stack = ExitStack()
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    stack.enter_context(source_info_util.user_context(eqn.source_info.traceback, name_stack=names))
    stack.enter_context(eqn.ctx.manager)
    if mark.options_in(eqn.ctx.xla_metadata) and eqn.primitive.name != "scan":
        stack.enter_context(mark.unmarked())
    return stack


def called(eqn: Any, calls: Mapping[str, str]) -> Any | None:
    """The jaxpr of an equation that is one of `calls`, or None. A `jit` with shardings of its own stays."""
    parameter = calls.get(eqn.primitive.name)
    if parameter is None or eqn.effects:
        return None
    placed = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    if any(type(s).__name__ != "UnspecifiedValue" for s in placed):
        return None
    return eqn.params[parameter if parameter in eqn.params else "call_jaxpr"]  # of `eval_jaxpr` from jax 0.12 on


# Sizes ---------------------------------------------------------------------------------------------------------------

_OPEN = 64  # elements of a dimension that is not known, where sizes are compared


def sub_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs in an equation's parameters."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of those inside of it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in sub_jaxprs(eqn):
            yield from all_equations(inner)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and carries the parameters of a scan's equation announce."""
    if "ft_in" in params:  # jax 0.12
        consts, carry, _ = params["ft_in"].unpack()
        return len(list(consts)), len(list(carry))
    return params["num_consts"], params["num_carry"]


def is_known(dimension: Any) -> bool:
    """Whether a dimension is a number, and not left open by `jax.export`."""
    return isinstance(dimension, (int, np.integer))


def extent(dimension: Any) -> int:
    """A dimension; for one that `jax.export` leaves open, what it may be, where sizes are compared."""
    return int(dimension) if is_known(dimension) else _OPEN


def elements(shape: Sequence[Any]) -> int:
    return math.prod(map(extent, shape))


def nbytes(atom: Atom) -> int:
    """Bytes of one value; typed keys and other extended types count as their items do."""
    return elements(atom.aval.shape) * getattr(atom.aval.dtype, "itemsize", 4)


# Pieces --------------------------------------------------------------------------------------------------------------


def inputs(eqn: Any) -> list[Var]:
    """The variables that an equation reads."""
    return [atom for atom in eqn.invars if not is_literal(atom)]


def needed(
    eqns: Sequence[Any], outs: Iterable[Atom], available: Collection[Var], effects: bool = False
) -> tuple[list[Any], list[Var]]:
    """The equations that compute `outs` from `available`, and the variables of `available` that are read.

    With `effects`, equations with side effects are needed too.

    >>> p = trace(lambda a, b: [a + b, a * b], [jax.typeof(1.0), jax.typeof(2.0)])
    >>> [e.primitive.name for e in needed(p.eqns, p.outvars[:1], set(p.invars))[0]]
    ['add']
    """
    want = {atom: None for atom in outs if not is_literal(atom)}
    kept = []
    for eqn in reversed(eqns):
        made = [v for v in eqn.outvars if v in want and v not in available]
        if made or (effects and eqn.effects):
            kept.append(eqn)
            want.update(dict.fromkeys(inputs(eqn)))
    return kept[::-1], [v for v in want if v in available]


def free_variables(eqns: Sequence[Any]) -> list[Var]:
    """The variables that equations read and do not make."""
    made = {v for eqn in eqns for v in eqn.outvars}
    return list(dict.fromkeys(v for eqn in eqns for v in inputs(eqn) if v not in made))


def depends(eqns: Sequence[Any], roots: Iterable[Var]) -> set[Var]:
    """`roots` and every variable computed from one of them."""
    found = set(roots)
    for eqn in eqns:
        if any(v in found for v in inputs(eqn)):
            found.update(eqn.outvars)
    return found


def producers(eqns: Iterable[Any]) -> dict[Var, Any]:
    return {v: eqn for eqn in eqns for v in eqn.outvars}
