"""Do, If and While: operators that run their sub-nets; and the workspaces that keep a Do's local blobs for its gradient.

Run eagerly, they read the condition, and each execution of a Do body pushes its local blobs onto a workspace stack,
where the gradient finds them. Traced, Do is inlined, If becomes `lax.cond` over both branches, and While becomes a
loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
from jrnn.nets.ir import Net, Op
from jrnn.nets.lowering import Context, Freed, execute
from jrnn.nets.memory import size_of
from jrnn.nets.ops.values import raise_if
from jrnn.nets.registry import frees, op
from jrnn.nets.schedule import schedule


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WorkspaceStack:
    """A stack of workspaces, each the local blobs of one execution of a Do body; the last one is on top."""

    frames: tuple[Mapping[str, Any], ...] = ()

    def push(self, frame: Mapping[str, Any]) -> WorkspaceStack:
        return WorkspaceStack((*self.frames, dict(frame)))

    def pop(self) -> tuple[Mapping[str, Any], WorkspaceStack]:
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


op("CreateScope", gradient="forbidden")(lambda: WorkspaceStack())
op("HasScope", gradient="forbidden")(
    lambda workspace: np.asarray([bool(as_stack(workspace).frames)])
)


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
    keep = op.outputs[-1] not in context.unread and not op.is_gradient
    wanted = [
        inner_of[name] for name in op.outputs[:-1] if context.eager or name not in context.unread
    ]
    # the gradient may read any blob of a stored workspace
    outside = [o for one in net.ops for o in one.outputs] if keep else wanted
    body = schedule(
        net, None if keep or context.eager else _written(net, wanted), read_outside=outside
    )
    env = execute(body, env, replace(context, outer={}))
    if keep:
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
    written = {o for op in net.ops for o in op.outputs}
    return [n for n in dict.fromkeys(names) if n in written]


@op("If", outputs=(0, None))
def if_(condition, *blobs, then_net: Net, else_net: Net | None = None, op, context):
    wanted = _wanted(op, context)
    branches = (then_net, else_net or Net())
    if context.eager or isinstance(condition, np.ndarray):
        net = branches[0] if _truth(condition) else branches[1]
        env = _run_shared(net, context.outer, wanted, context)
        values = {n: env.get(n, context.outer.get(n)) for n in wanted}
    else:
        values = _both_branches(condition, branches, wanted, context)
    for n in wanted:
        if values[n] is None:
            raise OpError(
                f"output {n!r} is not written by the branch taken, and had no value before; write it in both"
            )
    return tuple(values.get(n) for n in op.outputs)


def _wanted(op: Op, context: Context) -> list[str]:
    """The outputs to compute: those that are read, and when run eagerly all but workspaces that no operator reads."""

    def is_result(n: str) -> bool:
        return context.eager and not isinstance(context.outer.get(n), WorkspaceStack)

    return [n for n in op.outputs if is_result(n) or n not in context.unread]


def _truth(condition: Any) -> bool:
    if condition.size != 1:
        raise OpError(f"its condition is {describe_value(condition)}; it must be one boolean")
    return bool(np.asarray(condition).reshape(()))


def _run_shared(
    net: Net, blobs: Mapping[str, Any], wanted: Iterable[str], context: Context
) -> dict[str, Any]:
    """Runs a net in the workspace of its operator, and returns the blobs that it writes."""
    body = schedule(net, None if context.eager else _written(net, wanted), read_outside=wanted)
    held = sum(map(size_of, blobs.values())) if context.eager else 0
    return execute(body, {}, replace(context, outer=blobs, held=held))


def _both_branches(condition: Any, branches, wanted: list[str], context: Context) -> dict[str, Any]:
    """lax.cond over the blobs that either branch writes; a blob that a branch does not write keeps its value."""

    def branch(which: int):
        def run():
            env = _run_shared(
                branches[which], context.outer, wanted, replace(context, in_branch=True)
            )
            values = {n: env.get(n, context.outer.get(n)) for n in wanted}
            return _without_constants({n: v for n, v in values.items() if v is not None})

        return run

    shapes, constants = zip(*(jax.eval_shape(branch(k)) for k in (0, 1)))
    both = {
        n: _common(n, shapes[0].get(n), shapes[1].get(n))
        for n in wanted
        if n in {*shapes[0], *shapes[1]}
    }

    def filled(which: int):
        def run():
            values, _ = branch(which)()
            return {n: _fill(values.get(n), both[n]) for n in both}

        return run

    out = lax.cond(jnp.reshape(condition, ()).astype(bool), filled(0), filled(1))
    for stack in constants:
        for (n, depth), blobs in stack.frames.items():
            frames = list(out[n].frames)
            frames[depth] = {**frames[depth], **blobs}
            out[n] = WorkspaceStack(tuple(frames))
    return {n: out.get(n) for n in wanted}


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Constants:
    """Integer blobs of workspaces that are independent of the data, such as shapes, by the stack's name and the depth."""

    frames: Mapping[tuple[str, int], Mapping[str, np.ndarray]]


