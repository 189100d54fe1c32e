"""Compares the families of jrnn.models with transformers: exact errors, and models that are saved and read back.

    VENV/bin/pip install torch transformers safetensors jax flax optax
    PYTHONPATH=. VENV/bin/python scripts/compare_models.py [FOLDER ...]     (of tests/golden/models; by default, all)

The table has a row for each family, of its worst recording:

    logits, gradients    the greatest difference in float64, in which both are computed, relative to the greatest value
    jrnn, transformers   how far the gradients of each in float32 are from its own in float64
    reload               whether transformers, reading what jrnn saved, computes the same logits, bit by bit, as before, and
                         reports no missing or unexpected tensor; minimax's decays, which it makes anew, may be missing

transformers rounds to float32 in places: here, float32 is float64 in torch while it computes in float64. So it is in what is
made of the config (falcon_h1's multipliers, minimax's decays) and in a default argument (recurrent_gemma's scan). The
gradient of a tensor is compared with its greatest value, but at least a millionth of the greatest of all.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import record.glm5_next  # noqa: F401, which registers a class
import torch
import transformers
from safetensors.torch import load_file

from jrnn import models

jax.config.update("jax_enable_x64", True)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "models"
transformers.xLSTMPreTrainedModel._init_weights = lambda self, module: (
    None
)  # it fails for fused weights
RGLRU_SCAN = (
    transformers.models.recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRglru._rnn_scan
)  # keeps a type
DERIVED = (
    "slope_rate",
    "query_decay",
    "key_decay",
    "diagonal_decay",
)  # of minimax; they follow from the config
NO_GRADIENT = ("rwkv",)  # of which transformers computes none


@contextlib.contextmanager
def double():
    """torch, where float32 is float64."""
    kept = torch.float32, torch.float, torch.Tensor.float
    RGLRU_SCAN.__defaults__ = (torch.float64,)
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = kept
        RGLRU_SCAN.__defaults__ = (torch.float32,)
        torch.set_default_dtype(kept[0])


def attention(q, k, v, mask, scale=None):
    """jax.nn.dot_product_attention, whose softmax is of float32 whatever it is given, in the type of its inputs."""
    k, v = (jnp.repeat(part, q.shape[2] // k.shape[2], axis=2) for part in (k, v))
    products = jnp.einsum("ntqc,nsqc->nqts", q, k) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    return jnp.einsum(
        "nqts,nsqc->ntqc", jax.nn.softmax(jnp.where(mask, products, -1e30), axis=-1), v
    )


jax.nn.dot_product_attention = attention


def read(folder):
    """The model of transformers, and what it reports while reading."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    model.config._experts_implementation = "eager"
    return model.eval(), {name: names for name, names in report.items() if names}


def theirs(folder, tokens, dtype, with_gradient):
    """Logits, and gradients by name in the files: a model with gradients as parameters is saved."""
    model, _ = read(folder)
    with double() if dtype == "float64" else contextlib.nullcontext():
        if (
            dtype == "float64"
        ):  # made anew, so that what follows from the config, such as rates of positions, is exact
            exact = transformers.AutoModelForCausalLM.from_config(
                model.config, dtype=torch.float64
            ).eval()
            kept = {
                name: value
                for name, value in model.state_dict().items()
                if not name.endswith(DERIVED)
            }
            exact.load_state_dict(kept, strict=False)
            model = exact
        if not with_gradient:
            with torch.no_grad():
                return model(tokens, use_cache=False).logits.numpy(), {}
        out = model(tokens, labels=tokens, use_cache=False)
        out.loss.backward()
        with torch.no_grad(), tempfile.TemporaryDirectory() as saved:
            for parameter in model.parameters():
                parameter.copy_(
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )
            model.save_pretrained(saved)
            return out.logits.detach().numpy(), {
                n: g.numpy() for n, g in load_file(f"{saved}/model.safetensors").items()
            }


def ours(folder, tokens, dtype, with_gradient):
    """The same of jrnn, with gradients by parameter."""
    model = jax.tree.map(lambda p: p.astype(dtype), models.load(folder))
    tokens = jnp.asarray(tokens.numpy())
    if not with_gradient:
        return np.asarray(model(tokens)[0]), {}

    def loss(model):
        logits = model(tokens)[0]
        chances = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(chances, tokens[:, 1:, None], axis=-1).mean(), logits

    gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(model)
    return np.asarray(logits), {name: np.asarray(g) for name, g in gradient.params.items()}


def by_parameter(model, gradients):
    """Gradients of tensors as those of the parameters that jrnn makes of them."""
    tensors = {}
    for name, merge in model.decoder.parameters().items():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            continue
        parts = [gradients[part] for part in (merge.names if merge else (name,))]
        tensors[name] = (
            parts[0]
            if merge is None
            else np.stack(parts)
            if merge.stacks
            else np.concatenate(parts)
        )
    return tensors


def difference(actual, wanted):
    """The greatest of all tensors, and whose it is."""
    least = 1e-6 * max(abs(value).max() for value in wanted.values())
    errors = {
        name: abs(actual[name] - value).max() / max(abs(value).max(), least)
        for name, value in wanted.items()
    }
    worst = max(errors, key=errors.get)
    return errors[worst], worst


def compare(folder):
    model = models.load(folder)
    tokens = load_file(folder / "oracle.safetensors")["tokens"]
    with_gradient = model.family.name not in NO_GRADIENT
    results = {}
    for dtype in ("float64", "float32"):
        (y, g), (wanted, gradients) = (
            f(folder, tokens, dtype, with_gradient) for f in (ours, theirs)
        )
        results[dtype] = y, wanted, g, by_parameter(model, gradients) if gradients else {}
    y, wanted, exact, expected = results["float64"]
    actual = {"logits": abs(y - wanted).max() / abs(wanted).max()}
    if with_gradient:
        actual["gradients"], name = difference(exact, expected)
        actual["jrnn"], _ = difference(results["float32"][2], {n: exact[n] for n in expected})
        actual["transformers"], _ = difference(results["float32"][3], expected)
        print(f"{folder.name}: {actual}, worst {name}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as saved:
        model.save(saved)
        again, report = read(saved)
        missing = {
            name
            for name in report.pop("missing_keys", ())
            if not name.endswith(model.family.unused or (" ",))
        }
        with torch.no_grad():
            same = np.array_equal(
                again(tokens, use_cache=False).logits.numpy(), logits_of(folder, tokens)
            )
    actual["reload"] = (
        "equal" if same and not report and not missing else f"NOT EQUAL {missing} {report}"
    )
    return actual


def logits_of(folder, tokens):
    with torch.no_grad():
        return read(folder)[0](tokens, use_cache=False).logits.numpy()


def main():
    folders = [GOLDEN / name for name in sys.argv[1:]] or sorted(
        p for p in GOLDEN.iterdir() if p.is_dir()
    )
    rows = {}
    for folder in folders:
        if models.load(folder).family.name in transformers.CONFIG_MAPPING:
            rows.setdefault(folder.name.rpartition("_")[0], []).append(compare(folder))
    print("| | logits | gradients | jrnn in float32 | transformers in float32 | reload |")
    print("|---|---:|---:|---:|---:|---|")
    for name, results in rows.items():
        cells = [
            f"{max(row[key] for row in results):.1e}" if all(key in row for row in results) else ""
            for key in ("logits", "gradients", "jrnn", "transformers")
        ]
        print(
            f"| `{name}` | {' | '.join(cells)} | {', '.join(sorted({row['reload'] for row in results}))} |"
        )


if __name__ == "__main__":
    main()
