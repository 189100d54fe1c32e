"""How much the gradients of a subject differ, blob by blob.

Shapes: S gradients that arrive at the outputs; a gradient of a blob is [S, *its shape].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jrnn.gradcheck.report import BlobAgreement
from jrnn.gradcheck.subject import Subject
from jrnn.gradcheck.three_ways import (
    by_jax,
    by_net,
    direction_errors,
    element_differences,
    second_errors,
    without_gradient,
)

TOLERANCE = 1e-10
INEXACT = 1e-6  # where the net's constants are those of the function rounded to float32
DIFFERENCE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Effort:
    """How closely to look.

    Attributes:
        tolerance: for JAX's gradient against the net's, relative to the gradient's largest element where that is above 1.
        difference_tolerance: the same for JAX's gradient against central differences.
        max_elements: how many elements of a blob are checked by differences one by one.
        directions: along how many random directions larger blobs are checked in addition.
        second: whether second derivatives are compared too.
    """

    tolerance: float = TOLERANCE
    difference_tolerance: float = DIFFERENCE_TOLERANCE
    max_elements: int = 200
    directions: int = 0
    second: bool = False

    def agrees(self, b: BlobAgreement) -> bool:
        """Whether all errors are within their tolerances; a NaN never is."""
        errors = (b.difference_error, b.direction_error, b.second_error)
        return b.net_error <= self.tolerance and all(e is None or e <= self.difference_tolerance for e in errors)


def agreements(s: Subject, effort: Effort) -> tuple[list[BlobAgreement], list[str]]:
    """The agreement of each blob, and notes on what could not be checked."""
    mine, theirs = by_jax(s), by_net(s)
    notes = []
    lost = [n for n in without_gradient(s) if n in s.optional and np.any(mine[n])]
    if lost:
        notes.append(f"the net has no gradient of {', '.join(lost)}, and JAX has: they were left out")
        s = replace(s, wrt=tuple(n for n in s.wrt if n not in lost))
    off = {n: np.max(np.abs(np.asarray(mine[n]) - np.asarray(theirs[n])), axis=0) for n in s.wrt}
    where = {n: chosen(off[n], effort.max_elements) for n in s.wrt}
    differences = element_differences(s, where)
    large = [n for n in s.wrt if len(where[n]) < np.size(s.blobs[n])]
    along = direction_errors(s, mine, large, effort.directions) if effort.directions and large else {}
    twice: dict[str, float] = {}
    if effort.second:
        try:
            twice = second_errors(s)
        except (NotImplementedError, TypeError, ValueError) as e:  # what JAX raises where a rule is missing
            notes.append(f"second derivatives were not compared: {str(e).splitlines()[0]}")
    found = []
    for n in s.wrt:
        b = compare(s, n, mine[n], theirs[n], where[n], differences[n])
        b = replace(b, direction_error=along.get(n), second_error=twice.get(n))
        found.append(replace(b, agrees=effort.agrees(b)))
    return found, notes


def chosen(off: np.ndarray, most: int) -> np.ndarray:
    """Flat indices of up to `most` elements, spread evenly, and of the one where `off` is largest."""
    off = off.reshape(-1)
    if not off.size:
        return np.zeros(0, np.int64)
    spread = np.linspace(0, off.size - 1, min(off.size, most)).astype(np.int64)
    return np.union1d(spread, [int(np.argmax(off))])


def scale_of(gradient: Any) -> float:
    """What errors of a gradient are relative to: its largest element, where that is above 1."""
    return max(1.0, float(np.max(np.abs(gradient), initial=0.0)))


def net_error(by_jax: Any, by_net: Any) -> float:
    return float(np.max(np.abs(np.asarray(by_jax) - np.asarray(by_net)), initial=0.0)) / scale_of(by_jax)


def compare(s: Subject, name: str, by_jax: Any, by_net: Any, where: np.ndarray, differences: Any) -> BlobAgreement:
    """The agreement of one blob whose gradients are [S, ...], and whose differences [S, len(where)] are at `where`."""
    shape = np.shape(by_jax)[1:]
    size = int(np.prod(shape))
    mine, theirs = (np.asarray(g).reshape(s.rows, size)[:, where] for g in (by_jax, by_net))
    scale = scale_of(by_jax)
    off_net, off_difference = np.abs(mine - theirs) / scale, np.abs(mine - differences) / scale
    values, worst, row = (0.0, 0.0, 0.0), (), 0
    if len(where):
        # of the elements that differences were taken of, the one where either of the others is farthest off
        row, k = np.unravel_index(
            int(np.argmax(off_net / TOLERANCE + off_difference / DIFFERENCE_TOLERANCE)), off_net.shape
        )
        worst = tuple(int(i) for i in np.unravel_index(where[k], shape))
        values = (float(mine[row, k]), float(theirs[row, k]), float(differences[row, k]))
    return BlobAgreement(
        name,
        shape,
        net_error(by_jax, by_net),
        float(np.max(off_difference, initial=0.0)),
        len(where),
        worst,
        values,
        False,
        s.row_name(int(row)),
    )


def disagree(s: Subject, effort: Effort, kind: str) -> bool:
    """Whether gradients of a subject disagree, looked at in one way: "net" or "difference"."""
    mine = by_jax(s)
    if kind == "net":
        theirs = by_net(s)
        given = set(s.wrt) - (s.optional.intersection(without_gradient(s)))
        return not all(net_error(mine[n], theirs[n]) <= effort.tolerance for n in given)
    along = direction_errors(s, mine, [n for n in s.wrt if np.size(s.blobs[n])], max(2, effort.directions))
    return not all(e <= effort.difference_tolerance for e in along.values())
