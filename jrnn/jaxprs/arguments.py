"""The function to convert, as a function of a flat list of named arrays, and its trace."""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from jrnn.errors import ConversionError, GradientError, near
from jrnn.jaxprs import Values
from jrnn.jaxprs.flat import Graph, flatten
from jrnn.jaxprs.mesh_axes import Tree
from jrnn.jaxprs.real_parts import has_complex, is_complex, real_jaxpr

_NOT_KNOWN = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_RANDOM = ("random_", "threefry", "rng_")


Function = Callable[..., Any]  # of the user's, or a module
Example = jax.Array | np.ndarray | jax.ShapeDtypeStruct | float
Named = list[tuple[str, Example]]  # arrays, with their names


@dataclass(frozen=True)
class Leaf:
    """One array among the arguments: the name of its blob, and an example value or ShapeDtypeStruct."""

    name: str
    value: Example
    is_param: bool

    @property
    def spec(self) -> Example:
        """Its shape and dtype; a random key is its own spec."""
        if hasattr(self.value, "dtype") and jax.dtypes.issubdtype(
            self.value.dtype, jax.dtypes.prng_key
        ):
            return self.value
        return jax.ShapeDtypeStruct(np.shape(self.value), jax.dtypes.result_type(self.value))


@dataclass(frozen=True)
class Call:
    """A function call whose arguments are flat: `run(flat)` takes values of the `leaves`, params first.

    A complex result becomes a dict of its parts `real` and `imag`. `closed_over` are the arrays that the function sees from
    outside, with the names of the variables that hold them.
    """

    name: str
    leaves: list[Leaf]
    run: Callable[[Values], Tree]
    closed_over: Named

    def trace(self, specs: Sequence[Example]) -> tuple[Graph, list[str]]:
        """Traces the function for arguments of these shapes; returns its graph and the names of its outputs.

        Raises:
            ConversionError: for effects, random numbers, complex arguments, a result without arrays, and values that must be
                known.
        """
        try:
            closed, out = jax.make_jaxpr(self.run, return_shape=True)(specs)
        except _NOT_KNOWN as e:
            raise ConversionError(
                f"{self.name} depends on values that are known only when it runs: {str(e).splitlines()[0]}"
            ) from e
        except jax.errors.InconclusiveDimensionOperation as e:
            raise ConversionError(
                f"{self.name} needs a size that `dims` leaves open: {str(e).splitlines()[0]}; write _ for it in `dims`, so "
                "that it is the example's"
            ) from e
        except (
            TypeError,
            NameError,
        ) as e:  # a result that is no array, an axis name that is not bound, a mistake in it
            reason = str(e).partition("\n")[0]
            raise ConversionError(
                f"{self.name} cannot be traced: {type(e).__name__}: {reason:.300}"
            ) from e
        for leaf in self.leaves:
            if is_complex(leaf.spec):
                raise ConversionError(
                    f"{self.name}: argument {leaf.name!r} is {leaf.spec.dtype}, which nets and models do not have; pass its "
                    "real and its imaginary part, and join them inside: jax.lax.complex(re, im)"
                )
        if has_complex(closed.jaxpr):
            closed = real_jaxpr(closed, self.name)
        graph = flatten(closed)
        kinds = {str(effect) for effect in closed.effects}
        kinds.update(
            f"{node.name}, {node.source}" for node in graph.nodes if "callback" in node.name
        )
        if kinds:
            raise ConversionError(
                f"{self.name} has effects ({'; '.join(sorted(kinds))}); only values are converted: remove prints and "
                "callbacks"
            )
        lines = dict.fromkeys(node.source for node in graph.nodes if node.name.startswith(_RANDOM))
        if lines:
            raise ConversionError(
                f"{self.name} draws random numbers ({', '.join(lines)}); draw them outside and pass them as an argument, "
                "or put a module with dropout in evaluation: module.eval(), deterministic=True"
            )
        if not graph.outputs:
            raise ConversionError(
                f"{self.name} returns no array; a converted function must have an output"
            )
        return graph, [path_of("output", path) for path, _ in tree_flatten_with_path(out)[0]]


