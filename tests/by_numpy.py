"""`jax.jit` in tests of what is traced: numpy evaluates it (`jrnn.jaxprs.by_numpy`), and nothing is compiled."""

from __future__ import annotations

import jax

from jrnn.jaxprs.by_numpy import evaluate_by_numpy
from jrnn.jaxprs.jax_internals import is_traced


def by_numpy(fn):
    """Returns `fn` as `jax.jit` does, but evaluated by numpy. A primitive that is not in the table is run by JAX."""

    def run(*args):
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        outs = evaluate_by_numpy(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return run


# In the place of jax.jit -----------------------------------------------------------------------------------------------

COMPILED = jax.jit


def suffices(exhaustive):
    """Whether numpy computes in the place of compiled programs: not in an exhaustive run, and not for an accelerator."""
    return not exhaustive and jax.default_backend() == "cpu"


class Traced:
    """What `jit(fn)` returns: as that of `jax.jit`, but a call is evaluated by numpy, unless it is part of another trace."""

    def __init__(self, fn, options):
        self.compiled = COMPILED(fn, **options)

    def __call__(self, *args, **keywords):
        leaves = jax.tree.leaves((args, keywords))
        if any(map(is_traced, leaves)):
            return self.compiled(*args, **keywords)
        traced = self.compiled.trace(*args, **keywords)
        if traced.jaxpr.effects or any(map(is_traced, traced.jaxpr.consts)):
            return self.compiled(*args, **keywords)
        with jax.ensure_compile_time_eval():
            outs = evaluate_by_numpy(traced.jaxpr.jaxpr, traced.jaxpr.consts, leaves)
            return jax.tree.unflatten(
                jax.tree.structure(traced.out_info), map(jax.device_put, outs)
            )

    def __getattr__(self, name):
        return getattr(self.compiled, name)


def jit(fn=None, **options):
    """`jax.jit` for tests of what is traced, where the compiler is not under test."""
    if fn is None:
        return lambda fn: jit(fn, **options)
    return (
        COMPILED(fn, **options)
        if any("static" in name for name in options)
        else Traced(fn, options)
    )
