"""Functions of JAX as subjects: their own gradient, that of the net that they convert to, and central differences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from jrnn.convert import from_jax
from jrnn.errors import GradientError, near
from jrnn.gradcheck.subject import Subject, as_float64, seeds_of
from jrnn.ir import Net
from jrnn.lowering import run_net


def subject_of_function(fn: Callable, args: Sequence[Any], params: Any = None, *, seed: int = 0) -> Subject:
    """A function at a point; its net is what `from_jax` makes of it. To be called with 64-bit types enabled.

    Args:
        fn, args, params: as for `from_jax`. The function is differentiated by args and params, not by arrays that it
            closes over; in float64, so that its types must follow those of its arguments.
        seed: of the gradient that arrives where the Jacobian is too large.

    Raises:
        ConversionError: as `from_jax` does. GradientError: where the function does not run in float64.
    """
    with jax.enable_x64(False):
        args, params = jax.tree.map(_as_float32, (tuple(args), params))
        package = from_jax(fn, *args, params=params)
    is_module = not jax.tree_util.treedef_is_leaf(jax.tree.structure(fn))
    call: Callable = getattr(fn, "apply", fn) if hasattr(fn, "init") else fn
    if is_module:
        call, params = (lambda module, *xs: module(*xs)), fn
    takes_params = params is not None
    names = list(package.input_names)
    trees = (args, params) if takes_params else (args,)
    leaves, structure = jax.tree.flatten(trees)
    if takes_params:
        paths = (keystr(path, simple=True, separator="/") for path, _ in tree_flatten_with_path(params)[0])
        names += [p.removesuffix("/value") if is_module else p for p in paths]
    values = [as_float64(v) for v in leaves]
    fixed = {n: v for n, v in zip(names, values) if v.dtype != np.float64}

    def function(point: Mapping[str, Any]) -> dict[str, Any]:
        found = jax.tree.unflatten(structure, [point[n] if n in point else jnp.asarray(fixed[n]) for n in names])
        results = call(found[1], *found[0]) if takes_params else call(*found[0])
        return dict(zip(package.output_names, jax.tree.leaves(results), strict=True))

    wrt = tuple(n for n in names if n not in fixed)
    point = {n: v for n, v in zip(names, values) if n in wrt}
    try:
        shapes = jax.eval_shape(function, point)
    except (TypeError, ValueError) as e:
        raise GradientError(
            f"{package.predict_net.name} does not run in float64: {str(e).splitlines()[0]}; gradients are proved there: let "
            "types follow those of the arguments, as with jnp.zeros(n, x.dtype)"
        ) from e
    seeds = seeds_of(package.predict_net.name, shapes, point, seed)
    net, constants = _without_constants(package.predict_net)
    blobs = {n: as_float64(v) for n, v in {**package.weights(), **constants}.items()} | fixed | point
    return Subject(net, blobs, wrt, seeds, lambda p: {y: function(p)[y] for y in seeds}, exact=False)


def _without_constants(net: Net) -> tuple[Net, dict[str, Any]]:
    """The net without the operators that make floats of nothing, and what they make: in float32, as the wire has it."""
    found = run_net(Net("constants", tuple(op for op in net.ops if not op.inputs)), {})
    floats = {n: v for n, v in found.items() if isinstance(v, np.ndarray) and v.dtype.kind == "f"}
    return replace(net, ops=tuple(op for op in net.ops if op.inputs or not floats.keys() >= set(op.outputs))), floats


def _as_float32(value: Any) -> Any:
    value = np.asarray(value)
    return value.astype(np.float32) if value.dtype.kind == "f" else value


def arguments_of(fn: Callable, blobs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a function put together from arrays by name; `carry/0`, `carry/1` make a tuple, `p/w` a dict.

    Raises:
        GradientError: where an argument is missing or a name is not one.

    >>> arguments_of(lambda carry, x: None, {"x": 1.0, "carry/0": 2.0, "carry/1": 3.0})
    [(2.0, 3.0), 1.0]
    """
    names = required(fn)
    trees: dict[str, Any] = {}
    for path, value in blobs.items():
        first, *rest = path.split("/")
        if first not in names:
            raise GradientError(
                f"the function has no argument {first!r}; it takes {', '.join(names)}{near(first, names)}"
            )
        at, key = trees, first
        for part in rest:
            at, key = at.setdefault(key, {}), part
        at[key] = value
    for name in names:
        if name not in trees:
            raise GradientError(
                f"the function's argument {name!r} is not given: {name}=normal[2,3], or {name}/0=normal[2,3], ..."
            )
    return [_as_tuples(trees[name]) for name in names]


def required(fn: Callable) -> list[str]:
    """The names of the arguments that a function must be given."""
    parameters = inspect.signature(fn).parameters.values()
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in places and p.default is p.empty]


def _as_tuples(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if all(key.isdigit() for key in tree):
        return tuple(_as_tuples(tree[key]) for key in sorted(tree, key=int))
    return {key: _as_tuples(value) for key, value in tree.items()}


def over_time(step: Callable) -> Callable:
    """A step `(..., carry, x) -> (carry, y)` as a function of sequences [T, ...]: the last argument is scanned."""

    def scanned(*args: Any) -> Any:
        *weights, carry, xs = args
        return jax.lax.scan(lambda c, x: step(*weights, c, x), carry, xs)

    scanned.__name__ = getattr(step, "__name__", "step").strip("<>")
    scanned.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]
    return scanned
