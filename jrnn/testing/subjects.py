"""Recurrent layers as functions of weights, sequences, states, lengths and resets, and cells of every kind as such.

Shapes: T time, N batch, D input, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrnn.errors import LayerError
from jrnn.loops import scan
from jrnn.nets.builder import NetBuilder
from jrnn.nets.cells import Cell, RunOptions, run_cell
from jrnn.nets.ir import Names, Net, Values
from jrnn.nets.lowering import to_jax

X = "x"
LENGTHS = "lengths"
Outputs = tuple[Any, Any]  # y and the last state
PyTree = Any  # of arrays
Swap = Callable[[Any], Any]  # of the weights of both directions


@dataclass(frozen=True)
class Layer:
    """A recurrent layer as a function, with arguments to run it on.

    Attributes:
        call: `call(params, x, state, lengths=None, resets=None, mask=None) -> (y, state)`. x and y are [T, N, ...], lengths
            int32 [N], resets and mask bool [T, N]. If state is None, the layer begins in its own initial state.
        params: a pytree of weights.
        x: sequences [T, N, ...] of floating-point numbers; for the assertions a pytree of these.
        state: a first state, a pytree with N along `state_axis`; None if no state can be given.
        lengths, resets, mask: whether the layer takes them; the assertions give it lengths.
        bidirectional: whether outputs may depend on later inputs; the last axis of y then holds both directions.
        swap: a function of the params that exchanges both directions' weights, for the check of time reversal.
        reset_to: what a reset puts the state back to: "zeros", the "initial" state that was given, or the layer's "own".
        wide_states: whether states are float32 also where inputs and weights have a narrower type.
        in_jax: whether `call` can be traced by JAX, and so be differentiated and compiled by it.
        gradients: `gradients(params, x, state, dy) -> (dx, dstate)` of a layer that is not JAX's.
    """

    call: Callable[..., Outputs]
    params: Any
    x: Any
    state: Any = None
    state_axis: int = 0
    lengths: bool = False
    resets: bool = False
    mask: bool = False
    bidirectional: bool = False
    swap: Swap | None = None
    reset_to: str = "zeros"
    wide_states: bool = False
    in_jax: bool = True
    gradients: Callable[..., Outputs] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """T and N."""
        return np.shape(jax.tree.leaves(self.x)[0])[:2]  # type: ignore[return-value]


@dataclass(frozen=True)
class CellNet:
    """A `jrnn.nets.cells.Cell` as a net over a sequence, with values for all its inputs."""

    net: Net
    weights: Values
    state: tuple[Any, ...]
    state_names: Names
    output: str
    last: Names

    @classmethod
    def of(
        cls, cell: Cell, state: PyTree, xs: PyTree, *, unrolled: bool = False, seed: int = 0
    ) -> CellNet:
        """Draws weights, and first states [N, H] if `state` is None; gradients flow through all states."""
        b = NetBuilder("cell")
        steps, batch = np.shape(xs)[:2]
        names = tuple(b.input(f"state_{k}") for k in range(len(cell.states)))
        first = names
        if unrolled:  # whose first values must be [1, N, H]
            first = tuple(b.op("ExpandDims", [n], f"{n}_slot", dims=[0]) for n in names)
        options = RunOptions(unroll_steps=int(steps) if unrolled else None)
        run = run_cell(
            cell, b, b.input(X), b.input(LENGTHS), list(first), scope="cell", options=options
        )
        last = tuple(s.last for s in run.states)
        rng = np.random.default_rng(seed)
        weights = {}
        for n, p in b.params.items():
            weights[n] = rng.standard_normal(p.shape).astype(np.float32)
        if state is None:
            state = tuple(
                rng.standard_normal((batch, s.size)).astype(np.float32) for s in cell.states
            )
        if len(state) != len(names):
            raise LayerError(f"the cell has {len(names)} states, was given {len(state)}")
        return cls(
            b.build(outputs=[run.output, *last]), weights, tuple(state), names, run.output, last
        )

    def blobs(self, xs: PyTree, lengths: Any) -> Values:
        return {**self.weights, **dict(zip(self.state_names, self.state)), X: xs, LENGTHS: lengths}

    def layer(self, xs: PyTree, key: Any) -> Layer:
        fn = to_jax(self.net, [self.output, *self.last])

        def call(weights: PyTree, xs: PyTree, state: PyTree, lengths: Any) -> Outputs:
            blobs = fn(
                {**weights, **dict(zip(self.state_names, state)), X: xs, LENGTHS: lengths}, key=key
            )
            return blobs[self.output], tuple(blobs[n][0] for n in self.last)

        return Layer(call, self.weights, xs, self.state, lengths=True)


def layer_of(
    cell: Any, carry: PyTree, xs: PyTree, params: PyTree = None, key: Any = None, **options: Any
) -> Layer:
    """Returns a cell of any kind as a layer; `options` go to `jrnn.scan` for a JAX step."""
    if isinstance(cell, Layer):
        return cell
    if isinstance(cell, Cell):
        return CellNet.of(cell, carry, xs).layer(xs, key)
    if not callable(cell):
        raise LayerError(
            f"a cell is a function, a jrnn.nets.cells.Cell or a Layer, was given a {type(cell).__name__}"
        )

    def call(weights: PyTree, xs: PyTree, state: PyTree, lengths: Any) -> Outputs:
        def step(carry: PyTree, x: PyTree) -> Any:
            return cell(carry, x) if params is None else cell(weights, carry, x)

        last, ys = scan(step, state, xs, lengths=lengths, **options)
        return ys, last

    carry, xs, params = jax.tree.map(jnp.asarray, (carry, xs, params))
    return Layer(call, () if params is None else params, xs, carry, lengths=True)
