"""The weights of a whole PyTorch model, into a flax module of the same layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jrnn import nn
from jrnn.errors import ConversionError, near
from jrnn.interop.cell_weights import Params
from jrnn.interop.torch_weights import load_state_dict

NameMap = Mapping[str, str]

_Turn = Callable[[np.ndarray], np.ndarray]


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _convolution(x: np.ndarray) -> np.ndarray:
    """[out, in, *spatial] -> [*spatial, in, out]."""
    return np.moveaxis(x, (0, 1), (-1, -2))


def _transposed_convolution(x: np.ndarray) -> np.ndarray:
    """[in, out, *spatial] -> [*spatial, in, out], reversed."""
    return np.moveaxis(np.flip(x, tuple(range(2, x.ndim))), (0, 1), (-2, -1))


# By the layer of flax and the name of its variable: the name in PyTorch's layer, and the change of the array. Any other
# variable, such as a weight of jrnn.nn's layers, has the same name and layout in PyTorch.
_Rows = dict[str, tuple[str, _Turn]]
_NORM: _Rows = {"scale": ("weight", _same), "bias": ("bias", _same)}
_LAYERS: dict[type, _Rows] = {
    nnx.Embed: {"embedding": ("weight", _same)},
    nnx.Linear: {"kernel": ("weight", np.transpose), "bias": ("bias", _same)},
    nnx.Conv: {"kernel": ("weight", _convolution), "bias": ("bias", _same)},
    nnx.ConvTranspose: {"kernel": ("weight", _transposed_convolution), "bias": ("bias", _same)},
    nnx.LayerNorm: _NORM,
    nnx.GroupNorm: _NORM,
    nnx.RMSNorm: _NORM,
    nnx.BatchNorm: _NORM | {"mean": ("running_mean", _same), "var": ("running_var", _same)},
}


@dataclass(frozen=True)
class LoadReport:
    """What `load_module` did.

    Attributes:
        loaded: the name of the tensor by the path of the variable that it went to.
        missing: variables without a tensor, which are as they were.
        unused: tensors that went nowhere.
    """

    loaded: dict[str, str]
    missing: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        width = max(map(len, self.loaded), default=0)
        lines = []
        for path, name in self.loaded.items():
            lines.append(f"{path:{width}} <- {name}")
        for path in self.missing:
            lines.append(f"{path} has no tensor")
        for name in self.unused:
            lines.append(f"{name} is not used")
        return "\n".join(lines)


def load_module(
    module: nnx.Module,
    source: Mapping[str, Any] | str | PathLike[str],
    names: NameMap | None = None,
    *,
    prefix: str = "",
    strict: bool = True,
) -> LoadReport:
    """Copies all parameters and statistics of a PyTorch model into a flax module.

    Supports the layers of `jrnn.nn`, and flax's Embed, Linear, Conv, ConvTranspose, and Layer-, Group-, RMS- and BatchNorm.
    Any other variable gets the tensor of its own path. Values are cast to the types of the variables.

    Args:
        module: has the same names as the model, except where `names` says otherwise. The layers of `nnx.List`,
            `nnx.Sequential` and `jrnn.nn.Sequential` are numbered as PyTorch's.
        source, prefix: as in `load_state_dict`; for example `model.state_dict()`.
        names: PyTorch's names by the module's, of layers or variables: {"embed": "embedding", "head": "classifier.2"}.
        strict: raises if a variable has no tensor, or a tensor has no variable. A tensor that equals a used one, such
            as the weight of a tied layer, needs no variable.

    Returns:
        what went where; `print` shows it.

    Raises:
        ConversionError: as of `load_state_dict`; a tensor of another shape; a name in `names` that the module does not have;
            or, if `strict`, what is missing or not used. Then the module is as it was.

    >>> model = nnx.Sequential(nnx.Embed(5, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    >>> state_dict = {"0.weight": np.ones((5, 3)), "head.weight": np.ones((2, 3)), "head.bias": np.zeros(2)}
    >>> print(load_module(model, state_dict, names={"1": "head"}))
    0.embedding <- 0.weight
    1.kernel    <- head.weight
    1.bias      <- head.bias
    """
    tensors = load_state_dict(source, prefix)
    names = dict(names or {})
    variables = list(_variables(module))
    paths = [path for path, *_ in variables]
    for given in names:
        if given not in paths and not any(path.startswith(f"{given}.") for path in paths):
            raise ConversionError(
                f"names: the module has no {given!r}{near(given, paths)}; it has {sorted(paths)}"
            )
    loaded = {}
    expected = {}
    values = []
    for path, own, turn, variable in variables:
        name = _renamed(path, own, names)
        expected[path] = name
        if name in tensors:
            value = turn(tensors[name])
            if value.shape != variable.shape:
                raise ConversionError(
                    f"{path} is {list(variable.shape)}, but {name} is {list(tensors[name].shape)}; the layers differ"
                )
            loaded[path] = name
            values.append((variable, value))
    missing = [path for path in paths if path not in loaded]
    unused = []
    for name in tensors:
        if name not in loaded.values() and not _is_tied(name, tensors, loaded):
            unused.append(name)
    report = LoadReport(loaded, tuple(missing), tuple(unused))
    if strict and (missing or unused):
        raise ConversionError(_incomplete(report, expected, tensors))
    for variable, value in values:
        variable.set_value(jnp.asarray(value, variable.dtype))
    return report


def _variables(module: nnx.Module) -> Iterator[tuple[str, str, _Turn, nnx.Variable[Any]]]:
    """The path of each variable, its path with PyTorch's name, the change of the array, and the variable."""
    every = list(nnx.iter_modules(module))
    # Lists of layers, which have no name in PyTorch.
    lists = set()
    for path, inner in every:
        if isinstance(inner, nnx.Sequential):
            lists.add((*path, "layers"))
        if isinstance(inner, nn.Sequential):
            lists.add((*path, "parts"))
    for path, inner in every:
        rows = _LAYERS.get(type(inner), {})
        parts = []
        for k, part in enumerate(path):
            if tuple(path[: k + 1]) not in lists:
                parts.append(str(part))
        for name, variable in vars(inner).items():
            if (
                isinstance(variable, (nnx.Param, nnx.BatchStat))
                and variable.get_value() is not None
            ):
                theirs, turn = rows.get(name, (name, _same))
                yield ".".join([*parts, name]), ".".join([*parts, theirs]), turn, variable


def _renamed(path: str, own: str, names: NameMap) -> str:
    """PyTorch's name of a variable: from `names`, for it or for the innermost layer around it; otherwise `own`."""
    if path in names:
        return names[path]
    innermost = ""
    for name in names:
        if own.startswith(f"{name}.") and len(name) > len(innermost):
            innermost = name
    if not innermost:
        return own
    return names[innermost] + own.removeprefix(innermost)


def _is_tied(name: str, tensors: Params, loaded: NameMap) -> bool:
    value = tensors[name]
    for other in loaded.values():
        if tensors[other].shape == value.shape and (tensors[other] == value).all():
            return True
    return False


def _incomplete(report: LoadReport, expected: NameMap, tensors: Params) -> str:
    lines = []
    for path in report.missing:
        lines.append(f"{path} needs {expected[path]!r}{near(expected[path], tensors)}")
    for name in report.unused:
        lines.append(f"{name} {list(tensors[name].shape)} is not used")
    return (
        "; ".join(lines)
        + "; give names={path of a layer: PyTorch's name}, or strict=False to load the rest"
    )
