"""`check_model`: a correct model has every property, and each planted fault is found under its name alone."""

from __future__ import annotations

import tempfile
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

import jrnn
from jrnn.errors import LayerError
from jrnn.testing import AdaptedModel, check_model, language_model, model_tests
from jrnn.testing.model_properties import MODEL_PROPERTIES

HERE = Path(__file__).parent
SOURCE = (HERE / "hybrid_model.py").read_text(encoding="utf-8")
FAULTS = tomllib.loads((HERE / "planted_faults.toml").read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def two_devices(monkeypatch):
    """The numpy model divides time without them."""
    monkeypatch.setattr(jax, "device_count", lambda: 2)


def module(line="", wrong=""):
    """The names of hybrid_model.py, with one part of a line replaced."""
    assert not line or SOURCE.count(line) == 1, f"there are {SOURCE.count(line)} of {line!r}"
    names = {"__name__": "hybrid_model"}
    exec(compile(SOURCE.replace(line, wrong) if line else SOURCE, "hybrid_model.py", "exec"), names)
    return names


def adapted(names):
    model = names["Hybrid"]()

    def reloaded():
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            return AdaptedModel(model.from_pretrained(folder).call, names["V"])

    hooks = {
        "leaves": model.leaves,
        "stored": model.stored,
        "over_devices": model.over_devices,
        "reloaded": reloaded,
    }
    return AdaptedModel(
        model.call, names["V"], masks=True, resets=True, reach=names["K"] - 1, **hooks
    )


def test_a_correct_model_has_every_property():
    report = check_model(adapted(module()))
    assert not report.findings and not report.skipped, report
    assert report.holds == tuple(MODEL_PROPERTIES) and len(report.holds) == 15


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    report = check_model(adapted(module(FAULTS[fault]["line"], FAULTS[fault]["wrong"])))
    assert [finding.property for finding in report.findings] == [FAULTS[fault]["property"]], report
    assert not report.findings[0].counterexample.startswith("raises"), report


def test_every_property_has_a_planted_fault():
    assert {fault["property"] for fault in FAULTS.values()} == set(MODEL_PROPERTIES)


# Other models ------------------------------------------------------------------------------------------------------------


def test_models_of_transformers():
    """As far as a cache that is written in place, positions and masks go; the numpy model is called as they are."""
    model = module()["AsTransformers"]()
    report = check_model(model)
    assert not report.findings, report
    assert report.skipped == {
        "devices": "no way to divide time among devices was given (`over_devices`)"
    }
    report = check_model(model, only=["rollback"], snapshot=lambda state: state)
    assert report.findings[0].counterexample.startswith(
        "after 2 tokens were taken back, logits[0, 0, 0] is "
    )


def test_a_leak_that_hides_others():
    fault = FAULTS["a recurrent state that is carried into the next document"]
    model = module(fault["line"], fault["wrong"])["AsTransformers"]()
    report = check_model(model, only=["packed state", "packed window", "packed attention"])
    assert [finding.property for finding in report.findings] == ["packed state"]
    assert report.skipped == dict.fromkeys(
        ["packed window", "packed attention"], "what packed state found hides it"
    )
    report = check_model(
        model, only=["packed state", "packed attention"], remembers=("window", "attention")
    )
    assert [finding.property for finding in report.findings] == ["packed attention"]
    assert report.skipped == {"packed state": "the model has no recurrent state"}


SMALL = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1}
CONFIGS = {
    "mamba": SMALL | {"state_size": 2},
    "lfm2": SMALL | {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8,
                     "layer_types": ["conv", "full_attention"]},
}  # fmt: skip


def small(family):
    return jrnn.models.create({"model_type": family} | CONFIGS[family], jax.random.key(0))


FEW = ["packed window", "left padding", "decoding", "resume", "save and load"]


@pytest.mark.usefixtures("little_optimization")
@pytest.mark.parametrize(
    ("family", "properties"), [("mamba", ["packed state", *FEW]), ("lfm2", ["packed attention"])]
)
def test_models_of_jrnn(family, properties):
    report = check_model(small(family), only=properties)
    assert report.holds == tuple(properties), report


def model():
    return module()["AsTransformers"]()


test_one_test_for_each_property = model_tests(
    model, skip=set(MODEL_PROPERTIES) - {"causality", "batch"}
)


def test_mistakes():
    with pytest.raises(LayerError, match=r"no property 'padding'; did you mean 'left padding' or "):
        check_model(model(), only=["padding"])
    with pytest.raises(LayerError, match="no property 'batchs'; did you mean 'batch'"):
        model_tests(model, skip=["batchs"])
    with pytest.raises(
        LayerError, match=r"tokens are float64\[8\]; they must be integers \[N, T\], N at least 2"
    ):
        check_model(model(), np.ones(8))
    with pytest.raises(LayerError, match="tokens lie between 0 and 11; the vocabulary has 0 to 10"):
        check_model(model(), np.arange(12).reshape(2, 6))
    with pytest.raises(
        LayerError, match="AdaptedModel has no field 'mask'; it has call, vocabulary, "
    ):
        check_model(model(), mask=True)
    with pytest.raises(
        LayerError, match="does not know models of type builtins.str; give an AdaptedModel"
    ):
        check_model("mamba")
    wrong = AdaptedModel(lambda tokens, state: (np.zeros((2, 3)), state), 5)
    (finding,) = check_model(wrong, only=["causality"]).findings
    assert finding.counterexample.startswith(
        "raises LayerError: logits are [2, 3] for tokens [2, 8]"
    )
    assert language_model(model()).size == (8, 2)
