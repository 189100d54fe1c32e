"""Nets as SVG drawings that need no other file. Sub-nets are drawn below the net that holds them.

Nodes are placed in layers with edges pointing down, as in Sugiyama, Tagawa and Toda (Methods for Visual Understanding of
Hierarchical System Structures, 1981): nodes get layers, an edge that spans several layers gets a bend in each, layers are
ordered by the mean positions of neighbors, and nodes then move towards their neighbors as far as there is room. A blob that
is read many layers further down is drawn again above its reader, so that the picture of a large net stays readable, and its
size is proportional to the net's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape as _escape
from itertools import pairwise
from typing import Any

from jrnn.errors import printable
from jrnn.nets.graph.scope import free_names
from jrnn.nets.ir import Net

_LETTER = 6.6
_PADDING = 18.0
_LAYER = 44.0
_BOX = 24.0
_MARGIN = 12.0
_CAPTION = 30.0
_INPUT = "#dbe9f6"
_OUTPUT = "#e2f0d9"
_PLAIN = "#ffffff"
_SWEEPS = 6
_GAP = 14.0
_ABREAST = 4
_FAR = 12  # layers; a longer edge is not drawn

Node = tuple[
    Any, ...
]  # ("op", index), ("blob", name, version), that with the index of its reader, or ("bend", ...)
STYLE = (
    "text{font:11px Helvetica,Arial,sans-serif;text-anchor:middle;dominant-baseline:central;fill:#222}"
    ".op rect{fill:#f2f2f2;stroke:#666}.blob rect{stroke:#888}.edge{fill:none;stroke:#999}"
    ".caption{font-weight:bold;text-anchor:start}"
)


def to_svg(net: Net, marks: Mapping[str, tuple[str, str]] | None = None) -> str:
    """Returns an SVG image of a net: boxes are operators, rounded boxes are versions of blobs, sub-nets are below.

    Args:
        marks: a fill color and a note for blobs of the net itself, by name.

    >>> from jrnn.nets.ir import Op
    >>> image = to_svg(Net("n", (Op.of("Relu", ["x"], ["y"]),), ("x",), ("y",)), {"y": ("#ffcccc", "wrong")})
    >>> image.count("<rect"), image.count('class="edge"'), "<title>y: wrong</title>" in image
    (3, 2, True)
    """
    width = 0.0
    y = _MARGIN
    parts = []
    for k, (caption, shown) in enumerate(_nets(net, net.name or "net")):
        if k:
            parts.append(
                f'<text class="caption" x="{_MARGIN}" y="{y + _CAPTION / 2:g}">{escape(caption)}</text>'
            )
            y += _CAPTION
        body, w, h = _drawn(shown, marks or {} if not k else {})
        parts.append(f'<g transform="translate({_MARGIN:g} {y:g})">{body}</g>')
        width = max(width, w, len(caption) * 7.5 if k else 0)
        y = y + h + _MARGIN
    across = round(width + 2 * _MARGIN)
    down = round(y)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{down}" viewBox="0 0 {across} {down}">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>"
    )


def escape(text: str) -> str:
    """Any text for XML and HTML, in which control characters are errors."""
    return _escape(printable(text))


def _nets(net: Net, caption: str) -> Iterator[tuple[str, Net]]:
    yield caption, net
    for k, op in enumerate(net.ops):
        for name, sub in op.sub_nets():
            yield from _nets(sub, f"{name} of op #{k} {op.type} in {caption}")


def _drawn(net: Net, marks: Mapping[str, tuple[str, str]]) -> tuple[str, float, float]:
    """Returns the body of a drawing with its width and height."""
    versions: dict[str, int] = {}
    labels: dict[Node, str] = {}
    edges: list[tuple[Node, Node]] = []
    for k, op in enumerate(net.ops):
        read = dict.fromkeys((*op.inputs, *free_names(op)))
        for name in read:
            labels.setdefault(("blob", name, versions.setdefault(name, 0)), name)
        here = ("op", k)
        labels[here] = op.name or op.type
        edges += [(("blob", name, versions[name]), here) for name in read]
        for name in dict.fromkeys(op.outputs):
            versions[name] = versions.get(name, 0) + 1
            labels["blob", name, versions[name]] = name
            edges.append((here, ("blob", name, versions[name])))
    labels, edges = _without_far_edges(labels, edges)
    plan = layout({n: len(text) * _LETTER + _PADDING for n, text in labels.items()}, edges)
    parts = [_edge(points) for points in plan.edges.values()]
    for n, text in labels.items():
        x, layer = plan.places[n]
        parts.append(
            _box(n, text, x, layer * _LAYER + _BOX / 2, _filled(net, n, versions, labels, marks))
        )
    return "".join(parts), plan.width, (plan.layers - 1) * _LAYER + _BOX


def _without_far_edges(
    labels: Mapping[Node, str], edges: list[tuple[Node, Node]]
) -> tuple[dict[Node, str], list[tuple[Node, Node]]]:
    """Gives the readers of a blob that is many layers above them a box of their own for it."""
    layer = _layers(list(labels), edges)
    stubs: dict[Node, dict[Node, str]] = {n: {} for n in labels}
    kept = []
    for u, v in edges:
        if layer[v] - layer[u] > _FAR:
            again = (*u, v[1])
            stubs[v][again] = labels[u]
            kept.append((again, v))
        else:
            kept.append((u, v))
    return {
        n: text for v, more in stubs.items() for n, text in (*more.items(), (v, labels[v]))
    }, kept


def _filled(
    net: Net,
    node: Node,
    versions: Mapping[str, int],
    labels: Mapping[Node, str],
    marks: Mapping[str, tuple[str, str]],
) -> tuple[str, str]:
    """Returns the fill color of a node, and its title."""
    if node[0] == "op":
        op = net.ops[node[1]]
        return "", f"op #{node[1]} {op.type}({', '.join(op.inputs)})"
    _, name, version = node[:3]
    if name in marks and version == (0 if ("blob", name, 0) in labels else 1):
        return marks[name][0], f"{name}: {marks[name][1]}"
    if not version and name in net.external_inputs:
        return _INPUT, name
    return (_OUTPUT if name in net.external_outputs and version == versions[name] else _PLAIN), name


def _box(node: Node, text: str, x: float, y: float, look: tuple[str, str]) -> str:
    color, title = look
    width = len(text) * _LETTER + _PADDING
    fill = f' fill="{color}"' if color else ""
    return (
        f'<g class="{node[0]}"><title>{escape(title)}</title><rect x="{x - width / 2:.1f}" y="{y - _BOX / 2:g}" '
        f'width="{width:.1f}" height="{_BOX:g}" rx="{4 if node[0] == "op" else 12}"{fill}/>'
        f'<text x="{x:.1f}" y="{y:g}">{escape(text)}</text></g>'
    )


def _edge(points: list[tuple[float, int]]) -> str:
    """Draws a smooth line from the lower side of the first box to the upper side of the last."""
    at = [(x, layer * _LAYER + _BOX / 2) for x, layer in points]
    at[0], at[-1] = (at[0][0], at[0][1] + _BOX / 2), (at[-1][0], at[-1][1] - _BOX / 2)
    path = f"M{at[0][0]:.1f} {at[0][1]:g}"
    for (x0, y0), (x1, y1) in pairwise(at):
        middle = (y0 + y1) / 2
        path += f"C{x0:.1f} {middle:g} {x1:.1f} {middle:g} {x1:.1f} {y1:g}"
    return f'<path class="edge" d="{path}"/>'


@dataclass(frozen=True)
class Drawing:
    """The center of each node, as distance and layer; the points of each edge; the total width; the number of layers."""

    places: Mapping[Node, tuple[float, int]]
    edges: Mapping[tuple[Node, Node], list[tuple[float, int]]]
    width: float
    layers: int


def layout(widths: Mapping[Node, float], edges: Sequence[tuple[Node, Node]]) -> Drawing:
    """Places the nodes of an acyclic graph; `widths` lists them in an order in which all edges point forward.

    >>> a, b, c = ("a",), ("b",), ("c",)
    >>> drawing = layout({a: 10, b: 10, c: 10}, [(a, c), (b, c)])
    >>> [drawing.places[n] for n in (a, b, c)]
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
    x = _centers(rows, sizes, above, below)
    left = min((x[n] - sizes[n] / 2 for n in x), default=0.0)
    right = max((x[n] + sizes[n] / 2 for n in x), default=0.0)
    at = {n: (x[n] - left, layer[n]) for n in x}
    lines = {edge: [at[n] for n in chain] for edge, chain in chains.items()}
    return Drawing({n: at[n] for n in widths}, lines, right - left, len(rows))


