"""Do, If and While: operators that run their sub-nets; and the workspaces that keep a Do's local blobs for its gradient.

Run eagerly, they read the condition, and each execution of a Do body pushes its local blobs onto a workspace stack,
where the gradient finds them. Traced, Do is inlined, If becomes `lax.cond` over both branches, and While becomes a
loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jrnn.errors import NetError, OpError, describe_value
from jrnn.loops import scan
from jrnn.loops.while_loops.trips import run_trips
from jrnn.nets.graph.scope import reads
from jrnn.nets.graph.ssa import writers
from jrnn.nets.ir import Blobs, Net, Op, Values, makers_of, written_by
from jrnn.nets.lowering import Context, Freed, execute
from jrnn.nets.memory import size_of
from jrnn.nets.ops.values import raise_if
from jrnn.nets.registry import frees, op
from jrnn.nets.schedule import schedule


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WorkspaceStack:
    """A stack of workspaces, each the local blobs of one execution of a Do body; the last one is on top."""

    frames: tuple[Blobs, ...] = ()

    def push(self, frame: Blobs) -> WorkspaceStack:
        return WorkspaceStack((*self.frames, dict(frame)))

    def pop(self) -> tuple[Blobs, WorkspaceStack]:
        if not self.frames:
            raise OpError(
                "its workspace is empty: the forward Do did not run, or it ran in a traced loop, which keeps no workspaces; "
                "take that gradient with jax.grad, or run the net with run_net"
            )
        return self.frames[-1], WorkspaceStack(self.frames[:-1])


def as_stack(value: Any) -> WorkspaceStack:
    if not isinstance(value, WorkspaceStack):
        raise OpError(
            f"its last input must be a workspace, made by CreateScope; it is {type(value).__name__}"
        )
    return value


@op("CreateScope", gradient="forbidden")
def create_scope():
    return WorkspaceStack()


@op("HasScope", gradient="forbidden")
def has_scope(workspace):
    return np.asarray([bool(as_stack(workspace).frames)])


MOST_COUNTED_TRIPS = 10_000  # longer loops are not counted while tracing


def bindings(op: Op) -> dict[str, str]:
    """inner -> outer blob of a Do operator, checked."""
    names = (*op.inputs[:-1], *op.outputs[:-1])
    inner = op.names("inner_blobs")
    outer = op.integers("outer_blobs_idx")
    if len(inner) != len(outer):
        raise OpError(
            f"binds {len(inner)} inner_blobs to {len(outer)} outer_blobs_idx; there must be one for each"
        )
    for k in outer:
        if not 0 <= k < len(names):
            raise OpError(
                f"argument 'outer_blobs_idx' holds {k}, but there are {len(names)} inputs and outputs"
            )
    if not op.inputs or not op.outputs or op.inputs[-1] != op.outputs[-1]:
        raise OpError("the last input and the last output must be the same workspace")
    return {i: names[k] for i, k in zip(inner, outer)}


@op("Do", outputs=(1, None))
def do(*blobs, net: Net, reuse_workspace: bool = False, op, context):
    bound = bindings(op)
    given = dict(zip(op.inputs[:-1], blobs))
    stack = as_stack(blobs[-1])
    frame = {}
    if op.is_gradient or (reuse_workspace and stack.frames):
        frame, stack = stack.pop()
    env = dict(frame)
    for inner, outer in bound.items():
        if outer in given:
            env[inner] = given[outer]
        elif outer in context.outer:
            env[inner] = context.outer[outer]
    inner_of = {outer: inner for inner, outer in bound.items()}
    for name in op.outputs[:-1]:
        if name not in inner_of:
            raise OpError(
                f"output {name!r} is not bound to a blob of the net; bind each input and output exactly once"
            )
    is_stored = op.outputs[-1] not in context.unread and not op.is_gradient
    wanted = []
    for name in op.outputs[:-1]:
        if context.eager or name not in context.unread:
            wanted.append(inner_of[name])

    # The gradient may read any blob of a stored workspace.
    written = written_by(net.ops)
    body = schedule(
        net,
        outputs=None if is_stored or context.eager else _written(net, wanted),
        read_outside=written if is_stored else wanted,
    )
    env = execute(body, env, replace(context, outer={}))
    if is_stored:
        stack = stack.push(env)
    results = []
    for name in op.outputs[:-1]:
        value = env.get(inner_of[name])
        if value is None and name not in context.unread:
            raise OpError(
                f"output {name!r}: its net did not write {inner_of[name]!r}, which had no value before"
            )
        results.append(value)
    return (*results, stack)


def _written(net: Net, names: Iterable[str]) -> list[str]:
    """The names of blobs that a net writes, each once."""
    return list(filter(written_by(net.ops).__contains__, dict.fromkeys(names)))


@op("If", outputs=(0, None))
def if_(condition, *blobs, then_net: Net, else_net: Net | None = None, op, context):
    wanted = _wanted(op, context)
    branches = (then_net, else_net or Net())
    if context.eager or isinstance(condition, np.ndarray):
        net = branches[0] if _truth(condition) else branches[1]
        values = _values_after(net, wanted, context)
    else:
        values = _both_branches(condition, branches, wanted, context)
    for n in wanted:
        if values[n] is None:
            raise OpError(
                f"output {n!r} is not written by the branch taken, and had no value before; write it in both"
            )
    return tuple(values.get(n) for n in op.outputs)


def _wanted(op: Op, context: Context) -> list[str]:
    """The outputs to compute: the outputs that are read; when run eagerly, all except unread workspaces."""

    def is_result(n: str) -> bool:
        return context.eager and not isinstance(context.outer.get(n), WorkspaceStack)

    return [n for n in op.outputs if is_result(n) or n not in context.unread]


def _truth(condition: Any) -> bool:
    if condition.size != 1:
        raise OpError(f"its condition is {describe_value(condition)}; it must be one boolean")
    return bool(np.asarray(condition).reshape(()))


def _run_shared(net: Net, blobs: Blobs, wanted: Iterable[str], context: Context) -> Values:
    """Runs a net in the workspace of its operator, and returns the blobs that it writes."""
    body = schedule(net, None if context.eager else _written(net, wanted), read_outside=wanted)
    used_bytes = sum(map(size_of, blobs.values())) if context.eager else 0
    return execute(body, {}, replace(context, outer=blobs, used_bytes=used_bytes))


def _both_branches(condition: Any, branches, wanted: list[str], context: Context) -> Values:
    """lax.cond over the blobs that either branch writes; a blob that a branch does not write keeps its value."""

    inside = replace(context, in_branch=True)

    def run(net: Net) -> tuple[Values, _Constants]:
        values = _values_after(net, wanted, inside)
        return _without_constants({n: v for n, v in values.items() if v is not None})

    # The shapes of the blobs after the If, which both branches must give.
    then_shapes, then_constants = jax.eval_shape(partial(run, branches[0]))
    else_shapes, else_constants = jax.eval_shape(partial(run, branches[1]))
    both = {}
    for name in wanted:
        if name in then_shapes or name in else_shapes:
            both[name] = _common(name, then_shapes.get(name), else_shapes.get(name))

    def run_filled(net: Net) -> Values:
        values, _ = run(net)
        return {name: _fill(values.get(name), like) for name, like in both.items()}

    out = lax.cond(
        jnp.reshape(condition, ()).astype(bool),
        partial(run_filled, branches[0]),
        partial(run_filled, branches[1]),
    )
    for constants in (then_constants, else_constants):
        for (name, depth), blobs in constants.frames.items():
            frames = list(out[name].frames)
            frames[depth] = {**frames[depth], **blobs}
            out[name] = WorkspaceStack(tuple(frames))
    return {name: out.get(name) for name in wanted}


def _values_after(net: Net, wanted: Iterable[str], context: Context) -> Values:
    """The values of blobs after a net of an If has run; blobs that it does not write keep their values."""
    env = _run_shared(net, context.outer, wanted, context)
    return {name: env.get(name, context.outer.get(name)) for name in wanted}


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Constants:
    """Integer blobs of workspaces that are independent of the data, such as shapes, by the stack's name and the depth."""

    frames: Mapping[tuple[str, int], Mapping[str, np.ndarray]]


