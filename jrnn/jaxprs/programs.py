"""Programs: jaxprs that are traced, inlined, and evaluated equation by equation.

A piece of a jaxpr is a list of equations that is evaluated in an environment `{variable: value}`. Calls are inlined by
renaming variables, without a trace. Other rewrites trace an evaluation again.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.jaxprs import jax_internals
from jrnn.jaxprs.jax_internals import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    ShapedArray,
    SourceInfo,
    set_xla_metadata,
)
from jrnn.jaxprs.jax_internals import Var as Var

Eqn = JaxprEqn
Equations = Sequence[Eqn]
Atom = Any  # Var | Literal
Value = Any  # of a variable: an array, or what a rule makes of arrays, such as a pair of them
Values = Sequence[Value]
Env = dict[Var, Value]
Jaxprs = ClosedJaxpr | Jaxpr
Names = dict[Var, Atom]  # what stands for a variable
Parameters = Mapping[str, str]  # by the primitive of a call, the parameter that holds its jaxpr
Calls = Parameters | Callable[[Eqn], Any]
Within = Callable[[SourceInfo, Eqn], SourceInfo]
Lift = Callable[[Value], Value]
Rule = Callable[
    ..., Values | None
]  # `(eqn, *operands) -> results`, or None for an equation without a rule

# Primitives that only call a jaxpr, with the parameter that holds it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "jaxpr",
}
# Of a program whose derivative stores none of its values, `checkpoint` is a call too: it only says what may not be stored.
CHECKPOINTS = {"checkpoint": "jaxpr", "remat2": "jaxpr"}
CALLS_AND_CHECKPOINTS = {**CALLS, **CHECKPOINTS}
# Rules for derivatives matter to transformations only: in a program that is being lowered, they are calls too.
LOWERED_CALLS = {
    **CALLS_AND_CHECKPOINTS,
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
TAG = "jrnn_scan"  # the key of XLA metadata that tags a scan, and not what is evaluated for it


@dataclass(frozen=True)
class Program:
    """A jaxpr's equations, inputs and outputs. `consts` are the values of `constvars`."""

    constvars: tuple[Var, ...]
    consts: tuple[Value, ...]
    invars: tuple[Var, ...]
    eqns: tuple[Eqn, ...]
    outvars: tuple[Atom, ...]

    def run(self, *args: Value, rule: Rule | None = None) -> list[Value]:
        """Returns the outputs for these inputs. `rule` is as in `evaluate`."""
        env = dict(zip(self.constvars, self.consts)) | dict(zip(self.invars, args))
        evaluate(self.eqns, env, rule=rule)
        return [value(env, atom) for atom in self.outvars]

    def closed(self) -> ClosedJaxpr:
        """Returns the program as a closed jaxpr."""
        return jax_internals.closed_jaxpr(
            self.invars, self.eqns, self.outvars, dict(zip(self.constvars, self.consts))
        )


def trace(fn: Callable[..., Values], avals: Values, calls: Parameters = CALLS) -> Program:
    """Traces a function from flat arguments of these types to a flat sequence, and opens the calls inside it."""
    return inlined(jax_internals.traced(fn, avals), calls)


def inlined(closed: Jaxprs, calls: Calls = CALLS, within: Within = jax_internals.within) -> Program:
    """Returns the program of a closed jaxpr with the calls inside it inlined. Only scans keep the tag.

    Args:
        closed: the closed jaxpr.
        calls: the primitives to open, with the parameter that holds the jaxpr of each; or a function of equations that
            returns their jaxprs, and None for what is not inlined. With primitives, calls that
            `shared_calls` names stay.
        within: returns the source information of an equation in a call from the call's.
    """
    jaxpr = jaxpr_of(closed)
    if not callable(calls):
        shared = shared_calls(closed, calls)
        if shared:
            calls = functools.partial(_called_unless, calls, shared)
    names = Names()
    consts = dict(zip(jaxpr.constvars, getattr(closed, "consts", ())))
    eqns = tuple(_opened(jaxpr.eqns, names, consts, calls, within))
    outs = tuple(named(names, a) for a in jaxpr.outvars)
    return Program(tuple(consts), tuple(consts.values()), tuple(jaxpr.invars), eqns, outs)


# An inlined program keeps calls of functions with more than `_SMALL` equations if it would have more equations than
# `_MOST_OPENED`, and more than `_MOST_COPIES` times its equations before.
_MOST_OPENED = 8192
_MOST_COPIES = 16
_SMALL = 64


