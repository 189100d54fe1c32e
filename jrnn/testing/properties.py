"""The properties that `check_layer` checks: each is a function of a layer that returns what is wrong, or None.

Shapes: T time, N batch. A property looks at the first sequences and steps of the layer's x alone, so that the smallest
counterexample is found by giving it less.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.jaxprs.queries import along_first
from jrnn.jaxprs.trials import central_difference
from jrnn.nets.ir import Values
from jrnn.testing.invariance import (
    Wrong,
    depends_on_batch,
    depends_on_padding,
    differs,
    floats,
    named,
    results_differ,
    run_layer,
    state_rows,
)
from jrnn.testing.reset_effects import effects_of_resets, states_anew
from jrnn.testing.subjects import Layer, Outputs, PyTree

FILLS = (np.nan, np.inf, 1e30)
LONG = 512  # steps
STEP = 1e-5  # of central differences, in float64


class NotApplicable(Exception):
    """A layer, a model or a kernel does not have what a property is about."""


def _itself(subject: Any, failed: Collection[str]) -> Iterable[Any]:
    return (subject,)


@dataclass(frozen=True)
class Property:
    """A name, what must hold, and a function that returns what is wrong with a layer, a model or a trial, or None.

    Attributes:
        rests_on: properties without which it cannot hold either: where one of them does not hold, it is not checked.
        behavior: says what the whole layer does instead, where several faults have the same smallest counterexample.
        variations: what is checked, made from what was given and the names of the properties that do not hold: of a kernel
            many trials, else that itself.
    """

    name: str
    rule: str
    check: Callable[[Any, float], Wrong]
    rests_on: tuple[str, ...] = ()
    behavior: Callable[[Any, float], Wrong] | None = None
    variations: Callable[[Any, Collection[str]], Iterable[Any]] = _itself


PROPERTIES: dict[str, Property] = {}


def registered(table: dict[str, Property]) -> Callable:
    """Returns a decorator that enters a check in the table, with its name and what must hold."""

    def named(name: str, rule: str, *rests_on: str, behavior: Callable | None = None) -> Callable:
        def register(check: Callable) -> Callable:
            table[name] = Property(name, rule, check, rests_on, behavior)
            return check

        return register

    return named


_property = registered(PROPERTIES)
# What parts of a sequence, and sequences of a batch, must have before they are compared with others of their own.
_PARTS = ("determinism", "causality", "chunks", "batch")


def smaller(layer: Layer, steps: int, batch: int) -> Layer:
    """The layer with the first steps and sequences alone."""
    return replace(
        layer, x=layer.x[:steps, :batch], state=state_rows(layer, layer.state, slice(0, batch))
    )


def smallest_of(subject: Any, candidates: Iterable[Any], fails: Callable[[Any], bool]) -> Any:
    """The first of the candidates that fails; the subject itself if none does."""
    for candidate in candidates:
        if fails(candidate):
            return candidate
    return subject


def need(has: bool, what: str) -> None:
    if not has:
        raise NotApplicable(what)


def _own(layer: Layer, **options: Any) -> Outputs:
    """The results of a layer for its own sequences and state."""
    return run_layer(layer, layer.x, layer.state, **options)


def _need_state(layer: Layer) -> None:
    need(layer.state is not None, "no state was given")
    need(not layer.bidirectional, "a bidirectional layer reads the whole sequence")


# Time --------------------------------------------------------------------------------------------------------------------


@_property("causality", "an output does not depend on later inputs", "determinism")
def _(layer: Layer, tolerance: float) -> Wrong:
    need(not layer.bidirectional, "a bidirectional layer reads the whole sequence")
    whole, _ = _own(layer)
    for t in range(1, len(layer.x)):
        x = np.array(layer.x)
        x[t:] = x[t:][::-1] * 1.5 + 1
        start, _ = run_layer(layer, x, layer.state)
        if wrong := differs("y", start[:t], whole[:t], tolerance):
            return f"with other inputs from step {t} on, {wrong}"
    return None


@_property(
    "directions", "both directions are read, and time reversal exchanges them", "determinism"
)
def _(layer: Layer, tolerance: float) -> Wrong:
    need(layer.bidirectional, "the layer has one direction")
    whole, _ = run_layer(layer, layer.x, None)
    for changed, seen in ((0, len(layer.x) - 1), (len(layer.x) - 1, 0)):
        x = np.array(layer.x)
        x[changed] = x[changed] * 1.5 + 1
        computed, _ = run_layer(layer, x, None)
        if differs("y", computed[seen], whole[seen], 0.0) is None:
            return f"the output of step {seen} does not depend on the input of step {changed}"
    if layer.swap is None:
        return None
    computed, _ = run_layer(
        replace(layer, params=layer.swap(layer.params)), np.ascontiguousarray(layer.x[::-1]), None
    )
    half = whole.shape[-1] // 2
    wanted = np.concatenate([whole[..., half:], whole[..., :half]], -1)[::-1]
    wrong = differs("y", computed, wanted, tolerance)
    return wrong and f"of reversed inputs, with the directions' weights exchanged, {wrong}"


@_property(
    "chunks",
    "a sequence in two chunks, the state handed on, gives what it gives whole",
    *("determinism", "causality", "initial state"),
)
def _(layer: Layer, tolerance: float) -> Wrong:
    _need_state(layer)
    whole = _own(layer)
    for cut in range(1, len(layer.x)):
        first, state = run_layer(layer, layer.x[:cut], layer.state)
        second, last = run_layer(layer, layer.x[cut:], state)
        if wrong := results_differ((np.concatenate([first, second]), last), whole, tolerance):
            return f"cut after step {cut - 1}, {wrong}"
    return None


@_property(
    "steps",
    "one step at a time gives what the whole sequence gives",
    *("determinism", "causality", "initial state", "chunks"),
)
def _(layer: Layer, tolerance: float) -> Wrong:
    _need_state(layer)
    whole = _own(layer)
    state = layer.state
    ys = []
    for t in range(len(layer.x)):
        y, state = run_layer(layer, layer.x[t : t + 1], state)
        ys.append(y)
    wrong = results_differ((np.concatenate(ys), state), whole, tolerance)
    return wrong and f"step by step, {wrong}"


@_property("long", "outputs, states and gradients of 512 steps are finite")
def _(layer: Layer, tolerance: float) -> Wrong:
    x = np.resize(layer.x, (LONG, *layer.x.shape[1:]))
    results = dict(zip(("y", "the last state"), run_layer(layer, x, layer.state)))
    if layer.in_jax:
        smooth, join = floats((layer.params, layer.state))

        def total(values: list[Any]) -> Any:
            params, state = join(values)
            return jnp.sum(layer.call(params, jnp.asarray(x), state)[0])

        results["the gradient of params and state"] = jax.grad(total)(
            list(map(jnp.asarray, smooth))
        )
    for what, tree in results.items():
        for name, value in named(what, tree):
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                at = list(map(int, np.argwhere(~np.isfinite(value))[0]))
                return f"{name}{at} is {value[tuple(at)]}"
    return None


# The batch, padding, resets ------------------------------------------------------------------------------------------------


@_property("batch", "a sequence gives in a batch what it gives alone", "determinism")
def _(layer: Layer, tolerance: float) -> Wrong:
    return depends_on_batch(layer, lambda x, state, rows: run_layer(layer, x, state), tolerance)


def _some_lengths(layer: Layer) -> Iterator[np.ndarray]:
    steps, batch = layer.size
    yield np.resize([max(1, steps - 1), steps, 1], batch).astype(np.int32)
    yield np.resize([1, steps], batch).astype(np.int32)


def _of_lengths(layer: Layer, lengths: np.ndarray, tolerance: float) -> Wrong:
    y, last = _own(layer, lengths=lengths)
    for n, length in enumerate(lengths.tolist()):
        row = slice(n, n + 1)
        state = state_rows(layer, layer.state, row)
        if length:
            wanted = run_layer(layer, layer.x[:length, row], state)
            computed = y[:length, row], state_rows(layer, last, row)
        elif state is not None:
            wanted = (None, state)
            computed = (None, state_rows(layer, last, row))
        else:
            continue
        if wrong := results_differ(computed, wanted, tolerance):
            return f"with lengths {lengths.tolist()}, for sequence {n}, {wrong} as of the sequence alone without padding"
    return None


@_property(
    "lengths", "with lengths, a padded sequence gives what it gives without padding", *_PARTS
)
def _(layer: Layer, tolerance: float) -> Wrong:
    need(layer.lengths, "the layer takes no lengths")
    return next((w for n in _some_lengths(layer) if (w := _of_lengths(layer, n, tolerance))), None)


@_property(
    "zero length",
    "a sequence of length 0 leaves its state as it was",
    *(*_PARTS, "initial state", "lengths"),
)
def _(layer: Layer, tolerance: float) -> Wrong:
    need(layer.lengths, "the layer takes no lengths")
    need(layer.state is not None, "no state was given")
    return _of_lengths(
        layer, np.resize([0, layer.size[0]], layer.size[1]).astype(np.int32), tolerance
    )


def _of_filler(layer: Layer, inside: np.ndarray, **options: Any) -> Callable[[float], Values]:
    """Returns a function: the value of all steps outside of `inside` [T, N] -> results and gradients inside."""

    def counted(array: Any, xp: Any = np) -> Any:
        return xp.where(along_first(inside, array), array, 0)

    def results(fill: float) -> Values:
        x = np.array(layer.x)
        x[~inside] = fill
        y, last = run_layer(layer, x, layer.state, **options)
        results = {"y": counted(y), "the last state": last}
        if layer.in_jax:

            def loss(params: PyTree, x: PyTree) -> Any:
                y, last = layer.call(params, x, layer.state, **options)
                return jnp.sum(counted(y, jnp)) + sum(
                    jnp.sum(v.real + v.imag) for v in jax.tree.leaves(last)
                )

            smooth, join = floats(layer.params)
            of_params, of_x = jax.grad(lambda p, x: loss(join(p), x), (0, 1))(
                smooth, jnp.asarray(x)
            )
            results |= {"the gradient of params": of_params, "the gradient of x": counted(of_x)}
        return results

    return results


@_property(
    "padding",
    "what padding holds, NaN too, changes no output, state or gradient",
    *(*_PARTS, "lengths"),
)
def _(layer: Layer, tolerance: float) -> Wrong:
    need(layer.lengths, "the layer takes no lengths")
    for lengths in _some_lengths(layer):
        results = _of_filler(
            layer, np.arange(layer.size[0])[:, None] < lengths[None], lengths=lengths
        )
        where = f"with lengths {lengths.tolist()} and {{}} instead of 0 behind them"
        if wrong := depends_on_padding(results, where, FILLS, tolerance):
            return wrong
    return None


@_property(
    "mask",
    "with a mask, steps that count give what they give alone, and what others hold, NaN too, changes nothing",
    *_PARTS,
)
def _(layer: Layer, tolerance: float) -> Wrong:
    need(layer.mask, "the layer takes no mask")
    steps, batch = layer.size
    for hole in (0, steps // 2, steps - 1):  # padding on the left, a hole, padding on the right
        mask = np.ones((steps, batch), bool)
        mask[hole, ::2] = False
        y, last = _own(layer, mask=mask)
        where = f"with a mask without step {hole} of sequence 0"
        if np.any(y[~mask]):
            return f"{where}, its output is not 0"
        for n in range(min(batch, 2)):  # the one with the hole, and one without
            row = slice(n, n + 1)
            state = state_rows(layer, layer.state, row)
            if not mask[:, n].any():
                continue
            wanted = run_layer(layer, layer.x[mask[:, n], row], state)
            if wrong := results_differ(
                (y[mask[:, n], row], state_rows(layer, last, row)), wanted, tolerance
            ):
                return f"{where}, for sequence {n}, {wrong} as of the other steps alone"
        results = _of_filler(layer, mask, mask=mask)
        if wrong := depends_on_padding(
            results, f"{where} and {{}} instead of 0 in its input", FILLS, tolerance
        ):
            return wrong
    return None


@_property(
    "resets",
    "a reset before a step begins a new sequence there, at the first and last step too",
    *_PARTS,
    behavior=effects_of_resets,
)
def _(layer: Layer, tolerance: float) -> Wrong:
    need(layer.resets, "the layer takes no resets")
    steps, batch = layer.size
    # then each direction begins at another end: states are not handed on, nor compared
    both = layer.bidirectional
    first = None if both else layer.state
    anew = states_anew(layer, layer.reset_to)
    for where in ([0], [steps - 1], *([t] for t in range(1, steps - 1)), range(steps)):
        flags = np.zeros((steps, batch), bool)
        flags[list(where), 0] = True
        y, last = run_layer(layer, layer.x, first, resets=flags)
        for n in range(min(batch, 2)):  # the one with resets, and one without
            row = slice(n, n + 1)
            ends = [0, *np.flatnonzero(flags[:, n]).tolist(), steps]
            parts = []
            state = state_rows(layer, first, row)
            for start, end in itertools.pairwise(ends):
                if start < end:
                    state = state_rows(layer, anew, row) if flags[start, n] else state
                    part, state = run_layer(layer, layer.x[start:end, row], None if both else state)
                    parts.append(part)
            computed = y[:, row], None if both else state_rows(layer, last, row)
            if wrong := results_differ(
                computed, (np.concatenate(parts), None if both else state), tolerance
            ):
                when = f"with resets of sequence 0 before steps {list(where)}"
                return f"{when}, for sequence {n}, {wrong} as of separate sequences"
    return None


# States, gradients, types ------------------------------------------------------------------------------------------------


@_property(
    "initial state", "the initial state changes the outputs, and gets a gradient", "determinism"
)
def _(layer: Layer, tolerance: float) -> Wrong:
    need(layer.state is not None, "no state was given")
    y, _ = _own(layer)
    other, _ = run_layer(
        layer,
        layer.x,
        jax.tree.map(lambda v: np.asarray(v) + np.asarray(0.5, v.dtype), layer.state),
    )
    if differs("y", other, y, 0.0) is None:
        return "y is the same for another initial state"
    dy = np.random.default_rng(0).standard_normal(y.shape).astype(y.dtype)
    leaves, structure = jax.tree.flatten(layer.state)
    gradients = jax.tree.leaves(_gradients(layer, layer.x, layer.state, dy)[1])
    for k, (name, leaf) in enumerate(named("the initial state", layer.state)):
        if leaf.dtype.kind not in "fc" or np.any(gradients[k]):
            continue
        # By a small step, so that it does not cross a kink, such as a maximum's, beyond which the gradient is zero.
        moved = jax.tree.unflatten(
            structure, [*leaves[:k], leaf + np.asarray(0.01, leaf.dtype), *leaves[k + 1 :]]
        )
        if differs("y", run_layer(layer, layer.x, moved)[0], y, tolerance) is not None:
            return f"the gradient of {name} is zero"
    return None


def _gradients(layer: Layer, x: PyTree, state: PyTree, dy: PyTree) -> Outputs:
    """The gradients of sum(y * dy) with respect to x and the state; an integer's gradient has no meaning."""
    if layer.in_jax:

        def total(x: PyTree, state: PyTree) -> Any:
            return jnp.sum(layer.call(layer.params, x, state)[0] * dy)

        return jax.grad(total, (0, 1), allow_int=True)(jnp.asarray(x), state)
    need(layer.gradients is not None, "the layer is not JAX's, and has no `gradients`")
    return layer.gradients(layer.params, x, state, dy)


