"""Recurrent layers of any library as one function, for `check_layer`; and how to call each library's layers.

Shapes: T time, N batch, D input. Inside, every sequence is [T, N, ...].
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import LayerError
from jrnn.testing.subjects import Layer, Outputs, PyTree, Swap


def recurrent_layer(
    layer: Any,
    x: PyTree,
    state: PyTree = None,
    *,
    params: PyTree = None,
    time_axis: int | None = None,
    **options: Any,
) -> Layer:
    """Returns a layer of any library as a `Layer`.

    Args:
        layer: a function `(params, x, state, *, lengths=None, resets=None, mask=None) -> (y, state)`, whose last arguments
            are optional; a `flax.nnx.RNN` or a layer of `jrnn.nn`; a `flax.linen.RNN`; an Equinox cell; a Haiku core inside
            `hk.transform`'s `(init, apply)`; a `keras.layers.RNN`; a `torch.nn.RNNBase`; or a `Layer`.
        x: sequences in the layer's own layout, such as [N, T, D] of flax and Keras.
        state: a first state to check with; of most libraries' layers one is made.
        params: weights, for a function, a linen module and a Haiku pair.
        time_axis: 0 or 1, the axis of time in x and y; the library's own by default.
        options: other fields of `Layer`.

    Raises:
        LayerError: for a layer of an unknown kind, or sequences that are not floating-point [T, N, ...] or [N, T, ...].
    """
    if isinstance(layer, Layer):
        return replace(layer, **options)
    x = np.asarray(x)
    if x.ndim < 2 or x.dtype.kind != "f":
        raise LayerError(
            f"x is {x.dtype}{list(x.shape)}; it must hold floating-point sequences, [T, N, ...] or [N, T, ...]"
        )
    for applies, adapt, axis in _ADAPTERS:
        if applies(layer):
            time_axis = axis(layer) if time_axis is None else time_axis
            x = x if time_axis == 0 else np.swapaxes(x, 0, 1)
            adapted = adapt(layer, x, params, time_axis)
            if state is None and adapt is not _function:
                state = _first_state(adapted)
            return replace(adapted, **{"state": state, **options})
    raise LayerError(
        f"check_layer does not know layers of type {type(layer).__module__}.{type(layer).__name__}; write a function "
        "(params, x, state) -> (y, state) that calls it"
    )


def _is(*names: str) -> Callable[[Any], bool]:
    """Whether a class of a layer begins with one of these dotted names; nothing is imported."""

    def has_class(layer: Any) -> bool:
        for t in type(layer).__mro__:
            if f"{t.__module__}.{t.__name__}".startswith(names):
                return True
        return False

    return has_class


def _turned(array: Any, time_axis: int) -> Any:
    return array if time_axis == 0 or array is None else array.swapaxes(0, 1)


def _time_major(call: Callable[..., Outputs], time_axis: int) -> Callable[..., Outputs]:
    """Returns a function of sequences [T, N, ...] by one whose x, y and flags have this axis of time."""

    def of_time_major(
        params: PyTree, x: PyTree, state: PyTree, lengths: Any = None, **flags: Any
    ) -> Outputs:
        for name, value in flags.items():
            flags[name] = _turned(value, time_axis)
        y, last = call(params, _turned(x, time_axis), state, lengths=lengths, **flags)
        return _turned(y, time_axis), last

    return of_time_major


def _first_state(layer: Layer) -> Any:
    """Random states, of the shapes of the layer's last ones; a layer's own last states, if only these can be reached."""
    if layer.reset_to == "own":
        return jax.device_get(layer.call(layer.params, jnp.asarray(layer.x), None)[1])
    if layer.in_jax:
        last = jax.eval_shape(lambda: layer.call(layer.params, jnp.asarray(layer.x), None)[1])
    else:
        last = layer.call(layer.params, layer.x, None)[1]
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda s: 0.5 * rng.standard_normal(s.shape).astype(s.dtype), last)


# Functions -------------------------------------------------------------------------------------------------------------


def _function(fn: Callable, x: PyTree, params: PyTree, time_axis: int) -> Layer:
    takes = inspect.signature(fn).parameters
    has = {n: n in takes for n in ("lengths", "resets", "mask")}

    def call(params: PyTree, x: PyTree, state: PyTree, **given: Any) -> Outputs:
        known = {name: value for name, value in given.items() if has[name]}
        return fn(params, x, state, **known)

    return Layer(_time_major(call, time_axis), params, x, **has)


# flax ------------------------------------------------------------------------------------------------------------------


def _nnx(layer: Any, x: PyTree, params: PyTree, time_axis: int) -> Layer:
    nnx = sys.modules["flax.nnx"]
    graph, held = nnx.split(layer)

    def call(params: PyTree, x: PyTree, state: PyTree, lengths: Any) -> Outputs:
        # flax's variables belong to one trace
        module = nnx.merge(graph, jax.tree.map(lambda v: v, params))
        options = {"return_carry": True, "time_major": time_axis == 0, "rngs": nnx.Rngs(0)}
        last, y = module(x, initial_carry=state, seq_lengths=lengths, **options)
        return y, last

    return _of_flax(layer, call, held, x, time_axis)


def _linen(layer: Any, x: PyTree, params: PyTree, time_axis: int) -> Layer:
    options = {"time_major": time_axis == 0}
    if params is None:
        params = layer.init(jax.random.key(0), _turned(x, time_axis), **options)

    def call(params: PyTree, x: PyTree, state: PyTree, lengths: Any) -> Outputs:
        carry = {"initial_carry": state, "return_carry": True}
        last, y = layer.apply(params, x, seq_lengths=lengths, **carry, **options)
        return y, last

    return _of_flax(layer, call, params, x, time_axis)


def _of_flax(layer: Any, call: Callable, params: PyTree, x: PyTree, time_axis: int) -> Layer:
    return Layer(
        _time_major(call, time_axis),
        params,
        x,
        lengths=True,
        bidirectional=hasattr(layer, "forward_rnn"),
        swap=_swap_of_flax(layer, params),
    )


def _swap_of_flax(layer: Any, params: PyTree) -> Swap | None:
    """Exchanges the weights of a Bidirectional of nnx or linen whose outputs are concatenated."""
    names = {"forward_rnn": "backward_rnn", "backward_rnn": "forward_rnn"}
    if not hasattr(layer, "merge_fn") or np.shape(
        layer.merge_fn(np.zeros((1, 1, 1)), np.ones((1, 1, 1)))
    ) != (1, 1, 2):
        return None
    swap = _swap(
        lambda path: re.sub("forward_rnn|backward_rnn", lambda match: names[match[0]], path)
    )
    return swap if _fits(swap, params) else None


# The exchange of both directions' weights ------------------------------------------------------------------------------


def _swap(partner: Callable[[str], str], of_inputs: str = "") -> Swap:
    """Returns a function of the weights that replaces each leaf by its `partner`, found by path.

    Args:
        partner: the path of a leaf -> the path of the other direction's leaf.
        of_inputs: a regular expression of the paths of matrices [rows, 2 P] that read both directions' outputs of the layer
            below, whose halves are exchanged too.
    """

    def swapped(params: PyTree) -> Any:
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}

        def other(path: str) -> Any:
            leaf = named[partner(path)]
            if of_inputs and re.search(of_inputs, path):
                half = leaf.shape[1] // 2
                return jnp.concatenate([leaf[:, half:], leaf[:, :half]], 1)
            return leaf

        return jax.tree.unflatten(structure, list(map(other, named)))

    return swapped


def _fits(swap: Swap, params: PyTree) -> bool:
    """Whether both directions have weights of the same names and shapes."""
    try:
        return jax.tree.map(jnp.shape, swap(params)) == jax.tree.map(jnp.shape, params)
    except KeyError:
        return False


def _of_other_direction(path: str) -> str:
    """`weight_ih_l0` -> `weight_ih_l0_reverse`, and back: the names of torch and of `jrnn.nn`."""
    return re.sub(
        r"(_l\d+)(_reverse)?", lambda match: match[1] + ("" if match[2] else "_reverse"), path
    )


_swap_of_torch = _swap(_of_other_direction, r"weight_ih_l[1-9]")


# jrnn.nn, Equinox, Haiku -------------------------------------------------------------------------------------------------


def _jrnn(layer: Any, x: PyTree, params: PyTree, time_axis: int) -> Layer:
    nnx = sys.modules["flax.nnx"]
    graph, held = nnx.split(layer)

    def call(params: PyTree, x: PyTree, state: PyTree, **options: Any) -> Outputs:
        return nnx.merge(graph, params)(x, state, **options)

    fields: dict[str, Any] = dict.fromkeys(("lengths", "resets", "mask"), True)
    if not hasattr(layer, "layout"):  # unlike PyTorch's layers, it has states [N, ...]
        fields |= {"reset_to": "own", "wide_states": True}
    else:
        fields["state_axis"] = 1
        if layer.layout.bidirectional:
            fields |= {"bidirectional": True, "swap": _swap_of_torch}
    return Layer(_time_major(call, time_axis), held, x, **fields)


def _equinox(cell: Any, x: PyTree, params: PyTree, time_axis: int) -> Layer:
    """A cell of one sequence, run over time as Equinox's documentation shows, and over the batch by `jax.vmap`."""
    equinox = sys.modules["equinox"]
    arrays, rest = equinox.partition(cell, equinox.is_array)
    pair = "LSTM" in type(cell).__name__

    def call(params: PyTree, x: PyTree, state: PyTree, lengths: Any = None) -> Outputs:
        run = jax.vmap(equinox.combine(params, rest))

        def step(state: PyTree, x: PyTree) -> Outputs:
            new = run(x, state)
            return new, new[0] if pair else new

        if state is None:
            zeros = jnp.zeros((x.shape[1], cell.hidden_size), x.dtype)
            state = (zeros, zeros) if pair else zeros
        last, y = jax.lax.scan(step, state, x)
        return y, last

    return Layer(call, arrays, x)


