"""InferenceLSTM."""

from caffe2_cases import case, normal

CASES = []
for layers, directions, biases, batch_first in ((1, 1, 0, 0), (2, 1, 1, 1), (2, 2, 1, 0)):
    shape = (2, 3, 4)  # both [T, N, D] and [N, T, D]
    batch = shape[0] if batch_first else shape[1]
    inputs = {
        "x": normal(*shape),
        "h": normal(layers * directions, batch, 2),
        "c": normal(layers * directions, batch, 2),
    }
    for k in range(layers * directions):
        inputs[f"w{k}"] = normal(8, 4 if k < directions else 2 * directions, seed=k)
        inputs[f"u{k}"] = normal(8, 2, seed=k + 10)
        if biases:
            inputs[f"a{k}"] = normal(8, seed=k)
            inputs[f"b{k}"] = normal(8, seed=k + 10)
    CASES.append(
        case(
            "InferenceLSTM",
            inputs,
            ["y", "hh", "cc"],
            num_layers=layers,
            has_biases=biases,
            batch_first=batch_first,
            bidirectional=directions - 1,
        )
    )