def _wide(tree: PyTree, dtype: Any = np.float64) -> Any:
    return jax.tree.map(
        lambda v: np.asarray(v).astype(dtype) if np.asarray(v).dtype.kind == "f" else v, tree
    )


@_property(
    "gradients", "gradients equal central differences, in float64", "determinism", "initial state"
)
def _(layer: Layer, tolerance: float) -> Wrong:
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        smooth, join = floats(layer.params)
        point = {"x": np.asarray(layer.x, np.float64), "state": _wide(layer.state)}
        if layer.in_jax:
            point["params"] = _wide(smooth)

        def call(p: Any) -> Any:
            return layer.call(join(p.get("params", smooth)), p["x"], p["state"])[0]

        y = np.asarray(call(point))
        need(y.dtype == np.float64, f"y is {y.dtype} for float64 inputs, weights and states")
        dy = rng.standard_normal(y.shape)
        if layer.in_jax:
            gradients = jax.jit(jax.grad(lambda p: jnp.sum(call(p) * dy), allow_int=True))(point)
            value = jax.jit(lambda p: jnp.sum(call(p) * dy))
        else:
            gradients = dict(zip(("x", "state"), _gradients(layer, point["x"], point["state"], dy)))
            value = lambda p: np.sum(call(p) * dy)  # noqa: E731
        leaves, structure = jax.tree.flatten(point)
        names = [name for name, _ in named("", point)]
        for k, gradient in enumerate(jax.tree.leaves(gradients)):
            if leaves[k].dtype != np.float64:
                continue
            d = rng.standard_normal(leaves[k].shape)
            towards = jax.tree.unflatten(
                structure, [d if j == k else None for j in range(len(leaves))]
            )
            near, far = (
                float(central_difference(value, point, towards, h)) for h in (STEP, 2 * STEP)
            )
            # off by STEP**4
            slope = float(np.sum(np.asarray(gradient) * d))
            difference = (4 * near - far) / 3
            if not abs(slope - difference) <= 1e-6 * max(1.0, abs(difference)):
                return f"along a random direction the slope of {names[k]} is {slope:.8g}, by differences {difference:.8g}"
    return None


