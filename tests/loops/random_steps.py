"""Random programs around a loop, run with `jrnn.scan` and with `jax.lax.scan`: whatever differs is a defect.

    python tests/loops/random_steps.py --count 3000 --seed 0

Each program is data (`Program`) that follows from its seed, so that one that differs is made smaller by leaving out parts.
`step_ingredients.py` has the parts of a step.

Shapes: T time, N batch, H hidden.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    if "--as-users" not in sys.argv:
        import conftest  # noqa: F401  XLA's flags, before JAX starts

import jax
import jax.numpy as jnp
import numpy as np
from quick_compilation import OPTIONS
from step_ingredients import CARRIES, INPUTS, OPERATIONS, OUTPUTS, params

import jrnn
from jrnn.loops import scan
from jrnn.loops.ir import strict_passes

Run = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class Program:
    """A loop and what is done with it.

    Attributes:
        inputs, carries, outputs, operations: ingredients of the step; numbers choose their operands among all values.
        around: what the loop stands in.
        transformed: what is computed of it.
        steps, reverse, unroll: as in `scan`.
        masked: "lengths" or "resets", which are written out for `jax.lax.scan`.
        keywords: of `jrnn.scan` alone.
        dtype: of the parameters; extreme ones have entries of 1e30, 1e-30 and 0.
    """

    inputs: tuple[str, ...]
    carries: tuple[tuple[str, int], ...]
    operations: tuple[tuple[str, int, int], ...]
    outputs: tuple[tuple[str, int, int], ...]
    around: str = "plain"
    transformed: str = "value"
    steps: int = 4
    reverse: bool = False
    unroll: int | bool = 1
    masked: str = ""
    keywords: tuple[tuple[str, Any], ...] = ()
    dtype: str = "float64"
    extreme: bool = False

    @property
    def has_effects(self) -> bool:
        return any(
            "callback" in name or "ref" in name or "print" in name for name, *_ in self.operations
        )

    @property
    def ingredients(self) -> list[str]:
        """The names of all parts."""
        parts = (*self.carries, *self.operations, *self.outputs)
        return [*self.inputs, *(part[0] for part in parts), self.around, self.transformed]


def drawn(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)

    def some(table: Any, most: int, numbers: int) -> tuple:
        """Ingredients, each with numbers that choose its operands."""
        names = rng.choices(list(table), k=rng.randint(1, most))
        return tuple((name, *(rng.randrange(100) for _ in range(numbers))) for name in names)

    extreme = rng.random() < 0.15
    options = [
        (),
        (),
        (),
        (("recompute", "contractions"),),
        (("recompute", "sqrt"),),
        (("recompute", 2),),
        (("executor", "scan"),),
    ]
    transformed = rng.choice(list(TRANSFORMATIONS))
    program = Program(
        inputs=tuple(rng.sample(list(INPUTS), rng.choice([0, 0, 1, 2]))),
        carries=some(CARRIES, 4, 1),
        operations=some(OPERATIONS, 5, 2),
        outputs=some(OUTPUTS, 2, 2),
        around=rng.choice(["plain"] * 6 + list(AROUND)),
        transformed=transformed,
        steps=rng.choice([0, 1, 2, 3, 4, 4, 4, 5]),
        reverse=rng.random() < 0.3,
        unroll=rng.choice([1, 1, 1, 2, 0, True]),
        keywords=() if transformed == "exported" else rng.choice(options),
        dtype="float32" if extreme or rng.random() < 0.2 else "float64",
        extreme=extreme,
    )
    masked = (
        not extreme
        and not program.has_effects
        and program.around != "outer_loop"
        and rng.random() < 0.2
    )
    return replace(program, masked=rng.choice(["lengths", "resets"])) if masked else program


# The loop -------------------------------------------------------------------------------------------------------------


def loop_of(program: Program, run: Run, p: dict[str, Any], tell: Callable) -> Any:
    """`(carry, ys)` of the program's loop, and what is left in its Ref."""
    p = {**p, "scan": run, "tell": tell}
    with_ref = any(name.startswith("ref_") for name, *_ in program.operations)
    if with_ref:
        p["ref"] = jax.new_ref(p["h"])

    def step(carry: Any, x: Any) -> Any:
        q = {**p, "x": x["x"]}
        inputs = [INPUTS[name](q, x[name]) for name in program.inputs]
        values = [v for v in (x["x"], p["h"], *inputs) if v is not None]
        # Carries give their values first, and are given theirs at the end.
        held = [
            CARRIES[name][1](q, c, values[0])[1] for (name, _), c in zip(program.carries, carry)
        ]
        values = [v for v in held if v is not None] + values
        for name, i, j in program.operations:
            values.insert(0, OPERATIONS[name](q, values[i % len(values)], values[j % len(values)]))
        new = [
            CARRIES[name][1](q, c, values[i % min(3, len(values))])[0]
            for (name, i), c in zip(program.carries, carry)
        ]
        return new, [
            OUTPUTS[name](q, values[i % len(values)], values[j % len(values)])
            for name, i, j in program.outputs
        ]

    init = [CARRIES[name][0](p) for name, _ in program.carries]
    xs = {name: p["xs"][name] for name in ("x", *program.inputs)}
    keywords = dict(reverse=program.reverse, unroll=program.unroll)
    ts = jnp.arange(p["xs"]["x"].shape[0])
    if run is scan:
        keywords |= dict(program.keywords)
        keywords |= {
            "lengths": dict(lengths=min(2, program.steps)),
            "resets": dict(resets=ts % 2 == 1),
        }.get(program.masked, {})
    elif program.masked:
        run = functools.partial(_masked, ts, program.masked == "resets")
    out = AROUND[program.around](functools.partial(run, **keywords), step, init, xs)
    return out, p["ref"][...] if with_ref else None


