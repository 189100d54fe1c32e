"""The table of rules, one for each primitive: `@rule("name")` fills it, the converter reads it."""

from collections.abc import Callable

from jrnn.convert.emit import Value

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


__all__ = ["RULES", "Rule", "rule"]