def _without_constants(values: Mapping[str, Any]) -> tuple[dict[str, Any], _Constants]:
    """The blobs with workspaces that hold no constants, and the constants."""
    constants = {}
    rest = dict(values)
    for name, value in values.items():
        if isinstance(value, WorkspaceStack):
            frames = []
            for depth, frame in enumerate(value.frames):
                still = {
                    n: v
                    for n, v in frame.items()
                    if isinstance(v, np.ndarray) and v.dtype.kind in "iub"
                }
                constants[name, depth] = still
                frames.append({n: v for n, v in frame.items() if n not in still})
            rest[name] = WorkspaceStack(tuple(frames))
    return rest, _Constants(constants)


def _common(name: str, one: Any, two: Any) -> Any:
    """The shape of a blob after an If, from its shapes in the two branches."""
    if isinstance(one, Freed) or isinstance(two, Freed):
        return one if isinstance(one, Freed) else two
    if isinstance(one if one is not None else two, WorkspaceStack):
        frames = [v.frames if v is not None else () for v in (one, two)]
        return WorkspaceStack(max(frames, key=len))
    if one is None or two is None:
        raise OpError(
            f"output {name!r} is not written by one branch, and had no value before; write it in both"
        )
    if one.shape != two.shape or one.dtype != two.dtype:
        raise OpError(
            f"output {name!r} is {describe_value(one)} in one branch and {describe_value(two)} in the other"
        )
    return one


def _fill(value: Any, like: Any) -> Any:
    """`value`, with zeros for the frames that only `like` has: the branch that made `value` never reads them."""
    if isinstance(like, Freed):
        return like
    if isinstance(like, WorkspaceStack):
        frames = value.frames if value is not None else ()
        missing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like.frames[len(frames) :])
        return WorkspaceStack((*frames, *missing))
    return jnp.asarray(value)


@op("While", outputs=(0, None))
def while_(condition, *blobs, loop_net: Net, cond_net: Net | None = None, op, context):
    cond_net = cond_net or Net()
    wanted = _wanted(op, context)
    # if a gradient reads the workspaces, and in that gradient, tracing must unroll the trips
    trip_by_trip = op.is_gradient or any(
        isinstance(context.outer.get(n), WorkspaceStack) for n in wanted
    )
    if context.eager or trip_by_trip:
        workspaces = [n for n in op.outputs if isinstance(context.outer.get(n), WorkspaceStack)]
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
) -> dict[str, Any]:
    """Runs the trips one by one. While tracing, this unrolls the loop for a gradient net that needs the workspaces."""
    carried = dict.fromkeys([condition, *carried])
    most = context.options.max_iterations if context.eager else MOST_COUNTED_TRIPS
    env: dict[str, Any] = dict(context.outer)
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


