"""The rows of a chunk that are both read and written, as one triangular system over its steps.

A row of step t is what is known of it, and scores of rows u that are to be solved for:

    R[t] = known[t] + sum over u and s <= t of scores_u[t, s] u[s]

Scores of the same step belong to rows that the step computes before. With the unknowns of a step next to each other, in
the order in which the step computes them, the matrix of the system has ones on its diagonal. For two rows and two steps:

        [ 1           ]  R1 of step 0        With one row a step, as in the delta rule, the inverse of this matrix is
        [ x  1        ]  R2 of step 0        the UT transform of Yang et al. (2024). It makes the WY form of a product
        [ x  x  1     ]  R1 of step 1        of Householder matrices (Bischof and Van Loan, 1987).
        [ x  x  x  1  ]  R2 of step 1

Shapes: C steps of a chunk. "T" labels the step that reads, "S" the one that wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.loops.affine.chunkwise.labeled import Labeled, Product, union, without
from jrnn.loops.affine.chunkwise.solve import SavedForBackward, unit_lower_solve
from jrnn.loops.affine.chunkwise.step_values import StepValues
from jrnn.loops.affine.terms import Row

Rows = dict[Row, Labeled]  # a value of each row


@dataclass(frozen=True)
class RowEquation:
    """What a row of each step is: `known + sum over u of scores[u] . u`, where u are the rows to solve for, [T, S]."""

    known: Product
    scores: Rows


RowEquations = dict[Row, RowEquation]


def solve_rows(equations: RowEquations, values: StepValues, saved: SavedForBackward) -> Rows:
    """Solves `u = known_u + sum over w of scores[w] . w` for all rows u, [T, ...].

    Args:
        equations: of each row, after the rows of the same step that it reads: then the system is triangular.
        values: of the steps.
        saved: saves the inverse and the solution.
    """
    zero = values.factors.number(0)
    known = {row: equation.known or zero for row, equation in equations.items()}
    scores: list[Labeled] = []
    for equation in equations.values():
        scores += equation.scores.values()
    if not scores:
        return {row: values.per_step(array) for row, array in known.items()}

    free = values.form.free
    steps = values.steps
    size = values.size
    labels = union([*known.values(), *scores])
    lead = without(labels, ("T", "S", *free))
    shape = jaxprs.take(size, lead)
    unknowns = steps * len(equations)

    # The unknowns of one step are next to each other.
    right_sides = []
    for array in known.values():
        right_side = array.full((*lead, "T", *free), size)
        right_sides.append(right_side.reshape(*shape, steps, -1))
    block_rows = []
    for equation in equations.values():
        blocks = []
        for row in equations:
            block = equation.scores.get(row, zero)
            blocks.append(block.full((*lead, "T", "S"), size))
        block_rows.append(jnp.stack(blocks, -1))
    matrix = jnp.stack(block_rows, -3).reshape(*shape, unknowns, unknowns)
    right = jnp.stack(right_sides, -2).reshape(*shape, unknowns, -1)
    x = unit_lower_solve(-matrix, right, values.factors.precision, saved)

    n = len(equations)
    x = x.reshape(*shape, steps, n, *jaxprs.take(size, free))
    x = jnp.moveaxis(x, len(shape) + 1, 0)
    labels = (*lead, "T", *free)
    return {row: Labeled(x[i], labels) for i, row in enumerate(equations)}
