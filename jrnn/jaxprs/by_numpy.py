"""Jaxprs evaluated by numpy, without a compiler: for checks of derived programs (`derived.py`), and for references of tests.

XLA takes about a second to compile the gradient of a small loop; numpy runs a few steps of it in milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jrnn.jaxprs import LOWERED_CALLS, Eqn, bind, primitives, scan_counts
from jrnn.jaxprs.indexing_by_numpy import INDEXED
from jrnn.jaxprs.primitives.table import FLOAT


class Endless(Exception):
    """Raised if a while loop does not end."""


def evaluate_by_numpy(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    wide: bool = False,
    trips: int | None = None,
) -> list[Any]:
    """Returns the outputs of a jaxpr. A primitive that is not in the tables is run by JAX.

    Args:
        jaxpr: the jaxpr.
        consts, args: the values of its constants and inputs.
        wide: compute in float64 and complex128, whatever types the jaxpr has.
        trips: the most steps of a while loop, or None; a loop that takes more raises Endless.
    """
    values: dict[Any, Any] = {}

    def typed(value: Any, dtype: Any) -> Any:
        return np.asarray(value, _widened(dtype) if wide else dtype)

    def read(atom: Any) -> Any:
        return typed(atom.val, atom.aval.dtype) if hasattr(atom, "val") else values[atom]

    def write(var: Any, value: Any) -> None:
        dtype = var.aval.dtype
        if dtype == jax.dtypes.float0:
            value = np.zeros(var.aval.shape, dtype)
        elif not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            value = typed(value, dtype)
        values[var] = value

    for var, value in [
        *zip(jaxpr.constvars, consts, strict=True),
        *zip(jaxpr.invars, args, strict=True),
    ]:
        write(var, value)
    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if wide and name == "bitcast_convert_type":  # of the bits that the jaxpr's type has
            operands = [operands[0].astype(eqn.invars[0].aval.dtype)]
        with np.errstate(all="ignore"):
            if wide and name in ("convert_element_type", "reduce_precision") and _are_wide(eqn):
                outs = operands
            elif name in LOOPS:
                outs = LOOPS[name](
                    partial(evaluate_by_numpy, wide=wide, trips=trips), operands, **eqn.params
                )
            elif (own := _of_elements(eqn, operands)) is not None:
                outs = [own(*operands)]
            elif name in MOVES and (out := MOVES[name](*operands, **eqn.params)) is not None:
                outs = out if eqn.primitive.multiple_results else [out]
            else:
                outs = _by_jax(eqn, operands, wide)
        for var, value in zip(eqn.outvars, outs, strict=True):
            write(var, value)
    return [read(atom) for atom in jaxpr.outvars]


def _of_elements(eqn: Eqn, operands: Sequence[Any]) -> Callable[..., Any] | None:
    """Returns numpy's function of elements for an equation, or None if there is none for the types of its operands."""
    row = primitives.row_of(eqn)
    if row.copies:
        return lambda x: x
    if row.numpy is None:
        return None
    kinds, function = (
        _parsed(eqn.primitive.name, row.numpy) if isinstance(row.numpy, str) else row.numpy
    )
    return function if all(v.dtype.kind in kinds for v in operands) else None


def _widened(dtype: Any) -> Any:
    if jax.dtypes.issubdtype(dtype, np.floating):
        return np.dtype(np.float64)
    return np.dtype(np.complex128) if jax.dtypes.issubdtype(dtype, np.complexfloating) else dtype


def _are_wide(eqn: Eqn) -> bool:
    kinds = [
        jax.dtypes.issubdtype(v.aval.dtype, np.floating) for v in (*eqn.invars[:1], *eqn.outvars)
    ]
    return all(kinds)


