"""Minimum cut of a graph whose nodes cost: which values to keep so that all the wanted ones can be had."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping

INFINITE = 1 << 60


def min_cut(
    costs: Mapping[Hashable, int],
    edges: Iterable[tuple[Hashable, Hashable]],
    sources: Iterable[Hashable],
    sinks: Iterable[Hashable],
) -> list[Hashable]:
    """The cheapest set of nodes that every path from a source to a sink passes; of equals, the one nearest the sinks.

    Args:
        costs: what keeping each node costs; `INFINITE` forbids it.
        edges: pairs of nodes, from what is read to what is made of it.
        sources: nodes that cannot be made again.
        sinks: nodes that are wanted.

    >>> min_cut({"x": 5, "a": 2, "b": 2}, [("x", "a"), ("x", "b")], ["x"], ["a", "b"])
    ['a', 'b']
    """
    # Every node becomes an arc from (node, 0) to (node, 1) with its cost as capacity.
    capacity: dict[Hashable, dict[Hashable, int]] = {}

    def arc(tail: Hashable, head: Hashable, size: int) -> None:
        capacity.setdefault(tail, {})[head] = size
        capacity.setdefault(head, {}).setdefault(tail, 0)

    start, end = ("start",), ("end",)
    capacity[start], capacity[end] = {}, {}
    for node, cost in costs.items():
        arc((node, 0), (node, 1), cost)
    for tail, head in edges:
        arc((tail, 1), (head, 0), INFINITE)
    for node in sources:
        arc(start, (node, 0), INFINITE)
    for node in sinks:
        arc((node, 1), end, INFINITE)

    while path := _augmenting_path(capacity, start, end):
        room = min(capacity[tail][head] for tail, head in path)
        assert room < INFINITE, "a wanted value can be neither kept nor made again"
        for tail, head in path:
            capacity[tail][head] -= room
            capacity[head][tail] += room

    reaches_end = {end}
    queue = deque([end])
    while queue:
        head = queue.popleft()
        for tail in capacity[head]:
            if capacity[tail][head] > 0 and tail not in reaches_end:
                reaches_end.add(tail)
                queue.append(tail)
    return [node for node in costs if (node, 1) in reaches_end and (node, 0) not in reaches_end]


def _augmenting_path(
    capacity: Mapping[Hashable, Mapping[Hashable, int]], start: Hashable, end: Hashable
) -> list[tuple[Hashable, Hashable]]:
    came: dict[Hashable, Hashable] = {start: start}
    queue = deque([start])
    while queue:
        tail = queue.popleft()
        for head, room in capacity[tail].items():
            if room > 0 and head not in came:
                came[head] = tail
                if head == end:
                    path = [(tail, head)]
                    while path[-1][0] != start:
                        path.append((came[path[-1][0]], path[-1][0]))
                    return path
                queue.append(head)
    return []
