"""The encoding of a loop for the kernel, which `src/decode.h` reads.

Shapes: N rows, T time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from jrnn import jaxprs
from jrnn.jaxprs import Var
from jrnn.loops.ir import Loop, Unsupported
from jrnn.loops.kernels.native.operations import (
    Array,
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
_LITERAL = -(2**20)  # in place of the first literal, until the number of registers is known


def stored_dtype(aval: Any) -> str:
    """Returns the type of an array in memory, as the kernel names it."""
    return (
        "bool" if aval.dtype == jnp.bool_ else "bfloat16" if aval.dtype == jnp.bfloat16 else "float"
    )


@dataclass
class CallEncoder:
    """Encodes the steps of a loop for N rows. The arrays of the call are: constants, first carry, xs; last carry, ys."""

    loop: Loop
    constants: Sequence[Var]
    rows: int
    dtype: Any
    refs: dict[tuple[int, ...], int] = field(default_factory=dict)
    literals: dict[str, int] = field(default_factory=dict)
    packs: dict[tuple[int, ...], int] = field(default_factory=dict)
    instructions: list[tuple[int, ...]] = field(default_factory=list)
    stages: list[list[int]] = field(default_factory=list)
    places: dict[Array, int] = field(default_factory=dict)
    readers: dict[Array, set[int]] = field(
        default_factory=lambda: defaultdict(set)
    )  # the stages that read an array
    registers: int = 0
    scratch: int = 0

    def result(self) -> tuple[np.ndarray, np.ndarray, tuple[tuple[Operation, ...], ...]]:
        loop = self.loop
        rows = self.rows
        steps = self.loop.length
        inputs = [*self.constants, *loop.carry, *loop.xs]
        first_x = len(self.constants) + len(loop.carry)
        first_carry = len(inputs)
        self.sizes = [
            jaxprs.elements(v.aval.shape) * (steps if i >= first_x else 1)
            for i, v in enumerate(inputs)
        ]
        itemsize = {"float": self.dtype.itemsize, "bool": 1, "bfloat16": 2}
        dtypes = ["float" if v in loop.carry else stored_dtype(v.aval) for v in inputs]
        values: dict[Var, Any] = {}
        for i, (v, dtype) in enumerate(zip(inputs, dtypes)):
            size = jaxprs.elements(v.aval.shape)
            stacked = size if i >= first_x else 0
            values[v] = View(Array(size, i, stacked, dtype, in_rows=False), dense(v.aval.shape))
        step = Collector(rows, values, frozenset(values[v].array for v in self.constants))
        starts = []
        for i, v in enumerate(loop.carry):
            state = step.new(v.aval.shape, 0 if rows > 1 else None)
            state.array.argument = first_carry + i
            starts.append(Operation("copy", state, [values[v]], state.row))
            values[v] = state
            self.sizes.append(jaxprs.elements(v.aval.shape))
            dtypes.append("float")
        for eqn in loop.eqns:
            try:
                step.run(eqn)
            except Unsupported as why:
                raise Unsupported(why.reason, eqn) from why
        self._write(step, dtypes)
        carries = [start.out.array for start in starts]
        operations = fuse_additions(step.operations)
        stages = [[o] for o in starts] + schedule(operations, carries)
        for number, stage in enumerate(stages):
            for array in {a for o in stage for v in o.views for a in v.array.chain}:
                self.readers[array].add(number)
        for number, stage in enumerate(stages):
            if stage[0].is_elementwise:
                self._encode_elements(number, stage)
            else:
                self._encode_other(stage[0])
        sizes = [n * itemsize[dtype] for n, dtype in zip(self.sizes, dtypes)]
        header = [
            FORMAT,
            self.dtype.itemsize,
            rows,
            steps,
            int(loop.reverse),
            self.scratch,
            self.registers,
            len(starts),
        ]
        instructions = [  # literals are the registers after the others
            [n if n > _LITERAL else n - _LITERAL - 1 - self.registers for n in one]
            for one in self.instructions
        ]
        parts = [sizes, self.refs, instructions, self.stages, self.packs]
        encoded = [*header, len(inputs)]
        for part in parts:
            encoded.append(len(part))
            encoded += [
                n for item in part for n in (item if isinstance(item, (tuple, list)) else (item,))
            ]
        literals = np.array([float.fromhex(text) for text in self.literals], np.float64)
        return np.array(encoded, np.int64), literals, tuple(map(tuple, stages))

    def _write(self, step: Collector, dtypes: list[str]) -> None:
        """Adds the operations that write the outputs and the carry."""
        loop = self.loop
        rows = self.rows
        first_y = len(dtypes)
        for i, y in enumerate(loop.ys):
            shape = y.aval.shape
            dtype = stored_dtype(y.aval)
            size = jaxprs.elements(shape)
            value = step.value(y)
            axis = step.row_axis([value], shape)
            if axis is None and rows > 1:
                raise Unsupported("an output is the same for all rows")
            # In memory, rows lie one after the other only if they are the first axis.
            array = Array(size // rows, first_y + i, size, dtype, in_rows=rows == 1 or axis == 0)
            dims = list(dense(shape))
            if array.in_rows and axis is not None:
                dims[axis] = (dims[axis][0], 0)
            step.assign(View(array, tuple(dims), row=axis if array.in_rows else None), value, axis)
            dtypes.append(dtype)
            self.sizes.append(size * loop.length)
        states = [step.values[v] for v in loop.carry]
        values = [step.value(a) for a in loop.carry_out]
        carried = {s.array for s in states}
        values = [
            step.apply("copy", [v], v.shape)
            if isinstance(v, View) and v.array in carried and v.array is not s.array
            else v
            for v, s in zip(values, states)
        ]
        for state, value in zip(states, values):
            if isinstance(value, View):
                if value.array is state.array and value.is_whole:
                    continue
                value = step.contiguous_rows(value, state.row)
            step.operations.append(Operation("copy", state, [value], state.row))

    # Encoding ---------------------------------------------------------------------------------------------------------

    def _location(self, array: Array) -> tuple[int, int, int]:
        """Returns the base of an array, where it begins, and its stride in time."""
        root, start = array.root
        if root.argument is not None:
            return root.argument, start, root.stacked
        if root not in self.places:
            self.places[root] = self.scratch
            self.scratch += -(-root.width * self.rows // 16) * 16
        return len(self.sizes), self.places[root] + start, 0

    def _ref(self, view: View, axis: int | None, span: int) -> int:
        """Returns the number of a reference to rows of `span` elements at most."""
        base, start, stride = self._location(view.array)
        row, _ = view.by_rows(axis, self.rows)
        offset = start + view.offset
        if base < len(self.sizes):
            last = offset + (self.rows - 1) * row + (self.loop.length - 1) * stride + span
            assert offset >= 0 and last <= self.sizes[base], (
                f"the kernel would leave an array: {last} > {self.sizes[base]}"
            )
        dtype = _DTYPES.index(view.array.root[0].dtype)
        return self.refs.setdefault((base, dtype, offset, row, stride), len(self.refs))

    def _encode_elements(self, number: int, stage: Sequence[Operation]) -> None:
        width = stage[0].width
        inside: dict[Array, int] = {}  # the virtual register that holds an array
        copies: list[
            tuple[str, Any, list[Any]]
        ] = []  # operands: ("ref", n), ("literal", n) or a virtual register
        loaded: dict[Any, int] = {}
        flat = True
        virtual = 0
        for o in stage:
            operands: list[Any] = []
            for value in o.operands:
                if isinstance(value, Uniform):
                    operands.append(
                        ("literal", self.literals.setdefault(value.value.hex(), len(self.literals)))
                    )
                    continue
                if value.array in inside:
                    operands.append(inside[value.array])
                    continue
                joined = collapsed(value.by_rows(o.axis, self.rows)[1])
                spread = width > 1 and (not joined or joined[0][1] == 0)
                ref = self._ref(value, o.axis, 1 if spread else width)
                flat &= not spread and self._stride(ref) == width
                if spread or value.array.root[0].dtype != "float":
                    if (ref, spread) not in loaded:
                        loaded[ref, spread] = virtual
                        copies.append(("spread" if spread else "copy", virtual, [("ref", ref)]))
                        virtual += 1
                    operands.append(loaded[ref, spread])
                else:
                    operands.append(("ref", ref))
            array = o.out.array
            if (
                array.root[0].argument is None
                and array.parent is None
                and self.readers[array] <= {number}
            ):
                out = inside[array] = virtual
                virtual += 1
            else:
                ref = self._ref(o.out, o.axis, width)
                flat &= self._stride(ref) == width
                out = ("ref", ref)
            copies.append((o.kind, out, operands))
        first = len(self.instructions)
        self._allocate_registers(copies)
        self.stages.append(
            [
                0,
                first,
                len(self.instructions) - first,
                int(flat),
                width,
                -1,
                -1,
                -1,
                -1,
                0,
                0,
                *[0] * 12,
            ]
        )

    def _stride(self, ref: int) -> int:
        return list(self.refs)[ref][3]

    def _allocate_registers(self, operations: Sequence[tuple[str, Any, list[Any]]]) -> None:
        """Adds instructions, with a register for each virtual one while it is needed."""
        last = {
            v: i
            for i, (_, out, operands) in enumerate(operations)
            for v in (out, *operands)
            if isinstance(v, int)
        }
        free: list[int] = []
        allocated: dict[int, int] = {}
        for i, (kind, out, operands) in enumerate(operations):
            registers = [self._operand(v, allocated) for v in operands]
            ends = {v for v in operands if isinstance(v, int) and last[v] == i}
            free += [allocated.pop(v) for v in ends]
            if isinstance(out, int):
                if not free:
                    free.append(self.registers)
                    self.registers += 1
                allocated[out] = free.pop()
            target = self._operand(out, allocated)
            self.instructions.append(
                (OPCODES[kind], target, *registers, *[registers[0]] * (3 - len(registers)))
            )
            if isinstance(out, int) and last[out] == i:
                free.append(allocated.pop(out))

    def _operand(self, value: Any, allocated: dict[int, int]) -> int:
        if isinstance(value, int):
            return -1 - allocated[value]
        kind, number = value
        return number if kind == "ref" else _LITERAL - number

    def _encode_other(self, o: Operation) -> None:
        read = o.operands[0]
        dims = [1] * 4
        sources = [0] * 4
        targets = [0] * 4
        pack = -1
        depth = 0
        op = 0
        init = -1
        if o.kind == "product":
            assert o.matrix is not None
            (depth, down), (_, right) = o.matrix.dims
            source = o.matrix.array
            key = (
                source.argument,
                _DTYPES.index(source.dtype),
                o.matrix.offset,
                depth,
                o.width,
                down,
                right,
            )
            last = o.matrix.offset + (depth - 1) * down + (o.width - 1) * right
            assert source.argument is not None and last < self.sizes[source.argument]
            pack = self.packs.setdefault(key, len(self.packs))
            a = self._ref(read, o.axis, depth)
            out = self._ref(o.out, o.axis, o.width)
            if len(o.operands) > 1:
                init = self._ref(o.operands[1], o.axis, o.width)
        elif o.kind == "move":
            inner, outer = (v.by_rows(o.axis, self.rows)[1] for v in (read, o.out))
            pairs = [(n, s, t) for (n, s), (_, t) in zip(inner, outer) if n != 1]
            if len(pairs) > 4:
                raise Unsupported("the step moves elements of an array with more than four axes")
            for i, (n, s, t) in enumerate(reversed(pairs)):
                dims[3 - i], sources[3 - i], targets[3 - i] = n, s, t
            a = self._ref(read, o.axis, _span(dims, sources))
            out = self._ref(o.out, o.axis, _span(dims, targets))
        else:
            inner = read.by_rows(o.axis, self.rows)[1]
            count = len(o.out.dims) - (o.axis is not None)
            kept_dims = collapsed(inner[:count])
            reduced = collapsed(inner[count:]) or [(1, 1)]
            for i, ((n, s), (_, t)) in enumerate(zip(kept_dims, dense([n for n, _ in kept_dims]))):
                dims[i], sources[i], targets[i] = n, s, t
            (dims[3], sources[3]), op = reduced[0], _REDUCTIONS[o.kind]
            a = self._ref(read, o.axis, _span(dims, sources))
            out = self._ref(o.out, o.axis, _span(dims, targets))
        self.stages.append(
            [
                _KINDS[o.kind],
                0,
                0,
                0,
                o.width,
                a,
                out,
                init,
                pack,
                depth,
                op,
                *dims,
                *sources,
                *targets,
            ]
        )


def _span(dims: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(dims, strides))
