"""What jrnn knows of how JAX traces: jaxprs and their equations, the context of a trace, and where equations come from.

Here are also the tested versions of JAX, and `missing`: the private names that the installed JAX lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
from jax import Array
from jax.core import ShapedArray, Tracer
from jax.experimental import xla_metadata
from jax.extend import linear_util, random, source_info_util
from jax.extend.core import DebugInfo, Literal, Primitive, jaxpr_as_fun
from jax.extend.core.primitives import closed_call_p, scan_p

if TYPE_CHECKING:  # by JAX's own annotations, a value of a jaxpr has no shape

    class Var:
        aval: Any

        def __init__(self, aval: Any) -> None: ...

    class JaxprEqn:
        primitive: Any
        params: dict[str, Any]
        invars: Sequence[Any]
        outvars: Sequence[Var]
        effects: Any
        source_info: SourceInfo
        ctx: Any

        def replace(self, **fields: Any) -> JaxprEqn: ...

    Jaxpr = Any
    ClosedJaxpr = Any

else:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr
    from jax.extend.core import Jaxpr as Jaxpr
    from jax.extend.core import JaxprEqn as JaxprEqn
    from jax.extend.core import Var as Var

SourceInfo = source_info_util.SourceInfo
Params = Mapping[str, Any]  # of an equation
Metadata = Any  # XLA metadata, a mapping or None
set_xla_metadata: Callable[..., AbstractContextManager[None]] = xla_metadata.set_xla_metadata

# Versions ------------------------------------------------------------------------------------------------------------

JAX = jax.__version_info__
_TESTED = {
    (0, 10): 2,
    (0, 11): 2,
    (0, 12): 0,
}  # by minor release: the newest patch with which the tests passed

is_untested = JAX[2] > _TESTED.get(
    JAX[:2], -1
)  # whether this version of JAX is newer than what was tested

# Private names -------------------------------------------------------------------------------------------------------

missing: dict[str, str] = {}  # the private names that this JAX lacks, and what happens without each
LEFT_TO_JAX = "jrnn.scan is jax.lax.scan"
_TRACED_TWICE = "a function that is called inside and outside of a step is traced twice"
_NOT_EVERYWHERE = "optimize_scans(everywhere=True) raises"


def private_name(module: str, name: str, without: str) -> Any:
    """Returns a private name of JAX, or None if this version lacks it: then `missing` says what happens `without` it."""
    try:
        return attrgetter(name)(import_module(f"jax._src.{module}"))
    except (ImportError, AttributeError):
        missing[f"jax._src.{module}.{name}"] = without
        return None


current_metadata: Callable[[], Any] = private_name(
    "xla_metadata_lib", "current_xla_metadata", LEFT_TO_JAX
)

thread_metadata: Callable[[], Any] = private_name(
    "config", "xla_metadata_context_manager.get_local", _TRACED_TWICE
)
swap_thread_metadata: Callable[[Any], Any] = private_name(
    "config", "xla_metadata_context_manager.swap_local", _TRACED_TWICE
)
set_thread_metadata: Callable[[Any], None] = private_name(
    "config", "xla_metadata_context_manager.set_local", _TRACED_TWICE
)
_global_metadata = private_name(
    "config", "xla_metadata_context_manager.get_global", _NOT_EVERYWHERE
)
set_global_metadata = private_name(
    "config", "xla_metadata_context_manager.set_global", _NOT_EVERYWHERE
)
updated_metadata = private_name("xla_metadata_lib", "update_metadata", _NOT_EVERYWHERE)

trace_context: Callable[[], Any] | None = private_name(
    "config", "trace_context", "calls outside of jit take 0.1 ms longer"
)
_without_frames_in = private_name(
    "traceback_util", "register_exclusion", "tracebacks show the frames of jrnn"
)
_api_boundary = private_name("traceback_util", "api_boundary", "tracebacks show the frames of jrnn")
_register_cache = private_name(
    "util", "register_cache", "jax.clear_caches() does not empty the caches of jrnn"
)
_remat3 = private_name(
    "config", "remat3", "gradients of jrnn.scan raise where the option jax_remat3 is set"
)
_unspecified = private_name(
    "sharding_impls", "UNSPECIFIED", "jitted functions in a step are not inlined"
)
_trace = private_name(
    "interpreters.partial_eval", "trace_to_jaxpr_dynamic", "loops take longer to plan"
)
_named_axis_effect = private_name(
    "core", "NamedAxisEffect", "scan(axis_name=...) raises for steps with collectives"
)
_flat_trees = (
    None if JAX < (0, 11) else private_name("flattree", "__dict__", "jrnn.scan is slower to trace")
)
private_name(
    "core", "ShapedArray.manual_axis_type", "loops in jax.shard_map with check_vma=True raise"
)


def api_boundary(fn: Callable[..., Any], folder: str) -> Callable[..., Any]:
    """Returns a function whose tracebacks show no frames of the files in a folder, like the tracebacks of `jax.lax.scan`."""
    if _api_boundary is None or _without_frames_in is None:
        return fn
    _without_frames_in(folder)
    bounded: Callable[..., Any] = _api_boundary(fn)
    return bounded


def without_remat3() -> AbstractContextManager[Any]:
    """Turns the option `jax_remat3` off, whose equations cannot be transposed."""
    return nullcontext() if _remat3 is None else _remat3(False)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def cached(maxsize: int) -> Callable[[_Function], _Function]:
    """Returns a decorator that caches `maxsize` results of a function, until `jax.clear_caches()` empties the cache."""

    def decorate(fn: _Function) -> _Function:
        cache = functools.lru_cache(maxsize)(fn)
        if _register_cache is not None:
            _register_cache(cache, fn.__qualname__)
        return cast(_Function, cache)

    return decorate


# XLA metadata --------------------------------------------------------------------------------------------------------


def can_change_metadata() -> bool:
    """Whether `thread_metadata` returns the XLA metadata of this thread, and the other two functions change it."""
    return None not in (thread_metadata, swap_thread_metadata, set_thread_metadata)


def tracing_options() -> tuple[Any, ...]:
    """Returns the options of JAX that equations depend on: the keys of its trace caches, without tags and observers."""
    metadata = thread_metadata() if can_change_metadata() else None

    def is_option(value: Any) -> bool:
        return value is not metadata and not isinstance(value, list)

    options = () if trace_context is None else trace_context()
    return tuple(option if is_option(option) else None for option in options)


def global_metadata() -> Metadata:
    """Returns the XLA metadata of threads without metadata of their own. Raises NotImplementedError if JAX lacks names."""
    if None in (_global_metadata, set_global_metadata, updated_metadata):
        raise NotImplementedError(
            ", ".join(name for name, without in missing.items() if without == _NOT_EVERYWHERE)
        )
    return _global_metadata()


def metadata_of(eqn: JaxprEqn) -> Metadata:
    """Returns the XLA metadata of an equation, a mapping or None."""
    return eqn.ctx.xla_metadata


def context_of(eqn: JaxprEqn, without: str | None = None) -> Any:
    """Returns the context in which an equation was traced, a key of dicts; without one entry of its XLA metadata."""
    return eqn.ctx if without is None else context_without(eqn.ctx, without)


@functools.lru_cache(maxsize=256)
def context_without(ctx: Any, key: str) -> Any:
    with ctx.manager, set_xla_metadata(**{key: None}):
        return jax.make_jaxpr(jax.lax.neg)(0.0).jaxpr.eqns[0].ctx


def in_context(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """Enters the context in which an equation was traced."""
    return eqn.ctx.manager  # type: ignore[no-any-return]


def is_traced(value: object) -> bool:
    """Whether a value is a tracer, whose elements cannot be read.

    >>> is_traced(1.0)
    False
    """
    return isinstance(value, Tracer)


class _Staged(Exception):
    """Is raised where JAX asks for types instead of a value."""


_value_p = Primitive("value")
_value_p.def_impl(lambda: False)


@_value_p.def_abstract_eval  # type: ignore[untyped-decorator, unused-ignore]
def _() -> Any:
    raise _Staged


def is_staged() -> bool:
    """Whether JAX only traces here, as inside of `jax.jit`; inside of `jax.grad` and `jax.vmap` alone it computes.

    >>> is_staged(), jax.grad(lambda x: x * is_staged())(1.0).item(), jax.jit(lambda: is_staged())().item()
    (False, 0.0, True)
    """
    try:
        return bool(_value_p.bind())
    except _Staged:
        return True


def are_arrays(avals: Sequence[ShapedArray]) -> bool:
    """Returns True if all abstract values are arrays: no Refs, tokens or other types."""
    return all(type(aval) is ShapedArray for aval in avals)


def mesh_axes_type(*values: Array) -> Any:
    """Returns the part of the type of arrays that says over which mesh axes they vary: of several, the largest."""
    kinds = [
        getattr(jax.typeof(value), "manual_axis_type", None) for value in values
    ]  # None for Refs and keys
    return max(kinds, key=lambda kind: len(_varying(kind)))


def varying_axes(value: Array) -> frozenset[Any]:
    """Returns the mesh axes over which an array varies; none outside of `jax.shard_map`, or without `check_vma`."""
    return _varying(mesh_axes_type(value))


def _varying(kind: Any) -> frozenset[Any]:
    return frozenset() if kind is None else kind.varying


def scan_counts(params: Params) -> tuple[int, int]:
    """Returns the numbers of constants and carries of a scan's equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since jax 0.11
    return len(list(consts)), len(list(carry))


