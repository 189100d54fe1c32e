"""Nets become functions: `run_net` runs one operator by operator, `to_jax` makes a pure function of its blobs.

Both walk the same schedule. Integer blobs held as numpy arrays are static: an operator that reads only such blobs is
evaluated at once and its result stays numpy, so that `Shape -> Slice -> Concat -> Reshape` works inside jit.

`schedule` looks operators up in the registry and checks them; `execute` calls them in order on a dict of blobs. From
`graph/`: `live_ops` are the operators that outputs need, `free_names` the blobs that sub-nets of an operator read from
around it. `Trips` says how a While loop is differentiated (`executor/while_loop.py`). Operators that run nets themselves
(RecurrentNetwork, If, While) get the `Context`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jrnn import registry
from jrnn.errors import JrnnError, NetError, OpError, describe_op, near
from jrnn.executor.while_loop import CHECKPOINTED, Trips
from jrnn.graph.scope import free_names
from jrnn.graph.ssa import live_ops
from jrnn.ir import Net, Op

Blobs = dict[str, Any]
RECOMPUTED = "computed again"


@dataclass(frozen=True)
class Context:
    """How a net is being run: what its operators may need beyond their inputs.

    key: the run's PRNG key, or None. eager: values are concrete, and Python may look at them.
    outer: blobs of the enclosing nets, which a step net may read undeclared. timestep: the step of the recurrent network
    that is running, which random operators fold into their keys. unread: outputs of the operator at hand that nobody asks
    for. trips: how loops whose number of trips depends on the data are differentiated. max_iterations: after how many trips
    a loop that is run eagerly counts as endless. in_branch: whether a branch or a loop is being traced. recompute: blobs
    that a gradient is to compute again instead of keeping them; their values are marked with the name RECOMPUTED.
    files: the folder in which operators may read and write files, or None.
    wide: every floating-point result becomes float64, also of operators that name a narrower type: gradients are checked so.
    """

    key: Any = None
    eager: bool = False
    outer: Mapping[str, Any] = field(default_factory=dict)
    timestep: Any = None
    unread: frozenset[str] = frozenset()
    trips: Trips = CHECKPOINTED
    max_iterations: int | None = None
    in_branch: bool = False
    recompute: frozenset[str] = frozenset()
    wide: bool = False
    files: str | Path | None = None

    def step(self, timestep: Any, salt: str, recompute: Iterable[str] = ()) -> Context:
        """The context of one step of a recurrent network that runs in this one; `salt` tells two such networks apart."""
        key = self.key
        if key is not None:
            key = jax.random.fold_in(key, zlib.crc32(salt.encode()))
            key = key if self.timestep is None else jax.random.fold_in(key, self.timestep)
        return replace(
            self, key=key, eager=False, timestep=timestep, unread=frozenset(), recompute=frozenset(recompute)
        )

    def op_key(self, op: Op) -> Any:
        """A key of the operator's own: a function of the run's key, the operator's outputs and the timestep.

        The same operator copied into a backward net draws the same numbers, so recomputation is exact.
        """
        seed = None if op.device_option is None else op.device_option.random_seed
        key = self.key
        if seed is not None:
            key = jax.random.key(seed) if key is None else jax.random.fold_in(key, seed)
        if key is None:
            return None
        key = jax.random.fold_in(key, zlib.crc32("|".join((op.type, *op.outputs)).encode()))
        return key if self.timestep is None else jax.random.fold_in(key, self.timestep)


@dataclass(frozen=True)
class Step:
    """One operator of a schedule, looked up, checked and decoded."""

    index: int
    op: Op
    definition: registry.OpDef
    kwargs: Mapping[str, Any]
    where: str
    unread: frozenset[str] = frozenset()

    @property
    def may_be_static(self) -> bool:
        return bool(self.op.inputs) and not self.definition.random and "context" not in self.definition.reserved


@dataclass(frozen=True)
class Schedule:
    """A checked net: its operators in order, and the blobs that must be given."""

    net: Net
    steps: tuple[Step, ...]
    required: tuple[str, ...]


def schedule(net: Net, outputs: Iterable[str] | None = None, *, read_outside: Iterable[str] = ()) -> Schedule:
    """Checks a net and keeps the operators that `outputs` need (all, where None).

    `read_outside` are blobs that somebody reads after the net; it decides which outputs count as unread.
    Raises NetError for an unknown operator, a wrong arity, a repeated output, a wrong argument, or an unknown output.
    """
    written = {o for op in net.ops for o in op.outputs}
    keep: Iterable[int] = range(len(net.ops))
    if outputs is not None:
        known = written | set(net.external_inputs) | {i for op in net.ops for i in op.inputs}
        for name in outputs:
            if name not in known:
                raise NetError(f"net {net.name!r} has no blob {name!r} to fetch{near(name, known)}")
        keep = live_ops(_with_updates(net), outputs)
    steps = []
    for index in keep:
        op = net.ops[index]
        where = describe_op(index, op.type, op.outputs, net.name)
        try:
            definition = registry.lookup(op.type)
            definition.check_arity(op)
            for k, name in enumerate(op.outputs):
                if name in op.outputs[:k]:
                    raise NetError(f"writes blob {name!r} twice; give each output a name of its own")
            steps.append(Step(index, op, definition, definition.decode(op), where))
        except JrnnError as e:
            raise e.at(where) from None
    return Schedule(net, _with_unread(steps, (*(outputs or ()), *read_outside)), _required(steps))


def _with_updates(net: Net) -> Net:
    """The net as liveness should see it: operators that change an input in place have it among their outputs."""

    def seen(op: Op) -> Op:
        definition = registry.find(op.type)
        updates = () if definition is None else definition.updates
        return replace(op, outputs=(*op.outputs, *(op.inputs[k] for k in updates))) if updates else op

    return replace(net, ops=tuple(seen(op) for op in net.ops))


def _with_unread(steps: list[Step], read_outside: Iterable[str]) -> tuple[Step, ...]:
    """The steps, each with the outputs that no later step reads and nobody asks for by name."""
    needed = set(read_outside)
    found = []
    for step in reversed(steps):
        found.append(replace(step, unread=frozenset(step.op.outputs) - needed))
        needed -= set(step.op.outputs)
        needed.update(step.op.inputs, free_names(step.op))
    return tuple(reversed(found))


def _required(steps: Iterable[Step]) -> tuple[str, ...]:
    """Blobs that are read before any operator writes them, in the order of reading."""
    found: dict[str, None] = {}
    written: set[str] = set()
    for step in steps:
        for name in step.op.inputs:
            if name not in written:
                found[name] = None
        written.update(step.op.outputs)
    return tuple(found)


def _check_given(p: Schedule, env: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
    for name in p.required:
        if name in env or name in outer:
            continue
        reader = next(s for s in p.steps if name in s.op.inputs)
        writer = next((s for s in p.steps if name in s.op.outputs and s.index >= reader.index), None)
        if writer is not None:
            raise NetError(
                f"{reader.where}: reads blob {name!r}, which is first written by op #{writer.index} {writer.op.type}: the "
                f"operators form a cycle or are out of order, or {name!r} must be given"
            )
        known = [*env, *(o for s in p.steps[: p.steps.index(reader)] for o in s.op.outputs)]
        raise NetError(
            f"{reader.where}: reads blob {name!r}, which no operator writes and which was not given{near(name, known)}"
        )


def execute(p: Schedule, blobs: Mapping[str, Any], context: Context) -> Blobs:
    """Runs a schedule on given blobs and returns every blob, given or written."""
    _check_given(p, blobs, context.outer)
    env: Blobs = dict(blobs)
    for step in p.steps:
        inputs = [env[n] if n in env else context.outer[n] for n in step.op.inputs]
        try:
            results = _call(step, inputs, env, context)
        except JrnnError as e:
            raise e.at(step.where) from e.__cause__
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as e:
            raise OpError(
                f"{step.where}: needs the values of its inputs to know the shape of its output, and they are traced; run "
                "the net with run_net, or give those blobs as numpy integer arrays from outside the jitted function"
            ) from e
        except (TypeError, ValueError, IndexError, ZeroDivisionError) as e:
            raise OpError(f"{step.where}: {_first_line(e)}; inputs: {_describe(step.op.inputs, inputs)}") from e
        assert len(results) >= len(step.op.outputs), f"{step.where}: {len(results)} results"
        env.update((n, _marked(r) if n in context.recompute else r) for n, r in zip(step.op.outputs, results))
    return env


def _marked(value: Any) -> Any:
    return checkpoint_name(value, RECOMPUTED) if isinstance(value, jax.Array) else value


def _call(step: Step, inputs: list[Any], env: Blobs, context: Context) -> tuple[Any, ...]:
    kwargs = dict(step.kwargs)
    reserved = step.definition.reserved
    if "op" in reserved:
        kwargs["op"] = step.op
    if "key" in reserved:
        kwargs["key"] = context.op_key(step.op)
    if "wide" in reserved:
        kwargs["wide"] = context.wide
    if "context" in reserved:
        kwargs["context"] = replace(context, outer={**context.outer, **env}, unread=step.unread)
    if step.may_be_static and all(_is_static(x) for x in inputs):
        with jax.ensure_compile_time_eval(), jax.enable_x64(True):
            results = step.definition.forward(*inputs, **kwargs)
            return tuple(_as_static(r) for r in (results if isinstance(results, tuple) else (results,)))
    with jax.named_scope(step.op.type):
        results = step.definition.forward(*inputs, **kwargs)
    results = results if isinstance(results, tuple) else (results,)
    if step.definition.gradient == "stops":  # JAX's gradient ends where the generated net's does
        results = tuple(lax.stop_gradient(r) if isinstance(r, jax.Array) else r for r in results)
    return tuple(map(_widened, results)) if context.wide else results


def _widened(x: Any) -> Any:
    is_float = isinstance(x, (jax.Array, np.ndarray)) and jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(np.float64) if is_float else x


def _is_static(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind in "iubOS"


def _as_static(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, jax.Array) and x.dtype.kind in "iub" else x


def _first_line(e: Exception) -> str:
    lines = [line for line in str(e).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(e).__name__


def describe_value(x: Any) -> str:
    """`float32[2,3]` for an array, else the name of its type."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return type(x).__name__


