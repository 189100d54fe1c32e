"""The model of a run with its parameters, apart from training: called, stepped, sampled from, and exported.

Shapes: T time, N batch, D features, O outputs, V tokens known.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jrnn.convert import Package
from jrnn.errors import CheckpointError, ConfigError, DataError, LayerError
from jrnn.files import new_folder, write_whole
from jrnn.files.corpus.corpus import TOKENIZER
from jrnn.models import LanguageModel, generation, save_state
from jrnn.models.generation import check_tokens
from jrnn.nn.checks import Shape, check_array, check_features, check_flags, check_lengths
from jrnn.nn.sequences import in_rows
from jrnn.train.checkpoint import Checkpoints
from jrnn.train.exports import EXPORTS
from jrnn.train.metrics import best_first, read_validations
from jrnn.train.models.interface import CARRY_AXIS, Params
from jrnn.train.models.net import NetModel
from jrnn.train.models.pretrained import FILES, PretrainedModel
from jrnn.train.origin import Asked, Origin
from jrnn.train.run_dir import RunDir
from jrnn.train.step import Recipe, abstract_state
from jrnn.train.tasks.task import COMPANIONS, Trained, kept_value

State = dict[str, jax.Array]
Outputs = tuple[jax.Array, State]


@partial(jax.tree_util.register_dataclass, data_fields=["params"], meta_fields=["origin"])
@dataclass(frozen=True)
class TrainedModel:
    """The model of a run, as `load_run` returns it; a pytree whose leaves are its parameters.

    It is called with a whole batch, the batch axis first, and returns outputs and a state; `step` goes on from a state by
    one step. A state is a flat dict of arrays [N, ...]. Inputs and outputs have the units of the data: what the task scaled
    for training is scaled here too.

    Attributes:
        params: the parameters by their names in the run.
        origin: the run directory, its configuration, what the task kept of its data, and the model as it was trained.

    >>> import jrnn, tempfile
    >>> from rich.console import Console
    >>> small = ["model.hidden=4", "data.batch=2", "data.validation=2", "data.length=5"]
    >>> config = jrnn.train.load_config("adding", [*small, "train.steps=1", "train.steps_per_call=1"])
    >>> result = jrnn.train.train(config, tempfile.mkdtemp() + "/run", console=Console(quiet=True))
    >>> model = jrnn.load_run(result.run)
    >>> x = jnp.ones((3, 5, 2))  # N = 3 sequences of T = 5 steps
    >>> y, state = model(x)
    >>> state = model.initial_state(3)
    >>> for t in range(5):
    ...     last, state = model.step(x[:, t], state)
    >>> y.shape, bool(jnp.allclose(y, last, atol=1e-5))
    ((3, 1), True)
    """

    params: Params
    origin: Origin

    def __repr__(self) -> str:
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return f"TrainedModel({self.origin.path}, {count:,} parameters, {self.origin.config.model})"

    def __call__(
        self,
        inputs: Any,
        state: State | None = None,
        *,
        lengths: Any = None,
        resets: Any = None,
        mask: Any = None,
        dt: Any = None,
    ) -> Outputs:
        """Inputs [N, T, D] or tokens [N, T] -> outputs and the state after the last step.

        Args:
            inputs: features, or integers if the model reads tokens.
            state: the state after earlier steps; None: the initial one.
            lengths: [N], where the sequences end.
            resets: booleans [N, T], the steps before which the state restarts.
            mask: booleans [N, T], True where a step counts; for models of features.
            dt: numbers [N, T], the time since the last step that counts, over the spacing in training (1:
                that spacing); for models that were trained on the times of their rows.

        Returns:
            Outputs [N, T, O], or [N, O] of a model that has one output for a sequence; and the state, which is empty for a
            model without one, such as a bidirectional one.

        Raises:
            LayerError: if the arrays do not fit.
            ConfigError: if the model has no state, lengths, resets, mask or times, and one is given.
        """
        if (mask is not None or dt is not None) and self._reads_tokens:
            raise ConfigError(
                f"{self.name}: mask and dt are for models of features; this one reads tokens"
            )
        if self.language_model is not None:
            return self.language_model(inputs, state, lengths=lengths, resets=resets)
        inputs = self._checked(inputs, ("N", "T"))
        batch, steps = inputs.shape[:2]
        where = self.name
        given: dict[str, Any] = {}
        if lengths is not None:
            given["lengths"] = check_lengths(where, lengths, steps, batch)
        elif self.origin.signature.lengths:
            given["lengths"] = jnp.full(batch, steps, jnp.int32)
        for name, flags in (("resets", resets), ("mask", mask)):
            if flags is not None or getattr(self.origin.signature, name):
                flags = jnp.full((batch, steps), name == "mask") if flags is None else flags
                given[name] = check_flags(where, name, flags, (batch, steps)).T
        if dt is not None or self.origin.signature.dt:
            passed = jnp.ones((batch, steps)) if dt is None else check_array(where, "dt", dt)
            if passed.shape != (batch, steps):
                raise LayerError(
                    f"{where}: dt is {list(passed.shape)} but must be [{batch}, {steps}]"
                )
            given["dt"] = passed.T
        return self._run(inputs, state, given)

    def step(self, x: Any, state: State | None = None, *, mask: Any = None) -> Outputs:
        """One step of each sequence, [N, D] or tokens [N] -> outputs [N, O] and the state.

        Of a model that has one output for a sequence, it is the output for the steps so far. `mask`, booleans [N]: which
        sequences have this step; the states of others stay, and their outputs are 0.

        Raises:
            ConfigError: if the model has no state to go on from.
        """
        if self.language_model is not None:
            return self.language_model.step(x, state, mask=mask)
        if not self.origin.carried:
            raise ConfigError(
                f"{self.name}: step: the model has no state to go on from, because it reads whole sequences; call it with "
                "all steps"
            )
        x = self._checked(x, ("N",))
        old = self.initial_state(len(x), history=True) if state is None else state
        y, state = self(x[:, None], old)
        y = y[:, 0] if self.origin.signature.every_step else y
        if mask is None:
            return y, state
        mask = check_flags(self.name, "mask", mask, x.shape[:1])
        return in_rows(mask, (y, state), (jnp.zeros_like(y), old))

    def initial_state(self, batch: int, room: int = 0, history: bool = False) -> State:
        """The state of `batch` sequences before their first step; `room`, `history`: as in `LanguageModel.initial_state`.

        Models of features, or without a state, have no history.
        """
        if self.language_model is not None:
            return self.language_model.initial_state(batch, room, history)
        if not self.origin.carried:
            return {}
        start = _batch_first(self.origin.variant(carried=True).initial_carry(batch))
        if history and self._reads_tokens and self.origin.signature.every_step:
            start |= generation.history(batch, self.vocabulary)
        return start

    @property
    def language_model(self) -> LanguageModel | None:
        """The `jrnn.models.LanguageModel` of a run of kind "pretrained", in the types of its files; else None."""
        model = self.origin.model
        if not isinstance(model, PretrainedModel):
            return None
        return model.language_model(self.params)

    def generate(self, tokens: Any, length: int, **options: Any) -> Outputs:
        """Writes `length` tokens after prompts [N, T]; as `LanguageModel.generate`, for a model that reads tokens.

        Raises:
            ConfigError: for a model of features. LayerError: if the arguments do not fit.
        """
        return generation.generate(self._writer("generate"), tokens, length, **options)

    def stream(self, tokens: Any, length: int, **options: Any) -> Iterator[Any]:
        """As `generate`, but an iterator of tokens [N], each as soon as it is known."""
        return generation.stream(self._writer("stream"), tokens, length, **options)

    def sample(self, seed: int = 0, **changes: Any) -> str:
        """Returns text that the model writes; what `jrnn sample` prints.

        Args:
            seed: the seed of the random draws.
            changes: values instead of the config's in table [sample] (for a language model: `length`, `temperature`,
                `prompt`); None keeps the value of the config.

        Raises:
            ConfigError: if the run's task writes nothing, or has no such key.
            DataError: if the prompt holds a character that the model does not know.
        """
        config = self.origin.config
        if config.kind.write is None:
            raise self._lacks("writes no text", "predict", config.kind.predict)
        known = [f.name for f in fields(config.sample)]
        given = {}
        for name, value in changes.items():
            if value is None:
                continue
            if name not in known:
                raise ConfigError(
                    f"{self.name}: task {config.task!r} has no sample.{name}; it has {', '.join(known)}"
                )
            given[name] = value
        config = replace(config, sample=replace(config.sample, **given))
        origin = self.origin
        trained = Trained(config, origin.kept, origin.model, self.params, self.generate)
        return config.kind.write(trained, seed)

    def _lacks(self, what: str, command: str, other: Any) -> ConfigError:
        """Returns the error for a model that does not write or predict: it names the command for what it does instead."""
        remedy = f"call jrnn.load_run({self.name!r})"
        if other is not None:
            remedy = f"use jrnn {command} {self.name}"
        return ConfigError(
            f"{self.name}: a model of task {self.origin.config.task!r} {what}; {remedy}"
        )

    def predict(self, path: str | Path | None = None) -> str:
        """Returns what the model predicts from a file of data, as CSV; what `jrnn predict` prints.

        Args:
            path: for the task forecast, a CSV file with the columns that the model reads: what follows its last rows is
                predicted; for classification, a .npz file with `inputs`. None: the file of the config.

        Raises:
            ConfigError: for a run of another task. DataError: if the file cannot be used.
        """
        config = self.origin.config
        if config.kind.predict is None:
            raise self._lacks("predicts no file", "sample", config.kind.write)
        trained = Trained(config, self.origin.kept, self.origin.model, self.params)
        return config.kind.predict(trained, path)

    def package(self) -> Package:
        """The net of a model of kind "cells" or "net" with its weights, as Caffe2 takes them.

        Its inputs are the model's inputs and, if the state is carried, the initial states. Its outputs are the logits or
        values of a model of cells, or the outputs of the net on disk that was trained further; and the last states.

        Raises:
            ConfigError: for a model of another kind.
        """
        if not isinstance(self.origin.model, NetModel):
            kind = self.origin.config.model.kind
            raise ConfigError(
                f'{self.name}: a model of kind "{kind}" is not a net; write it for ONNX or JAX (a name that ends in '
                ".onnx or .jax), or convert it for inputs of one size: jrnn.from_jax(jrnn.load_run(RUN), example)"
            )
        return self.origin.model.package(jax.device_get(self.params))

    def save(self, folder: str | Path) -> None:
        """Writes `package`, or the folder of a pretrained model with the tokenizer of its corpus, in one step.

        Of a pretrained model it has generation_config.json too and, if the corpus was made with the model's tokenizer, that
        tokenizer's other files, such as its chat template.

        Raises:
            ConfigError: for a model of another kind, or a folder that cannot be written.
        """
        saved = self.language_model or self.package()
        with new_folder(folder, ConfigError, replaces=saved.FILES) as new:
            saved.save(new)
            if isinstance(saved, LanguageModel):
                texts = dict(self.origin.kept.get(COMPANIONS, {}))
                texts[TOKENIZER] = kept_value(self.origin.kept, "tokenizer", str)
                for name, text in texts.items():
                    if name in (TOKENIZER, *FILES):
                        write_whole(new / name, text.encode(), ConfigError)

    def save_first_state(self, path: str | Path) -> None:
        """Writes a first state for `LanguageModel.with_first_state`; raises ConfigError if `model.tune` is not "state"."""
        model = self.language_model
        if model is None or not model.first:
            raise ConfigError(
                f'{path}: a file of states is written of a pretrained model with model.tune = "state"; '
                f"{self.name} has none"
            )
        save_state(path, model.first)

    def export(
        self,
        path: str | Path,
        *,
        step: bool = False,
        batch: int | None = None,
        time: int | None = None,
    ) -> None:
        """Writes a file that other programs run without jrnn, and compares what it computes.

        Args:
            path: ends in ".onnx", for onnxruntime, which needs the extra `onnx`; or in ".jax", for `jax.export.deserialize`.
            step: write `(x, state) -> (y, state)` for one step, instead of `inputs -> outputs` for whole sequences.
            batch, time: sizes of the inputs; None leaves them open. Of a step that remembers all tokens, `time` is how many.

        Raises:
            ConfigError: for another ending, `step` of a model without a state, or an open time of a net or of such a step.
            ConversionError: if the model has an operation that ONNX lacks.

        >>> model.export("model.onnx")  # doctest: +SKIP
        """
        path = Path(path)
        if path.suffix not in EXPORTS:
            raise ConfigError(
                f"{path}: must end in {' or '.join(EXPORTS)}, which says what is written"
            )
        write = EXPORTS[path.suffix]
        if isinstance(self.origin.model, NetModel) and not step and time is None:
            raise ConfigError(f"{self.name}: a net is exported for one number of steps: give time=")
        kind, features = self._input
        n = batch or 2
        t = time or 3
        if step:
            state = self.initial_state(n, t)
            if not state:
                self.step(jnp.zeros((n, *features), kind))  # says why there is none
            if time is None and _shapes(self.initial_state(n, t + 1)) != _shapes(state):
                raise ConfigError(
                    f"{self.name}: the state remembers all tokens: give time=, how many it has room for"
                )
            names = f"{batch or 'batch'}, ..."
            write(self.step, (jnp.zeros((n, *features), kind), state), names, path)
            return
        names = f"{batch or 'batch'}, {time or 'time'}, ..."

        # The argument has its name in the file.
        def of_tokens(tokens: Any) -> Any:
            return self(tokens)[0]

        def of_inputs(inputs: Any) -> Any:
            return self(inputs)[0]

        outputs = of_tokens if self._reads_tokens else of_inputs
        write(outputs, (jnp.zeros((n, t, *features), kind),), names, path)

    @property
    def _input(self) -> tuple[Any, Shape]:
        """The type of the inputs, and their axes after N and T."""
        if self._reads_tokens:
            return jnp.int32, ()
        return jnp.float32, (self.origin.signature.inputs,)

    @property
    def _reads_tokens(self) -> bool:
        return self.origin.signature.tokens

    @property
    def name(self) -> str:
        """The run directory, with which messages begin."""
        return str(self.origin.path)

    def with_room(self, state: State | None, batch: int, steps: int) -> State:
        """The state, or the initial one for None; for `generate`."""
        return self.initial_state(batch, history=True) if state is None else state

    def _writer(self, what: str) -> Any:
        if not self._reads_tokens:
            raise ConfigError(
                f"{self.name}: {what} is for models that read tokens; call this one, or its `step`"
            )
        return self.language_model or self

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.origin.signature.inputs

    @property
    def takes_lengths(self) -> bool:
        """Whether a call takes `lengths`."""
        return self.origin.takes_lengths

    def _checked(self, x: Any, axes: tuple[str, ...]) -> jax.Array:
        where = self.name
        signature = self.origin.signature
        if signature.tokens:
            return check_tokens(where, x, axes, signature.inputs)
        x = check_array(where, "x", x)
        axes = (*axes, str(signature.inputs))
        check_features(where, x, signature.inputs, {len(axes): f"[{', '.join(axes)}]"})
        return x.astype(jnp.result_type(x.dtype, jnp.float32))

    def _run(self, inputs: jax.Array, state: State | None, given: Mapping[str, Any]) -> Outputs:
        origin = self.origin
        model = origin.variant(carried=origin.carried, **dict.fromkeys(given, True))
        start = self.initial_state(inputs.shape[0], history=not state)
        state, past = generation.apart(state or start)
        start, _ = generation.apart(start)
        shapes = _shapes(state)
        wanted = _shapes(start)
        if shapes != wanted:
            raise LayerError(
                f"{self.name}: the state has {shapes}, but must have {wanted}, as initial_state has"
            )
        carry = {}
        for name, leaf in state.items():
            carry[name] = jnp.moveaxis(jnp.asarray(leaf), 0, CARRY_AXIS)
        if origin.signature.tokens:
            asked = Asked(tokens=jnp.swapaxes(inputs, 0, 1), **given)
        else:
            asked = Asked(inputs=jnp.swapaxes(origin.units[0](inputs), 0, 1), **given)
        y, carry = model.predict(self.params, carry, asked)
        y = jnp.swapaxes(y, 0, 1) if origin.signature.every_step else y
        state = _batch_first(carry)
        if past:
            resets = given["resets"].T if "resets" in given else None
            state |= generation.remembered(past, inputs, y, given.get("lengths"), resets)
        return origin.units[1](y), state


def _shapes(state: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: jnp.shape(leaf) for name, leaf in state.items()}


def _batch_first(carry: Mapping[str, Any]) -> State:
    return {name: jnp.moveaxis(leaf, CARRY_AXIS, 0) for name, leaf in carry.items()}


def load_run(folder: str | Path) -> TrainedModel:
    """Returns the model that a run trained, with the parameters of its best validation if it keeps them, else the newest.

    It needs the run directory alone: neither the data nor, of a pretrained model, its folder. A configuration that names a
    Python file runs its code.

    Args:
        folder: a run directory, as `jrnn train --out` or `jrnn.train.train` wrote it.

    Raises:
        CheckpointError: if there is no run, no checkpoint, or none that loads.
    """
    run = RunDir(folder)
    config = run.load_config()
    kept = run.load_fingerprint()
    model = config.kind.model(config, kept)
    state = abstract_state(model, Recipe.of(config, {}))
    if config.train.patience and run.best.is_dir():
        params, notes = _best_params(run, state)
    else:
        params, notes = None, []
    if params is None:
        if not run.has_checkpoint():
            raise CheckpointError(
                f"{run.path}: has no checkpoint, so there are no weights yet: the first is written at step "
                f"{min(config.train.checkpoint_every, config.train.steps)}; continue it with: jrnn train {run.path} --resume"
            )
        with Checkpoints(run.checkpoints, read_only=True) as checkpoints:
            state, more = checkpoints.restore(state)
        params = state.evaluation_params
        notes = notes + more
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return TrainedModel(jax.tree.map(jnp.asarray, params), Origin(run.path, config, kept, model))


def _best_params(run: RunDir, like: Any) -> tuple[Any, list[str]]:
    """Returns the parameters of the best validation in metrics.jsonl that are there and load; and what was left out.

    They are among the best ones or, if those are damaged, in a checkpoint of that step. Steps without a validation come
    last: a process that is killed may leave parameters before it measured them. None if the run was stopped before its
    first validation.
    """
    try:
        losses = read_validations(run.metrics)
    except DataError:
        losses = {}
    notes = []
    with ExitStack() as files:
        best = files.enter_context(Checkpoints(run.best, read_only=True))
        steps = set(best.steps())
        whole = None
        if run.has_checkpoint():
            whole = files.enter_context(Checkpoints(run.checkpoints, read_only=True))
            steps |= losses.keys() & set(whole.steps())
        for step in best_first(steps, losses):
            try:
                if step in best.steps():
                    return best.load(step, like.evaluation_params), notes
            except CheckpointError as e:
                notes.append(f"{e}; the next best parameters of the run are used")
            try:
                if whole is not None and step in losses and whole.is_whole(step):
                    return whole.load(step, like).evaluation_params, notes
            except CheckpointError as e:
                notes.append(f"{e}; the next best parameters of the run are used")
    return None, notes