def _masked(ts: Any, resets: bool, step: Callable, init: Any, xs: Any, **keywords: Any) -> Any:
    """`jax.lax.scan` with lengths of 2, or with resets before each second step."""

    def masked_step(carry: Any, timed: tuple[Any, Any]) -> Any:
        t, x = timed
        if resets:
            return step(
                jax.tree.map(lambda first, old: jnp.where(t % 2 == 1, first, old), init, carry), x
            )
        new, y = step(carry, x)
        held = jax.tree.map(lambda new, old: jnp.where(t < 2, new, old), new, carry)
        return held, jax.tree.map(lambda leaf: jnp.where(t < 2, leaf, jnp.zeros_like(leaf)), y)

    return jax.lax.scan(masked_step, init, (ts, xs), **keywords)


def _in_outer_loop(run: Run, step: Callable, init: Any, xs: Any) -> Any:
    def outer(total: Any, factor: Any) -> Any:
        carry, ys = run(step, init, xs)
        return total + factor * weighted_sum((carry, ys)), carry

    return run(outer, jnp.zeros(()), jnp.arange(2.0))


def _on_mapped_axis(run: Run, step: Callable, init: Any, xs: Any) -> Any:
    def one(factor: Any) -> Any:
        def summed(carry: Any, x: Any) -> Any:
            carry, ys = step(carry, {**x, "x": x["x"] * factor})
            return carry, (
                ys,
                jax.lax.psum(x["x"] * factor, "copies"),
                jax.lax.axis_index("copies"),
            )

        return run(summed, init, xs)

    return jax.vmap(one, axis_name="copies")(jnp.asarray([1.0, 0.5], xs["x"].dtype))


def _on_devices(run: Run, step: Callable, init: Any, xs: Any) -> Any:
    """Inside of a `jax.shard_map` over one device."""
    mesh = jax.make_mesh((1,), ("copies",), axis_types=(jax.sharding.AxisType.Auto,))
    none = jax.sharding.PartitionSpec()
    inside = jax.shard_map(
        functools.partial(run, step),
        mesh=mesh,
        in_specs=(none, none),
        out_specs=none,
        check_vma=False,
    )
    return inside(init, xs)


def _in_while_loop(run: Run, step: Callable, init: Any, xs: Any) -> Any:
    """In a loop that stops early, twice."""
    state = 0, run(step, init, xs)
    return jrnn.while_loop(
        lambda s: s[0] < 1, lambda s: (s[0] + 1, run(step, s[1][0], xs)), state, max_steps=2
    )[1]


