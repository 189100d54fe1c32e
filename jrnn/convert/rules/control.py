"""Rules for `cond` and `while`: they become If and While, whose nets hold a Do each."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jrnn.convert.emit import BOOL, Blob, Emitter, Value
from jrnn.convert.flat import Graph, Node, flatten
from jrnn.convert.rules.elementwise import binary
from jrnn.convert.rules.table import rule


@rule("cond")
def _(e: Emitter, node: Node, index, *values):
    branches = [flatten(b) for b in node.params["branches"]]
    if isinstance(index, np.ndarray):
        return tuple(e.graph(branches[min(max(int(index), 0), len(branches) - 1)], values))
    outputs = [e.zeros(v.shape, v.dtype, "branched") for v in node.outputs]
    _choose(e, index, branches, list(values), outputs, 0)
    return tuple(outputs)


def _choose(e: Emitter, index: Blob, branches: Sequence[Graph], values: list[Value], outputs, first: int) -> None:
    """Appends an If for the branches from `first` on; the last one is what is left."""

    def run(k: int) -> None:
        for value, out in zip(e.graph(branches[k], values), outputs):
            e.copy(e.blob(value), out.name)

    def rest() -> None:
        if first + 2 == len(branches):
            run(first + 1)
        else:
            _choose(e, index, branches, values, outputs, first + 1)

    if first + 1 == len(branches):
        run(first)
        return
    is_later = e.was_bool(index) if first == 0 and len(branches) == 2 else None
    if is_later is None:
        is_later = binary(e, "GT", index, np.asarray(first, index.dtype), BOOL)
    with e.b.if_(e.blob(is_later).name):
        rest()
    with e.b.else_():
        run(first)


@rule("while")
def _(e: Emitter, node: Node, *values):
    p = node.params
    test, body = flatten(p["cond_jaxpr"]), flatten(p["body_jaxpr"])
    first, after = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
    start = list(values[after:])
    carried = body.inputs[p["body_nconsts"] :]
    state: list[Value] = [
        value if new is v else replace(e.copy(e.blob(value), e.claim("loop")), shape=v.shape)
        for value, v, new in zip(start, carried, body.outputs)
    ]
    changing = {s.name for s, v, new in zip(state, carried, body.outputs) if new is not v}
    with e.b.while_():
        with e.b.condition():
            e.copy(e.blob(e.graph(test, [*values[:first], *state])[0]))
        made = [
            e.blob(value) if new is not v else None
            for value, v, new in zip(e.graph(body, [*values[first:after], *state]), carried, body.outputs)
        ]
        # all new values are known before the first old one is overwritten
        made = [e.copy(m) if m is not None and m.name in changing else m for m in made]
        for m, s in zip(made, state):
            if m is not None:
                e.copy(m, s.name)
    return tuple(state)
