"""Kernels of JAX, NumPy, torch and ONNX as one record, for `check_kernel`.

Shapes: T time, N batch, H heads. torch and onnxruntime are imported when a kernel needs them.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jrnn.errors import LayerError, near
from jrnn.testing.invariance import floats
from jrnn.testing.kernels.kernel import FEATURES, Kernel, inside
from jrnn.testing.kernels.onnx_kernels import onnx_kernel
from jrnn.testing.kernels.oracle import in_type
from jrnn.testing.kernels.torch_kernels import torch_kernel
from jrnn.testing.subjects import PyTree

FRAMEWORKS = ("jax", "torch", "numpy")
Calls = dict[str, Any]  # fields of a Kernel


def sequence_kernel(
    step: Callable[..., tuple[Any, Any]],
    kernel: Any,
    xs: PyTree,
    state: PyTree,
    *,
    params: PyTree = None,
    layout: str = "TN",
    framework: str | None = None,
    device: str = "cpu",
    gradients: Callable[..., tuple[Any, ...]] | None = None,
    start: PyTree = None,
    decode: Callable[..., tuple[Any, Any]] | None = None,
    **options: Any,
) -> Kernel:
    """Returns a kernel of any framework, and the step that it must agree with, as a `Kernel`.

    Args:
        step: `step(carry, x) -> (carry, y)` of JAX for one token of one sequence and one head; `(params, carry, x)` with
            params.
        kernel: `kernel(xs, state, *, lengths=None, resets=None, segments=None, mask=None) -> (ys, state)`, with the params
            first if there are any. Its signature says what it takes: one without `state` takes no first state; one whose
            `state` has a default may be given none. lengths are int32 [N]; resets bool, True where a sequence begins anew;
            segments int32 with another number for each document; mask bool, False at padding: these have the axes T and N.
            Or a module of torch, or an ONNX model: its path, ending in .onnx, or its bytes.
        xs: a pytree of inputs in the kernel's layout, with a few steps; further ones are drawn from these.
        state: a state that a sequence may begin in, in the layout without T.
        params: weights that the step and the kernel take.
        layout: the leading axes of xs and ys in their order: T for time, and where the kernel has them, N for the batch and
            H for heads, such as "NTH".
        framework: "jax", "torch" or "numpy": what a function takes and returns; "jax" by default.
        device: of torch.
        gradients: of a NumPy kernel, `(xs, state, dys, dstate, **options) -> (dxs, dstate)`, with the params first, and
            their gradient first, if there are any.
        start: the state that a sequence begins in if none is given, zeros by default.
        decode: a kernel for one token, T = 1, of the same framework, such as that of decoding.
        options: other fields of `Kernel`, such as chunk, multiple_of, decay, returns_state or types.

    Raises:
        LayerError: for a kernel of an unknown kind, arrays that do not fit, or an unknown option.
    """
    _check_options(layout, framework, options)
    first = inside_all(state, layout, "NH")
    zeros = jax.tree.map(np.zeros_like, first) if start is None else inside_all(start, layout, "NH")
    with_params = params is not None
    if isinstance(kernel, (bytes, str, os.PathLike)):
        calls = onnx_kernel(kernel, xs, state, layout, options.get("returns_state"))
    elif not callable(kernel):
        raise LayerError(
            f"check_kernel does not know kernels of type {type(kernel).__name__}; give a function (xs, state) -> (ys, state)"
        )
    else:
        calls = _calls(kernel, framework, with_params, device, gradients)
        calls |= _features(kernel, with_params)
    if decode is not None:
        calls["decode"] = _calls(decode, framework, with_params, device, None)["forward"]
    adapted = Kernel(
        step=step,
        params=jax.tree.map(np.asarray, params),
        x=inside_all(xs, layout, "TNH"),
        state=first,
        start=zeros,
        layout=layout,
        **calls,
    )
    _check_sizes(xs, state, layout)
    adapted = replace(adapted, **options)
    return replace(adapted, x=_lengthened(adapted.x, adapted.steps))


def inside_all(tree: PyTree, layout: str, axes: str) -> Any:
    needed = len([axis for axis in layout if axis in axes])
    for leaf in jax.tree.leaves(tree):
        if np.ndim(leaf) < needed:
            what = "".join(axis for axis in layout if axis in axes)
            raise LayerError(
                f"an array of shape {list(np.shape(leaf))} does not begin with the axes {what} of the layout {layout!r}"
            )
    return in_type(jax.tree.map(lambda leaf: inside(leaf, layout, axes), tree), np.float32)


def _check_sizes(xs: PyTree, state: PyTree, layout: str) -> None:
    """Raises a LayerError unless the state has as many sequences and heads as the inputs."""
    for leaf in jax.tree.leaves(xs)[:1]:
        sizes = dict(zip(layout, np.shape(leaf)))
        axes = [axis for axis in layout if axis != "T"]
        wanted = [sizes[axis] for axis in axes]
        for array in jax.tree.leaves(state):
            if list(np.shape(array)[: len(axes)]) != wanted:
                raise LayerError(
                    f"a state of shape {list(np.shape(array))} does not begin with {', '.join(axes)} = "
                    f"{', '.join(map(str, wanted))}, as xs in the layout {layout!r}"
                )


def _check_options(layout: str, framework: str | None, options: Mapping[str, Any]) -> None:
    if sorted(layout) not in (["T"], ["N", "T"], ["H", "T"], ["H", "N", "T"]):
        raise LayerError(
            f"layout is {layout!r}; it has T, and N and H where there are, as in 'NTH'"
        )
    if framework not in (None, *FRAMEWORKS):
        raise LayerError(f"framework is {framework!r}; there are: {', '.join(FRAMEWORKS)}")
    for name in options:
        if name not in Kernel.__dataclass_fields__:
            known = ", ".join(Kernel.__dataclass_fields__)
            hint = near(name, Kernel.__dataclass_fields__)
            raise LayerError(f"Kernel has no field {name!r}{hint}; it has {known}")


def _is_module(kernel: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(kernel, torch.nn.Module)


def _calls(
    kernel: Callable,
    framework: str | None,
    with_params: bool,
    device: str,
    gradients: Callable[..., tuple[Any, ...]] | None,
) -> Calls:
    if framework == "torch" or _is_module(kernel):
        return torch_kernel(kernel, with_params, device)
    if framework == "numpy":
        return _of_numpy(kernel, with_params, gradients)
    return _of_jax(kernel, with_params)


def _features(kernel: Any, with_params: bool) -> Calls:
    """What a function takes, by its signature."""
    takes = inspect.signature(getattr(kernel, "forward", kernel)).parameters
    features: Calls = {name: name in takes for name in FEATURES}
    plain = []
    for parameter in takes.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            plain.append(parameter)
    position = 2 if with_params else 1
    state = plain[position] if len(plain) > position else None
    if state is not None and state.name in FEATURES:
        state = None
    features["takes_state"] = state is not None
    features["needs_state"] = state is not None and state.default is state.empty
    return features


def _lengthened(x: PyTree, steps: int) -> Any:
    """Inputs of at least so many steps: to those that were given come others, drawn from them, of each array apart."""
    rng = np.random.default_rng(0)

    def lengthened(leaf: np.ndarray) -> np.ndarray:
        more = rng.integers(len(leaf), size=max(steps - len(leaf), 0))
        return np.concatenate([leaf, leaf[more]])[:steps]

    return jax.tree.map(lengthened, x)


def given(
    with_params: bool, params: PyTree, x: PyTree, state: PyTree, takes_state: bool
) -> list[Any]:
    """The arguments of a call of a user's kernel."""
    arguments = [params] if with_params else []
    arguments.append(x)
    if takes_state and state is not None:
        arguments.append(state)
    return arguments


