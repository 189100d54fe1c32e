"""What the executor does with jaxprs: trace, flatten, evaluate in pieces, and ask what an equation is like.

Pieces of a jaxpr are plain lists of equations evaluated in an environment `{variable: value}`, so that a rewrite is a
new trace of an evaluation, and nothing here builds equations by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

Var = jex.Var
Atom = Any  # Var | Literal
Env = dict[Var, Any]


@dataclass(frozen=True)
class Program:
    """Equations with their inputs and outputs; `consts` are the values of `constvars`."""

    constvars: tuple[Var, ...]
    consts: tuple[Any, ...]
    invars: tuple[Var, ...]
    eqns: tuple[Any, ...]
    outvars: tuple[Atom, ...]
    effects: Any


def trace(fn: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> Program:
    """Traces a function of flat arguments that returns a flat sequence, and flattens the calls inside it."""
    return _trace(lambda *args: _inlined(jax.make_jaxpr(fn)(*avals), args), avals)


def _trace(fn: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> Program:
    closed = jax.make_jaxpr(fn)(*avals)
    jaxpr = closed.jaxpr
    return Program(
        tuple(jaxpr.constvars),
        tuple(closed.consts),
        tuple(jaxpr.invars),
        tuple(jaxpr.eqns),
        tuple(jaxpr.outvars),
        jaxpr.effects,
    )


def retrace(evaluation: Callable[[Env], Env], invars: Sequence[Var], outs: Sequence[Atom]) -> Program:
    """The program of an evaluation that is given the environment of `invars` and must define `outs`."""

    def fn(*args: Any) -> list[Any]:
        env = evaluation(dict(zip(invars, args)))
        return [read(env, atom) for atom in outs]

    return _trace(fn, [v.aval for v in invars])


def _inlined(closed: Any, args: Sequence[Any]) -> list[Any]:
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.constvars, closed.consts))
    env.update(zip(jaxpr.invars, args))
    evaluate(jaxpr.eqns, env, inline=True)
    return [read(env, atom) for atom in jaxpr.outvars]


def is_literal(atom: Atom) -> bool:
    return not isinstance(atom, Var)


def read(env: Env, atom: Atom) -> Any:
    return atom.val if is_literal(atom) else env[atom]


def value(env: Env, atom: Atom) -> jax.Array:
    """An atom's value as an array of its own type (a literal may be a Python number)."""
    return jnp.asarray(atom.val, atom.aval.dtype) if is_literal(atom) else env[atom]


def evaluate(eqns: Iterable[Any], env: Env, inline: bool = False) -> Env:
    """Evaluates equations into `env`, which it changes and returns; with `inline`, calls are opened."""
    for eqn in eqns:
        args = [read(env, atom) for atom in eqn.invars]
        with in_scope(eqn):
            body = _call_body(eqn) if inline else None
            if body is not None:
                out = _inlined(body, args)
            else:
                out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
                out = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, out))
    return env


def in_scope(eqn: Any) -> ExitStack:
    """The equation's own context: its `jax.named_scope`, and what `eqn.ctx` holds."""
    stack = ExitStack()
    name = str(eqn.source_info.name_stack)
    if name:
        stack.enter_context(jax.named_scope(name))
    stack.enter_context(eqn.ctx.manager)
    return stack


