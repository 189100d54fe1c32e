"""The table of operators: `@op` and `@gradient` fill it, lowering and autodiff read it.

An operator is a function. Its positional parameters are the input blobs (default None: optional; `*xs`: any number). Its
keyword-only parameters are the Arguments, which are decoded according to their annotations, or if they have none, to the
types of their defaults. Four keyword-only names are reserved; lowering passes their values:

    key      a PRNG key for this operator, or None if the run has no key
    op       the `Op` record
    context  the `Context` of the run (`lowering.py`), for operators that run nets
    wide     whether every floating-point result of the run is float64, for operators that name a dtype

A gradient maker is a function of one `GradientMaker` g (`gradient_maker.py`). `g.op` is the forward operator, `g.input(k)`
and `g.output(k)` are its blobs, and `g.grad_output(k)` is the gradient that arrives at an output. `g.grad_input(k)` is the
blob to write the gradient of an input to. `g.emit` adds a gradient operator.

Reading the table imports `jrnn.nets.ops`, whose modules register operators.
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
from jrnn.nets.ir import Arg, Ints, Message, Names, Net, Numbers, Op, Values

RESERVED = ("key", "op", "context", "wide")

# Operators that autodiff emits.
ACCUMULATE = "Sum"
SEED = "ConstantFill"
CONCATENATE = "Concat"
SAVE = "Copy"

# Operators that NetBuilder's control blocks emit.
DO = "Do"
IF = "If"
WHILE = "While"
SCOPE = "CreateScope"


@dataclass(frozen=True)
class ArgSpec:
    """An Argument of an operator. `annotation` says how to decode it; `default` is its value if it is absent."""

    name: str
    annotation: Any
    default: Any

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True)
class OpDef:
    """A registered operator type.

    Attributes:
        type: its name.
        forward: the function.
        inputs: the names of the positional parameters; `*xs` for any number.
        min_inputs, max_inputs: how many inputs it takes; None: any number.
        outputs: the least and the greatest number of outputs; None: any number.
        args: its Arguments.
        reserved: the reserved parameters that `forward` takes.
        gradient: "stops" if gradients silently end here, "forbidden" if asking for one is an error, else None.
        inplace: maps an output to the input that it may overwrite.
        where: the file and line of `forward`.
        copies: the outputs equal the input.
        random: it draws random numbers from `key`.
        source: its outputs come from outside the net, such as a file; the caller may give their values instead.
        dynamic: the shapes of its outputs depend on the values of its inputs.
        updates: the inputs that it changes in place.
        frees: its outputs have no value after it; it may read blobs that were freed before.
        cuts: a function of an `Op` that describes the gradients that the arguments of the `Op` stop, or returns None.
    """

    type: str
    forward: Callable[..., Any] = field(repr=False)
    inputs: Names
    min_inputs: int
    max_inputs: int | None
    outputs: tuple[int, int | None]
    args: tuple[ArgSpec, ...]
    reserved: frozenset[str]
    gradient: str | None
    inplace: Mapping[int, int]
    where: str
    copies: bool = False
    random: bool = False
    source: bool = False
    dynamic: bool = False
    updates: Ints = ()
    frees: bool = False
    cuts: Callable[[Op], str | None] | None = None

    def check_arity(self, op: Op) -> None:
        """Raises OpError if `op` has too few or too many inputs or outputs."""
        parameters = f" ({', '.join(self.inputs)})" if self.inputs else ""
        _check_number("input", op.inputs, (self.min_inputs, self.max_inputs), parameters)
        _check_number("output", op.outputs, self.outputs)

    def decode(self, op: Op) -> Values:
        """The keyword arguments for `forward` that `op` gives.

        Raises:
            OpError: if an argument has the wrong type, or a required one is absent.
        """
        values = {}
        args: dict[str, Arg] = {}
        for arg in op.args:
            if args.setdefault(arg.name, arg) != arg:
                raise OpError(
                    f"argument {arg.name!r} is given twice, with different values; remove one"
                )
        for spec in self.args:
            value = op.arg(spec.name)
            if value is not None:
                values[spec.name] = _decode(spec, value)
            elif spec.required:
                raise OpError(f"argument {spec.name!r} ({_type_name(spec.annotation)}) is required")
        return values


def _check_number(
    what: str, blobs: Names, bounds: tuple[int, int | None], parameters: str = ""
) -> None:
    """Raises OpError if there are too few or too many inputs or outputs."""
    least, most = bounds
    if len(blobs) >= least and (most is None or len(blobs) <= most):
        return
    if most is None:
        rule = f"at least {least}"
    elif least == most:
        rule = str(least)
    else:
        rule = f"{least} to {most}"
    plural = "" if rule == "1" else "s"
    raise OpError(f"takes {rule} {what}{plural}{parameters}, was given {len(blobs)}: {list(blobs)}")


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def _decode(spec: ArgSpec, value: Any) -> Any:
    """A value on the wire as the type that the annotation names."""
    kinds: tuple[Any, ...] = (spec.annotation,)
    if typing.get_origin(spec.annotation) in (typing.Union, types.UnionType):
        kinds = typing.get_args(spec.annotation)
    for kind in kinds:
        decoded = _decode_as(kind, value)
        if decoded is not None:
            return decoded
    raise OpError(f"argument {spec.name!r} must be {_type_name(spec.annotation)}, is {value!r:.80}")


def _decode_as(kind: Any, value: Any) -> Any:
    """`value` as a `kind`, or None if it is something else."""
    is_number = isinstance(value, (int, float))
    is_list = isinstance(value, (Numbers, tuple))
    if kind is int and is_number and not float(value).is_integer():
        return None
    if kind in (bool, int, float) and is_number:
        return kind(value)
    if kind is str and isinstance(value, bytes):
        return value.decode(errors="replace")
    if kind in (bytes, Net, Message) and isinstance(value, kind):
        return value
    if kind is np.ndarray and is_list:
        return np.asarray(value)
    if typing.get_origin(kind) is tuple and is_list:
        item_kind = typing.get_args(kind)[0]
        items = tuple(_decode_as(item_kind, item) for item in value)
        return None if None in items else items
    return None


# A decorated function, which registering returns unchanged.
F = TypeVar("F", bound=Callable[..., Any])
_OPS: dict[str, OpDef] = {}
_GRADIENTS: dict[str, tuple[Callable[..., Any], str]] = {}
# The package whose modules register the operators.
_OPERATORS = "jrnn.nets.ops"
# A declared gradient maker.
DECLARED = re.compile(r"(?P<type>\w+)\((?P<reads>[\w, *]*)\)( -> (?P<writes>[\w, *]+))?")


def _fill() -> None:
    """Imports the operators. Only the functions that read the table call it, so that other programs do not load them."""
    importlib.import_module(_OPERATORS)


def _place(fn: Callable[..., Any]) -> str:
    code = fn.__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def _arg_spec(parameter: inspect.Parameter) -> ArgSpec:
    """An Argument, which is decoded as its annotation says, or to the type of its default."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        annotation = type(parameter.default)
    return ArgSpec(parameter.name, annotation, parameter.default)


