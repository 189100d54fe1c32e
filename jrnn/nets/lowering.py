"""Nets as functions: `run_net` runs a net operator by operator, `to_jax` makes it a pure function of its blobs.

Both call `schedule` (`schedule.py`), which looks up the operators in the registry and checks them, and `execute`, which
calls them in order on a dict of blobs. Operators that run nets themselves (RecurrentNetwork, If, While) get the `Context`
and do the same.

Values of integers, booleans or strings that are numpy arrays are static: an operator that reads only static blobs is
evaluated immediately, and its result is static too. So `Shape -> Slice -> Concat -> Reshape` works inside jit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jrnn.errors import JrnnError, NetError, OpError, describe_value, near
from jrnn.files.reading import available
from jrnn.loops.while_loops.trips import CHECKPOINTED, Trips
from jrnn.nets import registry
from jrnn.nets.blobs import as_blob, as_numpy, as_static, is_static, widened
from jrnn.nets.graph.scope import Workspace, workspace_of
from jrnn.nets.ir import Blobs, Net, Op, Values, written_by
from jrnn.nets.memory import LARGEST_FILL, check_call, check_results, size_of
from jrnn.nets.schedule import Schedule, ScheduledOp, schedule

# Inputs of up to 64 integers are compared by value, to find out whether a call is known to fit into the memory.
_MAX_COMPARED_ELEMENTS = 64
# The name that `checkpoint_name` gives to the blobs in Context.recompute.
RECOMPUTED = "computed again"


@jax.tree_util.register_static
@dataclass(frozen=True)
class Freed:
    """What a blob holds after an operator has freed it, which no other operator may read. `by` names that operator."""

    by: str


@dataclass(frozen=True)
class LoweringOptions:
    """The options of a run, which are the same for all its nets.

    Attributes:
        trips: how to differentiate While loops whose number of trips depends on the data.
        max_iterations: a loop that runs eagerly is an error after this many trips.
        wide: every floating-point result becomes float64, even if the operator names a narrower type.
        files: the folder in which operators may read and write files, or None.
        max_bytes: the memory for blobs; an operator that needs more is an error, before it runs. None: no bound.
        fitting: the calls that are known to fit into it; see `_check_memory`.
    """

    trips: Trips = CHECKPOINTED
    max_iterations: int | None = None
    wide: bool = False
    files: str | Path | None = None
    max_bytes: int | None = None
    fitting: set[Any] = field(default_factory=set)


@dataclass(frozen=True)
class Context:
    """The position in a run: what an operator may need beyond its inputs.

    Attributes:
        options: the options of the run.
        key: the PRNG key of the net that is running, or None.
        eager: values are concrete, so Python may read them.
        outer: blobs of the enclosing nets, which a step net may read without declaring them.
        timestep: the current step of the recurrent network that is running; random operators fold it into their keys.
        unread: the outputs of the current operator that nothing reads.
        in_branch: whether a branch or a loop is being traced, in which operators may not print, count or use files.
        recompute: blobs that the gradient recomputes instead of storing them.
        used_bytes: the bytes that the blobs of the enclosing nets use.
    """

    options: LoweringOptions = field(default_factory=LoweringOptions)
    key: Any = None
    eager: bool = False
    outer: Blobs = field(default_factory=dict)
    timestep: Any = None
    unread: frozenset[str] = frozenset()
    in_branch: bool = False
    recompute: frozenset[str] = frozenset()
    used_bytes: int = 0

    def step(self, timestep: Any, salt: str, recompute: Iterable[str] = ()) -> Context:
        """The context of one step of a recurrent network in this run. `salt` gives each network its own random numbers."""
        return replace(
            self,
            key=self._fold(self.key, salt),
            eager=False,
            timestep=timestep,
            unread=frozenset(),
            recompute=frozenset(recompute),
        )

    def op_key(self, op: Op) -> Any:
        """The operator's own key, a function of the run's key, the operator's outputs and the timestep.

        A copy of the operator in a backward net draws the same numbers, so recomputation is exact.
        """
        seed = None if op.device_option is None else op.device_option.random_seed
        key = self.key
        if seed is not None and key is None:
            key = jax.random.key(seed)
        elif seed is not None:
            key = jax.random.fold_in(key, seed)
        return self._fold(key, "|".join((op.type, *op.outputs)))

    def _fold(self, key: Any, salt: str) -> Any:
        """Folds `salt` into a key, and the timestep if there is one; None without a key."""
        if key is None:
            return None
        key = jax.random.fold_in(key, zlib.crc32(salt.encode()))
        if self.timestep is None:
            return key
        return jax.random.fold_in(key, self.timestep)


def _check_given(scheduled: Schedule, env: Blobs, outer: Blobs) -> None:
    """Raises NetError for a blob that a schedule reads but nobody gives; says whether it is written too late."""
    for name in scheduled.required:
        if name not in env and name not in outer:
            raise NetError(_missing_blob(scheduled, name, env))


def _missing_blob(scheduled: Schedule, name: str, env: Iterable[str]) -> str:
    """The error message for a blob that is read, but neither given nor written before."""
    known = dict.fromkeys(env)
    steps = iter(scheduled.steps)
    for reader in steps:
        if name in reader.op.inputs:
            break
        known.update(dict.fromkeys(reader.op.outputs))
    for writer in (reader, *steps):
        if name in writer.op.outputs:
            return (
                f"{reader.where}: reads blob {name!r}, which is first written by op #{writer.index} {writer.op.type}; the "
                f"operators form a cycle or are out of order, or {name!r} must be given"
            )
    return f"{reader.where}: reads blob {name!r}, which no operator writes and which was not given{near(name, known)}"


def execute(scheduled: Schedule, blobs: Blobs, context: Context) -> Values:
    """Runs a schedule on the given blobs. Returns all blobs, given and written."""
    _check_given(scheduled, blobs, context.outer)
    env: Values = dict(blobs)
    used_bytes = context.used_bytes
    for step in scheduled.steps:
        inputs = [env[n] if n in env else context.outer[n] for n in step.op.inputs]
        try:
            _check_not_freed(step, inputs)
            results = _call(step, inputs, env, context, used_bytes)
        except JrnnError as e:
            raise e.at(step.where) from e.__cause__
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as e:
            raise OpError(
                f"{step.where}: needs the values of its inputs to know the shape of its output, but they are traced; run "
                "the net with run_net, or give those blobs as numpy integer arrays from outside the jitted function"
            ) from e
        except (
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            MemoryError,
            jax.errors.JaxRuntimeError,
        ) as e:
            described = [f"{n!r} {describe_value(v)}" for n, v in zip(step.op.inputs, inputs)]
            reason = str(e).strip().partition("\n")[0].rstrip(".") or type(e).__name__
            shown = ", ".join(described) or "none"
            raise OpError(f"{step.where}: {reason}; inputs: {shown}") from e
        assert len(results) >= len(step.op.outputs), f"{step.where}: {len(results)} results"
        for name, result in zip(step.op.outputs, results):
            if context.eager:
                used_bytes += size_of(result)
            if context.eager and name not in blobs:
                used_bytes -= size_of(env.get(name))
            if name in context.recompute and isinstance(result, jax.Array):
                result = checkpoint_name(result, RECOMPUTED)
            env[name] = result
    return env


def _check_not_freed(step: ScheduledOp, inputs: Iterable[Any]) -> None:
    """Raises NetError if an operator reads a blob after it was freed."""
    for name, value in zip(step.op.inputs, inputs):
        if isinstance(value, Freed) and not step.definition.frees:
            raise NetError(
                f"reads blob {name!r}, which {value.by} has freed; free it after its last reader"
            )


def _call(
    step: ScheduledOp, inputs: list[Any], env: Values, context: Context, used_bytes: int
) -> tuple[Any, ...]:
    """Runs one operator, and returns its outputs; static inputs give static outputs."""
    definition = step.definition
    kwargs = dict(step.kwargs)
    if "key" in definition.reserved:
        kwargs["key"] = context.op_key(step.op)
    if "op" in definition.reserved:
        kwargs["op"] = step.op
    if "context" in definition.reserved:
        outer = {**context.outer, **env}
        kwargs["context"] = replace(context, outer=outer, unread=step.unread)
    if "wide" in definition.reserved:
        kwargs["wide"] = context.options.wide

    def forward() -> tuple[Any, ...]:
        results = definition.forward(*inputs, **kwargs)
        return results if isinstance(results, tuple) else (results,)

    may_be_static = inputs and not definition.random and "context" not in definition.reserved
    if may_be_static and all(map(is_static, inputs)):
        # The check is in the same context, because JAX caches what it traces.
        with jax.ensure_compile_time_eval(), jax.enable_x64(True):
            _check_memory(step, inputs, forward, context, used_bytes)
            return tuple(map(as_static, forward()))

    if context.eager:
        _check_memory(step, inputs, forward, context, used_bytes)
    with jax.named_scope(step.op.type):
        results = forward()
    if context.eager:
        # An error of the computation is raised here, and not where a result is read.
        jax.block_until_ready([r for r in results if isinstance(r, jax.Array)])
    elif context.options.max_bytes is not None:
        check_results(results, step.op.outputs, context.options.max_bytes)
    if definition.gradient == "stops":  # as in the backward net that autodiff generates
        results = tuple(map(_without_gradient, results))
    return tuple(map(widened, results)) if context.options.wide else results


def _without_gradient(result: Any) -> Any:
    return lax.stop_gradient(result) if isinstance(result, jax.Array) else result


def _check_memory(
    step: ScheduledOp,
    inputs: list[Any],
    forward: Callable[[], Any],
    context: Context,
    used_bytes: int,
) -> None:
    """Raises OpError if the results of a call, or arrays on the way to them, need more memory than there is.

    Operators that change their inputs, or that run nets in the workspace of their own net, cannot be traced without being
    run; the nets' operators are checked one by one.
    """
    definition = step.definition
    limit = LARGEST_FILL if context.options.max_bytes is None else context.options.max_bytes
    if definition.updates or definition.source:
        return
    if "context" in definition.reserved and workspace_of(step.op) is not Workspace.STEP:
        return
    key = _call_key(definition.type, inputs, step.kwargs)
    if key is not None and key in context.options.fitting:
        return
    largest = check_call(forward, step.op.outputs, limit, used_bytes)
    if key is not None and largest < limit // 1024:  # after which many more calls fit
        context.options.fitting.add(key)


def _call_key(type: str, inputs: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the shapes of a call's results depend on; None if it cannot be compared quickly."""
    shapes = []
    for x in inputs:
        if not isinstance(x, (np.ndarray, jax.Array)):
            return None
        if x.dtype.kind in "iubOSU" and x.size > _MAX_COMPARED_ELEMENTS:
            return None
        integers = np.asarray(x).tobytes() if x.dtype.kind in "iub" else None
        shapes.append((x.shape, x.dtype, integers))
    key = type, tuple(shapes), tuple(kwargs.items())
    try:
        hash(key)
    except TypeError:
        return None
    return key


