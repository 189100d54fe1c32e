"""Python source: a table from primitives to expressions of jnp and lax, and lines of code that hold expressions.

An expression is a format string whose `{0}`, `{1}`, ... are the operands. A primitive that is not in the table becomes a
call of its `bind`, with its parameters.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from jrnn.errors import ConversionError
from jrnn.jaxprs import Eqn
from jrnn.jaxprs.primitives import is_kind, where

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
IDENTITIES = where(lambda row: row.copies and not row.stops)


def form_of(eqn: Eqn) -> str:
    """The expression of an equation without control flow.

    Raises:
        ConversionError: a parameter of a primitive that cannot be written as Python.
    """
    name = eqn.primitive.name
    p = eqn.params
    operands = [f"{{{k}}}" for k in range(len(eqn.invars))]
    form = _FORMS.get(name)
    form = form(eqn) if callable(form) else form
    if form is not None:
        return _filled(form, eqn)
    if name in INFIX:
        return f"{{0}} {INFIX[name]} {{1}}"
    if name in _JNP and p.get("accuracy") is None:
        return f"jnp.{_JNP[name]}({', '.join(operands)})"
    if name in _AS_IN_LAX:
        function = name.replace("-", "_")
        known = inspect.signature(getattr(lax, function)).parameters
        given = [f"{k}={show(v)}" for k, v in p.items() if k in known and v is not None]
        return f"lax.{function}({', '.join([*operands, *given])})"
    if is_kind(eqn, "elementwise") and hasattr(lax, name) and all(v is None for v in p.values()):
        return f"lax.{name}({', '.join(operands)})"
    home = next((h for h in _HOMES if hasattr(_HOMES[h], f"{name}_p")), None)
    if home is None:
        raise ConversionError(
            f"primitive {name!r} has no public name in JAX, so it cannot be written as Python"
        )
    return (
        f"{home}.{name}_p.bind({', '.join([*operands, *(f'{k}={show(v)}' for k, v in p.items())])})"
    )


def _filled(form: str, eqn: Eqn) -> str:
    """Fills the fields of a form: parameters by name, shape and dtype of the result, tuples of the operands from k on."""
    fields = {k: show(v) for k, v in eqn.params.items() if f"{{{k}}}" in form}
    for k in range(3):
        fields[f"from_{k}"] = operands_tuple(k, len(eqn.invars))
    if "{result_" in form:
        out = eqn.outvars[0].aval
        fields |= {"result_shape": show(tuple(out.shape)), "result_dtype": show(out.dtype)}
    return form.format("{0}", "{1}", "{2}", **fields)


def literal(text: str) -> str:
    r"""Any text as a Python literal of one line, whatever quotes and control characters it has.

    >>> print(literal("''';import os"), literal("\n"))
    "''';import os" '\n'
    """
    quoted = repr(str(text))
    assert ast.literal_eval(quoted) == text
    return quoted


def show(value: Any) -> str:
    """A parameter as Python, in a format string.

    >>> show((1, np.dtype("float32"), lax.Precision.HIGHEST))
    '(1, jnp.float32, lax.Precision.HIGHEST)'
    """
    if isinstance(value, enum.Enum):
        return f"lax.{type(value).__name__}.{value.name}"
    if isinstance(value, str):
        return literal(value).replace("{", "{{").replace("}", "}}")
    if value is None or isinstance(value, (bool, int)):
        return repr(value)
    if isinstance(value, (np.dtype, type)):
        return f"jnp.{np.dtype(value).name.replace('bool', 'bool_')}"
    if isinstance(value, (float, np.generic)):
        return number(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = zip(value._fields, value)
        return f"lax.{type(value).__name__}({', '.join(f'{k}={show(v)}' for k, v in fields)})"
    if isinstance(value, (tuple, list)):
        return names_tuple(map(show, value))
    if isinstance(value, jax.lax.ConvDimensionNumbers):
        return f"lax.ConvDimensionNumbers({show(value.lhs_spec)}, {show(value.rhs_spec)}, {show(value.out_spec)})"
    raise ConversionError(
        f"a parameter is a {type(value).__name__}, which cannot be written as Python"
    )


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
    """A literal with its type."""
    return f"{show(np.dtype(dtype))}({number(value)})"


def _argument(eqn: Eqn) -> str:
    return f"lax.{eqn.primitive.name}({{0}}, {eqn.params['axes'][0]}, {{index_dtype}})"


def _broadcast(eqn: Eqn) -> str:
    shape = tuple(eqn.outvars[0].aval.shape)
    old = eqn.invars[0].aval.shape
    dims = eqn.params.get("broadcast_dimensions")
    last = tuple(range(len(shape) - len(old), len(shape)))
    dims = last if dims is None else tuple(dims)
    if not old:
        return "jnp.full({result_shape}, {0})"
    placed = tuple(old[dims.index(k)] if k in dims else 1 for k in range(len(shape)))
    if placed == shape:
        return _RESHAPE
    return f"jnp.broadcast_to({{0}}{'' if dims == last else f'.reshape({show(placed)})'}, {{result_shape}})"


def _dot(eqn: Eqn) -> str:
    a, b = (v.aval for v in eqn.invars)
    p = eqn.params
    natural = (
        p["preferred_element_type"] in (None, a.dtype)
        and a.dtype == b.dtype
        and p["precision"] is None
    )
    if (
        natural
        and (a.ndim, b.ndim) == (2, 2)
        and p["dimension_numbers"] == (((1,), (0,)), ((), ()))
    ):
        return "{0} @ {1}"
    given = [f"{k}={{{k}}}" for k, v in p.items() if v is not None and k != "out_sharding"]
    return f"lax.dot_general({', '.join(['{0}', '{1}', *given])})"


def _slice(eqn: Eqn) -> str:
    p = eqn.params
    parts = []
    steps = p["strides"] or (1,) * len(p["start_indices"])
    for start, limit, step, size in zip(
        p["start_indices"], p["limit_indices"], steps, eqn.invars[0].aval.shape
    ):
        text = f"{start or ''}:{limit if limit != size else ''}"
        parts.append(text if step == 1 else f"{text}:{step}")
    return f"{{0}}[{', '.join(parts)}]"


def _reduce(eqn: Eqn) -> str | None:
    name = eqn.primitive.name.removeprefix("reduce_")
    operand = eqn.invars[0].aval
    axes = tuple(eqn.params["axes"])
    if name not in ("max", "min") and operand.dtype.kind != ("b" if name in ("and", "or") else "f"):
        return None
    return f"{{0}}.{_REDUCTIONS[name]}({show(axes) if len(axes) < operand.ndim else ''})"


def _of_one_key(form: str) -> Callable[[Any], str]:
    def rule(eqn: Eqn) -> str:
        if eqn.invars[0].aval.shape:
            raise ConversionError(
                "random numbers of several keys at once cannot be written as Python"
            )
        return form

    return rule


_RESHAPE = "{0}.reshape({result_shape})"
# A form, or a function of the equation that returns one. None: the form of a primitive that is not in the table.
_FORMS: Mapping[str, str | Callable[[Any], str | None]] = {
    "argmax": _argument,
    "argmin": _argument,
    "bitcast_convert_type": "lax.bitcast_convert_type({0}, {new_dtype})",
    "broadcast_in_dim": _broadcast,
    "broadcast_to": _broadcast,
    "concatenate": "jnp.concatenate({from_0}, axis={dimension})",
    "convert_element_type": "{0}.astype({new_dtype})",
    "div": lambda eqn: "{0} / {1}" if eqn.outvars[0].aval.dtype.kind == "f" else None,
    "dot_general": _dot,
    "dynamic_slice": "lax.dynamic_slice({0}, {from_1}, {slice_sizes})",
    "dynamic_update_slice": "lax.dynamic_update_slice({0}, {1}, {from_2})",
    "empty": "jnp.zeros({result_shape}, {result_dtype})",
    "empty2": "jnp.zeros({result_shape}, {result_dtype})",
    "integer_pow": "{0} ** {y}",
    "iota": "lax.broadcasted_iota({dtype}, {shape}, {dimension})",
    "logistic": lambda eqn: "jax.nn.sigmoid({0})" if eqn.params.get("accuracy") is None else None,
    "neg": "-{0}",
    "not": "~{0}",
    "platform_index": "next(k for k, p in enumerate({platforms}) if p is None or jax.default_backend() in p)",
    "random_bits": _of_one_key("jax.random.bits({0}, {shape}, jnp.uint{bit_width})"),
    "random_fold_in": _of_one_key("jax.random.fold_in({0}, {1})"),
    "random_seed": lambda eqn: None if eqn.invars[0].aval.shape else "jax.random.key({0})",
    "random_split": _of_one_key("jax.random.split({0}, {shape})"),
    "random_unwrap": "jax.random.key_data({0})",
    "random_wrap": "jax.random.wrap_key_data({0})",
    "reshape": lambda eqn: None if eqn.params["dimensions"] else _RESHAPE,
    "select_n": lambda eqn: (
        "jnp.where({0}, {2}, {1})"
        if eqn.invars[0].aval.dtype == bool
        else "lax.select_n(*{from_0})"
    ),
    "slice": _slice,
    "sort": "lax.sort({from_0}, dimension={dimension}, is_stable={is_stable}, num_keys={num_keys})",
    "split": "lax.split({0}, {sizes}, axis={axis})",
    "squeeze": _RESHAPE,
    "stack": "jnp.stack({from_0}, axis={axis})",
    "tile": "jnp.tile({0}, {reps})",
    "transpose": lambda eqn: (
        "{0}.T" if tuple(eqn.params["permutation"]) == (1, 0) else "{0}.transpose({permutation})"
    ),
    "unstack": "jnp.unstack({0}, axis={axis})",
    **{f"reduce_{name}": _reduce for name in _REDUCTIONS},
}


# Lines ----------------------------------------------------------------------------------------------------------------

_INLINE = 60  # most characters of an expression that is written where it is used


class Constant(NamedTuple):
    """A number that is written where it is used."""

    value: Any
    dtype: Any


Operand = Any  # str, a name | Constant


@dataclass(frozen=True)
class Line:
    """`shown = text`, where `{0}`, `{1}`, ... in the text are the operands. With a body, the definition of a function."""

    targets: tuple[str, ...]
    text: str
    operands: tuple[Operand, ...] = ()
    shown: str = ""
    body: tuple[Line, ...] | None = None


def live_lines(lines: Iterable[Line], wanted: set[str]) -> tuple[list[Line], set[str]]:
    """The lines that are needed for the names wanted and for returns, and the names that they read from outside."""
    kept = []
    wanted = set(wanted)
    for line in reversed(list(lines)):
        if line.targets and not wanted.intersection(line.targets):
            continue
        wanted -= set(line.targets)
        wanted.update(x for x in line.operands if isinstance(x, str))
        if line.body is not None:
            body, free = live_lines(line.body, set())
            line = replace(line, body=tuple(body))
            wanted |= free
        kept.append(line)
    return kept[::-1], wanted


def uses_of(lines: Iterable[Line]) -> Counter[str]:
    """How often each name is read; a read in a nested function counts twice, so that it is not inlined there."""
    uses: Counter[str] = Counter()
    for line in lines:
        uses.update(x for x in line.operands if isinstance(x, str))
        if line.body is not None:
            inner = uses_of(line.body)
            targets = {t for at in line.body for t in at.targets}
            uses.update({n: count + (n not in targets) for n, count in inner.items()})
    return uses


def render(lines: Iterable[Line], uses: Mapping[str, int], depth: int) -> Iterator[str]:
    """Python lines; a short expression that is used once is written where it is used."""
    pending: dict[str, str] = {}
    indent = "    " * depth
    for line in lines:
        if line.body is not None:
            yield ""
            yield indent + line.text
            yield from render(line.body, uses, depth + 1)
            yield ""
            continue
        text = line.text.format(*(_shown(x, pending, line.text) for x in line.operands))
        if not line.targets:
            yield indent + text
        elif not line.shown and uses[line.targets[0]] == 1 and len(text) <= _INLINE:
            pending[line.targets[0]] = text
        else:
            yield f"{indent}{line.shown or line.targets[0]} = {text}"


def _shown(operand: Operand, pending: Mapping[str, str], text: str) -> str:
    if isinstance(operand, Constant):
        return typed(operand.value, operand.dtype)
    text_of = pending.get(operand, operand)
    binds = text.startswith(("{0}", "-", "~")) or "({0}.reshape" in text
    if binds and _is_loose(text_of):
        return f"({text_of})"
    return re.sub(r"\.reshape\(\([\d, ]*\)\)$", "", text_of) if "{0}.reshape(" in text else text_of


def _is_loose(text: str) -> bool:
    """Whether an expression has an operator outside of brackets."""
    depth = 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 and c == " ":
            return True
    return text.startswith(("-", "~"))
