"""The parameters of a recurrent stack: PyTorch's names, shapes and initial values.

Shapes: D input, H hidden, P output of a step (the projection's size, or H without one), G gates.

The parameters are a flat dict of arrays. Layer k, direction d ("" or "_reverse") has

    weight_ih_l{k}{d} [G H, D or P * directions]    weight_hh_l{k}{d} [G H, P]
    bias_ih_l{k}{d}   [G H]                         bias_hh_l{k}{d}   [G H]      (bias=True)
    weight_hr_l{k}{d} [P, H]                                                     (proj_size > 0)
    norm_ih_l{k}{d}   [G H]                         norm_hh_l{k}{d}   [G H]      (layer_norm=True)

and the stack of L layers has, in the order of PyTorch's states,

    h_0 [L directions, P]    c_0 [L directions, H] of an LSTM                    (learned_state=True)

PyTorch has all of them except `norm_*`, `h_0` and `c_0`. A cell has the parameters of one layer, without the suffix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jrnn.errors import LayerError, near
from jrnn.nn.checks import Shape, check_bools, check_integer
from jrnn.nn.units import GRU, LSTM, RNN_TANH, Unit

Params = Mapping[str, Any]  # arrays by PyTorch's names
Arrays = dict[str, Array]  # the same, to be changed
Shapes = dict[str, Shape]  # by the names of parameters

LEARNED_STATES = ("h_0", "c_0")


class Weights(NamedTuple):
    """The parameters of one direction of one layer; None for parameters that it lacks."""

    weight_ih: Any
    weight_hh: Any
    bias_ih: Any = None
    bias_hh: Any = None
    weight_hr: Any = None
    norm_ih: Any = None
    norm_hh: Any = None


@dataclass(frozen=True)
class Layout:
    """The structure of a stack, which determines the name and shape of every parameter.

    >>> from jrnn.nn.units import LSTM
    >>> layout = Layout(LSTM, input_size=3, hidden_size=4, bidirectional=True, bias=False)
    >>> for name, shape in layout.shapes().items():
    ...     print(name, shape)
    weight_ih_l0 (16, 3)
    weight_hh_l0 (16, 4)
    weight_ih_l0_reverse (16, 3)
    weight_hh_l0_reverse (16, 4)
    """

    unit: Unit
    input_size: int
    hidden_size: int
    num_layers: int = 1
    bias: bool = True
    bidirectional: bool = False
    proj_size: int = 0
    layer_norm: bool = False
    learned_state: bool = False

    def __post_init__(self) -> None:
        flags = ("bias", "bidirectional", "layer_norm", "learned_state")
        check_bools(f"{self.unit.name}: ", self, *flags)
        for name, least in (
            ("input_size", 1),
            ("hidden_size", 1),
            ("num_layers", 1),
            ("proj_size", 0),
        ):
            value = check_integer(f"{self.unit.name}: {name}", getattr(self, name), least)
            object.__setattr__(self, name, value)
        if self.proj_size and not self.unit.projects:
            raise LayerError(
                f"{self.unit.name}: proj_size is {self.proj_size}, but only an LSTM has a projection"
            )
        if self.proj_size >= self.hidden_size:
            raise LayerError(
                f"{self.unit.name}: proj_size is {self.proj_size}; it must be smaller than hidden_size, "
                f"{self.hidden_size} (0 for no projection)"
            )

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def output_size(self) -> int:
        """P, the size of one direction's output and hidden state."""
        return self.proj_size or self.hidden_size

    def suffixes(self) -> list[str]:
        """The suffix of each direction of each layer: `_l0`, `_l0_reverse`, `_l1`, ... The states have this order too."""
        suffixes = []
        for layer in range(self.num_layers):
            suffixes.append(f"_l{layer}")
            if self.bidirectional:
                suffixes.append(f"_l{layer}_reverse")
        return suffixes

    def shapes(self) -> Shapes:
        """The shape of every parameter, in PyTorch's order."""
        shapes: Shapes = {}
        for k, suffix in enumerate(self.suffixes()):
            width = self.input_size if k < self.directions else self.output_size * self.directions
            for name, shape in self.cell_shapes(width).items():
                shapes[name + suffix] = shape
        if self.learned_state:
            shapes |= zip(LEARNED_STATES, self.state_shapes())
        return shapes

    def state_shapes(self) -> list[tuple[int, int]]:
        """The shape of each state of one sequence: h [L K, P], and c [L K, H] of an LSTM."""
        rows = self.num_layers * self.directions
        sizes = (self.output_size, self.hidden_size)[: self.unit.states]
        return [(rows, size) for size in sizes]

    def cell_shapes(self, width: int) -> Shapes:
        """The shape of every parameter, without suffixes, of one direction of a layer whose input has `width` features."""
        rows = self.unit.gates * self.hidden_size
        shapes: Shapes = {
            "weight_ih": (rows, width),
            "weight_hh": (rows, self.output_size),
        }
        if self.bias:
            shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
        if self.proj_size:
            shapes["weight_hr"] = (self.proj_size, self.hidden_size)
        if self.layer_norm:
            shapes |= {"norm_ih": (rows,), "norm_hh": (rows,)}
        return shapes

    def init(self, key: Array, dtype: DTypeLike = jnp.float32) -> Arrays:
        """Initial values, uniform in [-1/sqrt(H), 1/sqrt(H)] as in PyTorch; `norm_*` are 1, `h_0` and `c_0` 0.

        >>> from jrnn.nn.units import GRU
        >>> params = Layout(GRU, input_size=2, hidden_size=4).init(jax.random.key(0))
        >>> bool(abs(params["weight_hh_l0"]).max() <= 0.5)
        True
        """
        return init(self.shapes(), self.hidden_size, key, dtype)

    def split(self, params: Params) -> list[Weights]:
        """The parameters of each direction of each layer, in the order of `suffixes`."""
        fields = list(self.cell_shapes(1))
        weights = []
        for suffix in self.suffixes():
            arrays = {field: jnp.asarray(params[field + suffix]) for field in fields}
            weights.append(Weights(**arrays))
        return weights


