"""Nets as SVG drawings that need no other file. Sub-nets are drawn under the net that holds them."""

from collections.abc import Iterator, Mapping
from html import escape
from itertools import pairwise
from typing import Any

from jrnn.graph.layered import layout
from jrnn.graph.scope import free_names
from jrnn.ir import Net

_Node = tuple[Any, ...]  # ("op", index) or ("blob", name, version)

_LETTER, _PADDING, _LAYER, _BOX, _MARGIN, _CAPTION = 6.6, 18.0, 44.0, 24.0, 12.0, 30.0
_INPUT, _OUTPUT, _PLAIN = "#dbe9f6", "#e2f0d9", "#ffffff"
STYLE = (
    "text{font:11px Helvetica,Arial,sans-serif;text-anchor:middle;dominant-baseline:central;fill:#222}"
    ".op rect{fill:#f2f2f2;stroke:#666}.blob rect{stroke:#888}.edge{fill:none;stroke:#999}"
    ".caption{font-weight:bold;text-anchor:start}"
)


def to_svg(net: Net, marks: Mapping[str, tuple[str, str]] | None = None) -> str:
    """`net` as an SVG image: boxes are operators, rounded boxes are versions of blobs, sub-nets stand below.

    Args:
        marks: for blobs of the net itself, by name, the color to fill them with and a word to say about them.

    >>> from jrnn.ir import Op
    >>> image = to_svg(Net("n", (Op.of("Relu", ["x"], ["y"]),), ("x",), ("y",)), {"y": ("#ffcccc", "wrong")})
    >>> image.count("<rect"), image.count('class="edge"'), "<title>y: wrong</title>" in image
    (3, 2, True)
    """
    width, y, parts = 0.0, _MARGIN, []
    for k, (caption, shown) in enumerate(_nets(net, net.name or "net")):
        if k:
            parts.append(f'<text class="caption" x="{_MARGIN}" y="{y + _CAPTION / 2:g}">{escape(caption)}</text>')
            y += _CAPTION
        body, w, h = _drawn(shown, marks or {} if not k else {})
        parts.append(f'<g transform="translate({_MARGIN:g} {y:g})">{body}</g>')
        width, y = max(width, w, len(caption) * 7.5 if k else 0), y + h + _MARGIN
    size = f"{width + 2 * _MARGIN:.0f} {y:.0f}"
    across, down = size.split()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{down}" viewBox="0 0 {size}">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>"
    )


def _nets(net: Net, caption: str) -> Iterator[tuple[str, Net]]:
    yield caption, net
    for k, op in enumerate(net.ops):
        for name, sub in op.sub_nets():
            yield from _nets(sub, f"{name} of op #{k} {op.type} in {caption}")


def _drawn(net: Net, marks: Mapping[str, tuple[str, str]]) -> tuple[str, float, float]:
    """The body of a picture with its width and height."""
    versions: dict[str, int] = {}
    labels: dict[_Node, str] = {}
    edges: list[tuple[_Node, _Node]] = []
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
    found = layout({n: len(text) * _LETTER + _PADDING for n, text in labels.items()}, edges)
    parts = [_edge(points) for points in found.edges.values()]
    for n, text in labels.items():
        x, layer = found.places[n]
        parts.append(_box(n, text, x, layer * _LAYER + _BOX / 2, _filled(net, n, versions, labels, marks)))
    return "".join(parts), found.width, (found.layers - 1) * _LAYER + _BOX


def _filled(
    net: Net,
    node: _Node,
    versions: Mapping[str, int],
    labels: Mapping[_Node, str],
    marks: Mapping[str, tuple[str, str]],
) -> tuple[str, str]:
    """The color of a blob, and what to say about it."""
    if node[0] == "op":
        op = net.ops[node[1]]
        return "", f"op #{node[1]} {op.type}({', '.join(op.inputs)})"
    _, name, version = node
    if name in marks and version == (0 if ("blob", name, 0) in labels else 1):
        return marks[name][0], f"{name}: {marks[name][1]}"
    if not version and name in net.external_inputs:
        return _INPUT, name
    return (_OUTPUT if name in net.external_outputs and version == versions[name] else _PLAIN), name


def _box(node: _Node, text: str, x: float, y: float, look: tuple[str, str]) -> str:
    color, title = look
    width = len(text) * _LETTER + _PADDING
    fill = f' fill="{color}"' if color else ""
    return (
        f'<g class="{node[0]}"><title>{escape(title)}</title><rect x="{x - width / 2:.1f}" y="{y - _BOX / 2:g}" '
        f'width="{width:.1f}" height="{_BOX:g}" rx="{4 if node[0] == "op" else 12}"{fill}/>'
        f'<text x="{x:.1f}" y="{y:g}">{escape(text)}</text></g>'
    )


def _edge(points: list[tuple[float, int]]) -> str:
    """A smooth line from the lower side of the first box to the upper side of the last."""
    at = [(x, layer * _LAYER + _BOX / 2) for x, layer in points]
    at[0], at[-1] = (at[0][0], at[0][1] + _BOX / 2), (at[-1][0], at[-1][1] - _BOX / 2)
    path = f"M{at[0][0]:.1f} {at[0][1]:g}"
    for (x0, y0), (x1, y1) in pairwise(at):
        middle = (y0 + y1) / 2
        path += f"C{x0:.1f} {middle:g} {x1:.1f} {middle:g} {x1:.1f} {y1:g}"
    return f'<path class="edge" d="{path}"/>'
