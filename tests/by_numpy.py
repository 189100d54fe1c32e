"""Reference values without a compiler: a function is traced as JAX traces it, and numpy evaluates what was traced.

XLA takes about a second to compile the gradient of a small loop. A reference runs once, on a few numbers.
"""

from __future__ import annotations

import jax
import numpy as np

from jrnn.loops.jax_names import is_traced
from jrnn.loops.jaxprs import bind, scan_counts


def by_numpy(fn):
    """Returns `fn` as `jax.jit` does, but evaluated by numpy. A primitive that is not in the table is run by JAX."""

    def run(*args):
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        outs = evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return run


def evaluate(jaxpr, consts, args):
    values = {}

    def read(atom):
        return np.asarray(atom.val, atom.aval.dtype) if hasattr(atom, "val") else values[atom]

    def write(var, value):
        dtype = var.aval.dtype
        if dtype == jax.dtypes.float0:
            value = np.zeros(var.aval.shape, dtype)
        elif not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            value = np.asarray(value, dtype)
        values[var] = value

    for var, value in [*zip(jaxpr.constvars, consts, strict=True), *zip(jaxpr.invars, args, strict=True)]:
        write(var, value)
    for eqn in jaxpr.eqns:
        given, name = [read(atom) for atom in eqn.invars], eqn.primitive.name
        with np.errstate(all="ignore"):
            if name in LOOPS:
                outs = LOOPS[name](given, **eqn.params)
            elif name in MATHS and all(v.dtype.kind in MATHS[name][0] for v in given):
                outs = [MATHS[name][1](*given)]
            elif name in MOVES and (out := MOVES[name](*given, **eqn.params)) is not None:
                outs = out if eqn.primitive.multiple_results else [out]
            else:
                outs = bind(eqn, *given)
        for var, value in zip(eqn.outvars, outs, strict=True):
            write(var, value)
    return [read(atom) for atom in jaxpr.outvars]


# Functions of elements, and the kinds of the types for which numpy and XLA define them alike; V is bfloat16.

