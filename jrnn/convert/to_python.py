"""to_python: a net as the source of a pure JAX function that runs without jrnn.

Operators become calls of JAX, a RecurrentNetwork a `lax.scan` over a nested function, If and While become `lax.cond` and
`lax.while_loop`.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrnn.convert import python_helpers
from jrnn.convert.package import Package
from jrnn.convert.python_ops import EXPRESSIONS, Call
from jrnn.errors import ConversionError, JrnnError, describe_op
from jrnn.graph.scope import reads
from jrnn.ir import Net, Op
from jrnn.lowering import unwritten_output
from jrnn.ops.control import bindings
from jrnn.ops.recurrent_wiring import Link, parse
from jrnn.registry import DO, IF, SCOPE, WHILE, lookup

RECURRENT = "RecurrentNetwork"
_NAMES = {"jax", "jnp", "lax", "np", "blobs", "inputs", "weights", "carry", "now", "predict", "load_weights"}


class _Scope:
    """The Python names of blobs: those of a net, then those of the nets around it."""

    def __init__(self, parent: _Scope | None = None):
        self.names: dict[str, str] = {}
        self.parent = parent

    def find(self, blob: str) -> str | None:
        found = self.names.get(blob)
        return found if found or self.parent is None else self.parent.find(blob)


class _Writer:
    """Lines of Python, with the names and helpers that they use."""

    def __init__(self, read: set[str]) -> None:
        self.lines: list[str] = []
        self.helpers: dict[str, None] = {}
        self.read = read
        self._depth = 1
        self._used = {*_NAMES, *(n for n, _ in inspect.getmembers(python_helpers, inspect.isfunction))}

    def add(self, line: str) -> None:
        self.lines.append("    " * self._depth + line)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.add(head)
        self._depth += 1
        yield
        self._depth -= 1

    def fresh(self, blob: str) -> str:
        """A Python name for a blob."""
        base = re.sub(r"\W+", "_", blob).strip("_") or "blob"
        if base[0].isdigit() or keyword.iskeyword(base):
            base = "b_" + base
        name, k = base, 1
        while name in self._used:
            name, k = f"{base}_{k}", k + 1
        self._used.add(name)
        return name

    def declare(self, scope: _Scope, blob: str) -> str:
        """The name of a blob that is written: the one it has in this scope, or a new one."""
        if blob not in scope.names:
            scope.names[blob] = self.fresh(blob)
        return scope.names[blob]


def to_python(net: Net, weights: Iterable[str] = ()) -> str:
    """The source of a Python module with a function `predict`, equivalent to the net.

    Args:
        net: the net.
        weights: external inputs that the function takes apart, in a dict. A blob that is also among its inputs is taken from
            there.

    Returns:
        The source. Its function is `predict(weights, inputs) -> outputs`, all of them dicts of arrays by blob.

    Raises:
        ConversionError: lists every operator that cannot be written as Python.

    >>> net = Net("double", (Op.of("Add", ["x", "x"], ["y"]),), ("x",), ("y",))
    >>> print(to_python(net).split("def ")[1])
    predict(weights, inputs):
        x = inputs['x']
        y = x + x
        return {'y': y}
    <BLANKLINE>
    """
    _check(net)
    writer, scope = _Writer(set(_all_reads(net))), _Scope()
    given = "inputs"
    if set(weights):
        writer.add("blobs = {**weights, **inputs}")
        given = "blobs"
    for blob in dict.fromkeys((*net.external_inputs, *reads(net))):
        writer.add(f"{writer.declare(scope, blob)} = {given}[{blob!r}]")
    _write_net(writer, net, scope)
    outputs = net.external_outputs or tuple(dict.fromkeys(o for op in net.ops for o in op.outputs))
    for o in outputs:
        if scope.find(o) is None:
            raise ConversionError(unwritten_output(net, o))
    found = ", ".join(f"{o!r}: {scope.find(o)}" for o in outputs)
    writer.add(f"return {{{found}}}")
    helpers = [inspect.getsource(getattr(python_helpers, h)) for h in writer.helpers]
    head = f'"""The net {net.name!r} as a function of JAX."""\n\nimport jax\nimport jax.numpy as jnp\nfrom jax import lax\n'
    body = "\n".join(["def predict(weights, inputs):", *writer.lines]) + "\n"
    return "\n\n".join([head, *helpers, body])


def write_python(package: Package, path: str | Path, *, seed: int = 0) -> None:
    """Writes a package as `path`, a Python file, and its weights beside it as a `.npz` of the same name.

    The file can be run as a script, which lists inputs and weights.
    """
    path = Path(path)
    net = package.predict_net
    weights = package.filled(key=jax.random.key(seed))
    source = to_python(net, weights)
    main = f"""

