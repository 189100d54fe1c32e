"""If, Loop and Scan."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jrnn.errors import ConversionError, JrnnError
from jrnn.jaxprs.jax_internals import ClosedJaxpr, is_traced, jaxpr_as_fun
from jrnn.loops import scan
from jrnn.loops.while_loops.trips import run_trips
from jrnn.onnx.graph import OnnxGraph, known, op
from jrnn.onnx.ops.elementwise_nodes import bound

COUNTED = 1000  # steps of a loop without outputs of every step, which may be a while loop instead


def _arrays(values) -> tuple[Array, ...]:
    return tuple(map(jnp.asarray, values))


def _results(node, graph) -> tuple[Array, ...]:
    return _arrays(node.run(graph, []))


@op("If")
def _(node, condition):
    branches = node.get("else_branch"), node.get("then_branch")
    if not is_traced(condition):
        return tuple(node.run(branches[bool(np.asarray(condition).reshape(()))], []))
    # The results of a branch, which a partial application takes without arguments.
    no_branch, yes_branch = (functools.partial(_results, node, branch) for branch in branches)
    types = [jax.eval_shape(no_branch), jax.eval_shape(yes_branch)]
    for name, no, yes in zip(node.outputs, *types, strict=True):
        if (no.shape, no.dtype) != (yes.shape, yes.dtype):
            raise ConversionError(
                f"{node}: {name!r} is {yes.dtype}{list(yes.shape)} in one branch and {no.dtype}{list(no.shape)} in the "
                "other, and the condition is not known while the function is traced; give its input as a numpy array"
            )
    return tuple(lax.cond(jnp.asarray(condition).reshape(()), yes_branch, no_branch))


@op("Loop")
def _(node, count, condition, *carried):
    body = node.get("body")
    stacked = len(body.outputs) - 1 - len(carried)
    if count is not None and is_traced(count) and stacked:
        node.known(count, "the number of steps")
    are_arrays = all(hasattr(v, "dtype") for v in carried)
    most = np.inf if stacked else COUNTED
    steps = _steps(node, body, count, condition, carried, most)
    if steps is not None and are_arrays:
        scanned = _scanned(node, body, steps, carried)
        if scanned is not None:
            return scanned
    if steps is None and are_arrays and not stacked:
        return _while(node, body, count, condition, carried)
    return _unrolled(node, body, count, condition, list(carried))


def _steps(
    node,
    body,
    count,
    condition,
    carried,
    most,
) -> int | None:
    """How many steps a loop takes, where known numbers say so; None if they do not, or if it takes more than `most`.

    The nodes from which the condition follows run for each step, without the others: they count steps, and compare.
    """
    if is_traced(count) or is_traced(condition):
        return None
    if count is None:
        limit = np.inf
    else:
        limit = int(np.asarray(count).reshape(()))
    if condition is not None and not np.asarray(condition).all():
        return 0
    if _goes_on(body):
        if count is None:
            return None
        return max(limit, 0)
    counting, needed = _counting(body)
    for k in needed:
        value = carried[k]
        if is_traced(value) or not (known(value) or _is_integer(value)):
            return None
    state = [np.asarray(v) if k in needed else None for k, v in enumerate(carried)]
    on = np.asarray(True)
    steps = 0
    while steps < limit and np.asarray(on).all():
        if steps == most:
            return None
        try:
            on, *new = node.run(counting, [np.asarray(steps, np.int64), np.asarray(True), *state])
        except JrnnError:  # it draws numbers, or needs others than are known
            return None
        if any(map(is_traced, (on, *new))):
            return None
        for k, value in zip(needed, new, strict=True):
            state[k] = value
        steps += 1
    return steps


def _is_integer(value) -> bool:
    return hasattr(value, "dtype") and value.dtype.kind in "iub"


def _counting(body) -> tuple[OnnxGraph, list[int]]:
    """The part of a body from which its condition follows, and the carries in it, whose next values it returns, too."""
    wanted = {body.outputs[0]}
    carries = dict(zip(body.inputs[2:], body.outputs[1:]))
    size = 0
    while size < len(wanted):
        size = len(wanted)
        for node in reversed(body.nodes):
            if wanted.intersection(node.outputs):
                wanted |= _read_by(node)
        wanted.update(new for old, new in carries.items() if old in wanted)
    needed = []
    for k, name in enumerate(carries):
        if name in wanted:
            needed.append(k)
    nodes = tuple(node for node in body.nodes if wanted.intersection(node.outputs))
    outputs = (body.outputs[0], *(body.outputs[1 + k] for k in needed))
    return replace(body, nodes=nodes, outputs=outputs), needed


def _read_by(node) -> set[str]:
    """The names that a node and the graphs in it read."""
    names = set(node.inputs)
    for graph in node.attributes.values():
        if isinstance(graph, OnnxGraph):
            names.update(graph.outputs)
            for inner in graph.nodes:
                names |= _read_by(inner)
    return names


def _goes_on(body) -> bool:
    """Whether the body returns the condition that it is given, or true."""
    name = body.outputs[0]
    makers = {}
    for n in body.nodes:
        for o in n.outputs:
            makers[o] = n
    while name in makers and makers[name].type == "Identity":
        name = makers[name].inputs[0]
    return name == body.inputs[1] or (name in body.consts and bool(body.consts[name].all()))


def _scanned(node, body, steps: int, carried):
    """A loop of a known number of steps as a scan; None if the carries change their shapes or are sequences."""
    start = _arrays(carried)
    true = np.asarray(True)

    def step(state, k):
        _, *outs = node.run(body, [k, true, *state])
        return _arrays(outs[: len(state)]), _arrays(outs[len(state) :])

    try:
        types = jax.eval_shape(step, start, jnp.zeros((), int))[0]
    except (ConversionError, TypeError):  # the body needs the counter's value, or holds sequences
        return None
    if [(t.shape, t.dtype) for t in types] != [(s.shape, s.dtype) for s in start]:
        return None
    last, outputs = scan(step, start, jnp.arange(steps))
    return (*last, *outputs)


def _while(
    node,
    body,
    count,
    condition,
    carried,
):
    """A loop whose number of steps depends on computed values; it has no outputs of every step."""

    def go(k, on, *_):
        if count is None:
            return on
        return on & (k < bound(k, count))

    def step(k, on, *rest):
        on, *rest = node.run(body, [k, on, *rest])
        return (k + 1, jnp.asarray(on).reshape(()), *_arrays(rest))

    on = jnp.asarray(True if condition is None else condition).reshape(())
    start = (jnp.zeros((), int), on, *_arrays(carried))
    go_flat, go_values = _without_closure(go, start)
    step_flat, step_values = _without_closure(step, start)
    return tuple(
        run_trips(
            lambda values, state: go_flat(values[0], state)[0],
            lambda values, state: tuple(step_flat(values[1], state)),
            (go_values, step_values),
            start,
        )[2:]
    )


def _without_closure(function, state):
    """`function` with the values that it closes over as its first argument, and these values."""
    closed = jax.make_jaxpr(function)(*state)
    return lambda values, state: jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, values))(
        *state
    ), closed.consts


def _unrolled(
    node,
    body,
    count,
    condition,
    state,
):
    """A loop that runs while the graph is traced; its condition must be known."""
    if count is None:
        steps = np.inf
    else:
        steps = int(node.known(count, "the number of steps").reshape(()))
    on = True if condition is None else condition
    k = 0
    width = len(state)
    outputs: list[list[Any]] = [[] for _ in body.outputs[1 + width :]]
    while k < steps and bool(
        node.known(on if is_traced(on) else np.asarray(on), "the condition").all()
    ):
        on, *outs = node.run(body, [np.asarray(k, np.int64), np.asarray(on), *state])
        state = outs[:width]
        k = k + 1
        for values, value in zip(outputs, outs[width:], strict=True):
            values.append(value)
    if not k and outputs:
        return (*state, *_none(node, body, state))
    return (*state, *(jnp.stack(_arrays(values)) for values in outputs))


def _none(node, body, state) -> list[Array]:
    """The outputs of every step of a loop of no steps: no rows, of the shape that the first step would give."""
    first = [np.asarray(0, np.int64), np.asarray(True), *state]
    types = jax.eval_shape(lambda: _arrays(node.run(body, first)[1 + len(state) :]))
    return [jnp.zeros((0, *t.shape), t.dtype) for t in types]


@op("Scan")
def scan_node(node, *values):
    # then states and sequences have a batch in front, and may have lengths
    lengths = None
    batched = node.opset < 9
    if batched:
        lengths, *values = values
    body = node.get("body")
    sequences = node.get("num_scan_inputs")
    width = len(values) - sequences
    outputs = len(body.outputs) - width
    start = _arrays(values[:width])
    xs = _arrays(values[width:])
    in_ways = node.get("directions" if batched else "scan_input_directions", [0] * sequences)
    # The direction of the loop; sequences of the other direction are flipped.
    reverse = bool(in_ways[0])
    if batched and len(set(in_ways)) > 1:
        raise ConversionError(
            f"{node}: sequences of both directions are only supported from operator set 9 on"
        )
    if batched:
        out_ways = [reverse] * outputs
    else:
        out_ways = node.get("scan_output_directions", [0] * outputs)
    in_axes = node.get("scan_input_axes", [int(batched)] * sequences)
    out_axes = node.get("scan_output_axes", [int(batched)] * outputs)

    def step(state, x):
        outs = node.run(body, [*state, *x])
        new = []
        for value, old in zip(_arrays(outs[:width]), state, strict=True):
            new.append(value.astype(old.dtype).reshape(old.shape))
        return tuple(new), _arrays(outs[width:])

    moved_xs = []
    for x, axis, way in zip(xs, in_axes, in_ways, strict=True):
        x = jnp.moveaxis(x, axis, 0)
        moved_xs.append(jnp.flip(x, 0) if way != reverse else x)
    if lengths is not None:
        lengths = jnp.asarray(lengths)

    last, ys = scan(
        jax.vmap(step) if batched else step,
        start,
        tuple(moved_xs),
        reverse=reverse,
        lengths=lengths,
    )
    moved_ys = []
    for y, axis, way in zip(ys, out_axes, out_ways, strict=True):
        if way != reverse:
            y = jnp.flip(y, 0)
        moved_ys.append(jnp.moveaxis(y, 0, axis))
    return (*last, *moved_ys)
