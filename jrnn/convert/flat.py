"""Jaxprs as flat lists of nodes: calls are opened, variables are made unique, dead nodes are dropped.

What comes after (rules, recognition of groups, verification) sees only these nodes. A node can be run by itself, so a
graph can be evaluated node by node and each value inspected.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jrnn.executor import jaxprs
from jrnn.jax_names import expanded, source_line

_PACKAGE = str(Path(__file__).parents[1]) + "/"


@dataclass(frozen=True, eq=False)
class Var:
    """A value of a graph, equal to itself alone."""

    shape: tuple[Any, ...]
    dtype: Any

    def __repr__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


Atom = Any  # Var | np.ndarray


@dataclass(frozen=True, eq=False)
class Node:
    """One equation: `run` computes the outputs from values of the inputs. `source` is the user's line, for errors."""

    name: str
    params: Mapping[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[Var, ...]
    source: str
    run: Callable[..., Sequence[Any]] = field(repr=False)


@dataclass(frozen=True)
class Graph:
    """A flattened jaxpr. `consts` are the arrays that the function closes over."""

    inputs: tuple[Var, ...]
    consts: Mapping[Var, Any]
    nodes: tuple[Node, ...]
    outputs: tuple[Atom, ...]

    def users(self) -> dict[Var, list[Node]]:
        """The nodes that read each variable; an output of the graph counts as a reader, None."""
        found: dict[Var, list[Any]] = {}
        for node in self.nodes:
            for atom in node.inputs:
                if isinstance(atom, Var):
                    found.setdefault(atom, []).append(node)
        for atom in self.outputs:
            if isinstance(atom, Var):
                found.setdefault(atom, []).append(None)
        return found

    def makers(self) -> dict[Var, Node]:
        """The node that makes each variable."""
        return {v: node for node in self.nodes for v in node.outputs}


def flatten(closed: Any) -> Graph:
    """The graph of a ClosedJaxpr, without the nodes that no output needs.

    >>> import jax, jax.numpy as jnp
    >>> graph = flatten(jax.make_jaxpr(jax.jit(lambda x: (jnp.sin(x), jnp.cos(x))[1]))(1.0))
    >>> [node.name for node in graph.nodes]
    ['cos']
    """
    jaxpr = closed.jaxpr
    env: dict[Any, Atom] = {v: _new(v) for v in (*jaxpr.constvars, *jaxpr.invars)}
    consts = {env[v]: value for v, value in zip(jaxpr.constvars, closed.consts)}
    inputs = tuple(env[v] for v in jaxpr.invars)
    nodes: list[Node] = []
    _walk(jaxpr.eqns, env, nodes, consts)
    outputs = tuple(_atom(env, v) for v in jaxpr.outvars)
    return Graph(inputs, consts, live(nodes, outputs), outputs)


def live(nodes: Sequence[Node], outputs: Iterable[Atom]) -> tuple[Node, ...]:
    """The nodes that `outputs` need."""
    wanted = {v for v in outputs if isinstance(v, Var)}
    kept = []
    for node in reversed(nodes):
        if wanted.intersection(node.outputs):
            kept.append(node)
            wanted.update(v for v in node.inputs if isinstance(v, Var))
    return tuple(reversed(kept))


def _new(v: Any) -> Var:
    return Var(tuple(getattr(v.aval, "shape", ())), getattr(v.aval, "dtype", None))


def _atom(env: dict, atom: Any) -> Atom:
    if jaxprs.is_literal(atom):
        return np.asarray(atom.val, getattr(atom.aval, "dtype", None))
    return env[atom]


def _walk(eqns: Iterable[Any], env: dict, nodes: list[Node], consts: dict, caller: str = "") -> None:
    for eqn in eqns:
        # inside of JAX's own functions and of jrnn's, the line that calls them
        source = source_of(eqn) or caller or _line_of(eqn)
        body = eqn.params.get(jaxprs.LOWERED_CALLS.get(eqn.primitive.name, ""))
        body = expanded(eqn) if body is None else body
        if body is not None:
            _open(body, eqn, env, nodes, consts, source)
            continue
        for v in eqn.outvars:
            env[v] = _new(v)
        nodes.append(
            Node(
                eqn.primitive.name,
                eqn.params,
                tuple(_atom(env, v) for v in eqn.invars),
                tuple(env[v] for v in eqn.outvars),
                source,
                partial(jaxprs.bind, eqn),
            )
        )


def _open(body: Any, eqn: Any, env: dict, nodes: list[Node], consts: dict, source: str) -> None:
    jaxpr, values = (body.jaxpr, body.consts) if hasattr(body, "consts") else (body, ())
    inner: dict[Any, Atom] = {}
    for v, value in zip(jaxpr.constvars, values):
        inner[v] = _new(v)
        consts[inner[v]] = value
    inner.update((v, _atom(env, outer)) for v, outer in zip(jaxpr.invars, eqn.invars))
    _walk(jaxpr.eqns, inner, nodes, consts, source)
    env.update((outer, _atom(inner, v)) for outer, v in zip(eqn.outvars, jaxpr.outvars))


def source_of(eqn: Any) -> str:
    """`model.py:12 (forward)`: where the user wrote what became this equation; "" where jrnn itself did."""
    return "" if source_line(eqn).startswith(_PACKAGE) else _line_of(eqn)


def _line_of(eqn: Any) -> str:
    return re.sub(r"^.*/", "", source_line(eqn))


def evaluate(graph: Graph, args: Sequence[Any]) -> dict[Var, Any]:
    """The value of every variable of a graph."""
    env: dict[Var, Any] = {**graph.consts, **dict(zip(graph.inputs, args))}
    for node in graph.nodes:
        env.update(zip(node.outputs, node.run(*(env[a] if isinstance(a, Var) else a for a in node.inputs))))
    return env
