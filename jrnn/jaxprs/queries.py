"""Queries about equations: sizes, inner jaxprs, what a result needs, and what follows from a value."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.jaxprs.jax_internals import ClosedJaxpr, Jaxpr
from jrnn.jaxprs.jax_internals import scan_counts as scan_counts
from jrnn.jaxprs.programs import Atom, Eqn, Equations, Var, is_literal, jaxpr_of, variables

Dimension = Any  # a number, or a symbolic dimension of `jax.export`
_JAXPRS = (Jaxpr, ClosedJaxpr)

# Sizes ---------------------------------------------------------------------------------------------------------------

_OPEN = 64  # the size that a symbolic dimension counts as where sizes are compared


def sub_jaxprs(eqn: Eqn) -> Iterator[Jaxpr]:
    """Yields the jaxprs in an equation's parameters."""
    for value in eqn.params.values():
        if isinstance(value, (tuple, list)):
            yield from [jaxpr_of(item) for item in value if isinstance(item, _JAXPRS)]
        elif isinstance(value, _JAXPRS):
            yield jaxpr_of(value)


def run_jaxprs(eqn: Eqn) -> Iterator[Jaxpr]:
    """Yields the jaxprs that an equation runs: of a linear solve its solver, the others are for its gradient."""
    if eqn.primitive.name == "custom_linear_solve":
        yield jaxpr_of(eqn.params["jaxprs"].solve)
    else:
        yield from sub_jaxprs(eqn)


def all_equations(jaxpr: Jaxpr) -> Iterator[Eqn]:
    """Yields the equations of a jaxpr and of the jaxprs inside it. A jaxpr that is called several times is read once."""
    return nested_equations(jaxpr.eqns, sub_jaxprs)


def nested_equations(
    eqns: Iterable[Eqn],
    jaxprs_in: Callable[[Eqn], Iterable[Jaxpr]],
    seen: set[int] | None = None,
) -> Iterator[Eqn]:
    """Yields equations and, after each, the equations of the jaxprs in it, each jaxpr once.

    Args:
        eqns: the equations.
        jaxprs_in: returns the jaxprs of an equation.
        seen: the identities of the jaxprs that were read before.
    """
    seen = set() if seen is None else seen
    for eqn in eqns:
        yield eqn
        for inner in jaxprs_in(eqn):
            if id(inner) not in seen:
                seen.add(id(inner))
                yield from nested_equations(inner.eqns, jaxprs_in, seen)


def is_known(dimension: Dimension) -> bool:
    """Returns True if a dimension is a number, and False if it is a symbolic dimension of `jax.export`."""
    return isinstance(dimension, (int, np.integer))


