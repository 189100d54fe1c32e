"""The rules that JAX calls when it differentiates or lowers a marked loop.

`jrnn.scan` is `jax.lax.scan` with a mark (`mark.py`). When JAX differentiates a marked loop, its step is first replaced by
one that stores less (`residuals.py`). When JAX lowers a marked loop, forward or reverse, it is planned for the platform
(`targets/`) and the plan is lowered. A loop that cannot be planned falls back to JAX's own rule.

To lower an equation, `_lower` calls `_planned`, which reads the equation as a `Loop` (`loop.py`) and gets its `LoopPlan`
(`plan.py`) from `targets.plan`. `LoopPlan.run` is traced in place of the loop. A plan without a `fission` leaves the loop to
JAX. `jaxprs.opened` inlines the calls in a jaxpr.

This is the only file that uses private names of JAX. `tests/loops/test_inside_jax.py` and `test_marked_loops.py` check
them. If one is missing, `jrnn.scan` warns once and is `jax.lax.scan`.
"""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core.primitives import scan_p
from jax.interpreters import mlir

with suppress(ImportError):  # `_install` reports missing names
    from jax._src import config as private_config
    from jax._src import traceback_util
    from jax._src.interpreters import ad
    from jax._src.interpreters import mlir as private_mlir
    from jax._src.xla_metadata_lib import current_xla_metadata

from jrnn.errors import ScanError
from jrnn.loops import jaxprs, mark, residuals, targets
from jrnn.loops.loop import Loop, strict_passes
from jrnn.loops.mark import Options
from jrnn.loops.plan import LoopPlan, Target

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

# The list that collects the plans of lowered loops, or None.
_recorder = jax.make_user_context(None)


@contextmanager
def recorded() -> Iterator[list[LoopPlan]]:
    """Collects the plans of the loops that are lowered in this context."""
    plans = _Plans()
    with _recorder(plans):
        yield plans


class _Plans(list):
    """A list that is hashed and compared by identity, because JAX uses it in keys of its caches."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


# Tracing --------------------------------------------------------------------------------------------------------------


def api_boundary(fn: Callable) -> Callable:
    """The function with tracebacks that show the user's frames only, as those of `jax.lax.scan` do."""
    try:
        exclude, boundary = traceback_util.register_exclusion, traceback_util.api_boundary
    except (NameError, AttributeError):  # a version of JAX without these names: tracebacks are longer
        return fn
    exclude(os.path.dirname(__file__))
    return boundary(fn)


class _UnmarkedStep:
    """A step that is traced with the XLA metadata from before its loop was marked. It holds the step by a weak reference."""

    def __init__(self, step: Callable, metadata: Any):
        self._step = weakref.ref(step)
        self._metadata = metadata

    @property
    def __wrapped__(self) -> Callable:
        step = self._step()
        assert step is not None, "the caller holds the step"
        return step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)  # JAX's messages show the name of the step

    def __call__(self, carry: Any, x: Any) -> Any:
        state = private_config.xla_metadata_context_manager
        marked = state.swap_local(self._metadata)
        try:
            return self.__wrapped__(carry, x)
        finally:
            state.set_local(marked)


_unmarked_steps: weakref.WeakKeyDictionary[Callable, dict[Any, _UnmarkedStep]] = weakref.WeakKeyDictionary()


def unmarked_step(step: Callable) -> Callable:
    """Returns a function that traces `step` without the mark, for a loop that is about to be marked.

    JAX caches traces by function and by context, which includes the mark. Without it, a jitted function is traced once for
    calls inside and outside of a step. The result is cached by step, and the caller must keep the step alive.
    """
    try:
        metadata = private_config.xla_metadata_context_manager.get_local()
    except (NameError, AttributeError):  # a version of JAX without this name: functions may be traced twice
        return step
    try:
        made = _unmarked_steps.setdefault(step, {})
    except TypeError:  # not hashable: `jax.lax.scan` raises
        return step
    return made.setdefault(metadata, _UnmarkedStep(step, metadata))


# Reading the equation -------------------------------------------------------------------------------------------------