def _by_jax(eqn: Eqn, operands: Sequence[Any], wide: bool) -> Any:
    name = eqn.primitive.name
    params = eqn.params
    with jax.ensure_compile_time_eval():
        if wide and name not in ("convert_element_type", "iota"):
            with jax.enable_x64(True):
                if name.startswith("scatter"):  # its own sum has the types of the jaxpr
                    keywords = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
                    scatter = getattr(jax.lax, name.replace("-", "_"))
                    return [
                        jax.device_get(scatter(*operands, **{key: params[key] for key in keywords}))
                    ]
                return jax.device_get(bind(eqn, *operands))
        return bind(eqn, *operands)


@functools.cache
def _parsed(name: str, column: str) -> tuple[str, Callable[..., Any]]:
    """Returns the kinds of types and the function of numpy that the table has for a primitive."""
    kinds, _, theirs = column.partition(" ")
    home, _, function = (theirs or name).rpartition(".")  # scipy takes as long to load as JAX
    return kinds, getattr(importlib.import_module(home) if home else np, function)


# Operations with parameters. None: not this case.


def broadcast_in_dim(x, *, shape, broadcast_dimensions, **_):
    inner = [1] * len(shape)
    for size, axis in zip(x.shape, broadcast_dimensions, strict=True):
        inner[axis] = size
    return np.broadcast_to(x.reshape(inner), shape)


def dot_general(a, b, *, dimension_numbers, preferred_element_type, **_):
    dtypes = [
        a.dtype,
        b.dtype,
        *([np.dtype(preferred_element_type)] if preferred_element_type else []),
    ]
    # Sums of int8 are made in int32, and those of 16-bit numbers in 32 bits.
    dtype = np.result_type(*(np.float32 if of.kind == "V" else of for of in dtypes))
    sides = []
    for x, over, batch in zip((a, b), *dimension_numbers, strict=True):
        free = [d for d in range(x.ndim) if d not in (*over, *batch)]
        sizes = [[x.shape[d] for d in dims] for dims in (batch, free, over)]
        moved = x.astype(dtype).transpose(*batch, *free, *over)
        sides.append((moved.reshape(*sizes[0], math.prod(sizes[1]), math.prod(sizes[2])), sizes))
    (lhs, (batch, rows, _)), (rhs, (_, columns, _)) = sides
    return np.reshape(lhs @ rhs.swapaxes(-1, -2), (*batch, *rows, *columns))


def convert_element_type(x, *, new_dtype, **_):
    """XLA has rules of its own for numbers that do not fit, and for the imaginary part."""
    to = np.dtype(new_dtype).kind
    return (
        x.astype(new_dtype)
        if to == "c" or (to in FLOAT and x.dtype.kind != "c") or x.dtype.kind == "b"
        else None
    )


def pad(x, value, *, padding_config):
    if any(low < 0 or high < 0 for low, high, _ in padding_config):
        return None
    shape = [
        low + high + max(0, n + (n - 1) * inside)
        for n, (low, high, inside) in zip(x.shape, padding_config)
    ]
    out = np.full(shape, value, x.dtype)
    inner = (
        slice(low, low + n + max(0, n - 1) * k, k + 1)
        for n, (low, _, k) in zip(x.shape, padding_config)
    )
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
        return (
            reduce(x.astype(np.float32) if x.dtype.kind == "V" else x, axis=tuple(axes))
            if x.size
            else None
        )

    return of


def running(accumulate):
    def of(x, *, axis, reverse):
        if x.dtype.kind == "V":
            return None
        return np.flip(accumulate(np.flip(x, axis), axis), axis) if reverse else accumulate(x, axis)

    return of


def factors(of):
    """Factors by numpy's LAPACK, in float64, of finite numbers and where it does not raise."""

    def run(x, **params):
        with contextlib.suppress(np.linalg.LinAlgError):
            return (
                of(x, **params)
                if x.dtype.itemsize >= 8 and x.size and np.isfinite(x).all()
                else None
            )

    return run