def _describe(names: Iterable[str], values: Iterable[Any]) -> str:
    return ", ".join(f"{n!r} {describe_value(v)}" for n, v in zip(names, values)) or "none"


def _as_blob(name: str, value: Any) -> Any:
    """A given value as a blob: integers and strings stay numpy (static), floats become JAX arrays of the same width."""
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, (bool, int, float, list)):
        value = np.asarray(value)
        if value.dtype == np.float64:
            value = value.astype(np.float32)  # a Python float has no width; Caffe2's is 32 bits
    if isinstance(value, (str, bytes)):
        value = np.asarray(value, dtype=object)
    if not isinstance(value, np.ndarray) or value.dtype.kind in "iubOSU":
        return value
    if value.dtype == np.float64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined, unused-ignore]
        raise NetError(
            f"blob {name!r} is float64, but JAX's 64-bit types are off: give it as float32, or set jax_enable_x64"
        )
    return jnp.asarray(value)


def _as_numpy(value: Any) -> Any:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    return np.asarray(value) if isinstance(value, jax.Array) else value


def run_net(
    net: Net,
    blobs: Mapping[str, Any],
    *,
    key: Any = None,
    max_iterations: int | None = None,
    wide: bool = False,
    files: str | Path | None = None,
    fed: Iterable[str] | None = None,
) -> Blobs:
    """Runs a net operator by operator, like a Caffe2 workspace, with 64-bit integers and floats kept.

    Args:
        net: the net.
        blobs: the blobs it reads, by name: numpy or JAX arrays.
        key: a `jax.random.key` for operators that draw random numbers; those with a `random_seed` in their device option
            work without.
        max_iterations: a While loop that goes on after so many trips is an error.
        wide: whether every floating-point result becomes float64, also where an operator names a narrower type.
        files: the folder in which operators may read and write files; by default they may not.
        fed: the blobs that stand for what operators bring from outside (see `without_sources`), by default all of `blobs`.

    Returns:
        Every blob that the net wrote, by name, as numpy arrays.

    Raises:
        NetError: for a blob that is neither given nor written, an unknown operator, operators out of order.
        OpError: for an operator that cannot take its inputs or arguments.

    >>> from jrnn.ir import Net, Op
    >>> net = Net("double", (Op.of("Sum", ["x", "x"], ["y"]),))
    >>> run_net(net, {"x": np.array([1.0, 2.0], np.float32)})
    {'y': array([2., 4.], dtype=float32)}
    """
    net = without_sources(net, blobs if fed is None else fed)
    p = schedule(net)
    with jax.enable_x64(True):
        given = {name: _as_blob(name, value) for name, value in blobs.items()}
        env = execute(p, given, Context(key=key, eager=True, max_iterations=max_iterations, wide=wide, files=files))
        written = dict.fromkeys(o for op in net.ops for o in op.outputs)
        return {name: jax.tree.map(_as_numpy, env[name]) for name in written}


