"""NetBuilder: builds a net operator by operator, with explicit scopes and fresh names; `build()` freezes it.

There are no global scopes, counters or workspaces. Operators are methods named after their types. They are checked when
they are added, and return the names of their outputs:

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

`with b.if_(condition)`, `with b.else_()`, `with b.while_()` and `with b.condition()` open control blocks. The operators
added in a block become a net of their own, in a Do operator. Blobs have lexical scope: a block may read and overwrite the
blobs around it; every other name that it writes is local to the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from jrnn.errors import JrnnError, NetError, describe_op, near
from jrnn.nets import registry
from jrnn.nets.graph.ssa import get_external_blob_names
from jrnn.nets.ir import Names, NameSet, Net, Op, Shape, inputs_of

BOOL = 5  # TensorProto.BOOL


@dataclass(frozen=True)
class Param:
    """A parameter of a net: its shape, and the fill operator of the init net that initializes it."""

    name: str
    shape: Shape
    init: Op


@dataclass
class _OpenLoop:
    """A while block before its end: the operators of its condition, and the blob with their result."""

    condition: list[Op] | None = None
    blob: str = ""


class NetBuilder:
    """Collects the operators, external inputs and parameters of one net.

    Args:
        name: the net's name.
        parent: for a step net, the builder of the net around it. The step net may read the parent's blobs, which become its
            external inputs. Its parameters are added to the parent's.
    """

    def __init__(self, name: str, *, parent: NetBuilder | None = None):
        self.name = name
        self.parent = parent
        self._scopes: list[str] = list(parent._scopes) if parent else []
        self._ops: list[Op] = []
        self._inputs: NameSet = {}
        self._written: NameSet = {}
        # Every name ever written, including names that are local to a block.
        self._ever_written: set[str] = set()
        self._params: dict[str, Param] = parent._params if parent else {}
        self._counts: dict[str, int] = {}
        self._loop: _OpenLoop | None = None  # while the innermost open block is a while block
        # The last If, and the number of operators right after it.
        self._last_if: tuple[Op, int] | None = None

    # names

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefixes every name that is made in the block with `name/`."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def scoped(self, name: str) -> str:
        """`name` prefixed with the open scopes."""
        return "/".join((*self._scopes, name))

    def fresh(self, prefix: str) -> str:
        """A name that is not used yet: `prefix`, `prefix_1`, ... prefixed with the open scopes."""
        base = self.scoped(prefix)
        free = base
        while self.defines(free) or free in self._ever_written:
            self._counts[base] = self._counts.get(base, 0) + 1
            free = f"{base}_{self._counts[base]}"
        return free

    def defines(self, name: str) -> bool:
        """Whether the blob is defined here or in the parent: written, declared as an input, or a parameter."""
        here = name in self._written or name in self._inputs or name in self._params
        return here or (self.parent is not None and self.parent.defines(name))

    # inputs, parameters, operators

    def input(self, name: str) -> str:
        """Declares an external input; its name is not prefixed with scopes. Returns the name."""
        self._inputs[name] = None
        return name

    def param(
        self, name: str, shape: Iterable[int], fill: str = "XavierFill", **fill_args: Any
    ) -> str:
        """Declares a parameter under the open scopes. The operator `fill` initializes it. Returns its name.

        A second declaration of the same name and shape returns the same parameter.

        Raises:
            NetError: if the name is declared with another shape, or `fill` is not an operator.
            OpError: if `fill` does not take `fill_args`.
        """
        full = self.scoped(name)
        dims = tuple(int(d) for d in shape)
        known = self._params.get(full)
        if known is None:
            init = Op.of(fill, [], [full], shape=dims, **fill_args)
            _check(0, init, "init")
            self._params[full] = Param(full, dims, init)
        elif known.shape != dims:
            raise NetError(
                f"parameter {full!r} is declared with shape {dims}, but exists with shape {known.shape}"
            )
        return full

    def add(self, op: Op) -> Names:
        """Appends an operator as it is. Returns its outputs.

        Raises:
            NetError: if an input is undefined or the operator's type is unknown.
            OpError: if the number of inputs or outputs, or an argument, does not fit the operator.
        """
        _check(len(self._ops), op, self.name)
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
        self._ever_written.update(op.outputs)
        return op.outputs

    def op(
        self,
        type: str,
        inputs: str | Iterable[str],
        outputs: str | Iterable[str] | int | None = None,
        **args: Any,
    ) -> Any:
        """Appends an operator.

        Args:
            type: the operator's type.
            inputs: names of blobs.
            outputs: names, which are prefixed with the open scopes; or how many outputs with fresh names; or None for the
                fewest that the operator allows.
            args: the operator's Arguments.

        Returns:
            The name of the output, or a tuple of names unless there is exactly one.
        """
        if isinstance(inputs, str):
            inputs = [inputs]
        if outputs is None:
            outputs = registry.lookup(type).outputs[0]
        if outputs == 1:
            names = [self.fresh(type)]
        elif isinstance(outputs, int):
            names = [self.fresh(f"{type}_{k}") for k in range(outputs)]
        elif isinstance(outputs, str):
            names = [self.scoped(outputs)]
        else:
            names = list(map(self.scoped, outputs))
        written = self.add(Op.of(type, inputs, names, **args))
        return written[0] if len(written) == 1 else written

    def __getattr__(self, type: str) -> Callable[..., Any]:
        """`b.FC([x, w, b], "y")` is `b.op("FC", [x, w, b], "y")`, for every registered operator."""
        if not type[:1].isupper():
            raise AttributeError(f"NetBuilder has no attribute {type!r}")
        registry.lookup(type)

        def add_op(
            inputs: str | Iterable[str] = (),
            outputs: str | Iterable[str] | int | None = None,
            **args: Any,
        ) -> Any:
            return self.op(type, inputs, outputs, **args)

        return add_op

    # control blocks

    @contextmanager
    def if_(self, condition: str) -> Iterator[None]:
        """Opens a block whose operators run if `condition`, a blob of one boolean, is true.

        >>> import jrnn
        >>> b = jrnn.NetBuilder("absolute")
        >>> y = b.Copy(b.input("x"), "y")
        >>> with b.if_(b.input("negative")):
        ...     _ = b.Negative("x", "y")
        >>> with b.else_():
        ...     _ = b.Mul(["x", "x"], "y")
        >>> [op.type for op in b.ops]
        ['Copy', 'CreateScope', 'CreateScope', 'If']
        """
        if not self.defines(condition):
            raise NetError(
                f"net {self.name!r}: the condition {condition!r} of an if block is not defined"
            )
        with self._block() as ops:
            yield
        then = self._do("then", ops, "workspace_if_then")
        inputs = dict.fromkeys([condition, *then.external_inputs])
        self.add(Op.of(registry.IF, inputs, then.external_outputs, then_net=then))
        self._last_if = (self._ops[-1], len(self._ops))

    @contextmanager
    def else_(self) -> Iterator[None]:
        """Opens a block whose operators run if the condition of the if block right before it is false."""
        if self._last_if is None or self._last_if[1] != len(self._ops):
            raise NetError(f"net {self.name!r}: else_() must follow an if_() block directly")
        op, _ = self._last_if
        self._last_if = None
        with self._block() as ops:
            yield
        self._ops.pop()
        otherwise = self._do("else", ops, "workspace_if_else")
        inputs = dict.fromkeys([*op.inputs, *otherwise.external_inputs])
        outputs = dict.fromkeys([*op.outputs, *otherwise.external_outputs])
        self.add(
            Op.of(registry.IF, inputs, outputs, then_net=op.arg("then_net"), else_net=otherwise)
        )

    @contextmanager
    def while_(self) -> Iterator[None]:
        """Opens a block whose operators run as long as its condition is true. It must begin with a `condition()` block.

        >>> import jrnn
        >>> b = jrnn.NetBuilder("powers")
        >>> with b.while_():
        ...     with b.condition():
        ...         _ = b.LT([b.input("x"), b.input("limit")])
        ...     _ = b.Add(["x", "x"], "x")
        >>> b.ops[-1].type, b.ops[-1].outputs[0]
        ('While', 'x')
        """
        loop = _OpenLoop()
        with self._block(loop) as ops:
            yield
        if loop.condition is None:
            raise NetError(
                f"net {self.name!r}: a while_() block must begin with a condition() block, but has none"
            )
        if not self.defines(loop.blob):
            self.add(Op.of(registry.SEED, [], [loop.blob], shape=[1], dtype=BOOL, value=0))
        body = self._do("loop_body", ops, "workspace_loop_body", copy_external_blobs=1)
        condition = self._do("loop_condition", loop.condition, "workspace_loop_cond")
        outputs = dict.fromkeys([*body.external_outputs, *condition.external_outputs])
        inputs = dict.fromkeys(
            [loop.blob, *body.external_inputs, *condition.external_inputs, *outputs]
        )
        self.add(Op.of(registry.WHILE, inputs, outputs, loop_net=body, cond_net=condition))

    @contextmanager
    def condition(self) -> Iterator[None]:
        """Opens the condition of a while block. Its last operator must have one output, which is the condition."""
        loop = self._loop
        if loop is None or loop.condition is not None or self._ops:
            raise NetError(
                f"net {self.name!r}: condition() must come once, at the start of a while_() block"
            )
        with self._block() as ops:
            yield
        if not ops or len(ops[-1].outputs) != 1:
            raise NetError(
                f"net {self.name!r}: the last operator of a condition() block must have exactly one output"
            )
        loop.condition = ops
        loop.blob = ops[-1].outputs[0]

    @contextmanager
    def _block(self, loop: _OpenLoop | None = None) -> Iterator[list[Op]]:
        """Collects the operators that are added in a block, and forgets the blobs that they write when the block ends."""
        outside = self._ops, dict(self._written), self._loop
        ops: list[Op] = []
        self._ops = ops
        self._loop = loop
        self._last_if = None
        try:
            yield ops
        finally:
            self._ops, self._written, self._loop = outside

    def _do(self, name: str, ops: list[Op], workspace: str, **args: Any) -> Net:
        """A net of one Do operator, which runs `ops` in a workspace that a CreateScope operator adds here."""
        (scope,) = self.add(Op.of(registry.SCOPE, [], [self.fresh(workspace)]))
        visible = {*self._written, *self._inputs, *self._params}
        visible.update(filter(self.defines, inputs_of(ops)))
        net = Net(f"{self.name}/{name}", tuple(ops))
        inputs, outputs = get_external_blob_names(net, visible)
        net = replace(net, external_inputs=tuple(inputs), external_outputs=tuple(outputs))
        outer = [*inputs, *outputs]
        # A blob that is both read and written is bound once, to its input.
        inner = list(dict.fromkeys(outer))
        do = Op.of(
            registry.DO,
            [*inputs, scope],
            [*outputs, scope],
            net=net,
            inner_blobs=inner,
            outer_blobs_idx=list(map(outer.index, inner)),
            **args,
        )
        return Net(f"do_{name}_net", (do,), do.inputs, do.outputs)

    # results

    @property
    def ops(self) -> tuple[Op, ...]:
        """The operators that were added so far."""
        return tuple(self._ops)

    @property
    def external_inputs(self) -> Names:
        """Declared inputs, and parameters and outer blobs that operators read, in the order of first appearance."""
        return tuple(self._inputs)

    @property
    def params(self) -> dict[str, Param]:
        """The parameters by name, in the order of declaration."""
        return dict(self._params)

    def build(self, outputs: Iterable[str] = (), *, type: str = "") -> Net:
        """The net, with `outputs` as its external outputs. Raises a NetError if one is undefined."""
        wanted = tuple(outputs)
        for name in wanted:
            if not self.defines(name):
                raise NetError(
                    f"net {self.name!r} has no blob {name!r} to use as an output{near(name, self._written)}"
                )
        return Net(
            name=self.name,
            ops=self.ops,
            external_inputs=self.external_inputs,
            external_outputs=wanted,
            type=type,
        )

    def build_init(self) -> Net:
        """The net that initializes the parameters."""
        ops = tuple(p.init for p in self._params.values())
        return Net(self.name + "_init", ops, (), tuple(self._params))


def _check(index: int, op: Op, net_name: str) -> None:
    """Raises a JrnnError, which names the operator, if its type, arity or arguments are wrong."""
    try:
        definition = registry.lookup(op.type)
        definition.check_arity(op)
        definition.decode(op)
    except JrnnError as e:
        raise e.at(describe_op(index, op.type, op.outputs, net_name)) from None
