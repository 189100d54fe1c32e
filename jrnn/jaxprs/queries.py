"""Queries about equations: sizes, inner jaxprs, what a result needs, and what follows from a value."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jrnn.jaxprs.jax_internals import ClosedJaxpr, Jaxpr
from jrnn.jaxprs.jax_internals import scan_counts as scan_counts
from jrnn.jaxprs.programs import Atom, Eqn, Var, is_in, is_literal, jaxpr_of, variables

_JAXPRS = (Jaxpr, ClosedJaxpr)

# Sizes ---------------------------------------------------------------------------------------------------------------

_OPEN = 64  # the size that a symbolic dimension counts as where sizes are compared


def sub_jaxprs(eqn: Eqn) -> Iterator[Any]:
    """Yields the jaxprs in an equation's parameters."""
    for value in eqn.params.values():
        if isinstance(value, (tuple, list)):
            yield from [jaxpr_of(item) for item in value if isinstance(item, _JAXPRS)]
        elif isinstance(value, _JAXPRS):
            yield jaxpr_of(value)


def run_jaxprs(eqn: Eqn) -> Iterator[Any]:
    """Yields the jaxprs that an equation runs: of a linear solve its solver, the others are for its gradient."""
    if eqn.primitive.name == "custom_linear_solve":
        yield jaxpr_of(eqn.params["jaxprs"].solve)
    else:
        yield from sub_jaxprs(eqn)


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in sub_jaxprs(eqn):
            yield from all_equations(inner)


def is_known(dimension: Any) -> bool:
    """Returns True if a dimension is a number, and False if it is a symbolic dimension of `jax.export`."""
    return isinstance(dimension, (int, np.integer))


def extent(dimension: Any) -> int:
    """Returns a dimension as a number; symbolic dimensions count as 64."""
    return int(dimension) if is_known(dimension) else _OPEN


def elements(shape: Sequence[Any]) -> int:
    count = math.prod(shape)  # asked very often
    return count if type(count) is int else math.prod(map(extent, shape))


def nbytes(atom: Atom) -> int:
    return elements(atom.aval.shape) * getattr(
        atom.aval.dtype, "itemsize", 4
    )  # extended dtypes may have no itemsize


# Pieces --------------------------------------------------------------------------------------------------------------


def inputs(eqn: Eqn) -> list[Var]:
    return [atom for atom in eqn.invars if isinstance(atom, Var)]


def needed(
    eqns: Sequence[Eqn], outs: Iterable[Atom], available: Collection[Var], effects: bool = False
) -> tuple[list[Any], list[Var]]:
    """Returns the equations that compute `outs` from `available`, and the variables of `available` that they read.

    With `effects`, equations with side effects are included.

    >>> import jax
    >>> from jrnn.jaxprs import trace
    >>> p = trace(lambda a, b: [a + b, a * b], [jax.typeof(1.0), jax.typeof(2.0)])
    >>> [e.primitive.name for e in needed(p.eqns, p.outvars[:1], set(p.invars))[0]]
    ['add']
    """
    want = dict.fromkeys(variables(outs))
    needed_eqns = []
    for eqn in reversed(eqns):  # loops, and no generators: asked very often
        for v in eqn.outvars:
            if v in want and v not in available:
                break
        else:
            if not (effects and eqn.effects):
                continue
        needed_eqns.append(eqn)
        for atom in eqn.invars:
            if isinstance(atom, Var):
                want[atom] = None
    return needed_eqns[::-1], [v for v in want if v in available]


def free_variables(eqns: Sequence[Eqn]) -> list[Var]:
    """Returns the variables that equations read but do not define."""
    defined = {v for eqn in eqns for v in eqn.outvars}
    return list(dict.fromkeys(v for eqn in eqns for v in inputs(eqn) if v not in defined))


def depends(eqns: Sequence[Eqn], roots: Iterable[Var]) -> set[Var]:
    """Returns `roots` and every variable computed from one of them."""
    reached = set(roots)
    for eqn in eqns:
        for atom in eqn.invars:
            if isinstance(atom, Var) and atom in reached:
                reached.update(eqn.outvars)
                break
    return reached


def producers(eqns: Iterable[Eqn]) -> dict[Var, Any]:
    return {v: eqn for eqn in eqns for v in eqn.outvars}


def is_zero(atom: Atom, producers: Mapping[Var, Any]) -> bool:
    """Returns True if a value is an array of zeros. `producers` maps variables to their equations."""
    while not is_literal(atom):
        eqn = producers.get(atom)
        if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
            return False
        atom = eqn.invars[0]
    return bool(np.all(np.asarray(atom.val) == 0))


def operations(eqn: Eqn) -> int:
    """Returns the floating-point operations of a `dot_general`."""
    (axes, _), _ = eqn.params["dimension_numbers"]
    depth = math.prod(extent(eqn.invars[0].aval.shape[a]) for a in axes)
    return 2 * elements(eqn.outvars[0].aval.shape) * depth


def is_by_rows(eqn: Eqn) -> bool:
    """Returns True for a product x W^T of a matrix W, which XLA:CPU computes more slowly than x W."""
    ((_, axes), (_, batch)), right = eqn.params["dimension_numbers"], eqn.invars[1].aval
    return right.ndim == 2 and tuple(axes) == (1,) and not tuple(batch)


# Groups of carries that read each other: the strongly connected components of the graph of their reads --------------------

Group = tuple[int, ...]


def components(reads: Sequence[Collection[int]]) -> tuple[list[Group], list[set[int]]]:
    """Groups nodes that reach each other.

    Args:
        reads: for each node, the nodes that it reads.

    Returns:
        The groups, each after those that it reads; and for each node, all that it reaches, itself among them.

    >>> components([{1}, {0}, {2, 0}])
    ([(0, 1), (2,)], [{0, 1}, {0, 1}, {0, 1, 2}])
    """
    count = range(len(reads))
    reach = [{*mine, i} for i, mine in enumerate(reads)]
    for k in count:  # the transitive closure
        reach = [mine | reach[k] if k in mine else mine for mine in reach]
    groups = dict.fromkeys(
        tuple(j for j in count if j in reach[i] and i in reach[j]) for i in count
    )
    return sorted(groups, key=lambda group: len(reach[group[0]])), reach


def carry_groups(
    eqns: Sequence[Eqn], carry: Sequence[Var], new: Sequence[Atom]
) -> tuple[list[Group], list[set[int]]]:
    """Groups the carries of a step that read each other, as `components` does.

    Args:
        eqns: the equations of the step.
        carry, new: the carries, and their new values.
    """
    after = [depends(eqns, [v]) for v in carry]
    return components([{j for j, mine in enumerate(after) if is_in(out, mine)} for out in new])