def op(
    type: str,
    *,
    outputs: int | tuple[int, int | None] = 1,
    gradient: str | None = None,
    inplace: Mapping[int, int] | None = None,
    **traits: Any,
) -> Callable[[F], F]:
    """Registers a function as the operator `type`. The module's docstring says what its signature means.

    `OpDef` describes the options; `traits` are the options with a default there. `gradient` may also declare a gradient
    maker, as in "FooGradient(x, w, y, dy) -> x, w":

    - FooGradient is the gradient operator. It gets the arguments of the forward operator.
    - In parentheses are the blobs that it reads: inputs by parameter name, outputs y, y1, ..., their gradients dy, dy1, ...
      Optional blobs that the forward operator lacks are omitted.
    - After the arrow are the inputs whose gradients it writes; by default the first input. `*` means every input.
    """
    declared = DECLARED.fullmatch(gradient or "")
    assert declared or gradient in (None, "stops", "forbidden")

    def register(fn: F) -> F:
        where = _place(fn)
        if type in _OPS:
            raise ValueError(
                f"operator {type!r} is registered twice: at {_OPS[type].where} and at {where}"
            )
        parameters = inspect.signature(fn, eval_str=True).parameters
        inputs: list[str] = []
        min_inputs = 0
        max_inputs: int | None = 0
        args = []
        for name, parameter in parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                inputs.append("*" + name)
                max_inputs = None
            elif parameter.kind is not parameter.KEYWORD_ONLY:
                inputs.append(name)
                min_inputs += parameter.default is parameter.empty
                max_inputs = len(inputs)
            elif name not in RESERVED:
                args.append(_arg_spec(parameter))

        if declared:
            _GRADIENTS[type] = (_maker(declared, inputs), where)
        _OPS[type] = OpDef(
            type=type,
            forward=fn,
            inputs=tuple(inputs),
            min_inputs=min_inputs,
            max_inputs=max_inputs,
            outputs=outputs if isinstance(outputs, tuple) else (outputs, outputs),
            args=tuple(args),
            reserved=frozenset(parameters).intersection(RESERVED),
            gradient=None if declared else gradient,
            inplace=types.MappingProxyType(dict(inplace or {})),
            where=where,
            **traits,
        )
        return fn

    return register


