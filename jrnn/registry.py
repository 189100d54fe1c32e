"""The table of operators: `@op` and `@gradient` fill it, lowering and autodiff read it.

An operator is a function. Its positional parameters are the input blobs (default None: optional; `*xs`: any number), its
keyword-only parameters are the Arguments, decoded by annotation. Four keyword-only names are filled by lowering
instead: `key` (a PRNG key of the operator's own, or None where the run has none), `op` (the `Op` record), `context` (for
operators that run nets) and `wide` (whether floating-point numbers are all float64 in this run, for operators that only
change the data type).

A gradient maker is a function of one `GradientMaker` (`gradient_maker.py`), which knows the forward operator's blobs and
collects the operators that compute its gradient. The modules of `jrnn.ops` register operators when the table is first read.
"""

import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from jrnn.errors import OpError, UnknownOperatorError, near
from jrnn.ir import Message, Net, Numbers, Op

RESERVED = ("key", "op", "context", "wide")

# Operators that autodiff itself emits.
ACCUMULATE = "Sum"
SEED = "ConstantFill"
CONCATENATE = "Concat"
SAVE = "Copy"

# Operators that NetBuilder's blocks become.
DO, IF, WHILE, SCOPE = "Do", "If", "While", "CreateScope"


@dataclass(frozen=True)
class ArgSpec:
    """An Argument that an operator takes: `annotation` decides how it is decoded, `default` is used where it is absent."""

    name: str
    annotation: Any
    default: Any

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True)
class OpDef:
    """What is known of an operator type.

    `gradient` is "stops" where the gradient silently ends here, "forbidden" where asking for one is an error, None where a
    gradient maker answers. `outputs` is the least and the greatest number of outputs (None: any number).
    `inplace` maps an output to the input that it may overwrite. `copies` marks outputs equal to the input, `random` a use
    of `key`, `source` outputs that come from outside the net and that a caller may give instead, `dynamic` outputs whose
    shapes depend on the values of inputs. `updates` are inputs that the operator changes in place. `cuts` says in words
    which gradients an `Op` stops because its arguments ask for that, or None.
    """

    type: str
    forward: Callable[..., Any] = field(repr=False)
    inputs: tuple[str, ...]
    min_inputs: int
    max_inputs: int | None
    outputs: tuple[int, int | None]
    args: tuple[ArgSpec, ...]
    reserved: frozenset[str]
    gradient: str | None
    inplace: Mapping[int, int]
    copies: bool
    random: bool
    source: bool
    dynamic: bool
    updates: tuple[int, ...]
    cuts: Callable[[Op], str | None] | None
    where: str

    def check_arity(self, op: Op) -> None:
        """Raises OpError where `op` has a number of inputs or outputs that the operator does not take."""
        for what, given, (least, most) in (
            ("input", op.inputs, (self.min_inputs, self.max_inputs)),
            ("output", op.outputs, self.outputs),
        ):
            if len(given) < least or (most is not None and len(given) > most):
                if most is None:
                    rule = f"at least {least}"
                else:
                    rule = str(least) if least == most else f"{least} to {most}"
                named = f" ({', '.join(self.inputs)})" if what == "input" and self.inputs else ""
                plural = "" if rule == "1" else "s"
                raise OpError(f"takes {rule} {what}{plural}{named}, was given {len(given)}: {list(given)}")

    def decode(self, op: Op) -> dict[str, Any]:
        """The keyword arguments for `forward` that stand on the wire; the rest have defaults."""
        found = {}
        for spec in self.args:
            value = op.arg(spec.name)
            if value is not None:
                found[spec.name] = _decode(spec, value)
            elif spec.required:
                raise OpError(f"argument {spec.name!r} ({_type_name(spec.annotation)}) is required")
        return found


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _decode(spec: ArgSpec, value: Any) -> Any:
    """A wire value as what the operator's annotation asks for."""
    kinds = typing.get_args(spec.annotation) if _is_union(spec.annotation) else (spec.annotation,)
    for kind in kinds:
        found = _decode_as(kind, value)
        if found is not None:
            return found
    shown = f"{value!r:.80}"
    raise OpError(f"argument {spec.name!r} must be {_type_name(spec.annotation)}, is {shown}")


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _decode_as(kind: Any, value: Any) -> Any:
    number = isinstance(value, (int, float))
    if kind is bool:
        return bool(value) if number else None
    if kind is int:
        return int(value) if number and float(value).is_integer() else None
    if kind is float:
        return float(value) if number else None
    if kind is str:
        return value.decode(errors="replace") if isinstance(value, bytes) else None
    if kind is bytes:
        return value if isinstance(value, bytes) else None
    if kind in (Net, Message):
        return value if isinstance(value, kind) else None
    if kind is np.ndarray:
        return np.asarray(value) if isinstance(value, (Numbers, tuple)) else None
    if typing.get_origin(kind) is tuple and isinstance(value, (Numbers, tuple)):
        of = typing.get_args(kind)[0]
        items = tuple(_decode_as(of, v) for v in value)
        return None if any(v is None for v in items) else items
    return None


F = TypeVar("F", bound=Callable[..., Any])  # a function, which registering returns as it is
_OPS: dict[str, OpDef] = {}
_GRADIENTS: dict[str, tuple[Callable[..., Any], str]] = {}
_OPERATORS = "jrnn.ops"  # the package whose modules register the operators