AROUND: dict[str, Callable[[Run, Callable, Any, Any], Any]] = dict(
    plain=lambda run, step, init, xs: run(step, init, xs),
    checkpointed_step=lambda run, step, init, xs: run(
        jax.checkpoint(step, prevent_cse=False), init, xs
    ),
    checkpoint=lambda run, step, init, xs: jax.checkpoint(functools.partial(run, step))(init, xs),
    dots_kept=lambda run, step, init, xs: jax.checkpoint(
        functools.partial(run, step),
        policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    )(init, xs),
    jit=lambda run, step, init, xs: jax.jit(functools.partial(run, step))(init, xs),
    cond=lambda run, step, init, xs: jax.lax.cond(
        jnp.sum(xs["x"]) > 0,
        lambda: run(step, init, xs),
        lambda: run(lambda c, x: (step(c, x)[0], step(c, x)[1]), init, xs),
    ),
    outer_loop=_in_outer_loop,
    mapped_axis=_on_mapped_axis,
    donated=lambda run, step, init, xs: jax.jit(functools.partial(run, step), donate_argnums=0)(
        jax.tree.map(jnp.copy, init), xs
    ),
    devices=_on_devices,
    while_loop=_in_while_loop,
    twice=lambda run, step, init, xs: (run(step, run(step, init, xs)[0], xs), run(step, init, xs)),
    length=lambda run, step, init, xs: run(step, init, xs, length=xs["x"].shape[0]),
)


# Transformations: `(fn, p) -> anything` of `fn(p) -> results` ---------------------------------------------------------


def _is_inexact(leaf: Any) -> bool:
    return jnp.issubdtype(
        jnp.result_type(leaf) if not hasattr(leaf, "dtype") else leaf.dtype, jnp.inexact
    )


def weighted_sum(tree: Any) -> Any:
    """A number that depends on every smooth leaf of a result with weights of its own."""
    kind = jnp.zeros(()).dtype
    leaves = [jnp.real(x).astype(kind).reshape(-1) for x in jax.tree.leaves(tree) if _is_inexact(x)]
    values = jnp.concatenate([jnp.zeros(1, kind), *leaves])
    return jnp.sum(jnp.cos(jnp.arange(values.size, dtype=kind)) * (values + jnp.tanh(values)))


def _split(p: Any) -> tuple[list[Any], Callable]:
    """The floating-point leaves of parameters, and the function that puts them back."""
    leaves, tree = jax.tree.flatten(p)
    smooth = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]

    def join(values: list[Any]) -> Any:
        full = dict(enumerate(leaves)) | dict(zip(smooth, values))
        return jax.tree.unflatten(tree, [full[i] for i in range(len(leaves))])

    return [leaves[i] for i in smooth], join


def _loss(fn: Callable, join: Callable) -> Callable:
    return lambda values: weighted_sum(fn(join(values)))


def _grad(fn: Callable, p: Any) -> Any:
    values, join = _split(p)
    return jax.value_and_grad(_loss(fn, join))(values)


def _grad_of_some(fn: Callable, p: Any) -> Any:
    return jax.grad(lambda w: weighted_sum(fn({**p, "w": w})))(p["w"])


def _grad_of_integers(fn: Callable, p: Any) -> Any:
    return jax.grad(lambda xs: weighted_sum(fn({**p, "xs": xs})), allow_int=True)(p["xs"])


def _tangents(values: list[Any]) -> list[Any]:
    return [jnp.cos(jnp.arange(v.size)).reshape(v.shape).astype(v.dtype) for v in values]


def _jvp(fn: Callable, p: Any) -> Any:
    values, join = _split(p)

    def smooth(values: list[Any]) -> list[Any]:
        return [x for x in jax.tree.leaves(fn(join(values))) if _is_inexact(x)]

    return jax.jvp(smooth, (values,), (_tangents(values),))


def _linearized(fn: Callable, p: Any) -> Any:
    values, join = _split(p)
    out, linear = jax.linearize(_loss(fn, join), values)
    return out, linear(_tangents(values))


def _squared_gradient(fn: Callable, values: list[Any], join: Callable) -> Any:
    return sum(
        jnp.sum(jnp.tanh(g).astype(jnp.float32) ** 2) for g in jax.grad(_loss(fn, join))(values)
    )


def _grad_of_grad(fn: Callable, p: Any) -> Any:
    values, join = _split(p)
    return jax.grad(lambda values: _squared_gradient(fn, values, join))(values)


def _jvp_of_grad(fn: Callable, p: Any) -> Any:
    values, join = _split(p)
    return jax.jvp(jax.grad(_loss(fn, join)), (values,), (_tangents(values),))


