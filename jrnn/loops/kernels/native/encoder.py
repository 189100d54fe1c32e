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

FORMAT = 4  # decode.h has the same number
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
_MAX_DIMS = 4  # of what a stage moves or reduces
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


class _Place(NamedTuple):
    """Where an instruction reads or writes: the number of a reference ("ref") or of a literal ("literal")."""

    kind: str
    number: int


_VirtualOperand = int | _Place  # an integer is a virtual register


class _VirtualInstruction(NamedTuple):
    operation: str
    out: _VirtualOperand
    operands: list[_VirtualOperand]


@dataclass
class _Stage:
    """A stage as the kernel gets it.

    Attributes:
        kind: 0 for elementwise work, or one of `_KINDS`.
        first, count: of elementwise work: its instructions.
        is_flat: of elementwise work: all rows are as one.
        width: elements of a row of the result.
        read, out, init: references: what is read, what is written, and what a product starts from. -1 for none.
        pack, depth: of a product: the packed matrix, and its rows.
        op: of a reduction: one of `_REDUCTIONS`.
        dims: sizes of what is moved or reduced, and the strides in `read` and `out`.
    """

    kind: int
    width: int
    first: int = 0
    count: int = 0
    is_flat: bool = False
    read: int = -1
    out: int = -1
    init: int = -1
    pack: int = -1
    depth: int = 0
    op: int = 0
    dims: _MovedDims | None = None

    def encoded(self) -> list[int]:
        encoded = [self.kind, self.first, self.count, int(self.is_flat), self.width]
        encoded += [self.read, self.out, self.init, self.pack, self.depth, self.op]
        if self.dims is None:
            return encoded + [0] * (3 * _MAX_DIMS)
        return encoded + self.dims.sizes + self.dims.sources + self.dims.targets