def cholesky(x, **_):
    """A matrix that is not positive definite has factors of NaN; if it is complex, both parts are."""
    lower = np.full_like(x, complex(np.nan, np.nan) if x.dtype.kind == "c" else np.nan)
    for at in np.ndindex(x.shape[:-2]):
        with contextlib.suppress(np.linalg.LinAlgError):
            lower[at] = np.linalg.cholesky(x[at])
    return lower


def qr(x, *, pivoting=False, full_matrices, **_):
    return None if pivoting else np.linalg.qr(x, "complete" if full_matrices else "reduced")


def svd(x, *, compute_uv, full_matrices, **_):
    if not compute_uv:
        return [np.linalg.svd(x, compute_uv=False)]
    u, values, v = np.linalg.svd(x, full_matrices)
    return values, u, v


def triangular_solve(a, b, *, left_side, lower, transpose_a, conjugate_a, unit_diagonal):
    divisors = 1 if unit_diagonal else a.diagonal(axis1=-2, axis2=-1)
    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.all(divisors)):
        return None  # LAPACK has rules of its own
    a = a.conj() if conjugate_a else a
    b = b if left_side else b.swapaxes(-1, -2)
    if transpose_a == left_side:
        a = a.swapaxes(-1, -2)
        lower = not lower
    if not lower:
        a = a[..., ::-1, ::-1]
        b = b[..., ::-1, :]
    x = np.empty_like(b)
    for i in range(a.shape[-1]):
        rest = b[..., i, :] - (a[..., i : i + 1, :i] @ x[..., :i, :])[..., 0, :]
        x[..., i, :] = rest if unit_diagonal else rest / a[..., i, i, None]
    x = x if lower else x[..., ::-1, :]
    return x if left_side else x.swapaxes(-1, -2)


MOVES = {
    "broadcast_in_dim": broadcast_in_dim,
    "dot_general": dot_general,
    "pad": pad,
    "dynamic_update_slice": dynamic_update_slice,
    "dynamic_slice": lambda x, *starts, slice_sizes: x[window(x.shape, slice_sizes, starts)],
    "slice": lambda x, *, start_indices, limit_indices, strides: x[
        tuple(map(slice, start_indices, limit_indices, strides or [1] * x.ndim))
    ],
    "reshape": lambda x, *, new_sizes, dimensions, **_: (
        x.reshape(new_sizes) if dimensions is None else None
    ),
    "squeeze": lambda x, *, dimensions: x.reshape(
        [n for i, n in enumerate(x.shape) if i not in dimensions]
    ),
    "transpose": lambda x, *, permutation: x.transpose(permutation),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "unstack": lambda x, *, axis: list(np.moveaxis(x, axis, 0)),
    "split": lambda x, *, sizes, axis: np.split(x, np.cumsum(sizes)[:-1], axis),
    "select_n": lambda which, *cases: (
        np.where(which, *cases[::-1]) if which.dtype == bool else None
    ),
    "convert_element_type": convert_element_type,
    **INDEXED,
    "cholesky": factors(cholesky),
    "qr": factors(qr),
    "svd": factors(
        lambda x, *, subset_by_index=None, **params: (
            svd(x, **params) if subset_by_index is None else None
        )
    ),
    "triangular_solve": triangular_solve,
    "integer_pow": lambda x, *, y: x**y if x.dtype.kind in FLOAT else None,
    "iota": lambda *, dtype, shape, dimension, **_: np.broadcast_to(
        np.arange(shape[dimension]).reshape(
            [-1 if i == dimension else 1 for i in range(len(shape))]
        ),
        shape,
    ),
    "reduce_sum": wide(np.sum),
    "reduce_max": wide(np.max),
    "reduce_or": lambda x, *, axes, **_: x.any(tuple(axes)) if x.dtype == bool else None,
    "reduce_and": lambda x, *, axes, **_: x.all(tuple(axes)) if x.dtype == bool else None,
    "reduce_prod": lambda x, *, axes, **_: np.prod(x, tuple(axes)) if x.dtype.kind != "V" else None,
    "reduce_min": lambda x, *, axes, **_: (
        x.min(tuple(axes)) if x.size and x.dtype.kind in "iuf" else None
    ),
    "argmax": lambda x, *, axes, **_: x.argmax(axes[0]) if np.isfinite(x).all() else None,
    "argmin": lambda x, *, axes, **_: x.argmin(axes[0]) if np.isfinite(x).all() else None,
    "cumsum": running(np.cumsum),
    "cumprod": running(np.cumprod),
}


