"""Gradients in three ways, in float64: JAX's, the generated net's, and central differences; and how much they differ.

Shapes: S gradients that arrive at the outputs; a gradient of a blob is [S, *its shape].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from jrnn.errors import GradientError, OpError
from jrnn.jaxprs.trials import central_difference
from jrnn.nets.autodiff import add_gradients
from jrnn.nets.blobs import dense
from jrnn.nets.gradient_maker import GradientSlice
from jrnn.nets.graph.scope import Workspace, all_names, has_sub_nets, workspace_of
from jrnn.nets.ir import Net, Op
from jrnn.nets.lowering import infer_shapes, run_net, to_jax
from jrnn.nets.registry import ACCUMULATE
from jrnn.testing.gradients.report import BlobAgreement, Blobs, within
from jrnn.testing.gradients.subject import Subject
from jrnn.testing.gradients.written import WrittenGradients

Errors = dict[str, float]  # by blob

STEP = 6e-6  # about the cube root of float64's epsilon, which balances rounding and truncation of central differences
Gradients = dict[str, Any]
TOLERANCE = 1e-10
INEXACT = 1e-6  # the tolerance if the net's constants are rounded to float32
DIFFERENCE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Effort:
    """Tolerances, and how much is checked: the options of `check_gradients`.

    Attributes:
        tolerance: of JAX's gradient and the net's, relative to the gradient's largest element if that is above 1.
        difference_tolerance: the same of JAX's gradient and central differences.
        max_elements: how many elements of a blob, evenly spaced, are checked by differences one by one.
        directions: the number of random directions along which blobs with more elements are checked in addition.
        second: whether second derivatives are compared too, JAX's with differences of its gradient.
        doing: called with what is computed next; by default it does nothing.
    """

    tolerance: float = TOLERANCE
    difference_tolerance: float = DIFFERENCE_TOLERANCE
    max_elements: int = 200
    directions: int = 0
    second: bool = False
    doing: Callable[[str], object] = str

    def agrees(self, b: BlobAgreement) -> bool:
        """Whether all errors are within their tolerances; a NaN never is."""
        errors = (b.difference_error, b.direction_error, b.second_error)
        exact = within((b.net_error, b.file_error), self.tolerance)
        return exact and within(errors, self.difference_tolerance)


def agreements(
    s: Subject, effort: Effort, written: WrittenGradients | None = None
) -> tuple[list[BlobAgreement], list[str]]:
    """The agreement of each blob, and notes on what could not be checked. `written`: of the file's gradient operators."""
    effort.doing("computing JAX's gradient")
    mine = by_jax(s)
    theirs = None
    notes = []
    if not s.no_net:
        effort.doing("computing the net's gradient")
        theirs = by_net(s)
    if s.no_net:
        notes.append(
            f"there is no net, so JAX's gradient and central differences were compared: {s.no_net}"
        )
    lost = []
    if not s.no_net:
        for name in without_gradient(s):
            if name in s.optional and np.any(mine[name]):
                lost.append(name)
    if lost:
        notes.append(
            f"the net has no gradient of {', '.join(lost)}, and JAX has: they were left out"
        )
        s = replace(s, wrt=tuple(n for n in s.wrt if n not in lost))
    of_file = {} if written is None else written.gradients
    where = {}
    large = []
    for n in s.wrt:
        off = np.abs(mine[n] if theirs is None else mine[n] - theirs[n])
        if n in of_file and np.shape(of_file[n]) == np.shape(mine[n])[1:]:
            off = off + np.abs(mine[n] - of_file[n][None])
        where[n] = chosen(np.max(off, axis=0), effort.max_elements)
        if len(where[n]) < np.size(s.blobs[n]):
            large.append(n)
    differences = element_differences(s, where, effort.doing)
    effort.doing(f"computing central differences along directions in {len(large)} blobs")
    along = (
        direction_errors(s, mine, large, effort.directions) if effort.directions and large else {}
    )
    twice: Errors = {}
    if effort.second and s.held is not None:
        notes.append("second derivatives were not compared, because stop_gradient stops them")
    elif effort.second:
        effort.doing("computing second derivatives")
        try:
            twice = second_errors(s)
        # What JAX raises where a rule is missing.
        except (NotImplementedError, TypeError, ValueError) as e:
            notes.append(f"second derivatives were not compared: {str(e).splitlines()[0]}")
    blobs = []
    absent = []
    for n in s.wrt:
        by_file = of_file.get(n)
        b = agreement(s, n, mine[n], theirs and theirs[n], where[n], differences[n], by_file)
        b = replace(b, direction_error=along.get(n), second_error=twice.get(n))
        blobs.append(replace(b, agrees=effort.agrees(b)))
        if written is not None and n not in of_file and np.any(mine[n]):
            absent.append(n)
    if absent:
        notes.append(f"the file has no gradient of {', '.join(absent)} to compare")
    return blobs, notes


