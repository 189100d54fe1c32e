"""Language models of any library as one function, for `check_model`.

Shapes: T time, N batch, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jrnn.errors import LayerError
from jrnn.jaxprs.queries import along_first
from jrnn.testing.properties import need
from jrnn.testing.subjects import Outputs, PyTree

OfState = Callable[[Any], Any]
KINDS = ("state", "window", "attention")
TOKENS = (2, 8)  # N, T
# what transformers calls the state of a model
_CACHES = (
    "past_key_values",
    "cache_params",
    "state",
)
_TAPS = (
    "conv_kernel",
    "conv_kernel_size",
    "linear_conv_kernel_dim",
    "mamba_d_conv",
    "conv1d_width",
    "conv_L_cache",
)


@dataclass(frozen=True)
class AdaptedModel:
    """A language model as a function, with tokens to check it on.

    Attributes:
        call: `call(tokens, state, attention_mask=None, resets=None) -> (logits, state)`. Tokens are int32 [N, T], logits
            [N, T, V]. The state None is that before a text. attention_mask is int32 [N, T] and 0 at padding; resets are
            bool [N, T], and True where a new document begins.
        vocabulary: how many tokens there are, V.
        tokens: int32 [N, T], to check it on.
        step: `step(tokens, state)` for one token, [N, 1]; by default `call`.
        masks, resets: whether `call` takes them.
        resets_of_states: whether resets may be given with a state.
        ends: whether the state after padding on the right is that after the last token.
        remembers: which of "state" (recurrent), "window" (of convolutions) and "attention" the model has, at least one.
        reach: how many tokens the windows of all layers together look back.
        leaves: `leaves(state)` returns what later tokens can read of a state: arrays [N, ...] by name as `3.conv`, each with
            its kind as in `remembers`. Where documents leak, it shows in which layer.
        snapshot: returns a state that later calls do not change; needed where calls write into states.
        stored: writes a state to a file and returns what is read from it.
        reloaded: saves the model, and returns what is loaded as an `AdaptedModel`.
        over_devices: `over_devices(tokens) -> logits`, with the time axis divided among all devices of JAX.
    """

    call: Callable[..., Outputs]
    vocabulary: int
    tokens: Any = None
    step: Callable[[Any, Any], Outputs] | None = None
    masks: bool = False
    resets: bool = False
    resets_of_states: bool = True
    ends: bool = True
    remembers: tuple[str, ...] = KINDS
    reach: int = 12
    leaves: Callable[[Any], Mapping[str, tuple[str, Any]]] | None = None
    snapshot: OfState = lambda state: state
    stored: OfState | None = None
    reloaded: Callable[[], AdaptedModel] | None = None
    over_devices: OfState | None = None

    @property
    def size(self) -> tuple[int, int]:
        """T and N."""
        return self.tokens.shape[1], self.tokens.shape[0]


def language_model(model: Any, tokens: np.ndarray = None, **options: Any) -> AdaptedModel:
    """Returns a language model as an `AdaptedModel`.

    Args:
        model: a model of `jrnn.models`; a model as transformers has them, called with `input_ids` and, where it has them,
            `attention_mask`, `position_ids` and `past_key_values`; or an `AdaptedModel`.
        tokens: integers [N, T], to check it on; random ones if None. N is at least 2, and T at least 6.
        options: other fields of `AdaptedModel`.

    Raises:
        LayerError: for a model of an unknown kind, or tokens that do not fit.
    """
    if isinstance(model, AdaptedModel):
        adapted = model
    elif any(
        f"{t.__module__}.{t.__name__}" == "jrnn.models.model.LanguageModel"
        for t in type(model).__mro__
    ):
        adapted = _of_jrnn(model)
    elif callable(model) and "input_ids" in _parameters(model):
        adapted = _of_transformers(model)
    else:
        raise LayerError(
            f"check_model does not know models of type {type(model).__module__}.{type(model).__name__}; give an "
            "AdaptedModel, whose `call` is a function (tokens, state) -> (logits, state)"
        )
    unknown = []
    for n in options:
        if n not in AdaptedModel.__dataclass_fields__:
            unknown.append(n)
    if unknown:
        raise LayerError(
            f"AdaptedModel has no field {unknown[0]!r}; it has {', '.join(AdaptedModel.__dataclass_fields__)}"
        )
    adapted = replace(adapted, **options)
    tokens = adapted.tokens if tokens is None else tokens
    if tokens is None:
        tokens = np.random.default_rng(0).integers(adapted.vocabulary, size=TOKENS)
    tokens = np.asarray(tokens)
    if (
        tokens.ndim != 2
        or tokens.dtype.kind not in "iu"
        or tokens.shape[0] < 2
        or tokens.shape[1] < 6
    ):
        raise LayerError(
            f"tokens are {tokens.dtype}{list(tokens.shape)}; they must be integers [N, T], N at least 2, T at least 6"
        )
    if tokens.min() < 0 or tokens.max() >= adapted.vocabulary:
        raise LayerError(
            f"tokens lie between {tokens.min()} and {tokens.max()}; the vocabulary has 0 to "
            f"{adapted.vocabulary - 1}"
        )
    return replace(adapted, tokens=tokens.astype(np.int32))


# jrnn.models -----------------------------------------------------------------------------------------------------------

# The names of leaves in jrnn.models; others are recurrent states.
_OF_LEAVES = dict.fromkeys(("conv", "time", "channel"), "window")
_OF_LEAVES |= dict.fromkeys(("keys", "values", "index", "places"), "attention")


def _of_jrnn(model: Any) -> AdaptedModel:
    models = sys.modules["jrnn.models"]
    fresh = {name: leaf for name, leaf in model.initial_state(1, 1).items() if name != "position"}
    kinds = {name: _OF_LEAVES.get(name.rpartition(".")[2], "state") for name in fresh}

    def leaves(state: PyTree) -> dict[str, tuple[str, Any]]:
        leaves = {name: (kind, np.asarray(state[name])) for name, kind in kinds.items()}
        for name, (kind, leaf) in leaves.items():
            if kind == "attention":  # without the slots that nothing attends to
                live = np.asarray(state[f"{name.rpartition('.')[0]}.places"]) >= 0
                leaves[name] = kind, leaf * along_first(live, leaf)
        return leaves

    def call(
        tokens: np.ndarray, state: PyTree, attention_mask: Any = None, resets: Any = None
    ) -> Outputs:
        mask = None if attention_mask is None else attention_mask.astype(bool)
        if mask is not None and mask[:, 0].all():
            return model(tokens, state, lengths=mask.sum(axis=1), resets=resets)
        return model(tokens, state, mask=mask, resets=resets)

    def step(tokens: np.ndarray, state: PyTree) -> Outputs:
        logits, state = model.step(tokens[:, 0], state)
        return logits[:, None], state

    def stored(state: PyTree) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            models.save_state(path, state)
            return models.load_state(path)

    def reloaded() -> AdaptedModel:
        with tempfile.TemporaryDirectory() as folder:
            model.save(folder)
            return _of_jrnn(models.load(folder))

    def over_devices(tokens: np.ndarray) -> Any:
        # XLA decides how results are shared
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("time",))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        in_time = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "time"))
        state = model.initial_state(*tokens.shape)
        logits, _ = jax.device_put(model, whole)(
            jax.device_put(tokens, in_time), jax.device_put(state, whole)
        )
        return logits

    return AdaptedModel(
        call,
        model.vocabulary,
        step=step,
        masks=True,
        resets=True,
        remembers=tuple(kind for kind in KINDS if kind in kinds.values()),
        reach=sum(fresh[name].shape[1] for name, kind in kinds.items() if kind == "window"),
        leaves=leaves,
        stored=stored,
        reloaded=reloaded,
        over_devices=over_devices,
    )


# transformers ----------------------------------------------------------------------------------------------------------


@dataclass
class _Past:
    """The state of a model of transformers: its cache, and where all tokens so far were real [N, T]."""

    cache: Any
    mask: np.ndarray


def _parameters(model: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(getattr(model, "forward", model)).parameters
    except (TypeError, ValueError):
        return {}


def _of_transformers(model: Any) -> AdaptedModel:
    """As `generate` of transformers calls a model: positions are counted from the mask, and caches are written in place.

    Packed documents are given by positions that restart, from which transformers makes the attention mask, and by
    `seq_idx`, where the model takes it.
    """
    takes = _parameters(model)
    torch = sys.modules.get("torch")
    in_torch = torch is not None and isinstance(model, torch.nn.Module)
    name = next((n for n in _CACHES if n in takes), None)

    def run(**arrays: Any) -> Any:
        given = {}
        for n, v in arrays.items():
            if n in takes and v is not None:
                given[n] = v
        if not in_torch:
            return model(**given)
        with torch.no_grad():
            for n, v in given.items():
                given[n] = torch.tensor(v) if isinstance(v, np.ndarray) else v
            return model(**given)

    def call(
        tokens: np.ndarray, state: PyTree, attention_mask: Any = None, resets: Any = None
    ) -> Outputs:
        now = np.ones_like(tokens) if attention_mask is None else np.asarray(attention_mask)
        mask = now if state is None else np.concatenate([state.mask, now], axis=1)
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, -tokens.shape[1] :]
        documents = None
        if resets is not None:
            steps = np.arange(tokens.shape[1])[None]
            positions = steps - np.maximum.accumulate(np.where(resets, steps, 0), axis=1)
            documents = np.cumsum(resets, axis=1).astype(np.int32)
        given = {
            "input_ids": tokens.astype(np.int64),
            "position_ids": positions.astype(np.int64),
            "seq_idx": documents,
            "attention_mask": None if mask.all() else mask.astype(np.int64),
            "use_cache": resets is None,
        }
        if state is not None:
            need(state.cache is not None, "the model returns no cache")
            given[name] = state.cache
            if name != _CACHES[0]:  # without keys, the mask counts for the prompt alone
                given["attention_mask"] = None
        out = run(**given)
        cache = None
        if name is not None:
            caches = [getattr(out, n, None) for n in _CACHES]
            cache = next((c for c in caches if c is not None), None)
        logits = out.logits.float().numpy() if in_torch else np.asarray(out.logits)
        return logits, _Past(cache, mask)

    def reloaded() -> AdaptedModel:
        chosen = {}
        for n in ("attn_implementation", "experts_implementation"):
            chosen[n] = getattr(model.config, f"_{n}", None)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = type(model).from_pretrained(
                folder, **{n: v for n, v in chosen.items() if v is not None}
            )
            return _of_transformers(again.eval() if in_torch else again)

    taps = max(getattr(model.config, n, None) or 2 for n in _TAPS)
    return AdaptedModel(
        call,
        int(model.config.vocab_size),
        reach=(taps - 1) * getattr(model.config, "num_hidden_layers", 1),
        masks="attention_mask" in takes,
        resets=bool({"position_ids", "seq_idx"} & {*takes}),
        resets_of_states=False,
        ends=False,
        snapshot=copy.deepcopy,
        stored=lambda state: pickle.loads(pickle.dumps(state)),
        reloaded=reloaded if hasattr(model, "save_pretrained") else None,
    )