# Jaxprs within --------------------------------------------------------------------------------------------------------

Values = Sequence[Any]


def _closed(of: Callable, closed: Any, operands: Values) -> list[Any]:
    return (
        of(closed.jaxpr, closed.consts, operands)
        if hasattr(closed, "consts")
        else of(closed, (), operands)
    )


def _call(
    of: Callable, operands: Values, *, jaxpr: Any = None, call_jaxpr: Any = None, **_: Any
) -> list[Any]:
    return _closed(of, jaxpr if call_jaxpr is None else call_jaxpr, operands)


def _scan(
    of: Callable, operands: Values, *, jaxpr: Any, length: int, reverse: bool, **params: Any
) -> list[Any]:
    num_consts, num_carry = scan_counts(params)
    consts = operands[:num_consts]
    carry = operands[num_consts : num_consts + num_carry]
    xs = operands[num_consts + num_carry :]
    ys: list[Any] = [np.zeros((length, *a.shape), a.dtype) for a in jaxpr.out_avals[num_carry:]]
    for number, t in enumerate(range(length)[::-1] if reverse else range(length)):
        out = _closed(of, jaxpr, [*consts, *carry, *(x[t] for x in xs)])
        carry = out[:num_carry]
        if number == 0:
            ys = [np.zeros((length, *v.shape), v.dtype) for v in out[num_carry:]]
        for y, value in zip(ys, out[num_carry:], strict=True):
            y[t] = value
    return [*carry, *ys]


def _while(
    of: partial,
    operands: Values,
    *,
    cond_jaxpr: Any,
    cond_nconsts: int,
    body_jaxpr: Any,
    body_nconsts: int,
    **_: Any,
) -> Values:
    cond_consts = operands[:cond_nconsts]
    used = operands[cond_nconsts : cond_nconsts + body_nconsts]
    carry = operands[cond_nconsts + body_nconsts :]
    for number in itertools.count():
        if not _closed(of, cond_jaxpr, [*cond_consts, *carry])[0]:
            break
        if number == of.keywords["trips"]:
            raise Endless
        carry = _closed(of, body_jaxpr, [*used, *carry])
    return carry


def _cond(of: Callable, operands: Values, *, branches: Any, **_: Any) -> list[Any]:
    return _closed(of, branches[min(max(int(operands[0]), 0), len(branches) - 1)], operands[1:])


def _checked(of: Callable, operands: Values, *, products: Any, steps: Any, **_: Any) -> list[Any]:
    results = _closed(of, products, operands[1:])
    return (
        results
        if operands[0] and all(np.isfinite(v).all() for v in results)
        else _closed(of, steps, operands[1:])
    )


def _linear_solve(
    of: Callable, operands: Values, *, const_lengths: Any, jaxprs: Any, **_: Any
) -> list[Any]:
    start = const_lengths.matvec + const_lengths.vecmat
    consts = operands[start : start + const_lengths.solve]
    return _closed(of, jaxprs.solve, [*consts, *operands[sum(const_lengths) :]])


LOOPS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(LOWERED_CALLS, _call),
    "custom_vmap_call": lambda of, operands, *, call, **_: _closed(of, call, operands),
    "optimization_barrier": lambda of, operands, **_: operands,
    "checked_linear_map": _checked,
    "hidden_program": lambda of, operands, *, program: _closed(of, program, operands),
    "custom_linear_solve": _linear_solve,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
