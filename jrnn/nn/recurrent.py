"""The interface that the layers of `jrnn.nn.families` share, and `Recurrent`, a layer of a step of one's own.

A family defines its parameters (`_parameters`), its state before the first step (`_fresh`) and its formula (`_run`), which a
`Span` frees of lengths and resets.

Shapes: T time, N batch, D input, P output.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jrnn import jaxprs
from jrnn.errors import LayerError
from jrnn.jaxprs.mesh_axes import alike, like
from jrnn.jaxprs.queries import is_floating
from jrnn.loops import Recompute, compiled_once, hashable
from jrnn.nn.checks import Shape, check_bools, check_floating, check_integer
from jrnn.nn.layers import accumulator
from jrnn.nn.modules import Parameters
from jrnn.nn.params import Arrays, Params, Shapes
from jrnn.nn.sequences import (
    Compaction,
    Sequences,
    Steps,
    before_end,
    compute_type,
    in_rows,
    where_live,
)
from jrnn.nn.settings import spelled_out
from jrnn.nn.span import PyTree, Span

Outputs = tuple[Array, Any]  # y [T, N, P], and the state after the last step
Parameter = tuple[Initializer, Shape]
ParameterTable = dict[str, Parameter]


class RecurrentLayer(Parameters):
    """The base of the recurrent layers other than PyTorch's; it checks and prepares the arguments of every call.

    Args:
        input_size: features of the input, D.
        output_size: features of the output, P.
        batch_first: whether batched sequences are [N, T, D] instead of [T, N, D].
        dtype: the type of the products with weights; None: the type of the input and parameters. With a 16-bit type,
            products accumulate in float32, gates and states are float32, and only outputs are 16-bit.
        recompute, executor: as in `jrnn.scan`.
        learned_state: whether the recurrent state before the first step and after resets is trained: the parameter `state`,
            or `state_0`, `state_1`, ... of a state of several arrays, without the axis N; a complex one has a last axis with
            its real and imaginary part. They begin with the values of a layer without. Windows of convolutions and
            positions are not trained.
        param_dtype: the type of the parameters.
        rngs: the source of random keys for the parameters (stream `params`).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        batch_first: bool = False,
        dtype: DTypeLike | None = None,
        recompute: Recompute = None,
        executor: str = "auto",
        learned_state: bool = False,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.input_size = check_integer(f"{self._name()}: input_size", input_size, 1)
        self.output_size = check_integer(f"{self._name()}: output_size", output_size, 1)
        if dtype is not None:
            check_floating("dtype", dtype)
        self.batch_first = batch_first
        self.dtype = dtype
        self.recompute = recompute
        self.executor = executor
        self.learned_state = learned_state
        check_bools(f"{self._name()}: ", self, "learned_state")
        self._create(rngs, param_dtype)

    _timed = False  # whether the formula reads `Span.dt`
    _leads = 0  # entries of the state before the recurrent state: windows and positions

    def _name(self) -> str:
        return type(self).__name__

    def _parameters(self) -> ParameterTable:
        """The initializer and shape of each parameter."""
        return {}

    @abstractmethod
    def _fresh(self, batch: int, dtype: DTypeLike) -> Any:
        """The state before the first step: a tree of arrays [N, ...]; floating-point ones have this type."""

    @abstractmethod
    def _run(self, params: Params, x: Array, state: PyTree, span: Span) -> Outputs:
        """The formula, x [T, N, D] -> y [T, N, P] and the state after the last step."""

    def _shapes(self) -> Shapes:
        own = {name: shape for name, (_, shape) in self._parameters().items()}
        return own | {name: value.shape for name, value in self._learned(jnp.float32).items()}

    def _initial(self, key: Array, dtype: DTypeLike) -> Arrays:
        wanted = self._parameters()
        keys = jax.random.split(key, max(len(wanted), 1))
        values = {}
        for k, (name, (start, shape)) in enumerate(wanted.items()):
            values[name] = start(keys[k], shape, dtype)
        return values | self._learned(dtype)

    def _learned(self, dtype: DTypeLike) -> Arrays:
        """The initial values of the learned state's parameters, by their names."""
        if not self.learned_state:
            return {}
        leaves = jax.tree.leaves(self._recurrent(self._fresh(1, dtype)))
        values = {}
        for name, leaf in zip(_names(leaves), leaves, strict=True):
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                values[name] = jnp.stack([leaf[0].real, leaf[0].imag], axis=-1)
            elif jnp.issubdtype(leaf.dtype, jnp.floating):
                values[name] = leaf[0]
        if not values:
            raise LayerError(
                f"{self._name()}: learned_state is True, but the layer has no recurrent state of numbers"
            )
        return values

    def _recurrent(self, state: PyTree) -> PyTree:
        """The part of a state that the loop over time carries."""
        return state[self._leads :] if self._leads else (state,)

    def _first(self, params: Params, batch: int, dtype: DTypeLike) -> Any:
        """The state before the first step and after resets, with the learned values."""
        fresh = self._fresh(batch, dtype)
        if not self.learned_state:
            return fresh
        recurrent, tree = jax.tree.flatten(self._recurrent(fresh))
        learned = []
        for name, leaf in zip(_names(recurrent), recurrent, strict=True):
            if name in params:
                value = jnp.asarray(params[name])
                if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                    value = jax.lax.complex(value[..., 0], value[..., 1])
                leaf = jnp.broadcast_to(value[None].astype(leaf.dtype), leaf.shape)
            learned.append(leaf)
        parts = jax.tree.unflatten(tree, learned)
        return (*fresh[: self._leads], *parts) if self._leads else parts[0]

    def __call__(
        self,
        x: Any,
        state: PyTree = None,
        *,
        lengths: Any = None,
        resets: Any = None,
        mask: Any = None,
        dt: Any = None,
    ) -> Outputs:
        """[T, N, D] -> y [T, N, P] and the state after the last step.

        Args:
            x: [T, N, D], [N, T, D] with batch_first, or [T, D] for one sequence.
            state: the state before the first step; None is `initial_state`.
            lengths: [N] integers from 0 to T, where the sequences end. Past the end, outputs are 0 and the values of x are
                ignored, even NaN. The state is the one at the end.
            resets: booleans, [T, N], [N, T] with batch_first, or [T]. Where True, the state is `initial_state` before that
                step.
            mask: booleans as `resets`: True where a step counts. Where False, the state stays, outputs are 0, and the values
                of x and dt are ignored, even NaN. Results are as without these steps. Resets still apply.
            dt: numbers as `resets`, at least 0: the time since the last step that counts, in units of the layer's own step.
                Only of layers in continuous time: LRU, S5, Mamba, Mamba2, and a Recurrent whose step takes it.

        Raises:
            LayerError: if parameters, x, state, lengths, resets, mask or dt do not fit together.
        """
        return self.apply(self.params(), x, state, lengths=lengths, resets=resets, mask=mask, dt=dt)

    def apply(self, params: Params, x: Any, state: PyTree = None, **options: Any) -> Outputs:
        """As a call, but a pure function of `params`, a dict as `params()` returns it."""
        given = Sequences.of(self._name(), x, self.input_size, self.batch_first, **options)
        self._check_timed(given.dt)
        dtype = compute_type(params, given.x, self.dtype)
        span = Span(
            given.x.shape[0], dtype, recompute=hashable(self.recompute), executor=self.executor
        )
        functions, settings = self._apart()
        kind = type(self), tuple(functions), settings, span, given.single
        arrays = params, given.x, state, (given.lengths, given.resets, given.mask, given.dt)
        y, state = compiled_once(_run_parts, tuple(functions.values()), kind, arrays)
        return given.given_back(y), state

    def _check_timed(self, dt: Array | None) -> None:
        if dt is not None and not self._timed:
            raise LayerError(
                f"{self._name()}: dt is given, but this layer has no time between steps; give LRU, S5, Mamba, Mamba2, or a "
                "Recurrent whose step takes it; or make it a feature of x"
            )

    def _apart(self) -> tuple[dict[str, Callable], Any]:
        """The functions among the attributes, and the others except parameters; or the layer, if they cannot be a key."""
        # flax orders the attributes of its copies
        shapes = self._shapes()
        attributes = sorted(vars(self).items())
        own = {}
        for k, v in attributes:
            if not (k.startswith("_pytree__") or k in shapes):
                own[k] = v
        functions = {}
        for k, v in own.items():
            if callable(v) and not isinstance(v, (type, nnx.Module)):
                functions[k] = v
        others = tuple((k, v) for k, v in own.items() if k not in functions)
        plain = all(
            isinstance(v, (int, float, str, tuple, type, jnp.dtype, type(None))) for _, v in others
        )
        return (functions, others) if plain else ({}, [self])

    def step(
        self, x: Any, state: PyTree = None, *, resets: Any = None, mask: Any = None, dt: Any = None
    ) -> Outputs:
        """One step, [N, D] or [D] -> y [N, P] or [P] and the state, which the next step takes.

        `resets`, `mask` and `dt`, [N] or numbers, are the values for this step, as in a call.
        """
        return self.apply_step(self.params(), x, state, resets=resets, mask=mask, dt=dt)

    def apply_step(self, params: Params, x: Any, state: PyTree = None, **options: Any) -> Outputs:
        """As `step`, but a pure function of `params`."""
        given = Steps.of(self._name(), x, self.input_size, **options)
        self._check_timed(given.dt)
        span = Span(1, compute_type(params, given.x, self.dtype), in_a_step=True)
        more = jax.tree.map(lambda leaf: leaf[None], (given.resets, given.mask, given.dt))
        y, state = self._called(params, given.x[None], state, (None, *more), span, given.single)
        return jax.tree.map(lambda leaf: leaf[0, 0] if given.single else leaf[0], y), state

    def initial_state(self, batch: int) -> Any:
        """The state of `batch` sequences before their first step: a tree of arrays [N, ...]."""
        params = self.params()
        dtype = compute_type(params, jnp.zeros((), jnp.float16), self.dtype)
        return self._first(params, batch, accumulator(dtype))

    @jaxprs.with_promotion
    def _called(
        self, params: Params, x: Array, state: PyTree, more: Any, span: Span, single: bool
    ) -> tuple[Any, Any]:
        """Runs the formula on [T, N, D]; padding may hold NaN; `more`: lengths [N], resets, mask and dt [T, N], or None."""
        fresh = self._first(params, x.shape[1], accumulator(span.dtype))
        if state is None:
            state = fresh
        else:
            state = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], state) if single else state
            state = self._checked_state(state, fresh)
        params, x, state, more, fresh = alike((params, x, state, more, fresh))
        lengths, resets, mask, dt = more
        x = x.astype(span.dtype)
        dt = None if dt is None else dt.astype(accumulator(span.dtype))
        steps = live = None
        if mask is not None:
            steps = Compaction.of(mask, lengths, resets)
            x = steps.moved(x)
            dt = None if dt is None else steps.moved(dt)
            lengths = steps.lengths
            resets = steps.resets
        if lengths is not None:
            live = before_end(span.steps, lengths)
            x = where_live(live, x)
            dt = None if dt is None else where_live(live, dt)
            resets = None if resets is None else resets & live
        recurrent = self._recurrent(fresh)
        span = replace(
            span,
            lengths=lengths,
            resets=resets,
            dt=dt,
            fresh=recurrent[0] if len(recurrent) == 1 else recurrent,
        )
        y, state = self._run(params, x, state, span)
        y = jax.tree.map(
            lambda leaf: leaf.astype(span.dtype) if is_floating(leaf) else leaf,
            y,
        )
        if live is not None:
            y = jax.tree.map(lambda leaf: where_live(live, leaf), y)
        if steps is not None:
            y = jax.tree.map(steps.put_back, y)
            state = state if steps.after is None else in_rows(steps.after, fresh, state)
        return y, jax.tree.map(lambda leaf: leaf[0], state) if single else state

    def _checked_state(self, state: PyTree, fresh: PyTree) -> Any:
        leaves, tree = jax.tree.flatten(state)
        wanted, expected = jax.tree.flatten(fresh)
        shapes = jax.tree.unflatten(expected, [list(leaf.shape) for leaf in wanted])
        if tree != expected or any(jnp.shape(a) != b.shape for a, b in zip(leaves, wanted)):
            given = jax.tree.unflatten(tree, [list(jnp.shape(leaf)) for leaf in leaves])
            raise LayerError(
                f"{self._name()}: the state has the shapes {given} but must have {shapes}, as initial_state"
            )
        return jax.tree.unflatten(tree, [jnp.asarray(a, b.dtype) for a, b in zip(leaves, wanted)])


