"""Loops and branches over nets, as plans: the steps, and the small nets that compute their conditions.

A *body* is a Net, a Part, or a list of them, run in order. A *condition* is the name of a blob that holds one bool, or a
Net whose last external output is such a blob. Conditions that are nets run each time that they are asked.

Blobs and nets that a function makes are named after its first argument; two parts of one plan need different names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

from jrnn.errors import PlanError
from jrnn.execution_step import ExecutionStep, Plan
from jrnn.ir import Net, Op

_BOOL = 5  # TensorProto.BOOL


@dataclass(frozen=True)
class Part:
    """A step with the nets that it and its substeps run."""

    step: ExecutionStep
    nets: tuple[Net, ...]


Body = Union[Net, Part, Sequence[Union[Net, Part]]]
Condition = Union[str, Net]


def make_plan(name: str, *parts: Net | Part) -> Plan:
    """The plan that runs parts one after the other; a net is a step of its own.

    Raises PlanError where two different nets have one name.
    """
    steps = tuple(_as_part(p) for p in parts)
    return Plan(name, _gathered(name, steps), tuple(p.step for p in steps))


def execution_step(name: str, body: Body, **fields: Any) -> Part:
    """A step around nets, or around parts; `fields` are those of ExecutionStep. By default it runs once.

    >>> execution_step("s", Net("n"), num_iter=3).step.networks
    ('n',)
    """
    members = [body] if isinstance(body, (Net, Part)) else list(body)
    if "should_stop_blob" not in fields:
        fields.setdefault("num_iter", 1)
    nets = tuple(m for m in members if isinstance(m, Net))
    if len(nets) == len(members):
        return Part(ExecutionStep(name, networks=tuple(n.name for n in nets), **fields), _gathered(name, (), nets))
    parts = tuple(_as_part(m) for m in members)
    return Part(ExecutionStep(name, tuple(p.step for p in parts), **fields), _gathered(name, parts))


def Do(name: str, *body: Net | Part) -> Part:
    """Runs a body once."""
    return execution_step(name, body)


def DoParallel(name: str, *body: Net | Part) -> Part:
    """Runs the members of a body once, side by side where the runner can."""
    return execution_step(name, [_as_part(m) for m in body], concurrent_substeps=True)


def For(name: str, body: Body, iterations: int) -> Part:
    """Runs a body `iterations` times. The counter lives in a blob, so that a For within a loop starts anew each time.

    >>> from jrnn.plans import run_plan
    >>> add = Net("add", (Op.of("Add", ["x", "x"], ["x"]),), ("x",))
    >>> float(run_plan(make_plan("p", For("f", add, 4)), {"x": 1.0})["x"])
    16.0
    """
    counter, done = f"{name}/counter", f"{name}/done"
    start = Net(f"{name}/start", (Op.of("CreateCounter", [], [counter], init_count=iterations),), (), (counter,))
    ask = Net(f"{name}/ask", (Op.of("CountDown", [counter], [done]),), (counter,), (done,))
    return Do(name, start, execution_step(f"{name}/loop", _before(name, body, ask), should_stop_blob=done))


def While(name: str, condition: Condition, body: Body) -> Part:
    """Asks the condition, and runs a body as long as it holds."""
    return _stopping(name, _before(name, body, *_asked(name, condition, negate=True)))


def Until(name: str, condition: Condition, body: Body) -> Part:
    """Asks the condition, and runs a body as long as it does not hold."""
    return _stopping(name, _before(name, body, *_asked(name, condition, negate=False)))


def DoWhile(name: str, condition: Condition, body: Body) -> Part:
    """Runs a body, and again as long as the condition then holds."""
    return _stopping(name, _after(name, body, *_asked(name, condition, negate=True)))


def DoUntil(name: str, condition: Condition, body: Body) -> Part:
    """Runs a body, and again as long as the condition then does not hold."""
    return _stopping(name, _after(name, body, *_asked(name, condition, negate=False)))


def If(name: str, condition: Condition, then: Body, otherwise: Body | None = None) -> Part:
    """Runs `then` where the condition holds, else `otherwise`. The condition is asked once, before either."""
    return _branch(name, condition, then, otherwise, holds=True)


def IfNot(name: str, condition: Condition, then: Body, otherwise: Body | None = None) -> Part:
    """Runs `then` where the condition does not hold, else `otherwise`. The condition is asked once, before either."""
    return _branch(name, condition, then, otherwise, holds=False)


def Switch(name: str, *cases: tuple[Condition, Body]) -> Part:
    """Goes through (condition, body) cases in order; runs each body whose condition holds when its turn comes."""
    return Do(name, *(If(f"{name}/{k}", condition, body) for k, (condition, body) in enumerate(cases)))


def SwitchNot(name: str, *cases: tuple[Condition, Body]) -> Part:
    """Goes through (condition, body) cases in order; runs each body whose condition does not hold when its turn comes."""
    return Do(name, *(IfNot(f"{name}/{k}", condition, body) for k, (condition, body) in enumerate(cases)))


def _branch(name: str, condition: Condition, then: Body, otherwise: Body | None, *, holds: bool) -> Part:
    blob = condition if isinstance(condition, str) else _last_output(name, condition)
    # Both answers are copied out before either body runs: the bodies may overwrite the condition.
    no, yes = f"{name}/no", f"{name}/yes"
    ask = Net(f"{name}/ask", (Op.of("Not", [blob], [no]), Op.of("Copy", [blob], [yes])), (blob,), (no, yes))
    first = [ask] if isinstance(condition, str) else [condition, ask]
    parts = [Do(f"{name}/condition", *first), _unless(f"{name}/then", no if holds else yes, then)]
    if otherwise is not None:
        parts.append(_unless(f"{name}/else", yes if holds else no, otherwise))
    return Do(name, *parts)


def _unless(name: str, stop: str, body: Body) -> Part:
    """Runs a body once unless the blob `stop` holds; the body may not end early where it changes that blob."""
    own = f"{name}/stop"
    ask = Net(f"{name}/ask", (Op.of("Copy", [stop], [own]),), (stop,), (own,))
    members = [Do(f"{name}/check", ask), Do(f"{name}/body", *_members(body))]
    return execution_step(name, members, should_stop_blob=own, only_once=True)


def _stopping(name: str, members: Sequence[Net | Part]) -> Part:
    """A loop that ends when `name/stop` holds, which is False at first, whatever an earlier run left there."""
    stop = f"{name}/stop"
    start = Net(f"{name}/start", (Op.of("ConstantFill", [], [stop], shape=[1], value=False, dtype=_BOOL),), (), (stop,))
    return Do(name, start, execution_step(f"{name}/loop", members, should_stop_blob=stop))


def _asked(name: str, condition: Condition, *, negate: bool) -> list[Net]:
    """The nets that write a condition, or its negation, to `name/stop`."""
    blob = condition if isinstance(condition, str) else _last_output(name, condition)
    op = Op.of("Not" if negate else "Copy", [blob], [f"{name}/stop"])
    ask = Net(f"{name}/ask", (op,), (blob,), op.outputs)
    return [ask] if isinstance(condition, str) else [condition, ask]


def _last_output(name: str, condition: Net) -> str:
    if not condition.external_outputs:
        raise PlanError(f"{name!r}: net {condition.name!r} is a condition, so its last external output must be a bool")
    return condition.external_outputs[-1]


def _before(name: str, body: Body, *nets: Net) -> list[Net | Part]:
    return [Do(f"{name}/condition", *nets), Do(f"{name}/body", *_members(body))]


def _after(name: str, body: Body, *nets: Net) -> list[Net | Part]:
    return [Do(f"{name}/body", *_members(body)), Do(f"{name}/condition", *nets)]


def _members(body: Body) -> list[Net | Part]:
    return [body] if isinstance(body, (Net, Part)) else list(body)


def _as_part(member: Net | Part) -> Part:
    return member if isinstance(member, Part) else execution_step(member.name, member)


def _gathered(where: str, parts: Sequence[Part], nets: Sequence[Net] = ()) -> tuple[Net, ...]:
    """Every net of some parts, each once."""
    found: dict[str, Net] = {}
    for net in (*nets, *(n for p in parts for n in p.nets)):
        if not net.name:
            raise PlanError(f"{where!r}: a net without a name cannot be part of a plan; name it")
        if found.setdefault(net.name, net) != net:
            raise PlanError(f"{where!r}: two different nets are named {net.name!r}; name them apart")
    return tuple(found.values())