def _loop_traced(
    condition: str, cond_net: Net, loop_net: Net, outputs, context: Context
) -> dict[str, Any]:
    context = replace(context, in_branch=True)
    outer = context.outer
    written = {o for net in (cond_net, loop_net) for op in net.ops for o in op.outputs}
    read = dict.fromkeys([*reads(cond_net), *reads(loop_net)])
    freed = _freed_by_trip(cond_net, loop_net)
    for n in read:
        if n in freed:
            raise NetError(
                f"reads blob {n!r}, which {freed[n].by} has freed in the trip before; free it after the loop"
            )
    stays = {n for n in written if n in freed or isinstance(outer.get(n), WorkspaceStack)}
    carried = [n for n in dict.fromkeys([*outputs, condition]) if n in written - stays]
    constants = {
        n: outer[n]
        for n in read
        if n in outer and n not in carried and isinstance(outer[n], jax.Array)
    }
    fixed = {n: v for n, v in outer.items() if n not in constants and n not in carried}

    def run(net: Net, constants, state):
        env = _run_shared(net, {**fixed, **constants, **state}, carried, context)
        return {**state, **{n: env[n] for n in carried if n in env}}

    state = {n: outer[n] for n in carried if n in outer}
    trips = _count_trips(condition, cond_net, loop_net, outer, context)
    if trips is None and context.options.trips.policy == "host":
        trips = _count_on_host(condition, (cond_net, loop_net), outer, context)
    state = run(cond_net, constants, state)  # the condition runs once more than the body
    missing = [n for n in carried if n not in state]
    if missing:
        raise OpError(
            f"blob {missing[0]!r} is written by the loop only; give it a value before, for a loop of 0 trips"
        )
    state = {n: jnp.asarray(v) for n, v in state.items()}

    def body(constants, state):
        after = run(cond_net, constants, run(loop_net, constants, state))
        after = {n: jnp.asarray(v) for n, v in after.items()}
        for n, before in state.items():
            if (after[n].shape, after[n].dtype) != (before.shape, before.dtype):
                raise OpError(
                    f"blob {n!r} is {describe_value(before)} before a trip and {describe_value(after[n])} after it; a "
                    "traced loop keeps shapes and types: run the net with run_net"
                )
        return after

    if trips is not None:
        return freed | scan(lambda s, _: (body(constants, s), None), state, None, length=trips)[0]
    return freed | run_trips(
        lambda _, s: s[condition].reshape(()).astype(bool),
        body,
        constants,
        state,
        context.options.trips,
    )


def _freed_by_trip(cond_net: Net, loop_net: Net) -> dict[str, Freed]:
    """The blobs without a value after a trip, which ends with the condition."""
    last = {o: op for net in (loop_net, cond_net) for op in net.ops for o in op.outputs}
    return {n: Freed(f"{op.type} -> {n!r}") for n, op in last.items() if frees(op.type)}


def _count_trips(
    condition: str, cond_net: Net, loop_net: Net, outer: Mapping[str, Any], context: Context
) -> int | None:
    """The number of trips if the condition depends on integer numpy blobs only, else None."""
    needed = {condition}
    sliced = ((), ())
    while True:  # until the blobs that the condition needs at the start of a trip no longer grow
        sliced = tuple(replace(net, ops=writers(net.ops, needed)) for net in (cond_net, loop_net))
        more = needed.union(*(reads(net) for net in sliced))
        if more == needed:
            break
        needed = more
    start = {n: outer[n] for n in needed if n in outer}
    if not all(isinstance(v, (np.ndarray, WorkspaceStack)) for v in start.values()):
        return None
    with jax.ensure_compile_time_eval():
        return _trips_of(condition, sliced, start, context, MOST_COUNTED_TRIPS)


def _count_on_host(
    condition: str, nets: tuple[Net, Net], outer: Mapping[str, Any], context: Context
) -> int:
    """The number of trips, counted by a run of the loop with concrete values."""
    concrete = {
        n: lax.stop_gradient(v) if isinstance(v, jax.Array) else v for n, v in outer.items()
    }
    most = 2**63 if context.options.max_iterations is None else context.options.max_iterations
    trips = _trips_of(condition, nets, concrete, context, most)
    raise_if(
        trips is None,
        f"the loop goes on after {most} trips; raise max_iterations if that is intended",
    )
    return trips


def _trips_of(
    condition: str, nets, start: Mapping[str, Any], context: Context, most: int
) -> int | None:
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
