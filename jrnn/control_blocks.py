"""Blocks of a NetBuilder: `with b.if_(condition)`, `with b.else_()`, `with b.while_()`, `with b.condition()`.

The operators added within a block become a net of their own, in a Do operator. Blobs are scoped lexically: a block sees the
blobs around it; what it writes under the name of one of those changes that blob, and every other name is its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from jrnn.errors import NetError
from jrnn.graph.subgraph import get_external_blob_names
from jrnn.ir import Net, Op
from jrnn.registry import DO, IF, SCOPE, SEED, WHILE

BOOL = 5  # TensorProto.BOOL


@dataclass
class _OpenLoop:
    """A while block that is being written."""

    condition: tuple[Op, ...] | None = None
    blob: str = ""


class ControlBlocks(ABC):
    """The part of NetBuilder that opens and closes blocks."""

    name: str
    _ops: list[Op]
    _inputs: dict[str, None]
    _written: dict[str, None]
    _params: Mapping[str, Any]

    @abstractmethod
    def add(self, op: Op) -> tuple[str, ...]: ...

    @abstractmethod
    def defines(self, name: str) -> bool: ...

    @abstractmethod
    def fresh(self, prefix: str) -> str: ...

    def __init__(self) -> None:
        self._loops: list[_OpenLoop | None] = []
        self._last_if: tuple[Op, int] | None = None

    @contextmanager
    def if_(self, condition: str) -> Iterator[None]:
        """The operators within run where `condition` (one boolean) holds.

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
            raise NetError(f"net {self.name!r}: the condition {condition!r} of an if block is not defined")
        ops: list[Op] = []
        with self._block(ops):
            yield
        self.add(Op.of(SCOPE, [], [self.fresh("workspace_if_then")]))
        body = self._do("then", ops, self._ops[-1].outputs[0])
        inputs = dict.fromkeys([condition, *body.inputs])
        self.add(Op.of(IF, inputs, body.outputs, then_net=_shared("then", body)))
        self._last_if = (self._ops[-1], len(self._ops))

    @contextmanager
    def else_(self) -> Iterator[None]:
        """The operators within run where the condition of the if block just before does not hold."""
        if self._last_if is None or self._last_if[1] != len(self._ops):
            raise NetError(f"net {self.name!r}: else_() must follow an if_() block at once")
        op, _ = self._last_if
        self._last_if = None
        ops: list[Op] = []
        with self._block(ops):
            yield
        self._ops.pop()
        self.add(Op.of(SCOPE, [], [self.fresh("workspace_if_else")]))
        body = self._do("else", ops, self._ops[-1].outputs[0])
        inputs = dict.fromkeys([*op.inputs, *body.inputs])
        outputs = dict.fromkeys([*op.outputs, *body.outputs])
        self.add(Op.of(IF, inputs, outputs, then_net=op.arg("then_net"), else_net=_shared("else", body)))

    @contextmanager
    def while_(self) -> Iterator[None]:
        """The operators within run again and again while the `condition()` block, which comes first in it, holds.

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
        ops: list[Op] = []
        self._loops.append(loop)
        try:
            with self._block(ops):
                yield
        finally:
            self._loops.pop()
        if loop.condition is None:
            raise NetError(
                f"net {self.name!r}: a while_() block begins with a condition() block, and this one has none"
            )
        if not self.defines(loop.blob):
            self.add(Op.of(SEED, [], [loop.blob], shape=[1], dtype=BOOL, value=0))
        self.add(Op.of(SCOPE, [], [self.fresh("workspace_loop_body")]))
        body = self._do("loop_body", ops, self._ops[-1].outputs[0], copy_external_blobs=1)
        self.add(Op.of(SCOPE, [], [self.fresh("workspace_loop_cond")]))
        condition = self._do("loop_condition", list(loop.condition), self._ops[-1].outputs[0])
        outputs = dict.fromkeys([*body.outputs, *condition.outputs])
        inputs = dict.fromkeys([loop.blob, *body.inputs, *condition.inputs, *outputs])
        nets = {"loop_net": _shared("loop_body", body), "cond_net": _shared("loop_condition", condition)}
        self.add(Op.of(WHILE, inputs, outputs, **nets))

    @contextmanager
    def condition(self) -> Iterator[None]:
        """The condition of the while block around it: the one output of its last operator."""
        loop = self._loops[-1] if self._loops else None
        if loop is None or loop.condition is not None or self._ops:
            raise NetError(f"net {self.name!r}: condition() comes once, as the first thing in a while_() block")
        ops: list[Op] = []
        with self._block(ops):
            yield
        if not ops or len(ops[-1].outputs) != 1:
            raise NetError(
                f"net {self.name!r}: the last operator of a condition() block gives its result as its one output"
            )
        loop.condition, loop.blob = tuple(ops), ops[-1].outputs[0]

    @contextmanager
    def _block(self, into: list[Op]) -> Iterator[None]:
        """Collects the operators added within; the blobs that they make are forgotten at the end."""
        ops, written, loops = self._ops, dict(self._written), self._loops
        self._ops, self._last_if = [], None
        if into is not None and not (loops and loops[-1] is not None and loops[-1].condition is None):
            self._loops = [*loops, None]  # a condition() within belongs to no loop outside of this block
        try:
            yield
        finally:
            into.extend(self._ops)
            self._ops, self._written, self._loops = ops, written, loops

    def _do(self, name: str, ops: list[Op], workspace: str, **args: Any) -> Op:
        visible = {*self._written, *self._inputs, *self._params}
        for op in ops:
            visible.update(n for n in op.inputs if self.defines(n))
        net = Net(f"{self.name}/{name}", tuple(ops))
        inputs, outputs = get_external_blob_names(net, visible)
        outer = [*inputs, *(n for n in outputs if n not in inputs)]
        index = {n: (inputs.index(n) if n in inputs else len(inputs) + outputs.index(n)) for n in outer}
        # a blob that is read and written is bound once, by what it is read as, and listed as an output too
        net = replace(net, external_inputs=tuple(inputs), external_outputs=tuple(outputs))
        bound = {"inner_blobs": outer, "outer_blobs_idx": [index[n] for n in outer]}
        return Op.of(DO, [*inputs, workspace], [*outputs, workspace], net=net, **bound, **args)


def _shared(name: str, do: Op) -> Net:
    return Net(f"do_{name}_net", (do,), do.inputs, do.outputs)
