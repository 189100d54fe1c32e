"""Long sequences in pieces that carry the state: truncated backpropagation through time, and serving step by step.

Shapes: T time, N batch, D input, P output of a step, S steps of a chunk, C chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jrnn.errors import LayerError
from jrnn.jaxprs.mesh_axes import alike
from jrnn.nn.checks import check_integer
from jrnn.nn.modules import GRU, LSTM, RNN
from jrnn.nn.recurrent import Outputs, RecurrentLayer
from jrnn.nn.sequences import Sequences, compute_type
from jrnn.nn.sequential import Sequential
from jrnn.nn.span import PyTree
from jrnn.nn.stack import run_stack, stack_state
from jrnn.nn.units import State, as_given


def chunked(
    module: RNN | LSTM | GRU,
    x: Any,
    hx: PyTree = None,
    *,
    size: int,
    lengths: Any = None,
    resets: Any = None,
    reset_state: Any = None,
    mask: Any = None,
    rngs: Any = None,
) -> Outputs:
    """Calls a module on a sequence in chunks of `size` steps, between which gradients stop.

    Outputs and last states equal the results of `module(x, hx, ...)`. A gradient goes back from each output to the beginning
    of its chunk only: truncated backpropagation through time.

    Args:
        module: a module without a reverse direction.
        x: [T, N, D], or [N, T, D] with batch_first.
        hx: the initial states; they get gradients from the first chunk.
        size: S, the number of steps of a chunk; the last chunk may be shorter.
        lengths, resets, reset_state, mask, rngs: as in a call of the module.

    Returns:
        `(output, states)`, as the module returns them.

    Raises:
        LayerError: if the module is bidirectional, the size is below 1, or arrays do not fit.

    >>> from flax import nnx
    >>> lstm = LSTM(3, 4, rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(0), (10, 2, 3))
    >>> output, (h, c) = chunked(lstm, x, size=4)
    >>> bool(jnp.allclose(output, lstm(x)[0], atol=1e-6))
    True
    >>> grad = jax.grad(lambda x: chunked(lstm, x, size=4)[0][9].sum())(x)
    >>> [bool(step.any()) for step in grad]  # the last chunk has the steps 8 and 9
    [False, False, False, False, False, False, False, False, True, True]
    """
    if isinstance(module, RecurrentLayer):
        name = type(module).__name__
        raise LayerError(
            f"{name}: chunked is for RNN, LSTM and GRU; call the layer on each chunk with the state of the last"
        )
    where = f"{module.layout.unit.name}: chunked"
    if module.layout.bidirectional:
        raise LayerError(
            f"{where}: a bidirectional stack needs the whole sequence; it cannot go chunk by chunk"
        )
    size = check_integer(f"{where}: size", size, 1)
    features = module.layout.input_size
    batch_first = module.settings.batch_first
    given = Sequences.of(
        where, x, features, batch_first, lengths=lengths, resets=resets, mask=mask, batched=True
    )
    x = given.x
    lengths = given.lengths
    steps, batch, _ = x.shape
    count = -(-steps // size)
    if lengths is None and count * size != steps:
        lengths = jnp.full((batch,), steps, jnp.int32)
    if lengths is not None:
        lengths = jnp.clip(lengths[None] - size * jnp.arange(count)[:, None], 0, size)
    key = module._key(rngs)
    keys = None if key is None else jax.random.split(key, count)
    layout = module.layout
    params = module.params()
    settings = replace(module.settings, batch_first=False)
    dtype = compute_type(params, x, settings.dtype)
    state = stack_state(where, layout, params, hx, batch, dtype)

    def run(state: State, inputs: tuple[Any, ...]) -> tuple[State, Array]:
        k, (piece, resets, mask), lengths, key = inputs
        hx = as_given(tuple(jnp.where(k == 0, s, lax.stop_gradient(s)) for s in state))
        options = {"resets": resets, "reset_state": reset_state, "mask": mask}
        output, state = run_stack(
            layout.unit, where, params, piece, hx, settings, lengths=lengths, key=key, **options
        )
        return state, output

    def in_pieces(leaf: Array) -> Array:
        padded = jnp.pad(leaf, ((0, count * size - steps), *((0, 0),) * (leaf.ndim - 1)))
        return padded.reshape(count, size, *leaf.shape[1:])

    pieces = jax.tree.map(in_pieces, (x, given.resets, given.mask))
    params, reset_state, state, xs = alike((params, reset_state, state, (pieces, lengths, keys)))
    state, outputs = lax.scan(run, state, (jnp.arange(count), *xs))
    return given.given_back(outputs.reshape(count * size, batch, -1)[:steps]), as_given(state)


def compiled_step(module: Any, *, donate: bool = False) -> Callable[..., Outputs]:
    """Compiles a module's or a model's `step` for serving, with its current parameters.

    A call only dispatches one program, while `nnx.jit` also flattens the module.

    Args:
        module: a layer of `jrnn.nn` without a reverse direction, or another pytree with a method `step`, as a model of
            `jrnn.models`, of `jrnn.load_run`, or a `flax.nnx.Module` of your own.
        donate: whether a call may write over the hx that it gets, which cannot be used again then. A model with attention
            otherwise copies its memory at each step.

    Returns:
        The function `(x, hx) -> (y, hx)`, [N, D] -> [N, P], or [D] -> [P] for one sequence, with the options of the step,
        such as `resets=`. `module.initial_state` returns the first hx. A language model takes tokens [N].

    Raises:
        LayerError: if there is no `step`.

    >>> from flax import nnx
    >>> gru = GRU(3, 4, rngs=nnx.Rngs(0))
    >>> step, state = compiled_step(gru), gru.initial_state(1)
    >>> x = jax.random.normal(jax.random.key(0), (5, 1, 3))
    >>> for frame in x:
    ...     y, state = step(frame, state)
    >>> bool(jnp.allclose(y, gru(x)[0][-1], atol=1e-6))
    True
    """
    step = getattr(type(module), "step", None)
    if not callable(step) or jax.tree_util.all_leaves([module]):
        name = module.__name__ if isinstance(module, type) else type(module).__name__
        rule = "takes a layer of jrnn.nn, or a model: a pytree with a method step(x, state) -> (y, state)"
        raise LayerError(f"compiled_step {rule}; {name} is neither")
    if isinstance(module, (RNN, LSTM, GRU)) and module.layout.bidirectional:
        raise LayerError(
            f"{module.layout.unit.name}: a bidirectional stack needs the whole sequence; it has no step"
        )
    leaves, tree = jax.tree.flatten(module)

    def of_leaves(leaves: list[Any], x: Any, hx: PyTree = None, **options: Any) -> Outputs:
        results: Outputs = step(jax.tree.unflatten(tree, leaves), x, hx, **options)
        return results

    donated = "hx" if donate else None
    # constants, which a call does not pass
    if isinstance(module, (RecurrentLayer, RNN, LSTM, GRU, Sequential)):
        return jax.jit(partial(of_leaves, leaves), donate_argnames=donated)
    # large parameters make slow constants
    return partial(jax.jit(of_leaves, donate_argnames=donated), leaves)