def bind_scan(
    step: ClosedJaxpr,
    consts: Sequence[Array],
    carry: Sequence[Array],
    xs: Sequence[Array],
    **params: Any,
) -> list[Array]:
    """Runs a scan with a jaxpr as its step, which `jax.lax.scan` would trace again. Returns the last carry and the ys.

    Args:
        step: a jaxpr without constants of its own.
        consts, carry, xs: the arguments.
        params: `length`, `reverse` and `unroll`.
    """
    counts: dict[str, Any] = {"num_consts": len(consts), "num_carry": len(carry)}
    if _flat_trees is not None:
        pack = _flat_trees["pack"]
        nones = _flat_trees["nones"]
        n_ys = len(step.out_avals) - len(carry)
        inputs = (nones(len(consts)), nones(len(carry)), nones(len(xs)))
        counts = {"ft_in": pack(inputs), "ft_out": pack((nones(len(carry)), nones(n_ys)))}
    results: list[Array] = scan_p.bind(*consts, *carry, *xs, jaxpr=step, **counts, **params)
    return results


def traced(fn: Callable[..., Sequence[Any]], avals: Sequence[ShapedArray | Array]) -> ClosedJaxpr:
    """Returns the closed jaxpr of a function of arrays that returns a sequence of arrays, given their types or arrays.

    `jax.make_jaxpr` takes four times as long for a few equations, most of it for trees, signatures and a cache.
    """
    if _trace is None:
        return jax.make_jaxpr(fn)(*avals)
    info = DebugInfo("scan", "step", ("",) * len(avals), None)
    types = [
        a if hasattr(a, "to_tangent_aval") else jax.typeof(a) for a in avals
    ]  # types have it, arrays do not
    jaxpr, _, consts = _trace(linear_util.wrap_init(fn, debug_info=info), types)
    return ClosedJaxpr(jaxpr, tuple(consts))