def _grad_of_jvp(fn: Callable, p: Any) -> Any:
    values, join = _split(p)
    return jax.grad(lambda values: jax.jvp(_loss(fn, join), (values,), (_tangents(values),))[1])(
        values
    )


def _mapped(of: Callable, fn: Callable, p: Any, weights: bool = False) -> Any:
    """`of` under `vmap` over the first carry and xs, and over the weights too."""

    def one(factor: Any) -> Any:
        factor = factor.astype(p["h"].dtype)
        moved = {**p, "h": p["h"] * factor, "xs": {**p["xs"], "x": p["xs"]["x"] * factor}}
        return of(fn, moved | {"w": p["w"] * factor, "b": p["b"] + factor} if weights else moved)

    return jax.vmap(one)(jnp.asarray([1.0, 0.5, -2.0]))


def _grad_of_mapped(fn: Callable, p: Any) -> Any:
    values, join = _split(p)
    return jax.grad(lambda values: weighted_sum(_mapped(lambda fn, p: fn(p), fn, join(values))))(
        values
    )


def _exported(fn: Callable, p: Any) -> Any:
    """Exported with the number of steps left open."""
    (steps,) = jax.export.symbolic_shape("t")
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), {**p, "xs": None})
    given["xs"] = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((steps, *x.shape[1:]), x.dtype), p["xs"]
    )
    exported = jax.export.export(jax.jit(lambda p: (weighted_sum(fn(p)), _grad_of_some(fn, p))))(
        given
    )
    return exported.call(p)


TRANSFORMATIONS: dict[str, Callable[[Callable, Any], Any]] = dict(
    value=lambda fn, p: fn(p),
    grad=_grad,
    grad_of_some=_grad_of_some,
    grad_of_integers=_grad_of_integers,
    jvp=_jvp,
    linearized=_linearized,
    grad_of_grad=_grad_of_grad,
    jvp_of_grad=_jvp_of_grad,
    grad_of_jvp=_grad_of_jvp,
    mapped=functools.partial(_mapped, lambda fn, p: fn(p)),
    mapped_with_weights=functools.partial(_mapped, lambda fn, p: fn(p), weights=True),
    mapped_grad=functools.partial(_mapped, _grad),
    mapped_grad_with_weights=functools.partial(_mapped, _grad, weights=True),
    grad_of_mapped=_grad_of_mapped,
    checkpointed_grad=lambda fn, p: _grad(jax.checkpoint(fn), p),
    eager=lambda fn, p: fn(p),
    eager_grad=_grad,
    exported=_exported,
)
# These need concrete values, and are not compiled as a whole.
_OUTSIDE = ("eager", "eager_grad", "exported")


# Comparison -----------------------------------------------------------------------------------------------------------


