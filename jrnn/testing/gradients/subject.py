"""What is checked: a net, the JAX function that it should equal, the point, and the gradients that arrive at the outputs.

Shapes: S gradients that arrive at an output: 1 for a loss, the number of elements of all outputs for a Jacobian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.convert.package import outputs_of
from jrnn.errors import GradientError, check_known
from jrnn.jaxprs.queries import is_floating
from jrnn.nets.ir import Names, Net, Op, Values
from jrnn.nets.lowering import to_jax, without_sources
from jrnn.testing.gradients.report import Blobs
from jrnn.testing.gradients.written import backward_part, seeds_in

SMALL = 4096  # elements up to which a Jacobian is compared whole


@dataclass(frozen=True)
class Subject:
    """Something to check; floating point numbers are float64.

    Attributes:
        net: forward operators.
        blobs: everything that the net reads from outside.
        wrt: the blobs with respect to which gradients are computed.
        seeds: output -> the gradients that arrive there, [S, ...].
        function: the JAX function `{blob of wrt: value} -> {output: value}`; the lowered net, unless the subject was made
            from a function.
        key: for operators that draw random numbers.
        optional: blobs of wrt that may have no gradient by the net, such as the running means of a normalization.
        exact: whether the net has the function's exact constants; converted functions round constants to float32.
        no_net: why no net has this gradient, in one line; then JAX's gradient and differences are compared. None if one has.
        held: the function for differences, if it is another: it holds what `stop_gradient` stops.
        surrogates: the names of functions whose derivative rule is a surrogate on purpose.
        written: the gradient operators of the training net that the net was read from.
    """

    net: Net
    blobs: Blobs
    wrt: Names
    seeds: Mapping[str, np.ndarray]
    function: Callable[[Blobs], Blobs]
    key: Any = None
    optional: frozenset[str] = frozenset()
    exact: bool = True
    no_net: str | None = None
    held: Callable[[Blobs], Blobs] | None = None
    surrogates: Names = ()
    written: tuple[Op, ...] = ()

    @property
    def point(self) -> Values:
        return {n: jnp.asarray(self.blobs[n]) for n in self.wrt}

    @property
    def rows(self) -> int:
        """S."""
        return len(next(iter(self.seeds.values())))

    def row_name(self, row: int) -> str:
        """The output element of row `row` of a Jacobian, such as `y[0, 2]`; "" if there is only one row."""
        if self.rows == 1:
            return ""
        for name, seeds in self.seeds.items():
            if seeds[row].any():
                return f"{name}{list(map(int, np.argwhere(seeds[row])[0]))}"
        raise AssertionError("a row of a Jacobian without an element")


def subject_of_net(
    net: Net,
    blobs: Blobs,
    loss: str | None = None,
    *,
    wrt: Iterable[str] | None = None,
    key: Any = None,
) -> Subject:
    """A net at a point. To be called with 64-bit types enabled.

    Takes the arguments of `check_gradients`.

    Raises:
        GradientError: a loss of more than one element, an unknown blob, or outputs without floating-point numbers.
        NetError, OpError: as `run_net` does.
    """
    seeded = seeds_in(net)
    losses = tuple(seeded) if loss is None else (loss,)
    forward, written = backward_part(net, losses)
    if losses:
        net = replace(net, external_outputs=())
    net = without_sources(replace(net, ops=forward), blobs)
    given = {n: as_float64(v) for n, v in blobs.items()}
    read: set[str] = set()
    for op in net.ops:
        read.update(op.inputs)
    floating = names_of_floats(given)
    for name in wrt or ():
        check_known(
            name,
            floating,
            GradientError,
            f"cannot differentiate by {name!r}, not a floating point blob",
        )
    names = tuple(wrt) if wrt is not None else tuple(n for n in floating if n in read)
    outputs = losses or outputs_of(net)
    point = {n: given[n] for n in names}
    shapes = jax.eval_shape(function_of(net, outputs, given, key), point)
    if loss is not None and shapes[loss].size != 1:
        raise GradientError(
            f"loss {loss!r} has shape {list(shapes[loss].shape)}; it must have one element"
        )
    if written:  # which adds up the gradients of all losses, each from ones
        seeds = {y: np.ones((1, *shapes[y].shape)) for y in losses}
    else:
        seeds = seeds_of(net.name, shapes, point)
    optional = frozenset(names if wrt is None else ())
    function = function_of(net, seeds, given, key)
    return Subject(net, given, names, seeds, function, key, optional, written=written)


def names_of_floats(blobs: Blobs) -> list[str]:
    """The names of the arrays of float64."""
    return [n for n, v in blobs.items() if isinstance(v, np.ndarray) and v.dtype == np.float64]


def function_of(net: Net, outputs: Iterable[str], given: Blobs, key: Any) -> Callable:
    """The net as a function of some of its blobs; the others are in `given`."""
    run = to_jax(net, outputs, wide=True)
    return lambda point: run({**given, **point}, key=key)


def seeds_of(name: str, outputs: Blobs, point: Blobs) -> dict[str, np.ndarray]:
    """The gradients that arrive at outputs of these shapes: the rows of an identity, or random ones if it is large."""
    smooth = {}
    for y, s in outputs.items():
        if hasattr(s, "dtype") and is_floating(s):
            smooth[y] = s.shape
    sizes = list(map(math.prod, smooth.values()))
    total = sum(sizes)
    if not total:
        given = (
            f"its outputs are {', '.join(outputs)}" if outputs else "it declares no external_output"
        )
        raise GradientError(
            f"{name!r} has no output of floating point numbers to differentiate; {given}"
        )
    if total * sum(map(np.size, point.values())) > SMALL:
        rng = np.random.default_rng(0)
        return {y: rng.standard_normal((1, *shape)) for y, shape in smooth.items()}
    parts = np.split(np.eye(total), np.cumsum(sizes)[:-1], axis=1)
    seeds = {}
    for (y, shape), part in zip(smooth.items(), parts, strict=True):
        seeds[y] = part.reshape(total, *shape)
    return seeds


def as_float64(value: Any) -> Any:
    if hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return value  # a random key
    value = np.asarray(value)
    return value.astype({"f": np.float64, "c": np.complex128}.get(value.dtype.kind, value.dtype))