def _without_constants(values: Blobs) -> tuple[Values, _Constants]:
    """The blobs with workspaces that hold no constants, and the constants."""
    constants: dict[tuple[str, int], dict[str, np.ndarray]] = {}
    rest = dict(values)
    for name, stack in values.items():
        if not isinstance(stack, WorkspaceStack):
            continue
        frames: list[Values] = []
        for depth, frame in enumerate(stack.frames):
            constants[name, depth] = {}
            frames.append({})
            for blob, value in frame.items():
                is_constant = isinstance(value, np.ndarray) and value.dtype.kind in "iub"
                part = constants[name, depth] if is_constant else frames[-1]
                part[blob] = value
        rest[name] = WorkspaceStack(tuple(frames))
    return rest, _Constants(constants)


def _common(name: str, one: Any, two: Any) -> Any:
    """The shape of a blob after an If, from its shapes in the two branches."""
    if isinstance(one, Freed):
        return one
    if isinstance(two, Freed):
        return two
    stacks = [value for value in (one, two) if isinstance(value, WorkspaceStack)]
    if stacks:
        return max(stacks, key=lambda stack: len(stack.frames))
    if one is None or two is None:
        raise OpError(
            f"output {name!r} is not written by one branch, and had no value before; write it in both"
        )
    if one.shape != two.shape or one.dtype != two.dtype:
        raise OpError(
            f"output {name!r} is {describe_value(one)} in one branch and {describe_value(two)} in the other"
        )
    return one


