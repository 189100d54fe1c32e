"""Hypothesis strategies: random nets with their inputs, and lengths of sequences."""

from __future__ import annotations

from typing import Any

import numpy as np

from jrnn.nets.ir import Net, Op

_ROWS = 2
_COLUMNS = 3
_UNARY = ("Tanh", "Sigmoid", "Sin", "Cos", "Softsign", "Sqr", "Negative", "Copy")
_BINARY = ("Add", "Sub", "Mul")
_INPUTS = ("x0", "x1")


def _strategies() -> Any:
    try:
        from hypothesis import strategies
    except ImportError:
        raise ImportError(
            "the strategies of jrnn.testing need hypothesis: pip install hypothesis"
        ) from None
    return strategies


def lengths(batch: int, steps: int) -> Any:
    """Returns a strategy for lengths int32 [batch] from 0 to `steps`; 0, 1 and `steps` are frequent.

    Raises ImportError if hypothesis is missing, like `nets`.
    """
    st = _strategies()
    edges = st.sampled_from(sorted({0, min(1, steps), steps}))
    one = st.one_of(edges, st.integers(0, steps))
    return st.lists(one, min_size=batch, max_size=batch).map(lambda n: np.array(n, np.int32))


def nets(max_ops: int = 8) -> Any:
    """Returns a strategy for pairs (net, blobs): smooth nets whose blobs are read several times, overwritten, or not read.

    All blobs are [2, 3] except the weights of FC; the output of the net is the last blob.
    """
    st = _strategies()

    @st.composite
    def drawn(draw: Any) -> tuple[Net, dict[str, np.ndarray]]:
        known = list(_INPUTS)
        shapes = dict.fromkeys(_INPUTS, (_ROWS, _COLUMNS))
        ops = []
        for k in range(draw(st.integers(1, max_ops))):
            kind = draw(st.sampled_from((*_UNARY, *_BINARY, "Sum", "FC")))
            if kind in _UNARY or kind == "FC":
                count = 1
            elif kind in _BINARY:
                count = 2
            else:
                count = draw(st.integers(1, 3))
            inputs = [draw(st.sampled_from(known)) for _ in range(count)]
            if kind == "FC":
                shapes |= {f"w{k}": (_COLUMNS, _COLUMNS), f"b{k}": (_COLUMNS,)}
                inputs += [f"w{k}", f"b{k}"]
            written = []
            for n in known:
                if n not in _INPUTS:
                    written.append(n)
            output = draw(st.sampled_from([f"h{k}", *written]))
            ops.append(Op.of(kind, inputs, [output]))
            known = [*dict.fromkeys((*known, output))]
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        blobs = {}
        for n, shape in shapes.items():
            blobs[n] = rng.uniform(-1, 1, shape).astype(np.float32)
        return Net("drawn", tuple(ops), tuple(shapes), (ops[-1].outputs[0],)), blobs

    return drawn()
