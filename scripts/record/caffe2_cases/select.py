"""Choosing by booleans, integers and bits, and checks for NaN."""

import numpy as np

from caffe2_cases import case, f32, flags, i32, i64, normal

A, B = normal(2, 3), normal(2, 3, seed=1)
MASK = flags(1, 0, 0, 0, 1, 1).reshape(2, 3)
WORDS = np.array([b"a", b"bc"]), np.array([b"d", b"e"])
HOLES = f32(1, np.nan, np.inf, -2)
CASES = [
    case("Where", {"c": MASK, "x": A, "y": B}, ["out"]),
    case("Where", {"c": flags(1, 0), "x": A, "y": B}, ["out"], broadcast_on_rows=1),
    case("Where", {"c": flags(1, 0), "x": i32(1, 2), "y": i32(3, 4)}, ["out"]),
    case("Where", {"c": flags(1, 0), "x": WORDS[0], "y": WORDS[1]}, ["out"]),
    case("Conditional", {"c": flags(1, 0), "x": A, "y": B}, ["out"]),
    case("Conditional", {"c": flags(0, 1), "x": i64(1, 2), "y": i64(3, 4)}, ["out"]),
    case("Xor", {"a": flags(1, 0, 1), "b": flags(1, 1, 0)}, ["out"]),
    case("Xor", {"a": MASK, "b": flags(1, 0)}, ["out"], broadcast=1, axis=0),
    case("Mod", {"x": i64(5, -5, 7, -7, 6, 0)}, ["out"], divisor=3),
    case("Mod", {"x": i64(5, -5, 7, -7, 6, 0)}, ["out"], divisor=3, sign_follow_divisor=1),
    case("Mod", {"x": i32(5, -5, 7, -7)}, ["out"], divisor=-3),
    case("Mod", {"x": i32(5, -5, 7, -7)}, ["out"], divisor=-3, sign_follow_divisor=1),
    case("IsNaN", {"x": HOLES}, ["out"]),
    case("ReplaceNaN", {"x": HOLES}, ["out"]),
    case("ReplaceNaN", {"x": HOLES.astype("f8")}, ["out"], value=0.5),
    case("NanCheck", {"x": A}, ["out"], gradient=True),
    case("NanCheck", {"x": A, "y": HOLES}, ["out"]),
    case("EnforceFinite", {"x": A}, []),
]
for type in ("BitwiseAnd", "BitwiseOr", "BitwiseXor"):
    CASES += [
        case(type, {"a": i32(6, 5, -3), "b": i32(3, -1, 8)}, ["out"]),
        case(
            type, {"a": i64(6, 5, 1, 2).reshape(2, 2), "b": i64(3, 7)}, ["out"], broadcast=1, axis=0
        ),
        case(type, {"a": flags(1, 0, 1), "b": flags(1, 1, 0)}, ["out"]),
    ]
