"""Installation: puts the rules for tagged loops in the place of JAX's own, which they call for loops without a tag."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from contextlib import suppress

import jax
from jax.extend.core.primitives import cond_p, scan_p, while_p
from jax.interpreters import mlir

with suppress(ImportError):  # `install` reports missing names
    from jax._src.interpreters import ad, partial_eval
    from jax._src.interpreters import mlir as private_mlir
    from jax._src.xla_metadata_lib import current_xla_metadata

from jrnn.loops.rules import differentiation, lowering, programs, replacement
from jrnn.loops.strategies import platforms


def install() -> None:
    try:
        default, of_while = (private_mlir._lowerings[loop].rule for loop in (scan_p, while_p))
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
    for platform in platforms.BY_PLATFORM:
        with suppress(NotImplementedError):  # a platform that this installation has not
            mlir.register_lowering(scan_p, functools.partial(lowering.lower, platform, default), platform=platform)
            mlir.register_lowering(while_p, lowering.repeating(of_while), platform=platform)
    for table, rule, replacing in zip(tables, rules, (replacement.jvp, replacement.linearize)):
        rule = differentiation.storing_less(rule, current_xla_metadata)
        for program in (programs.in_chunks, programs.with_inputs):  # the last one first
            rule = replacing(rule, current_xla_metadata, program)
        table[scan_p] = rule
    if jax.__version_info__ < (0, 11):
        ad.fancy_transposes[scan_p] = differentiation.with_zeros_of_a_step(transpose, ad.Zero)
    if jax.__version_info__ < (0, 12):
        table, parts = partial_eval.custom_partial_eval_rules, partial_eval.partial_eval_jaxpr_nounits
        table[cond_p] = differentiation.with_inputs_as_residuals(table[cond_p], parts)
