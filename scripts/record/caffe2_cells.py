"""Records what Caffe2's recurrent cells compute on random weights, as golden data for tests/interop.

    python scripts/record/caffe2_cells.py     (an environment with the real Caffe2, such as Python 3.8 with torch 1.8.1;
                                               writes tests/golden/caffe2_cells.npz, in a few seconds)

A name is `case|blobs|<blob>` for a parameter, `case|in|<name>` for the input and the initial states, and
`case|out|<name>` for the hidden states of all steps and the last states.
"""

from pathlib import Path

import numpy as np
from caffe2.python import gru_cell, model_helper, rnn_cell, workspace

STEPS, BATCH, INPUT, HIDDEN = 4, 3, 3, 2
GOLDEN = Path(__file__).parents[2] / "tests" / "golden"

CASES = {
    "rnn_tanh": (rnn_cell.BasicRNN, 1, 1, {"activation": "tanh"}),
    "rnn_relu": (rnn_cell.BasicRNN, 1, 1, {"activation": "relu"}),
    "lstm": (rnn_cell.LSTM, 2, 1, {}),
    "lstm_forget": (rnn_cell.LSTM, 2, 1, {"forget_bias": 1.5}),
    "lstm_stack": (rnn_cell.LSTM, 2, 3, {}),
    "gru": (gru_cell.GRU, 1, 1, {"linear_before_reset": True}),
    "gru_before_product": (gru_cell.GRU, 1, 1, {"linear_before_reset": False}),
}


def record(seed, make, states, layers, settings):
    """The arrays of one case, by `part|name`."""
    random = np.random.RandomState(seed)
    workspace.ResetWorkspace()
    model = model_helper.ModelHelper(name="net")
    names = [f"{letter}{layer}" for layer in range(layers) for letter in "hc"[:states]]
    blobs = model.net.AddExternalInputs("x", *names)
    sizes = HIDDEN if layers == 1 else [HIDDEN] * layers
    results = make(model, blobs[0], None, tuple(blobs[1:]), INPUT, sizes, "cell", **settings)
    stored = {"in|x": random.standard_normal((STEPS, BATCH, INPUT)).astype(np.float32)}
    for name in names:
        stored["in|" + name] = random.standard_normal((1, BATCH, HIDDEN)).astype(np.float32)
    for key, value in stored.items():
        workspace.FeedBlob(key[3:], value)
    workspace.RunNetOnce(model.param_init_net)
    for parameter in model.params:
        name = str(parameter)
        value = random.standard_normal(workspace.FetchBlob(name).shape).astype(np.float32)
        workspace.FeedBlob(name, value)
        stored["blobs|" + name] = value
    workspace.RunNetOnce(model.net)
    for name, blob in zip(("h_all", "h_last", "c_all", "c_last"), results):
        stored["out|" + name] = workspace.FetchBlob(str(blob))
    return stored


def main():
    arrays = {}
    for seed, (case, settings) in enumerate(CASES.items()):
        recorded = record(seed, *settings)
        arrays.update({f"{case}|{name}": value for name, value in recorded.items()})
    path = GOLDEN / "caffe2_cells.npz"
    np.savez_compressed(str(path), **arrays)
    print(path.name, len(arrays), "arrays", path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