def chosen(off: np.ndarray, most: int) -> np.ndarray:
    """Flat indices of up to `most` evenly spaced elements, and of the one where `off` is largest."""
    off = np.asarray(off).reshape(-1)
    if not off.size:
        return np.zeros(0, np.int64)
    spread = np.linspace(0, off.size - 1, min(off.size, most)).astype(np.int64)
    return np.union1d(spread, [int(np.argmax(off))])


def scale_of(gradient: Any) -> float:
    """The scale of errors of a gradient: the larger of 1 and its largest element."""
    return max(1.0, float(np.max(np.abs(gradient), initial=0.0)))


def net_error(by_jax: Any, by_net: Any) -> float:
    """The largest difference of two gradients, relative to the scale of the first."""
    return float(np.max(np.abs(np.asarray(by_jax) - np.asarray(by_net)), initial=0.0)) / scale_of(
        by_jax
    )


def agreement(
    s: Subject,
    name: str,
    by_jax: Any,
    by_net: Any,
    where: np.ndarray,
    differences: Any,
    by_file: Any = None,
) -> BlobAgreement:
    """The agreement of one blob.

    Gradients are [S, ...], and the net's may be None; differences [S, len(where)] are at flat indices `where`. The
    gradient of the file's own operators [...] is None where it has none; one of another shape is infinitely wrong.
    """
    shape = np.shape(by_jax)[1:]
    size = int(np.prod(shape))
    mine = np.asarray(by_jax).reshape(s.rows, size)[:, where]
    theirs = mine
    if by_net is not None:
        theirs = np.asarray(by_net).reshape(s.rows, size)[:, where]
    scale = scale_of(by_jax)
    off_net = np.abs(mine - theirs) / scale
    off_difference = np.abs(mine - differences) / scale
    errors = (
        None if by_net is None else net_error(by_jax, by_net),
        float(np.max(off_difference, initial=0.0)),
    )
    fits = by_file is not None and np.shape(by_file) == shape
    file_error = None
    if by_file is not None:
        file_error = net_error(by_jax, by_file[None]) if fits else float("inf")
    if not len(where):
        nothing = (0.0, 0.0, 0.0)
        row = s.row_name(0)
        return BlobAgreement(
            name, shape, *errors, 0, (), nothing, False, row, file_error=file_error
        )
    # among the elements with differences, the one where JAX's gradient differs most from either of the others
    off = off_net / TOLERANCE + off_difference / DIFFERENCE_TOLERANCE
    of_file = np.reshape(by_file, (1, size))[:, where] if fits else None
    if of_file is not None:
        off = off + np.abs(mine - of_file) / scale / TOLERANCE
    row, k = map(int, np.unravel_index(int(np.argmax(off)), off.shape))
    worst = tuple(map(int, np.unravel_index(where[k], shape)))
    values = (
        float(mine[row, k]),
        None if by_net is None else float(theirs[row, k]),
        float(differences[row, k]),
    )
    return BlobAgreement(
        name,
        shape,
        *errors,
        len(where),
        worst,
        values,
        False,
        s.row_name(row),
        is_zero=not np.any(by_jax),
        file_error=file_error,
        file_value=None if of_file is None else float(of_file[0, k]),
    )


