"""Nets as a text listing, and as a graph in the DOT language."""

from collections.abc import Iterator
from typing import Any

from jrnn.errors import printable
from jrnn.nets.graph.scope import all_reads, free_names
from jrnn.nets.ir import Arg, Blobs, DeviceOption, Message, Net, Numbers, Op

_LONGEST_LIST = 8
_LONGEST_TEXT = 60
_DEVICES = {0: "CPU", 1: "CUDA"}


def show(net: Net, shapes: Blobs | None = None) -> str:
    """Lists `net` as text: one line for each operator, with sub-nets indented below it.

    Args:
        shapes: anything with `.shape` and `.dtype` by blob, to print after the outputs of operators.

    >>> import numpy as np
    >>> net = Net("n", (Op.of("FC", ["x", "w", "b"], ["y"], axis=2),), ("x", "w", "b"), ("y",))
    >>> print(show(net, {"y": np.zeros([1, 2, 3], np.float32)}))
    net n (x, w, b) -> (y)
      #0 y [1, 2, 3] float32 = FC(x, w, b) axis=2
    """
    return "\n".join(map(printable, _lines(net, shapes or {}, "net")))


def _lines(net: Net, shapes: Blobs, label: str) -> Iterator[str]:
    words = [f"{label} {net.name}".rstrip()]
    if net.type:
        words.append(f"[{net.type}]")
    words.append(f"({', '.join(net.external_inputs)}) -> ({', '.join(net.external_outputs)})")
    words += map(_arg, net.args)
    yield " ".join(words) + _device(net.device_option)
    for i, op in enumerate(net.ops):
        yield f"  #{i} {_op(op, shapes)}"
        for name, sub_net in op.sub_nets():
            for line in _lines(sub_net, {}, f"{name}:"):
                yield "    " + line


def _op(op: Op, shapes: Blobs) -> str:
    words = []
    if op.outputs:
        words += [", ".join(_blob(name, shapes) for name in op.outputs), "="]
    words.append(f"{op.type}({', '.join(op.inputs)})")
    words += [_arg(arg) for arg in op.args if not _holds_net(arg)]
    if op.engine:
        words.append(f"engine={op.engine}")
    if op.name:
        words.append(f"name={op.name}")
    if op.control_inputs:
        words.append(f"after=({', '.join(op.control_inputs)})")
    free = free_names(op)
    if free:
        words.append(f"outer=({', '.join(free)})")
    return " ".join(words) + _device(op.device_option)


def _blob(name: str, shapes: Blobs) -> str:
    known = shapes.get(name)
    if known is None or not hasattr(known, "shape"):  # a workspace has none
        return name
    return f"{name} {list(known.shape)} {known.dtype}"


def _holds_net(arg: Arg) -> bool:
    values = arg.value if isinstance(arg.value, tuple) else (arg.value,)
    return any(isinstance(v, Net) for v in values)


def _arg(arg: Arg) -> str:
    return f"{arg.name}={_value(arg.value)}"


def _value(value: Any) -> str:
    match value:
        case bytes():
            text = value.decode(errors="replace")
            if len(text) > _LONGEST_TEXT:
                text = text[:_LONGEST_TEXT] + "..."
            return repr(text)
        case Message():
            return f"<{value.type}, {len(value.data)} bytes>"
        case float():
            return f"{value:.6g}"
        case Numbers() | tuple():
            shown = list(map(_value, value[:_LONGEST_LIST]))
            if len(value) > _LONGEST_LIST:
                shown.append(f"... {len(value)} in all")
            return f"[{', '.join(shown)}]"
    return str(value)


def _device(option: DeviceOption | None) -> str:
    if option is None or not option.device_type:
        return ""
    kind = _DEVICES.get(option.device_type, f"device type {option.device_type}")
    return f" on {kind}:{option.device_id or 0}"


def to_dot(net: Net) -> str:
    """Returns a graph for Graphviz: boxes are operators, ellipses are versions of blobs, sub-nets are clusters.

    >>> print(to_dot(Net("n", (Op.of("Relu", ["x"], ["y"]),), ("x",), ("y",))))
    digraph "n" {
      rankdir=TB; node [fontname="Helvetica", fontsize=10];
      "b/x/0" [label="x", style=filled, fillcolor="#dbe9f6"];
      "o/0" [label="Relu", shape=box, style=rounded];
      "b/x/0" -> "o/0";
      "b/y/1" [label="y", style=filled, fillcolor="#e2f0d9"];
      "o/0" -> "b/y/1";
    }
    """
    body = "\n".join("  " + line for line in _dot_lines(net, ""))
    title = _quoted(net.name)
    return (
        f'digraph {title} {{\n  rankdir=TB; node [fontname="Helvetica", fontsize=10];\n{body}\n}}'
    )


def _quoted(text: str) -> str:
    escaped = printable(text.replace("\\", "\\\\").replace('"', '\\"'))
    return f'"{escaped}"'


def _dot_lines(net: Net, path: str) -> Iterator[str]:
    versions: dict[str, int] = {}
    inputs = set(net.external_inputs)
    outputs = set(net.external_outputs)
    last: dict[str, int] = {}
    for i, op in enumerate(net.ops):
        last.update(dict.fromkeys(op.outputs, i))

    def blob(name: str) -> str:
        return _quoted(f"{path}b/{name}/{versions[name]}")

    def declared(name: str, writer: int | None) -> str:
        color = ""
        if name in inputs and writer is None:
            color = ', style=filled, fillcolor="#dbe9f6"'
        elif name in outputs and last.get(name) == writer:
            color = ', style=filled, fillcolor="#e2f0d9"'
        return f"{blob(name)} [label={_quoted(name)}{color}];"

    for i, op in enumerate(net.ops):
        node = _quoted(f"{path}o/{i}")
        read = all_reads(op)
        for name in read:
            if name not in versions:
                versions[name] = 0
                yield declared(name, None)
        yield f"{node} [label={_quoted(op.name or op.type)}, shape=box, style=rounded];"
        for name in read:
            yield f"{blob(name)} -> {node};"

        # The sub-nets as clusters: a dotted edge leads to the first operator of each.
        for k, (name, sub_net) in enumerate(op.sub_nets()):
            inside = f"{path}o/{i}/{k}/"
            yield f"subgraph {_quoted('cluster_' + inside)} {{"
            yield f"  label={_quoted(f'{name} {sub_net.name}'.rstrip())}; style=dashed;"
            for line in _dot_lines(sub_net, inside):
                yield "  " + line
            yield "}"
            if sub_net.ops:
                yield f"{node} -> {_quoted(f'{inside}o/0')} [style=dotted];"

        for name in op.outputs:
            versions[name] = versions.get(name, 0) + 1
        for name in dict.fromkeys(op.outputs):
            yield declared(name, i)
            yield f"{node} -> {blob(name)};"
