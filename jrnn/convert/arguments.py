"""The arguments of a JAX function that is converted: the arrays among them, and their names."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from jrnn.errors import ConversionError


@dataclass(frozen=True)
class Leaf:
    """One array among the arguments: its name as a blob, and its value or its shape and type."""

    name: str
    value: Any
    is_param: bool

    @property
    def spec(self) -> Any:
        """Its shape and type; of a key for random numbers, the key itself."""
        if hasattr(self.value, "dtype") and jax.dtypes.issubdtype(self.value.dtype, jax.dtypes.prng_key):
            return self.value
        return jax.ShapeDtypeStruct(np.shape(self.value), jax.dtypes.canonicalize_dtype(_dtype(self.value)))


def callable_of(fn: Any, params: Any) -> tuple[Callable, Any, bool]:
    """The function to trace, its params, and whether they are those of a module that is a pytree itself."""
    if not jax.tree_util.treedef_is_leaf(jax.tree.structure(fn)) and callable(fn):
        if params is not None:
            raise ConversionError(f"a {type(fn).__name__} holds its own params; leave `params` out")

        def call(module: Any, *args: Any) -> Any:
            return module(*args)

        call.__name__ = type(fn).__name__
        call.__signature__ = _signature_of_call(fn)  # type: ignore[attr-defined]
        return call, fn, True
    if hasattr(fn, "apply") and hasattr(fn, "init"):
        if params is None:
            raise ConversionError(f"a {type(fn).__name__} is applied to its variables: give them as `params`")
        module = fn

        def apply(variables: Any, *args: Any) -> Any:
            return module.apply(variables, *args)

        apply.__name__ = type(module).__name__
        apply.__signature__ = _signature_of_call(module)  # type: ignore[attr-defined]
        return apply, params, False
    if not callable(fn):
        raise ConversionError(f"a conversion takes a function, was given a {type(fn).__name__}")
    return fn, params, False


def _signature_of_call(module: Any) -> inspect.Signature:
    try:
        return inspect.signature(type(module).__call__)
    except (TypeError, ValueError):
        return inspect.Signature()


def _dtype(value: Any) -> Any:
    return value.dtype if hasattr(value, "dtype") else np.result_type(value)


def path_of(prefix: str, path: Sequence[Any]) -> str:
    inner = keystr(tuple(path), simple=True, separator="/")
    return "/".join(part for part in (prefix, inner) if part) or "arg"


def arguments_of(fn: Callable, args: Sequence[Any], params: Any, own: bool, name: str) -> tuple[list[Leaf], Callable]:
    """The arrays among params and arguments, and the function of a flat list of them."""
    names = _argument_names(fn, len(args), params is not None)
    if len(args) == 1 and isinstance(args[0], dict):
        names = [""]
    trees = [("", params, True)] if params is not None else []
    trees += [(prefix, arg, False) for prefix, arg in zip(names, args)]
    leaves: list[Leaf] = []
    structures = []
    for prefix, tree, is_param in trees:
        found, structure = tree_flatten_with_path(tree)
        structures.append((structure, len(found)))
        for path, value in found:
            full = path_of(prefix, path)
            leaves.append(Leaf(full.removesuffix("/value") if own and is_param else full, value, is_param))
    for leaf in leaves:
        _check_argument(leaf, name)

    def call(flat: Sequence[Any]) -> Any:
        rest, built = list(flat), []
        for structure, count in structures:
            built.append(jax.tree.unflatten(structure, rest[:count]))
            rest = rest[count:]
        return fn(*built)

    return leaves, call


def _argument_names(fn: Callable, count: int, has_params: bool) -> list[str]:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    plain = plain[1:] if has_params else plain
    return [plain[k] if k < len(plain) else f"arg_{k}" for k in range(count)]


def _check_argument(leaf: Leaf, name: str) -> None:
    if not (hasattr(leaf.value, "shape") and hasattr(leaf.value, "dtype")) and not isinstance(
        leaf.value, (bool, int, float)
    ):
        raise ConversionError(
            f"{name}: argument {leaf.name!r} is a {type(leaf.value).__name__}, not an array; close over settings: "
            "lambda x: fn(x, setting)"
        )
    for size in np.shape(leaf.value) if not hasattr(leaf.value, "shape") else leaf.value.shape:
        if not isinstance(size, (int, np.integer)):
            raise ConversionError(
                f"{name}: argument {leaf.name!r} has a dimension {size}; shapes must be known numbers"
            )


def closed_over(fn: Callable) -> list[tuple[str, Any]]:
    """The arrays that a function sees from outside, with the names of the variables that hold them."""
    fn = inspect.unwrap(fn)
    if not inspect.isfunction(fn):
        return []
    try:
        seen = inspect.getclosurevars(fn)
    except ValueError:  # a variable that is not set yet
        return []
    found: list[tuple[str, Any]] = []
    for variable, tree in {**seen.globals, **seen.nonlocals}.items():
        if not callable(tree) and not inspect.ismodule(tree):
            found += [(path_of(variable, path), value) for path, value in tree_flatten_with_path(tree)[0]]
    return found