def _fill() -> None:
    """Loads the operators, so that a program that uses none does not pay for them; every reader of the table calls it."""
    importlib.import_module(_OPERATORS)


def _place(fn: Callable[..., Any]) -> str:
    code = fn.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def op(
    type: str,
    *,
    outputs: int | tuple[int, int | None] = 1,
    gradient: str | None = None,
    inplace: Mapping[int, int] | None = None,
    copies: bool = False,
    random: bool = False,
    source: bool = False,
    dynamic: bool = False,
    updates: tuple[int, ...] = (),
    cuts: Callable[[Op], str | None] | None = None,
) -> Callable[[F], F]:
    """Registers a function as the operator `type`; see the module's docstring for what its signature means.

    `gradient` may also declare the gradient maker, as in "FooGradient(x, w, y, dy) -> x, w": the gradient operator, the
    blobs that it reads (inputs by the names of the parameters, else outputs y, y1, ... and their gradients dy, dy1, ...),
    and the inputs whose gradients it writes, the first one by default; * is every input. Optional blobs that the operator
    does not have are left out. The gradient operator gets the same arguments.
    """
    declared = _DECLARED.fullmatch(gradient or "")
    assert declared or gradient in (None, "stops", "forbidden")

    def register(fn: F) -> F:
        where = _place(fn)
        if type in _OPS:
            raise ValueError(f"operator {type!r} is registered twice: at {_OPS[type].where} and at {where}")
        positional: list[str] = []
        args: list[ArgSpec] = []
        least, most = 0, 0
        repeats = False
        for p in inspect.signature(fn, eval_str=True).parameters.values():
            if p.kind is p.VAR_POSITIONAL:
                repeats = True
                positional.append("*" + p.name)
            elif p.kind is not p.KEYWORD_ONLY:
                positional.append(p.name)
                least += p.default is p.empty
                most += 1
            elif p.name not in RESERVED:
                args.append(ArgSpec(p.name, p.annotation, p.default))
        if declared:
            _GRADIENTS[type] = (_maker(declared, positional), where)
        names = inspect.signature(fn).parameters
        _OPS[type] = OpDef(
            type=type,
            forward=fn,
            inputs=tuple(positional),
            min_inputs=least,
            max_inputs=None if repeats else most,
            outputs=outputs if isinstance(outputs, tuple) else (outputs, outputs),
            args=tuple(args),
            reserved=frozenset(r for r in RESERVED if r in names),
            gradient=None if declared else gradient,
            inplace=types.MappingProxyType(dict(inplace or {})),
            copies=copies,
            random=random,
            source=source,
            dynamic=dynamic,
            updates=updates,
            cuts=cuts,
            where=where,
        )
        return fn

    return register


_DECLARED = re.compile(r"(?P<type>\w+)\((?P<reads>[\w, *]*)\)( -> (?P<writes>[\w, *]+))?")


def _maker(declared: re.Match[str], inputs: list[str]) -> Callable[..., None]:
    """The gradient maker that an operator with these inputs declares."""
    type, reads = declared["type"], declared["reads"].split(", ")
    writes = (declared["writes"] or inputs[0]).split(", ")
    assert all(n in (*inputs, "*") or re.fullmatch(r"d?y\d*", n) for n in reads), declared[0]
    assert writes == ["*"] or set(writes) <= set(inputs), declared[0]

    def blobs(g: Any, name: str) -> list[str]:
        if name in inputs or name == "*":
            every = range(len(g.op.inputs))
            return [g.input(k) for k in every if name == "*" or k == inputs.index(name)]
        place = int(name.lstrip("dy") or 0)
        if name.startswith("d"):
            return [g.grad_output(place)]
        return [g.output(place)] if place < len(g.op.outputs) else []

    def make(g: Any) -> None:
        places = range(len(g.op.inputs)) if writes == ["*"] else map(inputs.index, writes)
        g.emit(type, [b for name in reads for b in blobs(g, name)], [g.grad_input(k) for k in places])

    return make


def gradient(*op_types: str) -> Callable[[F], F]:
    """Registers a gradient maker, a function of one `GradientMaker`, for operator types."""

    def register(fn: F) -> F:
        for t in op_types:
            if t in _GRADIENTS:
                raise ValueError(f"gradient of {t!r} is registered twice: at {_GRADIENTS[t][1]} and at {_place(fn)}")
            _GRADIENTS[t] = (fn, _place(fn))
        return fn

    return register


def lookup(type: str) -> OpDef:
    """The definition of an operator type, or UnknownOperatorError with near names."""
    _fill()
    try:
        return _OPS[type]
    except KeyError:
        raise UnknownOperatorError(f"unknown operator {type!r}{near(type, _OPS)}") from None


def gradient_maker(type: str) -> Callable[..., Any] | None:
    """The registered gradient maker of an operator type, or None."""
    _fill()
    found = _GRADIENTS.get(type)
    return found and found[0]


def names() -> Mapping[str, OpDef]:
    """The operator types that are registered."""
    _fill()
    return types.MappingProxyType(_OPS)


def registered() -> Iterator[OpDef]:
    """Every operator, by name."""
    _fill()
    return iter(sorted(_OPS.values(), key=lambda d: d.type))
