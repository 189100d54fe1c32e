"""Copies: operators whose output is their input; some change the gradient. Also Cast and Scale.

Copies between devices do nothing here, because JAX places arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import GradientError, OpError, near
from jrnn.nets.ops.values import check_float, dtype_of
from jrnn.nets.registry import gradient, op


@op("Copy", copies=True, inplace={0: 0}, gradient="CopyOnDeviceLike(dy, x)")
def copy(x):
    return x


op("CopyFromCPUInput", copies=True)(copy)
op("CopyCPUToGPU", copies=True, gradient="CopyGPUToCPU(dy)")(copy)
op("CopyGPUToCPU", copies=True, gradient="CopyCPUToGPU(dy)")(copy)
op("EnsureCPUOutput", copies=True, gradient="stops")(copy)
op("Alias", copies=True, inplace={0: 0})(copy)
op("EnsureDense", copies=True, inplace={0: 0})(copy)
op("StopGradient", copies=True, inplace={0: 0}, gradient="stops")(copy)


op("CopyOnDeviceLike", copies=True)(lambda x, like: x)


@op("AliasWithName", copies=True, inplace={0: 0})
def alias_with_name(x, *, name: str, is_backward: bool = False):
    return x


@gradient("Alias")
def _(g):
    g.set_grad(0, g.grad_output(0))


@gradient("EnsureDense")
def _(g):
    arriving = g.grad_output_slice(0)
    if isinstance(arriving, str):
        g.set_grad(0, arriving)
    else:
        g.emit("SparseToDense", [arriving.indices, arriving.values, g.input(0)], [g.grad_input(0)])


@op("ZeroGradient", outputs=0)
def zero_gradient(x):
    """Writes nothing; gives x a gradient of zeros, for operators that need gradients of all their outputs."""
    return ()


@gradient("ZeroGradient")
def _(g):
    g.emit("ConstantFill", [g.input(0)], [g.grad_input(0)], value=0.0)


@jax.custom_jvp
def _negated_backwards(x):
    return x


@_negated_backwards.defjvp
def _(primals, tangents):
    return primals[0], -tangents[0]


@op("NegateGradient", copies=True, inplace={0: 0}, gradient="Negative(dy)")
def negate_gradient(x):
    """x itself; its gradient is the negative of the output's."""
    return _negated_backwards(x)


@op("Scale", inplace={0: 0}, gradient="Scale(dy)")
def scale(x, *, scale: float = 1.0):
    check_float(x, "x")
    return x * scale


# The numbers and names of data types that Cast knows on the wire.
_TYPE_NAMES = {
    "FLOAT": 1,
    "INT32": 2,
    "BOOL": 5,
    "UINT8": 6,
    "INT8": 7,
    "UINT16": 8,
    "INT16": 9,
    "INT64": 10,
    "FLOAT16": 12,
    "DOUBLE": 13,
}


def _type_number(value: int | str, argument: str) -> int:
    number = _TYPE_NAMES.get(value.upper()) if isinstance(value, str) else value
    if number is None or number not in _TYPE_NAMES.values():
        hint = near(value.upper(), _TYPE_NAMES) if isinstance(value, str) else ""
        choices = ", ".join(f"{n} {name}" for name, n in _TYPE_NAMES.items())
        raise OpError(f"argument {argument!r} is {value!r}{hint}; it must be one of {choices}")
    return number


@op("Cast")
def cast(x, *, to: int | str = 1, from_type: int | str | None = None, wide=False):
    """x in another data type. Fractions are truncated towards zero; nonzero numbers become true."""
    dtype = dtype_of(_type_number(to, "to"))
    return jnp.asarray(x).astype(
        np.float64 if wide and jnp.issubdtype(dtype, jnp.floating) else dtype
    )


@gradient("Cast")
def _(g):
    to = g.arg("to", 1)
    source = g.arg("from_type")
    if source is None:
        raise GradientError(
            "the gradient of Cast needs argument 'from_type', the data type of its input"
        )
    to, source = (
        _type_number(t.decode() if isinstance(t, bytes) else t, "to") for t in (to, source)
    )
    if not all(jnp.issubdtype(dtype_of(t), jnp.floating) for t in (to, source)):
        g.grad_output(0)  # integers and truth values have no gradient
        return
    g.emit("Cast", [g.grad_output(0)], [g.grad_input(0)], to=source, from_type=to)