def disagree(s: Subject, effort: Effort, kind: str) -> bool:
    """Whether JAX's gradients disagree with the other `kind`: "net" or "difference"."""
    mine = by_jax(s)
    if kind == "net":
        theirs = by_net(s)
        given = set(s.wrt) - (s.optional.intersection(without_gradient(s)))
        for n in given:
            if not (net_error(mine[n], theirs[n]) <= effort.tolerance):
                return True
        return False
    filled = [n for n in s.wrt if np.size(s.blobs[n])]
    along = direction_errors(s, mine, filled, max(2, effort.directions))
    return not within(along.values(), effort.difference_tolerance)


# Three ways ------------------------------------------------------------------------------------------------------------


def by_jax(s: Subject) -> Gradients:
    """JAX's gradient of each blob."""

    def run(point: Blobs) -> Gradients:
        _, pull = jax.vjp(lambda p: {y: s.function(p)[y] for y in s.seeds}, point)
        return _each(lambda arriving: pull(arriving)[0], s.seeds)

    try:
        return jax.jit(run)(s.point)
    except ValueError as e:
        if "lax.while_loop" not in str(e):
            raise
        return jax.jit(lambda point: _pushed(s, point))(s.point)


def _pushed(s: Subject, point: Blobs) -> Gradients:
    """The gradients in forward mode, element by element: `jax.lax.while_loop` has no reverse mode."""
    flat, unflatten = ravel_pytree(dict(point))
    value = weighted(replace(s, held=None))

    def along(k: Any) -> Any:
        return jax.jvp(
            lambda v: value(unflatten(v)),
            (flat,),
            (jax.nn.one_hot(k, flat.size, dtype=flat.dtype),),
        )[1]

    return jax.vmap(unflatten, in_axes=1)(jax.lax.map(along, jnp.arange(flat.size)))


def by_net(s: Subject) -> Gradients:
    """The gradient of each blob by the operators that `add_gradients` appends; zeros if they compute none."""
    arriving = _arriving(s)
    full, gradients = add_gradients(s.net, arriving)
    reached = {}
    blobs = []
    for n in s.wrt:
        if n in gradients:
            reached[n] = gradients[n]
            blobs += reached[n] if isinstance(reached[n], GradientSlice) else [reached[n]]
    # A gradient that arrives may be passed through.
    wanted = dict.fromkeys(b for b in blobs if b not in arriving.values())
    fn = to_jax(full, wanted, wide=True)

    def one(fn: Callable, point: Blobs, seeds: Blobs) -> Gradients:
        given = {arriving[y]: seed for y, seed in seeds.items()}
        got = given | fn({**s.blobs, **point, **given}, key=s.key)
        return {n: _dense(n, reached.get(n), got, point[n]) for n in s.wrt}

    try:
        return jax.jit(lambda point: _each(partial(one, fn, point), s.seeds))(s.point)
    except OpError:
        if not _may_loop(s):
            raise
    # The number of a loop's trips depends on values: operators run one by one.
    eagerly = partial(run_net, replace(full, external_outputs=tuple(wanted)), wide=True)
    rows = []
    for row in range(s.rows):
        rows.append(one(eagerly, s.point, {y: v[row] for y, v in s.seeds.items()}))
    return jax.tree.map(lambda *parts: np.stack(parts), *rows)


def _may_loop(s: Subject) -> bool:
    """Whether there are loops, or branches, whose trips a gradient takes back."""
    for op in s.net.ops:
        if has_sub_nets(op) and workspace_of(op) is Workspace.SHARED:
            return True
    return False


def without_gradient(s: Subject) -> list[str]:
    """The blobs that the backward net has no gradient of."""
    _, gradients = add_gradients(s.net, dict.fromkeys(s.seeds))
    return [n for n in s.wrt if n not in gradients]


def _each(gradients: Callable[[Blobs], Gradients], seeds: Blobs) -> Gradients:
    """The gradients of each row of the seeds, one after the other."""
    arriving = jax.tree.map(jnp.asarray, dict(seeds))
    if len(next(iter(seeds.values()))) > 1:
        return jax.lax.map(gradients, arriving)
    first = {y: v[0] for y, v in arriving.items()}
    return jax.tree.map(lambda gradient: gradient[None], gradients(first))


