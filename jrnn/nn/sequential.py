"""Layers and what stands between them as one layer.

Shapes: T time, N batch, D input, P output of the last part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jrnn.errors import LayerError
from jrnn.jaxprs.queries import along_first
from jrnn.nn.checks import check_array
from jrnn.nn.modules import GRU, LSTM, RNN
from jrnn.nn.recurrent import Outputs, RecurrentLayer
from jrnn.nn.sequences import Sequences, Steps, before_end, where_live
from jrnn.nn.span import PyTree


class Sequential(nnx.Module):
    """Parts that are called one after the other, as one recurrent layer: in a call, step by step, and compiled.

    Args:
        parts: layers of `jrnn.nn`, which have a state and see lengths, resets, masks and times; and modules or functions of
            one array, which see each step alone, on its last axis, such as `nnx.Linear`, `nnx.LayerNorm`, `nnx.Dropout` and
            `jax.nn.gelu`. A `Sequential` is such a layer, too.
        batch_first: whether batched sequences are [N, T, D] instead of [T, N, D]; the parts are all [T, N, D].

    The state is a tuple with an entry for each part with a state, a tree of arrays [N, ...].

    >>> rngs = nnx.Rngs(0)
    >>> norm = nnx.LayerNorm(8, rngs=rngs)
    >>> from jrnn.nn import CausalConv
    >>> model = Sequential(CausalConv(3, 8, 4, rngs=rngs), jax.nn.gelu, GRU(8, 8, rngs=rngs), norm, GRU(8, 8, rngs=rngs))
    >>> x = jax.random.normal(jax.random.key(0), (6, 2, 3))
    >>> y, state = model(x, lengths=[6, 4])
    >>> y.shape, jax.tree.map(jnp.shape, state)
    ((6, 2, 8), ((2, 3, 3), (2, 1, 8), (2, 1, 8)))
    >>> now = model.initial_state(2)
    >>> for frame in x:
    ...     out, now = model.step(frame, now)
    >>> bool(jnp.allclose(out, model(x)[0][-1], atol=1e-5))
    True
    """

    def __init__(self, *parts: Callable[..., Any], batch_first: bool = False) -> None:
        for k, part in enumerate(parts):
            if not callable(part) or isinstance(part, type):
                raise LayerError(
                    f"Sequential: part {k} is {part!r:.80}; a part is a layer, a module or a function"
                )
            if _is_layer(part) and getattr(part, "settings", part).batch_first:
                raise LayerError(
                    f"Sequential: part {k} has batch_first=True; give it to Sequential, and to no part"
                )
        self.parts = nnx.List(parts)
        self.batch_first = batch_first

    def __call__(
        self, x: Any, state: PyTree = None, *, lengths: Any = None, resets: Any = None, mask: Any = None, dt: Any = None,
        rngs: Any = None,
    ) -> Outputs:  # fmt: skip
        """[T, N, D] -> y [T, N, P] and the state after the last step.

        Args:
            x: [T, N, D], [N, T, D] with batch_first, or [T, D] for one sequence.
            state: the state before the first step; None is `initial_state`.
            lengths, resets, mask: as of all layers.
            dt: as of layers in continuous time, which get it; there must be one.
            rngs: the source of random keys for dropout and zoneout instead of the parts' own.

        Raises:
            LayerError: if the arrays do not fit together, or a part does not take them.
        """
        x = check_array("Sequential", "x", x)
        self._check_timed(dt)
        size = x.shape[-1] if x.ndim else 0
        options = dict(lengths=lengths, resets=resets, mask=mask, dt=dt)
        given = Sequences.of("Sequential", x, size, self.batch_first, **options)
        rows = {}
        for name in ("x", "resets", "mask", "dt"):
            rows[name] = getattr(given, name)
        if given.single:
            rows = {name: None if leaf is None else leaf[:, 0] for name, leaf in rows.items()}
        x = rows.pop("x")
        live = rows["mask"]
        if given.lengths is not None:
            within = before_end(x.shape[0], given.lengths)
            within = within[:, 0] if given.single else within
            live = within if live is None else live & within
            rows["lengths"] = given.lengths

        def call(part: Any, x: Array, state: PyTree) -> Any:
            if not _is_layer(part):
                if isinstance(part, nnx.Dropout) and rngs is not None:
                    return part(x, rngs=rngs)
                return part(x)
            own = {}
            for name, leaf in rows.items():
                if name != "dt" or _is_timed(part):
                    own[name] = leaf
            return part(
                x,
                state,
                **own,
                **({} if rngs is None or isinstance(part, RecurrentLayer) else {"rngs": rngs}),
            )

        y, state = self._through(call, x, state, live, given.single)
        return (jnp.swapaxes(y, 0, 1) if self.batch_first and not given.single else y), state

    def step(
        self, x: Any, state: PyTree = None, *, resets: Any = None, mask: Any = None, dt: Any = None
    ) -> Outputs:
        """One step, [N, D] or [D] -> y [N, P] or [P] and the state, which the next step takes. Nothing is dropped.

        `resets`, `mask` and `dt`, [N] or numbers, are the values for this step, as in a call.
        """
        x = check_array("Sequential.step", "x", x)
        self._check_timed(dt)
        Steps.of(
            "Sequential.step", x, x.shape[-1] if x.ndim else 0, resets=resets, mask=mask, dt=dt
        )
        rows = {"resets": resets, "mask": mask, "dt": dt}

        def call(part: Any, x: Array, state: PyTree) -> Any:
            if not _is_layer(part):
                return x if isinstance(part, nnx.Dropout) else part(x)
            return part.step(
                x, state, **{name: v for name, v in rows.items() if name != "dt" or _is_timed(part)}
            )

        return self._through(
            call, x, state, None if mask is None else jnp.asarray(mask), x.ndim == 1
        )

    def initial_state(self, batch: int) -> Any:
        """The state of `batch` sequences before their first step."""
        return tuple(
            _moved(part, part.initial_state(batch)) for part in self.parts if _is_layer(part)
        )

    def _check_timed(self, dt: Any) -> None:
        if dt is not None and not any(map(_is_timed, self.parts)):
            raise LayerError(
                "Sequential: dt is given, but no part has a time between steps; see RecurrentLayer"
            )

    def _through(
        self,
        call: Callable[..., Any],
        x: Array,
        state: PyTree,
        live: Array | None,
        single: bool,
    ) -> Outputs:
        """Calls all parts. Parts without a state get 1 at steps that do not count: most functions are smooth at 1."""
        count = sum(map(_is_layer, self.parts))
        if state is not None and not (isinstance(state, (tuple, list)) and len(state) == count):
            if isinstance(state, (tuple, list)):
                given = f"{len(state)} entries"
            else:
                given = f"a {type(state).__name__}"
            raise LayerError(
                f"Sequential: the state is {given} but must be a tuple of {count}, as initial_state"
            )
        states = iter([None] * count if state is None else state)
        after = []
        for part in self.parts:
            if _is_layer(part):
                own = next(states)
                own = own if own is None or single else _moved(part, own, back=True)
                x, new = call(part, x, own)
                after.append(new if single else _moved(part, new))
            else:
                if live is not None:
                    x = jnp.where(along_first(live, x), x, jnp.ones((), x.dtype))
                x = call(part, x, None)
        return (x if live is None else where_live(live, x)), tuple(after)


def _is_layer(part: Any) -> bool:
    return isinstance(part, (RecurrentLayer, RNN, LSTM, GRU, Sequential))


def _is_timed(part: Any) -> bool:
    if isinstance(part, Sequential):
        return any(map(_is_timed, part.parts))
    return getattr(part, "_timed", False)


def _moved(part: Any, state: PyTree, back: bool = False) -> Any:
    """The states [L K, N, P] of PyTorch's layers as [N, L K, P], or back. Other layers' states are [N, ...] already."""
    if not isinstance(part, (RNN, LSTM, GRU)):
        return state
    ends = (0, 1) if back else (1, 0)
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, *ends), state)
