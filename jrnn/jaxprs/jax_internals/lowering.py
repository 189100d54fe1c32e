"""What jrnn knows of how JAX lowers and differentiates: its rules for loops, and the programs that they emit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import jaxlib.version
from jax.extend.core import Primitive
from jax.extend.core.primitives import cond_p, scan_p, while_p
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jrnn.jaxprs.jax_internals.tracing import (
    JAX,
    LEFT_TO_JAX,
    context_without,
    missing,
    private_name,
)

# Versions ------------------------------------------------------------------------------------------------------------

_JAXLIB = jaxlib.version.__version_info__
XLA_MAKES_ONE_KERNEL = _JAXLIB >= (0, 12)  # XLA:CPU makes one kernel of any loop without calls
XLA_KEEPS_BARRIERS = _JAXLIB >= (0, 11)  # earlier XLA:CPU drops them before it fuses
LINEARIZATION_PARTS = 4 + (JAX >= (0, 11, 1))  # the results of a rule for linearization
_CHECK_CONTEXTS = int(JAX >= (0, 11))  # arguments of a rule of `checkify` before the error
_FIXES_ZEROS = JAX < (0, 11)  # `jrnn.jaxprs.jax_fixes.with_zeros_of_a_step`
_FIXES_RESIDUALS = JAX < (0, 12)  # `jrnn.jaxprs.jax_fixes.with_inputs_as_residuals`
_FIXES_CONTEXTS = JAX >= (0, 11)  # `jrnn.jaxprs.jax_fixes.in_context_of_loop`


_lowerings = private_name("interpreters.mlir", "_lowerings", LEFT_TO_JAX)
_jvps = private_name("interpreters.ad", "primitive_jvps", LEFT_TO_JAX)
_linearizations = private_name("interpreters.ad", "primitive_linearizations", LEFT_TO_JAX)
_write_metadata = private_name(
    "interpreters.mlir", "wrap_xla_metadata_in_place", "lowered programs name the tags of loops"
)
_check_rules = private_name(
    "checkify", "error_checks", "checkify reports checks of examples that have stopped"
)
_transposes = _partial_evals = _partial_eval = _checkpointed = None
if _FIXES_ZEROS:
    _transposes = private_name(
        "interpreters.ad", "fancy_transposes", "gradients of unused outputs raise"
    )
if _FIXES_RESIDUALS:
    _stores_inputs = "a loop around jax.lax.cond stores the inputs of its branches at each step"
    _partial_evals = private_name(
        "interpreters.partial_eval", "custom_partial_eval_rules", _stores_inputs
    )
    _partial_eval = private_name(
        "interpreters.partial_eval", "partial_eval_jaxpr_nounits", _stores_inputs
    )
if _FIXES_CONTEXTS:
    _left_forward = "the forward loop of a jax.checkpoint around a loop is left to JAX"
    _checkpointed = private_name(
        "interpreters.partial_eval", "partial_eval_jaxpr_custom_rules", _left_forward
    )


RuleOfJax = Callable[..., Any]  # which depends on what it is a rule for
Wrapper = Callable[..., RuleOfJax]
Context = mlir.LoweringRuleContext


class LoopRules(NamedTuple):
    """JAX's own rules for loops."""

    lower_scan: RuleOfJax
    lower_while: RuleOfJax
    jvp: RuleOfJax
    linearize: RuleOfJax


def loop_rules() -> LoopRules | None:
    """Returns JAX's rules for loops, or None if this version of JAX has not all that jrnn wraps: `missing` says what."""
    if LEFT_TO_JAX in missing.values():
        return None
    try:
        lower_scan, lower_while = (_lowerings[loop].rule for loop in (scan_p, while_p))
        return LoopRules(lower_scan, lower_while, _jvps[scan_p], _linearizations[scan_p])
    except (KeyError, AttributeError, TypeError) as error:
        missing[f"a rule for {error}"] = LEFT_TO_JAX
        return None


def replace_rules(rules: LoopRules, platforms: Mapping[str, RuleOfJax]) -> None:
    """Replaces JAX's rules for scans and while loops.

    Args:
        rules: the new rules; `lower_scan` is not read.
        platforms: the rule that lowers a scan for each platform.
    """
    for platform, lower in platforms.items():
        try:
            mlir.register_lowering(scan_p, lower, platform=platform)
            mlir.register_lowering(while_p, rules.lower_while, platform=platform)
        except NotImplementedError:  # a platform that this installation has not
            continue
    _jvps[scan_p], _linearizations[scan_p] = rules.jvp, rules.linearize