def pair_of(results: Any) -> tuple[Any, Any]:
    """The outputs and the last state of a call; the latter is None if the kernel returns outputs alone."""
    if not isinstance(results, tuple):
        return results, None
    if len(results) != 2:
        raise LayerError(f"the kernel returned {len(results)} values, not (ys, state)")
    return results


# JAX -------------------------------------------------------------------------------------------------------------------


def _of_jax(kernel: Callable, with_params: bool) -> Calls:
    """One compiled program for each set of shapes and options, whatever property asks for it."""

    def call(params: PyTree, x: PyTree, state: PyTree, options: Mapping[str, Any]) -> Any:
        return pair_of(kernel(*given(with_params, params, x, state, True), **options))

    def pull(
        params: PyTree, x: PyTree, state: PyTree, options: Mapping[str, Any], dy: Any, dlast: Any
    ) -> Any:
        smooth, join = floats((params, x, state))
        results, back = jax.vjp(lambda values: call(*join(values), options), smooth)
        y, last = results
        seeds = (dy, None if last is None else dlast)
        seeds = jax.tree.map(lambda seed, value: seed.astype(value.dtype), seeds, results)
        return (y, last, *join(back(seeds)[0]))

    compiled_call = jax.jit(call)
    compiled_pull = jax.jit(pull)

    def forward(params: PyTree, x: PyTree, state: PyTree, **options: Any) -> Any:
        return compiled_call(params, x, state, options)

    def backward(
        params: PyTree, x: PyTree, state: PyTree, dy: Any, dlast: Any, **options: Any
    ) -> Any:
        return compiled_pull(params, x, state, options, dy, dlast)

    return {"forward": forward, "backward": backward}


# NumPy -----------------------------------------------------------------------------------------------------------------


def _of_numpy(kernel: Callable, with_params: bool, gradients: Callable | None) -> Calls:
    def forward(params: PyTree, x: PyTree, state: PyTree, **options: Any) -> Any:
        return pair_of(kernel(*given(with_params, params, x, state, True), **options))

    def backward(
        params: PyTree, x: PyTree, state: PyTree, dy: Any, dlast: Any, **options: Any
    ) -> Any:
        assert gradients is not None
        arguments = [params] if with_params else []
        pulled = gradients(*arguments, x, state, dy, dlast, **options)
        y, last = forward(params, x, state, **options)
        return (y, last, *(() if with_params else (None,)), *pulled)

    return {"forward": forward, "backward": None if gradients is None else backward}