class _MovedDims:
    """Sizes, and strides of sources and targets, of the axes of what a stage moves or reduces."""

    def __init__(self) -> None:
        self.sizes = [1] * _MAX_DIMS
        self.sources = [0] * _MAX_DIMS
        self.targets = [0] * _MAX_DIMS

    def put(self, i: int, size: int, source: int, target: int) -> None:
        self.sizes[i] = size
        self.sources[i] = source
        self.targets[i] = target

    def span(self, strides: Sequence[int]) -> int:
        """Returns the elements between the first and the last one, both included."""
        return 1 + sum((n - 1) * stride for n, stride in zip(self.sizes, strides))


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
            if stage[0].is_elementwise:
                _ElementwiseStage(self, number).encode(stage)
            else:
                self._encode_other(stage[0])

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

    def _argument(self, v: Var, dtype: str, stacked: bool) -> Array:
        """Adds an argument, which holds a value of one step or, if stacked, of all steps."""
        size = jaxprs.elements(v.aval.shape)
        array = Array(
            width=size,
            argument=len(self.arguments),
            stacked=size if stacked else 0,
            dtype=dtype,
            in_rows=False,
        )
        self.arguments.append(_Argument(size * (self.loop.length if stacked else 1), dtype))
        return array

    def _carry_starts(self, step: Collector) -> list[Operation]:
        """Returns the operations that copy the first carry to the last carry, which the steps change."""
        starts = []
        for v in self.loop.carry:
            axis = 0 if self.rows > 1 else None
            state = step.new(v.aval.shape, axis)
            state.array.argument = len(self.arguments)
            self.arguments.append(_Argument(jaxprs.elements(v.aval.shape), "float"))
            starts.append(Operation("copy", state, [step.values[v]], axis))
            step.values[v] = state
        return starts

    def _write_outputs(self, step: Collector) -> None:
        for y in self.loop.ys:
            shape = y.aval.shape
            size = jaxprs.elements(shape)
            value = step.value(y)
            axis = step.row_axis([value], shape)
            if axis is None and self.rows > 1:
                raise Unsupported("an output is the same for all rows")
            # In memory, rows lie one after the other only if they are the first axis.
            in_rows = self.rows == 1 or axis == 0
            array = Array(
                width=size // self.rows,
                argument=len(self.arguments),
                stacked=size,
                dtype=stored_dtype(y),
                in_rows=in_rows,
            )
            dims = list(dense(shape))
            if in_rows and axis is not None:
                dims[axis] = (dims[axis][0], 0)
            target = View(array, tuple(dims), row=axis if in_rows else None)
            step.assign(target, value, axis)
            self.arguments.append(_Argument(size * self.loop.length, array.dtype))

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
        instructions = [list(map(self._with_literals, i)) for i in self.instructions]
        for part in (argument_bytes, self.refs, instructions, stages, self.packs):
            encoded.append(len(part))
            encoded.extend(itertools.chain.from_iterable(part))
        return np.array(encoded, np.int64)

    def _with_literals(self, number: int) -> int:
        """Returns a number in an instruction, where literals are the registers after the others."""
        return number if number > _FIRST_LITERAL else number - _FIRST_LITERAL - 1 - self.registers

    def _location(self, array: Array) -> tuple[int, int, int]:
        """Returns the base of an array, where it begins, and its stride in time."""
        root, start = array.root
        if root.argument is not None:
            return root.argument, start, root.stacked
        if root not in self.scratch_offsets:
            self.scratch_offsets[root] = self.scratch
            self.scratch += -(-root.width * self.rows // 16) * 16
        return len(self.arguments), self.scratch_offsets[root] + start, 0

    def ref(self, view: View, axis: int | None, span: int) -> int:
        """Returns the number of a reference to rows of `span` elements at most."""
        base, start, step_stride = self._location(view.array)
        row_stride, _ = view.by_rows(axis, self.rows)
        offset = start + view.offset
        if base < len(self.arguments):
            size = self.arguments[base].elements
            last = offset + (self.rows - 1) * row_stride + (self.loop.length - 1) * step_stride
            last += span
            assert offset >= 0 and last <= size, f"the kernel would leave an array: {last} > {size}"
        dtype = _DTYPES.index(view.array.root[0].dtype)
        ref = _Ref(base, dtype, offset, row_stride, step_stride)
        return self.refs.setdefault(ref, len(self.refs))

    def row_stride(self, ref: int) -> int:
        return list(self.refs)[ref].row_stride

    def allocate_registers(self, instructions: Sequence[_VirtualInstruction]) -> None:
        """Adds instructions, with a register for each virtual one while it is needed."""
        last: dict[_VirtualOperand, int] = {}
        for i, instruction in enumerate(instructions):
            for place in (instruction.out, *instruction.operands):
                last[place] = i

        free: list[int] = []
        allocated: dict[int, int] = {}
        for i, (operation, out, operands) in enumerate(instructions):
            numbers = [_operand(v, allocated) for v in operands]
            ends = {v for v in operands if isinstance(v, int) and last[v] == i}
            free += map(allocated.pop, ends)
            if isinstance(out, int):
                if not free:
                    free.append(self.registers)
                    self.registers += 1
                allocated[out] = free.pop()
            unused = [numbers[0]] * (3 - len(numbers))
            target = _operand(out, allocated)
            self.instructions.append([OPCODES[operation], target, *numbers, *unused])
            if isinstance(out, int) and last[out] == i:
                free.append(allocated.pop(out))

    def _encode_other(self, o: Operation) -> None:
        """Adds the stage of a product, a reduction or a move."""
        stage = _Stage(_KINDS[o.kind], o.width)
        self.stages.append(stage)
        if o.matrix is not None:
            self._encode_product(stage, o)
            return
        source = o.operands[0].by_rows(o.axis, self.rows)[1]
        if o.kind == "move":
            dims = _dims_of_move(source, o.out.by_rows(o.axis, self.rows)[1])
        else:
            stage.op = _REDUCTIONS[o.kind]
            dims = _dims_of_reduction(source, len(o.out.dims) - (o.axis is not None))
        stage.dims = dims
        stage.read = self.ref(o.operands[0], o.axis, dims.span(dims.sources))
        stage.out = self.ref(o.out, o.axis, dims.span(dims.targets))

    def _encode_product(self, stage: _Stage, o: Operation) -> None:
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
        stage.pack = self.packs.setdefault(pack, len(self.packs))
        stage.depth = depth
        stage.read = self.ref(o.operands[0], o.axis, depth)
        stage.out = self.ref(o.out, o.axis, o.width)
        if len(o.operands) > 1:
            stage.init = self.ref(o.operands[1], o.axis, o.width)
        stage.dims = _MovedDims()


def _operand(place: _VirtualOperand, allocated: dict[int, int]) -> int:
    """Returns the number of an operand: references from 0 on, registers from -1 down, and literals below them."""
    if isinstance(place, int):
        return -1 - allocated[place]
    return place.number if place.kind == "ref" else _FIRST_LITERAL - place.number


def _dims_of_move(source: Dims, target: Dims) -> _MovedDims:
    """Returns the axes of a row that is moved, the last ones last."""
    dims = _MovedDims()
    i = _MAX_DIMS
    for (size, source_stride), (_, target_stride) in zip(reversed(source), reversed(target)):
        if size != 1:
            i -= 1
            if i < 0:
                raise Unsupported("the step moves elements of an array with more than four axes")
            dims.put(i, size, source_stride, target_stride)
    return dims


def _dims_of_reduction(source: Dims, count: int) -> _MovedDims:
    """Returns the axes of a row, of which the first `count` remain; the reduced elements are the last axis."""
    dims = _MovedDims()
    remaining = collapsed(source[:count])
    targets = dense([n for n, _ in remaining])
    for i, ((size, stride), (_, target)) in enumerate(zip(remaining, targets)):
        dims.put(i, size, stride, target)
    reduced = collapsed(source[count:])
    if reduced:
        dims.put(_MAX_DIMS - 1, *reduced[0], 0)
    return dims


class _ElementwiseStage:
    """Encodes elementwise operations on rows of one width.

    A value that no other stage reads stays in a register; all others are read from and written to memory.
    """

    def __init__(self, encoder: CallEncoder, number: int):
        self._encoder = encoder
        self._number = number
        self._instructions: list[_VirtualInstruction] = []
        self._registers = itertools.count()  # virtual ones
        self._computed: dict[Array, int] = {}  # the register that holds an array
        self._loaded: dict[tuple[int, bool], int] = {}  # and a reference, spread or not
        self._is_flat = True

    def encode(self, operations: Sequence[Operation]) -> None:
        for o in operations:
            operands = [self._operand(value, o) for value in o.operands]
            self._instructions.append(_VirtualInstruction(o.kind, self._result(o), operands))
        encoder = self._encoder
        first = len(encoder.instructions)
        encoder.allocate_registers(self._instructions)
        stage = _Stage(
            kind=0,
            width=operations[0].width,
            first=first,
            count=len(encoder.instructions) - first,
            is_flat=self._is_flat,
        )
        encoder.stages.append(stage)

    def _operand(self, value: NativeOperand, o: Operation) -> _VirtualOperand:
        encoder = self._encoder
        if isinstance(value, Uniform):
            number = encoder.literals.setdefault(value.value.hex(), len(encoder.literals))
            return _Place("literal", number)
        if value.array in self._computed:
            return self._computed[value.array]

        joined = collapsed(value.by_rows(o.axis, encoder.rows)[1])
        is_spread = o.width > 1 and (not joined or joined[0][1] == 0)
        ref = encoder.ref(value, o.axis, 1 if is_spread else o.width)
        self._is_flat &= not is_spread and encoder.row_stride(ref) == o.width
        if not is_spread and value.array.root[0].dtype == "float":
            return _Place("ref", ref)
        register = self._loaded.get((ref, is_spread))
        if register is None:
            register = self._loaded[ref, is_spread] = next(self._registers)
            operation = "spread" if is_spread else "copy"
            load = _VirtualInstruction(operation, register, [_Place("ref", ref)])
            self._instructions.append(load)
        return register

    def _result(self, o: Operation) -> _VirtualOperand:
        encoder = self._encoder
        array = o.out.array
        is_read_elsewhere = not encoder.readers[array] <= {self._number}
        if array.is_scratch and not is_read_elsewhere:
            register = self._computed[array] = next(self._registers)
            return register
        ref = encoder.ref(o.out, o.axis, o.width)
        self._is_flat &= encoder.row_stride(ref) == o.width
        return _Place("ref", ref)
