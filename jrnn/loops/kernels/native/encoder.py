"""The encoding of a loop for the kernel, which `src/decode.h` reads.

The kernel gets integers: the arrays of the call, references to rows of them, instructions on registers, stages, and the
matrices that it packs. Its number of registers is small, so an elementwise stage is first written with a virtual register
for each value, and then gets real ones: a register is free again after the last instruction that reads it (linear scan:
Poletto and Sarkar, "Linear scan register allocation", 1999).

Shapes: N rows, T time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Var
from jrnn.loops.ir import Loop, Unsupported
from jrnn.loops.kernels.native.operations import (
    Array,
    Dims,
    NativeOperand,
    Operation,
    Uniform,
    View,
    collapsed,
    dense,
)
from jrnn.loops.kernels.native.stages import fuse_additions, schedule
from jrnn.loops.kernels.native.steps import Collector

FORMAT = 5  # decode.h has the same number
_DTYPES = ("float", "bool", "bfloat16")
# The order of the instructions in elements.h.
# fmt: off
_INSTRUCTIONS = (
    "copy", "add", "sub", "mul", "div", "max", "min", "neg", "abs", "exp", "tanh", "logistic", "log", "log1p", "expm1",
    "sqrt", "rsqrt", "square", "one_minus_square", "select", "equal", "not_equal", "less", "less_equal", "not", "sign",
    "floor", "ceil", "round", "is_finite", "to_bfloat16", "sin", "cos", "erf", "spread",
)
# fmt: on
OPCODES = {name: i for i, name in enumerate(_INSTRUCTIONS)}
_KINDS = {"product": 1, "reduce_sum": 2, "reduce_max": 2, "reduce_min": 2, "move": 3}
_REDUCTIONS = {"reduce_sum": 0, "reduce_max": 1, "reduce_min": 2}
_MAX_DIMS = 4  # axes that a stage moves or reduces
_FIRST_LITERAL = -(2**20)  # until the number of registers is known


class _Argument(NamedTuple):
    """An argument or a result of the call: its elements at all steps, and their type."""

    elements: int
    dtype: str


class _Ref(NamedTuple):
    """A reference to rows of an array: its number, type, first element, and strides between rows and between steps."""

    base: int
    dtype: int
    offset: int
    row_stride: int
    step_stride: int


class _Pack(NamedTuple):
    """A matrix that the kernel packs before the first step."""

    base: int
    dtype: int
    offset: int
    depth: int
    width: int
    depth_stride: int
    width_stride: int


class _Register(int):
    """A virtual register. Other operands are references, from 0 on, and literals, from `_FIRST_LITERAL` down."""


class _VirtualInstruction(NamedTuple):
    operation: str
    out: int
    operands: list[int]


# The size of an axis that a stage moves or reduces, and its strides in `read` and `out`.
_MovedDim = tuple[int, int, int]
_NO_DIM: _MovedDim = (1, 0, 0)


class _Stage(NamedTuple):
    """A stage as the kernel gets it.

    Attributes:
        kind: 0 for elementwise work, or one of `_KINDS`.
        first, count: of elementwise work: its instructions.
        is_flat: of elementwise work: all rows are as one.
        width: elements of a row of the result.
        read, out, init: references: what is read, what is written, and what a product starts from. -1 for none.
        pack, depth: of a product: the packed matrix, and its rows.
        op: of a reduction: one of `_REDUCTIONS`.
        dims: the axes of the array that is moved or reduced.
    """

    kind: int = 0
    first: int = 0
    count: int = 0
    is_flat: bool = False
    width: int = 0
    read: int = -1
    out: int = -1
    init: int = -1
    pack: int = -1
    depth: int = 0
    op: int = 0
    dims: Sequence[_MovedDim] = ((0, 0, 0),) * _MAX_DIMS

    def encoded(self) -> list[int]:
        *numbers, dims = self
        for of_all_dims in zip(*dims):  # the sizes, then the strides
            numbers += of_all_dims
        return numbers


def stored_dtype(atom: Atom) -> str:
    """Returns the type of an array in memory, as the kernel names it."""
    dtype = atom.aval.dtype
    if dtype == jnp.bool_:
        return "bool"
    return "bfloat16" if dtype == jnp.bfloat16 else "float"


@dataclass
class CallEncoder:
    """Encodes the steps of a loop for N rows. The arrays of the call are: constants, first carry, xs; last carry, ys."""

    loop: Loop
    rows: int
    dtype: np.dtype
    arguments: list[_Argument] = field(default_factory=list)
    refs: dict[_Ref, int] = field(default_factory=dict)
    row_strides: list[int] = field(default_factory=list)  # of the references
    literals: dict[str, int] = field(default_factory=dict)
    packs: dict[_Pack, int] = field(default_factory=dict)
    instructions: list[list[int]] = field(default_factory=list)
    stages: list[_Stage] = field(default_factory=list)
    scratch_offsets: dict[Array, int] = field(default_factory=dict)
    readers: dict[Array, set[int]] = field(default_factory=lambda: defaultdict(set))  # stages
    registers: int = 0
    scratch: int = 0

    def result(self) -> tuple[np.ndarray, np.ndarray, tuple[tuple[Operation, ...], ...]]:
        """Returns the encoded program, its literals, and the operations of each stage."""
        loop = self.loop
        step = self._collector()
        n_inputs = len(self.arguments)
        starts = self._carry_starts(step)
        for eqn in loop.eqns:
            try:
                step.run(eqn)
            except Unsupported as why:
                raise Unsupported(why.reason, eqn) from why
        self._write_outputs(step)
        self._write_carry(step)

        carries = [start.out.array for start in starts]
        operations = fuse_additions(step.operations)
        stages = [[o] for o in starts] + schedule(operations, carries)
        for number, stage in enumerate(stages):
            for operation in stage:
                for view in operation.views:
                    for array in view.array.chain:
                        self.readers[array].add(number)
        for number, stage in enumerate(stages):
            first = stage[0]
            if first.is_elementwise:
                encoded = _ElementwiseStage(self, number).encode(stage)
            elif first.matrix is not None:
                encoded = self._encode_product(first)
            else:
                encoded = self._encode_move(first)
            self.stages.append(encoded)

        literals = np.array(list(map(float.fromhex, self.literals)), np.float64)
        return self._encoded(len(starts), n_inputs), literals, tuple(map(tuple, stages))

    # What the step reads and writes ------------------------------------------------------------------

    def _collector(self) -> Collector:
        """Returns the step before its first equation, and adds the arguments of the call."""
        values: dict[Var, View] = {}
        loop = self.loop
        for v in loop.inputs:
            dtype = "float" if v in loop.carry else stored_dtype(v)
            array = self._argument(v, dtype, stacked=v in loop.xs)
            values[v] = View(array, dense(v.aval.shape))
        constants = frozenset(values[v].array for v in loop.consts)
        return Collector(self.rows, values, constants)

    def _argument(
        self,
        v: Atom,
        dtype: str,
        stacked: bool,
        in_rows: bool = False,
    ) -> Array:
        """Adds an argument or a result, which holds a value of one step or, if stacked, of all steps."""
        size = jaxprs.elements(v.aval.shape)
        array = Array(
            width=size // self.rows if in_rows else size,
            argument=len(self.arguments),
            stacked=size if stacked else 0,
            dtype=dtype,
            in_rows=in_rows,
        )
        self.arguments.append(_Argument(size * (self.loop.length if stacked else 1), dtype))
        return array

    def _carry_starts(self, step: Collector) -> list[Operation]:
        """Returns the operations that copy the first carry to the last carry, which the steps change."""
        starts = []
        axis = 0 if self.rows > 1 else None
        for v in self.loop.carry:
            array = self._argument(v, "float", stacked=False, in_rows=True)
            state = step.new(v.aval.shape, axis, array)
            starts.append(Operation("copy", state, [step.values[v]], axis))
            step.values[v] = state
        return starts

    def _write_outputs(self, step: Collector) -> None:
        for y in self.loop.ys:
            shape = y.aval.shape
            value = step.value(y)
            axis = step.row_axis([value], shape)
            if axis is None and self.rows > 1:
                raise Unsupported("an output is the same for all rows")
            # In memory, rows lie one after the other only if they are the first axis.
            in_rows = self.rows == 1 or axis == 0
            array = self._argument(y, stored_dtype(y), stacked=True, in_rows=in_rows)
            target = step.new(shape, axis, array) if in_rows else View(array, dense(shape))
            step.assign(target, value, axis)

    def _write_carry(self, step: Collector) -> None:
        states = [step.values[v] for v in self.loop.carry]
        carried = {state.array for state in states}
        # A new carry that is another old one is copied first: that one may be overwritten before.
        values = []
        for state, atom in zip(states, self.loop.carry_out):
            value = step.value(atom)
            if isinstance(value, View) and value.array in carried - {state.array}:
                value = step.apply("copy", [value], value.shape)
            values.append(value)
        for state, value in zip(states, values):
            if isinstance(value, View):
                if value.array is state.array and value.is_whole:
                    continue
                value = step.contiguous_rows(value, state.row)
            step.add("copy", state, [value], state.row)

    # Encoding ----------------------------------------------------------------------------------------

    def _encoded(self, n_starts: int, n_inputs: int) -> np.ndarray:
        loop = self.loop
        encoded = [FORMAT, self.dtype.itemsize, self.rows, loop.length, int(loop.reverse)]
        encoded += [self.scratch, self.registers, n_starts, n_inputs]
        itemsize = {"float": self.dtype.itemsize, "bool": 1, "bfloat16": 2}
        argument_bytes = [[a.elements * itemsize[a.dtype]] for a in self.arguments]
        stages = [stage.encoded() for stage in self.stages]
        # Literals are the registers after the others.
        first_literal = _FIRST_LITERAL + 1 + self.registers
        instructions = []
        for numbers in self.instructions:
            instructions.append([n if n > _FIRST_LITERAL else n - first_literal for n in numbers])
        for part in (argument_bytes, self.refs, instructions, stages, self.packs):
            encoded.append(len(part))
            encoded.extend(itertools.chain.from_iterable(part))
        return np.array(encoded, np.int64)

    def ref(
        self,
        view: View,
        axis: int | None,
        span: int,
    ) -> int:
        """Returns the number of a reference to rows of `span` elements at most."""
        root, start = view.array.root
        offset = start + view.offset
        row_stride = view.row_stride(axis, self.rows)
        if root.argument is not None:
            base = root.argument
            last = offset + (self.rows - 1) * row_stride + (self.loop.length - 1) * root.stacked
            last += span
            size = self.arguments[base].elements
            assert offset >= 0 and last <= size, f"the kernel would leave an array: {last} > {size}"
        else:
            base = len(self.arguments)
            if root not in self.scratch_offsets:
                self.scratch_offsets[root] = self.scratch
                self.scratch += -(-root.width * self.rows // 16) * 16
            offset += self.scratch_offsets[root]
        ref = _Ref(base, _DTYPES.index(root.dtype), offset, row_stride, root.stacked)
        number = self.refs.setdefault(ref, len(self.refs))
        if number == len(self.row_strides):
            self.row_strides.append(row_stride)
        return number

    def allocate_registers(self, instructions: Sequence[_VirtualInstruction]) -> None:
        """Adds instructions, with a register for each virtual one while it is needed."""
        last: dict[_Register, int] = {}
        for i, instruction in enumerate(instructions):
            for place in (instruction.out, *instruction.operands):
                if isinstance(place, _Register):
                    last[place] = i

        # Registers are numbered from -1 down.
        free: list[int] = []
        allocated: dict[_Register, int] = {}
        for i, (operation, out, operands) in enumerate(instructions):
            numbers = [allocated[v] if isinstance(v, _Register) else v for v in operands]
            ends = {v for v in operands if isinstance(v, _Register) and last[v] == i}
            free += map(allocated.pop, ends)
            target = out
            if isinstance(out, _Register):
                if not free:
                    self.registers += 1
                    free.append(-self.registers)
                target = free.pop()
                if last[out] == i:
                    free.append(target)
                else:
                    allocated[out] = target
            unused = [numbers[0]] * (3 - len(numbers))
            self.instructions.append([OPCODES[operation], target, *numbers, *unused])

    def _encode_move(self, o: Operation) -> _Stage:
        """Returns the stage of a move or a reduction."""
        source = o.operands[0].inner(o.axis)
        if o.kind == "move":
            dims = _dims_of_move(source, o.out.inner(o.axis))
        else:
            dims = _dims_of_reduction(source, len(o.out.dims) - (o.axis is not None))
        return _Stage(
            kind=_KINDS[o.kind],
            width=o.width,
            read=self.ref(o.operands[0], o.axis, _span(dims, 1)),
            out=self.ref(o.out, o.axis, _span(dims, 2)),
            op=_REDUCTIONS.get(o.kind, 0),
            dims=dims,
        )

    def _encode_product(self, o: Operation) -> _Stage:
        matrix = o.matrix
        (depth, down), (_, right) = matrix.dims
        base = matrix.array.argument
        last = matrix.offset + (depth - 1) * down + (o.width - 1) * right
        assert base is not None and last < self.arguments[base].elements
        pack = _Pack(
            base=base,
            dtype=_DTYPES.index(matrix.array.dtype),
            offset=matrix.offset,
            depth=depth,
            width=o.width,
            depth_stride=down,
            width_stride=right,
        )
        read, *start = o.operands
        return _Stage(
            kind=_KINDS[o.kind],
            width=o.width,
            read=self.ref(read, o.axis, depth),
            out=self.ref(o.out, o.axis, o.width),
            init=self.ref(start[0], o.axis, o.width) if start else -1,
            pack=self.packs.setdefault(pack, len(self.packs)),
            depth=depth,
            dims=[_NO_DIM] * _MAX_DIMS,
        )


def _dims_of_move(source: Dims, target: Dims) -> list[_MovedDim]:
    """Returns the axes of a row that is moved, the last ones last."""
    pairs = zip(source, target)
    dims = [(size, start, end) for (size, start), (_, end) in pairs if size != 1]
    if len(dims) > _MAX_DIMS:
        raise Unsupported("the step moves elements of an array with more than four axes")
    return [_NO_DIM] * (_MAX_DIMS - len(dims)) + dims


def _dims_of_reduction(source: Dims, count: int) -> list[_MovedDim]:
    """Returns the axes of a row: the first `count` remain, and the reduced elements are the last axis."""
    remaining = collapsed(source[:count])
    pairs = zip(remaining, dense([n for n, _ in remaining]))
    dims = [(size, start, end) for (size, start), (_, end) in pairs]
    dims += [_NO_DIM] * (_MAX_DIMS - len(dims))
    reduced = collapsed(source[count:])
    if reduced:
        dims[-1] = (*reduced[0], 0)
    return dims


def _span(dims: Sequence[_MovedDim], which: int) -> int:
    """Returns the elements between the first and the last one that a stage reads (1) or writes (2), both included."""
    return 1 + sum([(dim[0] - 1) * dim[which] for dim in dims])


class _ElementwiseStage:
    """Encodes elementwise operations on rows of one width.

    A value that no other stage reads stays in a register; all others are read from and written to memory.
    """

    def __init__(self, encoder: CallEncoder, number: int):
        self._encoder = encoder
        self._number = number
        self._instructions: list[_VirtualInstruction] = []
        self._registers = itertools.count()
        self._computed: dict[Array, _Register] = {}  # the register that holds an array
        self._loaded: dict[tuple[int, bool], _Register] = {}  # and a reference, spread or not
        self._is_flat = True

    def encode(self, operations: Sequence[Operation]) -> _Stage:
        for o in operations:
            operands = [self._operand(value, o) for value in o.operands]
            self._instructions.append(_VirtualInstruction(o.kind, self._result(o), operands))
        encoder = self._encoder
        first = len(encoder.instructions)
        encoder.allocate_registers(self._instructions)
        return _Stage(
            first=first,
            count=len(encoder.instructions) - first,
            is_flat=self._is_flat,
            width=operations[0].width,
        )

    def _operand(self, value: NativeOperand, o: Operation) -> int:
        encoder = self._encoder
        if isinstance(value, Uniform):
            number = encoder.literals.setdefault(value.value.hex(), len(encoder.literals))
            return _FIRST_LITERAL - number
        if value.array in self._computed:
            return self._computed[value.array]

        joined = collapsed(value.inner(o.axis))
        is_spread = o.width > 1 and (not joined or joined[0][1] == 0)
        ref = encoder.ref(value, o.axis, 1 if is_spread else o.width)
        self._is_flat &= not is_spread and encoder.row_strides[ref] == o.width
        if not is_spread and value.array.dtype == "float":
            return ref
        register = self._loaded.get((ref, is_spread))
        if register is None:
            register = self._loaded[ref, is_spread] = _Register(next(self._registers))
            operation = "spread" if is_spread else "copy"
            self._instructions.append(_VirtualInstruction(operation, register, [ref]))
        return register

    def _result(self, o: Operation) -> int:
        encoder = self._encoder
        array = o.out.array
        is_read_elsewhere = not encoder.readers[array] <= {self._number}
        if array.is_scratch and not is_read_elsewhere:
            register = self._computed[array] = _Register(next(self._registers))
            return register
        ref = encoder.ref(o.out, o.axis, o.width)
        self._is_flat &= encoder.row_strides[ref] == o.width
        return ref
