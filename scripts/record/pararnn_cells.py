"""Records what pararnn-torch computes by Newton's method, in float64, as golden data for tests/loops/test_newton.py.

    python scripts/record/pararnn_cells.py        (pararnn-torch and torch, on a CPU; writes tests/golden/pararnn.npz)

The package solves all steps of its own cells at once, as `executor="newton"` does for any step. Of three cells with diagonal
recurrent weights it gives the states of all steps, and the gradients of `sum(states w)` with respect to the weights, the
input and the initial state. A name is `cell|array`; `cell|iterations` is the number of residuals that it evaluated.

Shapes: N batch, T time, D input, H hidden; the states are [N, T, H], or [N, T, 2, H] of the LSTM (cell, hidden).
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import numpy as np
import torch
from pararnn import NewtonConfig, NewtonStats, ParaCfC, ParaGRU, ParaLSTM, newton_apply

PATH = Path(__file__).parents[2] / "tests" / "golden" / "pararnn.npz"
N, T, D, H = 2, 64, 3, 4
CELLS = {"gru": ParaGRU, "lstm": ParaLSTM, "cfc": ParaCfC}


def record(seed: int, name: str) -> dict[str, np.ndarray]:
    """One cell: its weights and inputs, the states, and all gradients."""
    random = np.random.RandomState(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.tensor(scale * random.standard_normal(shape))

    cell = CELLS[name](D, H, dtype=torch.float64, max_recurrent_norm=None)
    weights = dict(cell.named_parameters())
    for weight in weights.values():
        weight.data = normal(*weight.shape, scale=0.6)
    x = normal(N, T, D)
    if name == "cfc":
        x[..., -1] = x[..., -1].abs()  # the time between two steps
    state = (N, 2, H) if name == "lstm" else (N, H)
    first = normal(*state, scale=0.5)
    w = normal(state[0], T, *state[1:])
    x.requires_grad_(True), first.requires_grad_(True)
    stats = NewtonStats()
    config = NewtonConfig(max_iters=20, scan_backend="eager", residual_atol=1e-14)
    states = newton_apply(cell, x, config, h0=first, stats=stats)
    (states * w).sum().backward()
    arrays = {
        "x": x,
        "first": first,
        "w": w,
        "states": states,
        "grad_x": x.grad,
        "grad_first": first.grad,
    }
    arrays |= weights | {f"grad_{k}": v.grad for k, v in weights.items()}
    stored = {f"{name}|{key}": value.detach().numpy() for key, value in arrays.items()}
    print(f"{name}: {stats.iters} residuals, the last {stats.max_residual:.1e}")
    return stored | {f"{name}|iterations": np.int32(stats.iters)}


def main() -> None:
    arrays = {}
    for seed, name in enumerate(CELLS):
        arrays |= record(seed, name)
    versions = " ".join(f"{p} {importlib.metadata.version(p)}" for p in ("pararnn-torch", "torch"))
    np.savez_compressed(PATH, versions=np.array(versions), **arrays)
    print(PATH.name, versions, len(arrays), "arrays", PATH.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
