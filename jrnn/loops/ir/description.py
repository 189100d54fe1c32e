"""What a node of a plan says about itself, which `explain` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jrnn import jaxprs
from jrnn.jaxprs import Atom, Eqn, Var, primitives
from jrnn.jaxprs.jax_internals import scopes, source_line
from jrnn.loops.ir import observers
from jrnn.loops.ir.loop import Loop

_SHOWN = 2  # the most values of each kind that are printed


class Item(NamedTuple):
    """One value of a step: its primitive, its place in the user's code, its type, and its bytes over all steps."""

    what: str
    where: str
    type: str
    bytes: int

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        return f"{self.what} {self.type}, {self.bytes:,} bytes{where}"


def items(values: Iterable[Atom], loop: Loop, per_step: bool = True) -> tuple[Item, ...]:
    """Returns the items of the variables among values of a loop: one value a step, or one in all."""
    producers = jaxprs.producers(loop.eqns)
    count = jaxprs.extent(loop.length) if per_step else 1

    def item(v: Var) -> Item:
        what = "carry"
        where = ""
        eqn = producers.get(v)
        if eqn is not None:
            what = "/".join(filter(None, (*scopes(eqn), eqn.primitive.name)))
            where = _user_line(eqn)
        return Item(what, where, v.aval.str_short(), jaxprs.nbytes(v) * count)

    return tuple(map(item, jaxprs.variables(values)))


def _user_line(eqn: Eqn) -> str:
    """Returns the line of the user's code that made an equation."""
    where = source_line(eqn)
    return "" if where.startswith(observers.OURS) else observers.short_path(where)


class Description(NamedTuple):
    """What a node does with a loop.

    Attributes:
        hoisted: values that are computed for all steps before the loop.
        sunk: values that are computed for all steps after the loop.
        accumulated: values that are summed over all steps after the loop, instead of carried.
        stacked: values that the core writes at each step.
        contractions: the contractions that stay in the loop, also in its branches and inner loops.
        chunk: the number of steps that are run at a time, or None for all.
        remarks: what else there is to say.
        obstacles: why equations stay in the loop.
        counts_contractions: False where the number of contractions that stay says nothing.
    """

    hoisted: tuple[Item, ...] = ()
    sunk: tuple[Item, ...] = ()
    accumulated: tuple[Item, ...] = ()
    stacked: tuple[Item, ...] = ()
    contractions: int = 0
    chunk: int | None = None
    remarks: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()
    counts_contractions: bool = True

    def lines(self, details: bool) -> list[str]:
        """Returns the values that left the loop, by where they are computed.

        Args:
            details: also each value, with its line of code, and the values that the loop writes.
        """
        groups = {
            "computed for all steps before the loop": self.hoisted,
            "computed for all steps after the loop": self.sunk,
            "summed after the loop instead of carried": self.accumulated,
        }
        if details:
            groups["written by the loop at each step"] = self.stacked
        lines = []
        for title, values in groups.items():
            if not values:
                continue
            count = "1 value" if len(values) == 1 else f"{len(values)} values"
            lines.append(f"  {title}: {count}, {sum(item.bytes for item in values):,} bytes")
            if details:
                lines += [f"    {item}" for item in values[:_SHOWN]]
                if len(values) > _SHOWN:
                    lines.append(f"    and {len(values) - _SHOWN} more")
        return lines


def described(loop: Loop, *remarks: str) -> Description:
    """Returns the description of a loop that is not split."""
    return Description(
        stacked=items(loop.ys, loop), contractions=contractions(loop.eqns), remarks=remarks
    )


def contractions(eqns: Sequence[Eqn]) -> int:
    """Returns the number of contractions among equations, their branches and inner loops."""
    count = sum(map(primitives.is_contraction, eqns))
    for eqn in eqns:
        for jaxpr in jaxprs.sub_jaxprs(eqn):
            count += sum(map(primitives.is_contraction, jaxprs.all_equations(jaxpr)))
    return count
