"""Classification of whole sequences: handwritten digits read pixel by pixel, or arrays from a file.

Shapes: N examples, T steps, D features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from jrnn.errors import DataError, needs_extra
from jrnn.files.tensors import load_npz
from jrnn.train.models import FEATURE_MODELS, Model, Params, Signature, build_model
from jrnn.train.tasks.task import (
    Examples,
    HeldOutTask,
    Kept,
    Metrics,
    Scaling,
    Shuffled,
    TaskKind,
    Trained,
    Units,
    checksum,
    in_batches,
    kept_value,
    predictor,
    split,
)
from jrnn.train.toml_codec import NonNegative, Positive, check_bounds, imply_file, require

_MOST_CLASSES = 1 << 24  # a greater number is a mistake, and would need gigabytes of weights


@dataclass(frozen=True)
class ClassificationData:
    """Sequences with a class each: scikit-learn's 8 x 8 digits as 64 steps of one pixel, or a .npz file.

    The file holds `inputs` [N, T, D] or [N, T], `targets` [N], integers from 0, and, if the sequences differ in length,
    `lengths` [N]. Inputs after the length of a sequence are never read.
    """

    source: Literal["digits", "file"] = "digits"
    # the file, relative to the working directory; it implies source = "file"
    path: str | None = None
    validation: float = 0.2  # the share of the examples that is never trained on, drawn by the seed
    batch: Positive = 64  # examples in a step
    noise: NonNegative = 0.0  # standard deviation of noise on the training inputs, which are scaled to a deviation of 1

    def __post_init__(self):
        check_bounds("data", self)
        require(
            0 < self.validation < 1, "data.validation must lie between 0 and 1", self.validation
        )
        imply_file(self, "a .npz file")


def read_examples(data: ClassificationData) -> Examples:
    """Returns the examples that a configuration asks for, all in one batch.

    Raises:
        DataError: for a file that is missing or holds the wrong arrays, or without scikit-learn.
    """
    if data.source == "digits":
        try:
            from sklearn.datasets import load_digits  # optional: the extra `data`
        except ImportError:
            raise DataError(needs_extra("data.source = 'digits'", "data")) from None
        digits = load_digits()
        return Examples(digits.data.T[..., None].astype(np.float32), digits.target.astype(np.int32))
    assert data.path is not None
    arrays = load_npz(data.path, DataError)
    try:
        return _examples(arrays)
    except DataError as e:
        raise e.at(data.path) from None


def _examples(arrays: Mapping[str, np.ndarray]) -> Examples:
    for name in ("inputs", "targets"):
        if name not in arrays:
            raise DataError(f"lacks the array {name!r}; it holds {', '.join(arrays) or 'none'}")
    inputs = arrays["inputs"]
    targets = arrays["targets"]
    lengths = arrays.get("lengths")
    if inputs.ndim not in (2, 3) or inputs.dtype.kind not in "fiub":
        raise DataError(
            f"'inputs' is {inputs.dtype}{list(inputs.shape)}; it must be numbers [N, T, D] or [N, T]"
        )
    if (
        targets.shape != inputs.shape[:1]
        or targets.dtype.kind not in "iu"
        or (targets.size and targets.min() < 0)
    ):
        raise DataError(
            f"'targets' is {targets.dtype}{list(targets.shape)}; it must be integers >= 0, [{len(inputs)}]"
        )
    if targets.size and targets.max() > _MOST_CLASSES:
        at = int(targets.argmax())
        raise DataError(
            f"'targets'[{at}] is {targets[at]}; classes are numbered from 0, at most {_MOST_CLASSES}"
        )
    if lengths is not None:
        steps = inputs.shape[1]
        within = lengths.dtype.kind in "iu" and bool(((lengths >= 1) & (lengths <= steps)).all())
        if lengths.shape != targets.shape or not within:
            raise DataError(f"'lengths' must be integers from 1 to {steps}, [{len(inputs)}]")
        lengths = lengths.astype(np.int32)
    by_step = np.moveaxis(inputs[..., None] if inputs.ndim == 2 else inputs, 0, 1)
    with np.errstate(over="ignore"):
        examples = Examples(by_step.astype(np.float32), targets.astype(np.int32), lengths=lengths)
    bad = ~np.isfinite(examples.inputs)
    if lengths is not None:
        bad &= (np.arange(len(by_step))[:, None] < lengths)[..., None]
    if bad.any():
        step, example, feature = np.argwhere(bad)[0].tolist()
        raise DataError(
            f"'inputs' of example {example} is {by_step[step, example, feature]} at step {step}, feature {feature}; it must "
            "be finite in float32"
        )
    return examples


@dataclass(frozen=True)
class ClassificationTask(HeldOutTask):
    """Examples, scaled, with a class each; see `Task`."""

    unit: ClassVar[str] = "nats"

    @classmethod
    def load(cls, config: Any) -> ClassificationTask:
        examples = read_examples(config.data)
        train, held_out = split(examples, config.data.validation, config.seed)
        scaling = Scaling.fit(_valid_steps(train))
        kept = {
            "features": examples.inputs.shape[2],
            "classes": int(examples.targets.max()) + 1,
            "lengths": examples.lengths is not None,
            "mean": scaling.mean,
            "deviation": scaling.deviation,
            "sha256": checksum(examples.inputs, examples.targets, examples.lengths),
        }
        train = train._replace(inputs=scaling.apply(train.inputs))
        held_out = held_out._replace(inputs=scaling.apply(held_out.inputs))
        batches = Shuffled.of(train, config.data.batch, config.seed, config.data.noise)
        return cls(batches, held_out, kept, _model(config, kept))

    def evaluate(self, params: Params, loss: float) -> Metrics:
        """Returns `accuracy`, the share of held-out examples whose class is predicted as the most probable."""
        classes = self.predicted(params).argmax(axis=-1)
        return {"accuracy": float(np.mean(classes == self.held_out.targets))}


def _valid_steps(examples: Examples) -> np.ndarray:
    """Returns the inputs of all valid steps, [.., D]."""
    if examples.lengths is None:
        return examples.inputs.reshape(-1, examples.inputs.shape[2])
    return examples.inputs[np.arange(len(examples.inputs))[:, None] < examples.lengths]


def _model(config: Any, kept: Kept) -> Model:
    signature = Signature(
        tokens=False,
        inputs=kept_value(kept, "features", int),
        outputs=kept_value(kept, "classes", int),
        lengths=kept_value(kept, "lengths", bool),
    )
    return build_model(config, signature)


def _predict(trained: Trained, path: str | Path | None) -> str:
    """Returns the most probable class of each example of a file, and its probability, as CSV."""
    kept = trained.fingerprint
    data = trained.config.data
    if path is None:
        examples = read_examples(data)
    else:
        arrays = load_npz(path, DataError)
        unknown = np.zeros(len(arrays.get("inputs", ())), np.int32)
        try:
            examples = _examples({"targets": unknown, **arrays})
        except DataError as e:
            raise e.at(path) from None
    features = kept_value(kept, "features", int)
    with_lengths = kept_value(kept, "lengths", bool)
    if examples.inputs.shape[2] != features or (examples.lengths is not None) != with_lengths:
        here = f"{examples.inputs.shape[2]} features and {'no ' if examples.lengths is None else ''}lengths"
        there = f"{features} features and {'' if with_lengths else 'no '}lengths"
        raise DataError(f"{path}: has {here}; the model was trained with {there}")
    scale, _ = _units(trained.config, kept)
    scaled = examples._replace(inputs=np.asarray(scale(examples.inputs)))
    logits = predictor(trained.model)(trained.params, in_batches(scaled, data.batch))
    shares = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    text = "example,class,probability\n"
    for k, share in enumerate(shares):
        text += f"{k},{share.argmax()},{share.max():.6g}\n"
    return text


def _units(config: Any, kept: Kept) -> Units:
    """Inputs in the file's units -> the model's; the logits have none."""
    mean = kept_value(kept, "mean", list[float])
    deviation = kept_value(kept, "deviation", list[float])
    return Scaling(mean, deviation).scaled, lambda logits: logits


CLASSIFICATION = TaskKind(
    "classification",
    ClassificationData,
    FEATURE_MODELS,
    ClassificationTask.load,
    _model,
    predict=_predict,
    units=_units,
)
