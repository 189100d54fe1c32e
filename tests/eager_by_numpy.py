"""Operations that run outside of `jax.jit`, computed by numpy in quick runs.

JAX compiles a program for each operation, type and shape that it meets there. A program takes 25 ms, one that draws random
numbers 80 ms, and all tests together would compile thousands of them, most of them for arguments and expected values.
Functions that tests and jrnn give to `jax.jit` are compiled as ever. So are operations that numpy does not have, and large
ones.
"""

import functools
import weakref
from pathlib import Path

import jax
import numpy as np
from jax._src import array, pjit

from jrnn.jaxprs import LOWERED_CALLS, all_equations, primitives
from jrnn.jaxprs.by_numpy import Evaluator

JAX = str(Path(jax.__file__).parent)
SIZE = 2**16  # elements of the largest array
EQUATIONS = 100

compile_and_run = pjit._pjit_call_impl_python
by_numpy = weakref.WeakKeyDictionary()  # whether numpy runs a jaxpr


class NotByNumpy(Exception):
    """Raised where a rule of numpy leaves a case to JAX."""


def install():
    """From now on, numpy runs small programs of JAX's own. JAX calls this function where it has compiled no program yet."""
    pjit._pjit_call_impl_python = run


def run(*args, jaxpr, **params):
    """Returns the outputs of a program, and the compiled program, which JAX runs the next time."""
    if _numpy_may_run(args, jaxpr, params):
        program = getattr(jaxpr, "jaxpr", jaxpr)
        try:
            outs = EVALUATOR.evaluate(program, getattr(jaxpr, "consts", ()), args)
            avals = [var.aval for var in program.outvars]
            return [_on_device(*pair) for pair in zip(outs, avals)], None, None, []
        except NotByNumpy:
            pass
    return compile_and_run(*args, jaxpr=jaxpr, **params)


def _numpy_may_run(args, jaxpr, params):
    if jaxpr not in by_numpy:
        by_numpy[jaxpr] = _is_small_and_of_jax(getattr(jaxpr, "jaxpr", jaxpr))
    return (
        by_numpy[jaxpr]
        and params["ctx_mesh"].empty
        and all(isinstance(s, pjit.UnspecifiedValue) for s in params["in_shardings"])
        and not any(getattr(arg, "_committed", False) for arg in args)
        and not jax.config.jax_debug_nans
        and jax.default_backend() == "cpu"
    )


def _is_small_and_of_jax(program):
    """Whether a program is an operation, or a function of JAX's own, whose equations numpy has."""
    if JAX not in (program.debug_info.func_src_info or "") or program.effects:
        return False
    equations = list(all_equations(program))
    atoms = [*program.invars, *program.outvars]
    for eqn in equations:
        atoms += eqn.outvars
    return (
        len(equations) <= EQUATIONS
        and all(_numpy_has(eqn) for eqn in equations)
        and all(atom.aval.size <= SIZE and _is_wide(atom.aval.dtype) for atom in atoms)
        and not any(_is_key(var.aval.dtype) for var in program.outvars)
    )


def _numpy_has(eqn):
    name = eqn.primitive.name
    return name in LOWERED_CALLS or name in RULES or primitives.numpy_rule(eqn) is not None


def _is_key(dtype):
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _is_wide(dtype):
    """Whether a type is none of the numbers of 4 and 8 bits for which XLA has rules of its own."""
    return _is_key(dtype) or dtype.itemsize > 1 or dtype.kind in "biu"


def _on_device(value, aval):
    placed = jax.device_put(np.array(value, aval.dtype))
    if not aval.weak_type:
        return placed
    return array.ArrayImpl(aval, placed.sharding, [placed], committed=False)


# Operations that numpy computes here and not in jrnn ---------------------------------------------------------------------


def _of_bits(function):
    """Returns the rule of a function of integers, whose operands have one type."""

    def rule(*operands):
        if operands[0].dtype.kind not in "biu":
            raise NotByNumpy
        return function(*operands)

    return rule


def _shift_right_logical(x, by):
    unsigned = x.view(x.dtype.str.replace("i", "u"))
    return _shifted(np.right_shift, unsigned, by.view(unsigned.dtype)).view(x.dtype)


def _shifted(shift, x, by):
    """XLA shifts all bits out where numpy leaves it undefined."""
    bits = 8 * x.dtype.itemsize
    return np.where((by >= 0) & (by < bits), shift(x, by % bits), np.zeros_like(x))


