"""Outputs, final states and all gradients equal those that torch recorded, over the whole grid of structures."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrnn import nn

pytestmark = pytest.mark.usefixtures("little_compilation")

FUNCTIONS = {
    "rnn_tanh": nn.functional.rnn,
    "rnn_relu": lambda *args, **kwargs: nn.functional.rnn(*args, nonlinearity="relu", **kwargs),
    "lstm": nn.functional.lstm,
    "lstm_proj": nn.functional.lstm,
    "gru": nn.functional.gru,
}
GRID = [
    "-".join(map(str, case))
    for case in itertools.product(FUNCTIONS, (1, 3), ("uni", "bi"), ("bias", "nobias"))
]


def case_inputs(recording, case):
    file = recording(f"torch_{case.split('-')[0].split('_')[0]}.npz")
    inputs = file.get(case, "in")
    x = inputs.pop("x")
    states = tuple(inputs.pop(name) for name in "hc" if name in inputs)
    seeds = tuple(
        inputs.pop(f"seed_{name}") for name in ("output", "h", "c") if f"seed_{name}" in inputs
    )
    return file, inputs, x, states, seeds


def results(run, params, x, states, seeds):
    """Everything torch recorded of a run, from `run(params, x, hx) -> (output, states)`."""

    def loss(params, x, states):
        output, last = run(params, x, states if len(states) == 2 else states[0])
        last = last if isinstance(last, tuple) else (last,)
        total = sum(jnp.sum(a * w) for a, w in zip((output, *last), seeds, strict=True))
        return total, (output, last)

    (_, (output, last)), (d_params, d_x, d_states) = jax.value_and_grad(
        loss, (0, 1, 2), has_aux=True
    )(params, x, states)
    return {
        "output": output,
        **{f"last_{name}": state for name, state in zip("hc", last)},
        "grad_x": d_x,
        **{f"grad_{name}": d for name, d in zip("hc", d_states)},
        **{f"grad_{name}": d for name, d in d_params.items()},
    }


def compare(actual, recorded, tolerance):
    assert actual.keys() == recorded.keys()
    for name, expected in recorded.items():
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(
            np.asarray(actual[name]), expected, rtol=0, atol=tolerance * scale, err_msg=name
        )


@pytest.mark.sample("rnn_relu-1-uni-nobias")
@pytest.mark.parametrize("case", GRID)
def test_float64_full_and_packed(case, recording, x64):
    file, params, x, states, seeds = case_inputs(recording, case)
    params, x, states, seeds = jax.tree.map(
        lambda leaf: jnp.asarray(leaf, jnp.float64), (params, x, states, seeds)
    )
    function = FUNCTIONS[case.split("-")[0]]

    def packed(params, x, hx, lengths):
        output, last = function(
            params, nn.pack_padded_sequence(x, lengths, enforce_sorted=False), hx
        )
        return nn.pad_packed_sequence(output)[0], last

    @jax.jit
    def all_runs(params, x, states, lengths):
        sequence = nn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return {
            "full": results(function, params, x, states, seeds),
            "packed": results(lambda p, a, s: packed(p, a, s, lengths), params, x, states, seeds),
            "rows": function(params, sequence, states if len(states) == 2 else states[0])[0].data,
        }

    actual = all_runs(params, x, states, jnp.array(file.facts["lengths"]))
    full, ragged = file.get(case, "full"), file.get(case, "ragged")
    rows = ragged.pop("packed")
    compare(actual["full"], full, 1e-10)
    compare(actual["packed"], ragged, 1e-10)
    np.testing.assert_allclose(actual["rows"][: len(rows)], rows, rtol=0, atol=1e-10)
    assert not actual["rows"][len(rows) :].any()


@pytest.mark.sample("rnn_tanh-1-uni-bias")
@pytest.mark.parametrize("case", GRID)
def test_float32_full_and_ragged_batch_first(case, recording):
    file, params, x, states, seeds = case_inputs(recording, case)
    seeds = (np.swapaxes(seeds[0], 0, 1), *seeds[1:])
    function = FUNCTIONS[case.split("-")[0]]

    @jax.jit
    def all_runs(params, x, states, lengths):
        def run(params, x, hx, lengths=None):
            return function(params, x, hx, lengths=lengths, batch_first=True)

        return {
            "full": results(run, params, x, states, seeds),
            "ragged": results(lambda p, a, s: run(p, a, s, lengths), params, x, states, seeds),
        }

    actual = all_runs(params, np.swapaxes(x, 0, 1), states, jnp.array(file.facts["lengths"]))
    for name, run in actual.items():
        recorded = file.get(case, name)
        recorded.pop("packed", None)
        recorded |= {turned: np.swapaxes(recorded[turned], 0, 1) for turned in ("output", "grad_x")}
        compare(run, recorded, 1e-5)