def _zeros(like: Any) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype)


def _fill(value: Any, like: Any) -> Any:
    """`value`, with zeros for the frames that only `like` has: the branch that made `value` never reads them."""
    if isinstance(like, Freed):
        return like
    if isinstance(like, WorkspaceStack):
        frames = () if value is None else value.frames
        missing = jax.tree.map(_zeros, like.frames[len(frames) :])
        return WorkspaceStack((*frames, *missing))
    return jnp.asarray(value)


@op("While", outputs=(0, None))
def while_(condition, *blobs, loop_net: Net, cond_net: Net | None = None, op, context):
    cond_net = cond_net or Net()
    wanted = _wanted(op, context)
    workspaces = []
    for name in op.outputs:
        if isinstance(context.outer.get(name), WorkspaceStack):
            workspaces.append(name)
    # If a gradient reads the workspaces, and in that gradient, tracing must unroll the trips.
    is_unrolled = op.is_gradient or not set(workspaces).isdisjoint(wanted)
    if context.eager or is_unrolled:
        carried = [n for n in op.outputs if n in wanted or n not in workspaces]
        env = _loop_in_python(op.inputs[0], cond_net, loop_net, carried, context)
    else:
        env = _loop_traced(op.inputs[0], cond_net, loop_net, op.outputs, context)
    for n in wanted:
        if n not in env and n not in context.outer:
            raise OpError(
                f"output {n!r} had no value before the loop, and the loop did not write it"
            )
    return tuple(env[n] if n in env else context.outer.get(n) for n in op.outputs)


def _loop_in_python(
    condition: str, cond_net: Net, loop_net: Net, carried, context: Context
) -> Values:
    """Runs the trips one by one. While tracing, this unrolls the loop for a gradient net that needs the workspaces."""
    carried = dict.fromkeys([condition, *carried])
    most = context.options.max_iterations if context.eager else MOST_COUNTED_TRIPS
    env: Values = dict(context.outer)
    trip = 0
    while True:
        env.update(_run_shared(cond_net, env, carried, context))
        if not context.eager and not isinstance(env[condition], np.ndarray):
            raise OpError(
                "a gradient net takes back the trips of this loop, and their number is traced; give the blobs that decide "
                "it as integer numpy arrays from outside the jitted function, use jax.grad, or run the net with run_net"
            )
        if not _truth(env[condition]):
            return env
        raise_if(
            trip == most,
            f"the loop goes on after {most} trips; raise max_iterations if that is intended",
        )
        env.update(_run_shared(loop_net, env, carried, context))
        trip += 1