def to_jax(
    net: Net, outputs: Iterable[str] | None = None, *, trips: Trips = CHECKPOINTED, wide: bool = False
) -> Callable[..., Blobs]:
    """Converts a net to a pure function, `fn(blobs, *, key=None) -> dict`, to jit, differentiate, vmap or shard.

    Args:
        net: the net.
        outputs: the blobs to return; None means the net's external outputs, or every blob written where it declares
            none. Operators that no output needs are left out.
        trips: how While loops are differentiated in reverse, see `Trips`. Where the condition depends on integer numpy
            blobs alone, the trips are counted at once and the loop is a scan, whatever this says.
        wide: whether every floating-point result becomes float64, also where an operator names a narrower type; to be
            traced with JAX's 64-bit types enabled.

    Returns:
        A function of a dict of blobs. Integer blobs given as numpy arrays are static: operators may turn them into shapes.

    Raises:
        NetError, OpError: as `run_net` does; the net is checked here, the shapes when the function is called or traced.

    >>> from jrnn.ir import Net, Op
    >>> fn = to_jax(Net("square", (Op.of("Mul", ["x", "x"], ["y"]),)), ["y"])
    >>> float(jax.grad(lambda x: fn({"x": x})["y"])(3.0))
    6.0
    """
    if outputs is None:
        outputs = net.external_outputs or dict.fromkeys(o for op in net.ops for o in op.outputs)
    wanted = tuple(outputs)
    p = schedule(net, wanted)

    def fn(blobs: Mapping[str, Any], *, key: Any = None) -> Blobs:
        given = {name: _as_blob(name, value) for name, value in blobs.items()}
        env = execute(p, given, Context(key=key, trips=trips, wide=wide))
        for name in wanted:
            if name not in env:
                raise NetError(unwritten_output(net, name))
        return {name: env[name] for name in wanted}

    fn.__name__ = fn.__qualname__ = net.name or "net"
    return fn