def _dense(name: str, gradient: Any, blobs: Blobs, like: Any) -> Any:
    if gradient is None:
        return jnp.zeros(like.shape)
    array = jnp.asarray(dense(gradient, blobs, like))
    if array.shape != like.shape:
        raise GradientError(
            f"gradient of {name!r}: JAX's is {list(like.shape)}, the net's {list(array.shape)}"
        )
    return array


def weighted(s: Subject) -> Callable[[Blobs], Any]:
    """The function of the point whose differences are taken: the outputs, weighted by the seeds, summed: [S]."""

    function = s.held or s.function

    def value(point: Blobs) -> Any:
        outputs = function(point)
        total = 0
        for y, seeds in s.seeds.items():
            products = (seeds * outputs[y][None]).reshape(len(seeds), -1)
            total += jnp.sum(products, axis=1)
        return total

    return value


def element_differences(
    s: Subject, where: Mapping[str, np.ndarray], doing: Callable[[str], object] = str
) -> dict[str, np.ndarray]:
    """(f(x + h) - f(x - h)) / 2h at flat indices of each blob, by one compiled function: [S, elements]."""
    value = weighted(s)
    flat, unflatten = ravel_pytree(s.point)
    names = sorted(s.wrt)  # the order of ravel_pytree
    start = 0
    places = [np.zeros(0, np.int64)]
    for n in names:
        places.append(start + where[n])
        start += np.size(s.blobs[n])
    at = np.concatenate(places)
    steps = STEP * np.maximum(1.0, np.abs(np.asarray(flat)[at]))

    # eight elements at a time: a whole batch would hold the net's blobs once for every element
    moves = np.concatenate([steps, -steps])
    spare = -len(moves) % 8  # a remainder would compile the function a second time
    every = np.pad(np.tile(at, 2), (0, spare)), np.pad(moves, (0, spare))
    run = jax.jit(
        jax.vmap(lambda flat, k, h: value(unflatten(flat.at[k].add(h))), in_axes=(None, 0, 0))
    )
    values = [np.zeros((0, s.rows))]
    for done in range(0, len(moves), 8):
        doing(f"computing central differences, {done // 2:,} of {len(at):,} elements done")
        values.append(np.asarray(run(flat, *(e[done : done + 8] for e in every))))
    ahead, behind = np.split(np.concatenate(values)[: len(moves)], 2)
    slopes = (ahead - behind) / (2 * steps[:, None])
    ends = np.cumsum([len(where[n]) for n in names])[:-1]
    return dict(zip(names, np.split(slopes.T, ends, axis=1)))


def direction_errors(s: Subject, gradients: Gradients, names: list[str], count: int) -> Errors:
    """The largest error of each blob's gradient along `count` random directions, next to central differences.

    A direction changes all elements of one blob and has length 1. A slope is then about the gradient's norm over the root
    of the number of elements; the error is relative to that, if it is above 1.
    """
    value = jax.jit(weighted(s))
    rng = np.random.default_rng(0)
    point = s.point
    largest = {}
    for n in names:
        errors = [0.0]
        for _ in range(count):
            d = rng.standard_normal(point[n].shape)
            d /= np.linalg.norm(d)
            slope = np.asarray(gradients[n]).reshape(s.rows, -1) @ d.reshape(-1)
            difference = central_difference(value, point, {**dict.fromkeys(point), n: d}, STEP)
            size = max(1.0, float(np.linalg.norm(gradients[n])) / np.sqrt(d.size))
            errors.append(float(np.max(np.abs(difference - slope))) / size)
        largest[n] = float(np.max(errors))
    return largest