def _bitcast(x, *, new_dtype):
    if x.dtype.itemsize != np.dtype(new_dtype).itemsize:
        raise NotByNumpy
    return np.ascontiguousarray(x).view(new_dtype).reshape(x.shape)


def _converted(x, *, new_dtype, **_):
    """XLA has rules of its own for what does not fit."""
    target = np.dtype(new_dtype)
    if x.dtype.kind == "c" and target.kind != "c":
        raise NotByNumpy
    if x.dtype.kind in "fV" and target.kind in "iu":
        least, most = np.iinfo(target).min, np.iinfo(target).max
        if not np.all((x > least) & (x < most)):
            raise NotByNumpy
    return x.astype(target)


def _remainder(x, y):
    if x.dtype.kind in "iu" and not np.all(y):
        raise NotByNumpy
    return np.fmod(x, y)


def _sort(*operands, dimension, is_stable, num_keys):
    if num_keys > 1:
        raise NotByNumpy
    keys = operands[0]
    if keys.dtype.kind == "V":  # numpy does not know that a bfloat16 is NaN
        keys = keys.astype(np.float32)
    order = np.argsort(keys, axis=dimension, stable=True)
    return [np.take_along_axis(operand, order, dimension) for operand in operands]


@jax.jit
def _compiled_erf_inv(x):
    return jax.lax.erf_inv(x)


def _erf_inv(x):
    """By XLA, so that draws are those of compiled programs to the last bit; in few sizes."""
    flat = x.ravel()
    size = next(size for size in (64, 2048, SIZE) if size >= flat.size)
    padded = np.pad(flat, (0, size - flat.size))
    return np.asarray(_compiled_erf_inv(padded))[: flat.size].reshape(x.shape)


def _iota_2x32_shape(*, shape):
    counts = np.arange(np.prod(shape, dtype=int), dtype=np.uint32).reshape(shape)
    return np.zeros_like(counts), counts


def _threefry2x32(key_1, key_2, x_1, x_2):
    """Salmon, Moraes, Dror and Shaw: Parallel random numbers: as easy as 1, 2, 3 (2011): 20 rounds."""
    keys = [key_1, key_2, key_1 ^ key_2 ^ np.uint32(0x1BD11BDA)]
    x_1 = x_1 + keys[0]
    x_2 = x_2 + keys[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x_1 = x_1 + x_2
            x_2 = (x_2 << np.uint32(rotation)) | (x_2 >> np.uint32(32 - rotation))
            x_2 = x_1 ^ x_2
        x_1 = x_1 + keys[(group + 1) % 3]
        x_2 = x_2 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x_1, x_2


def _random_bits(key, *, bit_width, shape):
    data = np.asarray(jax.random.key_data(key))
    usual = data.shape == (2,) and jax.config.jax_threefry_partitionable
    if bit_width not in (32, 64) or not usual or str(jax.random.key_impl(key)) != "threefry2x32":
        raise NotByNumpy
    high, low = _threefry2x32(*data, *_iota_2x32_shape(shape=shape))
    if bit_width == 32:
        return high ^ low
    return high.astype(np.uint64) << np.uint64(32) | low


RULES = {
    "and": _of_bits(np.bitwise_and),
    "bitcast_convert_type": _bitcast,
    "complex": lambda real, imaginary: real + 1j * imaginary,
    "convert_element_type": _converted,
    "erf_inv": _erf_inv,
    "iota_2x32_shape": _iota_2x32_shape,
    "not": _of_bits(np.bitwise_not),
    "or": _of_bits(np.bitwise_or),
    "random_bits": _random_bits,
    "rem": _remainder,
    "shift_left": _of_bits(functools.partial(_shifted, np.left_shift)),
    "shift_right_logical": _of_bits(_shift_right_logical),
    "sort": _sort,
    "stage": lambda x, **_: x,
    "threefry2x32": _threefry2x32,
    "xor": _of_bits(np.bitwise_xor),
}


class WithRules(Evaluator):
    """An evaluator that has these operations, too, and does not ask JAX for others."""

    def _results(self, eqn, operands):
        rule = RULES.get(eqn.primitive.name)
        if rule is None:
            return super()._results(eqn, operands)
        result = rule(*operands, **eqn.params)
        return result if eqn.primitive.multiple_results else [result]

    def _by_jax(self, eqn, operands):
        raise NotByNumpy


EVALUATOR = WithRules()
