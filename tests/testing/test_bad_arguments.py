"""Arguments that cannot be meant end in an error of jrnn that names them, not in one of a library."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jrnn
from jrnn.convert.named import load_named
from jrnn.errors import ConfigError, ConversionError, DataError, LayerError, NetError
from jrnn.interop import load_state_dict
from jrnn.train import Examples, load_config
from jrnn.train.metrics import own
from jrnn.train.tasks.task import check_task

NET = jrnn.Net("n", (jrnn.nets.Op.of("Relu", ["w"], ["y"]),), ("w",))


class Tensor:
    """A tensor of torch that has no data: on the device meta, sparse or quantized."""

    dtype = np.float32

    def detach(self):
        return self

    def cpu(self):
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")


@pytest.mark.parametrize(
    "call, error, rule",
    [
        (lambda: jrnn.run_net(NET, {"w": None}), NetError, "'w' is None"),
        (lambda: jrnn.run_net(NET, [1]), NetError, "the blobs are a list"),
        (lambda: load_state_dict([1]), ConversionError, "not a list"),
        (
            lambda: load_state_dict({"w": Tensor()}),
            ConversionError,
            "w is not an ordinary tensor: Cannot copy out of meta",
        ),
        (
            lambda: load_state_dict("none.safetensors"),
            ConversionError,
            "none.safetensors: no such file$",
        ),
        (
            lambda: jrnn.from_jax(lambda x: "a", jnp.ones(2)),
            ConversionError,
            "cannot be traced: TypeError",
        ),
        (
            lambda: jrnn.from_jax(lambda x: jax.lax.psum(x, "i"), jnp.ones(2)),
            ConversionError,
            "NameError.*unbound axis",
        ),
        (
            lambda: jrnn.from_jax(lambda x: x, np.array([{}])),
            ConversionError,
            "'x' is an array of object",
        ),
        (
            lambda: jrnn.nn.LSTM(3, 4, bidirectional="no", rngs=nnx.Rngs(0)),
            LayerError,
            "bidirectional is 'no'; it must be True",
        ),
        (
            lambda: jrnn.nn.LSTM(3, 4, batch_first=1, rngs=nnx.Rngs(0)),
            LayerError,
            "batch_first is 1",
        ),
    ],
)
def test_the_argument_is_named(call, error, rule):
    with pytest.raises(error, match=rule):
        call()


def test_a_config_with_a_near_name(tmp_path):
    (tmp_path / "ts.toml").write_text("")
    with pytest.raises(ConfigError, match=r"ts\.tml: no such file; did you mean 'ts\.toml'\?"):
        load_config(tmp_path / "ts.tml")


def task(**changes):
    batch = Examples(np.zeros((3, 2, 1), np.float32), np.array([0, 1]))
    parts = {
        "model": SimpleNamespace(signature=SimpleNamespace(loss="cross_entropy", outputs=2)),
        "train": SimpleNamespace(at=lambda step: batch),
        "axes": {"inputs": 1, "targets": 0},
        "items": 2, "item": "examples", "unit": "nats", "validation": list, "evaluate": dict, "fingerprint": dict,
    }  # fmt: skip
    if "batch" in changes:
        given = changes.pop("batch")(batch)
        changes["train"] = SimpleNamespace(at=lambda step: given)
    return SimpleNamespace(
        **{name: part for name, part in (parts | changes).items() if part is not None}
    )


@pytest.mark.parametrize(
    "changes, rule",
    [
        ({"evaluate": None, "unit": None}, "lacks unit, evaluate"),
        (
            {"axes": {"inputs": 0, "targets": 0}},
            r"inputs of the first batch is \[3, 2, 1\]; axis 0",
        ),
        ({"batch": lambda b: replace_targets(b, np.array([0.0, 1.0]))}, "targets are float64"),
        (
            {"batch": lambda b: replace_targets(b, np.array([0, 2]))},
            "targets hold 0 to 2; .* below signature.outputs = 2",
        ),
        (
            {"validation": lambda: [Examples(np.zeros((3, 1, 1)), np.array([-1]))]},
            "targets hold -1 to -1",
        ),
        (
            {"batch": lambda b: b._replace(inputs=b.inputs.astype(object))},
            "inputs are object; they must be numbers",
        ),
        (
            {"model": SimpleNamespace(signature=SimpleNamespace(loss="mse"))},
            "signature.loss is 'mse'; .* squared_error",
        ),
    ],
)
def test_an_own_task_is_checked_before_the_first_step(changes, rule):
    config = SimpleNamespace(task="own.py:TASK", data=SimpleNamespace(batch=2))
    check_task(config, task())
    with pytest.raises(DataError, match=rule):
        check_task(config, task(**changes))


@pytest.mark.parametrize(
    "metrics", [None, {1: 2.0}, {"a": "high"}, {"a": [1, 2]}, {"validation_loss": 1.0}, {"step": 1}]
)
def test_own_metrics_are_numbers_by_name(metrics):
    assert own({"a": np.ones(()), "b": 2}, "f") == {"a": 1.0, "b": 2.0}
    with pytest.raises(DataError, match="^f: .*(must|cannot)"):
        own(metrics, "f")


@pytest.mark.parametrize("code", ["def (", "raise SystemExit(0)"])
def test_a_module_that_is_no_python_or_ends_the_process(code, tmp_path):
    (tmp_path / "no_python.py").write_text(code)
    with pytest.raises(ConfigError, match=r"no_python\.py: cannot be loaded: .*Sy"):
        load_named(f"{tmp_path / 'no_python.py'}:x", ConfigError)


def replace_targets(batch, targets):
    return batch._replace(targets=targets)
