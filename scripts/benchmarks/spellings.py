"""The ways to write one computation: a table of spellings, for tests and for `jrnn bench --suite spellings`.

A cell is written once, over `Operations` (`spelled_cells.py`). A spelling says where features and rows are, how
products are written, how states are carried, and how the loop is called. All spellings of a cell compute the same function
of the same arrays.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from spelled_cells import CELLS, Operations, SpelledCell, States, Weights
from spelled_libraries import LIBRARIES

from jrnn.bench.sizes import Size

Scan = Callable[..., Any]
Run = Callable[[Weights, Any], Any]  # from weights and x [T, N, D] to outputs


def _same(value: Any) -> Any:
    return value


class Spelling(NamedTuple):
    """A way to write a loop.

    Attributes:
        operations: how the cell computes.
        inward, outward: from [..., N, features] to the arrays of the step, and back.
        weights: from the weights to those of the step.
        pack, unpack: from a tuple of states to the carry, and back.
        around: makes another loop `(weights, x) -> outputs` of one.
        step: makes another step `(carry, x) -> (carry, y)` of one.
        reverse: the loop runs backward over reversed inputs.
        looped: the loop, if it is not `_loop`.
        fits: which cells may be written so, given the shapes of their states.
        differentiable: it has a gradient in `jax.lax.scan`'s place, too.
    """

    operations: Operations = Operations()
    inward: Callable[[Any], Any] = _same
    outward: Callable[[Any], Any] = _same
    weights: Callable[[Weights], Weights] = _same
    pack: Callable[[States], Any] = _same
    unpack: Callable[[Any], States] = tuple
    around: Callable[[Run], Run] = _same
    step: Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]] = _same
    reverse: bool = False
    looped: Callable[..., Any] | None = None
    fits: Callable[[SpelledCell, list[tuple[int, ...]]], bool] = lambda cell, shapes: True
    differentiable: bool = True

    def states(self, cell: SpelledCell, p: Weights, state: States, x: Any) -> tuple[States, Any]:
        """Returns the new states of a step, and its output."""
        return cell.step(self.operations, p, state, cell.inputs(self.operations, p, x))

    def run(self, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
        """Returns the outputs of all steps, for x [T, N, D]."""
        return self.around(functools.partial(self.looped or _loop, self, cell, scan))(
            self.weights(p), x
        )

    def start(self, cell: SpelledCell, p: Weights, x: Any) -> States:
        """Returns the first states."""
        return tuple(cell.start(self.operations, p, self.inward, x))


# Loops ----------------------------------------------------------------------------------------------------------------


def _loop(s: Spelling, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        new, out = s.states(cell, p, s.unpack(carry), x)
        return s.pack(new), out

    xs = jnp.flip(x, 0) if s.reverse else x
    ys = s.outward(
        scan(s.step(step), s.pack(s.start(cell, p, x)), s.inward(xs), reverse=s.reverse)[1]
    )
    return jnp.flip(ys, 0) if s.reverse else ys


def _inputs_first(s: Spelling, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
    """What the inputs add to the gates is computed for all steps before the loop."""
    step = functools.partial(cell.step, s.operations, p)
    return scan(step, s.start(cell, p, x), cell.inputs(s.operations, p, x))[1]


def _counting(s: Spelling, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
    """The loop reads its inputs at a counter that it carries."""

    def step(carry: Any, _: None) -> tuple[Any, Any]:
        t, state = carry
        new, out = s.states(cell, p, state, x[t])
        return (t + 1, new), out

    return scan(step, (jnp.int32(0), s.start(cell, p, x)), None, length=len(x))[1]


def _carrying_weights(s: Spelling, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        p, state = carry
        new, out = s.states(cell, p, state, x)
        return (p, new), out

    return scan(step, (p, s.start(cell, p, x)), x)[1]


def _by_index(s: Spelling, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
    """The loop reads its inputs at indices, in either direction."""
    backward = jnp.flip(x, 0)

    def step(state: Any, t: Any) -> tuple[Any, Any]:
        return s.states(cell, p, state, backward[len(x) - 1 - t] if s.reverse else x[t])

    return scan(step, s.start(cell, p, x), jnp.arange(len(x)))[1]


def _in_parts(s: Spelling, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
    """The features come in two arrays."""
    left, right = jnp.split(x, [x.shape[-1] // 2], -1)

    def step(state: Any, x: dict[str, Any]) -> tuple[Any, Any]:
        return s.states(cell, p, state, jnp.concatenate([x["left"], x["right"]], -1))

    return scan(step, s.start(cell, p, x), {"left": left, "right": right})[1]


def _masked(s: Spelling, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
    """A mask leaves states as they are from the end of each sequence on; all have T steps."""
    lengths = jnp.full(x.shape[1], len(x))

    def step(state: Any, given: Any) -> tuple[Any, Any]:
        t, x = given
        new, out = s.states(cell, p, state, x)
        alive = t < lengths
        select = lambda a, b: jnp.where(alive.reshape(-1, *[1] * (a.ndim - 1)), a, b)  # noqa: E731
        return tuple(map(select, new, state)), select(out, jnp.zeros_like(out))

    return scan(step, s.start(cell, p, x), (jnp.arange(len(x)), x))[1]


def _dropped(key: Any, new: Any, out: Any) -> tuple[Any, Any]:
    """Drops parts of an output, with probability 0."""
    return new, jnp.where(jax.random.bernoulli(key, 1.0, out.shape), out, 0)


def _drawing(s: Spelling, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
    """A dropout mask is drawn at each step."""
    step = lambda state, given: _dropped(given[0], *s.states(cell, p, state, given[1]))  # noqa: E731
    return scan(step, s.start(cell, p, x), (jax.random.split(jax.random.key(0), len(x)), x))[1]


def _carrying_a_key(s: Spelling, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        key, own = jax.random.split(carry[0])
        new, out = _dropped(own, *s.states(cell, p, carry[1], x))
        return (key, new), out

    return scan(step, (jax.random.key(0), s.start(cell, p, x)), x)[1]


def _nested(s: Spelling, cell: SpelledCell, scan: Scan, p: Weights, x: Any) -> Any:
    """A loop over parts of the time, with a loop over the steps of each."""
    parts = next((n for n in range(2, len(x) + 1) if len(x) % n == 0), 1)
    step = lambda state, x: s.states(cell, p, state, x)  # noqa: E731
    ys = scan(
        lambda state, xs: scan(step, state, xs),
        s.start(cell, p, x),
        x.reshape(parts, -1, *x.shape[1:]),
    )[1]
    return ys.reshape(len(x), *ys.shape[2:])


# Around loops ---------------------------------------------------------------------------------------------------------


def _mapped(parts: int) -> Callable[[Run], Run]:
    """Makes a loop over [parts, T, N / parts, D] of one over [T, N, D], by `jax.vmap`; fewer parts where N needs it."""

    def around(loop: Run) -> Run:
        def run(p: Weights, x: Any) -> Any:
            apart = x.reshape(x.shape[0], math.gcd(parts, x.shape[1]), -1, *x.shape[2:])
            ys = jax.vmap(lambda x: loop(p, x), 1, 1)(apart)
            return ys.reshape(*x.shape[:2], -1)

        return run

    return around


def _each_row(loop: Run) -> Run:
    return lambda p, x: jax.vmap(lambda x: loop(p, x), 1, 1)(x)


def _repeated(loop: Run) -> Run:
    def run(p: Weights, x: Any) -> Any:
        """Runs the loop in a `while_loop`, once."""
        out = jax.eval_shape(loop, p, x)
        start = 0, jnp.zeros(out.shape, out.dtype)
        return jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, loop(p, x)), start)[1]

    return run


def _on_a_mesh(loop: Run) -> Run:
    rows = PartitionSpec(None, "rows")
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        loop, mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows, check_vma=False
    )


# The table ------------------------------------------------------------------------------------------------------------


def _in_a_dict(state: States) -> dict[str, Any]:
    return {f"state{k}": v for k, v in enumerate(state)}


def _transposed(p: Weights) -> Weights:
    return {name: w.T if name.startswith("w") else w for name, w in p.items()}


def _have_one_shape(cell: SpelledCell, shapes: list[tuple[int, ...]]) -> bool:
    return len(set(shapes)) == 1


def _adds_products(cell: SpelledCell, shapes: list[tuple[int, ...]]) -> bool:
    return cell.adds_products


_COLUMNS = Operations(lambda x, w: w.T @ x, -2, "{}...")
_LAST = Operations(lambda x, w: jnp.einsum("...du,dh->...hu", x, w), -2, "...{}u")
_FIRST = Operations(lambda x, w: jnp.einsum("d...u,dh->h...u", x, w), -3, "{}...u")
_SAVING_PRODUCTS = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)

SPELLINGS: dict[str, Spelling] = {
    "plain": Spelling(),
    "unit axis first": Spelling(
        inward=lambda a: a[..., None, :, :], outward=lambda a: a[..., 0, :, :]
    ),
    "unit axis in the middle": Spelling(
        inward=lambda a: a[..., None, :], outward=lambda a: a[..., 0, :]
    ),
    "unit axis last": Spelling(_LAST, lambda a: a[..., None], lambda a: a[..., 0]),
    "two unit axes": Spelling(
        inward=lambda a: a[..., None, :, None, :], outward=lambda a: a[..., 0, :, 0, :]
    ),
    "rows last": Spelling(
        _COLUMNS, lambda a: jnp.swapaxes(a, -1, -2), lambda a: jnp.swapaxes(a, -1, -2)
    ),
    "rows in the middle": Spelling(
        _FIRST,
        lambda a: jnp.swapaxes(a, -1, -2)[..., None],
        lambda a: jnp.swapaxes(a[..., 0], -1, -2),
    ),
    "one vmap": Spelling(around=_mapped(2)),
    "two vmaps": Spelling(around=lambda loop: _mapped(2)(_mapped(2)(loop))),
    "a vmap over rows": Spelling(around=_each_row),
    "a vmap of the step": Spelling(step=jax.vmap),
    "stacked states": Spelling(pack=jnp.stack, fits=_have_one_shape),
    "states stacked last": Spelling(
        pack=lambda s: jnp.stack(s, -1),
        unpack=lambda c: tuple(c[..., k] for k in range(c.shape[-1])),
        fits=_have_one_shape,
    ),
    "joined states": Spelling(
        pack=lambda s: jnp.concatenate(s, -1),
        unpack=lambda c: tuple(jnp.split(c, 2, -1)),
        fits=lambda cell, shapes: len(shapes) == 2 and shapes[0] == shapes[1],
    ),
    "states in a dict": Spelling(
        pack=_in_a_dict, unpack=lambda c: tuple(c[name] for name in sorted(c))
    ),
    "a counter in the carry": Spelling(looped=_counting),
    "weights in the carry": Spelling(looped=_carrying_weights),
    "a key in the carry": Spelling(looped=_carrying_a_key),
    "drawn masks": Spelling(looped=_drawing),
    "masks by where": Spelling(looped=_masked),
    "indices": Spelling(looped=_by_index),
    "indices backward": Spelling(looped=_by_index, reverse=True),
    "inputs in parts": Spelling(looped=_in_parts),
    "inputs multiplied first": Spelling(looped=_inputs_first),
    "a product for each gate": Spelling(Operations(apart=True)),
    "input and state joined": Spelling(Operations(joined=True), fits=_adds_products),
    "einsum": Spelling(Operations(lambda x, w: jnp.einsum("...d,dh->...h", x, w))),
    "tensordot": Spelling(Operations(lambda x, w: jnp.tensordot(x, w, 1))),
    "transposed weights": Spelling(Operations(lambda x, w: x @ w.T), weights=_transposed),
    "a jitted step": Spelling(step=jax.jit),
    "a checkpointed step": Spelling(step=jax.checkpoint),
    "a step that stores products": Spelling(step=_SAVING_PRODUCTS),
    "reverse": Spelling(reverse=True),
    "in a while loop": Spelling(around=_repeated, differentiable=False),
    "in an outer scan": Spelling(looped=_nested),
    "in a shard_map": Spelling(around=_on_a_mesh),
}


def spellings(name: str) -> dict[str, Spelling]:
    """Returns the spellings of a cell."""
    cell = CELLS[name]
    weights = jax.eval_shape(
        lambda: {k: jnp.zeros(shape) for k, shape in cell.shapes(8, 16).items()}
    )
    shapes = cell.states(weights)
    return {k: s for k, s in SPELLINGS.items() if s.fits(cell, shapes)}


def programs(cell: str, size: Size, scan: Scan, mode: str = "forward") -> dict[str, Run]:
    """Returns each spelling of a cell as a function `(weights, x) -> outputs`; for "train" those with a gradient.

    Nets use `jrnn.scan` whatever is given.
    """
    by_name: dict[str, Run] = {
        name: functools.partial(s.run, CELLS[cell], scan)
        for name, s in spellings(cell).items()
        if s.differentiable or mode == "forward"
    }
    return by_name | {name: of(size, scan) for name, of in LIBRARIES.get(cell, {}).items()}
