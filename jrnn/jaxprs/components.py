"""Groups of carries that read each other: the strongly connected components of the graph of their reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jrnn.jaxprs.programs import Atom, Eqn, Var, is_in
from jrnn.jaxprs.queries import depends

Group = tuple[int, ...]


def components(reads: Sequence[Collection[int]]) -> tuple[list[Group], list[set[int]]]:
    """Groups nodes that reach each other.

    Args:
        reads: for each node, the nodes that it reads.

    Returns:
        The groups, each after those that it reads; and for each node, all that it reaches, itself among them.

    >>> components([{1}, {0}, {2, 0}])
    ([(0, 1), (2,)], [{0, 1}, {0, 1}, {0, 1, 2}])
    """
    count = range(len(reads))
    reach = [{*mine, i} for i, mine in enumerate(reads)]
    for k in count:  # the transitive closure
        reach = [mine | reach[k] if k in mine else mine for mine in reach]
    groups = dict.fromkeys(tuple(j for j in count if j in reach[i] and i in reach[j]) for i in count)
    return sorted(groups, key=lambda group: len(reach[group[0]])), reach


def carry_groups(eqns: Sequence[Eqn], carry: Sequence[Var], new: Sequence[Atom]) -> tuple[list[Group], list[set[int]]]:
    """Groups the carries of a step that read each other, as `components` does.

    Args:
        eqns: the equations of the step.
        carry, new: the carries, and their new values.
    """
    after = [depends(eqns, [v]) for v in carry]
    return components([{j for j, mine in enumerate(after) if is_in(out, mine)} for out in new])