def _maker(declared: re.Match[str], inputs: list[str]) -> Callable[..., None]:
    """The gradient maker that a match of `DECLARED` describes, for an operator with these inputs."""
    type = declared["type"]
    reads = declared["reads"].split(", ")
    writes = (declared["writes"] or inputs[0]).split(", ")
    assert all(n in (*inputs, "*") or re.fullmatch(r"d?y\d*", n) for n in reads), declared[0]
    assert writes == ["*"] or set(writes) <= set(inputs), declared[0]

    def positions(g: Any, name: str) -> list[int]:
        """The inputs that a name in the declaration stands for; none if an optional one is absent."""
        given = range(len(g.op.inputs))
        if name == "*":
            return list(given)
        position = inputs.index(name)
        return [position] if position in given else []

    def blobs(g: Any, name: str) -> list[str]:
        """The blobs that a name in the declaration stands for."""
        if name in inputs or name == "*":
            return list(map(g.input, positions(g, name)))
        position = int(name.lstrip("dy") or 0)
        if name.startswith("d"):
            return [g.grad_output(position)]
        return [g.output(position)] if position < len(g.op.outputs) else []

    def make(g: Any) -> None:
        read: list[str] = []
        for name in reads:
            read += blobs(g, name)
        written = positions(g, "*") if writes == ["*"] else map(inputs.index, writes)
        g.emit(type, read, list(map(g.grad_input, written)))

    return make


def gradient(*op_types: str) -> Callable[[F], F]:
    """Registers a gradient maker, a function of one `GradientMaker`, for operator types."""

    def register(fn: F) -> F:
        where = _place(fn)
        for type in op_types:
            if type in _GRADIENTS:
                raise ValueError(
                    f"gradient of {type!r} is registered twice: at {_GRADIENTS[type][1]} and at {where}"
                )
            _GRADIENTS[type] = (fn, where)
        return fn

    return register


def lookup(type: str) -> OpDef:
    """The definition of an operator type. Raises UnknownOperatorError, with near names, if there is none."""
    row = names().get(type)
    if row is None:
        hint = near(type, _OPS) or "; `jrnn ops` lists the operators that jrnn runs"
        raise UnknownOperatorError(f"unknown operator {type!r}{hint}")
    return row


def frees(type: str) -> bool:
    """Whether operators of a type free their outputs; False for an unknown type."""
    row = names().get(type)
    return row is not None and row.frees


def names() -> Mapping[str, OpDef]:
    """The registered operators by type."""
    _fill()
    return types.MappingProxyType(_OPS)


def gradient_maker(type: str) -> Callable[..., Any] | None:
    """The registered gradient maker of an operator type, or None."""
    _fill()
    makers = _GRADIENTS.get(type)
    return makers and makers[0]


def registered() -> Iterator[OpDef]:
    """Every operator, sorted by name."""
    _fill()
    return iter(sorted(_OPS.values(), key=lambda d: d.type))
