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
from typing import Any, NamedTuple

from jrnn.errors import printable
from jrnn.nets.graph.scope import all_reads
from jrnn.nets.ir import Net

Marks = Mapping[str, tuple[str, str]]  # a fill color and a note, by blob


class _Pixels(NamedTuple):
    """The measures of a drawing, in pixels."""

    letter: float = 6.6
    """The mean width of a letter in a box."""
    caption_letter: float = 7.5
    """The mean width of a letter in a caption."""
    padding: float = 18.0
    """The width of a box besides its text."""
    layer: float = 44.0
    """From the top of a layer to the top of the next one."""
    box: float = 24.0
    """The height of a box."""
    margin: float = 12.0
    """Around the drawing, and between nets."""
    caption: float = 30.0
    """The height of a caption."""
    gap: float = 14.0
    """Between boxes of one layer."""


class _Limits(NamedTuple):
    """The limits of the layout, which keep the drawing small."""

    sweeps: int = 6
    """How often the layers are ordered, down and up in turns."""
    abreast: int = 4
    """How many inputs of one operator are placed side by side in a layer."""
    layers_of_edge: int = 12
    """An edge over more layers is not drawn: the blob gets a second box above its reader."""


_PIXELS = _Pixels()
_LIMITS = _Limits()
_INPUT = "#dbe9f6"
_OUTPUT = "#e2f0d9"
_PLAIN = "#ffffff"

# ("op", index), ("blob", name, version), ("blob", name, version, index of the only reader) or ("bend", edge, layer).
Node = tuple[Any, ...]
Positions = dict[Node, float]
Widths = Mapping[Node, float]
Edge = tuple[Node, Node]
Neighbors = Mapping[Node, list[Node]]
STYLE = (
    "text{font:11px Helvetica,Arial,sans-serif;text-anchor:middle;dominant-baseline:central;fill:#222}"
    ".op rect{fill:#f2f2f2;stroke:#666}.blob rect{stroke:#888}.edge{fill:none;stroke:#999}"
    ".caption{font-weight:bold;text-anchor:start}"
)


def to_svg(net: Net, marks: Marks | None = None) -> str:
    """Returns an SVG image of a net: boxes are operators, rounded boxes are versions of blobs, sub-nets are below.

    Args:
        marks: a fill color and a note for blobs of the net itself, by name.

    >>> from jrnn.nets.ir import Op
    >>> image = to_svg(Net("n", (Op.of("Relu", ["x"], ["y"]),), ("x",), ("y",)), {"y": ("#ffcccc", "wrong")})
    >>> image.count("<rect"), image.count('class="edge"'), "<title>y: wrong</title>" in image
    (3, 2, True)
    """
    margin = _PIXELS.margin
    content_width = 0.0
    y = margin
    parts = []
    for k, (caption, shown) in enumerate(_nets(net, net.name or "net")):
        if k:
            middle = y + _PIXELS.caption / 2
            text = f'<text class="caption" x="{margin}" y="{middle:g}">{escape(caption)}</text>'
            parts.append(text)
            y += _PIXELS.caption
            content_width = max(content_width, len(caption) * _PIXELS.caption_letter)
            marks = None
        body, net_width, net_height = _draw(shown, marks or {})
        parts.append(f'<g transform="translate({margin:g} {y:g})">{body}</g>')
        content_width = max(content_width, net_width)
        y = y + net_height + margin
    width = round(content_width + 2 * margin)
    height = round(y)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>"
    )


def escape(text: str) -> str:
    """Any text for XML and HTML, in which control characters are errors."""
    return _escape(printable(text))


def _nets(net: Net, caption: str) -> Iterator[tuple[str, Net]]:
    """Yields a net and all nets inside it, with captions that say where each is."""
    yield caption, net
    for k, op in enumerate(net.ops):
        for name, sub in op.sub_nets():
            yield from _nets(sub, f"{name} of op #{k} {op.type} in {caption}")


def _draw(net: Net, marks: Marks) -> tuple[str, float, float]:
    """Returns the body of a drawing with its width and height."""
    versions: dict[str, int] = {}
    labels: dict[Node, str] = {}
    edges: list[Edge] = []
    for k, op in enumerate(net.ops):
        here = ("op", k)
        for name in dict.fromkeys(all_reads(op)):
            blob = ("blob", name, versions.setdefault(name, 0))
            labels.setdefault(blob, name)
            edges.append((blob, here))
        labels[here] = op.name or op.type
        for name in dict.fromkeys(op.outputs):
            versions[name] = versions.get(name, 0) + 1
            blob = ("blob", name, versions[name])
            labels[blob] = name
            edges.append((here, blob))

    labels, edges = _without_far_edges(labels, edges)
    plan = layout({node: _box_width(text) for node, text in labels.items()}, edges)
    parts = list(map(_edge, plan.edges.values()))
    for node, text in labels.items():
        x, layer = plan.places[node]
        look = _look(net, node, versions, labels, marks)
        parts.append(_box(node, text, x, _middle(layer), look))
    return "".join(parts), plan.width, (plan.layers - 1) * _PIXELS.layer + _PIXELS.box