def shared_calls(closed: Jaxprs, calls: Parameters) -> set[int]:
    """Returns the identities of the jaxprs that stay calls, because there would be too many copies of them.

    A function of `jax.jit` that calls another one twice, and so on, has 2^n equations after it is
    inlined at n levels. JAX lowers each function once.

    Args:
        closed: a jaxpr, closed or not.
        calls: the primitives of calls, with the parameter that holds the jaxpr of each.
    """
    jaxpr = jaxpr_of(closed)
    if all(eqn.primitive.name not in calls for eqn in jaxpr.eqns):
        return set()
    opened: dict[int, int] = {}  # the equations of each jaxpr after it is inlined
    uses: dict[int, int] = {}
    distinct = 0

    def count(jaxpr: Jaxpr) -> int:
        nonlocal distinct
        if id(jaxpr) not in opened:
            total = 0
            distinct += len(jaxpr.eqns)
            for eqn in jaxpr.eqns:
                body = called(eqn, calls)
                if body is None:
                    total += 1
                else:
                    inner = jaxpr_of(body)
                    uses[id(inner)] = uses.get(id(inner), 0) + 1
                    total += count(inner)
            opened[id(jaxpr)] = total
        return opened[id(jaxpr)]

    if count(jaxpr) <= max(_MOST_OPENED, _MOST_COPIES * distinct):
        return set()
    return {key for key, total in opened.items() if total > _SMALL and uses.get(key, 0) > 1}


def _called_unless(calls: Parameters, shared: Collection[int], eqn: Eqn) -> Jaxprs | None:
    """Returns the jaxpr of an equation that is one of `calls`, unless it is shared, or None."""
    body = called(eqn, calls)
    return None if body is None or id(jaxpr_of(body)) in shared else body


def placed(program: Program, operands: Sequence[Atom], eqn: Eqn, names: Names) -> Iterator[Eqn]:
    """Yields a program's equations to replace an equation, each time with new variables.

    Args:
        program: the program, inlined and without constants.
        operands: what stands for its inputs.
        eqn: the equation.
        names: gets what stands for the results of the equation.
    """
    inside = dict(zip(program.invars, operands, strict=True))
    info = eqn.source_info
    yield from _opened(program.eqns, inside, {}, {}, lambda call, _: info, info)
    names.update(zip(eqn.outvars, [named(inside, a) for a in program.outvars], strict=True))


def _opened(
    eqns: Equations,
    names: Names,
    consts: Env,
    calls: Calls,
    within: Within,
    call: SourceInfo | None = None,
) -> Iterator[Eqn]:
    """Yields equations with the calls in them inlined. Copies go, and casts of scalars that are known, as in a trace.

    Args:
        eqns: the equations.
        names: what stands for the variables that they read; gets what stands for their results.
        consts: gets the constants of the calls.
        calls, within: as in `inlined`.
        call: the source information of the call that they are in, where they have other variables.
    """
    for eqn in eqns:
        operands = [named(names, a) for a in eqn.invars]
        outs = eqn.outvars
        body = calls(eqn) if callable(calls) else called(eqn, calls)
        name = eqn.primitive.name
        info = eqn.source_info if call is None else within(call, eqn)
        if body is not None:
            jaxpr = jaxpr_of(body)
            inside = dict(zip(jaxpr.invars, operands, strict=True))
            body_consts = {v: Var(v.aval) for v in jaxpr.constvars}
            consts.update(zip(body_consts.values(), getattr(body, "consts", ())))
            inside.update(body_consts)
            yield from _opened(jaxpr.eqns, inside, consts, calls, within, info)
            names.update(zip(outs, [named(inside, a) for a in jaxpr.outvars]))
        elif name == "copy":
            names.update(zip(outs, operands))
        elif (
            name == "convert_element_type"
            and is_literal(operands[0])
            and not operands[0].aval.shape
        ):
            names[outs[0]] = Literal(
                np.asarray(operands[0].val).astype(outs[0].aval.dtype), outs[0].aval
            )
        else:
            if _is_tagged(eqn):
                eqn = eqn.replace(ctx=jax_internals.context_of(eqn, without=TAG))
            if call is None:
                yield with_operands(eqn, operands)
            else:
                new = [Var(v.aval) for v in outs]
                names.update(zip(outs, new))
                yield eqn.replace(invars=operands, outvars=new, source_info=info)


def with_operands(eqn: Eqn, operands: list[Atom]) -> Eqn:
    """Returns the equation with other operands; itself if they are its own."""
    return eqn if all(map(operator.is_, operands, eqn.invars)) else eqn.replace(invars=operands)


def named(names: Names, atom: Atom) -> Atom:
    """Returns what stands for an atom."""
    return atom if is_literal(atom) else names.get(atom, atom)


def _is_tagged(eqn: Eqn) -> bool:
    return TAG in (jax_internals.metadata_of(eqn) or {}) and eqn.primitive.name != "scan"


def jaxpr_of(closed: Any) -> Any:
    """Returns the jaxpr of a closed jaxpr; returns a plain jaxpr as it is."""
    return getattr(closed, "jaxpr", closed)


def is_literal(atom: Atom) -> bool:
    return not isinstance(atom, Var)


def is_in(atom: Atom, variables: Collection[Var]) -> bool:
    """Returns True if an atom is a variable in a collection. Literals have no hash."""
    return not is_literal(atom) and atom in variables


def variables(atoms: Iterable[Atom]) -> list[Var]:
    return [atom for atom in atoms if isinstance(atom, Var)]


def take(values: Values | Env, keys: Iterable[Any]) -> list[Value]:
    """Returns the values at some positions, or of some variables."""
    return [values[key] for key in keys]