@_property("dtype", "outputs and states have the type of the inputs, weights and states")
def _(layer: Layer, tolerance: float) -> Wrong:
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float64) if layer.in_jax else (np.float32,):
        with jax.enable_x64(dtype == jnp.float64):
            wrong = _other_type(layer, dtype)
        if wrong:
            return wrong
    return None


def _other_type(layer: Layer, dtype: Any) -> Wrong:
    """The first output or state that has another type than the inputs, in words; or None."""
    smooth, join = floats(layer.params)
    params = join([jnp.asarray(v, dtype) for v in smooth]) if layer.in_jax else layer.params
    state = _wide(layer.state, dtype)
    y, last = run_layer(replace(layer, params=params), layer.x.astype(dtype), state)
    wide = layer.wide_states and dtype == jnp.bfloat16
    for name, value in [*named("y", y), *(() if wide else named("the last state", last))]:
        if (value.dtype.kind == "f" or value.dtype == jnp.bfloat16) and value.dtype != dtype:
            return (
                f"{name} is {value.dtype} for inputs, weights and states of {np.dtype(dtype).name}"
            )
    return None


@_property("determinism", "two calls give the same bits")
def _(layer: Layer, tolerance: float) -> Wrong:
    first = _own(layer)
    wrong = results_differ(_own(layer), first, 0.0)
    return wrong and f"in the second call, {wrong}"


@_property("jit", "a compiled call gives what a call gives", "determinism")
def _(layer: Layer, tolerance: float) -> Wrong:
    need(layer.in_jax, "the layer is not JAX's")
    eager = _own(layer)
    compiled = jax.jit(lambda x, state: layer.call(layer.params, x, state))(
        jnp.asarray(layer.x), layer.state
    )
    wrong = results_differ(jax.tree.map(np.asarray, compiled), eager, tolerance)
    return wrong and f"compiled, {wrong}"