def _box_width(text: str) -> float:
    return len(text) * _PIXELS.letter + _PIXELS.padding


def _middle(layer: int) -> float:
    """Returns the y of the middle of a layer's boxes."""
    return layer * _PIXELS.layer + _PIXELS.box / 2


def _without_far_edges(
    labels: Mapping[Node, str], edges: list[Edge]
) -> tuple[dict[Node, str], list[Edge]]:
    """Gives the readers of a blob that is many layers above them a box of their own for it."""
    layer = _layers(list(labels), edges)
    second_boxes: dict[Node, dict[Node, str]] = {}
    new_edges = []
    for blob, reader in edges:
        if layer[reader] - layer[blob] > _LIMITS.layers_of_edge:
            second_box = (*blob, reader[1])
            second_boxes.setdefault(reader, {})[second_box] = labels[blob]
            blob = second_box
        new_edges.append((blob, reader))
    new_labels: dict[Node, str] = {}
    for node, text in labels.items():
        new_labels.update(second_boxes.get(node, {}))
        new_labels[node] = text
    return new_labels, new_edges


def _look(
    net: Net,
    node: Node,
    versions: Mapping[str, int],
    labels: Mapping[Node, str],
    marks: Marks,
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
    if name in net.external_outputs and version == versions[name]:
        return _OUTPUT, name
    return _PLAIN, name


def _box(node: Node, text: str, x: float, y: float, look: tuple[str, str]) -> str:
    """Draws a node, with its center at (x, y); `look` has its fill color and its title."""
    color, title = look
    width = _box_width(text)
    height = _PIXELS.box
    fill = f' fill="{color}"' if color else ""
    radius = 4 if node[0] == "op" else 12
    return (
        f'<g class="{node[0]}"><title>{escape(title)}</title><rect x="{x - width / 2:.1f}" y="{y - height / 2:g}" '
        f'width="{width:.1f}" height="{height:g}" rx="{radius}"{fill}/>'
        f'<text x="{x:.1f}" y="{y:g}">{escape(text)}</text></g>'
    )


def _edge(points: list[tuple[float, int]]) -> str:
    """Draws a smooth line from the lower side of the first box to the upper side of the last."""
    xs, layers = zip(*points)
    ys = list(map(_middle, layers))
    ys[0] += _PIXELS.box / 2
    ys[-1] -= _PIXELS.box / 2
    path = f"M{xs[0]:.1f} {ys[0]:g}"
    for (x0, y0), (x1, y1) in pairwise(zip(xs, ys)):
        middle = (y0 + y1) / 2
        path += f"C{x0:.1f} {middle:g} {x1:.1f} {middle:g} {x1:.1f} {y1:g}"
    return f'<path class="edge" d="{path}"/>'


@dataclass(frozen=True)
class Drawing:
    """The center of each node, as distance and layer; the points of each edge; the total width; the number of layers."""

    places: Mapping[Node, tuple[float, int]]
    edges: Mapping[Edge, list[tuple[float, int]]]
    width: float
    layers: int


def layout(widths: Widths, edges: Sequence[Edge]) -> Drawing:
    """Places the nodes of an acyclic graph; `widths` lists them in an order in which all edges point forward.

    >>> a, b, c = ("a",), ("b",), ("c",)
    >>> drawing = layout({a: 10, b: 10, c: 10}, [(a, c), (b, c)])
    >>> [drawing.places[n] for n in (a, b, c)]
    [(5.0, 0), (29.0, 0), (17.0, 1)]
    """
    edges = list(dict.fromkeys(edges))
    layer = _layers(list(widths), edges)

    # An edge over several layers becomes a chain, with a bend in each layer between.
    sizes = dict(widths)
    chains: dict[Edge, list[Node]] = {}
    for start, end in edges:
        chain: list[Node] = [start]
        for k in range(layer[start] + 1, layer[end]):
            bend = ("bend", start, end, k)
            layer[bend] = k
            sizes[bend] = 1.0
            chain.append(bend)
        chains[start, end] = [*chain, end]

    rows: list[list[Node]] = [[] for _ in range(max(layer.values(), default=0) + 1)]
    for node in sizes:
        rows[layer[node]].append(node)
    links: list[Edge] = []
    for chain in chains.values():
        links += pairwise(chain)
    above, below = _neighbors(list(sizes), links)
    _order(rows, above, below)
    x = _centers(rows, sizes, above, below)

    left = min((x[node] - sizes[node] / 2 for node in x), default=0.0)
    right = max((x[node] + sizes[node] / 2 for node in x), default=0.0)
    places = {node: (x[node] - left, layer[node]) for node in x}
    return Drawing(
        places={node: places[node] for node in widths},
        edges={edge: list(map(places.__getitem__, chain)) for edge, chain in chains.items()},
        width=right - left,
        layers=len(rows),
    )


def _neighbors(nodes: Sequence[Node], edges: Sequence[Edge]) -> tuple[Neighbors, Neighbors]:
    """Returns the nodes before each node, and the nodes after it."""
    before: dict[Node, list[Node]] = {node: [] for node in nodes}
    after: dict[Node, list[Node]] = {node: [] for node in nodes}
    for start, end in edges:
        before[end].append(start)
        after[start].append(end)
    return before, after


def _layers(nodes: Sequence[Node], edges: Sequence[Edge]) -> dict[Node, int]:
    """Returns the layer of each node, below all nodes before it.

    A node without predecessors is moved down to just above its first reader, and a node without successors to just below
    its writer, at most `_LIMITS.abreast` side by side.
    """
    before, after = _neighbors(nodes, edges)
    layer: dict[Node, int] = {}
    for node in nodes:
        layer[node] = max((layer[start] + 1 for start in before[node]), default=0)

    crowd: dict[tuple[Node, bool], int] = {}
    for node in nodes:
        is_source = not before[node]
        if is_source == (not after[node]):
            continue
        if is_source:
            nearest = min(after[node], key=layer.__getitem__)
        else:
            nearest = max(before[node], key=layer.__getitem__)
        placed = crowd.get((nearest, is_source), 0)
        crowd[nearest, is_source] = placed + 1
        distance = 1 + min(placed // _LIMITS.abreast, _LIMITS.layers_of_edge - 2)
        layer[node] = layer[nearest] - distance if is_source else layer[nearest] + distance

    first = min(layer.values(), default=0)
    return {node: number - first for node, number in layer.items()}


def _order(rows: list[list[Node]], above: Neighbors, below: Neighbors) -> None:
    """Sorts each row by the mean positions of neighbors, in sweeps down and up."""
    for sweep in range(_LIMITS.sweeps):
        position: Positions = {}
        for row in rows:
            position.update(zip(row, range(len(row))))
        is_down = sweep % 2 == 0
        for row in rows[1:] if is_down else rows[-2::-1]:
            row.sort(key=_wanted(row, above if is_down else below, position).__getitem__)
            position.update(zip(row, range(len(row))))


def _wanted(row: list[Node], near: Neighbors, x: Widths) -> Positions:
    """Returns the mean position of the neighbors of each node in a row; its own if it has none."""
    wanted = {}
    for node in row:
        nodes = near[node] or [node]
        wanted[node] = sum(map(x.__getitem__, nodes)) / len(nodes)
    return wanted


def _centers(
    rows: list[list[Node]], sizes: Widths, above: Neighbors, below: Neighbors
) -> Positions:
    """Returns the x of the center of each node, near its neighbors as far as there is space."""
    x: Positions = {}
    for row in rows:
        _pack(row, sizes, dict.fromkeys(row, 0.0), x)
    for sweep in range(2 * _LIMITS.sweeps):
        is_down = sweep % 2 == 0
        for row in rows if is_down else rows[::-1]:
            _pack(row, sizes, _wanted(row, above if is_down else below, x), x)
    return x


def _pack(row: list[Node], sizes: Widths, wanted: Widths, x: Positions) -> None:
    """Places the nodes of a row near `wanted` without overlap: at the mean of a pass to the right and one to the left."""
    if not row:
        return
    halves = [(sizes[a] + sizes[b]) / 2 for a, b in pairwise(row)]

    right = [wanted[row[0]]]
    for node, half in zip(row[1:], halves):
        right.append(max(wanted[node], right[-1] + half + _PIXELS.gap))
    left = [wanted[row[-1]]]
    for node, half in zip(row[-2::-1], reversed(halves)):
        left.append(min(wanted[node], left[-1] - half - _PIXELS.gap))
    for node, from_left, from_right in zip(row, right, reversed(left)):
        x[node] = (from_left + from_right) / 2