def run_net(
    net: Net,
    blobs: Blobs,
    *,
    key: Any = None,
    max_iterations: int | None = None,
    wide: bool = False,
    files: str | Path | None = None,
    fed: Iterable[str] | None = None,
    max_bytes: int | None = None,
) -> Values:
    """Runs a net operator by operator, like a Caffe2 workspace. Keeps 64-bit integers and floats.

    Args:
        net: the net.
        blobs: the blobs that it reads, by name: numpy or JAX arrays.
        key: a `jax.random.key` for operators that draw random numbers. Operators with a `random_seed` in their device
            option work without it.
        max_iterations: a While loop that needs more trips is an error.
        wide: whether every floating-point result becomes float64, even if an operator names a narrower type.
        files: the folder in which operators may read and write files; by default they may not.
        fed: the blobs that may replace the outputs of operators that read data from outside the net. If all outputs of
            such an operator are fed, it does not run. By default all of `blobs`.
        max_bytes: the memory for the blobs that the net writes, by default what is free on the machine. An operator that
            would need more is an error, before it runs.

    Returns:
        Every blob that the net wrote and did not free, by name, as numpy arrays.

    Raises:
        NetError: for a blob that is neither given nor written, an unknown operator, or operators out of order.
        OpError: for inputs or arguments that do not fit an operator.

    >>> from jrnn.nets.ir import Net, Op
    >>> net = Net("double", (Op.of("Sum", ["x", "x"], ["y"]),))
    >>> run_net(net, {"x": np.array([1.0, 2.0], np.float32)})
    {'y': array([2., 4.], dtype=float32)}
    """
    if not isinstance(blobs, Mapping):
        raise NetError(
            f"net {net.name!r}: the blobs are a {type(blobs).__name__}; give a dict of arrays by name"
        )
    options = LoweringOptions(
        max_iterations=max_iterations,
        wide=wide,
        files=files,
        max_bytes=available() if max_bytes is None else max_bytes,
    )
    with jax.enable_x64(True):
        inputs = {name: as_blob(name, value) for name, value in blobs.items()}
        net = without_sources(net, inputs if fed is None else fed)
        env = execute(schedule(net), inputs, Context(options, key, eager=True))
        results = {}
        for name in written_by(net.ops):
            if not isinstance(env[name], Freed):
                results[name] = jax.tree.map(as_numpy, env[name])
        return results


