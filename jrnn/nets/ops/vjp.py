"""Operators whose gradient operators are vector-Jacobian products, computed by JAX from the forward functions."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.errors import OpError
from jrnn.nets.ir import Values
from jrnn.nets.ops.values import describe
from jrnn.nets.registry import DECLARED, F, op


def op_with_vjp(
    type: str, *, gradient: str, outputs: Any = 1, dynamic: bool = False, **traits: Any
) -> Callable[[F], F]:
    """Registers a function as the operator `type`, with the gradient operator that `gradient` declares, by its VJP.

    `registry.op` documents the arguments.
    """

    def register(fn: F) -> F:
        op(type, gradient=gradient, outputs=outputs, dynamic=dynamic, **traits)(fn)
        return vjp_op(gradient, outputs[0] if isinstance(outputs, tuple) else outputs, dynamic)(fn)

    return register


def vjp_op(gradient: str, least: int = 1, dynamic: bool = False) -> Callable[[F], F]:
    """Registers the gradient operator that `gradient` declares, as in "FooGradient(x, w, dy) -> x, w", for a function.

    It has the Arguments of the function, and must read all its inputs that are not optional. It computes the outputs
    again and ignores the outputs that it reads. `least` is the least number of outputs of the forward operator.
    """
    declared = DECLARED.fullmatch(gradient)
    assert declared, gradient
    reads = declared["reads"].split(", ")

    def register(fn: F) -> F:
        parameters = inspect.signature(fn, eval_str=True).parameters
        blobs = {n: p for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY}
        writes = (declared["writes"] or next(iter(blobs))).split(", ")

        def backward(*values: Any, **args: Any) -> Any:
            inputs, arriving = _assigned(reads, values, list(blobs))
            chosen = list(inputs) if writes == ["*"] else writes
            places = sorted(arriving)

            def forward(*primals: Any) -> list[Any]:
                all_inputs = {**inputs, **dict(zip(chosen, primals))}
                results = fn(*all_inputs.values(), **args)
                if not isinstance(results, tuple):
                    results = (results,)
                return [results[k] for k in places]

            ys, pullback = jax.vjp(forward, *(jnp.asarray(inputs[n]) for n in chosen))
            gradients = pullback([_shaped(arriving[k], y) for k, y in zip(places, ys)])
            return gradients if len(gradients) > 1 else gradients[0]

        signature = [_parameter(n, blobs, least) for n in reads]
        signature += [p for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
        backward.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
        outputs = (1, None) if writes == ["*"] else len(writes)
        op(declared["type"], outputs=outputs, dynamic=dynamic)(backward)
        return fn

    return register


def _parameter(name: str, blobs: Mapping[str, inspect.Parameter], least: int) -> inspect.Parameter:
    """A blob that a gradient operator reads, as a parameter: optional where the forward operator may lack it."""
    if name == "*":
        return inspect.Parameter("xs", inspect.Parameter.VAR_POSITIONAL)
    if name in blobs:
        is_optional = blobs[name].default is None
    else:
        is_optional = name[0] == "y" and int(name[1:] or 0) >= least
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=None if is_optional else inspect.Parameter.empty)


def _assigned(reads: list[str], values: tuple, blobs: list[str]) -> tuple[Values, dict[int, Any]]:
    """The inputs of the forward function by name, in its order, and the gradients that arrive, by output."""
    several = [f"#{k}" for k in range(len(values) - len(reads) + 1)]  # what `*` stands for
    names = list(reads)
    if "*" in reads:
        star = reads.index("*")
        names[star : star + 1] = several
        blobs = several
    given = dict(zip(names, values))
    arriving = {int(n[2:] or 0): value for n, value in given.items() if n.startswith("dy")}
    return {name: given.get(name) for name in blobs}, arriving


def pulled_back(fn: Callable[[Any], Any], x: Any, dy: Any) -> Any:
    """The gradient with respect to x, for the gradient dy of fn(x)."""
    y, pullback = jax.vjp(fn, jnp.asarray(x))
    return pullback(_shaped(dy, y))[0]


def _shaped(dy: Any, y: Any) -> Any:
    """The gradient of an output, in its shape; OpError where it has other dimensions than 1."""
    if [n for n in dy.shape if n != 1] != [n for n in y.shape if n != 1]:
        raise OpError(f"dy is {describe(dy)}; its shape must be {list(y.shape)}")
    return jnp.reshape(dy, y.shape).astype(y.dtype)