def _run_parts(functions: Sequence[Callable], options: Any, arrays: Any) -> tuple[Any, Any]:
    """Runs a layer from its functions and settings."""
    kind, names, settings, span, single = options
    params, x, state, more = arrays
    if isinstance(settings, list):
        (layer,) = settings
    else:
        layer = object.__new__(kind)
        vars(layer).update(settings, **dict(zip(names, functions)))
    return layer._called(params, x, state, more, span, single)


def _names(leaves: Sequence[Array]) -> list[str]:
    """The names of the parameters of a learned state."""
    return ["state"] if len(leaves) == 1 else [f"state_{k}" for k in range(len(leaves))]


def uniform(rows: int, columns: int) -> Parameter:
    """A weight [rows, columns], uniform in [-1/sqrt(columns), 1/sqrt(columns)], as PyTorch's linear layers."""
    bound = 1.0 / math.sqrt(columns)
    return lambda key, shape, dtype=jnp.float32: jax.random.uniform(
        key, shape, dtype, -bound, bound
    ), (rows, columns)


def constant(value: float, *shape: int) -> Parameter:
    """A parameter of one value."""
    return jax.nn.initializers.constant(value), shape


class Recurrent(RecurrentLayer):
    """A layer of a step of one's own, with lengths, resets, masks, streaming and a fast loop.

    Args:
        step: `(params, state, x) -> (state, y)`, for x [N, D]; leaves of the state and of y are [N, ...]. With a fourth
            parameter it also gets dt [N], if a call has it.
        input_size: features of the input, D.
        initial_state: `batch -> state`, the state before the first step and after resets.
        params: a flat dict of arrays, the initial parameters, or a function that makes it from a key.
        rngs: the source of that key.
        options: batch_first, dtype, recompute, executor and learned_state, as of all layers. `dtype` is the type of x and
            y here.

    >>> def step(p, h, x):  # the recurrence of an IndRNN with tanh
    ...     h = jnp.tanh(x @ p["w"].T + p["u"][None] * h)
    ...     return h, h
    >>> start = {"w": jnp.ones((4, 3)), "u": jnp.full(4, 0.5)}
    >>> layer = Recurrent(step, 3, lambda n: jnp.zeros((n, 4)), start, rngs=nnx.Rngs(0))
    >>> y, h = layer(jnp.ones((5, 2, 3)), lengths=[5, 3])
    >>> y.shape, h.shape, bool((y[2, 1] == h[1]).all())
    ((5, 2, 4), (2, 4), True)
    """

    @spelled_out(RecurrentLayer.__init__, without=["param_dtype"])
    def __init__(
        self,
        step: Callable[[Any, Any, Any], tuple[Any, Any]],
        input_size: int,
        initial_state: Callable[[int], Any],
        params: Params | Callable[[Array], Params],
        *,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        self._step = step
        self._start = initial_state
        given = params(rngs.params()) if callable(params) else params
        self._given = nnx.data({name: jnp.asarray(value) for name, value in given.items()})
        super().__init__(input_size, input_size, rngs=rngs, **options)
        self._known = tuple((name, value.shape) for name, value in self._given.items())
        del self._given, self.output_size

    # The step is the user's: where an option of JAX forbids promotion, it is forbidden in the step.
    _called = RecurrentLayer._called.__wrapped__  # type: ignore[attr-defined]

    def _initial(self, key: Array, dtype: DTypeLike) -> Arrays:
        learned = self._learned(dtype)
        if both := learned.keys() & self._given.keys():
            raise LayerError(
                f"Recurrent: params have {sorted(both)}, the names of the learned state; rename them"
            )
        return dict(self._given) | learned

    def _shapes(self) -> Shapes:
        return dict(self._known) | {k: v.shape for k, v in self._learned(jnp.float32).items()}

    def _fresh(self, batch: int, dtype: DTypeLike) -> Any:
        return jax.tree.map(jnp.asarray, self._start(batch))

    @property
    def _timed(self) -> bool:  # type: ignore[override]
        parameters = inspect.signature(self._step).parameters.values()
        return any(p.kind is p.VAR_POSITIONAL for p in parameters) or len(parameters) > 3

    def _run(self, params: Params, x: Array, state: PyTree, span: Span) -> Outputs:
        def step(carry: PyTree, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
            new, y = self._step(params, carry, *inputs)
            return like(new, carry), y

        state, y = span.scan(step, state, (x,) if span.dt is None else (x, span.dt))
        return y, state