def closed_jaxpr(
    invars: Sequence[Var],
    eqns: Sequence[JaxprEqn],
    outvars: Sequence[Var | Literal],
    consts: Mapping[Var, Array],
) -> ClosedJaxpr:
    """Returns the closed jaxpr of equations. `consts` has the values of its constants."""
    effects = {effect for eqn in eqns for effect in eqn.effects}
    info = DebugInfo("scan", "step", ("",) * len(invars), ("",) * len(outvars))
    names: list[Any] = list(consts)
    jaxpr = Jaxpr(names, list(invars), list(outvars), list(eqns), effects, info)
    return ClosedJaxpr(jaxpr, tuple(consts.values()))


def calling(closed: ClosedJaxpr) -> Callable[..., Any]:
    """Returns a function that calls a closed jaxpr by one equation if JAX has an equation that is not a trace of it."""
    if getattr(
        closed_call_p, "call_primitive", False
    ):  # before JAX 0.12: its equations are evaluated
        return jaxpr_as_fun(closed)  # type: ignore[no-any-return, unused-ignore]
    return functools.partial(closed_call_p.bind, call_jaxpr=closed)


def expanded(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr to which JAX expands an equation when it lowers it, or None if it lowers the equation itself.

    In jax 0.12, `jnp.searchsorted` is such an equation.
    """
    if eqn.primitive.name != "call_hi_primitive" or eqn.effects:
        return None
    primitive = eqn.params["_prim"]
    return jax.make_jaxpr(lambda *args: jax.tree.leaves(primitive.expand(*args)))(
        *(v.aval for v in eqn.invars)
    )


def without_bits(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr of exp(-x^2) for JAX's function that splits x into two by its bits; None for other equations.

    In jax 0.12 it is the derivative of erf, and so of an exact GELU. The plain form is wrong by x^2 rounding errors.
    """
    body = eqn.params.get("call_jaxpr")
    if body is None or function_name(body.jaxpr) != "exp_neg_sq":
        return None
    if all(inner.primitive.name != "bitcast_convert_type" for inner in body.jaxpr.eqns):
        return None  # a function of the user's
    return jax.make_jaxpr(lambda x: jax.numpy.exp(-x * x))(eqn.invars[0].aval)


def has_own_shardings(eqn: JaxprEqn) -> bool:
    """Returns True for a `jit` with shardings of its arguments or results."""
    placed = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(sharding is not _unspecified for sharding in placed)


def named_axis(effect: Any) -> Any | None:
    """Returns the axis of the effect of a collective, or None for other effects."""
    return (
        effect.name
        if _named_axis_effect is not None and isinstance(effect, _named_axis_effect)
        else None
    )


def argument_names(jaxpr: Jaxpr) -> list[str]:
    """Returns what the traced function calls its arguments, or an empty list if that is not known."""
    return list(getattr(jaxpr.debug_info, "arg_names", None) or ())


def function_name(jaxpr: Jaxpr) -> str:
    """Returns the name of the traced function, or ""."""
    return str(getattr(jaxpr.debug_info, "func_name", "") or "")


# Where equations come from -------------------------------------------------------------------------------------------

_RECOMPUTED = "rematted_computation"  # the scope of what `jax.checkpoint` computes again


def source_line(eqn: Any) -> str:
    """The line of the user's code that an equation comes from, or its source info, as "/path/file.py:3:4 (function)"."""
    return source_info_util.summarize(getattr(eqn, "source_info", eqn))


def current_lines(most: int) -> list[str]:
    """Returns the lines of the user's code that led to what JAX works on, the innermost first."""
    return source_info_util.summarize(source_info_util.current(), most).splitlines()[::-1]


def hide_lines_of(folder: str) -> None:
    """Leaves the files of a folder out of the lines that `source_line` returns."""
    source_info_util.register_exclusion(folder)


def scopes(eqn: JaxprEqn) -> list[str]:
    """Returns the scopes of an equation, the outermost first, without the scope of recomputation."""
    return [scope for scope in str(eqn.source_info.name_stack).split("/") if scope != _RECOMPUTED]


def is_recomputed(eqn: JaxprEqn) -> bool:
    """Returns True for an equation that `jax.checkpoint` computes again in the reverse pass."""
    return _RECOMPUTED in str(eqn.source_info.name_stack)


def without_outer_scope(eqn: JaxprEqn) -> JaxprEqn:
    """Returns an equation without the outermost scope or transformation of its name stack."""
    return eqn.replace(
        source_info=eqn.source_info.replace(name_stack=eqn.source_info.name_stack[1:])
    )


def within(outer: SourceInfo, eqn: JaxprEqn) -> SourceInfo:
    """Returns the source information of an equation inside of a call at `outer`."""
    return eqn.source_info.replace(name_stack=outer.name_stack + eqn.source_info.name_stack)


def in_scope(eqn: JaxprEqn) -> ExitStack:
    """Enters an equation's context: its source lines, its `jax.named_scope`, and its options."""
    stack = ExitStack()
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    stack.enter_context(source_info_util.user_context(eqn.source_info.traceback, name_stack=names))
    stack.enter_context(in_context(eqn))
    return stack


# Random keys ---------------------------------------------------------------------------------------------------------

THREEFRY = random.threefry_prng_impl  # JAX's default generator
