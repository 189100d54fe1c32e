"""Finding a function within a graph: the trace of a reference function is the pattern.

A pattern is written as JAX code, so it matches the primitives that the installed version of JAX traces that code to.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np

from jrnn.convert.emitter import shrink
from jrnn.convert.rules.shape_rules import moves_elements
from jrnn.jaxprs import primitives
from jrnn.jaxprs.flat import Atom, FlatEquation, Graph, Var, flatten
from jrnn.nets.ir import Shape

Makers = Mapping[Var, FlatEquation]

ANY = 0.1234567  # in a pattern: any number, the same in all places
Match = Mapping[Any, Any]  # variable of a pattern -> atom of the graph; ANY -> its number

_IGNORED = (
    "sharding",
    "out_sharding",
    "weak_type",
    "preferred_element_type",
    "precision",
    "accuracy",
)


@cache
def pattern(fn: Callable, shapes: tuple[Shape, ...]) -> Graph:
    """The graph of a reference function of float32 arrays of the given shapes."""
    specs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    return flatten(jax.make_jaxpr(fn)(*specs))


def find(reference: Graph, target: Var, makers: Makers) -> Match | None:
    """The match of a pattern whose last output is `target`, or None."""
    pattern_makers = reference.makers()

    def unify(a: Atom, b: Atom, match: Match) -> Match | None:
        a = _through(a, pattern_makers)
        b = _through(b, makers)
        if not isinstance(a, Var):
            return _same_number(a, b, match)
        if a in match:
            return match if match[a] is b else None
        if a.shape != tuple(b.shape):
            return None
        if a not in pattern_makers:
            return {**match, a: b}
        if not isinstance(b, Var) or b not in makers:
            return None
        after = same(pattern_makers[a], makers[b], a, b, match)
        return None if after is None else {**after, a: b}

    def same(p: FlatEquation, t: FlatEquation, a: Var, b: Var, match: Match) -> Match | None:
        if is_view(p) and is_view(t):
            return unify(_base(p, pattern_makers), _base(t, makers), match)
        if not _alike(p, t) or p.outputs.index(a) != t.outputs.index(b):
            return None
        if len(p.inputs) != len(t.inputs):
            return None
        after = unify_all(p.inputs, t.inputs, match)
        if after is None and primitives.named(p.name).commutes:
            after = unify_all(p.inputs, t.inputs[::-1], match)
        return after

    def unify_all(p: Sequence[Atom], t: Sequence[Atom], match: Match) -> Match | None:
        after: Match | None = match
        for a, b in zip(p, t):
            after = unify(a, b, after)
            if after is None:
                return None
        return after

    return unify(reference.outputs[-1], target, {})


def maker_of(atom: Atom, makers: Makers) -> FlatEquation | None:
    return makers.get(atom) if isinstance(atom, Var) else None


def _through(atom: Atom, makers: Makers) -> Atom:
    """The atom that `atom` is a copy of."""
    source: Atom | None = atom
    while source is not None:
        atom = source
        node = maker_of(atom, makers)
        if node is None:
            break
        row = primitives.named(node.name)
        is_copy = row.reshapes and tuple(node.inputs[0].shape) == node.shape
        source = node.inputs[0] if is_copy or row.copies else _next_to_neutral(node)
    return atom


def _next_to_neutral(node: FlatEquation) -> Atom | None:
    """The operand that a node returns unchanged, because the other one is neutral."""
    row = primitives.named(node.name)
    if row.neutral is None:
        return None
    orders = [node.inputs]
    if row.commutes:
        orders.append(node.inputs[::-1])
    for x, other in orders:
        is_neutral = not isinstance(other, Var) and other.size and np.all(other == row.neutral)
        if is_neutral and x.shape == node.shape:
            return x
    return None


def _same_number(a: np.ndarray, b: Atom, match: Match) -> Match | None:
    if isinstance(b, Var):
        return None
    a = shrink(np.asarray(a))
    b = shrink(np.asarray(b))
    if a.ndim == 0 and a.dtype == np.float32 and a == np.float32(ANY):
        same = b.ndim == 0 and match.get(ANY) in (None, float(b))
        return {**match, ANY: float(b)} if same else None
    return match if a.shape == b.shape and np.array_equal(a, b) else None


def _base(node: FlatEquation, makers: Makers) -> Atom:
    """The atom at the end of a chain of views."""
    while True:
        atom = _through(node.inputs[0], makers)
        maker = maker_of(atom, makers)
        if maker is None or not is_view(maker):
            return atom
        node = maker


def is_view(node: FlatEquation) -> bool:
    """Whether a node gives its operand's elements in the same order in another shape, as a reshape does."""
    operand = node.inputs[0]
    if node.name == "transpose":
        return not moves_elements(operand, node.params["permutation"])
    keeps_size = math.prod(operand.shape) == math.prod(node.shape)
    return primitives.named(node.name).reshapes and keeps_size


def _alike(p: FlatEquation, t: FlatEquation) -> bool:
    """Whether two nodes have the same primitive and the same parameters, except `_IGNORED`."""
    if p.name != t.name:
        return False
    keys = {*p.params, *t.params}.difference(_IGNORED)
    return all(_equal(p.params.get(k), t.params.get(k)) for k in keys)


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except ValueError:
        return False


def ordered(nodes: Sequence[FlatEquation], outputs: Sequence[Atom]) -> tuple[FlatEquation, ...]:
    """The nodes that outputs need, each after the nodes that it reads."""
    makers: dict[Var, FlatEquation] = {}
    for node in nodes:
        makers.update(dict.fromkeys(node.outputs, node))
    done: dict[FlatEquation, None] = {}

    def before(atoms: Sequence[Atom]) -> list[tuple[FlatEquation, bool]]:
        """The makers of atoms, for the stack, which is read from its end."""
        pairs = []
        for atom in reversed(atoms):
            node = maker_of(atom, makers)
            if node is not None:
                pairs.append((node, False))
        return pairs

    stack = before(outputs)
    while stack:
        node, ready = stack.pop()
        if ready:
            done[node] = None
        elif node not in done:
            stack += [(node, True), *before(node.inputs)]
    return tuple(done)
