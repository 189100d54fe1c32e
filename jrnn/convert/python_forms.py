"""How one equation of a jaxpr is written in Python: a table from primitives to expressions of jnp and lax.

An expression is a format string whose `{0}`, `{1}`, ... are the operands. A primitive that is not in the table becomes a
call of its `bind`, with the parameters spelled out.
"""

import enum
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jrnn.errors import ConversionError
from jrnn.executor.primitives import ELEMENTWISE

INFIX = {
    "add": "+", "add_any": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
# fmt: off
_JNP = {"max": "maximum", "min": "minimum"} | {n: n for n in (
    "abs", "cbrt", "ceil", "cos", "cosh", "exp", "exp2", "expm1", "floor", "log", "log1p", "sign", "sin", "sinh", "sqrt",
    "square", "tan", "tanh",
)}
# Functions of lax that take the primitive's operands, and its parameters as keywords.
_AS_IN_LAX = {
    "clamp", "conv_general_dilated", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "gather", "pad", "rev",
    "round", "scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub", "stop_gradient", "top_k",
}
# fmt: on
_REDUCTIONS = {"sum": "sum", "prod": "prod", "max": "max", "min": "min", "and": "all", "or": "any"}
_HOMES = {"lax": lax, "lax.linalg": lax.linalg}
IDENTITIES = {"copy", "copy_p", "name", "optimization_barrier", "pvary"}


def form_of(eqn: Any) -> str:
    """The expression of an equation without control flow.

    Raises:
        ConversionError: a parameter of an unknown primitive that cannot be spelled out.
    """
    name, p = eqn.primitive.name, eqn.params
    operands = [f"{{{k}}}" for k in range(len(eqn.invars))]
    rule = _RULES.get(name)
    if rule is not None and (found := rule(eqn, p)) is not None:
        return found
    if name in INFIX:
        return f"{{0}} {INFIX[name]} {{1}}"
    if name in _JNP and p.get("accuracy") is None:
        return f"jnp.{_JNP[name]}({', '.join(operands)})"
    if name in _AS_IN_LAX:
        function = name.replace("-", "_")
        known = inspect.signature(getattr(lax, function)).parameters
        return _call(f"lax.{function}", operands, {k: v for k, v in p.items() if k in known})
    if name in ELEMENTWISE and hasattr(lax, name) and all(v is None for v in p.values()):
        return f"lax.{name}({', '.join(operands)})"
    home = next((h for h in ("lax", "lax.linalg") if hasattr(_HOMES[h], f"{name}_p")), None)
    if home is None:
        raise ConversionError(f"primitive {name!r} has no public name in JAX, so that it cannot be written as Python")
    return f"{home}.{name}_p.bind({', '.join([*operands, *(f'{k}={show(v)}' for k, v in p.items())])})"


def _call(function: str, operands: Sequence[str], keywords: Mapping[str, Any]) -> str:
    given = [f"{k}={show(v)}" for k, v in keywords.items() if v is not None]
    return f"{function}({', '.join([*operands, *given])})"


def show(value: Any) -> str:
    """A parameter as Python.

    >>> show((1, np.dtype("float32"), lax.Precision.HIGHEST))
    '(1, jnp.float32, lax.Precision.HIGHEST)'
    """
    if isinstance(value, enum.Enum):
        return f"lax.{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, np.dtype):
        return f"jnp.{value.name.replace('bool', 'bool_')}"
    if isinstance(value, (float, np.generic)):
        return number(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value)
        return f"lax.{type(value).__name__}({', '.join(f'{k}={show(v)}' for k, v in fields)})"
    if isinstance(value, (tuple, list)):
        return names_tuple(map(show, value))
    if isinstance(value, jax.lax.ConvDimensionNumbers):
        return f"lax.ConvDimensionNumbers({show(value.lhs_spec)}, {show(value.rhs_spec)}, {show(value.out_spec)})"
    raise ConversionError(f"a parameter is a {type(value).__name__}, which cannot be written as Python")


def names_tuple(names: Iterable[str]) -> str:
    """
    >>> names_tuple(["x"]), names_tuple(["x", "y"])
    ('(x,)', '(x, y)')
    """
    names = list(names)
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def operands_tuple(start: int, stop: int) -> str:
    """The operands `start` to `stop` as a tuple, in a format string."""
    return names_tuple(f"{{{k}}}" for k in range(start, stop))


def number(value: Any) -> str:
    """A number, as the shortest text that is read back as the same.

    >>> number(np.float32(0.1)), number(float("-inf"))
    ('0.1', '-jnp.inf')
    """
    value = np.asarray(value)[()]
    if isinstance(value, (np.floating, float)) and not np.isfinite(value):
        return {"inf": "jnp.inf", "-inf": "-jnp.inf"}.get(str(value), "jnp.nan")
    return str(value)


def typed(value: Any, dtype: Any) -> str:
    """A literal with its type, for where nothing else would give it one."""
    return f"{show(np.dtype(dtype))}({number(value)})"


def _reshape(eqn: Any, p: Mapping[str, Any]) -> str:
    return f"{{0}}.reshape({show(_shape(eqn))})"


def _shape(eqn: Any) -> tuple[int, ...]:
    return tuple(eqn.outvars[0].aval.shape)


def _zeros(eqn: Any, p: Mapping[str, Any]) -> str:
    return f"jnp.zeros({show(_shape(eqn))}, {show(eqn.outvars[0].aval.dtype)})"


def _broadcast(eqn: Any, p: Mapping[str, Any]) -> str:
    shape, old, dims = _shape(eqn), eqn.invars[0].aval.shape, p.get("broadcast_dimensions")
    last = tuple(range(len(shape) - len(old), len(shape)))
    dims = last if dims is None else tuple(dims)
    if not old:
        return f"jnp.full({show(shape)}, {{0}})"
    placed = tuple(old[dims.index(k)] if k in dims else 1 for k in range(len(shape)))
    if placed == shape:
        return f"{{0}}.reshape({show(shape)})"
    return f"jnp.broadcast_to({{0}}{'' if dims == last else f'.reshape({show(placed)})'}, {show(shape)})"


def _dot(eqn: Any, p: Mapping[str, Any]) -> str:
    a, b = (v.aval for v in eqn.invars)
    natural = p["preferred_element_type"] in (None, a.dtype) and a.dtype == b.dtype and p["precision"] is None
    if natural and (a.ndim, b.ndim) == (2, 2) and p["dimension_numbers"] == (((1,), (0,)), ((), ())):
        return "{0} @ {1}"
    return _call("lax.dot_general", ["{0}", "{1}"], {k: v for k, v in p.items() if k != "out_sharding"})


def _slice(eqn: Any, p: Mapping[str, Any]) -> str:
    parts = []
    steps = p["strides"] or (1,) * len(p["start_indices"])
    for start, limit, step, size in zip(p["start_indices"], p["limit_indices"], steps, eqn.invars[0].aval.shape):
        text = f"{start or ''}:{limit if limit != size else ''}"
        parts.append(text if step == 1 else f"{text}:{step}")
    return f"{{0}}[{', '.join(parts)}]"


def _reduce(name: str) -> Callable[[Any, Mapping[str, Any]], str | None]:
    def rule(eqn: Any, p: Mapping[str, Any]) -> str | None:
        kind = eqn.invars[0].aval.dtype.kind
        if (name in ("sum", "prod") and kind != "f") or (name in ("and", "or") and kind != "b"):
            return None
        axes = tuple(p["axes"])
        return f"{{0}}.{_REDUCTIONS[name]}({show(axes) if len(axes) < eqn.invars[0].aval.ndim else ''})"

    return rule


def _keyed(text: str) -> Callable[[Any, Mapping[str, Any]], str]:
    """A function of one key."""

    def rule(eqn: Any, p: Mapping[str, Any]) -> str:
        if eqn.invars[0].aval.shape:
            raise ConversionError("random numbers of many keys at once cannot be written as Python")
        return text.format("{0}", "{1}", shape=show(tuple(p.get("shape", ()))), bits=p.get("bit_width"))

    return rule


def _several(text: str) -> Callable[[Any, Mapping[str, Any]], str]:
    """A function that takes a tuple of all operands; `text` has the parameters in it by name."""

    def rule(eqn: Any, p: Mapping[str, Any]) -> str:
        return text.format(operands_tuple(0, len(eqn.invars)), **{k: show(v) for k, v in p.items()})

    return rule


def _argument(name: str) -> Callable[[Any, Mapping[str, Any]], str]:
    return lambda eqn, p: f"lax.{name}({{0}}, {p['axes'][0]}, {show(np.dtype(p['index_dtype']))})"


_RULES: dict[str, Callable[[Any, Mapping[str, Any]], str | None]] = {
    "argmax": _argument("argmax"),
    "argmin": _argument("argmin"),
    "broadcast_in_dim": _broadcast,
    "broadcast_to": _broadcast,
    "concatenate": _several("jnp.concatenate({0}, axis={dimension})"),
    "convert_element_type": lambda eqn, p: f"{{0}}.astype({show(np.dtype(p['new_dtype']))})",
    "bitcast_convert_type": lambda eqn, p: f"lax.bitcast_convert_type({{0}}, {show(np.dtype(p['new_dtype']))})",
    "div": lambda eqn, p: "{0} / {1}" if eqn.outvars[0].aval.dtype.kind == "f" else None,
    "dot_general": _dot,
    "dynamic_slice": lambda eqn, p: (
        f"lax.dynamic_slice({{0}}, {operands_tuple(1, len(eqn.invars))}, {show(p['slice_sizes'])})"
    ),
    "dynamic_update_slice": lambda eqn, p: (
        f"lax.dynamic_update_slice({{0}}, {{1}}, {operands_tuple(2, len(eqn.invars))})"
    ),
    "empty": _zeros,
    "empty2": _zeros,
    "expand_dims": _reshape,
    "integer_pow": lambda eqn, p: f"{{0}} ** {p['y']}",
    "iota": lambda eqn, p: (
        f"lax.broadcasted_iota({show(np.dtype(p['dtype']))}, {show(tuple(p['shape']))}, {p['dimension']})"
        if not eqn.invars
        else None
    ),
    "logistic": lambda eqn, p: "jax.nn.sigmoid({0})" if p.get("accuracy") is None else None,
    "neg": lambda eqn, p: "-{0}",
    "not": lambda eqn, p: "~{0}",
    "platform_index": lambda eqn, p: (
        f"next(k for k, p in enumerate({show(p['platforms'])}) if p is None or jax.default_backend() in p)"
    ),
    "random_bits": _keyed("jax.random.bits({0}, {shape}, jnp.uint{bits})"),
    "random_fold_in": _keyed("jax.random.fold_in({0}, {1})"),
    "random_seed": lambda eqn, p: None if eqn.invars[0].aval.shape else "jax.random.key({0})",
    "random_split": _keyed("jax.random.split({0}, {shape})"),
    "random_unwrap": lambda eqn, p: "jax.random.key_data({0})",
    "random_wrap": lambda eqn, p: "jax.random.wrap_key_data({0})",
    "reshape": lambda eqn, p: None if p["dimensions"] else _reshape(eqn, p),
    "select_n": lambda eqn, p: (
        "jnp.where({0}, {2}, {1})" if eqn.invars[0].aval.dtype == bool else _several("lax.select_n(*{0})")(eqn, p)
    ),
    "slice": _slice,
    "sort": _several("lax.sort({0}, dimension={dimension}, is_stable={is_stable}, num_keys={num_keys})"),
    "split": lambda eqn, p: f"lax.split({{0}}, {show(tuple(map(int, p['sizes'])))}, axis={p['axis']})",
    "squeeze": _reshape,
    "stack": _several("jnp.stack({0}, axis={axis})"),
    "tile": lambda eqn, p: f"jnp.tile({{0}}, {show(tuple(p['reps']))})",
    "transpose": lambda eqn, p: (
        "{0}.T" if tuple(p["permutation"]) == (1, 0) else f"{{0}}.transpose({show(tuple(p['permutation']))})"
    ),
    "unstack": lambda eqn, p: f"jnp.unstack({{0}}, axis={p['axis']})",
    **{f"reduce_{name}": _reduce(name) for name in _REDUCTIONS},
}
