"""Groups of nodes that are one operator of Caffe2."""

from __future__ import annotations

from .flat import Graph


def recognise(graph: Graph) -> Graph:
    return graph
