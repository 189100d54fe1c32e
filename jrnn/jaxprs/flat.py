"""Jaxprs as flat lists of nodes: calls are inlined, variables are unique, dead nodes are dropped.

Conversion rules, pattern matching and verification see only these nodes. A node can be run by itself, so a graph can be
evaluated node by node and each value inspected.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Value, Values
from jrnn.jaxprs.jax_internals import (
    ClosedJaxpr,
    Params,
    SourceInfo,
    expanded,
    source_line,
    without_bits,
)
from jrnn.jaxprs.queries import Dimension

_PACKAGE = str(Path(__file__).parents[1]) + "/"


@dataclass(frozen=True, eq=False)
class Var:
    """A value of a graph. Two variables are equal only if they are the same object."""

    shape: tuple[Dimension, ...]
    dtype: np.dtype | None

    def __repr__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


Atom = Any  # Var | np.ndarray


@dataclass(frozen=True, eq=False)
class FlatEquation:
    """One equation: `run` computes the outputs from values of the inputs. `source` is the user's line, for errors."""

    name: str
    params: Params
    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    source: str
    run: Callable[..., Values] = field(repr=False)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Of the first output."""
        return self.outputs[0].shape

    @property
    def dtype(self) -> Any:
        """Of the first output."""
        return self.outputs[0].dtype


@dataclass(frozen=True)
class Graph:
    """A flattened jaxpr. `consts` are the arrays that the function closes over."""

    inputs: tuple[Var, ...]
    consts: Mapping[Var, np.ndarray]
    nodes: tuple[FlatEquation, ...]
    outputs: tuple[Atom, ...]

    def used(self) -> set[Var]:
        """The variables that a node reads or that are outputs."""
        used = _variables(self.outputs)
        for node in self.nodes:
            used |= _variables(node.inputs)
        return used

    def makers(self) -> dict[Var, FlatEquation]:
        """The node that makes each variable."""
        return {v: node for node in self.nodes for v in node.outputs}


def _variables(atoms: Iterable[Atom]) -> set[Var]:
    return {a for a in atoms if isinstance(a, Var)}


def flatten(closed: ClosedJaxpr) -> Graph:
    """The graph of a ClosedJaxpr, without the nodes that no output needs.

    >>> import jax, jax.numpy as jnp
    >>> graph = flatten(jax.make_jaxpr(jax.jit(lambda x: (jnp.sin(x), jnp.cos(x))[1]))(1.0))
    >>> [node.name for node in graph.nodes]
    ['cos']
    """
    program = jaxprs.inlined(closed, body_of, _info_of)
    eqns, _ = jaxprs.needed(program.eqns, program.outvars, ())
    known = (*program.constvars, *program.invars, *jaxprs.results(eqns))
    env = {
        v: Var(tuple(getattr(v.aval, "shape", ())), getattr(v.aval, "dtype", None)) for v in known
    }

    def atom(a: jaxprs.Atom) -> Atom:
        return np.asarray(a.val, getattr(a.aval, "dtype", None)) if jaxprs.is_literal(a) else env[a]

    nodes = []
    for eqn in eqns:
        inputs = tuple(map(atom, eqn.invars))
        outputs = tuple(map(atom, eqn.outvars))
        run = partial(jaxprs.bind, eqn)
        nodes.append(
            FlatEquation(
                eqn.primitive.name, eqn.params, inputs, outputs, _line_of(eqn.source_info), run
            )
        )
    consts = {env[v]: value for v, value in zip(program.constvars, program.consts)}
    return Graph(
        tuple(env[v] for v in program.invars),
        consts,
        tuple(nodes),
        tuple(map(atom, program.outvars)),
    )


def _info_of(call: SourceInfo, eqn: Eqn) -> SourceInfo:
    """Inside functions of JAX and jrnn, the source information of the line that calls them."""
    return call if not _source_of(eqn.source_info) and _line_of(call) else eqn.source_info


def body_of(eqn: Eqn) -> ClosedJaxpr | None:
    """The jaxpr of an equation that is a call, or that JAX expands when it lowers it; None for any other equation."""
    if eqn.primitive.name == "custom_vmap_call":  # its rule matters to `vmap` alone
        return eqn.params["call"]
    parameter = jaxprs.LOWERED_CALLS.get(eqn.primitive.name)
    if parameter is None:
        return expanded(eqn)
    plain = without_bits(eqn)
    if plain is not None:
        return plain
    return eqn.params[
        parameter if parameter in eqn.params else "call_jaxpr"
    ]  # of `eval_jaxpr` from jax 0.12 on


def live(nodes: Sequence[FlatEquation], outputs: Iterable[Atom]) -> tuple[FlatEquation, ...]:
    """The nodes that `outputs` need."""
    live_vars = _variables(outputs)
    live_nodes = []
    for node in reversed(nodes):
        if live_vars.intersection(node.outputs):
            live_nodes.append(node)
            live_vars |= _variables(node.inputs)
    return tuple(reversed(live_nodes))


def source_of(eqn: Eqn) -> str:
    """The user's line that an equation comes from, as `model.py:12 (forward)`; "" for a line of jrnn itself."""
    return _source_of(eqn.source_info)


def _source_of(info: SourceInfo) -> str:
    return "" if source_line(info).startswith(_PACKAGE) else _line_of(info)


def _line_of(info: SourceInfo) -> str:
    return re.sub(r"^.*/", "", source_line(info))


def _run(node: FlatEquation, values: list[Value]) -> Values:
    return node.run(*values)


def evaluate_graph(
    graph: Graph,
    args: Values,
    call: Callable[[FlatEquation, list[Value]], Values] = _run,
) -> dict[Var, Value]:
    """The value of every variable of a graph. `call` computes the outputs of a node from the values of its inputs."""
    env = {**graph.consts, **dict(zip(graph.inputs, args, strict=True))}
    for node in graph.nodes:
        env.update(zip(node.outputs, call(node, read(env, node.inputs)), strict=True))
    return env


def read(env: Mapping[Var, Value], atoms: Iterable[Atom]) -> list[Value]:
    """The values of atoms in an environment."""
    return [env[a] if isinstance(a, Var) else a for a in atoms]
