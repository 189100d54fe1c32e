"""LSTMUnit and GRUUnit."""

from caffe2_cases import case, i32, normal

H, C, G4, G3 = normal(1, 3, 2), normal(1, 3, 2, seed=1), normal(1, 3, 8), normal(1, 3, 6)
LSTM = {"h": H, "c": C, "gates": G4}
GRU = {"h": H, "gates": G3}
CASES = []
for drop in (0, 1):
    for step in (0, 2):
        times = {"lengths": i32(1, 3, 0), "t": i32(step)}
        CASES.append(
            case(
                "LSTMUnit",
                dict(LSTM, **times),
                ["hh", "cc"],
                gradient=["hh", "cc"],
                drop_states=drop,
                forget_bias=0.5,
            )
        )
        CASES.append(case("GRUUnit", dict(GRU, **times), ["hh"], gradient=True, drop_states=drop))
CASES += [
    case("LSTMUnit", dict(LSTM, t=i32(4)), ["hh", "cc"], gradient=["hh", "cc"], sequence_lengths=0),
    case(
        "LSTMUnit", dict(LSTM, lengths=i32(3, 3, 3), t=i32(1)), ["hh", "cc"], gradient=["hh", "cc"]
    ),
    case(
        "LSTMUnit",
        {"h": 50 * H, "c": 50 * C, "gates": 50 * G4, "t": i32(0)},
        ["hh", "cc"],
        sequence_lengths=0,
    ),
    case("GRUUnit", dict(GRU, t=i32(4)), ["hh"], gradient=True, sequence_lengths=0),
]
