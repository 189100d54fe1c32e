"""Which axes of a step are batch rows: axes that every equation carries along.

Each row of a result depends on the same row of what the step carries and reads, and on constants. Sums over rows are
gradients of constants. Rows come first in the canonical form, and are merged into one axis:

    h = tanh(W @ h + x)        h, x: [D, N, M], W: [D, D]       the rows are axes 1 and 2: the form has [N * M, D]

The axes of all values are divided into classes. Two axes are in one class if an equation carries one to the other, or if
they are the same axis of a carry before and after the step. A class has rows if a product with a constant matrix carries it
along, a carry has it, and no equation does anything else with it (`axes.Classes.fixed`).
"""

from __future__ import annotations

from collections.abc import Collection

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var, axes, primitives
from jrnn.loops.ir import Loop
from jrnn.loops.passes.canonical.layouts import Groups, apart_groups, is_unit, natural


class RowAxes:
    """The rows of a loop.

    Attributes:
        merged: whether all axes of rows become one.
        has_transposed_rows: a product reads or computes rows that are not first, as `W x` does with a constant matrix W.
    """

    def __init__(self, loop: Loop, merge: bool):
        self._rows_of: dict[Var, list[int]] = {}
        self._classes = axes.Classes()
        products: list[axes.Axis] = []  # axes of the operands of constant matrices
        batches: list[axes.Axis] = []  # axes with a matrix for each place
        for old, new in zip(loop.carry, loop.carry_out):
            for a in range(old.aval.ndim):
                self._classes.join(old, a, new, a)
        for eqn in loop.eqns:
            if primitives.is_kind(eqn, "draw"):  # any axis of drawn bits may be rows
                for v in jaxprs.inputs(eqn):
                    self._classes.fix(v, range(v.aval.ndim))
                continue
            followed = ("broadcast_in_dim",)
            axes.join_followed(eqn, self._classes, axes.aligned, followed, is_unit)
            if eqn.primitive.name == "dot_general":
                of_x, of_batch = self._join_product(eqn, loop.varying)
                products += of_x
                batches += of_batch

        # The rows, in the order of the first carry that has them.
        root = self._classes.root
        multiplied = set(map(root, products)).difference(map(root, self._classes.fixed))
        order: dict[axes.Axis, None] = {}
        for v in loop.carry:
            for (a,) in natural(v.aval.shape):
                if self._root(v, a) in multiplied:
                    order[self._root(v, a)] = None
        self._order = list(order)
        self._matrix_batch = set(map(root, batches)).difference(self._order)

        can_merge = merge and len(self._order) > 1 and not self._matrix_batch
        variables = (*loop.inputs, *jaxprs.results(loop.eqns))
        self.merged = can_merge and all(map(self._has_all_rows_or_none, variables))
        self.has_transposed_rows = any(map(self._is_product_of_transposed_rows, loop.eqns))

    def _join_product(
        self,
        eqn: Eqn,
        varying: Collection[Var],
    ) -> tuple[list[axes.Axis], list[axes.Axis]]:
        """Joins the axes that a product sums together. Those of a constant matrix are no rows.

        Returns the axes of operands of a constant matrix, and the axes with a matrix for each place.
        """
        contracted, batch = eqn.params["dimension_numbers"]
        for i, j in zip(*contracted):
            self._classes.join(eqn.invars[0], i, eqn.invars[1], j)
        varies = [jaxprs.is_in(a, varying) for a in eqn.invars]
        if all(varies) or not any(varies):
            return [], []
        const = varies.index(False)
        matrix = eqn.invars[const]
        self._classes.fix(matrix, {*range(matrix.aval.ndim)}.difference(batch[const]))
        x = eqn.invars[1 - const]
        of_batch = [(x, a) for a in batch[1 - const]]
        summed = [(x, a) for a in contracted[1 - const]]
        of_x = [(x, a) for a in range(x.aval.ndim)]
        return [axis for axis in of_x if axis not in (*summed, *of_batch)], of_batch

    def _has_all_rows_or_none(self, v: Var) -> bool:
        """Whether a value has all rows in their order, in axes of known sizes, or no rows."""
        rows = self._rows(v)
        if not rows:
            return True
        in_order = [self._root(v, a) for a in rows] == self._order
        return in_order and all(map(jaxprs.is_known, v.aval.shape))

    def _is_product_of_transposed_rows(self, eqn: Eqn) -> bool:
        """Whether a product reads or computes rows that are not first."""
        if eqn.primitive.name != "dot_general":
            return False
        for v in (*jaxprs.inputs(eqn), *eqn.outvars):
            if self._rows(v) and self.groups(v) != natural(v.aval.shape):
                return True
        return False

    def _root(self, v: Var, axis: int) -> axes.Axis:
        return self._classes.root((v, axis))

    def _rows(self, v: Var) -> list[int]:
        """Returns the axes of a value that are rows, in the order of all rows."""
        if not self._order or not hasattr(v.aval, "shape"):
            return []
        rows = self._rows_of.get(v)
        if rows is None:
            axes_of: dict[axes.Axis, list[int]] = {}
            for (a,) in natural(v.aval.shape):
                axes_of.setdefault(self._root(v, a), []).append(a)
            rows = []
            for root in self._order:
                rows += axes_of.get(root, [])
            self._rows_of[v] = rows
        return rows

    def _single_row(self, v: Var) -> list[int]:
        """Returns an axis of size 1 of a vector, if it has one and the loop has no rows: it is a matrix of one row."""
        shape = v.aval.shape
        units = [a for a, n in enumerate(shape) if is_unit(n)]
        is_vector = len(shape) - len(units) == 1
        return units[:1] if is_vector and not self._order else []

    def groups(self, v: Atom) -> Groups:
        """Returns the layout of a value in the canonical form: the rows, then the other axes in their order.

        Axes with a matrix for each place, such as the directions of a layer, stay where they are next to the rows.
        """
        every = natural(v.aval.shape)
        if jaxprs.is_literal(v):
            return every
        rows = self._rows(v) or self._single_row(v)
        if rows and self._order and not self.merged:
            batch = [a for (a,) in every if self._root(v, a) in self._matrix_batch]
            rows = sorted([*rows, *batch])
        first = apart_groups(rows)
        if rows and self.merged:
            first = [tuple(rows)]
        rest = [group for group in every if group[0] not in rows]
        return (*first, *rest)