def to_jax(
    net: Net,
    outputs: Iterable[str] | None = None,
    *,
    trips: Trips = CHECKPOINTED,
    wide: bool = False,
    max_bytes: int | None = None,
) -> Callable[..., Values]:
    """Converts a net to a pure function, `fn(blobs, *, key=None) -> dict`, to jit, differentiate, vmap or shard.

    Args:
        net: the net.
        outputs: the blobs to return. None: the net's external outputs, or if it declares none, every blob that it writes
            and does not free. Operators on which no output depends do not run.
        trips: how to differentiate While loops in reverse, see `Trips`. If the condition depends only on integer numpy
            blobs, the number of trips is known and the loop becomes a scan instead.
        wide: as for `run_net`. The function must then be traced with JAX's 64-bit types enabled.
        max_bytes: the memory for one blob, by default what is free on the machine or its accelerator. A larger one is an
            error while the function is traced.

    Returns:
        A function of a dict of blobs. Integer blobs that are numpy arrays are static: operators may use them as shapes.

    Raises:
        NetError, OpError: as `run_net` does. The net is checked here, the shapes when the function is called or traced.

    >>> from jrnn.nets.ir import Net, Op
    >>> fn = to_jax(Net("square", (Op.of("Mul", ["x", "x"], ["y"]),)), ["y"])
    >>> float(jax.grad(lambda x: fn({"x": x})["y"])(3.0))
    6.0
    """
    everything = outputs is None and not net.external_outputs
    if outputs is None:
        outputs = net.external_outputs or written_by(net.ops)
    wanted = tuple(outputs)
    scheduled = schedule(net, wanted)

    def fn(blobs: Blobs, *, key: Any = None) -> Values:
        inputs = {name: as_blob(name, value) for name, value in blobs.items()}
        most = available() if max_bytes is None else max_bytes
        options = LoweringOptions(trips, wide=wide, max_bytes=most)
        env = execute(scheduled, inputs, Context(options, key))
        results = {}
        for name in wanted:
            if name in env and not isinstance(env[name], Freed):
                results[name] = env[name]
            elif not (everything and name in env):
                raise NetError(unwritten_output(net, name))
        return results

    fn.__name__ = fn.__qualname__ = net.name or "net"
    return fn