def promoted_type(*values: jax.typing.ArrayLike) -> jnp.dtype:
    """Returns the type to which JAX promotes values or types, also where an option of the user forbids promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*values)


def is_floating(value: Any) -> bool:
    """Whether a value has a type of floating-point numbers."""
    return bool(jnp.issubdtype(value.dtype, jnp.floating))


def with_promotion(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a function of jrnn's own formulas with JAX's promotion of dtypes, which an option of the user may forbid."""

    @functools.wraps(fn)
    def promoting(*args: Any, **keywords: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return fn(*args, **keywords)

    return promoting


def other_axes(ndim: int, axes: Collection[int]) -> list[int]:
    """Returns the axes of an array that are not among some."""
    return [axis for axis in range(ndim) if axis not in axes]


def positions(values: Iterable[Hashable]) -> dict[Any, int]:
    """Returns the position of each of some different values.

    >>> positions((2, 0, 1))
    {2: 0, 0: 1, 1: 2}
    """
    return {value: i for i, value in enumerate(values)}


def extent(dimension: Dimension) -> int:
    """Returns a dimension as a number; symbolic dimensions count as 64."""
    return int(dimension) if is_known(dimension) else _OPEN


def along_first(values: Any, like: Any) -> Any:
    """Values of the first axes, in a shape that broadcasts with `like`."""
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


def elements(shape: Sequence[Dimension]) -> int:
    count = math.prod(shape)  # asked very often
    return count if type(count) is int else math.prod(map(extent, shape))


def type_of(atom: Atom) -> tuple[Any, Any]:
    """Returns the shape and the dtype of a value."""
    return atom.aval.shape, atom.aval.dtype


def nbytes(atom: Atom) -> int:
    return elements(atom.aval.shape) * getattr(
        atom.aval.dtype, "itemsize", 4
    )  # extended dtypes may have no itemsize


# Pieces --------------------------------------------------------------------------------------------------------------


def inputs(eqn: Eqn) -> list[Var]:
    """Returns the variables that an equation reads."""
    return [atom for atom in eqn.invars if isinstance(atom, Var)]


def results(eqns: Iterable[Eqn]) -> list[Var]:
    """Returns the variables that equations define, in their order."""
    variables: list[Var] = []
    for eqn in eqns:
        variables += eqn.outvars
    return variables


def any_in(variables: Iterable[Var], some: Collection[Var]) -> bool:
    """Returns True if one of the variables is among some others."""
    for v in variables:
        if v in some:
            return True
    return False


def needed(
    eqns: Equations, outs: Iterable[Atom], available: Collection[Var], effects: bool = False
) -> tuple[list[Eqn], list[Var]]:
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


class Leading:
    """Finds what leads to some results of equations, without reading the others as `needed` does."""

    def __init__(self, eqns: Equations):
        self._eqns = eqns
        self._positions = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}

    def to(
        self, outs: Iterable[Atom], is_available: Callable[[Var], bool]
    ) -> tuple[list[Eqn], list[Var]]:
        """Returns the equations that compute `outs`, and the available variables that they read, as `needed` does."""
        outs = variables(outs)
        leading: set[int] = set()
        queue = list(outs)
        while queue:
            v = queue.pop()
            at = None if is_available(v) else self._positions.get(v)
            if at is not None and at not in leading:
                leading.add(at)
                queue += inputs(self._eqns[at])
        eqns = [self._eqns[at] for at in sorted(leading)]
        read = dict.fromkeys(outs)
        for eqn in reversed(eqns):
            read.update(dict.fromkeys(inputs(eqn)))
        return eqns, [v for v in read if is_available(v)]


def scan_parts(params: Mapping[str, Any], values: Sequence[Any]) -> tuple[Sequence[Any], ...]:
    """The constants, the carry and the sequences among the operands of a scan's equation."""
    n_consts, n_carry = scan_counts(params)
    end = n_consts + n_carry
    return values[:n_consts], values[n_consts:end], values[end:]


def free_variables(eqns: Equations) -> list[Var]:
    """Returns the variables that equations read but do not define."""
    read: dict[Var, None] = {}
    for eqn in eqns:
        read.update(dict.fromkeys(inputs(eqn)))
    defined = set(results(eqns))
    return [v for v in read if v not in defined]


def depends(eqns: Equations, roots: Iterable[Var]) -> set[Var]:
    """Returns `roots` and every variable computed from one of them."""
    reached = set(roots)
    for eqn in eqns:
        for atom in eqn.invars:
            if isinstance(atom, Var) and atom in reached:
                reached.update(eqn.outvars)
                break
    return reached


def producers(eqns: Iterable[Eqn]) -> dict[Var, Eqn]:
    """Returns the equation that defines each variable."""
    defined: dict[Var, Eqn] = {}
    for eqn in eqns:
        defined.update(dict.fromkeys(eqn.outvars, eqn))
    return defined


def made_by(atom: Atom, producers: Mapping[Var, Eqn], name: str) -> Eqn | None:
    """Returns the equation that computes a value, if it is one of a primitive; None otherwise."""
    eqn = None if is_literal(atom) else producers.get(atom)
    return eqn if eqn is not None and eqn.primitive.name == name else None


def readers(eqns: Iterable[Eqn]) -> dict[Var, list[Eqn]]:
    """Returns the equations that read each variable, one that reads it twice as two."""
    reading: dict[Var, list[Eqn]] = {}
    for eqn in eqns:
        for v in inputs(eqn):
            reading.setdefault(v, []).append(eqn)
    return reading


def uses(eqns: Iterable[Eqn], outputs: Iterable[Atom]) -> Counter[Var]:
    """Returns how often equations and outputs read each variable."""
    counts = Counter(variables(outputs))
    for eqn in eqns:
        counts.update(inputs(eqn))
    return counts


def is_zero(atom: Atom, producers: Mapping[Var, Eqn]) -> bool:
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
    (_, axes), (_, batch) = eqn.params["dimension_numbers"]
    right = eqn.invars[1].aval
    return right.ndim == 2 and tuple(axes) == (1,) and not tuple(batch)