def _layers(nodes: Sequence[Node], edges: Sequence[tuple[Node, Node]]) -> dict[Node, int]:
    """Returns the layer of each node, below all nodes before it.

    A node without predecessors is moved down to just above its first reader, and a node without successors to just below
    its writer, at most _ABREAST side by side.
    """
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
        at = (
            min(after[n], key=layer.__getitem__)
            if source
            else max(before[n], key=layer.__getitem__)
        )
        crowd[at, source] = crowd.get((at, source), 0) + 1
        further = 1 + min((crowd[at, source] - 1) // _ABREAST, _FAR - 2)
        layer[n] = layer[at] - further if source else layer[at] + further
    first = min(layer.values(), default=0)
    return {n: at - first for n, at in layer.items()}


def _order(
    rows: list[list[Node]], above: Mapping[Node, list[Node]], below: Mapping[Node, list[Node]]
) -> None:
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        place = {n: i for row in rows for i, n in enumerate(row)}
        for row in rows[1:] if down else rows[-2::-1]:
            near = above if down else below
            wanted = {
                n: sum(place[m] for m in near[n]) / len(near[n]) if near[n] else place[n]
                for n in row
            }
            row.sort(key=wanted.__getitem__)
            place.update((n, i) for i, n in enumerate(row))


def _centers(
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
            wanted = {
                n: sum(x[m] for m in near[n]) / len(near[n]) if near[n] else x[n] for n in row
            }
            _pack(row, sizes, wanted, x)
    return x


def _pack(
    row: list[Node], sizes: Mapping[Node, float], wanted: Mapping[Node, float], x: dict[Node, float]
) -> None:
    """Places the nodes of a row near `wanted` without overlap: at the mean of a pass to the right and one to the left."""
    right: list[float] = []
    for n in row:
        room = (
            right[-1] + (sizes[n] + sizes[row[len(right) - 1]]) / 2 + _GAP if right else wanted[n]
        )
        right.append(max(wanted[n], room))
    left: list[float] = []
    for n in reversed(row):
        room = (
            left[-1] - (sizes[n] + sizes[row[len(row) - len(left)]]) / 2 - _GAP
            if left
            else wanted[n]
        )
        left.append(min(wanted[n], room))
    x.update((n, (a + b) / 2) for n, a, b in zip(row, right, reversed(left)))
