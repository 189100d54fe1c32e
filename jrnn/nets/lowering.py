"""Nets as functions: `run_net` runs a net operator by operator, `to_jax` makes it a pure function of its blobs.

Both call `schedule` (`schedule.py`), which looks up the operators in the registry and checks them, and `execute`, which
calls them in order on a dict of blobs. Operators that run nets themselves (RecurrentNetwork, If, While) get the `Context`
and do the same.

Blobs of integers, booleans or strings that are numpy arrays are static: an operator that reads only static blobs is
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
from jrnn.nets.ir import Net, Op
from jrnn.nets.memory import LARGEST_FILL, check_call, check_results, size_of
from jrnn.nets.schedule import Schedule, ScheduledOp, schedule

Blobs = dict[str, Any]
_FEW = 64  # elements; values of so many integers are compared
RECOMPUTED = (
    "computed again"  # the name that `checkpoint_name` gives to the blobs in Context.recompute
)


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
        held: how many bytes the blobs of the enclosing nets use.
    """

    options: LoweringOptions = field(default_factory=LoweringOptions)
    key: Any = None
    eager: bool = False
    outer: Mapping[str, Any] = field(default_factory=dict)
    timestep: Any = None
    unread: frozenset[str] = frozenset()
    in_branch: bool = False
    recompute: frozenset[str] = frozenset()
    held: int = 0

    def step(self, timestep: Any, salt: str, recompute: Iterable[str] = ()) -> Context:
        """The context of one step of a recurrent network in this run. `salt` gives each network its own random numbers."""
        key = None if self.key is None else self._fold(self.key, salt)
        return replace(
            self,
            key=key,
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
        if seed is not None:
            key = jax.random.key(seed) if key is None else jax.random.fold_in(key, seed)
        return None if key is None else self._fold(key, "|".join((op.type, *op.outputs)))

    def _fold(self, key: Any, salt: str) -> Any:
        """Folds `salt` into a key, and the timestep if there is one."""
        key = jax.random.fold_in(key, zlib.crc32(salt.encode()))
        return key if self.timestep is None else jax.random.fold_in(key, self.timestep)


def _check_given(scheduled: Schedule, env: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
    for name in (n for n in scheduled.required if n not in env and n not in outer):
        reader = next(s for s in scheduled.steps if name in s.op.inputs)
        writer = next(
            (s for s in scheduled.steps if name in s.op.outputs and s.index >= reader.index), None
        )
        if writer is not None:
            raise NetError(
                f"{reader.where}: reads blob {name!r}, which is first written by op #{writer.index} {writer.op.type}; the "
                f"operators form a cycle or are out of order, or {name!r} must be given"
            )
        known = [
            *env,
            *(o for s in scheduled.steps[: scheduled.steps.index(reader)] for o in s.op.outputs),
        ]
        raise NetError(
            f"{reader.where}: reads blob {name!r}, which no operator writes and which was not given{near(name, known)}"
        )


def execute(scheduled: Schedule, blobs: Mapping[str, Any], context: Context) -> Blobs:
    """Runs a schedule on the given blobs. Returns all blobs, given and written."""
    _check_given(scheduled, blobs, context.outer)
    env: Blobs = dict(blobs)
    held = context.held
    for step in scheduled.steps:
        inputs = [env[n] if n in env else context.outer[n] for n in step.op.inputs]
        try:
            _check_not_freed(step, inputs)
            results = _call(step, inputs, env, context, held)
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
            given = (
                ", ".join(f"{n!r} {describe_value(v)}" for n, v in zip(step.op.inputs, inputs))
                or "none"
            )
            reason = str(e).strip().partition("\n")[0].rstrip(".") or type(e).__name__
            raise OpError(f"{step.where}: {reason}; inputs: {given}") from e
        assert len(results) >= len(step.op.outputs), f"{step.where}: {len(results)} results"
        for name, result in zip(step.op.outputs, results):
            if context.eager:
                held += size_of(result) - size_of(env.get(name) if name not in blobs else None)
            recompute = name in context.recompute and isinstance(result, jax.Array)
            env[name] = checkpoint_name(result, RECOMPUTED) if recompute else result
    return env


def _check_not_freed(step: ScheduledOp, inputs: Iterable[Any]) -> None:
    for name, value in zip(step.op.inputs, inputs):
        if isinstance(value, Freed) and not step.definition.frees:
            raise NetError(
                f"reads blob {name!r}, which {value.by} has freed; free it after its last reader"
            )


def _call(
    step: ScheduledOp, inputs: list[Any], env: Blobs, context: Context, held: int
) -> tuple[Any, ...]:
    offered: dict[str, Callable[[], Any]] = {
        "key": lambda: context.op_key(step.op),
        "op": lambda: step.op,
        "context": lambda: replace(context, outer={**context.outer, **env}, unread=step.unread),
        "wide": lambda: context.options.wide,
    }
    definition = step.definition
    kwargs = {**step.kwargs, **{name: offered[name]() for name in definition.reserved}}

    def forward() -> tuple[Any, ...]:
        results = definition.forward(*inputs, **kwargs)
        return results if isinstance(results, tuple) else (results,)

    may_be_static = inputs and not definition.random and "context" not in definition.reserved
    static = may_be_static and all(map(is_static, inputs))
    if static:
        with (
            jax.ensure_compile_time_eval(),
            jax.enable_x64(True),
        ):  # the check too: JAX keeps what it traces
            _check_memory(step, inputs, kwargs, forward, context, held)
            return tuple(map(as_static, forward()))
    if context.eager:
        _check_memory(step, inputs, kwargs, forward, context, held)
    with jax.named_scope(step.op.type):
        results = forward()
    if context.eager:
        jax.block_until_ready(
            [r for r in results if isinstance(r, jax.Array)]
        )  # raises here, and not where it is read
    elif context.options.max_bytes is not None:
        check_results(results, step.op.outputs, context.options.max_bytes)
    if definition.gradient == "stops":  # as in the backward net that autodiff generates
        results = tuple(lax.stop_gradient(r) if isinstance(r, jax.Array) else r for r in results)
    return tuple(map(widened, results)) if context.options.wide else results


def _check_memory(
    step: ScheduledOp,
    inputs: list[Any],
    kwargs: Mapping[str, Any],
    forward: Callable[[], Any],
    context: Context,
    held: int,
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
    largest = check_call(forward, step.op.outputs, limit, held)
    if key is not None and largest < limit // 1024:  # after which many more calls fit
        context.options.fitting.add(key)


def _call_key(type: str, inputs: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the shapes of a call's results depend on; None if it cannot be compared quickly."""
    shapes = []
    for x in inputs:
        if not isinstance(x, (np.ndarray, jax.Array)) or (
            x.dtype.kind in "iubOSU" and x.size > _FEW
        ):
            return None
        shapes.append(
            (x.shape, x.dtype, np.asarray(x).tobytes() if x.dtype.kind in "iub" else None)
        )
    key = type, tuple(shapes), tuple(kwargs.items())
    try:
        hash(key)
    except TypeError:
        return None
    return key


def run_net(
    net: Net,
    blobs: Mapping[str, Any],
    *,
    key: Any = None,
    max_iterations: int | None = None,
    wide: bool = False,
    files: str | Path | None = None,
    fed: Iterable[str] | None = None,
    max_bytes: int | None = None,
) -> Blobs:
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
    most = available() if max_bytes is None else max_bytes
    options = LoweringOptions(max_iterations=max_iterations, wide=wide, files=files, max_bytes=most)
    with jax.enable_x64(True):
        given = {name: as_blob(name, value) for name, value in blobs.items()}
        net = without_sources(net, given if fed is None else fed)
        env = execute(schedule(net), given, Context(options, key, eager=True))
        written = dict.fromkeys(o for op in net.ops for o in op.outputs)
        return {
            name: jax.tree.map(as_numpy, env[name])
            for name in written
            if not isinstance(env[name], Freed)
        }


def to_jax(
    net: Net,
    outputs: Iterable[str] | None = None,
    *,
    trips: Trips = CHECKPOINTED,
    wide: bool = False,
    max_bytes: int | None = None,
) -> Callable[..., Blobs]:
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
        outputs = net.external_outputs or dict.fromkeys(o for op in net.ops for o in op.outputs)
    wanted = tuple(outputs)
    scheduled = schedule(net, wanted)

    def fn(blobs: Mapping[str, Any], *, key: Any = None) -> Blobs:
        given = {name: as_blob(name, value) for name, value in blobs.items()}
        most = available() if max_bytes is None else max_bytes
        env = execute(
            scheduled, given, Context(LoweringOptions(trips, wide=wide, max_bytes=most), key)
        )
        results = {
            name: env[name] for name in wanted if name in env and not isinstance(env[name], Freed)
        }
        for name in wanted:
            if name not in results and not (everything and name in env):
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
    written = {o: op for op in net.ops for o in op.outputs}
    if name in written:
        return f"net {net.name!r} has the output {name!r}, which {written[name].type} has freed; fetch another blob"
    return (
        f"net {net.name!r} declares the output {name!r}, which no operator writes and which was not given"
        f"{near(name, written)}; it writes {', '.join(map(repr, written)) or 'nothing'}"
    )


def infer_shapes(
    net: Net, blobs: Mapping[str, Any], *, key: Any = None, wide: bool = False
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
    net = without_sources(net, blobs)  # and without operators that free blobs, which had shapes
    scheduled = schedule(
        replace(net, ops=tuple(op for op in net.ops if not registry.frees(op.type)))
    )
    concrete = {n: v for n, v in blobs.items() if is_static(v)}
    abstract = {n: v for n, v in blobs.items() if n not in concrete}

    def run(given: Blobs) -> Blobs:
        env = execute(scheduled, {**concrete, **given}, Context(LoweringOptions(wide=wide), key))
        arrays = {n: v for n, v in env.items() if hasattr(v, "dtype")}
        return {
            n: v
            for n, v in arrays.items()
            if not (isinstance(v, np.ndarray) and v.dtype.kind in "OSU")
        }

    with jax.enable_x64(True):
        shapes: dict[str, jax.ShapeDtypeStruct] = jax.eval_shape(run, abstract)
        return shapes
