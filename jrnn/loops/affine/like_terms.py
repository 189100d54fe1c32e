"""Adds up like terms: `S + a * S` is one term, S times the factor `1 + a`.

A step that repeats `S = S + a * S` would have 2^n terms if products were only multiplied out. Terms
of one operand become one term, whose factor is a sum of known values. What the terms have in common
stays outside of the sum, so that n repetitions have n factors.

Not all terms are added up. The sum of two outer products `p r + q s` is a matrix, which must not be
computed for each step. So the sum of known values is no larger than the largest of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from jrnn import jaxprs
from jrnn.loops.affine.terms import Factor, Product, Term, Terms, UnifiedLabels, factors_of
from jrnn.loops.ir import Unsupported

_MOST_TERMS = 32
_MOST_FACTORS = 64


def added_up(
    labels: UnifiedLabels,
    first: Sequence[Term],
    second: Iterable[Term],
) -> Terms:
    """Returns the terms of a sum.

    Args:
        labels: of the axes of the factors.
        first: the terms of an operand, which are added up.
        second: the terms of another operand.

    Raises:
        Unsupported: if there are too many terms.
    """
    terms = list(first)
    for term in second:
        for i, other in enumerate(terms):
            total = _sum_of_two(labels, other, term)
            if total is not None:
                terms[i] = total
                break
        else:
            terms.append(term)
    return bounded(terms)


def bounded(terms: Sequence[Term]) -> Terms:
    """Returns the terms; raises Unsupported if there are too many, or one has too many factors."""
    if len(terms) > _MOST_TERMS:
        raise Unsupported(f"it has more than {_MOST_TERMS} terms")
    if max((len(term.factors) for term in terms), default=0) > _MOST_FACTORS:
        raise Unsupported(f"a term has more than {_MOST_FACTORS} factors")
    return tuple(terms)


def _sum_of_two(
    labels: UnifiedLabels,
    a: Term,
    b: Term,
) -> Term | None:
    """Returns the sum of two terms as one term, or None if they are not alike."""
    if a.operand is not b.operand or a.new_state != b.new_state:
        return None
    common, rest_of_a, rest_of_b = _apart(labels, a.factors, b.factors)
    rest = [*rest_of_a, *rest_of_b]
    if any(f.kind == "identity" for f in rest):
        return None
    labels_of_rest = list(map(labels.labels_of, rest))
    along = set().union(*labels_of_rest)
    if along and along not in labels_of_rest:
        return None
    axes = labels.long_axes
    if len(axes) > 1 and along.issuperset(axes):
        return None

    addends = (Term(None, rest_of_a, a.sign), Term(None, rest_of_b, b.sign))
    total = Factor(addends, tuple(sorted(along)), "sum")
    return replace(a, factors=(*common, total), sign=1)


def _apart(
    labels: UnifiedLabels,
    a: Sequence[Factor],
    b: Sequence[Factor],
) -> tuple[list[Factor], Product, Product]:
    """Returns the factors that two products have in common, and the other factors of each."""
    common = []
    for factor, other in zip(a, b):  # all but the last ones, in repeated sums
        if factor is not other:
            break
        common.append(factor)
    a = a[len(common) :]
    b = b[len(common) :]
    places: dict[int, list[int]] = {}
    for i, factor in enumerate(b):
        places.setdefault(_key(labels, factor), []).append(i)
    rest_of_a = []
    is_common = [False] * len(b)
    for factor in a:
        same = places.get(_key(labels, factor))
        if same:
            common.append(factor)
            is_common[same.pop()] = True
        else:
            rest_of_a.append(factor)
    rest_of_b = [factor for factor, also_in_a in zip(b, is_common) if not also_in_a]
    return common, tuple(rest_of_a), tuple(rest_of_b)


def _key(labels: UnifiedLabels, factor: Factor) -> int:
    """Returns a number that only factors of the same value have.

    It is found once for each factor. Two equal factors may have two numbers, if their labels were
    unified in between: then a sum has one more term.
    """
    for part in factors_of([factor], labels.numbers):
        operand = part.operand
        if part.kind == "sum":
            addends = []
            for term in operand:
                addends.append((term.sign, *jaxprs.take(labels.numbers, term.factors)))
            operand = tuple(addends)
        elif isinstance(operand, tuple):
            operand = tuple(jaxprs.take(labels.numbers, operand))
        elif jaxprs.is_literal(operand):
            is_number = not operand.aval.shape
            value = np.asarray(operand.val).item() if is_number else id(operand)
            operand = (operand.aval.dtype, value)
        value = (operand, labels.resolved(part.labels), part.kind, part.index)
        labels.numbers[part] = labels.number_of.setdefault(value, len(labels.number_of))
    return labels.numbers[factor]