def fix_rules(
    with_zeros_of_a_step: Wrapper,
    with_inputs_as_residuals: Wrapper,
    in_context_of_loop: Wrapper,
) -> None:
    """Wraps those rules of JAX that have faults in this version."""
    if _transposes is not None:
        _transposes[scan_p] = with_zeros_of_a_step(_transposes[scan_p])
    if _partial_evals is not None and _partial_eval is not None:
        _partial_evals[cond_p] = with_inputs_as_residuals(_partial_evals[cond_p], _partial_eval)
    if _checkpointed is not None:
        _checkpointed[scan_p] = in_context_of_loop(_checkpointed[scan_p])


def set_check_rule(primitive: Primitive, evaluate: RuleOfJax) -> None:
    """Sets the function of its operands by which `jax.experimental.checkify` evaluates a primitive."""
    if _check_rules is None:
        return

    def rule(*args: Any) -> tuple[Any, Any]:
        error, _, *operands = args[_CHECK_CONTEXTS:]
        return error, evaluate(*operands)

    _check_rules[primitive] = rule


def omit_metadata_when_lowering(key: str) -> None:
    """Leaves one entry of the XLA metadata out of all programs that are lowered: JAX would write it at each operation."""
    write = _write_metadata
    if write is None:
        return

    def without(ctx: Context, op: ir.Operation) -> None:
        eqn_ctx = getattr(ctx, "jaxpr_eqn_ctx", None)
        entries = set(getattr(eqn_ctx, "xla_metadata", None) or ())
        if key in entries and len(entries) > 1:
            write(ctx.replace(jaxpr_eqn_ctx=context_without(eqn_ctx, key)), op)
        elif key not in entries:
            write(ctx, op)

    import_module(write.__module__).wrap_xla_metadata_in_place = without  # type: ignore[attr-defined]


def lowered_metadata(ctx: Context) -> Any:
    """Returns the XLA metadata of the equation that is lowered in the context of a lowering rule, a mapping or None."""
    return ctx.jaxpr_eqn_ctx.xla_metadata if ctx.jaxpr_eqn_ctx else None


def lower_or_undo(lower: RuleOfJax, ctx: Context, *args: Any) -> Any:
    """Returns what a lowering rule returns. If it raises, erases what it has emitted, so that another rule can follow.

    An exception leaves a loop or a function without its end, and such a program is not valid. Functions that are complete
    may stay: JAX's caches have them.

    Args:
        lower: the rule, `(ctx, *args) -> the results`.
        ctx: the context of a lowering rule.
        args: the operands.
    """
    point = ir.InsertionPoint.current
    operations = point.block.operations
    functions = ctx.module_context.module.body.operations
    count = len(operations)
    function_count = len(functions)
    try:
        return lower(ctx, *args)
    except Exception:
        emitted = [operation.operation for operation in operations]
        following = point.ref_operation
        end = len(emitted) if following is None else emitted.index(following)
        for operation in reversed(emitted[end - (len(emitted) - count) : end]):
            operation.erase()
        for function in reversed(list(functions)[function_count:]):
            if not _is_complete(function):
                ctx.module_context.symbol_table.erase(function)
        raise


def _is_complete(function: ir.OpView) -> bool:
    """Returns whether the blocks of a function have their last operation, which returns."""
    blocks = [block for region in function.operation.regions for block in region.blocks]
    ends = [list(block.operations)[-1:] for block in blocks]
    return all(end and end[0].operation.name.endswith("return") for end in ends)


# Programs ------------------------------------------------------------------------------------------------------------


def platform_of(backend: Any) -> str:
    """Returns the platform that programs of a backend are lowered for, such as "cuda" where `backend.platform` is "gpu".

    Args:
        backend: `device.client` of a device.
    """
    return str(backend._raw_platform if backend.platform == "gpu" else backend.platform)


def lowered_for(ctx: Context) -> tuple[int, bool]:
    """Returns how many devices a lowered program is divided among, and whether it is exported.

    Args:
        ctx: the context of a lowering rule.
    """
    devices: Any = ctx.module_context.axis_context
    module = ctx.module_context
    inside_of_one = hasattr(devices, "mesh") or hasattr(
        devices, "axis_env"
    )  # the body of `jax.shard_map` or `pmap`
    return 1 if inside_of_one else devices.num_devices, module.lowering_parameters.for_export


def is_threefry_loop(length: int | None, types: Sequence[tuple[str, Sequence[int]]]) -> bool:
    """Returns True for the loop that JAX makes of the rounds of its default random generator, when it lowers a draw.

    It counts, and carries two blocks of words, three keys and two rows of four rotations.

    Args:
        length: of the loop, or None.
        types: the name of the data type and the shape of each array that it carries.
    """
    words = [tuple(shape) for name, shape in types if name == "uint32"]
    others = [shape for name, shape in types if name != "uint32"]
    counts = len(others) <= 1 and not any(others)
    return length == 5 and counts and len(words) >= 4 and words.count((4,)) >= 2