def _haiku(pair: Any, x: PyTree, params: PyTree, time_axis: int) -> Layer:
    """`hk.transform(lambda x, state: ...)` whose function returns (y, state), of time-major sequences."""

    def call(params: PyTree, x: PyTree, state: PyTree, lengths: Any) -> Outputs:
        return pair.apply(params, jax.random.key(0), x, state)

    params = pair.init(jax.random.key(0), _turned(x, time_axis), None) if params is None else params
    return Layer(_time_major(call, time_axis), params, x)


# Keras, torch ------------------------------------------------------------------------------------------------------------


def _halves_swapped(weights: PyTree) -> list[Any]:
    """The weights of a bidirectional layer with its directions exchanged."""
    half = len(weights) // 2
    return [*weights[half:], *weights[:half]]


def _keras(layer: Any, x: PyTree, params: PyTree, time_axis: int) -> Layer:
    """A layer with return_sequences and return_state, on Keras's JAX backend; lengths are given as a mask."""
    keras = sys.modules["keras"]
    if keras.backend.backend() != "jax":
        raise LayerError(
            f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=jax before it is imported"
        )
    both = hasattr(layer, "forward_layer")
    for one in (layer.forward_layer, layer.backward_layer) if both else (layer,):
        if not (one.return_sequences and one.return_state):
            raise LayerError(
                "give the Keras layer return_sequences=True and return_state=True, so that states can be checked"
            )
    if not layer.built:
        layer.build((x.shape[1], x.shape[0], *x.shape[2:]))
    weights = [v.value for v in layer.trainable_variables]
    fixed = [v.value for v in layer.non_trainable_variables]
    of_dtype = {layer.compute_dtype: layer}

    def casting_to(dtype: str) -> Any:
        """Returns the layer with this dtype. A Keras layer casts inputs and weights to its own dtype."""
        if dtype not in of_dtype:
            cast = type(layer).from_config(_with_dtype(layer.get_config(), dtype))
            cast.build((x.shape[1], x.shape[0], *x.shape[2:]))
            of_dtype[dtype] = cast
        return of_dtype[dtype]

    def call(params: PyTree, x: PyTree, state: PyTree, lengths: Any) -> Outputs:
        mask = None
        if lengths is not None:
            mask = jnp.arange(x.shape[1])[None] < jnp.asarray(lengths)[:, None]
        run = casting_to(jnp.result_type(x).name).stateless_call
        results, _ = run(params, fixed, x, initial_state=state, mask=mask)
        y, *last = results
        return y, last

    swap = _halves_swapped if both and layer.merge_mode == "concat" else None
    return Layer(_time_major(call, 1), weights, x, lengths=True, bidirectional=both, swap=swap)


