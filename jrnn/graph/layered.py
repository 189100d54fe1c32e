"""The positions of a graph's nodes when it is drawn in layers, with edges pointing down.

The method is that of Sugiyama, Tagawa and Toda (Methods for Visual Understanding of Hierarchical System Structures, 1981):
nodes get layers, edges that span several get a bend in each, layers are ordered by the mean positions of
neighbors, and nodes are then moved towards their neighbors as far as there is room.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

_SWEEPS = 6
_GAP = 14.0
_ABREAST = 4

Node = Hashable


@dataclass(frozen=True)
class Layout:
    """The center of each node, in widths and layers; for each edge the points it goes through; the width of it all."""

    places: Mapping[Node, tuple[float, int]]
    edges: Mapping[tuple[Node, Node], list[tuple[float, int]]]
    width: float
    layers: int


def layout(widths: Mapping[Node, float], edges: Sequence[tuple[Node, Node]]) -> Layout:
    """Places nodes of an acyclic graph, given with their widths in an order in which edges point forward.

    >>> found = layout({"a": 10, "b": 10, "c": 10}, [("a", "c"), ("b", "c")])
    >>> [found.places[n] for n in "abc"]
    [(5.0, 0), (29.0, 0), (17.0, 1)]
    """
    edges = list(dict.fromkeys(edges))
    layer = _layers(list(widths), edges)
    sizes = dict(widths)
    chains: dict[tuple[Node, Node], list[Node]] = {}
    for u, v in edges:
        bends: list[Node] = [("bend", u, v, k) for k in range(layer[u] + 1, layer[v])]
        layer.update((b, layer[u] + 1 + k) for k, b in enumerate(bends))
        sizes.update(dict.fromkeys(bends, 1.0))
        chains[u, v] = [u, *bends, v]
    rows: list[list[Node]] = [[] for _ in range(max(layer.values(), default=0) + 1)]
    for n in sizes:
        rows[layer[n]].append(n)
    above: dict[Node, list[Node]] = {n: [] for n in sizes}
    below: dict[Node, list[Node]] = {n: [] for n in sizes}
    for chain in chains.values():
        for u, v in pairwise(chain):
            above[v].append(u)
            below[u].append(v)
    _order(rows, above, below)
    x = _centres(rows, sizes, above, below)
    left = min((x[n] - sizes[n] / 2 for n in x), default=0.0)
    right = max((x[n] + sizes[n] / 2 for n in x), default=0.0)
    at = {n: (x[n] - left, layer[n]) for n in x}
    lines = {edge: [at[n] for n in chain] for edge, chain in chains.items()}
    return Layout({n: at[n] for n in widths}, lines, right - left, len(rows))


def _layers(nodes: Sequence[Node], edges: Sequence[tuple[Node, Node]]) -> dict[Node, int]:
    """One more than the deepest node before. What has none before it stands above the first that reads it, what has none
    after it below the one that writes it, so many abreast."""
    before: dict[Node, list[Node]] = {n: [] for n in nodes}
    after: dict[Node, list[Node]] = {n: [] for n in nodes}
    for u, v in edges:
        before[v].append(u)
        after[u].append(v)
    layer: dict[Node, int] = {}
    for n in nodes:
        layer[n] = max((layer[u] + 1 for u in before[n]), default=0)
    crowd: dict[tuple[Node, bool], int] = {}
    for n in nodes:
        source = not before[n]
        if source == (not after[n]):
            continue
        at = min(after[n], key=layer.__getitem__) if source else max(before[n], key=layer.__getitem__)
        crowd[at, source] = crowd.get((at, source), 0) + 1
        further = 1 + (crowd[at, source] - 1) // _ABREAST
        layer[n] = layer[at] - further if source else layer[at] + further
    first = min(layer.values(), default=0)
    return {n: at - first for n, at in layer.items()}


def _order(rows: list[list[Node]], above: Mapping[Node, list[Node]], below: Mapping[Node, list[Node]]) -> None:
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        place = {n: i for row in rows for i, n in enumerate(row)}
        for row in rows[1:] if down else rows[-2::-1]:
            near = above if down else below
            wanted = {n: sum(place[m] for m in near[n]) / len(near[n]) if near[n] else place[n] for n in row}
            row.sort(key=wanted.__getitem__)
            place.update((n, i) for i, n in enumerate(row))


def _centres(
    rows: list[list[Node]],
    sizes: Mapping[Node, float],
    above: Mapping[Node, list[Node]],
    below: Mapping[Node, list[Node]],
) -> dict[Node, float]:
    x: dict[Node, float] = {}
    for row in rows:
        _pack(row, sizes, dict.fromkeys(row, 0.0), x)
    for sweep in range(2 * _SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else rows[::-1]:
            near = above if down else below
            wanted = {n: sum(x[m] for m in near[n]) / len(near[n]) if near[n] else x[n] for n in row}
            _pack(row, sizes, wanted, x)
    return x


def _pack(row: list[Node], sizes: Mapping[Node, float], wanted: Mapping[Node, float], x: dict[Node, float]) -> None:
    """Puts a row's nodes near where they want to be, in their order and apart: pushed right, pushed left, and the mean."""
    right: list[float] = []
    for n in row:
        room = right[-1] + (sizes[n] + sizes[row[len(right) - 1]]) / 2 + _GAP if right else wanted[n]
        right.append(max(wanted[n], room))
    left: list[float] = []
    for n in reversed(row):
        room = left[-1] - (sizes[n] + sizes[row[len(row) - len(left)]]) / 2 - _GAP if left else wanted[n]
        left.append(min(wanted[n], room))
    x.update((n, (a + b) / 2) for n, a, b in zip(row, right, reversed(left)))
