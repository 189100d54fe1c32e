"""The interface of gradient makers: they read the forward operator and the arriving gradients, and emit operators."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Union

from jrnn.errors import GradientError
from jrnn.nets import registry
from jrnn.nets.ir import Names, Op, Renames


class GradientSlice(NamedTuple):
    """A sparse gradient: a blob of row indices and a blob of the rows' values. Values of repeated indices are added."""

    indices: str
    values: str


Gradient = Union[str, GradientSlice]


class Version(NamedTuple):
    """One value of a blob: the blob's name, and how often it was overwritten before."""

    name: str
    number: int


class Token(str):
    """A placeholder for the name of an input's gradient until the maker has returned.

    It is a text that no blob has as its name, so that it can stand in an operator.

    Attributes:
        usual: the name that the gradient gets if no other blob has it.
    """

    usual: str

    def __new__(cls, usual: str, position: int) -> "Token":
        token = super().__new__(cls, f"{usual}\0{position}")
        token.usual = usual
        return token


def names_of(g: Gradient | None) -> Names:
    """The blobs of a gradient: one, the indices and the values, or none."""
    if g is None:
        return ()
    return tuple(g) if isinstance(g, GradientSlice) else (g,)


def renamed(g: Gradient, names: Renames) -> Gradient:
    if isinstance(g, GradientSlice):
        return GradientSlice(*(names.get(n, n) for n in g))
    return names.get(g, g)


class GradientMaker:
    """The argument of a `@gradient` function: the forward operator, its blobs, and methods to emit gradients."""

    def __init__(
        self,
        op: Op,
        inputs: Sequence[Version],
        outputs: Sequence[Version],
        arriving: Sequence[Gradient | None],
        value: Callable[[Version], str],
        fresh: Callable[[str], str],
    ):
        self.op = op
        self._inputs = inputs
        self._outputs = outputs
        self._grad_outputs = list(arriving)
        self._value = value
        self._fresh = fresh
        self._asked: set[int] = set()
        self.emitted: list[Op] = []
        self.answers: dict[int, Gradient] = {}

    def arg(self, name: str, default: Any = None) -> Any:
        """An argument of the forward operator."""
        return self.op.arg(name, default)

    @property
    def input_names(self) -> list[str]:
        """The blobs that the operator reads: its inputs, and then the outputs that it may leave unchanged."""
        return [v.name for v in self._inputs]

    def input(self, k: int) -> str:
        """The blob that holds the value that the forward operator read as input `k`."""
        return self._value(self._inputs[k])

    def output(self, k: int) -> str:
        """The blob that holds the value that the forward operator wrote as output `k`."""
        return self._value(self._outputs[k])

    def has_grad_output(self, k: int) -> bool:
        """Whether a gradient arrives at output `k`."""
        self._asked.add(k)
        return k < len(self._grad_outputs) and self._grad_outputs[k] is not None

    def grad_output(self, k: int) -> str:
        """The gradient that arrives at output `k`, or zeros if there is none. Raises GradientError if it is sparse."""
        name = self.op.outputs[k]
        if not self.has_grad_output(k):
            # The loss does not depend on this output; Caffe2 raises here.
            zero = self.temporary(name + "_grad_zero")
            self.emit(registry.SEED, [self.output(k)], [zero], copy_args=False, value=0.0)
            self._grad_outputs[k] = zero
        gradient = self._grad_outputs[k]
        assert gradient is not None
        if isinstance(gradient, GradientSlice):
            raise GradientError(
                f"the gradient of output {name!r} is sparse; the gradient operator needs a dense one"
            )
        return gradient

    def grad_output_slice(self, k: int) -> Gradient | None:
        """The gradient that arrives at output `k`, dense or sparse, or None."""
        self._asked.add(k)
        return self._grad_outputs[k]

    def check_all_used(self) -> None:
        """Raises GradientError if the maker ignored an arriving gradient, which would be lost."""
        for k, g in enumerate(self._grad_outputs):
            if g is not None and k not in self._asked:
                raise GradientError(
                    f"a gradient arrives at output {self.op.outputs[k]!r}, which {self.op.type} does not differentiate; "
                    "put a StopGradient after it, or let the loss depend on another output"
                )

    def grad_input(self, k: int) -> str:
        """Declares that input `k` has a dense gradient. Returns the blob to write it to."""
        token = Token(f"{self._inputs[k].name}_grad", k)
        self.answers[k] = token
        return token

    def grad_input_slice(self, k: int) -> GradientSlice:
        """Declares that input `k` has a sparse gradient. Returns the blobs to write its indices and values to."""
        name = self.op.inputs[k]
        gradient = GradientSlice(Token(f"{name}_grad_indices", k), Token(f"{name}_grad_values", k))
        self.answers[k] = gradient
        return gradient

    def set_grad(self, k: int, gradient: Gradient) -> None:
        """Declares that an existing gradient is the gradient of input `k`."""
        self.answers[k] = gradient

    def temporary(self, name: str) -> str:
        """A fresh blob name for a value between two emitted operators."""
        return self._fresh(name)

    def replace_op(self, op: Op) -> None:
        """Replaces the forward operator by one with the same inputs and outputs."""
        assert (op.inputs, op.outputs) == (self.op.inputs, self.op.outputs)
        self.op = op

    def emit(
        self,
        type: str,
        inputs: Iterable[str],
        outputs: Iterable[str],
        /,
        *,
        copy_args: bool = True,
        **args: Any,
    ) -> None:
        """Adds a gradient operator, with the forward operator's device, engine and (if `copy_args`) arguments."""
        op = Op.of(type, inputs, outputs, **args)
        copied = tuple(a for a in self.op.args if copy_args and a.name not in args)
        op = replace(op, args=op.args + copied, is_gradient=True)
        self.emitted.append(replace(op, engine=self.op.engine, device_option=self.op.device_option))