def result(program: Program, run: Run, seed: int) -> Any:
    """What the program returns, what its callbacks received, and how often it printed; or the exception that it raises."""
    told: list[float] = []
    with (
        jax.enable_x64(program.dtype == "float64"),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        p = params(np.random.RandomState(seed), program.steps, program.dtype, program.extreme)

        def computed(p: Any) -> Any:
            return TRANSFORMATIONS[program.transformed](
                lambda p: loop_of(program, run, p, lambda v: told.append(float(v))), p
            )

        try:
            options = OPTIONS if run is jax.lax.scan else None
            compiled = jax.jit(computed, compiler_options=options)
            out = jax.block_until_ready(
                (computed if program.transformed in _OUTSIDE else compiled)(p)
            )
            jax.effects_barrier()
        except Exception as error:
            return error
    ordered = told if "debug_callback" not in program.ingredients else sorted(told)
    return {
        "out": out,
        "told": np.asarray(ordered, np.float32),
        "printed": np.asarray(len(printed.getvalue().split())),
    }


def difference(program: Program, seed: int, raised: list[str] | None = None) -> str | None:
    """How the results of the two scans differ, or None where they do not; `raised` gets what both raise."""
    theirs, ours = (result(program, run, seed) for run in (jax.lax.scan, scan))
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        # What is computed again may be differentiable. JAX unrolls no loop of an open length, unless nothing stays in it.
        unrolled = program.transformed == "exported" and program.unroll != 1
        more = (program.keywords or unrolled) and not isinstance(ours, Exception)
        if type(ours) is not type(theirs) and not more:
            return f"{_named(ours)} where jax.lax.scan gives {_named(theirs)}"
        if raised is not None:
            raised.append(_named(theirs))
        return None
    if jax.tree.structure(ours) != jax.tree.structure(theirs):
        return f"{jax.tree.structure(ours)} where jax.lax.scan gives {jax.tree.structure(theirs)}"
    for a, (path, b) in zip(jax.tree.leaves(ours), jax.tree.leaves_with_path(theirs)):
        told = _apart(a, b, program)
        if told is not None:
            return f"{jax.tree_util.keystr(path)}: {told}"
    return None


def _named(result: Any) -> str:
    return (
        f"{type(result).__name__}: {str(result)[:300]}"
        if isinstance(result, Exception)
        else "a result"
    )


def _apart(a: Any, b: Any, program: Program) -> str | None:
    """How two leaves differ."""
    if (jax.typeof(a), getattr(a, "weak_type", None)) != (
        jax.typeof(b),
        getattr(b, "weak_type", None),
    ):
        return f"{jax.typeof(a)} where jax.lax.scan gives {jax.typeof(b)}"
    if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
        a, b = map(jax.random.key_data, (a, b))
    if b.dtype == jax.dtypes.float0:
        return None
    narrow = b.dtype in (jnp.bfloat16, jnp.float16)
    kept = np.complex128 if jnp.issubdtype(b.dtype, jnp.complexfloating) else np.float64
    x, y = (np.asarray(v).astype(kept) for v in (a, b))
    finite = np.isfinite(y)  # which of NaN and infinities a sum gives depends on its order
    if not np.array_equal(np.isfinite(x), finite):
        return f"{x.ravel()} where jax.lax.scan gives {y.ravel()}"
    rounding = any(part in ROUNDING for part in program.ingredients)
    tolerance = 3e-2 if narrow or rounding else 1e-4 if b.dtype == np.float32 else 1e-9
    size = max(1.0, np.max(np.abs(y[finite]), initial=0.0))
    off = np.max(np.abs(x[finite] - y[finite]), initial=0.0) / size
    return (
        f"off by {off:.2g}: {x.ravel()} where jax.lax.scan gives {y.ravel()}"
        if off > tolerance
        else None
    )


# Narrow numbers in the middle, which are rounded once where jax.lax.scan rounds at every step, or the other way round.
ROUNDING = ("bfloat16", "narrow_product", "float16", "float32", "narrow", "narrow_affine")


# Many programs --------------------------------------------------------------------------------------------------------


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one part less."""
    for field in ("inputs", "outputs", "carries", "operations"):
        parts = getattr(program, field)
        for i in range(len(parts)):
            yield replace(program, **{field: (*parts[:i], *parts[i + 1 :])})
    for field in fields(program):
        simple = field.default
        if (
            field.name != "steps"
            and isinstance(simple, (bool, int, str, tuple))
            and getattr(program, field.name) != simple
        ):
            yield replace(program, **{field.name: simple})
    if program.steps > 1:
        yield replace(program, steps=program.steps - 1)


def minimized(program: Program, seed: int) -> tuple[Program, str | None]:
    """A program without any part that the difference does not need, and the difference."""
    for other in _smaller(program):
        told = difference(other, seed)
        if told is not None:
            return minimized(other, seed)
    return program, difference(program, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--no-minimize", action="store_true")
    parser.add_argument("--as-users", action="store_true", help="compile with XLA's default flags")
    asked = parser.parse_args()
    tally = Counter()
    with strict_passes(True):
        for seed in range(asked.seed, asked.seed + asked.count):
            program = drawn(seed)
            raised: list[str] = []
            told = difference(program, seed, raised)
            tally["alike" if told is None else "differ"] += 1
            tally.update(f"raised by both: {text[:90]}" for text in raised)
            if told is not None:
                print(f"seed {seed}: {told}", flush=True)
                if not asked.no_minimize:
                    print("   {}\n   {}".format(*minimized(program, seed)), flush=True)
            if (seed - asked.seed) % 100 == 99:
                print(f"{dict(tally.most_common(2))}", flush=True)
                jax.clear_caches()
    print(f"{asked.count} programs")
    print("\n".join(f"{count:6} {what}" for what, count in tally.most_common()), flush=True)
    return bool(tally["differ"])


if __name__ == "__main__":
    sys.exit(main())