def replaced(values: Values, positions: Sequence[int], new: Iterable[Value]) -> list[Value]:
    """Returns the values, with new ones at some positions."""
    result = list(values)
    for i, v in zip(positions, new):
        result[i] = v
    return result


def read(env: Env, atom: Atom) -> Value:
    return atom.val if is_literal(atom) else env[atom]


def value(env: Env, atom: Atom) -> jax.Array:
    """Returns an atom's value as an array of the atom's dtype (a literal may be a Python number)."""
    return jnp.asarray(atom.val, atom.aval.dtype) if is_literal(atom) else env[atom]


def zeros_of_shape(shape: Sequence[int], like: ShapedArray) -> jax.Array:
    """Returns zeros with the dtype and the sharding of the abstract value `like`."""
    zeros = jnp.zeros(shape, like.dtype)
    return jax.sharding.reshard(zeros, like.sharding) if is_explicit(like) else zeros


def is_explicit(aval: ShapedArray) -> bool:
    """Returns True for a value in a mesh with explicit axes, whose type has its sharding."""
    return jax.sharding.AxisType.Explicit in aval.sharding.mesh.axis_types


def evaluate(
    eqns: Iterable[Eqn],
    env: Env,
    rule: Rule | None = None,
    lift: Lift | None = None,
) -> Env:
    """Evaluates equations, adds their results to `env`, and returns it.

    Args:
        eqns: the equations.
        env: the values of the variables that they read.
        rule: computes the results of some of the equations.
        lift: converts the value of a literal to the type of `env`'s values; by default it is not converted.
    """
    for eqn in eqns:
        args = [_lifted(env, atom, lift) for atom in eqn.invars]
        with in_scope(eqn):
            out = None if rule is None else rule(eqn, *args)
            if out is None:
                out = bind(eqn, *args)
        env.update(zip(eqn.outvars, out))
    return env


def _lifted(env: Env, atom: Atom, lift: Lift | None) -> Value:
    return (
        lift(np.asarray(atom.val, atom.aval.dtype))
        if lift is not None and is_literal(atom)
        else read(env, atom)
    )


def uncast(eqn: Eqn, *operands: Value) -> Values | None:
    """The rule of casts that exist only inside `jax.shard_map`: on one device, the numbers stay the same."""
    return operands if eqn.primitive.name == "pvary" else None


def bind(eqn: Eqn, *args: Value, **changed: Any) -> Values:
    """Returns the results of an equation for other operands, with some parameters changed."""
    out = eqn.primitive.bind(*args, **{**eqn.primitive.get_bind_params(eqn.params), **changed})
    return out if eqn.primitive.multiple_results else [out]


def interpreted(
    program: Program | Jaxprs,
    args: Iterable[Value],
    apply: Callable[[Eqn, list[Value]], Values] | None = None,
    lift: Lift | None = None,
) -> list[Value]:
    """Returns the outputs of a program or jaxpr.

    Args:
        program: a `Program`, or a jaxpr, closed or not.
        args: its inputs, which may be values of any kind, such as pairs of arrays.
        apply: returns the results of an equation; by default, JAX computes them.
        lift: makes such a value of a constant or the value of a literal; by default it stays what it is.
    """
    jaxpr = jaxpr_of(program)
    consts = getattr(program, "consts", ())
    env = dict(zip(jaxpr.constvars, consts if lift is None else map(lift, consts)))
    env.update(zip(jaxpr.invars, args, strict=True))
    rule = None if apply is None else lambda eqn, *operands: apply(eqn, list(operands))
    evaluate(jaxpr.eqns, env, rule, lift)
    return [_lifted(env, atom, lift) for atom in jaxpr.outvars]


def without_closure(fn: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Values]:
    """Returns `(values, *args) -> result` for a function of such arguments, and the values that it closes over."""
    closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    tree = jax.tree.structure(shape)
    # The function may live longer than the trace of its values: it must not keep them.
    kind = type(closed)
    jaxpr = closed.jaxpr
    types = [aval.dtype for aval in closed.in_avals]

    def flat(values: Values, *args: Any) -> Any:
        leaves = jax.tree.leaves(args)
        typed = [jax.lax.convert_element_type(x, dtype) for x, dtype in zip(leaves, types)]
        return jax.tree.unflatten(tree, jax_internals.jaxpr_as_fun(kind(jaxpr, values))(*typed))

    return flat, list(closed.consts)


def in_scope(eqn: Eqn) -> ExitStack:
    """Enters an equation's context: its source lines, its `jax.named_scope`, and its options without the tag."""
    stack = jax_internals.in_scope(eqn)
    if _is_tagged(eqn):
        stack.enter_context(set_xla_metadata(**{TAG: None}))
    return stack


def called(eqn: Eqn, calls: Parameters) -> Any | None:
    """Returns the jaxpr of an equation that is one of `calls`, or None. A `jit` with its own shardings is not inlined."""
    parameter = calls.get(eqn.primitive.name)
    if parameter is None or eqn.effects:
        return None
    if jax_internals.has_own_shardings(eqn):
        return None
    return eqn.params[
        parameter if parameter in eqn.params else "call_jaxpr"
    ]  # the name in `eval_jaxpr` since jax 0.12