def _call_body(eqn: Any) -> Any | None:
    """The jaxpr that an equation merely calls, or None: calls with derivative rules or placements of their own stay."""
    if eqn.primitive.name in ("jit", "pjit"):
        placed = (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
        if all(type(s).__name__ == "UnspecifiedValue" for s in placed):
            return eqn.params["jaxpr"]
    if eqn.primitive.name == "closed_call":
        return eqn.params["call_jaxpr"]
    return None


# What an equation is like --------------------------------------------------------------------------------------------

_OPEN = 64  # elements of a dimension that is not known, where sizes are compared
_CONTRACTIONS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_LOOKUPS = ("gather",)
_SOLVERS = ("triangular_solve", "cholesky", "lu", "qr", "eigh", "eig", "svd", "fft")
_RULED_CALLS = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")

# Cheap enough to be done again in the reverse loop instead of storing their results.
# fmt: off
CHEAP = frozenset(
    (
        "abs", "add", "add_any", "and", "atan2", "bitcast_convert_type", "broadcast_in_dim", "cbrt", "ceil", "clamp",
        "concatenate", "convert_element_type", "copy", "copy_p", "cos", "cosh", "div", "eq", "erf", "exp", "exp2",
        "expand_dims", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "iota", "is_finite", "le", "log",
        "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "not", "or", "pad", "pow", "real",
        "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_precision", "reduce_sum", "rem", "reshape",
        "rev", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
        "sin", "sinh", "slice", "sqrt", "square", "squeeze", "stop_gradient", "sub", "tan", "tanh", "transpose",
        "xor",
    )
)
# fmt: on


def sub_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs in an equation's parameters."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def is_heavy(eqn: Any) -> bool:
    """Worth taking out of a loop: a contraction, a lookup or a solver, or a call that holds one."""
    name = eqn.primitive.name
    if name in _CONTRACTIONS + _LOOKUPS + _SOLVERS:
        return True
    return name in _RULED_CALLS and any(is_heavy(e) for inner in sub_jaxprs(eqn) for e in inner.eqns)


def is_contraction(eqn: Any) -> bool:
    return eqn.primitive.name in _CONTRACTIONS


def is_movable(eqn: Any) -> bool:
    """Whether it may be evaluated under `vmap` over time: control flow, callbacks and kernels may not."""
    name = eqn.primitive.name
    if name in _RULED_CALLS:
        return all(is_movable(e) for inner in sub_jaxprs(eqn) for e in inner.eqns)
    foreign = "callback" in name or "ffi" in name or "pallas" in name or "custom" in name
    return (
        not foreign and not draws_otherwise_at_once(eqn) and not any(True for _ in sub_jaxprs(eqn)) and not eqn.effects
    )


def draws_otherwise_at_once(eqn: Any) -> bool:
    """Whether it makes random numbers that are others under `vmap`: those of all keys but JAX's default, threefry's."""
    keys = [a.aval.dtype.name for a in eqn.invars if jnp.issubdtype(a.aval.dtype, jax.dtypes.prng_key)]
    return eqn.primitive.name == "rng_bit_generator" or any(name != "key<fry>" for name in keys)


def is_view(eqn: Any) -> bool:
    """Only picks, spreads or orders what its operand holds: free where it is used, a copy where its result is stored."""
    return eqn.primitive.name in (
        "slice",
        "split",
        "squeeze",
        "reshape",
        "broadcast_in_dim",
        "transpose",
        "expand_dims",
    )


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


def needed(eqns: Sequence[Any], outs: Iterable[Atom], available: Collection[Var]) -> tuple[list[Any], list[Var]]:
    """The equations that compute `outs` from `available`, and the variables of `available` that are read.

    >>> p = trace(lambda a, b: [a + b, a * b], [jax.typeof(1.0), jax.typeof(2.0)])
    >>> [e.primitive.name for e in needed(p.eqns, p.outvars[:1], set(p.invars))[0]]
    ['add']
    """
    want = {atom: None for atom in outs if not is_literal(atom)}
    kept = []
    for eqn in reversed(eqns):
        made = [v for v in eqn.outvars if v in want and v not in available]
        if made:
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


def distinct(evaluated: Sequence[Any], env: Env) -> Env:
    """Evaluates equations, each distinct one once (equal primitive, parameters and operands)."""
    seen: dict[Any, list[Any]] = {}
    for eqn in evaluated:
        args = [read(env, atom) for atom in eqn.invars]
        key: Any = None
        if not any(True for _ in sub_jaxprs(eqn)):
            try:
                operands = tuple(_identity(atom, arg) for atom, arg in zip(eqn.invars, args))
                key = (eqn.primitive, tuple(sorted(eqn.params.items(), key=lambda kv: kv[0])), operands)
                hash(key)
            except TypeError:
                key = None
        if key is not None and key in seen:
            env.update(zip(eqn.outvars, seen[key]))
            continue
        evaluate([eqn], env)
        if key is not None:
            seen[key] = [env[v] for v in eqn.outvars]
    return env


def _identity(atom: Atom, arg: Any) -> Any:
    """Equal for equal operands: literals by value, other values by the object that they are."""
    if is_literal(atom) and np.ndim(arg) == 0:
        return (str(atom.aval), np.asarray(arg).tobytes() if hasattr(arg, "dtype") else repr(arg))
    return id(arg)