ANY, REAL, FLOAT = "biufcV", "iufcV", "fcV"
MATHS = {
    **dict.fromkeys(("add", "add_any"), (REAL, np.add)),
    "sub": (REAL, np.subtract),
    "mul": (REAL, np.multiply),
    "div": (FLOAT, np.divide),
    "neg": (REAL, np.negative),
    "abs": (REAL, np.abs),
    "square": (REAL, np.square),
    "sqrt": (FLOAT, np.sqrt),
    "one_minus_square": (FLOAT, lambda x: 1 - x * x),
    "rsqrt": (FLOAT, lambda x: 1 / np.sqrt(x)),
    "max": ("iufV", np.maximum),
    "min": ("iufV", np.minimum),
    "clamp": ("iufV", lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    **{name: (FLOAT, getattr(np, name)) for name in ("sin", "cos", "tanh", "exp", "log", "log1p", "expm1")},
    "logistic": (FLOAT, lambda x: 1 / (1 + np.exp(-x))),
    "floor": ("fV", np.floor),
    "ceil": ("fV", np.ceil),
    "sign": ("if", np.sign),
    "rem": ("f", np.fmod),
    "atan2": ("f", np.arctan2),
    "is_finite": ("fV", np.isfinite),
    "real": ("c", np.real),
    "imag": ("c", np.imag),
    "complex": ("f", lambda x, y: x + 1j * y),
    "not": ("b", np.logical_not),
    "and": ("b", np.logical_and),
    "or": ("b", np.logical_or),
    **{
        ours: (ANY, getattr(np, theirs))
        for ours, theirs in dict(
            eq="equal", ne="not_equal", lt="less", le="less_equal", gt="greater", ge="greater_equal"
        ).items()
    },
}


# Operations with parameters. None: not this case.


def broadcast_in_dim(x, *, shape, broadcast_dimensions, **_):
    inner = [1] * len(shape)
    for size, axis in zip(x.shape, broadcast_dimensions, strict=True):
        inner[axis] = size
    return np.broadcast_to(x.reshape(inner), shape)


def dot_general(a, b, *, dimension_numbers, preferred_element_type, **_):
    (ours, theirs), (batch, other) = dimension_numbers
    names = iter(range(100))
    left, right = [next(names) for _ in a.shape], [next(names) for _ in b.shape]
    for i, j in [*zip(ours, theirs), *zip(batch, other)]:
        right[j] = left[i]
    out = [left[i] for i in batch]
    out += [left[i] for i in range(a.ndim) if i not in (*ours, *batch)]
    out += [right[j] for j in range(b.ndim) if j not in (*theirs, *other)]
    wanted = preferred_element_type or np.result_type(a, b)  # sums of int8 are made in int32
    wide = np.dtype(np.float32) if np.dtype(wanted).kind == "V" else wanted
    return np.einsum(a.astype(wide), left, b.astype(wide), right, out)


def convert_element_type(x, *, new_dtype, **_):
    """XLA has rules of its own for numbers that do not fit, and for the imaginary part."""
    to = np.dtype(new_dtype).kind
    return x.astype(new_dtype) if to == "c" or (to in FLOAT and x.dtype.kind != "c") or x.dtype.kind == "b" else None


def pad(x, value, *, padding_config):
    if any(low < 0 or high < 0 for low, high, _ in padding_config):
        return None
    shape = [low + high + max(0, n + (n - 1) * inside) for n, (low, high, inside) in zip(x.shape, padding_config)]
    out = np.full(shape, value, x.dtype)
    inner = (slice(low, low + n + max(0, n - 1) * k, k + 1) for n, (low, _, k) in zip(x.shape, padding_config))
    out[tuple(inner)] = x
    return out


def window(shape, sizes, starts):
    starts = [min(max(int(at), 0), n - size) for at, n, size in zip(starts, shape, sizes)]
    return tuple(slice(at, at + size) for at, size in zip(starts, sizes))


def dynamic_update_slice(x, new, *starts, **_):
    out = np.array(x)
    out[window(x.shape, new.shape, starts)] = new
    return out


def wide(reduce):
    """Sums of 16-bit numbers are made in 32 bits."""

    def of(x, *, axes, **_):
        return reduce(x.astype(np.float32) if x.dtype.kind == "V" else x, axis=tuple(axes)) if x.size else None

    return of


MOVES = {
    "broadcast_in_dim": broadcast_in_dim,
    "dot_general": dot_general,
    "pad": pad,
    "dynamic_update_slice": dynamic_update_slice,
    "dynamic_slice": lambda x, *starts, slice_sizes: x[window(x.shape, slice_sizes, starts)],
    "slice": lambda x, *, start_indices, limit_indices, strides: x[
        tuple(map(slice, start_indices, limit_indices, strides or [1] * x.ndim))
    ],
    "reshape": lambda x, *, new_sizes, dimensions, **_: x.reshape(new_sizes) if dimensions is None else None,
    "squeeze": lambda x, *, dimensions: x.reshape([n for i, n in enumerate(x.shape) if i not in dimensions]),
    "transpose": lambda x, *, permutation: x.transpose(permutation),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "split": lambda x, *, sizes, axis: np.split(x, np.cumsum(sizes)[:-1], axis),
    "select_n": lambda which, *cases: np.where(which, *cases[::-1]) if which.dtype == bool else None,
    "convert_element_type": convert_element_type,
    "integer_pow": lambda x, *, y: x**y if x.dtype.kind in FLOAT else None,
    "iota": lambda *, dtype, shape, dimension, **_: np.broadcast_to(
        np.arange(shape[dimension]).reshape([-1 if i == dimension else 1 for i in range(len(shape))]), shape
    ),
    "reduce_sum": wide(np.sum),
    "reduce_max": wide(np.max),
    "reduce_or": lambda x, *, axes, **_: x.any(tuple(axes)) if x.dtype == bool else None,
    "reduce_and": lambda x, *, axes, **_: x.all(tuple(axes)) if x.dtype == bool else None,
    "stop_gradient": lambda x: x,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "name": lambda x, **_: x,
}


# Jaxprs within --------------------------------------------------------------------------------------------------------


def call(given, *, jaxpr=None, call_jaxpr=None, **_):
    jaxpr = jaxpr if call_jaxpr is None else call_jaxpr
    return evaluate(jaxpr.jaxpr, jaxpr.consts, given) if hasattr(jaxpr, "consts") else evaluate(jaxpr, (), given)


def scan(given, *, jaxpr, length, reverse, **params):
    num_consts, num_carry = scan_counts(params)
    consts, carry, xs = given[:num_consts], given[num_consts : num_consts + num_carry], given[num_consts + num_carry :]
    avals = jaxpr.out_avals[num_carry:]
    ys = [np.zeros((length, *aval.shape), aval.dtype) for aval in avals]
    for t in range(length)[::-1] if reverse else range(length):
        out = evaluate(jaxpr.jaxpr, jaxpr.consts, [*consts, *carry, *(x[t] for x in xs)])
        carry = out[:num_carry]
        for y, value in zip(ys, out[num_carry:], strict=True):
            y[t] = value
    return [*carry, *ys]


def while_(given, *, cond_jaxpr, cond_nconsts, body_jaxpr, body_nconsts, **_):
    asked, used = given[:cond_nconsts], given[cond_nconsts : cond_nconsts + body_nconsts]
    carry = given[cond_nconsts + body_nconsts :]
    while evaluate(cond_jaxpr.jaxpr, cond_jaxpr.consts, [*asked, *carry])[0]:
        carry = evaluate(body_jaxpr.jaxpr, body_jaxpr.consts, [*used, *carry])
    return carry


def cond(given, *, branches, **_):
    chosen = branches[min(max(int(given[0]), 0), len(branches) - 1)]
    return evaluate(chosen.jaxpr, chosen.consts, given[1:])


LOOPS = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"), call),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"), call),
    "scan": scan,
    "while": while_,
    "cond": cond,
}


# In the place of jax.jit -----------------------------------------------------------------------------------------------

COMPILED = jax.jit


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
            outs = evaluate(traced.jaxpr.jaxpr, traced.jaxpr.consts, leaves)
            return jax.tree.unflatten(jax.tree.structure(traced.out_info), map(jax.device_put, outs))

    def __getattr__(self, name):
        return getattr(self.compiled, name)


def jit(fn=None, **options):
    """`jax.jit` for tests of what is traced, where the compiler is not under test."""
    if fn is None:
        return lambda fn: jit(fn, **options)
    return COMPILED(fn, **options) if any("static" in name for name in options) else Traced(fn, options)