def _parts(params: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the first arguments of `_read` and `_planned` from the parameters of a scan's equation."""
    return params["jaxpr"], *jaxprs.scan_counts(params), params["length"], params["reverse"], params["unroll"]


def _read(jaxpr: Any, n_consts: int, n_carry: int, length: Any, reverse: bool, unroll: int) -> tuple[Loop, tuple]:
    """Returns the loop of a scan's equation, and values for the first of `Loop.consts`: the constants in the jaxpr."""
    program = jaxprs.opened(jaxpr, jaxprs.LOWERED_CALLS)
    inputs, end = program.invars, n_consts + n_carry
    consts = (*program.constvars, *inputs[:n_consts])
    outs = program.outvars[:n_carry], program.outvars[n_carry:]
    loop = Loop(program.eqns, consts, inputs[n_consts:end], inputs[end:], *outs, length, reverse, unroll)
    return loop, program.consts


# Lowering -------------------------------------------------------------------------------------------------------------


def _lower(platform: str, default: Callable, ctx: Any, *args: Any, **params: Any) -> Any:
    """The lowering rule of scans on one platform."""
    options = mark.options_in(ctx.jaxpr_eqn_ctx.xla_metadata if ctx.jaxpr_eqn_ctx else None)
    if options is None:
        return default(ctx, *args, **params)
    n_consts, n_carry = jaxprs.scan_counts(params)
    first_x = n_consts + n_carry
    plan, values = _planned(*_parts(params), _target(platform, ctx), options)
    while plan.fission is not None:

        def run(*args: Any, plan: LoopPlan = plan) -> list[Any]:
            carry, ys = plan.run([*values, *args[:n_consts]], args[n_consts:first_x], args[first_x:])
            return [*carry, *ys]

        try:
            with mark.unmarked():
                lowered = mlir.lower_fun(run, multiple_results=True)(ctx, *args)
            _record(plan)
            return lowered
        except Exception as error:
            failed, otherwise = _left_by(error, plan.target, plan.loop), plan.otherwise
            plan = failed if otherwise is None else replace(otherwise, notes=(*otherwise.notes, *failed.notes))
    _record(plan)
    if options.strict:
        raise ScanError(f"scan: strict=True, but the loop is left as jax.lax.scan lowers it: {plan.notes[0]}")
    return default(ctx, *args, **params)


@functools.lru_cache(maxsize=256)
def _planned(
    jaxpr: Any, n_consts: int, n_carry: int, length: Any, reverse: bool, unroll: int, target: Target, options: Options
) -> tuple[LoopPlan, tuple[Any, ...]]:
    """Returns the plan of an equation, and the values of its jaxpr's constants."""
    loop = None
    if not all(type(v.aval).__name__ == "ShapedArray" for v in jaxprs.jaxpr_of(jaxpr).invars):
        return LoopPlan.left(target, None, "it reads or writes Refs, or values of types that are not arrays"), ()
    try:
        loop, values = _read(jaxpr, n_consts, n_carry, length, reverse, unroll)
        has_checkpoint = any(e.primitive.name in ("checkpoint", "remat2") for e in jaxprs.jaxpr_of(jaxpr).eqns)
        loop = replace(loop, recomputes=has_checkpoint and options.recompute is not None)
        return targets.plan(loop, target, options), values
    except Exception as error:
        return _left_by(error, target, loop), ()


def _left_by(error: Exception, target: Target, loop: Loop | None) -> LoopPlan:
    """Returns a plan that leaves the loop to JAX, with the error as the reason. Raises the error in tests."""
    if strict_passes.value or isinstance(error, ScanError):
        raise error
    return LoopPlan.left(target, loop, f"{type(error).__name__} in a pass (please report it): {error}")


def _record(plan: LoopPlan) -> None:
    if _recorder.value is not None:
        _recorder.value.append(plan)


def _target(platform: str, ctx: Any) -> Target:
    devices = getattr(ctx.module_context.axis_context, "num_devices", None) or 1
    backend = ctx.module_context.backend  # in `jax.export` another platform's, or None
    known = backend is not None and backend.platform == platform
    kind = backend.devices()[0].device_kind if known else ""
    return Target(platform, devices, kind)


def steps_of(fn: Callable, *args: Any) -> list[Loop]:
    """Returns the loops of the scans that a function calls, in their order. Nothing is lowered."""
    eqns = jax.make_jaxpr(fn)(*args).jaxpr.eqns
    return [_read(*_parts(eqn.params))[0] for eqn in eqns if eqn.primitive is scan_p]


def plans_in(jaxpr: Any, target: Target) -> list[LoopPlan]:
    """Returns the plans of the marked loops in a jaxpr, without lowering it."""
    scans = [eqn for eqn in jaxprs.all_equations(jaxpr) if eqn.primitive is scan_p]
    marked = [(eqn, options) for eqn in scans if (options := mark.options_in(eqn.ctx.xla_metadata)) is not None]
    return [_planned(*_parts(eqn.params), target, options)[0] for eqn, options in marked]


# Differentiation ------------------------------------------------------------------------------------------------------


def _storing_less(rule: Callable, current_metadata: Callable) -> Callable:
    """Wraps JAX's rule for differentiating a scan: a marked scan gets a step that stores less."""

    @functools.wraps(rule)
    def differentiate(*args: Any, jaxpr: Any, **params: Any) -> Any:
        options = mark.options_in(current_metadata())
        if options is not None:
            jaxpr = _step_storing_less(jaxpr, *jaxprs.scan_counts(params), options.recompute)
        return rule(*args, jaxpr=jaxpr, **params)

    return differentiate


def _with_zeros_of_a_step(rule: Callable, zero: type) -> Callable:
    """Fixes JAX 0.10's rule for transposing a scan with outputs whose cotangent is a symbolic zero.

    The rule passes a zero with the type of all steps to the transposition of one step, which raises. Later versions do not.
    """

    @functools.wraps(rule)
    def transpose(cts: Sequence[Any], *args: Any, jaxpr: Any, **params: Any) -> Any:
        avals = [a.to_ct_aval() for a in jaxpr.out_avals]
        cts = [zero(a) if type(ct) is zero else ct for ct, a in zip(cts, avals)]
        return rule(cts, *args, jaxpr=jaxpr, **params)

    return transpose


def _checkpoint(fn: Callable) -> Callable:
    """`jax.checkpoint` without the option `jax_remat3`, whose equations cannot be transposed."""

    @functools.wraps(fn)
    def checkpointed(*args: Any) -> Any:
        option = getattr(private_config, "remat3", None)
        with nullcontext() if option is None else option(False):
            return jax.checkpoint(fn, prevent_cse=False)(*args)

    return checkpointed


@functools.lru_cache(maxsize=256)
def _step_storing_less(jaxpr: Any, n_consts: int, n_carry: int, recompute: Any) -> Any:
    avals = [v.aval for v in jaxprs.jaxpr_of(jaxpr).invars]
    try:
        step = residuals.storing_less(jaxpr, n_consts, n_carry, recompute, _checkpoint)
        if step is None:
            return jaxpr
        with mark.unmarked():
            made = jax.make_jaxpr(step)(*avals)
        same = [v.aval for v in made.jaxpr.invars] == avals and list(made.out_avals) == list(jaxpr.out_avals)
        return made if same else jaxpr
    except ScanError:
        raise
    except Exception:
        if strict_passes.value:
            raise
        return jaxpr


# Registration ---------------------------------------------------------------------------------------------------------


def _install() -> None:
    try:
        default = private_mlir._lowerings[scan_p].rule
        tables: Sequence[dict] = (ad.primitive_jvps, ad.primitive_linearizations)
        rules = [table[scan_p] for table in tables]
        transpose = ad.fancy_transposes[scan_p]
    except (NameError, AttributeError, KeyError) as error:
        warnings.warn(
            f"jrnn.scan is jax.lax.scan here: this version of JAX ({jax.__version__}) lacks a name that jrnn needs "
            f"({error}). Install a supported version: see pyproject.toml.",
            stacklevel=2,
        )
        return
    for platform in PLATFORMS:
        mlir.register_lowering(scan_p, functools.partial(_lower, platform, default), platform=platform)
    for table, rule in zip(tables, rules):
        table[scan_p] = _storing_less(rule, current_xla_metadata)
    if jax.__version_info__ < (0, 11):
        ad.fancy_transposes[scan_p] = _with_zeros_of_a_step(transpose, ad.Zero)


_install()
