"""Records what torch.nn.RNN, LSTM and GRU compute, in float64, as golden data for tests/nn.

    python scripts/record/torch_layers.py        (torch 2.x; writes tests/golden/torch_{rnn,lstm,gru}.npz, in a few seconds)

Every case of the grid {RNN tanh, RNN relu, LSTM, LSTM with projection, GRU} x layers {1, 3} x {uni-, bidirectional} x
{bias, none} is run on full sequences and on packed ones of unsorted lengths: outputs, final states, and the gradients of
`sum(output w) + sum(states v)` with respect to every parameter, the input and the initial states. Inputs and parameters
are stored in float32, which they are exact in; results in float64. A name is
`case|run|array`; tests/nn/conftest.py reads the files.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
STEPS, BATCH, INPUT, HIDDEN, PROJECTED = 5, 3, 2, 3, 2
LENGTHS = [2, 5, 1]
KINDS = {
    "rnn_tanh": (torch.nn.RNN, {"nonlinearity": "tanh"}),
    "rnn_relu": (torch.nn.RNN, {"nonlinearity": "relu"}),
    "lstm": (torch.nn.LSTM, {}),
    "lstm_proj": (torch.nn.LSTM, {"proj_size": PROJECTED}),
    "gru": (torch.nn.GRU, {}),
}


def normal(random: np.random.RandomState, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Float64 values that float32 holds exactly."""
    return torch.tensor(
        (scale * random.standard_normal(shape)).astype(np.float32).astype(np.float64)
    )


def run(module, x, states, cotangents, packed: bool) -> dict[str, torch.Tensor]:
    """Outputs, final states and all gradients of one run."""
    leaves = [x, *states]
    for leaf in leaves:
        leaf.grad = None
        leaf.requires_grad_(True)
    module.zero_grad()
    hx = states[0] if len(states) == 1 else tuple(states)
    results = {}
    if packed:
        output, last = module(pack_padded_sequence(x, LENGTHS, enforce_sorted=False), hx)
        results["packed"] = output.data
        output, _ = pad_packed_sequence(output, total_length=STEPS)
    else:
        output, last = module(x, hx)
    last = last if isinstance(last, tuple) else (last,)
    sum((a * w).sum() for a, w in zip((output, *last), cotangents)).backward()
    results |= {"output": output, **{f"last_{name}": s for name, s in zip("hc", last)}}
    results |= {"grad_x": x.grad, **{f"grad_{name}": s.grad for name, s in zip("hc", states)}}
    results |= {f"grad_{name}": p.grad for name, p in module.named_parameters()}
    return {name: value.detach().clone() for name, value in results.items()}


def record(
    seed: int, kind: str, layers: int, bidirectional: bool, bias: bool
) -> dict[str, np.ndarray]:
    """One case of the grid: its inputs and the results of both runs."""
    random = np.random.RandomState(seed)
    make, extra = KINDS[kind]
    settings = dict(
        num_layers=layers, bidirectional=bidirectional, bias=bias, dtype=torch.float64, **extra
    )
    module = make(INPUT, HIDDEN, **settings)
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        parameter.data = normal(random, *parameter.shape, scale=0.5)
    directions = 2 if bidirectional else 1
    output = PROJECTED if kind == "lstm_proj" else HIDDEN
    widths = (output, HIDDEN) if kind.startswith("lstm") else (output,)
    x = normal(random, STEPS, BATCH, INPUT)
    states = [normal(random, layers * directions, BATCH, width) for width in widths]
    cotangents = [
        normal(random, STEPS, BATCH, directions * output),
        *(normal(random, *s.shape) for s in states),
    ]
    case = f"{kind}-{layers}-{'bi' if bidirectional else 'uni'}-{'bias' if bias else 'nobias'}"
    inputs = {"x": x, **dict(zip("hc", states))}
    inputs |= {f"seed_{name}": w for name, w in zip(("output", "h", "c"), cotangents)}
    inputs |= parameters
    stored = {
        f"{case}|in|{name}": value.detach().numpy().astype(np.float32)
        for name, value in inputs.items()
    }
    for name, packed in (("full", False), ("ragged", True)):
        results = run(module, x, states, cotangents, packed)
        stored |= {f"{case}|{name}|{key}": value.numpy() for key, value in results.items()}

    turned = make(INPUT, HIDDEN, batch_first=True, **settings)
    turned.load_state_dict(module.state_dict())
    output_turned, _ = turned(x.transpose(0, 1), states[0] if len(states) == 1 else tuple(states))
    # batch_first only swaps axes, so the tests may do the same with what is stored.
    assert torch.equal(
        output_turned.transpose(0, 1).detach(), torch.tensor(stored[f"{case}|full|output"])
    )
    return stored


def write(path: Path, arrays: dict[str, np.ndarray], facts: dict) -> None:
    """All arrays end to end, one run for each type, with an index: an archive member for each would outweigh them."""
    index, flat = {}, {"float32": [], "float64": []}
    for name, array in arrays.items():
        index[name] = [array.dtype.name, sum(map(len, flat[array.dtype.name])), list(array.shape)]
        flat[array.dtype.name].append(array.ravel())
    runs = {name: np.concatenate(parts) for name, parts in flat.items()}
    np.savez_compressed(path, index=json.dumps({"facts": facts, "arrays": index}), **runs)


def main() -> None:
    torch.use_deterministic_algorithms(True)
    files: dict[str, dict[str, np.ndarray]] = {}
    grid = itertools.product(KINDS, (1, 3), (False, True), (True, False))
    for seed, case in enumerate(grid):
        files.setdefault(case[0].split("_")[0], {}).update(record(seed, *case))
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, arrays in files.items():
        path = GOLDEN / f"torch_{name}.npz"
        write(path, arrays, {"torch": torch.__version__, "lengths": LENGTHS})
        print(path.name, len(arrays), "arrays", path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
