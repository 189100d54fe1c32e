"""The attacks of scripts/attack.py on values: graphs that other programs refuse, and options of other types."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from attack_files import SEED, Attack, ends, refused


def graphs(count: int) -> Iterator[Attack]:
    """ONNX models that other programs refuse: indices out of range, sizes of 0, sizes that contradict the weights."""
    from onnx.parser import parse_model

    from jrnn.onnx import from_onnx

    rng = random.Random(SEED)
    ops = {
        "Gather <axis = {axis}>": "x, i", "GatherElements <axis = {axis}>": "x, i",
        "ScatterElements <axis = {axis}>": "x, i, x", "ScatterND": "x, j, x", "GatherND": "x, j",
    }  # fmt: skip

    def picked(op: str, inputs: str, i: np.ndarray, j: np.ndarray) -> str:
        text = (
            f"n (float[3,2] x, int64[3,2] i, int64[3,1] j) => (float y) {{ y = {op} ({inputs}) }}"
        )
        source = parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}').SerializeToString()
        return refused(
            lambda: from_onnx(source)({"x": np.ones((3, 2), np.float32), "i": i, "j": j})
        )

    def resized(kind: str, given: list[float]) -> str:
        values = ", ".join(map(str, given))
        inputs = "x, , s" if kind == "float" else "x, , , s"
        text = f"n (float[3,2] x) => (float y) {{ s = Constant <value = {kind}[2] {{{values}}}> () y = Resize ({inputs}) }}"
        return refused(
            lambda: from_onnx(
                parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}').SerializeToString()
            )({"x": np.ones((3, 2), np.float32)})
        )

    for k in range(count):
        op, inputs = rng.choice(list(ops.items()))
        i, j, axis = np.zeros((3, 2), np.int64), np.zeros((3, 1), np.int64), rng.randrange(2)
        wrong = rng.choice([3, 4, -4, -5, 100, -100, 2**31 - 1, -(2**31)])
        i[rng.randrange(3), rng.randrange(2)] = j[rng.randrange(3), 0] = wrong
        op = op.format(axis=axis)
        yield f"{op} {k}: {wrong}", lambda op=op, n=inputs, i=i, j=j: picked(op, n, i, j)
    for kind, given in (
        ("float", [0.0, 1.0]),
        ("float", [-1.0, 1.0]),
        ("int64", [0, 2]),
        ("int64", [2, -1]),
    ):
        yield f"Resize by {given}", lambda kind=kind, given=given: resized(kind, given)


def options(count: int) -> Iterator[Attack]:
    """Values of other types for the options of scans, Newton and while loops; those of `jax.lax.scan` do what it does."""
    import jax
    import jax.numpy as jnp

    import jrnn

    values: list[Any] = [
        "yes", "5", "ab", "", b"x", 0, -1, 2.5, float("nan"), float("inf"), 2**40, 10**30, True, [], [3], ["a"], [1, "a"],
        {}, {"a": 1}, object(), (1, 2), np.array("x"), np.array([object()]), jnp.ones(3), 1j, [[True], [True, False]],
    ]  # fmt: skip
    xs = jnp.ones(5)

    def step(c: Any, x: Any) -> Any:
        return jnp.tanh(c + x), c

    def outcome(scan: Callable[..., Any], option: dict[str, Any]) -> Any:
        try:
            return jax.tree.map(np.shape, scan(step, 0.0, xs, **option))
        except Exception as e:
            return type(e)

    def as_jax(option: dict[str, Any]) -> str:
        ours, theirs = outcome(jrnn.scan, option), outcome(jax.lax.scan, option)
        return "" if ours == theirs else f"{ours}, and jax.lax.scan {theirs}"

    def own(name: str, value: Any) -> str:
        fits = {
            "strict": [True],
            "recompute": [[], ()],
            "memory": [2.5, 2**40, 10**30],
            "lengths": [0],
        }
        allowed = any(type(value) is type(v) and value == v for v in fits.get(name, []))
        return (ends if allowed or name in ("recompute", "memory") else refused)(
            lambda: jrnn.scan(step, 0.0, xs, **{name: value})
        )

    attacks = [
        (f"scan: {n} is {v!r:.40}", lambda n=n, v=v: as_jax({n: v}))
        for n in ("length", "reverse", "unroll")
        for v in values
    ]
    for name in (
        "lengths",
        "resets",
        "mask",
        "until",
        "recompute",
        "strict",
        "memory",
        "axis_name",
        "reset_state",
    ):
        attacks += [(f"scan: {name} is {v!r:.40}", lambda n=name, v=v: own(n, v)) for v in values]
    for name in ("iterations", "tolerance", "damping", "most_bytes", "jacobian"):
        attacks += [
            (
                f"Newton: {name} is {v!r:.40}",
                lambda n=name, v=v: ends(lambda: jrnn.Newton(**{n: v})),
            )
            for v in values
        ]
    for name in ("max_steps", "checkpoints"):

        def loop(name: str, value: Any) -> Any:
            given = {"max_steps": 5, name: value}
            return jax.grad(
                lambda x: jrnn.while_loop(lambda s: s < 9.0, lambda s: 2 * s, x, **given)
            )(3.0)

        attacks += [
            (f"while_loop: {name} is {v!r:.40}", lambda n=name, v=v: ends(lambda: loop(n, v)))
            for v in values
        ]
    yield from random.Random(SEED).sample(attacks, min(count, len(attacks)))
