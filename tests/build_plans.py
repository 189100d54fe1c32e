"""Loops and branches over nets, as plans: the steps, and the small nets that compute their conditions.

A *body* is a Net, a Part, or a list of them, run in order. A *condition* is the name of a blob that holds one bool, or a
Net whose last external output is such a blob; such a net runs each time the condition is checked.

Blobs and nets that a function makes are named after its first argument; two parts of one plan need different names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

from jrnn.errors import PlanError
from jrnn.nets.ir import ExecutionStep, Net, Op, Plan

_BOOL = 5  # TensorProto.BOOL


@dataclass(frozen=True)
class Part:
    """A step with the nets that it and its substeps run."""

    step: ExecutionStep
    nets: tuple[Net, ...]


Body = Union[Net, Part, Sequence[Union[Net, Part]]]
Condition = Union[str, Net]


def make_plan(name: str, *parts: Net | Part) -> Plan:
    """Returns a plan that runs parts in order; a net becomes a step. Two nets of one name raise PlanError."""
    steps = tuple(_as_part(p) for p in parts)
    return Plan(name, _gathered(name, steps), tuple(p.step for p in steps))


def execution_step(name: str, body: Body, **fields: Any) -> Part:
    """Returns a step that runs nets or parts, by default once; `fields` are those of ExecutionStep."""
    members = _members(body)
    if "should_stop_blob" not in fields:
        fields.setdefault("num_iter", 1)
    nets = tuple(m for m in members if isinstance(m, Net))
    if len(nets) == len(members):
        return Part(
            ExecutionStep(name, networks=tuple(n.name for n in nets), **fields),
            _gathered(name, (), nets),
        )
    parts = tuple(_as_part(m) for m in members)
    return Part(ExecutionStep(name, tuple(p.step for p in parts), **fields), _gathered(name, parts))


def Do(name: str, *body: Net | Part) -> Part:
    """Runs a body once."""
    return execution_step(name, body)


def DoParallel(name: str, *body: Net | Part) -> Part:
    """Runs the members of a body once, concurrently if the runner can."""
    return execution_step(name, [_as_part(m) for m in body], concurrent_substeps=True)


def For(name: str, body: Body, iterations: int) -> Part:
    """Runs a body `iterations` times. The counter is a blob, so that a For within a loop starts from 0 each time."""
    counter, done = f"{name}/counter", f"{name}/done"
    start = Net(
        f"{name}/start",
        (Op.of("CreateCounter", [], [counter], init_count=iterations),),
        (),
        (counter,),
    )
    ask = Net(f"{name}/ask", (Op.of("CountDown", [counter], [done]),), (counter,), (done,))
    members = [Do(f"{name}/condition", ask), Do(f"{name}/body", *_members(body))]
    return Do(name, start, execution_step(f"{name}/loop", members, should_stop_blob=done))


def While(name: str, condition: Condition, body: Body) -> Part:
    """Runs a body as long as the condition holds, which is checked before each round."""
    return _loop(name, condition, body, stop_if=False)


def Until(name: str, condition: Condition, body: Body) -> Part:
    """Runs a body as long as the condition does not hold, which is checked before each round."""
    return _loop(name, condition, body, stop_if=True)


def DoWhile(name: str, condition: Condition, body: Body) -> Part:
    """Runs a body as long as the condition holds, which is checked after each round."""
    return _loop(name, condition, body, stop_if=False, body_first=True)


def DoUntil(name: str, condition: Condition, body: Body) -> Part:
    """Runs a body as long as the condition does not hold, which is checked after each round."""
    return _loop(name, condition, body, stop_if=True, body_first=True)


def If(name: str, condition: Condition, then: Body, otherwise: Body | None = None) -> Part:
    """Runs `then` if the condition holds, else `otherwise`. The condition is checked once, before either."""
    return _branch(name, condition, then, otherwise, holds=True)


def IfNot(name: str, condition: Condition, then: Body, otherwise: Body | None = None) -> Part:
    """Runs `then` if the condition does not hold, else `otherwise`. The condition is checked once, before either."""
    return _branch(name, condition, then, otherwise, holds=False)


def Switch(name: str, *cases: tuple[Condition, Body]) -> Part:
    """Checks (condition, body) cases in order, and runs each body whose condition then holds."""
    return Do(
        name, *(If(f"{name}/{k}", condition, body) for k, (condition, body) in enumerate(cases))
    )


def SwitchNot(name: str, *cases: tuple[Condition, Body]) -> Part:
    """Checks (condition, body) cases in order, and runs each body whose condition then does not hold."""
    return Do(
        name, *(IfNot(f"{name}/{k}", condition, body) for k, (condition, body) in enumerate(cases))
    )


def _branch(
    name: str, condition: Condition, then: Body, otherwise: Body | None, *, holds: bool
) -> Part:
    blob = condition if isinstance(condition, str) else _last_output(name, condition)
    # Both answers are copied before either body runs, because the bodies may overwrite the condition.
    no, yes = f"{name}/no", f"{name}/yes"
    ask = Net(
        f"{name}/ask",
        (Op.of("Not", [blob], [no]), Op.of("Copy", [blob], [yes])),
        (blob,),
        (no, yes),
    )
    first = [ask] if isinstance(condition, str) else [condition, ask]
    parts = [Do(f"{name}/condition", *first), _unless(f"{name}/then", no if holds else yes, then)]
    if otherwise is not None:
        parts.append(_unless(f"{name}/else", yes if holds else no, otherwise))
    return Do(name, *parts)


def _unless(name: str, stop: str, body: Body) -> Part:
    """Runs a body once unless the blob `stop` holds; it checks a copy, because the body may change that blob."""
    own = f"{name}/stop"
    ask = Net(f"{name}/ask", (Op.of("Copy", [stop], [own]),), (stop,), (own,))
    members = [Do(f"{name}/check", ask), Do(f"{name}/body", *_members(body))]
    return execution_step(name, members, should_stop_blob=own, only_once=True)


def _loop(
    name: str, condition: Condition, body: Body, *, stop_if: bool, body_first: bool = False
) -> Part:
    """Returns a loop that ends when the condition equals `stop_if`; its stop blob is False at first, in every run."""
    stop = f"{name}/stop"
    start = Net(
        f"{name}/start",
        (Op.of("ConstantFill", [], [stop], shape=[1], value=False, dtype=_BOOL),),
        (),
        (stop,),
    )
    blob = condition if isinstance(condition, str) else _last_output(name, condition)
    ask = Net(
        f"{name}/ask", (Op.of("Copy" if stop_if else "Not", [blob], [stop]),), (blob,), (stop,)
    )
    asked = [ask] if isinstance(condition, str) else [condition, ask]
    members = [Do(f"{name}/condition", *asked), Do(f"{name}/body", *_members(body))]
    loop = execution_step(
        f"{name}/loop", members[::-1] if body_first else members, should_stop_blob=stop
    )
    return Do(name, start, loop)


def _last_output(name: str, condition: Net) -> str:
    if not condition.external_outputs:
        raise PlanError(
            f"{name!r}: net {condition.name!r} is a condition, so its last external output must be a bool"
        )
    return condition.external_outputs[-1]


def _members(body: Body) -> list[Net | Part]:
    return [body] if isinstance(body, (Net, Part)) else list(body)


def _as_part(member: Net | Part) -> Part:
    return member if isinstance(member, Part) else execution_step(member.name, member)


def _gathered(where: str, parts: Sequence[Part], nets: Sequence[Net] = ()) -> tuple[Net, ...]:
    """Returns every net of some parts, each once."""
    distinct: dict[str, Net] = {}
    for net in (*nets, *(n for p in parts for n in p.nets)):
        if not net.name:
            raise PlanError(f"{where!r}: a net without a name cannot be part of a plan; name it")
        if distinct.setdefault(net.name, net) != net:
            raise PlanError(f"{where!r}: two different nets are named {net.name!r}; rename one")
    return tuple(distinct.values())