# Groups of carries that read each other: the strongly connected components of the graph of their reads --------------------

Group = tuple[int, ...]


def components(reads: Sequence[Collection[int]], count: int | None = None) -> Components:
    """Groups nodes that reach each other.

    Args:
        reads: for each node, the nodes that it reads.
        count: the number of nodes that matter, the first ones, by default all. Others only lead from one to another.

    >>> components([{1}, {0}, {2, 0}]).groups
    [(0, 1), (2,)]
    >>> components([{2}, {1}, {1}], count=2).groups
    [(1,), (0,)]
    """
    count = len(reads) if count is None else count
    reach: dict[int, int] = {}
    cyclic = 0
    groups: list[Group] = []
    for together in _strongly_connected(reads):
        mine = 0
        members = set(together)
        is_cycle = len(together) > 1
        for node in together:
            mine |= 1 << node if node < count else 0
            is_cycle = is_cycle or node in reads[node]
        all_bits = mine
        for node in together:
            for other in reads[node]:
                if other not in members:
                    all_bits |= reach[other]
        reach.update(dict.fromkeys(together, all_bits))
        if is_cycle:
            cyclic |= mine
        if mine:
            groups.append(tuple(sorted(node for node in together if node < count)))
    groups.sort()
    groups.sort(key=lambda group: reach[group[0]].bit_count())
    return Components(groups, [reach[node] for node in range(count)], cyclic)


class Components(NamedTuple):
    """Groups of nodes that reach each other.

    Sets of nodes are the bits of integers: as lists, they would have as many entries as there are pairs of nodes.

    Attributes:
        groups: the nodes of each, each group after the groups that it reads.
        reach: for each node, all that it reaches, itself among them.
        cyclic: the nodes that read themselves, or others that read them.
    """

    groups: list[Group]
    reach: list[int]
    cyclic: int


def nodes_of(bits: int) -> list[int]:
    """Returns the nodes of a set, in order.

    >>> nodes_of(0b1010)
    [1, 3]
    """
    nodes = []
    while bits:
        lowest = bits & -bits
        nodes.append(lowest.bit_length() - 1)
        bits ^= lowest
    return nodes


def _strongly_connected(reads: Sequence[Collection[int]]) -> Iterator[list[int]]:
    """Yields nodes that reach each other, after the others that they read.

    R. Tarjan, "Depth-first search and linear graph algorithms", SIAM Journal on Computing 1972, without recursion. `lowest`
    is the number of the earliest node that it is known to reach, among nodes without a component yet.
    """
    number: dict[int, int] = {}
    lowest: dict[int, int] = {}
    pending: list[int] = []
    is_pending: set[int] = set()
    for root in range(len(reads)):
        if root in number:
            continue
        path = [(root, iter(reads[root]))]
        number[root] = lowest[root] = len(number)
        pending.append(root)
        is_pending.add(root)
        while path:
            node, others = path[-1]
            for other in others:
                if other not in number:
                    number[other] = lowest[other] = len(number)
                    pending.append(other)
                    is_pending.add(other)
                    path.append((other, iter(reads[other])))
                    break
                if other in is_pending:
                    lowest[node] = min(lowest[node], number[other])
            else:
                path.pop()
                if path:
                    before = path[-1][0]
                    lowest[before] = min(lowest[before], lowest[node])
                if lowest[node] == number[node]:
                    together = [pending.pop()]
                    while together[-1] != node:
                        together.append(pending.pop())
                    is_pending.difference_update(together)
                    yield together


def carry_groups(eqns: Equations, carry: Sequence[Var], new: Sequence[Atom]) -> Components:
    """Groups the carries of a step that read each other, as `components` does.

    Args:
        eqns: the equations of the step.
        carry, new: the carries, and their new values.
    """
    node_of = positions(carry)
    for node, eqn in enumerate(eqns, len(carry)):
        node_of.update(dict.fromkeys(eqn.outvars, node))

    def read(atoms: Sequence[Atom]) -> list[int]:
        return [node_of[v] for v in variables(atoms) if v in node_of]

    reads = [read([out]) for out in new]
    reads += [read(eqn.invars) for eqn in eqns]
    return components(reads, len(carry))