def call_of(fn: Function, args: Sequence[Tree], params: Tree, name: str | None = None) -> Call:
    """The call of a function or module with example arguments, as `from_jax` takes them."""
    own = False
    if not jax.tree_util.treedef_is_leaf(jax.tree.structure(fn)) and callable(fn):
        if params is not None:
            raise ConversionError(f"a {type(fn).__name__} holds its own params; leave `params` out")
        own = True
        params = fn
        fn = _named_after(fn, lambda module, *xs: module(*xs))
    elif hasattr(fn, "apply") and hasattr(fn, "init"):
        if params is None:
            raise ConversionError(
                f"a {type(fn).__name__} is applied to its variables: pass them as `params`"
            )
        module = fn
        fn = _named_after(module, lambda variables, *xs: module.apply(variables, *xs))
    elif not callable(fn):
        raise ConversionError(f"a conversion takes a function, but was given a {type(fn).__name__}")
    name = name or getattr(fn, "__name__", type(fn).__name__).strip("<>")
    names = (
        [""]
        if len(args) == 1 and isinstance(args[0], dict)
        else _names_of(fn, len(args), params is not None)
    )
    trees = [("", params, True)] if params is not None else []
    trees += [(prefix, arg, False) for prefix, arg in zip(names, args)]
    leaves: list[Leaf] = []
    structures = []
    for prefix, tree, is_param in trees:
        entries, structure = tree_flatten_with_path(tree)
        structures.append((structure, len(entries)))
        for path, value in entries:
            full = path_of(prefix, path)
            leaves.append(
                Leaf(full.removesuffix("/value") if own and is_param else full, value, is_param)
            )
    for leaf in leaves:
        _check_argument(leaf, name)

    def run(flat: Values) -> Tree:
        rest = iter(flat)
        out = fn(
            *(
                jax.tree.unflatten(structure, [next(rest) for _ in range(n)])
                for structure, n in structures
            )
        )
        return jax.tree.map(lambda x: {"real": x.real, "imag": x.imag} if is_complex(x) else x, out)

    return Call(name, leaves, run, _closed_over(fn))


def _named_after(module: Function, call: Function) -> Function:
    """`call` with the name and signature of a module."""
    call.__name__ = type(module).__name__
    call.__signature__ = _signature(type(module).__call__)
    return call


def _signature(fn: Function) -> inspect.Signature:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return inspect.Signature()


def _names_of(fn: Function, count: int, has_params: bool) -> list[str]:
    parameters = _signature(fn).parameters.values()
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    plain = plain[1:] if has_params else plain
    return [plain[k] if k < len(plain) else f"arg_{k}" for k in range(count)]


def path_of(prefix: str, path: Sequence[Hashable]) -> str:
    inner = keystr(tuple(path), simple=True, separator="/")
    return "/".join(part for part in (prefix, inner) if part) or "arg"


def _check_argument(leaf: Leaf, name: str) -> None:
    is_array = hasattr(leaf.value, "shape") and hasattr(leaf.value, "dtype")
    if not is_array and not isinstance(leaf.value, (bool, int, float)):
        raise ConversionError(
            f"{name}: argument {leaf.name!r} is a {type(leaf.value).__name__}, not an array; close over settings: "
            "lambda x: fn(x, setting)"
        )
    if isinstance(leaf.value, np.ndarray) and leaf.value.dtype.kind in "OSUMm":
        raise ConversionError(
            f"{name}: argument {leaf.name!r} is an array of {leaf.value.dtype}; it must hold numbers"
        )
    for size in np.shape(leaf.value):
        if not isinstance(size, (int, np.integer)):
            raise ConversionError(
                f"{name}: argument {leaf.name!r} has a dimension {size}; shapes must be known numbers"
            )


def _closed_over(fn: Function) -> Named:
    fn = inspect.unwrap(fn)
    if not inspect.isfunction(fn):
        return []
    try:
        seen = inspect.getclosurevars(fn)
    except ValueError:  # a variable that is not set yet
        return []
    closed_over: Named = []
    for variable, tree in {**seen.globals, **seen.nonlocals}.items():
        if not callable(tree) and not inspect.ismodule(tree):
            closed_over += [
                (path_of(variable, path), value) for path, value in tree_flatten_with_path(tree)[0]
            ]
    return closed_over


def arguments_of(fn: Function, blobs: Mapping[str, Example]) -> list[Tree]:
    """The arguments of a function, assembled from arrays by name; `carry/0`, `carry/1` make a tuple, `p/w` a dict.

    Raises:
        GradientError: an argument that is missing, or a name that is not an argument.

    >>> arguments_of(lambda carry, x: None, {"x": 1.0, "carry/0": 2.0, "carry/1": 3.0})
    [(2.0, 3.0), 1.0]
    """
    names = required(fn)
    trees: dict[str, Tree] = {}
    for path, value in blobs.items():
        first, *rest = path.split("/")
        if first not in names:
            raise GradientError(
                f"the function has no argument {first!r}; it takes {', '.join(names)}{near(first, names)}"
            )
        at = trees
        key = first
        for part in rest:
            at = at.setdefault(key, {})
            key = part
        at[key] = value
    for name in names:
        if name not in trees:
            raise GradientError(
                f"the function's argument {name!r} is not given: --feed {name}=normal[2,3], or --feed {name}/0=normal[2,3] "
                "for the parts of a tuple"
            )
    return [_as_tuples(trees[name]) for name in names]


def required(fn: Function) -> list[str]:
    """The names of the required arguments of a function."""
    parameters = inspect.signature(fn).parameters.values()
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in places and p.default is p.empty]


def _as_tuples(tree: Tree) -> Tree:
    if not isinstance(tree, dict):
        return tree
    if all(key.isdigit() for key in tree):
        return tuple(_as_tuples(tree[key]) for key in sorted(tree, key=int))
    return {key: _as_tuples(value) for key, value in tree.items()}
