"""The table of rules, one for each primitive: `@rule("name")` fills it, the converter reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..emit import Emitter, Value
from ..flat import Node

Rule = Callable[..., "Value | tuple[Value, ...]"]

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers `fn(e, node, *values)`, which appends operators through the emitter `e` and returns the node's results."""

    def register(fn: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"two rules for {name}"
            RULES[name] = fn
        return fn

    return register


def shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.shape)


__all__ = ["RULES", "Emitter", "Node", "Rule", "rule", "shape_of"]
