"""What is asked of the real Caffe2: one module a family of operators, each with a list `CASES`.

This package runs under Caffe2's Python 3.8 and imports nothing of jrnn. A case is one operator on small inputs; where
`gradient` says so, Caffe2 appends the gradient operators that it makes for it, and they are run on a random gradient.
"""

import collections
import zlib

import numpy as np

Case = collections.namedtuple("Case", "type inputs outputs reads gradient args before after")


def case(type, inputs, outputs, /, *, gradient=False, reads=None, before=(), after=(), **args):
    """One operator to run.

    type: the operator. inputs: blob -> array, in the order in which the operator reads them. outputs: blob names.
    gradient: outputs that receive one; True means the first. reads: the operator's inputs, where they are not just `inputs`
    in order (a blob read twice). before, after: operators around it, (type, inputs, outputs, arguments), for blobs that
    cannot be recorded. The rest are the operator's arguments.
    """
    gradient = outputs[:1] if gradient is True else list(gradient or [])
    return Case(
        type,
        inputs,
        outputs,
        list(inputs) if reads is None else list(reads),
        gradient,
        args,
        before,
        after,
    )


def normal(*shape, seed=0):
    """float32 numbers of a standard normal distribution; the same ones for the same shape and seed."""
    rng = np.random.RandomState(zlib.crc32(repr((shape, seed)).encode()))
    return rng.standard_normal(shape).astype(np.float32)


def positive(*shape, seed=0):
    """float32 numbers between 0.5 and 2.5."""
    rng = np.random.RandomState(zlib.crc32(repr((shape, seed)).encode()))
    return rng.uniform(0.5, 2.5, shape).astype(np.float32)


def integers(low, high, *shape, seed=0, dtype=np.int32):
    """Integers from `low` to `high` - 1."""
    rng = np.random.RandomState(zlib.crc32(repr((shape, seed)).encode()))
    return rng.randint(low, high, shape).astype(dtype)


def i32(*values):
    """A vector of int32."""
    return np.array(values, np.int32)


def i64(*values):
    """A vector of int64."""
    return np.array(values, np.int64)


def f32(*values):
    """A vector of float32."""
    return np.array(values, np.float32)


def flags(*values):
    """A vector of booleans."""
    return np.array(values, bool)