def _loop_traced(condition: str, cond_net: Net, loop_net: Net, outputs, context: Context) -> Values:
    """Runs the trips as a loop of JAX: a scan if their number is known, else a while loop."""
    context = replace(context, in_branch=True)
    outer = context.outer
    written = written_by((*cond_net.ops, *loop_net.ops))
    read = dict.fromkeys([*reads(cond_net), *reads(loop_net)])
    freed = _freed_by_trip(cond_net, loop_net)
    for name in read:
        if name in freed:
            raise NetError(
                f"reads blob {name!r}, which {freed[name].by} has freed in the trip before; free it after the loop"
            )

    # What the loop carries, the arrays that it only reads, and what is known while tracing.
    carried = []
    for name in dict.fromkeys([*outputs, condition]):
        is_workspace = isinstance(outer.get(name), WorkspaceStack)
        if name in written and name not in freed and not is_workspace:
            carried.append(name)
    constants = {}
    fixed = {}
    for name, value in outer.items():
        if name in carried:
            continue
        is_constant = name in read and isinstance(value, jax.Array)
        if is_constant:
            constants[name] = value
        else:
            fixed[name] = value

    def run(net: Net, constants, state):
        env = _run_shared(net, {**fixed, **constants, **state}, carried, context)
        return {**state, **{name: env[name] for name in carried if name in env}}

    state = {name: outer[name] for name in carried if name in outer}
    trips = _count_trips(condition, cond_net, loop_net, outer, context)
    if trips is None and context.options.trips.policy == "host":
        trips = _count_on_host(condition, (cond_net, loop_net), outer, context)
    state = run(cond_net, constants, state)  # the condition runs once more than the body
    for name in carried:
        if name not in state:
            raise OpError(
                f"blob {name!r} is written by the loop only; give it a value before, for a loop of 0 trips"
            )
    state = _as_arrays(state)

    def body(constants, state):
        after = run(cond_net, constants, run(loop_net, constants, state))
        after = _as_arrays(after)
        for name, before in state.items():
            new = after[name]
            if (new.shape, new.dtype) != (before.shape, before.dtype):
                raise OpError(
                    f"blob {name!r} is {describe_value(before)} before a trip and {describe_value(new)} after it; a "
                    "traced loop keeps shapes and types: run the net with run_net"
                )
        return after

    def step(state, _):
        return body(constants, state), None

    def goes_on(_, state):
        return state[condition].reshape(()).astype(bool)

    if trips is not None:
        state, _ = scan(step, state, None, length=trips)
    else:
        state = run_trips(goes_on, body, constants, state, context.options.trips)
    return freed | state


def _as_arrays(state: Blobs) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in state.items()}


def _freed_by_trip(cond_net: Net, loop_net: Net) -> dict[str, Freed]:
    """The blobs without a value after a trip, which ends with the condition."""
    freed = {}
    for name, writer in makers_of((*loop_net.ops, *cond_net.ops)).items():
        if frees(writer.type):
            freed[name] = Freed(f"{writer.type} -> {name!r}")
    return freed


def _count_trips(
    condition: str, cond_net: Net, loop_net: Net, outer: Blobs, context: Context
) -> int | None:
    """The number of trips if the condition depends on integer numpy blobs only, else None."""
    needed = {condition}
    while True:  # until the blobs that the condition needs at the start of a trip no longer grow
        cond_slice = replace(cond_net, ops=writers(cond_net.ops, needed))
        loop_slice = replace(loop_net, ops=writers(loop_net.ops, needed))
        more = needed.union(reads(cond_slice), reads(loop_slice))
        if more == needed:
            break
        needed = more
    start = {name: outer[name] for name in needed if name in outer}
    if not all(isinstance(value, (np.ndarray, WorkspaceStack)) for value in start.values()):
        return None
    with jax.ensure_compile_time_eval():
        return _trips_of(condition, (cond_slice, loop_slice), start, context, MOST_COUNTED_TRIPS)


def _count_on_host(condition: str, nets: tuple[Net, Net], outer: Blobs, context: Context) -> int:
    """The number of trips, counted by a run of the loop with concrete values."""
    concrete = {}
    for name, value in outer.items():
        concrete[name] = lax.stop_gradient(value) if isinstance(value, jax.Array) else value
    most = 2**63 if context.options.max_iterations is None else context.options.max_iterations
    trips = _trips_of(condition, nets, concrete, context, most)
    raise_if(
        trips is None,
        f"the loop goes on after {most} trips; raise max_iterations if that is intended",
    )
    return trips


def _trips_of(condition: str, nets, start: Blobs, context: Context, most: int) -> int | None:
    """How often the second net runs until the first one clears the condition; None above `most`."""
    eager = replace(context, eager=True, outer=start, unread=frozenset())
    env = dict(start)
    trips = 0
    while trips <= most:
        env.update(_run_shared(nets[0], env, (), eager))
        if not _truth(env[condition]):
            return trips
        env.update(_run_shared(nets[1], env, (), eager))
        trips += 1
    return None