def _with_dtype(config: Any, dtype: str) -> Any:
    """A configuration of Keras with another dtype for the layer and all within it, whose weights will be given."""
    if isinstance(config, dict):
        # The default initializer has no bfloat16 on CPUs.
        fixed = {"dtype": dtype, "recurrent_initializer": "zeros"}
        changed = {}
        for name, value in config.items():
            changed[name] = fixed.get(name) or _with_dtype(value, dtype)
        return changed
    if isinstance(config, (list, tuple)):
        return [_with_dtype(value, dtype) for value in config]
    return config


def _torch(layer: Any, x: PyTree, params: PyTree, time_axis: int) -> Layer:
    """A `torch.nn.RNNBase`; lengths are given as a packed sequence, which torch sorts."""
    torch = sys.modules["torch"]
    layer = copy.deepcopy(layer)  # the one that was given keeps its weights and dtype
    weights = {}
    for name, value in layer.state_dict().items():
        weights[name] = value.numpy().copy()

    def tensors(tree: PyTree) -> Any:
        return jax.tree.map(lambda v: torch.tensor(np.asarray(v)), tree)

    def run(params: PyTree, x: PyTree, state: PyTree, lengths: Any = None) -> Outputs:
        layer.to(x.dtype).load_state_dict(tensors(params))
        if lengths is None:
            y, last = layer(_turned(x, time_axis), state)
            return _turned(y, time_axis), last
        pack = torch.nn.utils.rnn.pack_padded_sequence
        pad = torch.nn.utils.rnn.pad_packed_sequence
        packed = pack(x, torch.tensor(np.asarray(lengths)).long(), enforce_sorted=False)
        y, last = layer(packed, state)
        return pad(y, total_length=x.shape[0])[0], last

    def call(params: PyTree, x: PyTree, state: PyTree, lengths: Any = None) -> Outputs:
        with torch.no_grad():
            results = run(params, tensors(x), tensors(state), lengths)
        return jax.tree.map(lambda v: v.numpy(), results)

    def gradients(params: PyTree, x: PyTree, state: PyTree, dy: PyTree) -> Outputs:
        x = tensors(x).requires_grad_()
        state = jax.tree.map(lambda v: v.requires_grad_(), tensors(state))
        y, _ = run(params, x, state)
        y.backward(torch.tensor(np.asarray(dy)))
        return x.grad.numpy(), jax.tree.map(lambda v: v.grad.numpy(), state)

    fields = {
        "state_axis": 1,
        "lengths": True,
        "bidirectional": layer.bidirectional,
        "in_jax": False,
    }
    swap = _swap_of_torch if layer.bidirectional else None
    return Layer(call, weights, x, gradients=gradients, swap=swap, **fields)


_ADAPTERS: tuple[tuple[Callable, Callable, Callable], ...] = (
    (_is("jrnn.nn."), _jrnn, lambda layer: int(getattr(layer, "settings", layer).batch_first)),
    (
        _is("flax.nnx.nn.recurrent.", "flax.nnx.nn.recurrent"),
        _nnx,
        lambda layer: 0 if layer.time_major else 1,
    ),
    (_is("flax.linen.recurrent."), _linen, lambda layer: 0 if layer.time_major else 1),
    (_is("equinox.nn."), _equinox, lambda layer: 0),
    (_is("haiku._src.transform.Transformed"), _haiku, lambda layer: 0),
    (_is("keras.src.layers.rnn."), _keras, lambda layer: 1),
    (_is("torch.nn.modules.rnn.RNNBase"), _torch, lambda layer: 1 if layer.batch_first else 0),
    (callable, _function, lambda layer: 0),
)
