"""Checks while training: gradients that are compared, and the origin of numbers that are not finite."""

import re
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrnn import Net
from jrnn.cli.nets import subject_of_config
from jrnn.nets import Op
from jrnn.testing.gradients import Effort, check
from jrnn.train import load_config
from jrnn.train.disagreements import first_not_finite
from jrnn.train.models.cells import CellsConfig, cells_model
from jrnn.train.models.interface import Outcome, Signature
from jrnn.train.models.net import NetModel
from jrnn.train.step import State


@pytest.mark.exhaustive("nn-False")
@pytest.mark.parametrize("kind, exact", [("cells", True), ("nn", False)])
def test_a_model_is_checked_as_a_net_or_as_a_function(kind, exact, tmp_path, x64):
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog ran away\n" * 20)
    (tmp_path / "c.toml").write_text(
        f'[data]\npath = "{tmp_path}/text.txt"\nbatch = 1\nchunk = 2\n[model]\nkind = "{kind}"\nembedding = 1\nhidden = 1\n'
    )
    s = subject_of_config(load_config(tmp_path / "c.toml"))
    assert s.exact is exact and "embedding" in s.wrt and s.rows == 1
    report = check(s, Effort(1e-10 if exact else 1e-6, max_elements=2))
    assert report.agrees and report.loss == pytest.approx(
        3, abs=0.5
    )  # nats of one of 20 characters


class Batch(NamedTuple):
    inputs: np.ndarray
    fresh: np.ndarray = np.asarray(True)


NET = Net(
    "tiny",
    (
        Op.of("Mul", ["x", "w"], ["scaled"]),
        Op.of("Exp", ["scaled"], ["grown"]),
        Op.of("Sqrt", ["x"], ["root"]),
        Op.of("Add", ["grown", "root"], ["both"]),
        Op.of("AveragedLoss", ["both"], ["loss"]),
    ),
    ("x", "w"),
    ("loss",),
)
MODEL = NetModel(NET, Net("init", (), (), ("w",)), {}, {"x": "inputs"})


def state(**params):
    return State(
        {name: np.asarray(value, np.float32) for name, value in params.items()},
        (),
        {},
        np.int32(3),
        {},
    )


def diagnose(inputs, w, model=MODEL):
    return first_not_finite(
        model, state(w=w), Batch(np.asarray(inputs, np.float32)), jax.random.key(0)
    )


@pytest.mark.parametrize(
    "inputs, w, message",
    [
        ([1, 2, 3], [1, np.nan, 1], "parameter 'w' holds nan: 1 of 3 numbers, the first at [1]"),
        ([1, np.inf, 3], [1, 1, 1], "member of the batch 'inputs' holds inf: 1 of 3 numbers, the first at [1]"),
        ([1, 200, 300], [1, 1, 1],
         "blob 'grown', which op #1 Exp -> 'grown' in net 'tiny' writes, holds inf: 2 of 3 numbers, the first at [1]"),
        ([1, -1, 1], [1, 1, 1],
         "blob 'root', which op #2 Sqrt -> 'root' in net 'tiny' writes, holds nan: 1 of 3 numbers, the first at [1]"),
        ([1, 10, 2], [1, 1, 1],
         "all numbers of the model are finite; the greatest, 73421.6, is in blob 'w_grad'"),
    ],
)  # fmt: skip
def test_of_a_net_the_blob_and_its_operator_are_named(inputs, w, message):
    assert diagnose(inputs, w).startswith(message)


def test_an_operator_of_the_backward_net_is_named():
    """The slope of a square root at 0."""
    ops = (
        Op.of("Mul", ["x", "w"], ["scaled"]),
        Op.of("Sqrt", ["scaled"], ["root"]),
        Op.of("AveragedLoss", ["root"], ["loss"]),
    )
    said = diagnose([1, 0, 1], [1, 1, 1], replace(MODEL, net=replace(NET, ops=ops)))
    assert re.match(
        r"blob 'scaled_grad', which op #\d \w+ -> 'scaled_grad' in net 'tiny' writes, holds (inf|nan)",
        said,
    )


class Sequences(NamedTuple):
    inputs: np.ndarray
    targets: np.ndarray
    fresh: np.ndarray


def test_within_a_recurrent_network_the_step_is_named():
    """An LSTM whose recurrent weights are so great that their products overflow as soon as the state is not 0."""
    model = cells_model(
        CellsConfig(hidden=64), Signature(False, 3, 2, False, "cross_entropy", False)
    )
    params = jax.device_get(model.init(jax.random.key(0)))
    recurrent = next(name for name in params if name.endswith("gates_t_w"))
    params[recurrent] = np.full_like(params[recurrent], 3e38)
    batch = Sequences(np.full((5, 2, 3), 9, np.float32), np.zeros(2, np.int32), np.asarray(True))
    start = State(params, (), jax.device_get(model.initial_carry(2)), np.int32(0), {})
    said = first_not_finite(model, start, batch, jax.random.key(0))
    step = r"blob '(\S+gates_t)', which op #\d+ Sum -> '\1' in net '\S+' writes in step 1 of op #\d+ RecurrentNetwork"
    assert re.match(step, said), said


class Function:
    """A model that is no net."""

    def gradients(self, params, carry, batch, key):
        loss, gradients = jax.value_and_grad(
            lambda p: jnp.sum(jnp.sqrt(p["w"] * batch.inputs) + p["v"])
        )(params)
        return Outcome(loss, carry, gradients)


def test_of_a_function_the_gradient_is_named():
    batch = Batch(np.asarray([1, 0, 1], np.float32))
    said = first_not_finite(Function(), state(v=[1, 1, 1], w=[1, 1, 1]), batch, None)
    assert said == "the gradient of parameter 'w' holds nan: 1 of 3 numbers, the first at [1]"
