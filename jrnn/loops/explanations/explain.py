"""`explain_scan` and `explain`: the plans of the loops of one scan and its gradient, and of all loops of a program."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from jrnn import jaxprs
from jrnn.errors import ScanError
from jrnn.jaxprs import primitives
from jrnn.jaxprs.tangents import is_smooth
from jrnn.loops import newton
from jrnn.loops.costs import estimates as costs
from jrnn.loops.explanations import compiled
from jrnn.loops.explanations.compiled import CompiledLoop
from jrnn.loops.ir import observers
from jrnn.loops.rules import lowering
from jrnn.loops.scan.scan import scan
from jrnn.loops.strategies import LoopPlan, Target

_TITLES = {"forward": "without a gradient", "training": "with a gradient"}
_NONE = {"forward": "a while loop, which is left as it is", "training": "nothing has one"}


@dataclass(frozen=True)
class Explanation:
    """The plans of the loops of a scan. It prints their summaries; a plan prints all that was decided.

    Attributes:
        forward: the loop without a gradient.
        training: the forward and the reverse loops of the gradient with respect to everything, in this order; empty if
            nothing has a gradient.
    """

    forward: tuple[LoopPlan, ...]
    training: tuple[LoopPlan, ...]

    @property
    def executor(self) -> str:
        """What runs the forward loop: "scan", "associative", "native", or "lax.scan" if it is not rewritten."""
        return self.forward[0].executor if self.forward else "lax.scan"

    def __str__(self) -> str:
        parts = {"forward": self.forward, "training": self.training}
        lines, example = [], ""
        for name, plans in parts.items():
            shown = plans[:1] if plans and plans[0].executor == "chunks" else plans
            lines.append(f"{_TITLES[name]}: {_total(shown) if plans else _NONE[name]}".rstrip())
            lines += [textwrap.indent(plan.summary(), "  ") for plan in shown]
            if shown != plans:
                lines.append(
                    f"  .{name}[1:] are loops inside of that: over chunks, and over steps for a chunk that overflows"
                )
            example = f"{name}[{len(shown) - 1}]" if plans else example
        if example:
            lines.append(f"details: print(explain_scan(...).{example})")
        return "\n".join(lines)


def _total(plans: tuple[LoopPlan, ...]) -> str:
    """Returns the estimated time of loops next to that of `jax.lax.scan`, or "" if it is not known."""
    choices = [plan.choice for plan in plans]
    pairs = [(c.chosen.estimate, c.of("lax.scan")) for c in choices if c is not None]
    ours, theirs = sum(a.seconds for a, _ in pairs), sum(b.seconds for _, b in pairs if b is not None)
    if len(pairs) < len(plans) or any(b is None for _, b in pairs):
        return ""
    return f"estimated {costs.in_words(ours)} on one core" + (
        ", as lax.scan" if ours == theirs else f", lax.scan {costs.in_words(theirs)}"
    )


def explain_scan(
    f: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any = None, length: int | None = None, **options: Any
) -> Explanation:
    """Returns the plans of the loops that `scan` makes from the same arguments. Nothing is compiled or run.

    Args:
        f, init, xs, length, options: the arguments of `scan`.

    Raises:
        ScanError: as `scan`; and for the executor "newton", which makes no loop.

    >>> import jax.numpy as jnp
    >>> w = jnp.ones((80, 80))
    >>> step, xs = lambda h, x: (jnp.tanh(h @ w + x @ w), h @ w), jnp.ones((20, 2, 80))
    >>> explained = explain_scan(step, jnp.ones((2, 80)), xs, executor="scan")
    >>> print(explained.forward[0])  # doctest: +ELLIPSIS
    forward loop of 20 steps on cpu: scan
      computed for all steps before the loop (12,800 bytes):
        dot_general float32[2,80], 12,800 bytes at ...
      ...
      contractions in the loop: 1
      ...
    >>> [plan.contractions for plan in explained.training]
    [1, 1]
    """

    if newton.options_of(options.get("executor")) is not None:
        raise ScanError(
            "explain_scan: executor 'newton' makes no loop to explain; scan_statistics reports what it does"
        )

    def run(init: Any, xs: Any) -> Any:
        return scan(f, init, xs, length, **options)

    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((init, xs))):
        jax.eval_shape(lambda: run(init, xs))  # a mistake raises what it raises in `scan`
    forward = plans_of(run, init, xs)
    given, outs = jax.tree.leaves((init, xs)), jax.tree.leaves(jax.eval_shape(run, init, xs))
    if not any(map(is_smooth, given)) or not any(map(is_smooth, outs)):
        return Explanation(tuple(forward), ())
    return Explanation(tuple(forward), tuple(plans_of(lambda init, xs: _train(run, init, xs), init, xs)))


@dataclass(frozen=True)
class ProgramExplanation:
    """The plans of all tagged loops of a program. It prints their summaries; a plan prints all that was decided.

    Attributes:
        loops: one plan for each loop that is lowered, in this order.
        compiled: with `compile=True`, the outermost loops of the compiled program, with their kernels; or None.
    """

    loops: tuple[LoopPlan, ...]
    compiled: tuple[CompiledLoop, ...] | None = None

    def __str__(self) -> str:
        if not self.loops:
            return (
                "no loop of jrnn.scan or optimize_scans() is lowered in this program; "
                "call jrnn.scan in place of jax.lax.scan, or decorate the function with jrnn.optimize_scans()"
            )
        count = len(self.loops)
        titled = [f"loop {k} of {count}: {plan.summary()}" for k, plan in enumerate(self.loops, 1)]
        compiled = [f"compiled, {loop}" for loop in self.compiled or ()]
        return "\n".join([*titled, *compiled, f"details: print(explain(...).loops[{count - 1}])"])


def explain(fn: Callable, *args: Any, compile: bool = False, **keywords: Any) -> ProgramExplanation:
    """Returns the plans of all tagged loops of a program, such as a jitted train step. Nothing is run.

    Marked loops are those of `scan`, of jrnn's layers, and those that are traced in `optimize_scans`. A loop of a jitted
    function that is called several times is lowered, and explained, once.

    Args:
        fn: a function, which may be jitted; anything with JAX's method `lower` is lowered with it.
        args, keywords: the arguments of `fn`. Arrays may be `jax.ShapeDtypeStruct`.
        compile: also compile the program, and read how many kernels a step each loop has. On a CPU a loop may be one kernel,
            which is much faster for small states; if it is not, `compiled` names what is in the way.

    Returns:
        The plans, in the order in which the loops are lowered. A plan prints what was done with its loop.

    Raises:
        TypeError: if `fn` is not callable.

    >>> import jax, jax.numpy as jnp
    >>> @jax.jit
    ... def train_step(w, xs):
    ...     def loss(w):
    ...         return jnp.sum(scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.ones((8, 64)), xs, executor="scan")[0])
    ...     return w - 0.1 * jax.grad(loss)(w)
    >>> explained = explain(train_step, jnp.ones((64, 64)), jnp.ones((50, 8, 64)))
    >>> [(plan.title, plan.contractions) for plan in explained.loops]
    [('forward loop of 50 steps on cpu', 1), ('reverse loop of 50 steps on cpu', 1)]
    """
    if not callable(fn):
        raise TypeError(f"explain: the first argument must be a function, but is {fn!r}")
    lowered = fn if hasattr(fn, "lower") else jax.jit(fn)
    with observers.collected() as plans:
        program = lowered.lower(*args, **keywords)
    return ProgramExplanation(tuple(plans), compiled.loops_of(program.compile().as_text()) if compile else None)


def _train(run: Callable, init: Any, xs: Any) -> Any:
    """Returns the results of `run`, and the gradient with respect to its arguments and everything that it closes over."""
    flat, values = jaxprs.without_closure(run, init, xs)
    out, pull = jax.vjp(lambda values, args: jax.tree.leaves(flat(values, *args)), values, (init, xs))
    return out, pull([jnp.ones_like(o) if is_smooth(o) else jnp.zeros(o.shape, jax.dtypes.float0) for o in out])


def plans_of(fn: Callable, *args: Any) -> list[LoopPlan]:
    """Returns the plans of the tagged loops of a function, in the order in which they are lowered.

    A function with collectives cannot be lowered outside its `vmap` or `shard_map`. Its plans are those for JAX's default
    platform.
    """
    with observers.collected() as plans:
        traced = jax.jit(fn).trace(*args)
        notes = tuple(plans.notes)  # of loops that were differentiated
        if any(eqn.primitive.name in primitives.COLLECTIVES for eqn in jaxprs.all_equations(traced.jaxpr.jaxpr)):
            plans += lowering.plans_in(traced.jaxpr.jaxpr, Target.here())
        else:
            traced.lower()
    if plans:
        plans[0] = replace(plans[0], notes=(*plans[0].notes, *notes))
    return plans