def load_weights(path=__file__.removesuffix(".py") + ".npz"):
    import numpy as np

    with np.load(path) as arrays:
        return {{name: jnp.asarray(arrays[name]) for name in arrays}}


if __name__ == "__main__":
    print("inputs {", ".join(package.input_names)}; outputs {", ".join(package.output_names)}")
    print("a value for any of these may be among the inputs too:")
    for name, value in load_weights().items():
        print(f"  {{name}} {{value.dtype}}{{list(value.shape)}}")
"""
    path.write_text(source + main)
    arrays: dict[str, Any] = {n: np.asarray(v) for n, v in weights.items()}
    np.savez(path.with_suffix(".npz"), **arrays)


def _check(net: Net) -> None:
    problems = dict.fromkeys(_unwritable(net))
    if problems:
        raise ConversionError(
            f"net {net.name!r} cannot be written as Python, for {len(problems)} operators:\n  " + "\n  ".join(problems)
        )


def _unwritable(net: Net) -> Iterator[str]:
    for k, op in enumerate(net.ops):
        where = describe_op(k, op.type, op.outputs, net.name)
        if op.type in (DO, IF, WHILE, RECURRENT):
            for name, inner in op.sub_nets():
                if name != "backward_step_net":
                    yield from _unwritable(inner)
        elif op.type not in EXPRESSIONS and op.type != SCOPE:
            yield f"{where} has no Python form"
        elif op.type != SCOPE:
            try:
                EXPRESSIONS[op.type](Call(op, tuple(f"x{i}" for i in range(len(op.inputs)))))
            except JrnnError as e:
                yield f"{where} {e}"


def _all_reads(net: Net) -> Iterator[str]:
    """Every blob that is read or given out, in this net or in one within."""
    yield from net.external_outputs
    for op in net.ops:
        yield from op.inputs
        for _, inner in op.sub_nets():
            yield from _all_reads(inner)
    if not net.external_outputs:
        yield from (o for op in net.ops for o in op.outputs)


def _write_net(w: _Writer, net: Net, scope: _Scope) -> None:
    for k, op in enumerate(net.ops):
        try:
            _write_op(w, op, scope)
        except JrnnError as e:
            raise e.at(describe_op(k, op.type, op.outputs, net.name)) from None


def _write_op(w: _Writer, op: Op, scope: _Scope) -> None:
    if op.type == SCOPE:
        return
    if op.type in _STRUCTURES:
        _STRUCTURES[op.type](w, op, scope)
        return
    found = EXPRESSIONS[op.type](Call(op, _read(op.inputs, scope), w.helpers))
    found = (found,) if isinstance(found, str) else found
    names = [w.declare(scope, o) for o in op.outputs]
    if found[0].startswith("*"):  # an expression of a list of all outputs
        many = lookup(op.type).outputs[1] or len(names)
        hidden = (
            [w.fresh("unused") for _ in range(max(0, many - len(names)))] if op.type in ("LayerNorm", "TopK") else []
        )
        w.add(f"{', '.join([*names, *hidden])}{',' if len(names) == 1 and not hidden else ''} = {found[0][1:-1]}")
        return
    w.add(f"{names[0]} = {found[0]}")
    for name, blob, text in zip(names[1:], op.outputs[1:], found[1:]):
        if blob in w.read:
            w.add(f"{name} = {text}")


def _read(blobs: Iterable[str], scope: _Scope) -> tuple[str, ...]:
    found = []
    for blob in blobs:
        name = scope.find(blob)
        if name is None:
            raise ConversionError(f"reads blob {blob!r}, which is neither written before nor an external input")
        found.append(name)
    return tuple(found)


# nets within nets ------------------------------------------------------------------------------------------------------


def _write_do(w: _Writer, op: Op, scope: _Scope) -> None:
    inner = _Scope()
    for name, outer in bindings(op).items():
        inner.names[name] = scope.find(outer) or w.declare(scope, outer)
    net = op.arg("net")
    _write_net(w, net, inner)


def _written_outside(op: Op, scope: _Scope) -> list[str]:
    """Outputs of an If or a While that are values: those that hold workspaces are written by no operator within."""
    stacks = {i for _, net in op.sub_nets() for inner in net.ops if inner.type == DO for i in inner.inputs[-1:]}
    return [o for o in op.outputs if o not in stacks]


def _tuple(names: Iterable[str]) -> str:
    names = list(names)
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _write_if(w: _Writer, op: Op, scope: _Scope) -> None:
    outputs = _written_outside(op, scope)
    known = [o for o in outputs if scope.find(o) is not None]
    (condition,) = _read(op.inputs[:1], scope)
    names = [w.declare(scope, o) for o in outputs]
    given = [scope.find(o) for o in known]
    functions = []
    for branch in ("then", "else"):
        functions.append(w.fresh(branch + "_branch"))
        with w.block(f"def {functions[-1]}({', '.join(map(str, given))}):"):
            net = op.arg(branch + "_net")
            if net is not None:
                _write_net(w, net, scope)
            w.add(f"return {_tuple(names)}")
    w.add(f"{_tuple(names)} = lax.cond({condition}.reshape(()), {', '.join([*functions, *map(str, given)])})")


def _write_while(w: _Writer, op: Op, scope: _Scope) -> None:
    condition_net = op.arg("cond_net")
    if condition_net is not None:  # the condition is asked once more than the body runs
        _write_net(w, condition_net, scope)
    (condition,) = _read(op.inputs[:1], scope)
    carried = list(dict.fromkeys([*_read(_written_outside(op, scope), scope), condition]))
    body = w.fresh("loop_body")
    with w.block(f"def {body}(carry):"):
        w.add(f"{_tuple(carried)} = carry")
        _write_net(w, op.arg("loop_net"), scope)
        if condition_net is not None:
            _write_net(w, condition_net, scope)
        w.add(f"return {_tuple(carried)}")
    at = carried.index(condition)
    w.add(f"{_tuple(carried)} = lax.while_loop(lambda carry: carry[{at}].reshape(()), {body}, {_tuple(carried)})")


def _write_recurrent(w: _Writer, op: Op, scope: _Scope) -> None:
    wiring = parse(op, op.inputs, op.outputs)
    written = {o for inner in wiring.step_net.ops for o in inner.outputs}
    reads, writes = {}, {}
    for state in wiring.states:
        links = wiring.state_links(state)
        writes[state] = [link for link in links if link.internal in written]
        reads[state] = [link for link in links if link.internal not in written]
        if [(link.offset, link.window) for link in writes[state]] != [(1, 1)] or any(_moved(r) for r in reads[state]):
            raise ConversionError(f"state {state!r} is not read at offset 0 and written at offset 1, one step each")
    sequences = [link for link in wiring.links if link.external not in wiring.states]
    if any(_moved(link) for link in sequences):
        raise ConversionError("reads windows of a sequence, which cannot be written as Python")

    outer = _read([link.external for link in sequences], scope)
    initial = _read([op.inputs[k] for k in wiring.initial_ids], scope)
    w.helpers["initial_state"] = None
    inner = _Scope(scope)
    carried = [w.declare(inner, reads[s][0].internal) if reads[s] else w.fresh("unread") for s in wiring.states]
    shown = [w.declare(inner, link.internal) for link in sequences]
    timestep = w.declare(inner, wiring.timestep)
    for op_inner in wiring.step_net.ops:  # what the step writes is its own, whatever has that name outside
        for o in op_inner.outputs:
            w.declare(inner, o)
    step = w.fresh("step")
    w.add("")
    with w.block(f"def {step}(carry, now):"):
        w.add(f"{_tuple(carried)} = carry")
        w.add(f"{_tuple([timestep, *shown])} = now")
        for s, name in zip(wiring.states, carried):
            for link in reads[s][1:]:
                w.add(f"{w.declare(inner, link.internal)} = {name}")
        _write_net(w, wiring.step_net, inner)
        new = [inner.names[writes[s][0].internal] for s in wiring.states]
        w.add(f"return {_tuple(new)}, {_tuple(new)}")
    w.add("")
    steps, batch, first, xs = (w.fresh(n) for n in ("steps", "batch", "first", "sequences"))
    w.add(f"{steps}, {batch} = {outer[0]}.shape[:2]")
    w.add(f"{first} = {_tuple(f'initial_state({x}, {batch})' for x in initial)}")
    times = f"jnp.arange({steps}, dtype=jnp.int32)[:, None]"
    w.add(f"{xs} = {_tuple([times, *(f'{x}[:, None]' for x in outer)])}")
    last, rest = w.fresh("last"), w.fresh("states")
    w.add(f"{last}, {rest} = lax.scan({step}, {first}, {xs})")
    for alias in wiring.aliases:
        k = wiring.states.index(alias.src)
        if alias.offset not in (1, -1):
            raise ConversionError(f"output {alias.dst!r} begins at {alias.offset}; 1 and -1 can be written as Python")
        value = f"{last}[{k}]" if alias.offset == -1 else f"{rest}[{k}][:, 0]"
        w.add(f"{w.declare(scope, alias.dst)} = {value}")


def _moved(link: Link) -> bool:
    return (link.offset, link.window) != (0, 1)


_STRUCTURES = {DO: _write_do, IF: _write_if, WHILE: _write_while, RECURRENT: _write_recurrent}