def second_errors(s: Subject) -> Errors:
    """The error of JAX's second derivative along a random direction in all blobs, next to differences of its gradient.

    Raises what JAX raises for a function without second derivative.
    """
    rng = np.random.default_rng(0)
    rows = rng.standard_normal(s.rows)
    value = weighted(s)
    point = s.point
    towards = {n: rng.standard_normal(v.shape) for n, v in point.items()}
    length = np.sqrt(sum(np.sum(d * d) for d in towards.values()))
    scale = min(1.0, 10.0 / max(length, 1e-300))
    towards = {n: direction * scale for n, direction in towards.items()}
    slope = jax.grad(lambda p: jnp.sum(value(p) * rows))

    def along(p: Blobs) -> tuple[Any, Any]:
        gradients = slope(p)
        return sum(jnp.sum(gradients[n] * towards[n]) for n in gradients), gradients

    # One program gives the second derivative and the gradient.
    both = jax.jit(jax.grad(along, has_aux=True))
    second, _ = both(point)
    differences = central_difference(lambda p: both(p)[1], point, towards, STEP)
    return {n: net_error(by_jax, differences[n]) for n, by_jax in second.items()}


# Within a net ----------------------------------------------------------------------------------------------------------


def inner_errors(s: Subject) -> Errors:
    """The net error of every blob that an operator of the net writes and a gradient reaches, for the first seeds.

    JAX's gradient of a blob is the gradient of a zero that is added to it. For an overwritten blob, the first value counts.
    There are none for a net with a loop whose number of trips is a value: its gradient runs operator by operator.
    """
    taken = set(all_names(s.net))
    known = infer_shapes(s.net, s.blobs, key=s.key, wide=True)
    first: dict[str, int] = {}
    for k, op in enumerate(s.net.ops):
        for name in op.outputs:
            if name not in s.blobs and getattr(known.get(name), "dtype", None) == np.float64:
                first.setdefault(name, k)
    shifts = {name: _free_name(f"{name}_shift", taken) for name in first}
    copied = _after_first(s.net, first, lambda n: Op.of(ACCUMULATE, [n], [shifts[n]]))
    shapes = infer_shapes(copied, s.blobs, key=s.key, wide=True)
    shifted = to_jax(
        _after_first(s.net, first, lambda n: Op.of(ACCUMULATE, [n, shifts[n]], [n])),
        s.seeds,
        wide=True,
    )

    def loss(zeros):
        outputs = shifted({**s.blobs, **zeros}, key=s.key)
        return sum(jnp.sum(outputs[y] * seeds[0]) for y, seeds in s.seeds.items())

    by_jax = jax.jit(jax.grad(loss))({g: jnp.zeros(shapes[g].shape) for g in shifts.values()})
    arriving = _arriving(s)
    full, gradients = add_gradients(s.net, arriving)
    dense = {}
    for n in first:
        if n in gradients and not isinstance(gradients[n], GradientSlice):
            dense[n] = gradients[n]
    wanted = dict.fromkeys(g for g in dense.values() if g not in arriving.values())
    fn = to_jax(full, wanted, wide=True)
    given = dict(s.blobs)
    for y, seeds in s.seeds.items():
        given[arriving[y]] = seeds[0]
    floats = {n: v for n, v in given.items() if getattr(v, "dtype", None) == np.float64}
    try:
        by_net = given | jax.jit(lambda floats: fn({**given, **floats}, key=s.key))(floats)
    except OpError:
        if _may_loop(s):
            return {}
        raise
    return {n: net_error(by_jax[shifts[n]], by_net[g]) for n, g in dense.items()}


def _after_first(net: Net, first: Mapping[str, int], make: Callable[[str], Op]) -> Net:
    """The net with an operator from `make` after the operator that first writes each blob."""
    ops: list[Op] = []
    for k, op in enumerate(net.ops):
        ops += [op, *(make(n) for n in op.outputs if first.get(n) == k)]
    return replace(net, ops=tuple(ops), external_outputs=())


def _arriving(s: Subject) -> dict[str, str]:
    """Free names for the blobs of the gradients that arrive at the outputs."""
    taken = set(all_names(s.net))
    return {y: _free_name(f"{y}_arriving", taken) for y in s.seeds}


def _free_name(name: str, taken: set[str]) -> str:
    """`name`, with underscores appended until it is not taken."""
    while name in taken:
        name += "_"
    return name
