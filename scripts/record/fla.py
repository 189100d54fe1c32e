"""Records what layers with matrix states compute, in float64, as golden data for tests/loops/test_fla_layers.py.

    git clone https://github.com/fla-org/flash-linear-attention FOLDER
    python scripts/record/fla.py --fla FOLDER     (torch and transformers, on a CPU; writes tests/golden/fla.npz)

The oracles are the naive recurrences of flash-linear-attention (`fla/ops/*/naive.py`), and mLSTM of `transformers`,
step by step. Each file is loaded alone, because the package needs a GPU. What the recurrences do in float32 is done in
float64. HGRN2 is gated linear attention with `k = 1 - f` and the decay f, as in its layer.

A name is `layer|array`: `out`, `state` (the last one, if the function returns it), and `grad_NAME`, the gradient of
`sum(out w) + sum(state w_state)` with respect to each input. Inputs and weights are shared: `input|NAME`.

Shapes: T time, B batch, H heads, K keys, V values; all arrays of steps are [T, B, H, ...], states are [B, H, K, V].
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn import functional

PATH = Path(__file__).parents[2] / "tests" / "golden" / "fla.npz"
T, B, H, K, V = 20, 2, 2, 4, 5
Inputs = dict[str, torch.Tensor]


class Double(ModuleType):
    """torch, where float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def load(folder: Path, path: str) -> ModuleType:
    """Loads one file of the repository, whose package imports triton."""
    spec = importlib.util.spec_from_file_location(
        path.replace("/", "_"), folder / "fla" / "ops" / f"{path}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.torch = Double("torch")  # type: ignore[attr-defined]
    return module


def inputs() -> Inputs:
    random = np.random.RandomState(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.tensor(random.standard_normal(shape))

    def of_steps(*shape: int) -> torch.Tensor:
        return normal(T, B, H, *shape)

    def unit(x: torch.Tensor) -> torch.Tensor:
        return functional.normalize(x, dim=-1)

    drawn = {name: of_steps(K) for name in "q"} | {
        name: unit(of_steps(K)) for name in ("k", "k2", "a", "p")
    }
    drawn |= {name: of_steps(V) for name in ("v", "v2")} | {name: of_steps() for name in ("i", "f")}
    drawn |= {
        "g": -functional.softplus(of_steps()),
        "gk": -functional.softplus(3 * of_steps(K)),
        "raw": of_steps(K),
    }
    drawn |= {name: 2 * torch.sigmoid(of_steps()) for name in ("b", "b2")} | {"u": normal(H, K)}
    return drawn | {
        "S": 0.5 * normal(B, H, K, V),
        "n": normal(B, H, K),
        "w": of_steps(V),
        "w_state": normal(B, H, K, V),
    }


def by_batch(x: torch.Tensor) -> torch.Tensor:
    """[T, B, H, ...] -> [B, T, H, ...], and back."""
    return x.transpose(0, 1)


def by_head(x: torch.Tensor) -> torch.Tensor:
    """[T, B, H, ...] -> [B, H, T, ...]."""
    return x.movedim(0, 2)


def from_head(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(2, 0)


def layers(
    folder: Path,
) -> dict[str, tuple[str, Callable[[Inputs], tuple[torch.Tensor, torch.Tensor | None]]]]:
    """Returns for each layer the names of its inputs, and a function of them that returns the outputs and the last state."""

    def batch_first(path: str, name: str, names: str, **given: Any) -> Any:
        def run(x: Inputs) -> Any:
            values = {parameter: by_batch(x[key]) for parameter, key in zip(*pairs(names))}
            out, state = getattr(load(folder, path), name)(
                **values, initial_state=x["S"], output_final_state=True, **given
            )
            return by_batch(out), state

        return inputs_of(names), run

    def heads_first(path: str, name: str, names: str) -> Any:
        def run(x: Inputs) -> Any:
            values = {p: by_head(x[key]) if p != "u" else x[key] for p, key in zip(*pairs(names))}
            out, state = getattr(load(folder, path), name)(
                **values, initial_state=x["S"], output_final_state=True
            )
            return from_head(out), state

        return inputs_of(names), run

    def retention(x: Inputs) -> Any:
        return from_head(
            load(folder, "retention/naive").naive_retention(*(by_head(x[n]) for n in "qkv"))
        ), None

    def hgrn2(x: Inputs) -> Any:
        f = torch.sigmoid(x["raw"])
        return batch_first("gla/naive", "naive_recurrent_gla", "q k v gk")[1](
            x | {"k": 1 - f, "gk": torch.log(f)}
        )

    def product(x: Inputs) -> Any:
        both = {n: by_batch(torch.stack([x[n], x[f"{n}2"]], 1).flatten(0, 1)) for n in "kvb"}
        run = load(folder, "gated_delta_product/naive").naive_recurrent_gated_delta_product
        q, g = by_batch(x["q"]), by_batch(x["g"])
        out, state = run(
            q, both["k"], both["v"], g, both["b"], None, None, x["S"], True, num_householder=2
        )
        return by_batch(out), state

    def mlstm(x: Inputs) -> Any:
        from transformers.models.xlstm import modeling_xlstm

        values = [by_head(x[n]) for n in ("q", "k", "v", "i", "f")]
        start = x["S"], x["n"], torch.zeros(B, H, 1)
        run = modeling_xlstm.mlstm_recurrent_sequence_native
        out, (state, *_) = run(*values, *start, return_last_states=True, dtype_state=torch.float64)
        return from_head(out), state

    return {
        "linear_attention": batch_first("linear_attn/naive", "naive_recurrent_linear_attn", "q k v"),
        "retention": ("q k v", retention),
        "simple_gla": batch_first("simple_gla/naive", "naive_recurrent_simple_gla", "q k v g"),
        "gla": batch_first("gla/naive", "naive_recurrent_gla", "q k v gk"),
        "hgrn2": ("q v raw S", hgrn2),
        "rwkv6": heads_first("rwkv6/recurrent_naive", "naive_recurrent_rwkv6", "q k v w=gk u"),
        "delta_rule": heads_first("delta_rule/naive", "delta_rule_recurrence", "q k v beta=b"),
        "gated_delta_rule": batch_first(
            "gated_delta_rule/naive", "naive_recurrent_gated_delta_rule", "q k v beta=b g"
        ),
        "gated_delta_product": ("q k v b k2 v2 b2 g S", product),
        "kda": batch_first("kda/naive", "naive_recurrent_kda", "q k v beta=b g=gk"),
        "comba": batch_first("comba/naive", "naive_recurrent_comba", "q k v p beta=b g"),
        "dplr": heads_first(
            "generalized_delta_rule/dplr/naive", "dplr_recurrence", "q k v alpha=a beta=p gk"
        ),
        "iplr": heads_first("generalized_delta_rule/iplr/naive", "iplr_recurrence", "q k v alpha=a beta=p"),
        "mlstm": ("q k v i f S n", mlstm),
    }  # fmt: skip


def pairs(names: str) -> tuple[list[str], list[str]]:
    """Returns the parameters and the inputs of "q k g=gk"."""
    words = [word.partition("=") for word in names.split()]
    return [p for p, _, _ in words], [key or p for p, _, key in words]


def inputs_of(names: str) -> str:
    return " ".join([*pairs(names)[1], "S"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Records the recurrences of flash-linear-attention."
    )
    parser.add_argument("--fla", type=Path, required=True, help="a clone of flash-linear-attention")
    folder = parser.parse_args().fla
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    sys.modules["einops"] = ModuleType("einops")  # of the chunkwise functions, which are not called
    sys.modules["einops"].rearrange = None  # type: ignore[attr-defined]
    shared = inputs()
    arrays = {f"input|{name}": x.numpy() for name, x in shared.items()}
    for name, (names, run) in layers(folder).items():
        x = {key: shared[key].clone().requires_grad_(True) for key in names.split()}
        out, state = run(dict(x))
        loss = (out * shared["w"]).sum() + (
            0 if state is None else (state * shared["w_state"]).sum()
        )
        grads = torch.autograd.grad(loss, list(x.values()))
        recorded = {"out": out} | ({} if state is None else {"state": state})
        recorded |= {f"grad_{key}": grad for key, grad in zip(x, grads)}
        assert all(v.dtype == torch.float64 for v in recorded.values()), name
        arrays |= {f"{name}|{key}": v.detach().numpy() for key, v in recorded.items()}
    commit = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    versions = " ".join(f"{p} {importlib.metadata.version(p)}" for p in ("torch", "transformers"))
    np.savez_compressed(
        PATH, versions=np.array(f"flash-linear-attention {commit} {versions}"), **arrays
    )
    print(PATH.name, len(arrays), "arrays", PATH.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
