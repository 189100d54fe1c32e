"""The plans of the loops of a function, and of a scan and its gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jrnn
from jrnn import jaxprs
from jrnn.jaxprs.tangents import is_smooth


def plans_of(fn, *args):
    return list(jrnn.explain(fn, *args).loops)


class ScanPlans(NamedTuple):
    """The plans of a scan without a gradient, and of the gradient with respect to everything."""

    forward: list[Any]
    training: list[Any]

    @property
    def strategy(self):
        return self.forward[0].strategy if self.forward else "lax.scan"

    def __str__(self):
        return "\n".join(map(str, (*self.forward, *self.training)))


def scan_plans(f, init, xs=None, length=None, **options):
    """The plans of `jrnn.scan` with these arguments, and of its gradient, if anything has one."""

    def run(init, xs):
        return jrnn.scan(f, init, xs, length, **options)

    def train(init, xs):
        flat, values = jaxprs.without_closure(run, init, xs)
        out, pull = jax.vjp(
            lambda values, args: jax.tree.leaves(flat(values, *args)), values, (init, xs)
        )
        return out, pull(
            [
                jnp.ones_like(o) if is_smooth(o) else jnp.zeros(o.shape, jax.dtypes.float0)
                for o in out
            ]
        )

    forward, outs = plans_of(run, init, xs), jax.tree.leaves(jax.eval_shape(run, init, xs))
    differentiable = any(map(is_smooth, jax.tree.leaves((init, xs)))) and any(map(is_smooth, outs))
    return ScanPlans(forward, plans_of(train, init, xs) if differentiable else [])
