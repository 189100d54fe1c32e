"""How well JAX's and the net's gradient agree at the blobs inside a net, for its drawing."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.autodiff import add_gradients
from jrnn.gradcheck.compare import net_error
from jrnn.gradcheck.subject import Subject, free_name
from jrnn.gradient_maker import GradientSlice
from jrnn.graph.scope import all_names
from jrnn.ir import Op
from jrnn.lowering import infer_shapes, to_jax
from jrnn.registry import ACCUMULATE


def inner_errors(s: Subject) -> dict[str, float]:
    """The net error of every blob that an operator of the net writes and a gradient reaches, for one row of gradients.

    JAX's gradient of a blob is that of a zero which is added to it. Of a blob that is overwritten, both gradients are those
    of its first value.
    """
    taken = set(all_names(s.net))
    known = infer_shapes(s.net, s.blobs, key=s.key, wide=True)
    first: dict[str, int] = {}
    for k, op in enumerate(s.net.ops):
        for name in op.outputs:
            if name not in s.blobs and getattr(known.get(name), "dtype", None) == np.float64:
                first.setdefault(name, k)
    shifts = {name: free_name(f"{name}_shift", taken) for name in first}
    ops: list[Op] = []
    for k, op in enumerate(s.net.ops):
        ops += [op, *(Op.of(ACCUMULATE, [n, shifts[n]], [n]) for n in op.outputs if first.get(n) == k)]
    shapes = _first_shapes(s, first)
    shifted = to_jax(replace(s.net, ops=tuple(ops)), s.seeds, wide=True)

    def loss(zeros):
        outputs = shifted({**s.blobs, **zeros}, key=s.key)
        return sum(jnp.sum(outputs[y] * seeds[0]) for y, seeds in s.seeds.items())

    by_jax = jax.jit(jax.grad(loss))({shifts[n]: jnp.zeros(shapes[n]) for n in first})
    arriving = {y: free_name(f"{y}_arriving", taken) for y in s.seeds}
    full, found = add_gradients(s.net, arriving)
    dense = {n: found[n] for n in first if n in found and not isinstance(found[n], GradientSlice)}
    fn = to_jax(full, dict.fromkeys(g for g in dense.values() if g not in arriving.values()), wide=True)
    given = {**s.blobs, **{arriving[y]: seeds[0] for y, seeds in s.seeds.items()}}
    by_net = given | jax.jit(lambda floats: fn({**given, **floats}, key=s.key))(
        {n: v for n, v in given.items() if getattr(v, "dtype", None) == np.float64}
    )
    return {n: net_error(by_jax[shifts[n]], by_net[g]) for n, g in dense.items()}


def _first_shapes(s: Subject, first: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of blobs when they are first written."""
    names = {n: f"{n} when first written" for n in first}
    ops: list[Op] = []
    for k, op in enumerate(s.net.ops):
        ops += [op, *(Op.of(ACCUMULATE, [n], [names[n]]) for n in op.outputs if first.get(n) == k)]
    got = infer_shapes(replace(s.net, ops=tuple(ops), external_outputs=()), s.blobs, key=s.key, wide=True)
    return {n: got[name].shape for n, name in names.items()}