def without_sources(net: Net, fed: Iterable[str]) -> Net:
    """The net without operators whose outputs are all given: those that bring data from outside, and unknown ones."""
    given = set(fed)

    def is_needed(op: Op) -> bool:
        definition = registry.find(op.type)
        optional = definition is None or definition.source
        return not (optional and op.outputs and given.issuperset(op.outputs))

    return replace(net, ops=tuple(filter(is_needed, net.ops)))


def unwritten_output(net: Net, name: str) -> str:
    """What is wrong with an output that has no value."""
    written = dict.fromkeys(o for op in net.ops for o in op.outputs)
    return (
        f"net {net.name!r} declares the output {name!r}, which no operator writes and which was not given"
        f"{near(name, written)}; it writes {', '.join(map(repr, written)) or 'nothing'}"
    )


def infer_shapes(
    net: Net, blobs: Mapping[str, Any], *, key: Any = None, wide: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Derives the shape and dtype of every blob of a net by tracing. Nothing is computed.

    `key` and `wide` are those of `run_net`. `blobs` holds arrays or `jax.ShapeDtypeStruct`s. Blobs of strings are left out.
    Raises as `run_net` does.
    """
    p = schedule(without_sources(net, blobs))
    concrete = {n: v for n, v in blobs.items() if _is_static(v)}
    abstract = {n: v for n, v in blobs.items() if n not in concrete}
    scope = jax.enable_x64(True) if not jax.config.jax_enable_x64 else nullcontext()  # type: ignore[attr-defined, unused-ignore]

    def run(given: Blobs) -> Blobs:
        env = execute(p, {**concrete, **given}, Context(key=key, wide=wide))
        return {n: v for n, v in env.items() if not (isinstance(v, np.ndarray) and v.dtype.kind in "OSU")}

    with scope:
        shapes: dict[str, jax.ShapeDtypeStruct] = jax.eval_shape(run, abstract)
        return shapes