def init(
    shapes: Shapes,
    hidden_size: int,
    key: Array,
    dtype: DTypeLike = jnp.float32,
) -> Arrays:
    """As `Layout.init`, for parameters of these shapes."""
    bound = 1.0 / math.sqrt(hidden_size)
    drawn = [name for name in shapes if name not in LEARNED_STATES]
    keys = dict(zip(drawn, jax.random.split(key, len(drawn))))
    params = {}
    for name, shape in shapes.items():
        if name in LEARNED_STATES:
            params[name] = jnp.zeros(shape, dtype)
        elif name.startswith("norm_"):
            params[name] = jnp.ones(shape, dtype)
        else:
            params[name] = jax.random.uniform(keys[name], shape, dtype, -bound, bound)
    return params


def layout_of(unit: Unit, params: Params) -> Layout:
    """The layout of a stack, from the names and shapes of its parameters.

    Raises:
        LayerError: if a parameter is missing, unknown, or of the wrong shape.

    >>> from jrnn.nn.units import GRU
    >>> layout_of(GRU, {"weight_ih_l0": jnp.zeros((12, 3)), "weight_hh_l0": jnp.zeros((9, 4))})
    Traceback (most recent call last):
    jrnn.errors.LayerError: GRU: weight_hh_l0 is [9, 4] but must be [12, 4]
    """
    layers = []
    for name in params:
        if name.startswith("weight_ih_l") and not name.endswith("_reverse"):
            layers.append(name)
    layout = _layout(
        unit,
        params,
        "_l0",
        num_layers=len(layers),
        bidirectional="weight_ih_l0_reverse" in params,
        proj_size=jnp.shape(params["weight_hr_l0"])[0] if "weight_hr_l0" in params else 0,
        learned_state="h_0" in params,
    )
    check_params(unit.name, params, layout.shapes())
    return layout


def cell_layout_of(unit: Unit, params: Params) -> Layout:
    """As `layout_of`, for the parameters of a cell (`weight_ih`, `weight_hh`, ...)."""
    layout = _layout(unit, params, "")
    check_params(unit.name, params, layout.cell_shapes(layout.input_size))
    return layout


def _layout(unit: Unit, params: Params, suffix: str, **more: Any) -> Layout:
    """The layout whose first layer has the parameters with this suffix."""
    name = f"weight_ih{suffix}"
    if name not in params:
        raise LayerError(
            f"{unit.name}: the parameters lack {name!r}{near(name, params)}; they are {sorted(params)}"
        )
    shape = jnp.shape(params[name])
    if len(shape) != 2:
        raise LayerError(f"{unit.name}: {name} is {list(shape)} but must be a matrix")
    hidden, rest = divmod(shape[0], unit.gates)
    if rest or not hidden:
        raise LayerError(
            f"{unit.name}: {name} is {list(shape)}; its rows must be {unit.gates} times the hidden size, "
            f"one block for each of the gates {', '.join(unit.gate_names)}"
        )
    bias, layer_norm = (f"{kind}_ih{suffix}" in params for kind in ("bias", "norm"))
    return Layout(unit, shape[1], hidden, bias=bias, layer_norm=layer_norm, **more)


def check_params(where: str, params: Params, shapes: Shapes) -> None:
    """Raises a LayerError unless `params` have exactly the names and shapes in `shapes`."""
    for name, shape in shapes.items():
        if name not in params:
            within = next((n.removesuffix(name) for n in params if n.endswith(f".{name}")), "")
            hint = f"; pass prefix={within!r} to load_state_dict" if within else near(name, params)
            raise LayerError(
                f"{where}: the parameters lack {name!r} {list(shape)}{_owner(params) or hint}"
            )
        if jnp.shape(params[name]) != shape:
            given = list(jnp.shape(params[name]))
            raise LayerError(
                f"{where}: {name} is {given} but must be {list(shape)}{_owner(params)}"
            )
    for name in params:
        if name not in shapes:
            hint = _owner(params) or f"{near(name, shapes)}; known are {list(shapes)}"
            raise LayerError(f"{where}: the parameter {name!r} has no place here{hint}")


def _owner(params: Params) -> str:
    """Returns the layer that has exactly these parameters as the end of a message, or ""."""
    shapes = {name: jnp.shape(value) for name, value in params.items()}
    rows, width = (*shapes.get("weight_ih_l0", ()), 0, 0)[:2]
    for unit in (RNN_TANH, GRU, LSTM):
        options = {
            "num_layers": sum(f"weight_ih_l{k}" in shapes for k in range(len(shapes))),
            "bias": "bias_ih_l0" in shapes,
            "bidirectional": "weight_ih_l0_reverse" in shapes,
        }
        hidden, rest = divmod(rows, unit.gates)
        if (
            width
            and hidden
            and not rest
            and Layout(unit, width, hidden, **options).shapes() == shapes
        ):
            usual = {"num_layers": 1, "bias": True, "bidirectional": False}
            other = "".join(
                f", {name}={value}" for name, value in options.items() if value != usual[name]
            )
            return f"; these are the parameters of {unit.name}({width}, {hidden}{other})"
    return ""
