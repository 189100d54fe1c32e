"""NetBuilder: builds a net operator by operator, with explicit scopes and fresh names; `build()` freezes it.

All state is in the builder: there are no global scopes, counters or workspaces. Operators are called by their
type, checked as they are added, and return the names of their outputs:

>>> import jrnn
>>> b = NetBuilder("perceptron")
>>> x = b.input("x")
>>> with b.scope("hidden"):
...     w = b.param("w", [8, 4])
...     bias = b.param("b", [8], "ConstantFill", value=0.0)
>>> y = b.Tanh(b.FC([x, w, bias]), "y")
>>> net = b.build(outputs=[y])
>>> net.external_inputs, [op.type for op in b.build_init().ops]
(('x', 'hidden/w', 'hidden/b'), ['XavierFill', 'ConstantFill'])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jrnn import registry
from jrnn.control_blocks import ControlBlocks
from jrnn.errors import JrnnError, NetError, describe_op, near
from jrnn.ir import Net, Op


@dataclass(frozen=True)
class Param:
    """A parameter of a net: its shape, and the fill operator of the init net that makes its first value."""

    name: str
    shape: tuple[int, ...]
    init: Op


class NetBuilder(ControlBlocks):
    """Collects operators, external inputs and parameters of one net.

    Args:
        name: the net's name.
        parent: for a step net, the builder of the net around it. Blobs of the parent may be read, and become external
            inputs; parameters are added to the parent's.
    """

    def __init__(self, name: str, *, parent: NetBuilder | None = None):
        self.name = name
        self.parent = parent
        self._scopes: list[str] = list(parent._scopes) if parent else []
        self._ops: list[Op] = []
        self._inputs: dict[str, None] = {}
        self._written: dict[str, None] = {}
        self._made: set[str] = set()  # every name ever written, also those that ended with their block
        self._params: dict[str, Param] = parent._params if parent else {}
        self._counts: dict[str, int] = {}
        super().__init__()

    # names

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Puts `name/` before every name that is made within."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def scoped(self, name: str) -> str:
        """`name` with the open scopes before it."""
        return "/".join((*self._scopes, name))

    def fresh(self, prefix: str) -> str:
        """A name that is not used yet: `prefix`, `prefix_1`, ... within the open scopes."""
        base = self.scoped(prefix)
        found = base
        while self.defines(found) or found in self._made:
            self._counts[base] = self._counts.get(base, 0) + 1
            found = f"{base}_{self._counts[base]}"
        return found

    def defines(self, name: str) -> bool:
        """Whether a blob is known here: written, declared, a parameter, or known to the parent."""
        here = name in self._written or name in self._inputs or name in self._params
        return here or (self.parent is not None and self.parent.defines(name))

    # what a net is made of

    def input(self, name: str) -> str:
        """Declares an external input of exactly this name, and returns it."""
        self._inputs[name] = None
        return name

    def param(self, name: str, shape: Iterable[int], fill: str = "XavierFill", **fill_args: Any) -> str:
        """Declares a parameter under the open scopes, with the fill operator that makes its first value.

        A second declaration of the same name and shape is the same parameter; one of another shape is a NetError.
        """
        full, dims = self.scoped(name), tuple(int(d) for d in shape)
        known = self._params.get(full)
        if known is None:
            self._params[full] = Param(
                full, dims, _checked(0, Op.of(fill, [], [full], shape=dims, **fill_args), "init")
            )
        elif known.shape != dims:
            raise NetError(f"parameter {full!r} is declared with shape {dims}, but exists with shape {known.shape}")
        return full

    def add(self, op: Op) -> tuple[str, ...]:
        """Appends an operator as it is; its inputs must be known, its type, arity and arguments right."""
        _checked(len(self._ops), op, self.name)
        for name in op.inputs:
            if name in self._written or name in self._inputs:
                continue
            if not self.defines(name):
                where = describe_op(len(self._ops), op.type, op.outputs, self.name)
                raise NetError(
                    f"{where}: reads blob {name!r}, which is not defined; write it first, or declare it with "
                    f"input({name!r}){near(name, [*self._written, *self._inputs, *self._params])}"
                )
            self._inputs[name] = None
        self._ops.append(op)
        self._written.update(dict.fromkeys(op.outputs))
        self._made.update(op.outputs)
        return op.outputs

    def op(
        self, type: str, inputs: str | Iterable[str], outputs: str | Iterable[str] | int | None = None, **args: Any
    ) -> Any:
        """Appends an operator. `outputs`: scoped names, a number of fresh ones, or None for the fewest it can have.

        Returns the name of its output, or a tuple of names where it has another number than one.
        """
        inputs = [inputs] if isinstance(inputs, str) else list(inputs)
        if outputs is None:
            outputs = registry.lookup(type).outputs[0]
        if isinstance(outputs, int):
            names = (
                [self.fresh(type) for _ in range(outputs)]
                if outputs == 1
                else [self.fresh(f"{type}_{k}") for k in range(outputs)]
            )
        else:
            names = [self.scoped(n) for n in ([outputs] if isinstance(outputs, str) else outputs)]
        made = self.add(Op.of(type, inputs, names, **args))
        return made[0] if len(made) == 1 else made

    def __getattr__(self, type: str) -> Callable[..., Any]:
        """`b.FC([x, w, b], "y")` is `b.op("FC", [x, w, b], "y")`, for every registered operator."""
        if not type[:1].isupper():
            raise AttributeError(f"NetBuilder has no attribute {type!r}")
        registry.lookup(type)
        return lambda inputs=(), outputs=None, **args: self.op(type, inputs, outputs, **args)

    # results

    @property
    def ops(self) -> tuple[Op, ...]:
        """The operators so far."""
        return tuple(self._ops)

    @property
    def external_inputs(self) -> tuple[str, ...]:
        """Declared inputs, parameters and outer blobs that were read, in that order of appearance."""
        return tuple(self._inputs)

    @property
    def params(self) -> dict[str, Param]:
        """The parameters, by name, in the order of their declaration."""
        return dict(self._params)

    def build(self, outputs: Iterable[str] = (), *, type: str = "") -> Net:
        """The net, with `outputs` as its external outputs."""
        wanted = tuple(outputs)
        for name in wanted:
            if not self.defines(name):
                raise NetError(f"net {self.name!r} has no blob {name!r} to give out{near(name, self._written)}")
        return Net(self.name, self.ops, self.external_inputs, wanted, type)

    def build_init(self) -> Net:
        """The net that makes the first values of the parameters."""
        ops = tuple(p.init for p in self._params.values())
        return Net(self.name + "_init", ops, (), tuple(self._params))


def _checked(index: int, op: Op, net_name: str) -> Op:
    try:
        definition = registry.lookup(op.type)
        definition.check_arity(op)
        definition.decode(op)
    except JrnnError as e:
        raise e.at(describe_op(index, op.type, op.outputs, net_name)) from None
    return op
