"""Which axes of a step are batch rows: axes that every equation carries along.

Each row of a result depends on the same row of what the step carries and reads, and on constants. Sums over rows are
gradients of constants. Rows come first in the canonical form, and are merged into one axis.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jrnn import jaxprs
from jrnn.jaxprs import Eqn, Var, axes, primitives
from jrnn.loops.ir import Loop
from jrnn.loops.passes.canonical.layouts import Groups, is_unit, natural


class RowAxes:
    """The rows of a loop.

    Attributes:
        merged: whether all axes of rows become one.
        has_transposed_rows: a product reads or computes rows that are not first, as `W x` does with a constant matrix W.
    """

    def __init__(self, loop: Loop, merge: bool):
        self._classes = axes.Classes()
        self._rows_of: dict[Var, list[int]] = {}
        for old, new in zip(loop.carry, loop.carry_out):
            for a in range(old.aval.ndim):
                self._classes.join(old, a, new, a)
        moving = jaxprs.depends(loop.eqns, (*loop.carry, *loop.xs))
        # Axes of what constant matrices are multiplied with, and axes along which there is a matrix for each place.
        products = list[axes.Axis]()
        batches = list[axes.Axis]()
        for eqn in loop.eqns:
            if primitives.is_kind(eqn, "draw"):  # any axis of drawn bits may be rows
                for v in jaxprs.inputs(eqn):
                    self._classes.fix(v, range(v.aval.ndim))
                continue
            axes.join_followed(eqn, self._classes, axes.aligned, ("broadcast_in_dim",), is_unit)
            if eqn.primitive.name == "dot_general":
                _of_product(eqn, moving, self._classes, products, batches)
        broken = {self._classes.root(axis) for axis in self._classes.fixed}
        carried = [self._classes.root((v, a)) for v in loop.carry for (a,) in natural(v.aval.shape)]
        multiplied = {self._classes.root(axis) for axis in products} - broken
        self._order = [root for root in dict.fromkeys(carried) if root in multiplied]
        self._matrix_batch = {self._classes.root(axis) for axis in batches}.difference(self._order)
        variables = (*loop.inputs, *(v for eqn in loop.eqns for v in eqn.outvars))
        present = [self._rows(v) for v in variables]
        self.merged = (
            merge
            and len(self._order) > 1
            and not self._matrix_batch
            and all(
                not of
                or (
                    [self._root(v, a) for a in of] == self._order
                    and all(map(jaxprs.is_known, v.aval.shape))
                )
                for v, of in zip(variables, present)
            )
        )
        of_products = [
            v
            for e in loop.eqns
            if e.primitive.name == "dot_general"
            for v in (*jaxprs.inputs(e), *e.outvars)
        ]
        self.has_transposed_rows = any(
            self._rows(v) and self.groups(v) != natural(v.aval.shape) for v in of_products
        )

    def _root(self, v: Var, axis: int) -> axes.Axis:
        return self._classes.root((v, axis))

    def _rows(self, v: Var) -> list[int]:
        """Returns the axes of a value that are rows, in the order of all rows."""
        if not self._order or not hasattr(v.aval, "shape"):
            return []
        rows = self._rows_of.get(v)
        if rows is None:
            roots = [(self._root(v, a), a) for (a,) in natural(v.aval.shape)]
            rows = [a for root in self._order for of, a in roots if of == root]
            self._rows_of[v] = rows
        return rows

    def _single_row(self, v: Var) -> list[int]:
        """Returns an axis of size 1 of a vector, if it has one and the loop has no rows: it is a matrix of one row."""
        shape = v.aval.shape
        units = [a for a, n in enumerate(shape) if is_unit(n)]
        return units[:1] if not self._order and len(shape) - len(units) == 1 else []

    def groups(self, v: Any) -> Groups:
        """Returns the layout of a value in the canonical form: the rows, then the other axes in their order.

        Axes with a matrix for each place, such as the directions of a layer, stay where they are next to the rows.
        """
        rows = [] if jaxprs.is_literal(v) else self._rows(v) or self._single_row(v)
        merged = [tuple(rows)] if self.merged and rows else []
        if rows and not merged and self._order:
            rows = sorted(
                [
                    *rows,
                    *(
                        a
                        for (a,) in natural(v.aval.shape)
                        if self._root(v, a) in self._matrix_batch
                    ),
                ]
            )
        rest = [g for g in natural(v.aval.shape) if g[0] not in rows]
        return (*(merged or [(a,) for a in rows]), *rest)


def _of_product(
    eqn: Eqn,
    moving: Collection[Var],
    classes: axes.Classes,
    products: list[axes.Axis],
    batches: list[axes.Axis],
) -> None:
    """Joins the axes that a product sums together, and adds the axes of what a constant matrix is multiplied with.

    The axes of the matrix are no rows.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    for i, j in zip(*contracted):
        classes.join(eqn.invars[0], i, eqn.invars[1], j)
    moves = [jaxprs.is_in(a, moving) for a in eqn.invars]
    if all(moves) or not any(moves):
        return
    fixed = moves.index(False)
    other = moves.index(True)
    classes.fix(
        eqn.invars[fixed], [a for a in range(eqn.invars[fixed].aval.ndim) if a not in batch[fixed]]
    )
    x = eqn.invars[other]
    products += [(x, a) for a in range(x.aval.ndim) if a not in (*contracted[other], *batch[other])]
    batches += [(x, a) for a in batch[other]]