def without_sources(net: Net, fed: Iterable[str]) -> Net:
    """The net without each operator that reads outside data or has an unknown type, if all its outputs are in `fed`."""
    given = set(fed)

    def is_needed(op: Op) -> bool:
        definition = registry.names().get(op.type)
        optional = definition is None or definition.source
        return not (optional and op.outputs and given.issuperset(op.outputs))

    return replace(net, ops=tuple(filter(is_needed, net.ops)))


def unwritten_output(net: Net, name: str) -> str:
    """The error message for a declared output that has no value."""
    for op in reversed(net.ops):
        if name in op.outputs:
            return f"net {net.name!r} has the output {name!r}, which {op.type} has freed; fetch another blob"
    written = written_by(net.ops)
    return (
        f"net {net.name!r} declares the output {name!r}, which no operator writes and which was not given"
        f"{near(name, written)}; it writes {', '.join(map(repr, written)) or 'nothing'}"
    )


def infer_shapes(
    net: Net, blobs: Blobs, *, key: Any = None, wide: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Derives the shape and dtype of every blob of a net by tracing. Nothing is computed.

    Args:
        net, key, wide: as for `run_net`.
        blobs: arrays, or their shapes and dtypes as `jax.ShapeDtypeStruct`.

    Returns:
        The shape and dtype of every blob of numbers or booleans, by name.

    Raises:
        NetError, OpError: as `run_net` does.
    """
    net = without_sources(net, blobs)
    # Operators that free blobs go too: the blobs had shapes.
    ops = tuple(op for op in net.ops if not registry.frees(op.type))
    scheduled = schedule(replace(net, ops=ops))
    concrete = {name: value for name, value in blobs.items() if is_static(value)}
    abstract = {name: value for name, value in blobs.items() if name not in concrete}

    def has_shape(value: Any) -> bool:
        is_text = isinstance(value, np.ndarray) and value.dtype.kind in "OSU"
        return hasattr(value, "dtype") and not is_text

    def run(inputs: Values) -> Values:
        env = execute(scheduled, {**concrete, **inputs}, Context(LoweringOptions(wide=wide), key))
        return {name: value for name, value in env.items() if has_shape(value)}

    with jax.enable_x64(True):
        shapes: dict[str, jax.ShapeDtypeStruct] = jax.eval_shape(run, abstract)
        return shapes
