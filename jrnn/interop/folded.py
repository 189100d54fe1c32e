"""Weights that PyTorch stores in parts, because they are normalized or pruned, as the weights that its layers use.

| in PyTorch | parts of `weight` | the weight |
|---|---|---|
| `utils.weight_norm` | `weight_g`, `weight_v` | g v / norm(v) |
| `utils.parametrizations.weight_norm` | `parametrizations.weight.original0`, `.original1` | the same |
| `utils.spectral_norm` | `weight_orig`, `weight_u`, `weight_v` | W / (u^T W v) |
| `utils.parametrizations.spectral_norm` | `parametrizations.weight.original`, `.0._u`, `.0._v` | the same |
| `utils.prune` | `weight_orig`, `weight_mask` | W mask |
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jrnn.errors import ConversionError
from jrnn.interop.cells import Params


def _normalized(g: np.ndarray, v: np.ndarray) -> np.ndarray:
    """g v / norm(v), with the norm over the axes along which g is constant."""
    axes = tuple(k for k in range(v.ndim) if g.ndim == 0 or g.shape[k] == 1)
    wide = v.astype(np.promote_types(v.dtype, np.float32))
    return np.asarray(g * wide / np.sqrt(np.sum(wide * wide, axis=axes, keepdims=True)), v.dtype)


def _is_normalized(g: np.ndarray, v: np.ndarray) -> bool:
    along = [n for n in g.shape if n != 1]
    return v.ndim > 1 and (not g.ndim or (g.ndim == v.ndim and len(along) < 2 and {*along} <= {*v.shape}))


def _by_largest(weight: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """W / (u^T W v): u is along the first axis of W, or along the second if W is of a transposed convolution."""
    axes = (axis for axis, size in enumerate(weight.shape) if size == u.size)
    along = (np.moveaxis(weight, axis, 0).reshape(u.size, -1).astype(np.float64) for axis in axes)
    return np.asarray(weight / max((u @ rows @ v for rows in along), key=abs), weight.dtype)


def _is_spectral(weight: np.ndarray, u: np.ndarray, v: np.ndarray) -> bool:
    return u.ndim == v.ndim == 1 and u.size in weight.shape and u.size * v.size == weight.size


_PARAMETRIZED = "parametrizations."
# The names of the parts, of the weight {0}; which arrays are such parts; and the weight.
_Rule = tuple[tuple[str, ...], Callable[..., bool], Callable[..., np.ndarray]]
_RULES: tuple[_Rule, ...] = (
    (("{}_orig", "{}_u", "{}_v"), _is_spectral, _by_largest),
    (("{}_orig", "{}_mask"), lambda w, mask: mask.shape == w.shape, np.multiply),
    (("{}_g", "{}_v"), _is_normalized, _normalized),
    (("{}.original0", "{}.original1"), _is_normalized, _normalized),
    (("{}.original", "{}.0._u", "{}.0._v"), _is_spectral, _by_largest),
)


def folded(params: Params) -> Params:
    """The parameters with weights in place of their parts.

    Raises:
        ConversionError: for a weight that is parametrized in another manner.

    >>> folded({"w_g": np.ones((2, 1)), "w_v": np.array([[3.0, 4.0], [0.0, 2.0]]), "b": np.ones(2)})["w"].tolist()
    [[0.6, 0.8], [0.0, 1.0]]
    """
    whole = dict(params)
    for names, applies, weight_of in _RULES:
        for first in [name for name in whole if name.endswith(names[0][2:])]:
            base = first.removesuffix(names[0][2:])
            parts = [name.format(base) for name in names]
            if base in whole or not all(name in whole for name in parts):
                continue
            arrays = [whole[name] for name in parts]
            if applies(*arrays):
                whole[base.replace(_PARAMETRIZED, "")] = weight_of(*arrays)
                for name in parts:
                    del whole[name]
    for name in whole:
        if _PARAMETRIZED in name:
            module, _, rest = name.rpartition(_PARAMETRIZED)
            weight = rest.partition(".")[0]
            raise ConversionError(
                f"{name}: {module}{weight} is parametrized by neither weight_norm nor spectral_norm; in PyTorch, call "
                f"torch.nn.utils.parametrize.remove_parametrizations(module, {weight!r}) and save the state dict again"
            )
    return whole
